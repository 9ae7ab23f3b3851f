// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: mem, os, control, domain-ivshmem, domain-xen, sockets.
//!
//! `tombolod`: the broker of a host ([`host`]), of the programs of one kernel or account ([`endpoint`]), and of domains of
//! Xen's ([`xen`]). `spec/7-broker.md` is what they keep, `docs/guide/broker.md` how they are used.
#![forbid(unsafe_code)]

pub mod config;
pub mod discard;
pub mod endpoint;
pub mod fd_passing;
pub mod host;
pub mod log;
mod panics;
mod sd_notify;
mod startup;
pub mod xen;
