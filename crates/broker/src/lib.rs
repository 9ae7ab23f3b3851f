// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: mem, control, domain-ivshmem, domain-xen, broker-guest.
//!
//! `tombolod`, the broker of a host: it serves QEMU's ivshmem devices, gives pairs of virtual machines memory and
//! doorbells through QMP, says who lives, and lets nobody do what no rule allows. `spec/7-broker.md` is what it keeps,
//! `docs/guide/broker.md` how it is used.
//!
//! One thread hears of everything and keeps the book ([`broker`]); what follows from the book is made true step by step
//! ([`settle`]). What must outlive the process is with a holder ([`hold`]).
#![forbid(unsafe_code)]

pub mod answers;
pub mod broker;
pub mod chores;
pub mod config;
pub mod guard;
pub mod guest;
pub mod hold;
pub mod ivshmem;
pub mod keep;
pub mod lane;
pub mod local;
pub mod machine;
pub mod mapped;
pub mod memory;
pub mod notify;
mod pace;
pub mod passing;
pub mod qmp;
pub mod run;
pub mod settle;
pub mod snippet;
pub mod socket;
pub mod state;
pub mod units;
mod watch;
pub mod xen;

pub use tombolo_broker_guest::{log, log_of};
