// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The broker of the programs of one kernel, or of one account of a host.
//!
//! It runs in a virtual machine, and on a host for each account. It has devices, hears from the host's broker which
//! links there are and what is allowed on them ([`host_session`]). It agrees with the broker at the other end of each link
//! on connections ([`peer_session`]), and gives programs the windows of what was agreed ([`program`]). What it keeps is
//! `spec/7-broker.md` and `spec/4-domain-vm.md`.
//!
//! One thread hears of everything ([`broker`]). All that a peer's broker can make it keep is bounded, and each message
//! is decoded once, by `tombolo-control`. The devices are behind [`devices`]: nothing else here knows what they are.

pub mod broker;
pub mod connections;
pub mod devices;
mod draining;
mod finding;
pub mod host_session;
mod link;
pub mod module;
mod owner;
pub mod peer_session;
pub mod program;
pub mod run;
mod whereabouts;
