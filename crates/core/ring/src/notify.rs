// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements the notifier's half of the wake protocol (R-12). The waiter's half is in `wait`.
//!
//! ```text
//! notifier                                    waiter
//! B1 publish the position (release)         A1 arm: own wait word := target
//! B2 fence                                  A2 fence
//! B3 load the peer's wait word              A3 re-check the peer's position; reached: go on
//! B4 armed, reached, not notified yet: ring     A4 block on the doorbell
//! ```
//!
//! The two fences are totally ordered. If B2 comes first, A3 sees the position and nobody sleeps. If A2 comes first, B3
//! sees the word of this sleep or of a later one, and notifies unless it did so before for that very target. The
//! notifier remembers the last target that it notified for in private memory, and never writes the waiter's word.
//! Positions only grow, so a target once reached stays reached, and no waiter sleeps on it again.

use tombolo_layout::{limits, words};
use tombolo_mem::{Mem, PeerWord};

/// Side that pays for the order of publishing and checking (R-13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FenceMode {
    /// Both sides issue a fence: works between any two domains.
    Fences,
    /// The waiter issues a barrier that reaches the notifier's CPU; the notifier only keeps the compiler in order.
    WaiterBarrier,
}

impl FenceMode {
    /// B2 on the notifier's side.
    #[inline]
    pub(crate) fn notifier_fence<M: Mem>(self) {
        match self {
            Self::Fences => M::fence(),
            Self::WaiterBarrier => M::light_fence(),
        }
    }
}

/// State of the notifier for the peer's waiter.
#[derive(Debug)]
pub(crate) struct Notifier<M: Mem> {
    want: M::PeerWord,
    /// Wait word of the last target that the peer was notified for.
    pub(crate) notified: u64,
    /// Whether a notification is due, which the owner of the doorbell sends.
    owed: bool,
    pub(crate) sent: u64,
    pub(crate) suppressed: u64,
}

impl<M: Mem> Notifier<M> {
    pub(crate) fn new(want: M::PeerWord, start: u64) -> Self {
        Self { want, notified: words::armed(start), owed: false, sent: 0, suppressed: 0 }
    }

    /// B3 and B4, after the caller published `position` and fenced.
    #[inline]
    pub(crate) fn check_peer(&mut self, position: u64) {
        // ORDER R-12: Relaxed; the caller's fence (B2) pairs with the waiter's (A2).
        let word = self.want.load_relaxed().hint();
        if word & 1 == 0 || word == self.notified {
            self.suppressed += 1;
        } else {
            self.look_closer(word, position);
        }
    }

    #[cold]
    fn look_closer(&mut self, word: u64, position: u64) {
        let beyond_last = (word.wrapping_sub(self.notified) as i64) > 0;
        if beyond_last && words::reached(word, position) {
            self.notified = word;
            self.owe();
        } else {
            self.suppressed += 1;
        }
    }

    /// Requests a notification whatever the peer's word says (R-16), after the caller published a state. The fence
    /// pairs with the waiter's (A2) in case the waiter drains this notification before its check: a doorbell need not
    /// order memory.
    pub(crate) fn owe_after_fence(&mut self, ordering: FenceMode) {
        ordering.notifier_fence::<M>();
        self.owe();
    }

    /// Takes over from a notifier that died at any step of this: forgets what it notified for, and requests a
    /// notification (R-26).
    pub(crate) fn restart(&mut self, position: u64, ordering: FenceMode) {
        // Precedes every live target: none is more than a ring away.
        self.notified = words::armed(position.wrapping_sub(limits::CAPACITY_MAX * 2));
        ordering.notifier_fence::<M>();
        self.check_peer(position);
        if !self.owed {
            self.owe();
        }
    }

    fn owe(&mut self) {
        self.owed = true;
        self.sent += 1;
    }

    #[inline]
    pub(crate) fn take_pending(&mut self) -> bool {
        let owed = self.owed;
        if owed {
            self.owed = false;
        }
        owed
    }
}
