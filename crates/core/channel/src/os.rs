// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The few kernel calls that a channel makes.

use std::sync::LazyLock;

use rustix::thread::{MembarrierCommand, membarrier};

/// Returns whether this process is registered for the kernel's global expedited barrier, so that its CPUs take part
/// when a peer on the same kernel issues one.
pub(crate) fn membarrier_registered() -> bool {
    static REGISTERED: LazyLock<bool> =
        LazyLock::new(|| membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok());
    *REGISTERED
}

/// Makes every CPU that runs a registered process pass a full fence. Returns whether it did: a filter installed
/// after this process registered may forbid it.
pub(crate) fn barrier() -> bool {
    membarrier(MembarrierCommand::GlobalExpedited).is_ok() || membarrier(MembarrierCommand::Global).is_ok()
}

/// Returns the CPU that this thread runs on now.
pub(crate) fn current_cpu() -> u32 {
    rustix::thread::sched_getcpu() as u32
}

/// Returns a number that no other channel of this host is likely to have, never 0 (M-3).
pub(crate) fn epoch() -> u64 {
    let mut bytes = [0; 8];
    // Once the system is up, the kernel returns all 8 bytes at once and without waiting.
    while !matches!(rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()), Ok(8)) {}
    u64::from_ne_bytes(bytes).max(1)
}
