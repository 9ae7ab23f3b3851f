// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The broker of a host: it serves QEMU's ivshmem devices, gives pairs of virtual machines memory and doorbells through
//! QMP, says who lives, and lets nobody do what no rule allows.
//!
//! One thread hears of everything and keeps the broker state ([`broker`]); what follows from that is made true step by
//! step. What must outlive the process is with the descriptor store ([`descriptor_store`]).

pub mod accounts;
mod async_fd;
pub mod broker;
pub mod control_socket;
pub mod descriptor_store;
mod domains;
mod doorbells;
pub mod event;
pub mod eventfd;
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
