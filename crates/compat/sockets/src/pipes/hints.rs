// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shows whether a read is worth a try, without a call and without a lock, to those who take no turn.

use std::sync::{
    RwLock, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use tombolo_layout::{
    sockets::{FOLLOWED, Followed, MOVES},
    words,
};
use tombolo_mem::{MappedPeerWord, PeerSegment, PeerWord};

/// In `read_to`: the direction is broken. No read reaches this position, so the program always learns of it.
const BROKEN: u64 = u64::MAX;

/// In `settled`: something else than bytes in the pipe may come. No peer makes so many moves.
const ASTIR: u64 = u64::MAX;

/// A position that no sender reaches.
const UNKNOWN: u64 = u64::MAX - 1;

/// The peer's words, and what the last turns found. These are hints: whoever takes a turn detects a protocol violation
/// in them.
#[derive(Debug)]
pub(crate) struct Hints {
    /// Word in which the peer says which of this endpoint's moves it has followed, and what it asks for (S-2).
    followed: MappedPeerWord,
    /// The peer's tail in the first ring.
    tail: MappedPeerWord,
    /// The peer's tails in rings after the first, once there are any (S-20).
    later_tails: RwLock<LaterTails>,
    has_later: AtomicBool,
    /// How far this endpoint has read, or [`BROKEN`].
    read_to: AtomicU64,
    /// Number of the peer's moves. `settled`: that number when nothing but the pipe was expected to have more, or
    /// [`ASTIR`].
    moves: MappedPeerWord,
    settled: AtomicU64,
    /// Whether the last read ended where the sender has left a transport: the other one may have more.
    crossing: AtomicBool,
    /// Whether bytes were taken out of the pipe that the program has not read, as far as this process knows.
    leftover: AtomicBool,
    /// Whether both directions are on TCP and neither endpoint looks at the memory any more. Nothing there is to be
    /// believed (V-9).
    detached: AtomicBool,
}

impl Hints {
    /// Makes the hints for a peer with this first segment, of which this endpoint has read as far as `read_to`.
    pub fn new(peer: &PeerSegment, read_to: u64) -> Self {
        Self {
            followed: peer.word(FOLLOWED),
            tail: peer.word(words::TAIL),
            later_tails: RwLock::default(),
            has_later: AtomicBool::new(false),
            read_to: AtomicU64::new(read_to),
            moves: peer.word(MOVES),
            settled: AtomicU64::new(ASTIR),
            crossing: AtomicBool::new(false),
            leftover: AtomicBool::new(false),
            detached: AtomicBool::new(false),
        }
    }

    /// Returns whether the peer asks for TCP.
    #[inline]
    pub fn is_asked(&self) -> bool {
        Followed::decode(self.followed.load_acquire().hint()).leave && !self.is_detached()
    }

    /// Returns whether all bytes are expected in the pipe, and none are there.
    #[inline]
    pub fn rests(&self) -> bool {
        let settled = self.settled.load(Ordering::Relaxed);
        settled != ASTIR && self.moves.load_acquire().hint() == settled && !self.has_unread() && !self.is_asked()
    }

    /// Returns whether the sender has left the pipe, in which all bytes were expected, and this endpoint has not
    /// followed it.
    #[inline]
    pub fn is_left(&self) -> bool {
        let settled = self.settled.load(Ordering::Relaxed);
        settled != ASTIR && self.moves.load_acquire().hint() != settled
    }

    /// Returns whether the last read ended where the sender has left a transport (S-15).
    #[inline]
    pub fn is_crossing(&self) -> bool {
        self.crossing.load(Ordering::Relaxed)
    }

    /// Returns whether there seem to be unread bytes in the pipe. A read finds out where that is a protocol violation,
    /// where others still come over TCP first, or where another process of this endpoint has read them.
    #[inline]
    pub fn has_unread(&self) -> bool {
        self.arrived() != self.read_to() && !self.is_detached() || self.has_leftover()
    }

    /// Returns whether bytes were taken out of the pipe before its memory was taken away, and not read (S-19).
    #[inline]
    pub fn has_leftover(&self) -> bool {
        self.leftover.load(Ordering::Relaxed)
    }

    /// Returns the position after the last byte in the pipe, by the peer's word.
    #[inline]
    pub fn arrived(&self) -> u64 {
        if self.has_later.load(Ordering::Relaxed) {
            return self.arrived_later();
        }
        self.tail.load_acquire().hint()
    }

    /// Returns that position where there are rings after the first. Does not wait for a thread that changes the tails:
    /// it returns `UNKNOWN` then, as there may be something.
    #[inline(never)]
    fn arrived_later(&self) -> u64 {
        self.later_tails.try_read().map_or(UNKNOWN, |tails| tails.find_last(&self.tail))
    }

    /// Returns how far this endpoint has read.
    #[inline]
    pub fn read_to(&self) -> u64 {
        self.read_to.load(Ordering::Relaxed)
    }

    /// Returns whether nobody looks at the memory any more.
    #[inline]
    pub fn is_detached(&self) -> bool {
        self.detached.load(Ordering::Acquire)
    }

    // ---- results of turns

    /// Notes that this endpoint has read up to `position`.
    pub fn set_read_to(&self, position: u64) {
        self.read_to.store(position, Ordering::Relaxed);
    }

    /// Notes that nobody is to look for what is left in the pipe.
    pub fn forget_unread(&self) {
        self.read_to.store(self.arrived(), Ordering::Relaxed);
    }

    /// Makes every look find something from now on, so that the program learns that the direction is broken.
    pub fn mark_broken(&self) {
        self.read_to.store(BROKEN, Ordering::Relaxed);
    }

    /// Notes that after so many moves nothing but the pipe is expected to have more; `None` where something else may
    /// come.
    pub fn set_settled(&self, moves: Option<u64>) {
        self.settled.store(moves.unwrap_or(ASTIR), Ordering::Relaxed);
    }

    /// Notes whether the last read ended where the sender has left a transport.
    pub fn set_crossing(&self, crossing: bool) {
        self.crossing.store(crossing, Ordering::Relaxed);
    }

    /// Notes whether bytes are left that were taken out of the pipe.
    pub fn set_leftover(&self, leftover: bool) {
        self.leftover.store(leftover, Ordering::Relaxed);
    }

    /// Notes that nobody looks at the memory from now on.
    pub fn detach(&self) {
        self.set_settled(None);
        self.detached.store(true, Ordering::Release);
    }

    // ---- rings after the first

    /// Locks the tails of later rings, for a moment or a fork; returns `None` if another thread keeps the lock.
    pub fn hold_tails(&self) -> Option<RwLockWriteGuard<'_, LaterTails>> {
        (0..1 << 12).find_map(|_| {
            std::hint::spin_loop();
            self.later_tails.try_write().ok()
        })
    }

    /// Adds the `tail` of another ring, for which this endpoint is about to become ready.
    pub fn expect_ring(&self, tails: &mut LaterTails, tail: MappedPeerWord) {
        tails.expect(tail);
        self.has_later.store(true, Ordering::Release);
    }

    /// Notes that the sender was found in ring `now`. If that is not the `known` ring, nobody looks at the one before
    /// any more.
    #[inline]
    pub fn turn_to_ring(&self, now: u16, known: &mut u16) {
        if now != *known {
            self.turn_to_next(now, known);
        }
    }

    /// If a thread is at the tails now, the next turn tries again. Until then the previous ring stays mapped.
    #[cold]
    fn turn_to_next(&self, now: u16, known: &mut u16) {
        if let Ok(mut tails) = self.later_tails.try_write() {
            tails.turn();
            *known = now;
        }
    }
}

/// Words in which the sender publishes its tail, in rings after the first.
#[derive(Debug, Default)]
pub(crate) struct LaterTails {
    /// Tail in the ring where the sender was found last, if that is not the first.
    now: Option<MappedPeerWord>,
    /// Tail in the ring for which this endpoint is ready, to which the sender may move at any time.
    next: Option<MappedPeerWord>,
}

impl LaterTails {
    /// Adds the tail of another ring, for which this endpoint is about to become ready.
    fn expect(&mut self, tail: MappedPeerWord) {
        self.turn();
        self.next = Some(tail);
    }

    /// Notes that the sender was found in the next ring.
    fn turn(&mut self) {
        if let Some(next) = self.next.take() {
            self.now = Some(next);
        }
    }

    /// Returns the position after the last byte, where `first` is the tail of the first ring.
    fn find_last(&self, first: &MappedPeerWord) -> u64 {
        let now = self.now.as_ref().unwrap_or(first).load_acquire().hint();
        let next = self.next.as_ref().map_or(now, |next| next.load_acquire().hint());
        // Before the sender moves there, its tail in the next ring means nothing.
        if next.wrapping_sub(now).cast_signed() > 0 { next } else { now }
    }
}
