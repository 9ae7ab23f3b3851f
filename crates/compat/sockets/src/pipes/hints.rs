// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What those look at who take no turn: whether a read is worth a try, without a call and without a lock.

use std::sync::{
    RwLock, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use tombolo_layout::{
    sockets::{FOLLOWED, Followed, MOVES},
    words,
};
use tombolo_mem::{MappedPeerWord, PeerSegment, PeerWord};

/// How far one has read who will never be done: the program must hear of what is broken.
const BROKEN: u64 = u64::MAX;

/// Something else than bytes in the pipe may come: no count of moves that a peer has.
const ASTIR: u64 = u64::MAX;

/// A position at which no sender is.
const UNKNOWN: u64 = u64::MAX - 1;

/// The peer's words, and what the last turns found. Hints: who takes a turn finds out what a lie there is worth.
#[derive(Debug)]
pub(crate) struct Hints {
    /// What the peer has followed of this end's moves, and what it asks for (S-2).
    followed: MappedPeerWord,
    /// The peer's tail in the first ring.
    tail: MappedPeerWord,
    /// The same of rings after the first, once there are any (S-20).
    later_tails: RwLock<LaterTails>,
    has_later: AtomicBool,
    /// How far this end has read, or [`BROKEN`].
    read_to: AtomicU64,
    /// The peer's moves; and how many there were when nothing but the pipe was expected to have more, or [`ASTIR`].
    moves: MappedPeerWord,
    settled: AtomicU64,
    /// The last read ended where the sender has left a transport: there may be more on the other one.
    crossing: AtomicBool,
    /// Something was taken out of the pipe that the program has not read, as far as this process knows.
    leftover: AtomicBool,
    /// Both directions are on TCP, and neither end looks at the memory any more: what stands there is nobody's word (V-9).
    detached: AtomicBool,
}

impl Hints {
    /// Of a peer whose first segment this is, and of which this end has read as far as `read_to`.
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

    /// Whether the peer asks for TCP.
    #[inline]
    pub fn is_asked(&self) -> bool {
        Followed::decode(self.followed.load_acquire().hint()).leave && !self.is_detached()
    }

    /// Whether all that comes is expected in the pipe, and nothing has.
    #[inline]
    pub fn rests(&self) -> bool {
        let settled = self.settled.load(Ordering::Relaxed);
        settled != ASTIR && self.moves.load_acquire().hint() == settled && !self.has_unread() && !self.is_asked()
    }

    /// Whether the sender has left the pipe, in which all was expected that comes, and this end has not followed it.
    #[inline]
    pub fn is_left(&self) -> bool {
        let settled = self.settled.load(Ordering::Relaxed);
        settled != ASTIR && self.moves.load_acquire().hint() != settled
    }

    /// Whether the last read ended where the sender has left a transport (S-15).
    #[inline]
    pub fn is_crossing(&self) -> bool {
        self.crossing.load(Ordering::Relaxed)
    }

    /// Whether there is something in the pipe that was not read. Who finds a lie there, or bytes that come after others which are
    /// still under way over TCP, or that another process of this end has read, finds out when it looks.
    #[inline]
    pub fn has_unread(&self) -> bool {
        self.arrived() != self.read_to() && !self.is_detached() || self.has_leftover()
    }

    /// Whether something was taken out of the pipe before its memory went, and not read (S-19).
    #[inline]
    pub fn has_leftover(&self) -> bool {
        self.leftover.load(Ordering::Relaxed)
    }

    /// Position after the last byte in the pipe, as the peer says.
    #[inline]
    pub fn arrived(&self) -> u64 {
        if self.has_later.load(Ordering::Relaxed) {
            return self.arrived_later();
        }
        self.tail.load_acquire().hint()
    }

    /// What the sender says of rings after the first. Nobody waits for who changes that: there may be something.
    #[inline(never)]
    fn arrived_later(&self) -> u64 {
        self.later_tails.try_read().map_or(UNKNOWN, |tails| tails.find_last(&self.tail))
    }

    /// How far this end has read.
    #[inline]
    pub fn read_to(&self) -> u64 {
        self.read_to.load(Ordering::Relaxed)
    }

    /// Whether nobody looks at the memory any more.
    #[inline]
    pub fn is_detached(&self) -> bool {
        self.detached.load(Ordering::Acquire)
    }

    // ---- what a turn found

    /// This end has read as far as this.
    pub fn set_read_to(&self, position: u64) {
        self.read_to.store(position, Ordering::Relaxed);
    }

    /// What is left in the pipe is nothing to look for.
    pub fn forget_unread(&self) {
        self.read_to.store(self.arrived(), Ordering::Relaxed);
    }

    /// Every look finds something from now on: that the direction is broken.
    pub fn mark_broken(&self) {
        self.read_to.store(BROKEN, Ordering::Relaxed);
    }

    /// After so many moves nothing but the pipe is expected to have more; none where something else may come.
    pub fn set_settled(&self, moves: Option<u64>) {
        self.settled.store(moves.unwrap_or(ASTIR), Ordering::Relaxed);
    }

    /// Whether the last read ended where the sender has left a transport.
    pub fn set_crossing(&self, crossing: bool) {
        self.crossing.store(crossing, Ordering::Relaxed);
    }

    /// Whether something is left that was taken out of the pipe.
    pub fn set_leftover(&self, leftover: bool) {
        self.leftover.store(leftover, Ordering::Relaxed);
    }

    /// Nobody looks at the memory from now on.
    pub fn detach(&self) {
        self.set_settled(None);
        self.detached.store(true, Ordering::Release);
    }

    // ---- rings after the first

    /// Keeps everybody from the words in later rings, for a moment or a fork.
    pub fn hold_tails(&self) -> Option<RwLockWriteGuard<'_, LaterTails>> {
        (0..1 << 12).find_map(|_| {
            std::hint::spin_loop();
            self.later_tails.try_write().ok()
        })
    }

    /// This end is about to be ready for another ring, in which the sender says here how far it is.
    pub fn expect_ring(&self, tails: &mut LaterTails, tail: MappedPeerWord) {
        tails.expect(tail);
        self.has_later.store(true, Ordering::Release);
    }

    /// The sender was found in ring `now`, perhaps not in the one that was `known` before: then nobody looks at that any more.
    #[inline]
    pub fn turn_to_ring(&self, now: u16, known: &mut u16) {
        if now != *known {
            self.turn_to_next(now, known);
        }
    }

    /// Where somebody is at the words now, it is tried again in the next turn: until then the ring before stays mapped.
    #[cold]
    fn turn_to_next(&self, now: u16, known: &mut u16) {
        if let Ok(mut tails) = self.later_tails.try_write() {
            tails.turn();
            *known = now;
        }
    }
}

/// Where the sender says how far it is, in rings after the first.
#[derive(Debug, Default)]
pub(crate) struct LaterTails {
    /// In the ring where it was found last, if that is not the first.
    now: Option<MappedPeerWord>,
    /// In the one that this end is ready for, to which it goes when it likes.
    next: Option<MappedPeerWord>,
}

impl LaterTails {
    /// This end is about to be ready for another ring.
    fn expect(&mut self, tail: MappedPeerWord) {
        self.turn();
        self.next = Some(tail);
    }

    /// The sender was found in the next ring.
    fn turn(&mut self) {
        if let Some(next) = self.next.take() {
            self.now = Some(next);
        }
    }

    /// The position after the last byte, where `first` is the word of the first ring.
    fn find_last(&self, first: &MappedPeerWord) -> u64 {
        let now = self.now.as_ref().unwrap_or(first).load_acquire().hint();
        let next = self.next.as_ref().map_or(now, |next| next.load_acquire().hint());
        // Before the sender goes there nothing is said in it.
        if next.wrapping_sub(now).cast_signed() > 0 { next } else { now }
    }
}
