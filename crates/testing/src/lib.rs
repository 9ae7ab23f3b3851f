// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer testing. Uses: domain, layout, mem.
//!
//! Test support that several crates share. [`harsh`] is a hypervisor in one process that has the difficult properties
//! of all hypervisors at once. [`mod@conformance`] is the suite that every backend must pass, [`waits`] runs waits of
//! hostile tests in threads. No crate that ships depends on this one.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod harsh;
pub mod waits;
