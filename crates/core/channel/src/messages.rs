// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A channel as messages: whole ones or none, kept apart, in order.

use std::{
    io::IoSlice,
    os::fd::{AsFd, BorrowedFd},
    task::Poll,
    time::Duration,
};

use tombolo_domain::{Deadline, Liveness, Peer};
use tombolo_layout::record;
use tombolo_ring::{FlushPolicy, Peeked, Reserved};

use crate::{
    Channel, Ending, PipeStatistics, Result, Statistics, Watch,
    connect::{Parts, sealed::Sealed},
    receiving::Receiving,
    sending::Sending,
    stream::{ring_size, statistics},
};

/// A two-way channel of messages of 0 to [`message_max`](MessageSender::message_max) bytes.
#[derive(Debug)]
pub struct Messages {
    sender: MessageSender,
    receiver: MessageReceiver,
}

/// The sending half of [`Messages`].
#[derive(Debug)]
pub struct MessageSender(Sending);

/// The receiving half of [`Messages`].
#[derive(Debug)]
pub struct MessageReceiver(Receiving);

impl Sealed for Messages {
    const MESSAGES: bool = true;

    fn from_halves(Parts { sending, receiving }: Parts) -> Self {
        Self { sender: MessageSender(sending), receiver: MessageReceiver(receiving) }
    }
}

impl Channel for Messages {}

impl Messages {
    /// The two halves, for two threads.
    #[must_use]
    pub fn into_split(self) -> (MessageSender, MessageReceiver) {
        (self.sender, self.receiver)
    }

    /// The two halves in place.
    pub fn split(&mut self) -> (&mut MessageSender, &mut MessageReceiver) {
        (&mut self.sender, &mut self.receiver)
    }

    /// See [`MessageSender::send`]. Before it waits, what was received is handed back.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        let (sender, receiver) = (&mut self.sender.0, &mut self.receiver.0);
        let span = || record::span(message.len() as u64);
        sender.complete(|writer| writer.send(message), span, Deadline::NEVER, || receiver.release())
    }

    /// See [`MessageReceiver::recv`]. Before it waits, what was sent is flushed.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn recv(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        let (sender, receiver) = (&mut self.sender.0, &mut self.receiver.0);
        receiver.complete(|reader| reader.recv(buffer), Deadline::NEVER, || sender.push())
    }

    /// Both pipes' counters.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        statistics(&self.sender.0, &self.receiver.0)
    }

    /// Who the peer is, said by the backend.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.receiver.0.waiter().end().peer()
    }

    /// What is known of the peer's life now: tells one that is paused from one that is gone.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        self.receiver.0.waiter().end().liveness()
    }

    /// Tells of the peer while others use the halves.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(self.receiver.0.waiter().end())
    }
}

impl MessageSender {
    /// Sends one message.
    ///
    /// # Blocking
    /// Until there is room for all of it.
    ///
    /// # Errors
    /// [`Error::TooLarge`](crate::Error::TooLarge) where it can never fit; [`Error::Closed`](crate::Error::Closed) and
    /// [`Error::PeerGone`](crate::Error::PeerGone) where nobody receives any more.
    #[inline]
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        self.send_until(message, Deadline::NEVER)
    }

    /// As [`send`](Self::send), at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut), nothing was sent then; and as [`send`](Self::send).
    #[inline]
    pub fn send_until(&mut self, message: &[u8], deadline: Deadline) -> Result<()> {
        self.0.complete(|writer| writer.send(message), || record::span(message.len() as u64), deadline, || Ok(()))
    }

    /// Sends one message if there is room; `None` where there is not. Never blocks.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    #[inline]
    pub fn try_send(&mut self, message: &[u8]) -> Result<Option<()>> {
        self.0.attempt(|writer| writer.send(message), || record::span(message.len() as u64))
    }

    /// Sends the concatenation of `parts` as one message.
    ///
    /// # Errors
    /// As [`send_until`](Self::send_until).
    pub fn send_vectored_until(&mut self, parts: &[IoSlice<'_>], deadline: Deadline) -> Result<()> {
        let span = || record::span(parts.iter().map(|part| part.len() as u64).sum());
        self.0.complete(|writer| writer.send_vectored(parts), span, deadline, || Ok(()))
    }

    /// As [`send_vectored_until`](Self::send_vectored_until) if there is room; `None` where there is not. Never blocks.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_send_vectored(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<()>> {
        let span = || record::span(parts.iter().map(|part| part.len() as u64).sum());
        self.0.attempt(|writer| writer.send_vectored(parts), span)
    }

    /// Room for a message of `len` bytes to be filled in place and then [`commit`](Self::commit)ted.
    ///
    /// # Errors
    /// As [`send_until`](Self::send_until).
    pub fn reserve_until(&mut self, len: usize, deadline: Deadline) -> Result<Reserved<'_>> {
        let span = || record::span(len as u64);
        self.0.complete(|writer| Ok(writer.find_room(len)?.then_some(())), span, deadline, || Ok(()))?;
        Ok(self.0.writer().found_room(len).expect("there was room, and only the writer takes it"))
    }

    /// As [`reserve_until`](Self::reserve_until) if there is that much room now; `None` where there is not. Never
    /// blocks.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_reserve(&mut self, len: usize) -> Result<Option<Reserved<'_>>> {
        let span = || record::span(len as u64);
        match self.0.attempt(|writer| Ok(writer.find_room(len)?.then_some(())), span)? {
            Some(()) => Ok(self.0.writer().found_room(len)),
            None => Ok(None),
        }
    }

    /// Sends the first `len` bytes of what was last reserved as one message.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn commit(&mut self, len: usize) -> Result<()> {
        self.0.commit(len)
    }

    /// Largest message, in bytes: a ring less eight.
    #[must_use]
    pub fn message_max(&mut self) -> u64 {
        self.0.writer().message_max()
    }

    /// Looks whether a sleeping peer is to be woken for what a batching flush policy held back.
    ///
    /// # Errors
    /// [`Error::PeerGone`](crate::Error::PeerGone).
    pub fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }

    /// Waits until the peer has received everything.
    ///
    /// # Errors
    /// As [`send_until`](Self::send_until).
    pub fn drained_until(&mut self, deadline: Deadline) -> Result<()> {
        self.0.drained(deadline)
    }

    /// Begins to move to a ring of `bytes`; see [`WriteHalf::resize`](crate::WriteHalf::resize).
    ///
    /// # Errors
    /// As there.
    pub fn resize(&mut self, bytes: u64) -> Result<()> {
        self.0.resize(ring_size(bytes))
    }

    /// Whether a move to another ring is under way; it goes on with each message.
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

    /// Sends no more: the peer receives what there is and then finds the end.
    pub fn close(&mut self) {
        self.0.close();
    }

    /// A descriptor that polls readable (`POLLIN`) while sending may do something after
    /// [`try_send`](Self::try_send) said `None`.
    ///
    /// # Errors
    /// Where the process has no descriptor to spare.
    pub fn poll_fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.pollable()
    }
}

impl MessageReceiver {
    /// Receives the next message into `buffer` and says how long it is; `None` is the end.
    ///
    /// # Blocking
    /// Until there is one.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`](crate::Error::BufferTooSmall), the message stays then;
    /// [`Error::Corrupt`](crate::Error::Corrupt).
    #[inline]
    pub fn recv(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        self.recv_until(buffer, Deadline::NEVER)
    }

    /// As [`recv`](Self::recv), at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut), and as [`recv`](Self::recv).
    #[inline]
    pub fn recv_until(&mut self, buffer: &mut [u8], deadline: Deadline) -> Result<Option<usize>> {
        self.0.complete(|reader| reader.recv(buffer), deadline, || {})
    }

    /// Receives the next message if there is one: `Pending` while there is none, `Ready(None)` at the end. Never
    /// blocks.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    #[inline]
    pub fn try_recv(&mut self, buffer: &mut [u8]) -> Result<Poll<Option<usize>>> {
        self.0.attempt(|reader| reader.recv(buffer))
    }

    /// The next message, where it lies; `None` while there is none or at the end ([`ending`](Self::ending) tells).
    /// Never blocks. Hand it back with [`consume`](Self::consume).
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn peek(&mut self) -> Result<Option<Peeked<'_>>> {
        match self.0.attempt(|reader| Ok(reader.find()?.then_some(())))? {
            Poll::Ready(Some(())) => Ok(self.0.reader().found()),
            _ => Ok(None),
        }
    }

    /// Waits until [`peek`](Self::peek) has something. Says whether it does; if not, the end was reached.
    ///
    /// # Errors
    /// As [`recv_until`](Self::recv_until).
    pub fn wait_until(&mut self, deadline: Deadline) -> Result<bool> {
        self.0.complete(|reader| Ok(reader.find()?.then_some(())), deadline, || {}).map(|there| there.is_some())
    }

    /// Hands back the message that was last peeked at.
    ///
    /// # Panics
    /// If none was.
    ///
    /// # Errors
    /// What following to another ring says.
    pub fn consume(&mut self) -> Result<()> {
        self.0.consumed(0)
    }

    /// Hands back at once what was received; see [`ReadHalf::release`](crate::ReadHalf::release).
    ///
    /// # Errors
    /// None today.
    pub fn release(&mut self) -> Result<()> {
        self.0.release()
    }

    /// This pipe's counters.
    #[must_use]
    pub fn statistics(&self) -> PipeStatistics {
        self.0.statistics()
    }

    /// How the peer's side ended, once the end was found.
    #[must_use]
    pub fn ending(&self) -> Option<Ending> {
        self.0.ending()
    }

    /// Wants no more: the peer's sends fail from now on.
    pub fn close(&mut self) {
        self.0.close();
    }

    /// Sets the longest spin; see [`Options::spin`](crate::Options::spin).
    pub fn set_spin(&mut self, most: Duration) {
        self.0.set_spin(most);
    }

    /// A descriptor that polls readable (`POLLIN`) while there may be a message; see
    /// [`ReadHalf::poll_fd`](crate::ReadHalf::poll_fd).
    ///
    /// # Errors
    /// Where the process has no descriptor to spare.
    pub fn poll_fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.pollable()
    }
}

/// The receiving half's descriptor; see [`MessageReceiver::poll_fd`].
///
/// # Panics
/// If the process has no descriptor to spare at the first call; `poll_fd` says so instead.
impl AsFd for Messages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.poll_fd().expect("a descriptor to spare")
    }
}
