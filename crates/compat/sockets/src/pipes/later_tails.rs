// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What those look at who take no turn, in rings after the first (S-20).

use tombolo_mem::{MappedPeerWord, PeerWord};

/// Where the sender says how far it is, in rings after the first.
#[derive(Debug, Default)]
pub(super) struct LaterTails {
    /// In the ring where it was found last, if that is not the first.
    now: Option<MappedPeerWord>,
    /// In the one that this end is ready for, to which it goes when it likes.
    next: Option<MappedPeerWord>,
}

impl LaterTails {
    /// This end is about to be ready for another ring.
    pub fn expect(&mut self, tail: MappedPeerWord) {
        self.turn();
        self.next = Some(tail);
    }

    /// The sender was found in the next ring.
    pub fn turn(&mut self) {
        if let Some(next) = self.next.take() {
            self.now = Some(next);
        }
    }

    /// The position after the last byte, where `first` is the word of the first ring.
    pub fn find_last(&self, first: &MappedPeerWord) -> u64 {
        let now = self.now.as_ref().unwrap_or(first).load_acquire().hint();
        let next = self.next.as_ref().map_or(now, |next| next.load_acquire().hint());
        // Before the sender goes there nothing is said in it.
        if next.wrapping_sub(now).cast_signed() > 0 { next } else { now }
    }
}
