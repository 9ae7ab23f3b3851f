// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two directions of a connection that has shared memory beside TCP.

mod back;
mod detached;
mod full;
mod full_pipe;
mod half;
mod io;
mod later_tails;
mod readiness;
mod ring_moves;
mod rings;
mod steer;
mod supply;
mod transfer;
mod turn;

use std::sync::{
    Arc, Mutex, MutexGuard, RwLock, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use rustix::io::Errno;
use tombolo_domain::{SingleDoorbell, SingleNotifier};
use tombolo_growth::RingBudget;
use tombolo_layout::{
    Features,
    sockets::{BOUNDARY, FOLLOWED, Followed, MOVES},
    words,
};
use tombolo_mem::{Mapped, MappedOwnWord, MappedPeerWord, PeerSegment, PeerWord};
use tombolo_os::lock::lock;
use tombolo_ring::{Corrupt, Error, Fresh, Mode, Reader, Writer};

use crate::{
    offered_ring::OfferedRing,
    quota::Lease,
    session::Session,
    switch::{Fault, Receiver, Sender},
};
use later_tails::LaterTails;
use ring_moves::RingMoves;

/// What one end brings to a connection: its segment, and the bell at which it waits.
#[derive(Debug)]
pub(crate) struct OwnResources {
    pub fresh: Fresh,
    pub lease: Lease,
    pub bell: Arc<SingleDoorbell>,
    /// The number of this end.
    pub id: u64,
    /// How the ring may grow, if the peer follows (S-20).
    pub growth: Option<(RingBudget, u64)>,
}

/// What the peer brought.
#[derive(Debug)]
pub(crate) struct PeerResources {
    pub segment: PeerSegment,
    pub ringer: SingleNotifier,
}

impl PeerResources {
    /// Both, if both came.
    pub fn pair(segment: Option<PeerSegment>, ringer: Option<SingleNotifier>) -> Option<Self> {
        segment.zip(ringer).map(|(segment, ringer)| Self { segment, ringer })
    }
}

/// Both directions.
#[derive(Debug)]
pub(crate) struct Pipes {
    // A panic inside either leaves words that are checked again.
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    pub line: Arc<Session>,
    /// S-13. Who waits for this connection is woken here, and nobody else.
    pub bell: Arc<SingleDoorbell>,
    ringer: SingleNotifier,
    /// S-2. What the peer has followed of this end's moves, and what it asks for.
    followed: MappedPeerWord,
    /// The peer's tail, and how far this end has read: what makes a read worth a try, without a lock.
    tail: MappedPeerWord,
    /// The same of rings after the first, once there are any (S-20).
    later_tails: RwLock<LaterTails>,
    has_later: AtomicBool,
    /// A ring that the peer offered: that it says so, and what came of it.
    ring_announced: AtomicBool,
    pub offered: Arc<OfferedRing>,
    /// M-3. The numbers of both ends.
    pub epochs: Epochs,
    read_to: AtomicU64,
    /// The peer's moves; and how many there were when nothing but the pipe was expected to have more, or [`ASTIR`].
    moves: MappedPeerWord,
    settled: AtomicU64,
    /// S-16. The clock's tick at which somebody last looked whether the pipe stays full.
    full_looked_at: AtomicU64,
    /// The last read ended where the sender has left a carrier: there may be more on the other one.
    crossing: AtomicBool,
    /// V-9. Both directions are on TCP, and neither end looks at the memory any more: what stands there is nobody's word.
    detached: AtomicBool,
    /// Of this end's segment.
    _lease: Lease,
}

/// How far one has read who will never be done: the program must hear of what is broken.
const BROKEN: u64 = u64::MAX;

/// Something else than bytes in the pipe may come: no count of moves that a peer has.
const ASTIR: u64 = u64::MAX;

/// Both directions, held still.
pub(crate) struct FrozenPipes<'a> {
    tx: MutexGuard<'a, Tx>,
    rx: MutexGuard<'a, Rx>,
    /// So that nobody is at it in a child's copy. One who was interrupted there, and forks, has it itself.
    _tails: Option<RwLockWriteGuard<'a, LaterTails>>,
}

/// M-3. What names the two ends of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epochs {
    pub own: u64,
    pub peer: u64,
}

#[derive(Debug)]
struct Tx {
    sender: Sender,
    writer: Writer<Mapped>,
    followed: MappedPeerWord,
    moves: MappedOwnWord,
    boundary: MappedOwnWord,
    /// The peer reads no more, or is gone: the kernel says what a program hears then.
    ended: bool,
    /// S-2. The peer wants from TCP what is in the pipe: the count of bytes over TCP, less the position. For good.
    recalled: Option<u64>,
    /// The position at which the peer was last asked to ring. Once asked it stays asked.
    armed: Option<u64>,
    /// S-16. The pipe was full when it was last looked at; and how often it was left for that, while this end did not read either.
    full: Option<full_pipe::FullPipe>,
    left: u32,
    /// S-20. How its ring follows its load, if it does.
    rings: Option<Box<RingMoves>>,
    /// Another process of this end may have used it since.
    behind: bool,
}

#[derive(Debug)]
struct Rx {
    receiver: Receiver,
    reader: Reader<Mapped>,
    moves: MappedPeerWord,
    boundary: MappedPeerWord,
    followed: MappedOwnWord,
    /// What the kernel said while there was still something to read before it.
    error: Option<Errno>,
    broken: Option<Broken>,
    /// Position and need for which the peer was last asked to ring. Once asked it stays asked.
    armed: Option<(u64, u64)>,
    /// It was asked so when the ring was full.
    armed_full: bool,
    /// Another process of this end may have used it since.
    behind: bool,
    /// S-12. All that ever comes was read.
    over: bool,
    /// S-20. The ring in which the sender was found last, and the one that was asked for last.
    ring: u16,
    asked_ring: Option<u16>,
}

/// Why a direction cannot go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Broken {
    /// The hand-over went wrong.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The peer's pipe is corrupt.
    #[error(transparent)]
    Pipe(#[from] Error),
}

/// What a read can fail with.
#[derive(Debug)]
pub(crate) enum Failed {
    Os(Errno),
    Broken(Broken),
}

impl From<Fault> for Failed {
    fn from(fault: Fault) -> Self {
        Self::Broken(fault.into())
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Broken(error.into())
    }
}

/// What a reading call wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Read {
    /// The bytes.
    Take,
    /// The bytes, which stay.
    Peek,
    /// Whether a read would find something.
    Look,
}

/// A pipe of the program's, whose bytes a call sends (`splice`). Both calls take what is there now, and say `AGAIN` where there is
/// nothing; 0 is its end.
pub trait Source {
    /// Takes bytes from it.
    ///
    /// # Errors
    /// What the kernel says of the pipe.
    fn take_bytes(&mut self, to: &mut [u8]) -> Result<usize, Errno>;

    /// Has the kernel move bytes from it to TCP, as many as fit and `most` at most.
    ///
    /// # Errors
    /// What the kernel says of both.
    fn pass_on(&mut self, most: usize) -> Result<usize, Errno>;
}

impl Pipes {
    /// Joins the two ends' segments.
    ///
    /// # Errors
    /// Where the peer's is none.
    pub fn new(own: OwnResources, peer: PeerResources, line: Arc<Session>) -> Result<Self, Corrupt> {
        let (OwnResources { fresh: own, lease, bell, id, growth }, PeerResources { segment, ringer }) = (own, peer);
        let peer = &segment;
        let word = |at| own.spare_word(at);
        let (moves, boundary, followed) = (word(MOVES), word(BOUNDARY), word(FOLLOWED));
        let mode = Mode { messages: false, ordering: tombolo_ring::FenceMode::Fences };
        let (halves, theirs) = tombolo_ring::halves(own, peer, mode)?;
        let growth = growth.filter(|_| theirs.features.has(Features::HANDOVER));
        let first = halves.writer.capacity();
        let rings = growth.map(|(budget, most)| Box::new(RingMoves::new(budget, first, most)));
        let tx = Tx {
            sender: Sender::default(),
            writer: halves.writer,
            followed: peer.word(FOLLOWED),
            moves,
            boundary,
            ended: false,
            recalled: None,
            armed: None,
            full: None,
            left: 0,
            rings,
            behind: false,
        };
        let rx = Rx {
            receiver: Receiver::default(),
            reader: halves.reader,
            moves: peer.word(MOVES),
            boundary: peer.word(BOUNDARY),
            followed,
            error: None,
            broken: None,
            armed: None,
            armed_full: false,
            behind: false,
            over: false,
            ring: 0,
            asked_ring: None,
        };
        let read_to = AtomicU64::new(rx.reader.position());
        let (followed, tail, moves) = (peer.word(FOLLOWED), peer.word(words::TAIL), peer.word(MOVES));
        let pipes = Self {
            tx: Mutex::new(tx),
            rx: Mutex::new(rx),
            line,
            bell,
            ringer,
            followed,
            tail,
            later_tails: RwLock::default(),
            has_later: AtomicBool::new(false),
            ring_announced: AtomicBool::new(false),
            offered: Arc::default(),
            epochs: Epochs { own: id, peer: theirs.epoch },
            read_to,
            moves,
            settled: AtomicU64::new(ASTIR),
            full_looked_at: AtomicU64::new(0),
            crossing: AtomicBool::new(false),
            detached: AtomicBool::new(false),
            _lease: lease,
        };
        pipes.line.carries(&pipes.bell, id, &pipes.offered);
        Ok(pipes)
    }

    /// Nobody of this process uses either direction while this is held.
    pub fn still(&self) -> FrozenPipes<'_> {
        let (tx, rx) = (lock(&self.tx), lock(&self.rx));
        FrozenPipes { tx, rx, _tails: self.hold_tails() }
    }

    /// The program was not told of this error after all: its next read is.
    pub fn store_error(&self, error: Errno) {
        let mut rx = lock(&self.rx);
        rx.error = Some(error);
        self.settled.store(ASTIR, Ordering::Relaxed);
    }

    /// Whether the peer asks for TCP.
    #[inline]
    pub fn is_asked(&self) -> bool {
        Followed::decode(self.followed.load_acquire().hint()).leave && !self.is_detached()
    }

    /// Whether all that comes is expected in the pipe, and nothing has: a hint that costs no call and no lock.
    #[inline]
    pub fn rests(&self) -> bool {
        let settled = self.settled.load(Ordering::Relaxed);
        settled != ASTIR && self.moves.load_acquire().hint() == settled && !self.stirs() && !self.is_asked()
    }

    /// S-15. Whether the last read ended where the sender has left a carrier: a hint.
    #[inline]
    pub fn is_crossing(&self) -> bool {
        self.crossing.load(Ordering::Relaxed)
    }

    /// Whether there is something in the pipe that was not read: a hint that costs no call and no lock. Who finds a lie
    /// there, or bytes that come after others which are still under way over TCP, or that another process of this end
    /// has read, finds out when it looks.
    #[inline]
    pub fn stirs(&self) -> bool {
        self.arrived() != self.read_to.load(Ordering::Relaxed) && !self.is_detached()
    }

    /// Position after the last byte in the pipe, as the peer says.
    #[inline]
    pub fn arrived(&self) -> u64 {
        if self.has_later.load(Ordering::Relaxed) {
            return self.arrived_later();
        }
        self.tail.load_acquire().hint()
    }

    pub fn end_sending(&self) {
        lock(&self.tx).ended = true;
    }

    #[inline]
    fn notify_if(&self, owed: bool) {
        if owed {
            // One bell for both of the peer's sleepers: its waits look at both directions anyway.
            self.ringer.notify();
        }
    }
}
