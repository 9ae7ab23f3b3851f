// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether this process has been copied by fork: then another one may have mapped what this one lets go of (V-6).

use std::sync::atomic::{AtomicU64, Ordering};

/// How often that was about to happen, in this process and in those that it comes from.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// The process is about to be copied.
pub(crate) fn note_fork() {
    FORKS.fetch_add(1, Ordering::SeqCst);
}

/// The moment in which something was mapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapping(u64);

impl Mapping {
    pub(crate) fn now() -> Self {
        Self(FORKS.load(Ordering::SeqCst))
    }

    /// Whether a copy of this process may have it mapped too. What nobody can tell the end of is never used for anything else, as
    /// long as the call lasts.
    pub(crate) fn may_be_shared(self) -> bool {
        FORKS.load(Ordering::SeqCst) != self.0
    }
}
