// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two halves of a channel, generic over its mode, with everything that streams and messages have in common.

use std::{
    marker::PhantomData,
    os::fd::{AsFd, BorrowedFd},
    task::Poll,
    time::Duration,
};

use tombolo_domain::Deadline;
use tombolo_ring::{FlushPolicy, Peeked, Reserved};

use crate::{
    Ending, PipeStatistics, Result,
    mode::{MessageMode, Mode, StreamMode},
    receiving::Receiving,
    sending::Sending,
};

/// The receiving half of a channel: [`ReadHalf`] of a stream, [`MessageReceiver`] of messages.
///
/// These methods do not depend on what the channel carries. Dropping the half closes it, as [`close`](Self::close)
/// does.
///
/// # Example
/// ```
/// use tombolo::{Deadline, Ending, ReadHalf};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let address = format!("local:{}/numbers", folder.path().display());
/// # let mut listener = tombolo::listen(&address)?;
/// # let client = std::thread::spawn(move || tombolo::connect(&address));
/// # let (_, mut tx) = listener.accept()?.into_split();
/// let (mut rx, _): (ReadHalf, _) = client.join().unwrap()?.into_split();
/// # tx.write_all_until(b"42", Deadline::NEVER)?;
/// # tx.close();
/// while rx.wait_until(Deadline::NEVER)? {
///     let (first, second) = rx.peek()?.expect("it was waited for");
///     let len = first.len() + second.len();
///     rx.consume(len)?;
/// }
/// assert_eq!(rx.ending(), Some(Ending::Closed));
/// assert_eq!(rx.statistics().counters.bytes, 2);
/// # Ok::<(), tombolo::Error>(())
/// ```
#[derive(Debug)]
pub struct Rx<M: Mode>(pub(crate) Receiving, PhantomData<fn() -> M>);

/// The sending half of a channel: [`WriteHalf`] of a stream, [`MessageSender`] of messages.
///
/// These methods do not depend on what the channel carries. Dropping the half closes it, as [`close`](Self::close)
/// does.
///
/// # Example
/// ```
/// use tombolo::{Deadline, WriteHalf};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let address = format!("local:{}/numbers", folder.path().display());
/// # let mut listener = tombolo::listen(&address)?;
/// # let client = std::thread::spawn(move || tombolo::connect(&address));
/// # let mut peer = listener.accept()?;
/// let (_, mut tx): (_, WriteHalf) = client.join().unwrap()?.into_split();
/// let (first, second) = tx.reserve_until(3, Deadline::NEVER)?;
/// first.copy_from_slice(b"abc"); // `second` is empty: the ring does not wrap here
/// assert!(second.is_empty());
/// tx.commit(3)?;
/// # let mut bytes = [0; 3];
/// # std::io::Read::read_exact(&mut peer, &mut bytes).unwrap();
/// # assert_eq!(&bytes, b"abc");
/// # Ok::<(), tombolo::Error>(())
/// ```
#[derive(Debug)]
pub struct Tx<M: Mode>(pub(crate) Sending, PhantomData<fn() -> M>);

/// The reading half of a [`Stream`](crate::Stream).
///
/// # Example
/// See [`Rx`].
pub type ReadHalf = Rx<StreamMode>;

/// The writing half of a [`Stream`](crate::Stream).
///
/// # Example
/// See [`Tx`].
pub type WriteHalf = Tx<StreamMode>;

/// The receiving half of [`Messages`](crate::Messages).
///
/// # Example
/// See [`Messages`](crate::Messages).
pub type MessageReceiver = Rx<MessageMode>;

/// The sending half of [`Messages`](crate::Messages).
///
/// # Example
/// See [`Messages`](crate::Messages).
pub type MessageSender = Tx<MessageMode>;

impl<M: Mode> Rx<M> {
    pub(crate) fn new(receiving: Receiving) -> Self {
        Self(receiving, PhantomData)
    }

    /// Shows what can be read next, in the ring itself and without a copy. Never blocks.
    ///
    /// A stream shows all its unread bytes; messages show the next one. Returns `None` while there is nothing, and at
    /// the end; [`ending`](Self::ending) tells which. Release what you have read with `consume`.
    ///
    /// The peer can change these bytes at any time: copy what you check, and check the copy.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) where the peer violated the specification.
    pub fn peek(&mut self) -> Result<Option<Peeked<'_>>> {
        match self.0.attempt(|reader| Ok(M::find(reader)?.then_some(())))? {
            Poll::Ready(Some(())) => Ok(self.0.ring.half.in_place().found()),
            _ => Ok(None),
        }
    }

    /// Waits until [`peek`](Self::peek) has something to show. Returns `false` at the end.
    ///
    /// # Blocking
    /// Blocks until there is something to read, or the peer has closed or died; at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut) at the deadline; [`Error::Corrupt`](crate::Error::Corrupt).
    pub fn wait_until(&mut self, deadline: Deadline) -> Result<bool> {
        self.0.complete(|reader| Ok(M::is_ready(reader)?.then_some(())), deadline, || None).map(|there| there.is_some())
    }

    /// Returns the room of everything that was read to the peer at once. Never blocks.
    ///
    /// A half that is in use does this by itself. Call this before you wait for something else, so that a peer that
    /// waits for room can continue.
    ///
    /// # Errors
    /// None today.
    #[inline]
    pub fn release(&mut self) -> Result<()> {
        self.0.release()
    }

    /// Returns how the peer's side ended, or `None` until a read has found the end.
    #[must_use]
    pub fn ending(&self) -> Option<Ending> {
        self.0.ending()
    }

    /// Closes this half: the peer's writes and sends fail from now on. Never blocks.
    pub fn close(&mut self) {
        self.0.ring.close();
    }

    /// Sets the longest time to spin before each sleep; see [`Options::spin`](crate::Options::spin).
    pub fn set_spin(&mut self, most: Duration) {
        self.0.ring.waiter.set_spin(most);
    }

    /// Returns this direction's counters, as this endpoint counts them.
    #[must_use]
    pub fn statistics(&self) -> PipeStatistics {
        self.0.ring.statistics()
    }

    /// Returns a descriptor that polls readable (`POLLIN`) while there may be something to read.
    ///
    /// It works with poll and epoll, level- and edge-triggered; never read or close it. After it polled readable, call
    /// a `try_` method until that reports would-block (edge), or as often as you like (level). It is readable at first,
    /// and may be readable without cause.
    ///
    /// # Errors
    /// [`BackendError::Limit`](tombolo_domain::Error::Limit) where the process has no descriptor to spare.
    pub fn poll_fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.ring.waiter.pollable()
    }
}

impl<M: Mode> Tx<M> {
    pub(crate) fn new(sending: Sending) -> Self {
        Self(sending, PhantomData)
    }

    /// Reserves room for `len` bytes in the ring, to fill in place and then publish with [`commit`](Self::commit).
    ///
    /// Returns the room as two slices; the second is empty unless the ring wraps there. The peer sees nothing before
    /// the commit. The next call that writes or sends ends the reservation.
    ///
    /// # Blocking
    /// Blocks until there is that much room at once, at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TooLarge`](crate::Error::TooLarge) for more than the ring can hold;
    /// [`Error::Closed`](crate::Error::Closed) and [`Error::PeerGone`](crate::Error::PeerGone) where the peer no longer
    /// reads; [`Error::TimedOut`](crate::Error::TimedOut); [`Error::Corrupt`](crate::Error::Corrupt).
    pub fn reserve_until(&mut self, len: usize, deadline: Deadline) -> Result<Reserved<'_>> {
        let span = || M::span(len as u64);
        self.0.complete(|writer| Ok(writer.in_place().find_room(len)?.then_some(())), span, deadline, || Ok(()))?;
        Ok(self.0.ring.half.in_place().found_room(len).expect("there was room, and only the writer takes it"))
    }

    /// Reserves room like [`reserve_until`](Self::reserve_until), if there is that much now. Never blocks.
    ///
    /// Returns `None` where there is less room.
    ///
    /// # Errors
    /// Those of [`reserve_until`](Self::reserve_until), except the deadline's.
    pub fn try_reserve(&mut self, len: usize) -> Result<Option<Reserved<'_>>> {
        let span = || M::span(len as u64);
        match self.0.attempt(|writer| Ok(writer.in_place().find_room(len)?.then_some(())), span)? {
            Some(()) => Ok(self.0.ring.half.in_place().found_room(len)),
            None => Ok(None),
        }
    }

    /// Publishes the first `len` bytes of the last reservation: as bytes of the stream, or as one message.
    ///
    /// # Errors
    /// [`Error::TooLarge`](crate::Error::TooLarge) for more than was reserved; otherwise those of
    /// [`reserve_until`](Self::reserve_until), except the deadline's.
    pub fn commit(&mut self, len: usize) -> Result<()> {
        self.0.commit(len)
    }

    /// Notifies a sleeping peer of the bytes for which a batching [`FlushPolicy`] held back the notification. Never
    /// blocks.
    ///
    /// # Errors
    /// [`Error::PeerGone`](crate::Error::PeerGone).
    pub fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }

    /// Waits until the peer has read everything that was written.
    ///
    /// # Blocking
    /// Blocks until the peer has reported this, which it does when it next looks for more; at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::Error::Closed) and [`Error::PeerGone`](crate::Error::PeerGone) where some of it will
    /// never be read; [`Error::TimedOut`](crate::Error::TimedOut); [`Error::Corrupt`](crate::Error::Corrupt).
    pub fn drained_until(&mut self, deadline: Deadline) -> Result<()> {
        self.0.drained(deadline)
    }

    /// Begins to move this direction to a ring of `bytes` bytes, rounded up to a power of two. Never blocks.
    ///
    /// Each write continues the move, and the peer follows when it next reads. Nothing is lost, duplicated or
    /// reordered. [`is_moving`](Self::is_moving) returns `false` once the move is done.
    ///
    /// # Errors
    /// [`Error::Handover`](crate::Error::Handover) where the peer cannot follow or the previous move is not finished;
    /// [`Error::TooLarge`](crate::Error::TooLarge) for more than the peer maps; the backend's error where it has no
    /// memory.
    pub fn resize(&mut self, bytes: u64) -> Result<()> {
        let size = crate::Options::new().ring_size(bytes).capacity.expect("just set");
        self.0.resize(size)
    }

    /// Returns whether a move to another ring is under way.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.0.moves.is_under_way()
    }

    /// Sets when a write checks whether the peer sleeps; see [`FlushPolicy`].
    pub fn set_flush_policy(&mut self, policy: FlushPolicy) {
        self.0.ring.half.set_flush_policy(policy);
    }

    /// Sets the longest time to spin before each sleep; see [`Options::spin`](crate::Options::spin).
    pub fn set_spin(&mut self, most: Duration) {
        self.0.ring.waiter.set_spin(most);
    }

    /// Returns this direction's counters, as this endpoint counts them.
    #[must_use]
    pub fn statistics(&self) -> PipeStatistics {
        self.0.moves.statistics(&self.0.ring)
    }

    /// Closes this half in order: the peer reads the remaining data and then finds [`Ending::Closed`]. Never blocks.
    pub fn close(&mut self) {
        self.0.close();
    }

    /// Aborts this half: the peer reads the remaining data and then finds [`Ending::Aborted`]. Never blocks.
    pub fn abort(&mut self) {
        self.0.ring.abort();
    }

    /// Returns a descriptor that polls readable (`POLLIN`) while there may be room, after a `try_` method returned
    /// `None`.
    ///
    /// It works with poll and epoll like [`Rx::poll_fd`]; never read or close it.
    ///
    /// # Errors
    /// [`BackendError::Limit`](tombolo_domain::Error::Limit) where the process has no descriptor to spare.
    pub fn poll_fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.ring.waiter.pollable()
    }
}

/// Returns the descriptor of [`Rx::poll_fd`].
///
/// # Panics
/// If the process has no descriptor to spare at the first call; `poll_fd` returns an error instead.
impl<M: Mode> AsFd for Rx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll_fd().expect("a descriptor to spare")
    }
}

/// Returns the descriptor of [`Tx::poll_fd`].
///
/// # Panics
/// If the process has no descriptor to spare at the first call; `poll_fd` returns an error instead.
impl<M: Mode> AsFd for Tx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll_fd().expect("a descriptor to spare")
    }
}
