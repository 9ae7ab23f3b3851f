// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The few things a channel asks of the kernel.

use std::sync::LazyLock;

use rustix::thread::{MembarrierCommand, membarrier};

/// Whether this process is registered for the kernel's global expedited barrier, so that its CPUs take part
/// when a peer on the same kernel issues one.
pub(crate) fn membarrier_registered() -> bool {
    static REGISTERED: LazyLock<bool> =
        LazyLock::new(|| membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok());
    *REGISTERED
}

/// Makes every CPU that runs a registered process pass a full fence. Cannot fail in a process that could register.
pub(crate) fn barrier() {
    if membarrier(MembarrierCommand::GlobalExpedited).is_err() {
        // A seccomp filter installed since: the slower command needs no registration, and a fence is better than none.
        let _ = membarrier(MembarrierCommand::Global);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

/// The CPU that this thread runs on now.
pub(crate) fn current_cpu() -> u32 {
    rustix::thread::sched_getcpu() as u32
}

/// M-3. A number that no other channel of this host is likely to have.
pub(crate) fn epoch() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // Each RandomState is keyed by the operating system's random numbers, and differs from the one before.
    RandomState::new().build_hasher().finish() | 1
}
