// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: mem, os, control, domain-ivshmem, domain-xen, sockets.
//!
//! `tombolod`: the broker of a host ([`host`]), of the programs of one kernel or account ([`endpoint`]), and of Xen
//! domains ([`xen`]). They implement `spec/7-broker.md`; `docs/guide/broker.md` describes how to use them.
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
