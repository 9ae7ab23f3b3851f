// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: control, domain-ivshmem.
//!
//! The broker in a virtual machine. It owns the devices, hears from the host's broker which links there are and what is
//! allowed on them ([`host`]), agrees with the broker at the other end of each link on calls ([`peer`]), and gives
//! programs of its kernel the slices of what was agreed ([`program`]). What it keeps is `spec/7-broker.md` and
//! `spec/4-domain-vm.md`.
//!
//! One thread hears of everything ([`broker`]). All that a peer's broker can make it keep is bounded, and each message
//! is taken apart once, by `tombolo-control`. The devices are behind [`devices`]: nothing else here knows what they are.
#![forbid(unsafe_code)]

pub mod broker;
pub mod calls;
pub mod devices;
pub mod host;
mod link;
pub mod machine;
pub mod peer;
pub mod program;
pub mod run;

/// A line for the administrator, on standard error: the journal adds the time. Some of it may be a stranger's words, so it is without
/// what a terminal would act on.
pub fn log(line: &str) {
    use std::io::Write;
    let line = line.replace(char::is_control, "?");
    let _ = writeln!(std::io::stderr(), "tombolod: {line}");
}
