// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the front has prepared and seen of a connection's readiness.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Whether the front can report readiness that the kernel does not know of, and what it has seen since it last looked.
#[derive(Debug, Default)]
pub struct Wiring {
    /// It has made its preparations.
    wired: AtomicBool,
    /// It watches the kernel's edges of this socket, and there was none since the last look.
    quiet: AtomicBool,
    /// Sends that found no room.
    stalls: AtomicU64,
}

impl Wiring {
    /// The front is ready for bytes that the kernel does not know of.
    pub fn set_wired(&self) {
        self.wired.store(true, Ordering::SeqCst);
    }

    /// Whether it is.
    #[inline]
    #[must_use]
    pub fn is_wired(&self) -> bool {
        self.wired.load(Ordering::SeqCst)
    }

    /// `false`: the front saw an edge of the socket. `true`: it watches for edges, and is about to look.
    #[inline]
    pub fn set_quiet(&self, quiet: bool) {
        self.quiet.store(quiet, Ordering::SeqCst);
    }

    #[inline]
    pub(super) fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::SeqCst)
    }

    /// Sends that found too little room so far: an edge of writability is due after each.
    #[inline]
    #[must_use]
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
    }

    /// A send found too little room.
    pub(crate) fn count_stall(&self) {
        self.stalls.fetch_add(1, Ordering::SeqCst);
    }
}
