// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries the two directions of a connection that has shared memory beside TCP.

mod back;
mod detached;
mod full_pipe;
mod halves;
mod hints;
mod io;
mod leftover;
pub(crate) mod read_call;
mod readiness;
mod ring_moves;
mod rings;
mod steer;
mod supply;
mod transfer;

use std::sync::{Arc, atomic::AtomicU64};

use rustix::io::Errno;
use tombolo_domain::{SingleDoorbell, SingleNotifier};
use tombolo_growth::Growth;
use tombolo_layout::{
    Features,
    sockets::{BOUNDARY, FOLLOWED, MOVES},
};
use tombolo_mem::{Mapped, MappedOwnWord, MappedPeerWord, PeerSegment};
use tombolo_ring::{Corrupt, Error, Fresh, Mode, Reader, Writer};

use crate::{
    offered_ring::OfferedRing,
    quota::Lease,
    session::Session,
    switch::{Fault, Receiver, Sender},
};
use halves::Halves;
use hints::Hints;
use ring_moves::RingMoves;

pub(crate) use halves::FrozenPipes;

/// Resources that this endpoint brings to a connection: its segment, and the doorbell at which it waits.
#[derive(Debug)]
pub(crate) struct OwnResources {
    pub fresh: Fresh,
    pub lease: Lease,
    pub doorbell: Arc<SingleDoorbell>,
    /// Number of this endpoint.
    pub id: u64,
    /// Policy by which the ring may grow, if the peer follows (S-20).
    pub growth: Option<Growth>,
}

/// Resources that the peer brought.
#[derive(Debug)]
pub(crate) struct PeerResources {
    pub segment: PeerSegment,
    pub notifier: SingleNotifier,
}

impl PeerResources {
    /// Returns the two together, if both came.
    pub fn pair(segment: Option<PeerSegment>, notifier: Option<SingleNotifier>) -> Option<Self> {
        segment.zip(notifier).map(|(segment, notifier)| Self { segment, notifier })
    }
}

/// Both directions, and what they share: the session, the doorbells, an offered ring.
#[derive(Debug)]
pub(crate) struct Pipes {
    pub halves: Halves,
    pub session: Arc<Session>,
    /// Doorbell that wakes the waiters of this connection, and no others (S-13).
    pub doorbell: Arc<SingleDoorbell>,
    /// Ring that the peer offered.
    pub offered: Arc<OfferedRing>,
    /// Numbers of both endpoints (M-3).
    pub epochs: Epochs,
    /// Tick of the clock at which a thread last looked whether the pipe stays full (S-16).
    full_looked_at: AtomicU64,
    /// Lease of this endpoint's segment.
    _lease: Lease,
}

/// Numbers of the two endpoints of a connection (M-3).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epochs {
    pub own: u64,
    pub peer: u64,
}

/// Direction that this endpoint sends.
#[derive(Debug)]
pub(crate) struct Tx {
    sender: Sender,
    writer: Writer<Mapped>,
    followed: MappedPeerWord,
    moves: MappedOwnWord,
    boundary: MappedOwnWord,
    /// Whether the peer reads no more, or is gone. Then the kernel determines the error that the program gets.
    ended: bool,
    /// Count of bytes over TCP less the position, once the peer has recalled what is in the pipe. Never cleared (S-2).
    recalled: Option<u64>,
    /// Position at which the peer was last asked to notify. The request stays in force.
    armed: Option<u64>,
    /// Record of the pipe if the last look found it full. `left`: how often it was left for that while this endpoint
    /// did not read either (S-16).
    full: Option<full_pipe::FullPipe>,
    left: u32,
    /// State by which the ring follows its load, if it does (S-20).
    rings: Option<Box<RingMoves>>,
    /// Whether another process of this endpoint may have used the direction since.
    behind: bool,
}

/// Direction that this endpoint receives.
#[derive(Debug)]
pub(crate) struct Rx {
    receiver: Receiver,
    reader: Reader<Mapped>,
    moves: MappedPeerWord,
    boundary: MappedPeerWord,
    followed: MappedOwnWord,
    /// Error that the kernel reported while there were still bytes to read before it.
    error: Option<Errno>,
    broken: Option<Broken>,
    /// Position and need for which the peer was last asked to notify. The request stays in force.
    armed: Option<(u64, u64)>,
    /// Whether the ring was full when the peer was asked.
    armed_full: bool,
    /// Whether another process of this endpoint may have used the direction since.
    behind: bool,
    /// Whether everything that ever comes was read (S-12).
    over: bool,
    /// Bytes taken out of the pipe before its memory was taken away, which come before all others (S-19).
    leftover: Option<leftover::Leftover>,
    /// Ring in which the sender was found last, and the one that was asked for last (S-20).
    ring: u16,
    asked_ring: Option<u16>,
}

/// Reason for which a direction cannot go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Broken {
    /// A move between TCP and the pipe failed.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The peer's pipe is corrupt.
    #[error(transparent)]
    Pipe(#[from] Error),
}

/// Error of a read.
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
    /// To take the bytes.
    Take,
    /// To see the bytes and leave them.
    Peek,
    /// To know whether a read would find something.
    Look,
}

/// A pipe of the program's, whose bytes a call sends (`splice`). Both functions take what is there now. They return
/// `AGAIN` where there is nothing, and 0 at the end of the pipe.
pub trait Source {
    /// Takes bytes from it.
    ///
    /// # Errors
    /// Returns the kernel's error for the pipe.
    fn take_bytes(&mut self, to: &mut [u8]) -> Result<usize, Errno>;

    /// Has the kernel move bytes from it to TCP, as many as fit and `most` at most.
    ///
    /// # Errors
    /// Returns the kernel's error for either of the two.
    fn pass_on(&mut self, most: usize) -> Result<usize, Errno>;
}

impl Pipes {
    /// Joins the segments of the two endpoints, of which the peer has this `number`.
    ///
    /// # Errors
    /// Returns an error where the peer's segment is not valid, or is another endpoint's.
    pub fn new(own: OwnResources, peer: PeerResources, number: u64, session: Arc<Session>) -> Result<Self, Corrupt> {
        let (OwnResources { fresh: own, lease, doorbell, id, growth }, PeerResources { segment, notifier }) =
            (own, peer);
        let peer = &segment;
        let word = |at| own.spare_word(at);
        let (moves, boundary, followed) = (word(MOVES), word(BOUNDARY), word(FOLLOWED));
        let mode = Mode { messages: false, ordering: tombolo_ring::FenceMode::Fences };
        let (halves, theirs) = tombolo_ring::halves(own, peer, mode)?;
        if theirs.epoch != number {
            let what = "segment of another endpoint";
            return Err(Corrupt { clause: "C-11", what, found: theirs.epoch, bound: number });
        }
        let growth = growth.filter(|_| theirs.features.has(Features::HANDOVER));
        let rings = growth.map(|policy| Box::new(RingMoves::new(policy)));
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
            leftover: None,
            ring: 0,
            asked_ring: None,
        };
        let hints = Hints::new(peer, rx.reader.position());
        let pipes = Self {
            halves: Halves::new(tx, rx, hints, notifier),
            session,
            doorbell,
            offered: Arc::default(),
            epochs: Epochs { own: id, peer: theirs.epoch },
            full_looked_at: AtomicU64::new(0),
            _lease: lease,
        };
        pipes.session.carries(&pipes.doorbell, id, &pipes.offered);
        Ok(pipes)
    }

    /// Returns what is known of both directions without a turn.
    #[inline]
    pub fn hints(&self) -> &Hints {
        &self.halves.hints
    }

    /// Keeps an error of which the program was not told after all, for its next call.
    pub fn store_error(&self, error: Errno) {
        let mut rx = self.halves.lock_rx();
        rx.error = Some(error);
        self.hints().set_settled(None);
    }

    /// Notes that this endpoint sends no more.
    pub fn end_sending(&self) {
        self.halves.lock_tx().ended = true;
    }
}
