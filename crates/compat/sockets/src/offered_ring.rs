// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A ring on its way from the session over which it came to the connection that it is for (S-20).

use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

use tombolo_mem::PeerSegment;
use tombolo_os::lock::lock;

/// A ring that the peer offered, until it is looked at: that the peer says so in its segment, and what came of it.
#[derive(Debug, Default)]
pub(crate) struct OfferedRing {
    announced: AtomicBool,
    is_there: AtomicBool,
    ring: Mutex<Option<(u16, PeerSegment)>>,
}

impl OfferedRing {
    /// Puts a ring there. False if one is there that was not looked at: an honest peer offers one at a time (H-5).
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

    /// The peer says that it has offered one, and that was not looked at; or it was.
    pub fn set_announced(&self, announced: bool) {
        self.announced.store(announced, Ordering::Relaxed);
    }

    /// Whether one was announced, or has come: to be asked after a look in vain, and before a sleep.
    #[inline]
    pub fn is_expected(&self) -> bool {
        self.announced.load(Ordering::Relaxed) || self.is_there()
    }

    /// Whether there is one.
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
