// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A channel of messages: each arrives whole or not at all, separate from the others and in order.

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

/// A channel of messages in both directions: each arrives whole or not at all, separate from the others and in order.
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

    /// Sends one message like [`MessageSender::send`]. Before it waits, it returns the room of received messages to the
    /// peer.
    ///
    /// # Blocking
    /// Blocks until there is room for the whole message.
    ///
    /// # Errors
    /// Those of [`MessageSender::send`].
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

    /// Receives the next message like [`MessageReceiver::recv`]. Before it waits, it flushes what was sent.
    ///
    /// # Blocking
    /// Blocks until there is a message, or the peer has closed or died.
    ///
    /// # Errors
    /// Those of [`MessageReceiver::recv`].
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

    /// Returns the peer's identity, as reported by the backend.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.receiver.0.ring.waiter.end().peer()
    }

    /// Returns the peer's liveness, which tells a paused peer from one that is gone. May cost a few system calls.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        self.receiver.0.ring.waiter.end().liveness()
    }

    /// Returns a [`Watch`], which reports on the peer while other threads use the halves.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(self.receiver.0.ring.waiter.end())
    }
}

impl MessageSender {
    /// Sends one message: all of it or nothing.
    ///
    /// # Blocking
    /// Blocks until there is room for the whole message.
    ///
    /// # Errors
    /// [`Error::TooLarge`](crate::Error::TooLarge) where the message can never fit;
    /// [`Error::Closed`](crate::Error::Closed) and [`Error::PeerGone`](crate::Error::PeerGone) where the peer no longer
    /// receives; [`Error::Corrupt`](crate::Error::Corrupt) where the peer violated the specification.
    #[inline]
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        self.send_until(message, Deadline::NEVER)
    }

    /// Sends one message like [`send`](Self::send), waiting at most until `deadline`.
    ///
    /// # Blocking
    /// Blocks until there is room for the whole message, at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut), in which case nothing was sent; and those of [`send`](Self::send).
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
    /// Returns `None` where there is no room; nothing was sent then.
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
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
    /// Blocks until there is room for the whole message, at most until `deadline`.
    ///
    /// # Errors
    /// Those of [`send_until`](Self::send_until).
    pub fn send_vectored_until(&mut self, parts: &[IoSlice<'_>], deadline: Deadline) -> Result<()> {
        let span = || record::span(parts.iter().map(|part| part.len() as u64).sum());
        self.0.complete(|writer| writer.send_vectored(parts), span, deadline, || Ok(()))
    }

    /// Sends `parts` as one message if there is room for all of them. Never blocks.
    ///
    /// Returns `None` where there is no room; nothing was sent then.
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    pub fn try_send_vectored(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<()>> {
        let span = || record::span(parts.iter().map(|part| part.len() as u64).sum());
        self.0.attempt(|writer| writer.send_vectored(parts), span)
    }

    /// Returns the length in bytes of the largest message that this endpoint can send: the size of its ring less eight.
    #[must_use]
    pub fn message_max(&mut self) -> u64 {
        self.0.ring.half.message_max()
    }
}

impl MessageReceiver {
    /// Receives the next message into `buffer`. Returns its length, or `None` at the end.
    ///
    /// # Blocking
    /// Blocks until there is a message, or the peer has closed or died.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`](crate::Error::BufferTooSmall) gives the length of the message, which stays the next
    /// one; [`Error::Corrupt`](crate::Error::Corrupt) where the peer violated the specification.
    #[inline]
    pub fn recv(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        self.recv_until(buffer, Deadline::NEVER)
    }

    /// Receives the next message like [`recv`](Self::recv), waiting at most until `deadline`.
    ///
    /// # Blocking
    /// Blocks until there is a message, or the peer has closed or died; at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut), and those of [`recv`](Self::recv).
    #[inline]
    pub fn recv_until(&mut self, buffer: &mut [u8], deadline: Deadline) -> Result<Option<usize>> {
        self.0.complete(|reader| reader.recv(buffer), deadline, || None)
    }

    /// Receives the next message if there is one. Never blocks.
    ///
    /// Returns `Pending` while there is none, `Ready(None)` at the end.
    ///
    /// # Errors
    /// Those of [`recv`](Self::recv).
    #[inline]
    pub fn try_recv(&mut self, buffer: &mut [u8]) -> Result<Poll<Option<usize>>> {
        self.0.attempt(|reader| reader.recv(buffer))
    }

    /// Marks the message of the last peek as received and returns its room to the peer.
    ///
    /// # Panics
    /// If no message was peeked at.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt); [`BackendError::Revoked`](tombolo_domain::Error::Revoked) where the
    /// memory was taken back meanwhile, so that the bytes seen were not the peer's.
    pub fn consume(&mut self) -> Result<()> {
        self.0.consumed(0)
    }
}

/// Returns the receiving half's descriptor, as [`Rx::poll_fd`](crate::Rx::poll_fd) does.
///
/// # Panics
/// If the process has no descriptor to spare at the first call; `poll_fd` returns an error instead.
impl AsFd for Messages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.poll_fd().expect("a descriptor to spare")
    }
}
