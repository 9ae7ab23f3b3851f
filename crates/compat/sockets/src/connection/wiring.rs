// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State of a connection's readiness as the preloaded library keeps it: whether it can report it, and what it saw.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use crate::direction::Direction;

/// Whether the front can report readiness that the kernel does not know of, how its program waits for that, and what it
/// has seen since it last looked.
#[derive(Debug, Default)]
pub struct Wiring {
    waits: SeenWaits,
    /// Whether the front has made its preparations.
    wired: AtomicBool,
    /// Whether the front watches the kernel's edges of this socket, and saw none since the last look.
    quiet: AtomicBool,
    /// Number of sends that found no room.
    stalls: AtomicU64,
}

impl Wiring {
    /// Notes that the front is ready for bytes that the kernel does not know of.
    pub fn set_wired(&self) {
        self.wired.store(true, Ordering::SeqCst);
    }

    /// Returns whether the front is ready for these.
    #[inline]
    #[must_use]
    pub fn is_wired(&self) -> bool {
        self.wired.load(Ordering::SeqCst)
    }

    /// Returns how the program waits.
    #[must_use]
    pub fn waits(&self) -> &SeenWaits {
        &self.waits
    }

    /// Returns the wiring of the connection that takes this one's place.
    pub(super) fn begin_anew(&self) -> Self {
        Self { waits: self.waits.begin_anew(), ..Self::default() }
    }

    /// Notes that the front saw an edge of the socket (`false`), or that it watches for edges and is about to look
    /// (`true`).
    #[inline]
    pub fn set_quiet(&self, quiet: bool) {
        self.quiet.store(quiet, Ordering::SeqCst);
    }

    #[inline]
    pub(super) fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::SeqCst)
    }

    /// Returns the number of sends that found too little room so far: an edge of writability is due after each.
    #[inline]
    #[must_use]
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
    }

    /// Counts a send that found too little room.
    pub(crate) fn count_stall(&self) {
        self.stalls.fetch_add(1, Ordering::SeqCst);
    }
}

/// Calls by which the program was seen to wait for a connection (ADR 0096). A program that waits by calls that the
/// front does not see learns nothing of what is in a pipe. So each direction stays on TCP until a wait for it was seen.
#[derive(Debug, Default)]
pub struct SeenWaits {
    /// One bit for each direction: the program asks the front by calls about readiness. Another for each: calls that
    /// move bytes wait for them. And `UNSEEN`, with which calls of the second kind that wait for bytes show nothing.
    seen: AtomicU8,
}

/// Bit in `seen`: there are waits that the front does not see.
const UNSEEN: u8 = 1 << 4;

impl SeenWaits {
    fn asked(direction: Direction) -> u8 {
        1 << direction as u8
    }

    fn blocked(direction: Direction) -> u8 {
        4 << direction as u8
    }

    fn begin_anew(&self) -> Self {
        Self { seen: AtomicU8::new(self.seen.load(Ordering::Relaxed)) }
    }

    fn has(&self, bits: u8) -> bool {
        // ORDER Relaxed: each thread acts on what it has seen itself, or later.
        self.seen.load(Ordering::Relaxed) & bits != 0
    }

    fn note_bits(&self, bits: u8) {
        if !self.has(bits) {
            self.seen.fetch_or(bits, Ordering::Relaxed);
        }
    }

    /// Notes that the program asked the front whether this direction is ready, or to be told when it is.
    #[inline]
    pub fn note_asked(&self, direction: Direction) {
        self.note_bits(Self::asked(direction));
    }

    /// Does the same for both directions.
    pub fn note_both_asked(&self) {
        Direction::BOTH.into_iter().for_each(|direction| self.note_asked(direction));
    }

    /// Notes that a call that moves bytes in this direction waits until it can.
    pub fn note_blocked(&self, direction: Direction) {
        self.note_bits(Self::blocked(direction));
    }

    /// Notes that the program may wait for bytes by calls that the front does not see. Then a call that blocks for
    /// bytes shows nothing.
    pub fn note_unseen(&self) {
        self.note_bits(UNSEEN);
    }

    /// Notes that a call found nothing, or no room, and did not wait. Returns whether that contradicts all waits seen
    /// so far, which are then forgotten: the program waits by a call that the front does not see.
    #[must_use]
    pub fn note_refused(&self, direction: Direction) -> bool {
        let blocked = Self::blocked(direction);
        if self.is_asked(direction) || !self.has(blocked) {
            return false;
        }
        self.seen.fetch_and(!blocked, Ordering::Relaxed) & blocked != 0
    }

    /// Returns whether the program was seen to ask the front about this direction.
    #[inline]
    #[must_use]
    pub fn is_asked(&self, direction: Direction) -> bool {
        self.has(Self::asked(direction))
    }

    /// Returns whether a wait for this direction was seen.
    #[inline]
    #[must_use]
    pub fn is_seen(&self, direction: Direction) -> bool {
        let is_blocked = || self.has(Self::blocked(direction)) && (direction == Direction::Out || !self.has(UNSEEN));
        self.is_asked(direction) || is_blocked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_of_a_call_counts_until_another_call_does_not_wait() {
        let waits = SeenWaits::default();
        for direction in Direction::BOTH {
            assert!(!waits.is_seen(direction) && !waits.note_refused(direction));
            waits.note_blocked(direction);
            assert!(waits.is_seen(direction) && !waits.is_asked(direction));
        }
        assert!(waits.note_refused(Direction::In) && !waits.is_seen(Direction::In) && waits.is_seen(Direction::Out));
        assert!(!waits.note_refused(Direction::In), "known already");
        waits.note_asked(Direction::Out);
        assert!(!waits.note_refused(Direction::Out) && waits.is_seen(Direction::Out) && !waits.is_seen(Direction::In));
        let wiring = Wiring { waits, ..Wiring::default() }.begin_anew();
        assert!(wiring.waits().is_asked(Direction::Out) && !wiring.waits().is_seen(Direction::In));
    }

    #[test]
    fn where_waits_are_unseen_a_call_that_waits_for_bytes_shows_nothing() {
        let waits = SeenWaits::default();
        Direction::BOTH.into_iter().for_each(|direction| waits.note_blocked(direction));
        waits.note_unseen();
        assert!(!waits.is_seen(Direction::In) && waits.is_seen(Direction::Out), "room is waited for in the call");
        waits.note_asked(Direction::In);
        assert!(waits.is_seen(Direction::In));
    }
}
