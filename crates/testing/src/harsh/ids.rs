// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How the hypervisor names what it holds.

use std::sync::Arc;

/// Who owns what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Process {
    pub(super) domain: Arc<str>,
    pub(super) number: u64,
}

/// Names an end for as long as the hypervisor lives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct EndId(pub(super) u64);

/// The number by which memory is passed. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Reference(pub(super) u64);
