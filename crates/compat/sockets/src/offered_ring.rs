// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hands a ring from the session over which it came to the connection that it is for (S-20).

use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

use tombolo_mem::PeerSegment;
use tombolo_os::lock::lock;

/// Ring that the peer offered, until it is looked at, and whether the peer has announced one in its segment.
#[derive(Debug, Default)]
pub(crate) struct OfferedRing {
    announced: AtomicBool,
    is_there: AtomicBool,
    ring: Mutex<Option<(u16, PeerSegment)>>,
}

impl OfferedRing {
    /// Stores a ring. Returns `false` if the last one was not looked at: a peer that keeps to the protocol offers one
    /// at a time (H-5).
    pub fn put(&self, generation: u16, segment: PeerSegment) -> bool {
        let mut ring = lock(&self.ring);
        if ring.is_some() {
            return false;
        }
        *ring = Some((generation, segment));
        drop(ring);
        // ORDER Release: pairs with the Acquire in `is_there`.
        self.is_there.store(true, Ordering::Release);
        true
    }

    /// Notes whether the peer has announced a ring that was not looked at.
    pub fn set_announced(&self, announced: bool) {
        self.announced.store(announced, Ordering::Relaxed);
    }

    /// Returns whether one was announced, or has come. To be called after a look in vain, and before a sleep.
    #[inline]
    pub fn is_expected(&self) -> bool {
        self.announced.load(Ordering::Relaxed) || self.is_there()
    }

    /// Returns whether there is one.
    #[inline]
    fn is_there(&self) -> bool {
        self.is_there.load(Ordering::Acquire)
    }

    /// Takes it, with its number.
    pub fn take_ring(&self) -> Option<(u16, PeerSegment)> {
        let ring = lock(&self.ring).take();
        self.is_there.store(false, Ordering::Relaxed);
        ring
    }
}
