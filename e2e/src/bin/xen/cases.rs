// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cases: what programs do in two domains, as their users would start them.

mod death;
mod doctor;
mod faults;
mod names;
mod neighbours;
mod orphans;
pub mod shown;
mod sockets;
mod sockets_forks;
mod suite;
mod transfer;
mod vchan;

use crate::rig::Rig;
use tombolo_e2e::runner;
pub use tombolo_e2e::runner::Verdict;
pub use tombolo_e2e::xen::host::Kind;

/// A case.
pub type Case = runner::Case<Rig>;

/// Returns all cases in the order in which they run. Cases with one kind of domains are together, because domains of
/// another kind have to boot first. Cases that leave the domains odd come last.
pub fn all() -> impl Iterator<Item = &'static Case> {
    let (deaths, more) = if long() {
        (death::LONG, [transfer::PVH, suite::PVH_LONG, orphans::PVH_LONG, vchan::PVH])
    } else {
        Default::default()
    };
    let pv = [transfer::PV, doctor::PV, shown::PV, suite::PV, vchan::PV, names::PV, sockets::PV, sockets_forks::PV];
    let pv = pv.into_iter().chain([death::CASES, orphans::PV, deaths]);
    let all = pv.chain([suite::PVH]).chain(more).chain([faults::CASES]).flatten();
    all.filter(|case| long() || !ONLY_LONG.contains(&case.name))
}

/// Cases that take long under emulation, and whose like the short form runs too.
const ONLY_LONG: &[&str] = &[
    "pv_file_arrives_whole_from_dom0",
    "pv_conformance_of_a_domu_and_dom0",
    "pvh_conformance_of_two_domus",
    "senders_killed_under_load_take_nothing_back",
    "receivers_killed_under_load_are_told_to_one_sender",
    "caller_killed_at_any_step_of_connect_harms_no_listener",
    "vchan_between_two_ends_of_ours",
    "vchan_benchmark_measures_the_original_beside_ours",
    "vchan_proxies_join_tcp_clients_and_a_server_of_two_domains",
    "vchan_domain_that_is_destroyed_is_told_before_and_after_it_connects",
];

/// Returns whether there is time for long cases.
pub fn long() -> bool {
    std::env::var_os("TOMBOLO_LONG").is_some_and(|long| long == "1")
}
