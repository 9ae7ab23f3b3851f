// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The broker of the programs of one kernel, or of one account of a host.
//!
//! It runs in a virtual machine, and on a host for each account. It has devices, and the host's broker tells it which
//! links there are and what is allowed on them ([`host_session`]). It agrees with the broker at the other end of each
//! link on connections ([`peer_session`]), and gives programs the windows of these ([`program`]). It implements
//! `spec/7-broker.md` and `spec/4-domain-vm.md`.
//!
//! One thread handles all events ([`broker`]). All that a peer's broker can make it keep is bounded, and each message
//! is decoded once, by `tombolo-control`. The devices are behind [`devices`]: no other module here depends on their
//! kind.

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
