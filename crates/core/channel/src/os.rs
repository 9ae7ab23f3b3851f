// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The few things a channel asks of the kernel.

use std::sync::LazyLock;

use rustix::thread::{MembarrierCommand, membarrier};

/// Whether this process is registered for the kernel's global expedited barrier, so that its CPUs take part when a peer
/// on the same kernel issues one.
pub(crate) fn membarrier_registered() -> bool {
    static REGISTERED: LazyLock<bool> =
        LazyLock::new(|| membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok());
    *REGISTERED
}

/// Makes every CPU that runs a registered process pass a full fence. Says whether it did: a filter installed
/// since this process registered may forbid it.
pub(crate) fn barrier() -> bool {
    membarrier(MembarrierCommand::GlobalExpedited).is_ok() || membarrier(MembarrierCommand::Global).is_ok()
}

/// The CPU that this thread runs on now.
pub(crate) fn current_cpu() -> u32 {
    rustix::thread::sched_getcpu() as u32
}

/// A number that no other channel of this host is likely to have, never 0 (M-3).
pub(crate) fn epoch() -> u64 {
    let mut bytes = [0; 8];
    // 8 bytes come whole and without waiting once the system is up.
    while !matches!(rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()), Ok(8)) {}
    u64::from_ne_bytes(bytes).max(1)
}
