// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A channel as a stream of bytes.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    os::fd::{AsFd, BorrowedFd},
    task::Poll,
    time::Duration,
};

use tombolo_domain::{Deadline, Liveness, Peer};
use tombolo_ring::{FlushPolicy, Peeked, Reserved};

use crate::{
    Channel, Ending, PipeStatistics, Result, Statistics, Watch,
    connect::{Parts, sealed::Sealed},
    receiving::Receiving,
    sending::Sending,
};

/// A two-way stream of bytes with an end in another domain; the `TcpStream` of this world.
///
/// Its [`Read`] and [`Write`] block; each has a `try_` twin that does not and an `_until` twin with a deadline.
/// Dropping a stream closes it in order: the peer drains what was written and then finds the end.
#[derive(Debug)]
pub struct Stream {
    read: ReadHalf,
    write: WriteHalf,
}

/// The reading half of a [`Stream`].
#[derive(Debug)]
pub struct ReadHalf(Receiving);

/// The writing half of a [`Stream`].
#[derive(Debug)]
pub struct WriteHalf(Sending);

impl Sealed for Stream {
    const MESSAGES: bool = false;

    fn from_halves(Parts { sending, receiving }: Parts) -> Self {
        Self { read: ReadHalf(receiving), write: WriteHalf(sending) }
    }
}

impl Channel for Stream {}

impl Stream {
    /// The two halves, for two threads.
    #[must_use]
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        (self.read, self.write)
    }

    /// The two halves in place.
    pub fn split(&mut self) -> (&mut ReadHalf, &mut WriteHalf) {
        (&mut self.read, &mut self.write)
    }

    /// Both pipes' counters.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        statistics(&self.write.0, &self.read.0)
    }

    /// Who the peer is, said by the backend.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.read.0.waiter().end().peer()
    }

    /// What is known of the peer's life now: tells one that is paused from one that is gone.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        self.read.0.waiter().end().liveness()
    }

    /// Tells of the peer while others use the halves.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(self.read.0.waiter().end())
    }
}

impl ReadHalf {
    /// Reads what is there, at least one byte; 0 is the end of file (or an empty buffer).
    ///
    /// # Blocking
    /// Until there is something, at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut), [`Error::Corrupt`](crate::Error::Corrupt).
    #[inline]
    pub fn read_until(&mut self, buffer: &mut [u8], deadline: Deadline) -> Result<usize> {
        self.0.complete(|reader| reader.read(buffer), deadline, || {}).map(Option::unwrap_or_default)
    }

    /// Reads what is there, at least one byte; `None` while there is nothing, 0 at the end of file. Never blocks.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt).
    #[inline]
    pub fn try_read(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        Ok(match self.0.attempt(|reader| reader.read(buffer))? {
            Poll::Ready(read) => Some(read.unwrap_or_default()),
            Poll::Pending => None,
        })
    }

    /// Reads what is there, all of `buffer` or nothing if `whole`, where that is short work: how many bytes. Of 0
    /// [`try_read`](Self::try_read) knows more: it may find some, or why there are none. The shortest way there is.
    #[inline]
    pub fn read_at_once(&mut self, buffer: &mut [u8], whole: bool) -> usize {
        self.0.read_at_once(buffer, whole)
    }

    /// As [`read_until`](Self::read_until), into several buffers in turn.
    ///
    /// # Errors
    /// As there.
    pub fn read_vectored_until(&mut self, buffers: &mut [IoSliceMut<'_>], deadline: Deadline) -> Result<usize> {
        self.0.complete(|reader| reader.read_vectored(buffers), deadline, || {}).map(Option::unwrap_or_default)
    }

    /// As [`try_read`](Self::try_read), into several buffers in turn.
    ///
    /// # Errors
    /// As there.
    pub fn try_read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> Result<Option<usize>> {
        Ok(match self.0.attempt(|reader| reader.read_vectored(buffers))? {
            Poll::Ready(read) => Some(read.unwrap_or_default()),
            Poll::Pending => None,
        })
    }

    /// Hands back at once what was read. A half does so by itself, but not while nobody calls it: whoever is about to
    /// wait for something else lets a peer that waits for space go on first.
    ///
    /// # Errors
    /// None today.
    #[inline]
    pub fn release(&mut self) -> Result<()> {
        self.0.release()
    }

    /// What is there, where it lies; `None` while there is nothing or at the end of file
    /// ([`ending`](Self::ending) tells). Never blocks. Hand it back with [`consume`](Self::consume).
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt).
    pub fn peek(&mut self) -> Result<Option<Peeked<'_>>> {
        match self.0.attempt(|reader| Ok((reader.refresh()? > 0 && reader.find()?).then_some(())))? {
            Poll::Ready(Some(())) => Ok(self.0.reader().found()),
            _ => Ok(None),
        }
    }

    /// Waits until [`peek`](Self::peek) has something. Says whether it does; if not, the end of file was reached.
    ///
    /// # Errors
    /// As [`read_until`](Self::read_until).
    pub fn wait_until(&mut self, deadline: Deadline) -> Result<bool> {
        self.0
            .complete(|reader| Ok((reader.refresh()? > 0).then_some(())), deadline, || {})
            .map(|there| there.is_some())
    }

    /// How many bytes are there, looked at afresh. Where there are fewer than `need`, whoever polls
    /// [`poll_fd`](Self::poll_fd) is woken once there are so many or once no more will come, and not before. Never blocks.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt).
    pub fn available(&mut self, need: usize) -> Result<u64> {
        self.0.look_for(need as u64, false)
    }

    /// As [`available`](Self::available), for one who says [`heard`](Self::heard) each time that the descriptor was found readable:
    /// what the peer was asked for before is not asked for again, which saves calls of the kernel.
    ///
    /// # Errors
    /// As there.
    pub fn available_while_quiet(&mut self, need: usize) -> Result<u64> {
        self.0.look_for(need as u64, true)
    }

    /// The descriptor was found readable: see [`available_while_quiet`](Self::available_while_quiet).
    pub fn heard(&mut self) {
        self.0.heard();
    }

    /// Waits until `need` bytes are there, which must be no more than a ring holds: how many are. Fewer are left where no
    /// more will come.
    ///
    /// # Errors
    /// As [`read_until`](Self::read_until).
    pub fn wait_for(&mut self, need: usize, deadline: Deadline) -> Result<u64> {
        self.0.wait_for(need as u64, deadline)
    }

    /// Whether the peer has closed or is gone: nothing will be added to what is there. Whether it lives is looked at now
    /// and then.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt).
    pub fn is_last(&mut self) -> Result<bool> {
        self.0.is_last()
    }

    /// Hands back `len` bytes of what was last peeked at.
    ///
    /// # Panics
    /// If that is more than was peeked at.
    ///
    /// # Errors
    /// What following to another ring says.
    pub fn consume(&mut self, len: usize) -> Result<()> {
        self.0.consumed(len)
    }

    /// This pipe's counters.
    #[must_use]
    pub fn statistics(&self) -> PipeStatistics {
        self.0.statistics()
    }

    /// How the peer's side ended, once the end of file was read.
    #[must_use]
    pub fn ending(&self) -> Option<Ending> {
        self.0.ending()
    }

    /// Wants no more: the peer's writes fail from now on.
    pub fn close(&mut self) {
        self.0.close();
    }

    /// Sets the longest spin; see [`Options::spin`](crate::Options::spin).
    pub fn set_spin(&mut self, most: Duration) {
        self.0.set_spin(most);
    }

    /// A descriptor that polls readable (`POLLIN`) while a read may do something, level- and edge-triggered. It is for
    /// poll and epoll only. After it did, read with [`try_read`](Self::try_read) until that says `None` (edge) or as
    /// much as you like (level).
    ///
    /// # Errors
    /// Where the process has no descriptor to spare.
    pub fn poll_fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.pollable()
    }
}

impl WriteHalf {
    /// Writes as much as there is room for, at least one byte.
    ///
    /// # Blocking
    /// Until there is room, at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::Error::Closed) and [`Error::PeerGone`](crate::Error::PeerGone) where nobody reads any
    /// more, [`Error::TimedOut`](crate::Error::TimedOut), [`Error::Corrupt`](crate::Error::Corrupt).
    #[inline]
    pub fn write_until(&mut self, bytes: &[u8], deadline: Deadline) -> Result<usize> {
        self.0.complete(|writer| writer.write(bytes), || 1, deadline, || Ok(()))
    }

    /// Writes all of `bytes`; on an error some of them may have been written.
    ///
    /// # Errors
    /// As [`write_until`](Self::write_until).
    pub fn write_all_until(&mut self, mut bytes: &[u8], deadline: Deadline) -> Result<()> {
        while !bytes.is_empty() {
            let written = self.write_until(bytes, deadline)?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Writes as much as there is room for; `None` where there is none. Never blocks.
    ///
    /// # Errors
    /// As [`write_until`](Self::write_until), without the deadline.
    #[inline]
    pub fn try_write(&mut self, bytes: &[u8]) -> Result<Option<usize>> {
        self.0.attempt(|writer| writer.write(bytes), || 1)
    }

    /// Writes all of `bytes`, which may be some KiB at most, if that is known to be possible without a look at the peer: says
    /// whether. If not, [`try_write`](Self::try_write) may do it, or knows why not. The shortest way there is.
    #[inline]
    #[must_use]
    pub fn write_at_once(&mut self, bytes: &[u8]) -> bool {
        self.0.write_at_once(bytes)
    }

    /// As [`write_until`](Self::write_until), from several buffers in turn.
    ///
    /// # Errors
    /// As there.
    pub fn write_vectored_until(&mut self, buffers: &[IoSlice<'_>], deadline: Deadline) -> Result<usize> {
        self.0.complete(|writer| writer.write_vectored(buffers), || 1, deadline, || Ok(()))
    }

    /// As [`try_write`](Self::try_write), from several buffers in turn.
    ///
    /// # Errors
    /// As there.
    pub fn try_write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> Result<Option<usize>> {
        self.0.attempt(|writer| writer.write_vectored(buffers), || 1)
    }

    /// Room for `len` bytes to be filled in place and then [`commit`](Self::commit)ted.
    ///
    /// # Blocking
    /// Until there is that much room at once, at most until `deadline`.
    ///
    /// # Errors
    /// As [`write_until`](Self::write_until); [`Error::TooLarge`](crate::Error::TooLarge) beyond the ring's size.
    pub fn reserve_until(&mut self, len: usize, deadline: Deadline) -> Result<Reserved<'_>> {
        self.0.complete(|writer| Ok(writer.find_room(len)?.then_some(())), || len as u64, deadline, || Ok(()))?;
        Ok(self.0.writer().found_room(len).expect("there was room, and only the writer takes it"))
    }

    /// As [`reserve_until`](Self::reserve_until) if there is that much room now; `None` where there is not. Never
    /// blocks.
    ///
    /// # Errors
    /// As there, without the deadline.
    pub fn try_reserve(&mut self, len: usize) -> Result<Option<Reserved<'_>>> {
        match self.0.attempt(|writer| Ok(writer.find_room(len)?.then_some(())), || len as u64)? {
            Some(()) => Ok(self.0.writer().found_room(len)),
            None => Ok(None),
        }
    }

    /// How many bytes there is room for, looked at afresh. Where that is less than `need`, whoever polls
    /// [`poll_fd`](Self::poll_fd) is woken once there is so much room, or no more will be. Never blocks.
    ///
    /// # Errors
    /// As [`write_until`](Self::write_until), without the deadline.
    pub fn room(&mut self, need: usize) -> Result<u64> {
        self.0.room_for(need as u64)
    }

    /// Publishes the first `len` bytes of what was last reserved.
    ///
    /// # Errors
    /// As [`write_until`](Self::write_until).
    pub fn commit(&mut self, len: usize) -> Result<()> {
        self.0.commit(len)
    }

    /// Waits until the peer has read everything.
    ///
    /// # Errors
    /// As [`write_until`](Self::write_until).
    pub fn drained_until(&mut self, deadline: Deadline) -> Result<()> {
        self.0.drained(deadline)
    }

    /// Begins to move to a ring of `bytes` (rounded up to a power of two) under way: the peer follows when it next
    /// reads, nothing is lost, doubled or reordered. [`is_moving`](Self::is_moving) tells when it is done.
    ///
    /// # Errors
    /// [`Error::Handover`](crate::Error::Handover) where the peer cannot follow or the last move is not finished;
    /// [`Error::TooLarge`](crate::Error::TooLarge) beyond what the peer maps; what the backend says of memory.
    pub fn resize(&mut self, bytes: u64) -> Result<()> {
        self.0.resize(ring_size(bytes))
    }

    /// Whether a move to another ring is under way; it goes on with each write.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.0.is_moving()
    }

    /// Sets when a sleeping peer is looked for.
    pub fn set_flush_policy(&mut self, policy: FlushPolicy) {
        self.0.set_flush_policy(policy);
    }

    /// Sets the longest spin; see [`Options::spin`](crate::Options::spin).
    pub fn set_spin(&mut self, most: Duration) {
        self.0.set_spin(most);
    }

    /// This pipe's counters.
    #[must_use]
    pub fn statistics(&self) -> PipeStatistics {
        self.0.statistics()
    }

    /// Writes no more: the peer drains what there is and then finds the end of file.
    pub fn close(&mut self) {
        self.0.close();
    }

    /// Gives up in the middle: the peer drains what there is and then finds that more was to come.
    pub fn abort(&mut self) {
        self.0.abort();
    }

    /// A descriptor that polls readable (`POLLIN`) while a write may do something after
    /// [`try_write`](Self::try_write) said `None`.
    ///
    /// # Errors
    /// Where the process has no descriptor to spare.
    pub fn poll_fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.pollable()
    }
}

/// Both pipes' counters, from the two halves.
pub(crate) fn statistics(sending: &Sending, receiving: &Receiving) -> Statistics {
    let quarantined = sending.waiter().end().link().link.quarantined();
    Statistics { sent: sending.statistics(), received: receiving.statistics(), quarantined }
}

/// What a ring of about `bytes` bytes really has.
pub(crate) fn ring_size(bytes: u64) -> u64 {
    crate::Options::new().ring_size(bytes).capacity.expect("just set")
}

impl Read for ReadHalf {
    #[inline]
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(self.read_until(buffer, Deadline::NEVER)?)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(self.read_vectored_until(buffers, Deadline::NEVER)?)
    }
}

impl Write for WriteHalf {
    #[inline]
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(self.write_until(bytes, Deadline::NEVER)?)
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(self.write_vectored_until(buffers, Deadline::NEVER)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(self.0.flush()?)
    }
}

/// Before it waits, what was written is flushed.
impl Read for Stream {
    #[inline]
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (read, write) = (&mut self.read.0, &mut self.write.0);
        let done = read.complete(|reader| reader.read(buffer), Deadline::NEVER, || write.push());
        Ok(done?.unwrap_or_default())
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let (read, write) = (&mut self.read.0, &mut self.write.0);
        let done = read.complete(|reader| reader.read_vectored(buffers), Deadline::NEVER, || write.push());
        Ok(done?.unwrap_or_default())
    }
}

/// Before it waits, what was read is handed back.
impl Write for Stream {
    #[inline]
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (read, write) = (&mut self.read.0, &mut self.write.0);
        Ok(write.complete(|writer| writer.write(bytes), || 1, Deadline::NEVER, || read.release())?)
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        let (read, write) = (&mut self.read.0, &mut self.write.0);
        Ok(write.complete(|writer| writer.write_vectored(buffers), || 1, Deadline::NEVER, || read.release())?)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write.flush()
    }
}

/// The reading half's descriptor; see [`ReadHalf::poll_fd`].
///
/// # Panics
/// If the process has no descriptor to spare at the first call; `poll_fd` says so instead.
impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }
}

/// See [`ReadHalf::poll_fd`].
///
/// # Panics
/// If the process has no descriptor to spare at the first call; `poll_fd` says so instead.
impl AsFd for ReadHalf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll_fd().expect("a descriptor to spare")
    }
}

/// See [`WriteHalf::poll_fd`].
///
/// # Panics
/// If the process has no descriptor to spare at the first call; `poll_fd` says so instead.
impl AsFd for WriteHalf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll_fd().expect("a descriptor to spare")
    }
}
