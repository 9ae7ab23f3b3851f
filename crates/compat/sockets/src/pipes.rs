// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two directions of a connection that has shared memory beside TCP.

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

/// What one end brings to a connection: its segment, and the doorbell at which it waits.
#[derive(Debug)]
pub(crate) struct OwnResources {
    pub fresh: Fresh,
    pub lease: Lease,
    pub doorbell: Arc<SingleDoorbell>,
    /// The number of this end.
    pub id: u64,
    /// How the ring may grow, if the peer follows (S-20).
    pub growth: Option<Growth>,
}

/// What the peer brought.
#[derive(Debug)]
pub(crate) struct PeerResources {
    pub segment: PeerSegment,
    pub notifier: SingleNotifier,
}

impl PeerResources {
    /// Both, if both came.
    pub fn pair(segment: Option<PeerSegment>, notifier: Option<SingleNotifier>) -> Option<Self> {
        segment.zip(notifier).map(|(segment, notifier)| Self { segment, notifier })
    }
}

/// Both directions, and what they share: the session, the doorbells, a ring on its way.
#[derive(Debug)]
pub(crate) struct Pipes {
    pub halves: Halves,
    pub session: Arc<Session>,
    /// Who waits for this connection is woken here, and nobody else (S-13).
    pub doorbell: Arc<SingleDoorbell>,
    /// A ring that the peer offered.
    pub offered: Arc<OfferedRing>,
    /// The numbers of both ends (M-3).
    pub epochs: Epochs,
    /// The clock's tick at which somebody last looked whether the pipe stays full (S-16).
    full_looked_at: AtomicU64,
    /// Of this end's segment.
    _lease: Lease,
}

/// What names the two ends of a connection (M-3).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epochs {
    pub own: u64,
    pub peer: u64,
}

/// What this end sends.
#[derive(Debug)]
pub(crate) struct Tx {
    sender: Sender,
    writer: Writer<Mapped>,
    followed: MappedPeerWord,
    moves: MappedOwnWord,
    boundary: MappedOwnWord,
    /// The peer reads no more, or is gone: the kernel says what a program hears then.
    ended: bool,
    /// The peer wants from TCP what is in the pipe: the count of bytes over TCP, less the position. For good (S-2).
    recalled: Option<u64>,
    /// The position at which the peer was last asked to ring. Once asked it stays asked.
    armed: Option<u64>,
    /// The pipe was full when it was last looked at; and how often it was left for that, while this end did not read either (S-16).
    full: Option<full_pipe::FullPipe>,
    left: u32,
    /// How its ring follows its load, if it does (S-20).
    rings: Option<Box<RingMoves>>,
    /// Another process of this end may have used it since.
    behind: bool,
}

/// What this end receives.
#[derive(Debug)]
pub(crate) struct Rx {
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
    /// All that ever comes was read (S-12).
    over: bool,
    /// What was taken out of the pipe before its memory went, and comes before all else (S-19).
    leftover: Option<leftover::Leftover>,
    /// The ring in which the sender was found last, and the one that was asked for last (S-20).
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
    pub fn new(own: OwnResources, peer: PeerResources, session: Arc<Session>) -> Result<Self, Corrupt> {
        let (OwnResources { fresh: own, lease, doorbell, id, growth }, PeerResources { segment, notifier }) =
            (own, peer);
        let peer = &segment;
        let word = |at| own.spare_word(at);
        let (moves, boundary, followed) = (word(MOVES), word(BOUNDARY), word(FOLLOWED));
        let mode = Mode { messages: false, ordering: tombolo_ring::FenceMode::Fences };
        let (halves, theirs) = tombolo_ring::halves(own, peer, mode)?;
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

    /// What is known of both directions without a turn.
    #[inline]
    pub fn hints(&self) -> &Hints {
        &self.halves.hints
    }

    /// The program was not told of this error after all: its next call is.
    pub fn store_error(&self, error: Errno) {
        let mut rx = self.halves.lock_rx();
        rx.error = Some(error);
        self.hints().set_settled(None);
    }

    /// This end sends no more.
    pub fn end_sending(&self) {
        self.halves.lock_tx().ended = true;
    }
}
