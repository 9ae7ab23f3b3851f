// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cases. Each file has the host halves and the guest halves of its cases side by side.

mod abuse;
mod boards;
mod build;
mod channels;
mod churn;
mod death;
mod doorbells;
mod faults;
mod frames;
pub mod host_sockets;
mod hostile;
mod life;
mod lifetime;
mod links;
mod looking;
mod mapping;
pub mod migration;
pub mod net;
mod net_ends;
mod net_load;
mod net_three;
mod network;
mod rage;
pub mod sockets;
mod stress;
mod unplug;
mod vchan;

use crate::rig::Rig;
use tombolo_e2e::error::{Error, Result};
use tombolo_e2e::runner;
pub use tombolo_e2e::runner::{Half, Verdict};

/// The host half of a case.
pub type Case = runner::Case<Rig>;

/// Cheap cases first; those that leave a guest in an odd state last.
const CASES: [&[Case]; 26] = [
    build::CASES,
    lifetime::CASES,
    mapping::CASES,
    doorbells::CASES,
    death::CASES,
    abuse::CASES,
    hostile::CASES,
    churn::CASES,
    unplug::CASES,
    faults::CASES,
    links::CASES,
    channels::CASES,
    net::CASES,
    net::ENGINE_CASES,
    frames::CASES,
    net_load::CASES,
    looking::CASES,
    vchan::CASES,
    life::CASES,
    rage::CASES,
    network::CASES,
    sockets::CASES,
    stress::CASES,
    host_sockets::CASES,
    migration::CASES,
    boards::CASES,
];
const HALVES: [&[Half]; 19] = [
    lifetime::HALVES,
    mapping::HALVES,
    doorbells::HALVES,
    death::HALVES,
    abuse::HALVES,
    hostile::HALVES,
    churn::HALVES,
    unplug::HALVES,
    links::HALVES,
    channels::HALVES,
    net::HALVES,
    frames::HALVES,
    net_load::HALVES,
    net_three::HALVES,
    crate::demo::HALVES,
    life::HALVES,
    rage::HALVES,
    sockets::HALVES,
    migration::HALVES,
];

/// Cases that only the long form runs: they need more of this machine, or more time, than there may be to spare.
const LONG_CASES: [&[Case]; 6] = [
    rage::LONG_CASES,
    network::LONG_CASES,
    net::LONG_CASES,
    net_ends::LONG_CASES,
    net_three::LONG_CASES,
    boards::LONG_CASES,
];

/// Returns the cases that test the kernel module alone, in the order in which they run. A kernel with its own checks is
/// needed for these only.
pub fn of_module() -> impl Iterator<Item = &'static Case> {
    CASES.into_iter().skip(1).take(9).chain([net::ENGINE_CASES, frames::CASES, net_load::CASES]).flatten()
}

/// Returns whether this is the long form.
fn long() -> bool {
    std::env::var_os("TOMBOLO_LONG").is_some()
}

/// Returns all cases in the order in which they run.
pub fn all() -> impl Iterator<Item = &'static Case> {
    CASES.into_iter().chain(LONG_CASES.into_iter().filter(|_| long())).flatten()
}

/// Runs a guest half.
pub fn guest_half(name: &str, args: &[String]) -> Result<()> {
    let half = HALVES.into_iter().flatten().find(|half| half.0 == name);
    half.ok_or_else(|| Error::new(format!("no guest half {name}")))?.1(args)
}
