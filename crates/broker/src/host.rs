// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The broker of a host. It serves QEMU's ivshmem devices and gives pairs of virtual machines memory and doorbells
//! through QMP. It reports the liveness of domains, and permits only what a rule allows.
//!
//! One thread handles all events and keeps the broker state ([`broker`]). What follows from the state is carried out
//! step by step. The descriptor store holds what must outlive the process ([`descriptor_store`]).

pub mod accounts;
mod async_fd;
pub mod broker;
pub mod control_socket;
pub mod descriptor_store;
mod domains;
mod doorbells;
pub mod event;
pub mod guard;
pub mod guest;
mod guest_view;
pub mod ivshmem;
mod journal;
mod leaving;
mod link_memory;
pub mod mapped;
pub mod memory;
pub mod memory_jobs;
mod memory_rate;
mod migration;
pub mod notifier;
mod overview;
pub mod paths;
mod programs;
pub mod qemu;
pub mod qmp;
pub mod run;
mod schedule;
mod share;
pub mod snippet;
pub mod state;
mod tasks;
pub mod units;
mod vm;
