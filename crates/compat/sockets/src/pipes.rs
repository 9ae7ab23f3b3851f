// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two directions of a connection that has shared memory beside TCP.

mod back;
mod half;
mod io;
mod supply;

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::RawFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use rustix::{event::PollFlags, io::Errno};
use tombolo_domain::{Endpoint, SingleDoorbell, SingleNotifier, aside::ReservedFd};
use tombolo_layout::{
    sockets::{BOUNDARY, FOLLOWED, Followed, MOVES},
    words,
};
use tombolo_mem::{Mapped, MappedOwnWord, MappedPeerWord, PeerSegment, PeerWord};
use tombolo_ring::{Corrupt, Error, Fresh, Mode, Reader, Side, Writer};

use crate::{
    connection::{Connection, Direction},
    family::ForkGroup,
    kernel::Kernel,
    quota::Lease,
    switch::{Fault, Found, Receiver, Sender, Transport},
};
use half::Half;
use io::{Reading, Sending};

pub use back::ReturnStage;
pub use supply::Source;

/// A child's copy of its parent's link, and what of it is watched for its end.
#[derive(Debug)]
pub(crate) struct Inherited {
    pub link: Box<dyn Endpoint>,
    pub _path: Arc<ReservedFd>,
}

/// What the connections between two processes have in common.
#[derive(Debug)]
pub(crate) struct Session {
    /// The path to the peer's process, which tells when that is gone. Its owner is who has the link.
    pub path: Weak<ReservedFd>,
    /// Of the connections that go over it. Only used while the links are held.
    pub bells: Mutex<Vec<Weak<SingleDoorbell>>>,
    /// The peer's process, or the path to it, is gone.
    pub gone: AtomicBool,
    /// In a child made by fork: its copy of the link, which tells of the peer's life as long as anybody here has it.
    pub inherited: Mutex<Option<Inherited>>,
}

impl Session {
    pub fn new(path: &Arc<ReservedFd>) -> Self {
        let path = Arc::downgrade(path);
        Self { path, bells: Mutex::default(), gone: AtomicBool::new(false), inherited: Mutex::default() }
    }

    /// The peer's process, or the path to it, is gone.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

/// What one end brings to a connection: its segment, and the bell at which it waits.
#[derive(Debug)]
pub(crate) struct OwnResources {
    pub fresh: Fresh,
    pub lease: Lease,
    pub bell: Arc<SingleDoorbell>,
}

/// What the peer brought.
#[derive(Debug)]
pub(crate) struct PeerResources {
    pub segment: PeerSegment,
    pub ringer: SingleNotifier,
}

/// Both directions.
#[derive(Debug)]
pub(crate) struct Pipes {
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
    read_to: AtomicU64,
    /// The peer's moves; and how many there were when nothing but the pipe was expected to have more, or [`ASTIR`].
    moves: MappedPeerWord,
    settled: AtomicU64,
    /// Of this end's segment.
    _lease: Lease,
}

/// What the kernel says of a peer that sends no more, or is gone.
const ENDED: i16 = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR).bits() as i16;

/// How far one has read who will never be done: the program must hear of what is broken.
const BROKEN: u64 = u64::MAX;

/// Something else than bytes in the pipe may come: no count of moves that a peer has.
const ASTIR: u64 = u64::MAX;

/// Both directions, held still.
pub(crate) struct FrozenPipes<'a> {
    tx: MutexGuard<'a, Tx>,
    rx: MutexGuard<'a, Rx>,
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
    /// Another process of this end may have used it since.
    behind: bool,
    /// S-12. All that ever comes was read.
    over: bool,
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic inside leaves words that are checked again.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pipes {
    /// Joins the two ends' segments.
    ///
    /// # Errors
    /// Where the peer's is none.
    pub fn new(own: OwnResources, peer: PeerResources, line: Arc<Session>) -> Result<Self, Corrupt> {
        let (OwnResources { fresh: own, lease, bell }, PeerResources { segment, ringer }) = (own, peer);
        let peer = &segment;
        let word = |at| own.spare_word(at);
        let (moves, boundary, followed) = (word(MOVES), word(BOUNDARY), word(FOLLOWED));
        let mode = Mode { messages: false, ordering: tombolo_ring::FenceMode::Fences };
        let (halves, _) = tombolo_ring::halves(own, peer, mode)?;
        let tx = Tx {
            sender: Sender::default(),
            writer: halves.writer,
            followed: peer.word(FOLLOWED),
            moves,
            boundary,
            ended: false,
            recalled: None,
            armed: None,
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
            behind: false,
            over: false,
        };
        let read_to = AtomicU64::new(rx.reader.position());
        let (followed, tail, moves) = (peer.word(FOLLOWED), peer.word(words::TAIL), peer.word(MOVES));
        line.carries(&bell);
        Ok(Self {
            tx: Mutex::new(tx),
            rx: Mutex::new(rx),
            line,
            bell,
            ringer,
            followed,
            tail,
            read_to,
            moves,
            settled: AtomicU64::new(ASTIR),
            _lease: lease,
        })
    }

    /// One turn at a direction. While this process is the only one of its end, its lock is all that it takes.
    #[inline]
    fn turn<H: Half, T>(
        &self,
        connection: &Connection,
        half: &Mutex<H>,
        f: impl FnOnce(&mut H) -> T,
    ) -> Result<T, Failed> {
        let mut half = lock(half);
        match connection.family() {
            Some(family) if !family.is_alone() || *half.behind() => self.shared_turn(connection, family, &mut *half, f),
            _ => {
                let result = f(&mut half);
                self.notify_if(half.take_ring());
                Ok(result)
            }
        }
    }

    #[cold]
    fn shared_turn<H: Half, T>(
        &self,
        connection: &Connection,
        family: &ForkGroup,
        half: &mut H,
        f: impl FnOnce(&mut H) -> T,
    ) -> Result<T, Failed> {
        if connection.has_departed() {
            return Err(Failed::Os(Errno::BADF));
        }
        // Once alone, always: only this process could make another one, and then it has the lock.
        let alone = family.is_alone();
        let turn = family.turn(H::DIRECTION).map_err(|_| Failed::Os(Errno::CONNRESET))?;
        half.resume(family, turn.record().as_ref())?;
        let result = f(half);
        let record = half.save();
        self.notify_if(half.take_ring());
        turn.leave(&record);
        *half.behind() = !alone;
        Ok(result)
    }

    /// Before a fork, with both directions held still: the child finds them as they are now.
    pub fn hand_on(&self, still: &mut FrozenPipes<'_>, family: &ForkGroup) -> std::io::Result<()> {
        if let Some(base) = still.tx.recalled {
            family.set_recalled(base);
        }
        self.leave(family, &mut *still.tx)?;
        self.leave(family, &mut *still.rx)
    }

    fn leave<H: Half>(&self, family: &ForkGroup, half: &mut H) -> std::io::Result<()> {
        if !*half.behind() {
            let turn = family.turn(H::DIRECTION)?;
            let record = half.save();
            self.notify_if(half.take_ring());
            turn.leave(&record);
            *half.behind() = true;
        }
        Ok(())
    }

    /// Nobody of this process uses either direction while this is held.
    pub fn still(&self) -> FrozenPipes<'_> {
        FrozenPipes { tx: lock(&self.tx), rx: lock(&self.rx) }
    }

    /// Sends what there is room for. `wanted` is where the program's user would have the direction.
    pub fn send(
        &self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        from: &[IoSlice<'_>],
        wanted: Transport,
    ) -> Result<(usize, Transport), Failed> {
        self.turn(connection, &self.tx, |tx| -> Result<_, Failed> {
            connection.recount(kernel, fd, Direction::Out);
            let carrier = self.steer(tx, connection, kernel, fd, wanted)?;
            if tx.pay(connection, kernel, fd)? {
                return Err(Failed::Os(Errno::AGAIN));
            }
            tx.ended |= connection.is_over();
            if !tx.ended && carrier == Transport::Pipe {
                match tx.writer.write_vectored(from) {
                    Ok(Some(n)) => return Ok((n, Transport::Pipe)),
                    Ok(None) if !self.is_over(connection, kernel, fd) => return Err(Failed::Os(Errno::AGAIN)),
                    // Nobody will read it, from here or from there: the kernel's answer is the right one.
                    Ok(None) | Err(Error::Closed) => tx.ended = true,
                    Err(error) => return Err(error.into()),
                }
            }
            let n = kernel.send(fd, from).map_err(Failed::Os)?;
            connection.count(Direction::Out, n);
            Ok((n, Transport::Tcp))
        })?
    }

    /// Whether nobody will ever read what is in the pipe: TCP is over, or it says that the peer is gone, and the path to the
    /// peer is too.
    fn is_over(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        connection.is_over() || self.line.is_gone() && kernel.poll(fd, ENDED) & ENDED != 0
    }

    /// Reads what is there; 0 is the end.
    pub fn recv(
        &self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        to: &mut [IoSliceMut<'_>],
        read: Read,
    ) -> Result<(usize, Transport), Failed> {
        let received = self.turn(connection, &self.rx, |rx| -> Result<_, Failed> {
            if let Some(broken) = rx.broken {
                return Err(Failed::Broken(broken));
            }
            if rx.over {
                if let Some(error) = rx.error.take_if(|_| read != Read::Look) {
                    return Err(Failed::Os(error));
                }
                let n = if read == Read::Look { 0 } else { kernel.recv(fd, to, false).map_err(Failed::Os)? };
                return Ok((n, Transport::Tcp));
            }
            connection.recount(kernel, fd, Direction::In);
            let mut io = Reading {
                connection,
                kernel,
                fd,
                to,
                read,
                reader: &mut rx.reader,
                moves: &rx.moves,
                boundary: &rx.boundary,
                followed: &rx.followed,
                error: &mut rx.error,
            };
            rx.receiver.set_leave(&mut io, connection.leaves());
            let found = rx.receiver.receive(&mut io);
            let carrier = rx.receiver.carrier();
            self.read_to.store(rx.reader.position(), Ordering::Relaxed);
            let settled = matches!(found, Ok(Found::Bytes(_) | Found::Nothing)) && rx.error.is_none();
            let moves = rx.receiver.moves_within_pipe().filter(|_| settled);
            self.settled.store(moves.unwrap_or(ASTIR), Ordering::Relaxed);
            if read != Read::Look && matches!(found, Ok(Found::End) | Err(Failed::Os(_))) {
                self.end_reading(rx, connection, kernel, fd);
            }
            match found {
                Ok(Found::Bytes(n)) => Ok((n, carrier)),
                Ok(Found::End) => Ok((0, carrier)),
                Ok(Found::Nothing) => Err(Failed::Os(Errno::AGAIN)),
                Err(Failed::Broken(broken)) => {
                    rx.broken = Some(broken);
                    self.read_to.store(BROKEN, Ordering::Relaxed);
                    Err(Failed::Broken(broken))
                }
                Err(failed) => {
                    rx.error = None; // The program hears it.
                    Err(failed)
                }
            }
        })?;
        if matches!(received, Err(Failed::Os(Errno::AGAIN))) {
            self.comply(connection, kernel, fd);
        }
        received
    }

    /// S-12. The program hears that there is no more, and that is so: TCP is over and the pipe is empty. What the peer sends
    /// from now on is for TCP to refuse.
    fn end_reading(&self, rx: &mut Rx, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) {
        rx.over = connection.is_alone() && connection.ask_whether_over(kernel, fd);
        if rx.over {
            rx.reader.close();
            self.read_to.store(self.arrived(), Ordering::Relaxed);
        }
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
        Followed::decode(self.followed.load_acquire().hint()).leave
    }

    /// Whether all that comes is expected in the pipe, and nothing has: a hint that costs no call and no lock.
    #[inline]
    pub fn rests(&self) -> bool {
        let settled = self.settled.load(Ordering::Relaxed);
        settled != ASTIR && self.moves.load_acquire().hint() == settled && !self.stirs() && !self.is_asked()
    }

    /// Whether there is something in the pipe that was not read: a hint that costs no call and no lock. Who finds a lie
    /// there, or bytes that come after others which are still under way over TCP, or that another process of this end
    /// has read, finds out when it looks.
    #[inline]
    pub fn stirs(&self) -> bool {
        self.arrived() != self.read_to.load(Ordering::Relaxed)
    }

    /// Position after the last byte in the pipe, as the peer says.
    #[inline]
    pub fn arrived(&self) -> u64 {
        self.tail.load_acquire().hint()
    }

    pub fn end_sending(&self) {
        lock(&self.tx).ended = true;
    }

    /// Bytes in the pipe and not read, for `FIONREAD`.
    pub fn unread(&self, connection: &Connection) -> u64 {
        let unread = self.turn(connection, &self.rx, |rx| {
            rx.load_tail();
            // What was recalled comes over TCP, and is counted there.
            let moves = rx.moves.load_acquire().hint();
            if rx.receiver.is_paid(moves) { 0 } else { rx.reader.available() }
        });
        unread.unwrap_or(0)
    }

    /// Whether a send would find room; none where TCP decides.
    pub fn has_room(&self, connection: &Connection) -> Option<bool> {
        let room = self.turn(connection, &self.tx, |tx| {
            if tx.ended || connection.is_over() || tx.sender.carrier() == Transport::Tcp {
                return None;
            }
            // As with TCP, a little room is not yet worth a wake-up.
            let need = tx.writer.capacity() / 4;
            // Where the path is gone the next send goes over TCP, as soon as that can be.
            let moves = self.line.is_gone() && tx.sender.may_move(tx.followed.load_acquire().hint());
            Some(moves || tx.writer.ready(need).unwrap_or(true))
        });
        room.unwrap_or(Some(true))
    }

    /// Whether a peek may show more later: the end is not there, the ring is not full, and nothing comes the other way, of
    /// which only a read that takes gets to the rest.
    pub fn may_show_more(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        let in_pipe = self.turn(connection, &self.rx, |rx| {
            rx.load_tail();
            rx.receiver.reads_pipe().then(|| rx.reader.available() < rx.reader.capacity())
        });
        let said = |events: PollFlags| kernel.poll(fd, events.bits() as i16);
        match in_pipe {
            Ok(Some(room)) => room && said(PollFlags::IN | PollFlags::RDHUP) == 0,
            Ok(None) => !self.stirs() && said(PollFlags::RDHUP) == 0,
            Err(_) => false,
        }
    }

    /// R-12, A1 to A3: asks the peer to ring for bytes, for room, or both. Whoever called must look again before it
    /// sleeps.
    pub fn arm(&self, connection: &Connection, data: bool, space: bool) {
        let mut others = false;
        if data {
            others |= self.turn(connection, &self.rx, |rx| rx.arm(connection)).unwrap_or(false);
        }
        if space {
            others |= self.turn(connection, &self.tx, |tx| tx.arm(connection)).unwrap_or(false);
        }
        if others {
            self.bell.notify();
        }
    }

    /// What carries the two directions: sending, receiving.
    pub fn carriers(&self, connection: &Connection) -> [Transport; 2] {
        let tx = self.turn(connection, &self.tx, |tx| tx.sender.carrier());
        let rx = self.turn(connection, &self.rx, |rx| rx.receiver.carrier());
        [tx, rx].map(|carrier| carrier.unwrap_or(Transport::Tcp))
    }

    /// The last descriptor of this end is about to be closed. Says whether bytes are left unread: then TCP would reset.
    pub fn close(&self, connection: &Connection) -> bool {
        let _ = self.turn(connection, &self.tx, |tx| tx.writer.close());
        let unread = self.turn(connection, &self.rx, |rx| {
            // What was recalled comes over TCP, to whoever has the socket then.
            let reads = rx.receiver.reads_pipe();
            let unread = reads && matches!(rx.reader.ready(1), Ok(true)) && rx.reader.available() > 0;
            rx.reader.close();
            unread
        });
        unread.unwrap_or(false)
    }

    fn notify_if(&self, owed: bool) {
        if owed {
            // One bell for both of the peer's sleepers: its waits look at both directions anyway.
            self.ringer.notify();
        }
    }
}

impl Rx {
    /// Loads the tail, whatever is there already. A lie is met by the next read.
    fn load_tail(&mut self) {
        let need = self.reader.available() + 1;
        let _ = self.reader.ready(need);
    }
}

impl Rx {
    /// Says whether others of this end sleep on another target.
    fn arm(&mut self, connection: &Connection) -> bool {
        // For more than is there: who waits has seen that, and left it.
        self.load_tail();
        let need = (self.reader.available() + 1).min(self.reader.capacity());
        let target = self.reader.position().wrapping_add(need);
        let asked = Some((self.reader.position(), need));
        if connection.family().is_none() && self.armed == asked {
            return false;
        }
        self.armed = asked;
        self.reader.arm(need);
        std::sync::atomic::fence(Ordering::SeqCst);
        self.reader.before_sleep();
        connection.family().is_some_and(|family| family.arm(Direction::In, target))
    }
}

impl Tx {
    /// Says whether others of this end sleep on another target.
    fn arm(&mut self, connection: &Connection) -> bool {
        let need = self.writer.capacity() / 4;
        let target = self.writer.position().wrapping_add(need);
        let asked = Some(self.writer.position());
        if connection.family().is_none() && self.armed == asked {
            return false;
        }
        self.armed = asked;
        self.writer.arm(need);
        std::sync::atomic::fence(Ordering::SeqCst);
        self.writer.before_sleep();
        connection.family().is_some_and(|family| family.arm(Direction::Out, target))
    }

    #[inline]
    fn steer(
        &mut self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        wanted: Transport,
    ) -> Result<Transport, Fault> {
        let Self { sender, writer, followed, moves, boundary, recalled, .. } = self;
        sender.steer(&mut Sending { connection, kernel, fd, writer, recalled, followed, moves, boundary }, wanted)
    }
}
