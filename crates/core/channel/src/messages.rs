// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A channel as messages: whole ones or none, kept apart, in order.

use std::{
    io::IoSlice,
    os::fd::{AsFd, BorrowedFd},
    task::Poll,
};

use tombolo_domain::{Deadline, Liveness, Peer};
use tombolo_layout::record;

use crate::{
    Channel, MessageReceiver, MessageSender, Result, Statistics, Watch,
    connect::{Parts, sealed::Sealed},
    stream::statistics,
};

/// A channel of messages both ways: whole ones or none, kept apart, in order.
///
/// A message has 0 to [`message_max`](MessageSender::message_max) bytes. Both endpoints must ask for messages. Dropping
/// the channel closes it in order: the peer receives what was sent and then finds the end.
///
/// # Example
/// ```
/// use tombolo::{Messages, Options};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let address = format!("local:{}/jobs", folder.path().display());
/// let mut listener = tombolo::listen_with::<Messages>(&address, &Options::new())?;
/// # let client = std::thread::spawn(move || tombolo::connect_with::<Messages>(&address, &Options::new()));
/// let mut jobs = listener.accept()?;
/// # let mut client = client.join().unwrap()?;
/// jobs.send(b"job 1")?;
/// jobs.send(b"")?;
/// # drop(jobs);
/// // at the other endpoint
/// let mut job = [0; 1024];
/// assert_eq!(client.recv(&mut job)?, Some(5));
/// assert_eq!(client.recv(&mut job)?, Some(0)); // an empty message
/// assert_eq!(client.recv(&mut job)?, None); // the end
/// # Ok::<(), tombolo::Error>(())
/// ```
#[derive(Debug)]
pub struct Messages {
    sender: MessageSender,
    receiver: MessageReceiver,
}

impl Sealed for Messages {
    const MESSAGES: bool = true;

    fn from_halves(Parts { sending, receiving }: Parts) -> Self {
        Self { sender: MessageSender::new(sending), receiver: MessageReceiver::new(receiving) }
    }
}

impl Channel for Messages {}

impl Messages {
    /// Splits the channel into its two halves, for two threads.
    #[must_use]
    pub fn into_split(self) -> (MessageSender, MessageReceiver) {
        (self.sender, self.receiver)
    }

    /// Borrows the two halves, for calls that the channel itself does not have.
    pub fn split(&mut self) -> (&mut MessageSender, &mut MessageReceiver) {
        (&mut self.sender, &mut self.receiver)
    }

    /// Sends one message as [`MessageSender::send`]. Before it waits, the room of what was received is returned.
    ///
    /// # Blocking
    /// Until there is room for all of it.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        if self.sender.0.try_at_once(|writer| writer.send_at_once(message)) {
            Ok(())
        } else {
            self.send_at_length(message)
        }
    }

    #[inline(never)]
    fn send_at_length(&mut self, message: &[u8]) -> Result<()> {
        let (sender, receiver) = (&mut self.sender.0, &mut self.receiver.0);
        let span = || record::span(message.len() as u64);
        sender.complete(|writer| writer.send(message), span, Deadline::NEVER, || receiver.release())
    }

    /// Receives the next message as [`MessageReceiver::recv`]. Before it waits, what was sent is flushed.
    ///
    /// # Blocking
    /// Until there is a message, or the peer has closed or died.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn recv(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        let (sender, receiver) = (&mut self.sender.0, &mut self.receiver.0);
        receiver.complete(
            |reader| reader.recv(buffer),
            Deadline::NEVER,
            || {
                sender.push();
                None
            },
        )
    }

    /// Returns the counters of both directions, as this endpoint counts them.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        statistics(&self.sender.0, &self.receiver.0)
    }

    /// Returns who the peer is, as the backend says.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.receiver.0.ring.waiter.end().peer()
    }

    /// Returns what is known of the peer's life now: it tells a paused peer from one that is gone. May cost a few system calls.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        self.receiver.0.ring.waiter.end().liveness()
    }

    /// Returns a [`Watch`]: it tells of the peer while other threads use the halves.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(self.receiver.0.ring.waiter.end())
    }
}

impl MessageSender {
    /// Sends one message: all of it or nothing.
    ///
    /// # Blocking
    /// Until there is room for all of it.
    ///
    /// # Errors
    /// [`Error::TooLarge`](crate::Error::TooLarge) where it can never fit; [`Error::Closed`](crate::Error::Closed) and
    /// [`Error::PeerGone`](crate::Error::PeerGone) where nobody receives any more;
    /// [`Error::Corrupt`](crate::Error::Corrupt) where the peer broke the specification.
    #[inline]
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        self.send_until(message, Deadline::NEVER)
    }

    /// Sends one message as [`send`](Self::send), at most until `deadline`.
    ///
    /// # Blocking
    /// Until there is room for all of it, at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut), nothing was sent then; and as [`send`](Self::send).
    #[inline]
    pub fn send_until(&mut self, message: &[u8], deadline: Deadline) -> Result<()> {
        if self.0.try_at_once(|writer| writer.send_at_once(message)) {
            Ok(())
        } else {
            self.send_at_length(message, deadline)
        }
    }

    #[inline(never)]
    fn send_at_length(&mut self, message: &[u8], deadline: Deadline) -> Result<()> {
        self.0.complete(|writer| writer.send(message), || record::span(message.len() as u64), deadline, || Ok(()))
    }

    /// Sends one message if there is room for it. Never blocks.
    ///
    /// Returns `None` where there is not; nothing was sent then.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    #[inline]
    pub fn try_send(&mut self, message: &[u8]) -> Result<Option<()>> {
        if self.0.try_at_once(|writer| writer.send_at_once(message)) {
            Ok(Some(()))
        } else {
            self.try_send_at_length(message)
        }
    }

    #[inline(never)]
    fn try_send_at_length(&mut self, message: &[u8]) -> Result<Option<()>> {
        self.0.attempt(|writer| writer.send(message), || record::span(message.len() as u64))
    }

    /// Sends `parts`, one after the other, as one message.
    ///
    /// # Blocking
    /// Until there is room for all of it, at most until `deadline`.
    ///
    /// # Errors
    /// As [`send_until`](Self::send_until).
    pub fn send_vectored_until(&mut self, parts: &[IoSlice<'_>], deadline: Deadline) -> Result<()> {
        let span = || record::span(parts.iter().map(|part| part.len() as u64).sum());
        self.0.complete(|writer| writer.send_vectored(parts), span, deadline, || Ok(()))
    }

    /// Sends `parts` as one message if there is room for it. Never blocks.
    ///
    /// Returns `None` where there is not; nothing was sent then.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_send_vectored(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<()>> {
        let span = || record::span(parts.iter().map(|part| part.len() as u64).sum());
        self.0.attempt(|writer| writer.send_vectored(parts), span)
    }

    /// Returns the largest message that this endpoint can send, in bytes: its ring less eight.
    #[must_use]
    pub fn message_max(&mut self) -> u64 {
        self.0.ring.half.message_max()
    }
}

impl MessageReceiver {
    /// Receives the next message into `buffer`. Returns its length; `None` is the end.
    ///
    /// # Blocking
    /// Until there is a message, or the peer has closed or died.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`](crate::Error::BufferTooSmall) says how long the message is, which stays the next;
    /// [`Error::Corrupt`](crate::Error::Corrupt) where the peer broke the specification.
    #[inline]
    pub fn recv(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        self.recv_until(buffer, Deadline::NEVER)
    }

    /// Receives the next message as [`recv`](Self::recv), at most until `deadline`.
    ///
    /// # Blocking
    /// Until there is a message, or the peer has closed or died; at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut), and as [`recv`](Self::recv).
    #[inline]
    pub fn recv_until(&mut self, buffer: &mut [u8], deadline: Deadline) -> Result<Option<usize>> {
        self.0.complete(|reader| reader.recv(buffer), deadline, || None)
    }

    /// Receives the next message if there is one. Never blocks.
    ///
    /// Returns `Pending` while there is none, `Ready(None)` at the end.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    #[inline]
    pub fn try_recv(&mut self, buffer: &mut [u8]) -> Result<Poll<Option<usize>>> {
        self.0.attempt(|reader| reader.recv(buffer))
    }

    /// Returns the message that was last peeked at to the peer, as received.
    ///
    /// # Panics
    /// If none was.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt); [`BackendError::Revoked`](tombolo_domain::Error::Revoked) where the
    /// memory was taken back meanwhile, so that what was seen was not the peer's.
    pub fn consume(&mut self) -> Result<()> {
        self.0.consumed(0)
    }
}

/// The receiving half's descriptor, as [`Rx::poll_fd`](crate::Rx::poll_fd).
///
/// # Panics
/// If the process has no descriptor to spare at the first call; `poll_fd` returns an error instead.
impl AsFd for Messages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.poll_fd().expect("a descriptor to spare")
    }
}
