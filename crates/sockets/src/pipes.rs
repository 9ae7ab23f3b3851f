// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two directions of a connection that has shared memory beside TCP.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::RawFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use rustix::io::Errno;
use tombolo_domain::{Doorbell, Slot};
use tombolo_layout::{
    sockets::{BOUNDARY, FOLLOWED, Followed, MOVES},
    words,
};
use tombolo_mem::{Mapped, MappedOwnWord, MappedPeerWord, OwnWord, PeerSegment, PeerWord};
use tombolo_ring::{Corrupt, Error, Fresh, Mode, Reader, Side, Writer};

use crate::{
    connection::{Connection, Direction},
    kernel::Kernel,
    switch::{Carrier, Fault, Found, Incoming, Outgoing, Receiver, Sender},
};

/// What the connections between two processes have in common.
#[derive(Debug)]
pub(crate) struct Line {
    pub bell: Arc<dyn Doorbell>,
    /// The peer's process, or the path to it, is gone.
    pub gone: AtomicBool,
}

/// Both directions.
#[derive(Debug)]
pub(crate) struct Pipes {
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    pub line: Arc<Line>,
    /// The peer's tail, and how far this end has read: what makes a read worth a try, without a lock.
    tail: MappedPeerWord,
    read_to: AtomicU64,
}

/// How far one has read who will never be done: the program must hear of what is broken.
const BROKEN: u64 = u64::MAX;

#[derive(Debug)]
struct Tx {
    sender: Sender,
    writer: Writer<Mapped>,
    followed: MappedPeerWord,
    moves: MappedOwnWord,
    boundary: MappedOwnWord,
    /// The peer reads no more, or is gone: the kernel says what a program hears then.
    ended: bool,
    /// The position for which the peer was last asked to ring. Once asked it stays asked.
    armed: Option<u64>,
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
    pub fn new(own: Fresh, peer: &PeerSegment, line: Arc<Line>) -> Result<Self, Corrupt> {
        let word = |at| own.spare_word(at);
        let (moves, boundary, followed) = (word(MOVES), word(BOUNDARY), word(FOLLOWED));
        let mode = Mode { messages: false, ordering: tombolo_ring::Ordering::Fences };
        let (halves, _) = tombolo_ring::halves(own, peer, mode)?;
        let tx = Tx {
            sender: Sender::default(),
            writer: halves.writer,
            followed: peer.word(FOLLOWED),
            moves,
            boundary,
            ended: false,
            armed: None,
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
        };
        let read_to = AtomicU64::new(rx.reader.position());
        Ok(Self { tx: Mutex::new(tx), rx: Mutex::new(rx), line, tail: peer.word(words::TAIL), read_to })
    }

    /// Sends what there is room for. `wanted` is where the program's user would have the direction.
    pub fn send(
        &self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        from: &[IoSlice<'_>],
        wanted: Carrier,
    ) -> Result<(usize, Carrier), Failed> {
        let mut tx = lock(&self.tx);
        if !tx.ended && tx.steer(connection, kernel, fd, wanted)? == Carrier::Pipe {
            let written = tx.writer.write_vectored(from);
            self.ring_if(tx.writer.take_ring());
            match written {
                Ok(Some(n)) => return Ok((n, Carrier::Pipe)),
                Ok(None) if !self.line.gone.load(Ordering::Relaxed) => return Err(Failed::Os(Errno::AGAIN)),
                // Nobody will read it, from here or from there: the kernel's answer is the right one.
                Ok(None) | Err(Error::Closed) => tx.ended = true,
                Err(error) => return Err(error.into()),
            }
        }
        let n = kernel.send(fd, from).map_err(Failed::Os)?;
        connection.count(Direction::Out, n);
        Ok((n, Carrier::Tcp))
    }

    /// Reads what is there; 0 is the end.
    pub fn recv(
        &self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        to: &mut [IoSliceMut<'_>],
        read: Read,
    ) -> Result<(usize, Carrier), Failed> {
        let mut guard = lock(&self.rx);
        let rx = &mut *guard;
        if let Some(broken) = rx.broken {
            return Err(Failed::Broken(broken));
        }
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
        let ring = rx.reader.take_ring();
        self.ring_if(ring);
        self.read_to.store(rx.reader.position(), Ordering::Relaxed);
        match found {
            Ok(Found::Bytes(n)) => Ok((n, carrier)),
            Ok(Found::End) => Ok((0, carrier)),
            Ok(Found::Nothing) => Err(Failed::Os(Errno::AGAIN)),
            Err(Failed::Broken(broken)) => {
                rx.broken = Some(broken);
                self.read_to.store(BROKEN, Ordering::Relaxed);
                Err(Failed::Broken(broken))
            }
            Err(failed) => Err(failed),
        }
    }

    /// Whether there is something in the pipe that was not read: a hint that costs no call and no lock. Who finds a lie
    /// there, or bytes that come after others which are still under way over TCP, finds out when it reads.
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
    pub fn unread(&self) -> u64 {
        let mut rx = lock(&self.rx);
        rx.look();
        rx.reader.available()
    }

    /// Whether a send would find room; none where TCP decides.
    pub fn has_room(&self) -> Option<bool> {
        let mut tx = lock(&self.tx);
        if tx.ended || tx.sender.carrier() == Carrier::Tcp {
            return None;
        }
        // As with TCP, a little room is not yet worth a wake-up.
        let need = tx.writer.capacity() / 4;
        let gone = self.line.gone.load(Ordering::Relaxed);
        Some(gone || tx.writer.ready(need).unwrap_or(true))
    }

    /// R-12, A1 to A3: asks the peer to ring for bytes, for room, or both. Whoever called must look again before it
    /// sleeps.
    pub fn arm(&self, data: bool, space: bool) {
        if data {
            let mut rx = lock(&self.rx);
            // For more than is there: who waits has seen that, and left it.
            rx.look();
            let need = (rx.reader.available() + 1).min(rx.reader.capacity());
            let target = Some((rx.reader.position(), need));
            if rx.armed != target {
                rx.armed = target;
                rx.reader.arm(need);
                std::sync::atomic::fence(Ordering::SeqCst);
                rx.reader.before_sleep();
                let ring = rx.reader.take_ring();
                self.ring_if(ring);
            }
        }
        if space {
            let mut tx = lock(&self.tx);
            let target = Some(tx.writer.position());
            if tx.armed != target {
                tx.armed = target;
                let need = tx.writer.capacity() / 4;
                tx.writer.arm(need);
                std::sync::atomic::fence(Ordering::SeqCst);
                tx.writer.before_sleep();
                let ring = tx.writer.take_ring();
                self.ring_if(ring);
            }
        }
    }

    /// Nobody uses either direction while this is held.
    pub fn hold(&self) -> impl Sized + '_ {
        (lock(&self.tx), lock(&self.rx))
    }

    /// Whether this end sends over TCP, by the word that all its processes share.
    pub fn sends_over_tcp(&self) -> bool {
        lock(&self.tx).moves.load() % 2 == 0
    }

    /// Whether this end receives over TCP, as far as a child can know: by the words that all its processes share, or
    /// because the sender left the pipe where the parent had read it when it forked.
    pub fn receives_over_tcp(&self) -> bool {
        let rx = lock(&self.rx);
        let followed = Followed::decode(rx.followed.load()).moves;
        let moves = rx.moves.load_acquire().hint();
        let left_empty = || rx.boundary.load_acquire().hint() == rx.reader.position();
        moves % 2 == 0 && (moves == followed || left_empty())
    }

    /// What carries the two directions: sending, receiving.
    pub fn carriers(&self) -> [Carrier; 2] {
        [lock(&self.tx).sender.carrier(), lock(&self.rx).receiver.carrier()]
    }

    /// Moves what this end sends to TCP if that can be done now, and asks for the same the other way. Says whether both
    /// are there.
    pub fn retreat(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        {
            let mut tx = lock(&self.tx);
            let _ = tx.steer(connection, kernel, fd, Carrier::Tcp);
        }
        let _ = self.recv(connection, kernel, fd, &mut [], Read::Look);
        self.carriers() == [Carrier::Tcp; 2]
    }

    /// The last descriptor of this end is about to be closed. Says whether bytes are left unread: then TCP would reset.
    pub fn close(&self) -> bool {
        let mut tx = lock(&self.tx);
        tx.writer.close();
        let mut rx = lock(&self.rx);
        let unread = matches!(rx.reader.ready(1), Ok(true)) && rx.reader.available() > 0;
        rx.reader.close();
        let ring = tx.writer.take_ring() | rx.reader.take_ring();
        self.ring_if(ring);
        unread
    }

    fn ring_if(&self, owed: bool) {
        if owed {
            // One bell for both of the peer's sleepers: its waits look at everything anyway.
            self.line.bell.ring(Slot::Data);
        }
    }
}

impl Rx {
    /// Loads the tail, whatever is there already. A lie is met by the next read.
    fn look(&mut self) {
        let need = self.reader.available() + 1;
        let _ = self.reader.ready(need);
    }
}

impl Tx {
    #[inline]
    fn steer(
        &mut self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        wanted: Carrier,
    ) -> Result<Carrier, Fault> {
        let Self { sender, writer, followed, moves, boundary, .. } = self;
        sender.steer(&mut Sending { connection, kernel, fd, writer, followed, moves, boundary }, wanted)
    }
}

struct Sending<'a> {
    connection: &'a Connection,
    kernel: &'a dyn Kernel,
    fd: RawFd,
    writer: &'a Writer<Mapped>,
    followed: &'a MappedPeerWord,
    moves: &'a MappedOwnWord,
    boundary: &'a MappedOwnWord,
}

impl Outgoing for Sending<'_> {
    #[inline]
    fn followed(&mut self) -> u64 {
        // ORDER S-2: Acquire; pairs with the Release in Reading::publish.
        self.followed.load_acquire().hint()
    }

    fn sent_over_tcp(&mut self) -> Option<u64> {
        if self.connection.is_inside(Direction::Out) {
            return None;
        }
        let counted = self.connection.counted(Direction::Out);
        let written = self.kernel.counts(self.fd, self.connection.dialled)?.counts.written;
        if written != counted {
            self.connection.bypassed();
            return None;
        }
        self.kernel.push(self.fd);
        Some(counted)
    }

    fn position(&mut self) -> u64 {
        self.writer.position()
    }

    fn publish(&mut self, boundary: u64, moves: u64) {
        self.boundary.store_relaxed(boundary);
        // ORDER S-1: Release; pairs with the Acquire in Reading::moves. Publishes the boundary and, on the way back to
        // TCP, the last bytes of the pipe.
        self.moves.store_release(moves);
    }
}

struct Reading<'a, 'b> {
    connection: &'a Connection,
    kernel: &'a dyn Kernel,
    fd: RawFd,
    to: &'a mut [IoSliceMut<'b>],
    read: Read,
    reader: &'a mut Reader<Mapped>,
    moves: &'a MappedPeerWord,
    boundary: &'a MappedPeerWord,
    followed: &'a MappedOwnWord,
    error: &'a mut Option<Errno>,
}

impl Incoming for Reading<'_, '_> {
    type Error = Failed;

    fn moves(&mut self) -> u64 {
        // ORDER S-1: Acquire; pairs with the Release in Sending::publish.
        self.moves.load_acquire().hint()
    }

    fn boundary(&mut self) -> u64 {
        self.boundary.load_acquire().hint()
    }

    fn publish(&mut self, word: u64) {
        // ORDER S-2: Release; pairs with the Acquire in Sending::followed.
        self.followed.store_release(word);
    }

    fn may_be_ready(&mut self) -> bool {
        if !self.connection.is_wired() || self.connection.is_inside(Direction::In) {
            return false;
        }
        let Some(sample) = self.kernel.counts(self.fd, self.connection.dialled) else { return false };
        if sample.read() != self.connection.counted(Direction::In) {
            self.connection.bypassed();
            return false;
        }
        true
    }

    fn read_tcp(&mut self) -> Result<Found, Failed> {
        if self.read == Read::Look {
            return self.look_at_tcp();
        }
        if let Some(error) = self.error.take() {
            return Err(Failed::Os(error));
        }
        match self.kernel.recv(self.fd, self.to, self.read == Read::Peek) {
            Ok(0) => Ok(Found::End),
            Ok(n) => {
                if self.read == Read::Take {
                    self.connection.count(Direction::In, n);
                }
                Ok(Found::Bytes(n))
            }
            Err(Errno::AGAIN) => Ok(Found::Nothing),
            Err(error) => Err(Failed::Os(error)),
        }
    }

    fn look_at_tcp(&mut self) -> Result<Found, Failed> {
        match *self.error {
            Some(_) if self.read == Read::Look => return Ok(Found::End),
            Some(error) => {
                *self.error = None;
                return Err(Failed::Os(error));
            }
            None => {}
        }
        match self.kernel.recv(self.fd, &mut [IoSliceMut::new(&mut [0])], true) {
            Ok(0) => Ok(Found::End),
            Ok(n) => Ok(Found::Bytes(n)),
            Err(Errno::AGAIN) => Ok(Found::Nothing),
            Err(error) => {
                if self.read != Read::Look {
                    return Err(Failed::Os(error));
                }
                // The kernel says it once; the read to come must still hear it.
                *self.error = Some(error);
                Ok(Found::End)
            }
        }
    }

    fn read_pipe(&mut self) -> Result<Option<usize>, Failed> {
        if self.read == Read::Take {
            return Ok(self.reader.read_vectored(self.to)?);
        }
        if self.read == Read::Look {
            return Ok(self.reader.ready(1)?.then(|| self.reader.available() as usize).filter(|there| *there > 0));
        }
        let mut copied = 0;
        for part in self.to.iter_mut() {
            copied += self.reader.copy_ahead(copied as u64, part)?;
        }
        Ok((copied != 0).then_some(copied))
    }

    fn received(&mut self) -> u64 {
        let sample = || self.kernel.counts(self.fd, self.connection.dialled);
        match self.connection.is_shared().then(sample).flatten() {
            Some(sample) => sample.read(),
            None => self.connection.counted(Direction::In),
        }
    }

    fn position(&mut self) -> u64 {
        self.reader.position()
    }
}
