// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cases: what programs do in two domains, as their users would start them.

mod death;
mod faults;
mod suite;
mod transfer;

use crate::rig::Rig;
use tombolo_e2e::runner;
pub use tombolo_e2e::runner::Verdict;
pub use tombolo_e2e::xen::host::Kind;

/// A case.
pub type Case = runner::Case<Rig>;

/// Those of one kind of domains together: domains of another kind have to boot. What leaves them odd comes last.
const CASES: [&[Case]; 6] =
    [transfer::PV, suite::PV, death::CASES, transfer::PVH, suite::PVH, faults::CASES];

/// All cases in the order in which they run.
pub fn all() -> impl Iterator<Item = &'static Case> {
    CASES.into_iter().flatten()
}
