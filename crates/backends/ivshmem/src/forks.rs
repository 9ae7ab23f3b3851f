// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Records whether this process has been copied by fork. If so, another process may have mapped memory that this one
//! lets go of (V-6).

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of times that a fork was about to happen, in this process and in its ancestors.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Records that the process is about to be copied.
pub(crate) fn note_fork() {
    FORKS.fetch_add(1, Ordering::SeqCst);
}

/// Moment at which something was mapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapping(u64);

impl Mapping {
    pub(crate) fn now() -> Self {
        Self(FORKS.load(Ordering::SeqCst))
    }

    /// Returns whether a copy of this process may also have it mapped. Nobody can tell when the copy unmaps such
    /// memory, so it is never reused as long as the connection lasts.
    pub(crate) fn may_be_shared(self) -> bool {
        FORKS.load(Ordering::SeqCst) != self.0
    }
}
