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
mod pace;
pub mod peer;
pub mod program;
pub mod run;

use std::{
    sync::{Mutex, PoisonError},
    time::Instant,
};

use pace::Pace;

/// A line for the administrator, on standard error: the journal adds the time. Some of it may be a stranger's words, so it is without
/// what a terminal would act on, and there are so many in a time.
pub fn log(line: &str) {
    use std::io::Write;
    static PACE: Mutex<Option<Pace>> = Mutex::new(None);
    let mut pace = PACE.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    let Some(left_out) = pace.get_or_insert_with(|| Pace::new(now)).take(now) else { return };
    if left_out != 0 {
        let _ = writeln!(
            std::io::stderr(),
            "tombolod: {left_out} lines more were left out, as there were too many at once"
        );
    }
    let line = line.replace(char::is_control, "?");
    let _ = writeln!(std::io::stderr(), "tombolod: {line}");
}
