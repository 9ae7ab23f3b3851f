// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares what a connection has moved so far with the cost of joining it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use crate::{direction::Direction, proof::ENOUGH};

/// No direction yet.
const NEITHER: u8 = 2;
/// Number of bytes after which a connection is worth a try, where its service has credit.
const PROMISING: u64 = 16 << 10;
/// Number of turns after which it is, too: two requests with answers.
const PROMISING_TURNS: u64 = 4;
/// Number of turns, and of bytes, after which a join has paid, or would have. TCP takes as long for either as both
/// endpoints take to join: on a Zen 4 about 1 ms.
const PAID_TURNS: u64 = 128;
const PAID: u64 = 2 << 20;

/// How a connection's two directions alternate, and which of the two thresholds it has passed.
#[derive(Debug)]
pub(crate) struct Worth {
    /// Number of calls that went in another direction than the one before: a read after a write, a write after a read.
    /// Counted until it has paid.
    turns: AtomicU64,
    last: AtomicU8,
    /// Whether the peer is searched for.
    is_sought: AtomicBool,
    has_paid: AtomicBool,
}

impl Default for Worth {
    fn default() -> Self {
        Self {
            turns: AtomicU64::new(0),
            last: AtomicU8::new(NEITHER),
            is_sought: AtomicBool::new(false),
            has_paid: AtomicBool::new(false),
        }
    }
}

impl Worth {
    /// Returns the state for the endpoint that takes the place of this one.
    pub(super) fn begin_anew(&self) -> Self {
        Self {
            turns: AtomicU64::new(self.turns.load(Ordering::Relaxed)),
            last: AtomicU8::new(NEITHER),
            is_sought: AtomicBool::new(self.is_sought()),
            has_paid: AtomicBool::new(self.has_paid()),
        }
    }

    /// Counts a call that moved bytes in this direction.
    #[inline]
    pub fn count_turn(&self, direction: Direction) {
        let turn = direction as u8;
        // So two threads that have a direction each stop writing here once it has paid.
        if !self.has_paid() && self.last.load(Ordering::Relaxed) != turn {
            self.last.store(turn, Ordering::Relaxed);
            self.turns.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns whether enough has passed to try, with so much `counted` in the two directions: `after` bytes, or two
    /// requests with answers, and as much as a proof needs.
    pub fn is_promising(&self, counted: [u64; 2], after: Option<u64>) -> bool {
        let [sent, received] = counted;
        let turned = self.turns.load(Ordering::Relaxed) >= PROMISING_TURNS && sent.max(received) >= ENOUGH.into();
        (sent + received >= after.unwrap_or(PROMISING) || turned) && sent + received >= ENOUGH.into()
    }

    /// Returns whether it has moved as much as pays for a join, now or earlier.
    #[inline]
    pub fn has_paid(&self) -> bool {
        self.has_paid.load(Ordering::Relaxed)
    }

    /// Takes the bytes `counted` in the two directions. Returns whether they pay for a join, and did not before.
    pub fn pays_now(&self, counted: [u64; 2]) -> bool {
        let pays = counted.iter().sum::<u64>() >= PAID || self.turns.load(Ordering::Relaxed) >= PAID_TURNS;
        pays && !self.has_paid.swap(true, Ordering::Relaxed)
    }

    /// Returns whether the peer is searched for.
    pub fn is_sought(&self) -> bool {
        self.is_sought.load(Ordering::Relaxed)
    }

    /// Begins the search for the peer.
    pub fn set_sought(&self) {
        self.is_sought.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turned(turns: u64) -> Worth {
        let worth = Worth::default();
        for turn in 0..turns {
            let direction = Direction::BOTH[turn as usize % 2];
            (0..3).for_each(|_| worth.count_turn(direction));
        }
        worth
    }

    #[test]
    fn two_requests_with_answers_or_so_many_bytes_are_worth_a_try() {
        assert!(!turned(3).is_promising([100, 100], None) && turned(4).is_promising([100, 100], None));
        assert!(!turned(9).is_promising([8, 7], None), "too little for a proof");
        assert!(!turned(1).is_promising([16383, 0], None) && turned(1).is_promising([8192, 8192], None));
        assert!(turned(0).is_promising([16, 0], Some(0)) && !turned(0).is_promising([15, 0], Some(0)));
        assert!(!turned(1).is_promising([1 << 20, 0], Some(2 << 20)));
    }

    #[test]
    fn join_has_paid_once_after_so_many_turns_or_bytes() {
        let worth = turned(PAID_TURNS - 1);
        assert!(!worth.pays_now([PAID / 2, PAID / 2 - 1]) && !worth.has_paid());
        worth.count_turn(Direction::BOTH[1]);
        assert!(worth.pays_now([0, 0]) && worth.has_paid() && !worth.pays_now([PAID, PAID]));
        assert!(turned(1).pays_now([PAID, 0]));
        assert!(worth.begin_anew().has_paid() && !turned(1).begin_anew().has_paid());
    }
}
