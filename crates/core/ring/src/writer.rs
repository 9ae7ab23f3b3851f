// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The writing half of a pipe.

mod handover;
mod outflow;
mod private;
mod reader_view;

use std::{io::IoSlice, time::Duration};

use tombolo_layout::{limits, record, state::Phase, words};
use tombolo_mem::{Mem, OwnWord};

pub(crate) use self::outflow::Outflow;
use self::outflow::{STEPPED_FROM, step_for};
pub use self::{handover::Handover, reader_view::ReaderView};
use crate::{
    Counters, Error, FenceMode,
    ring::OwnRing,
    wait::{Side, Waits},
};

/// When a write checks whether the reader is asleep (R-24).
///
/// A reader that is awake sees published bytes at once under either policy.
///
/// # Example
/// ```
/// # extern crate tombolo_ring as tombolo;
/// use std::time::Duration;
/// use tombolo::FlushPolicy;
///
/// // Wakes a sleeping reader for 64 KiB, or at the first write after 100 µs. Call `flush` when you stop writing.
/// let policy = FlushPolicy::Batch { bytes: 64 << 10, time: Duration::from_micros(100) };
/// assert_ne!(policy, FlushPolicy::default());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FlushPolicy {
    /// At every write.
    #[default]
    Immediate,
    /// At the first write after so many bytes or so much time, and always before the writer waits or closes. A writer
    /// that stops writing in between must call `flush`.
    Batch {
        /// Number of bytes after which a write checks.
        bytes: u64,
        /// Time after which a write checks.
        time: Duration,
    },
}

/// Words and data that make up a [`Writer`].
#[derive(Debug)]
pub struct WriterParts<M: Mem> {
    /// First ring.
    pub ring: OwnRing<M>,
    /// The writer's own wait word (R-10).
    pub want_space: M::OwnWord,
    /// The writer's own state (R-15).
    pub state: M::OwnWord,
    /// Position of the reader (R-3).
    pub head: M::PeerWord,
    /// Wait word of the reader (R-10).
    pub want_data: M::PeerWord,
    /// State of the reader (R-15).
    pub reader_state: M::PeerWord,
    /// Position of the first byte.
    pub start: u64,
    /// Whether the pipe carries records instead of a stream.
    pub messages: bool,
    /// Fence mode: which side pays for the order of a store and a load.
    pub ordering: FenceMode,
}

/// The writing half of a pipe. Its one writer alone writes the ring, its tail, its wait word and its state.
///
/// No call blocks. Where there is no room a call returns `Ok(None)`, and `wait` waits. After each call the peer must be
/// notified through the doorbell if [`take_notification`](Self::take_notification) returns true.
#[derive(Debug)]
pub struct Writer<M: Mem> {
    pub(crate) flow: Outflow<M>,
}

impl<M: Mem> Writer<M> {
    /// Makes a writer at the beginning of its pipe. Publishes that it is open.
    pub fn new(parts: WriterParts<M>) -> Self {
        Self { flow: Outflow::new(parts) }
    }

    /// Writes as much of `bytes` as there is room for, at least one byte. Returns the number of bytes written, or
    /// `None` if there is no room.
    ///
    /// # Errors
    /// [`Error::Closed`] if the reader has closed, [`Error::Corrupt`] if the reader's words are impossible.
    #[inline]
    pub fn write(&mut self, bytes: &[u8]) -> Result<Option<usize>, Error> {
        if self.write_at_once(bytes) {
            return Ok(Some(bytes.len()));
        }
        self.flow.write_in_steps(bytes)
    }

    /// Writes all of `bytes` if that is short work, and returns whether it did. If not, call [`write`](Self::write).
    #[inline(always)]
    pub fn write_at_once(&mut self, bytes: &[u8]) -> bool {
        let len = bytes.len() as u64;
        if len > self.flow.limit.wrapping_sub(self.flow.tail) || len > STEPPED_FROM || !self.flow.is_open() {
            return false;
        }
        self.flow.stores.copy_in(&mut self.flow.ring, self.flow.tail, bytes);
        self.flow.publish(len);
        self.flow.prepare(len);
        self.flow.records += 1;
        true
    }

    /// Writes as much of `parts`, in order, as there is room for; see [`write`](Self::write).
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        let mut written = 0;
        for part in parts.iter().filter(|part| !part.is_empty()) {
            match self.write(part) {
                Ok(Some(n)) => {
                    written += n;
                    if n < part.len() {
                        break;
                    }
                }
                Ok(None) if written == 0 => return Ok(None),
                Err(error) if written == 0 => return Err(error),
                Ok(None) | Err(_) => break,
            }
        }
        Ok(Some(written))
    }

    /// Sends one record, whole or not at all. Returns `None` while there is no room for it.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if it can never fit; otherwise as [`write`](Self::write).
    #[inline]
    pub fn send(&mut self, payload: &[u8]) -> Result<Option<()>, Error> {
        if self.send_at_once(payload) {
            return Ok(Some(()));
        }
        self.send_vectored(&[IoSlice::new(payload)])
    }

    /// Sends one record if that is short work, and returns whether it did. If not, call [`send`](Self::send).
    #[inline(always)]
    pub fn send_at_once(&mut self, payload: &[u8]) -> bool {
        let span = record::span(payload.len() as u64);
        if span > self.flow.limit.wrapping_sub(self.flow.tail) || span > STEPPED_FROM || !self.flow.is_open() {
            return false;
        }
        self.flow.ring.put_word(self.flow.tail, payload.len() as u64);
        self.flow.stores.copy_in(&mut self.flow.ring, self.flow.tail.wrapping_add(limits::RECORD_ALIGN), payload);
        self.flow.publish(span);
        self.flow.prepare(span);
        self.flow.records += 1;
        true
    }

    /// Sends the concatenation of `parts` as one record; see [`send`](Self::send).
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_vectored(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<()>, Error> {
        let len = parts.iter().map(|part| part.len() as u64).sum::<u64>();
        if !self.flow.make_room(len)? {
            return Ok(None);
        }
        let end = self.flow.tail.wrapping_add(record::span(len));
        self.flow.ring.put_word(self.flow.tail, len);
        let mut at = self.flow.tail.wrapping_add(limits::RECORD_ALIGN);
        // Steps are multiples of eight, as every published position is in message mode (R-23).
        let step = step_for(len);
        for part in parts {
            for piece in part.chunks(step as usize) {
                self.flow.stores.copy_in(&mut self.flow.ring, at, piece);
                at = at.wrapping_add(piece.len() as u64);
                let whole = (at.wrapping_sub(self.flow.tail)) & !(limits::RECORD_ALIGN - 1);
                if whole >= step {
                    self.flow.publish(whole);
                }
            }
        }
        self.flow.publish(end.wrapping_sub(self.flow.tail));
        self.flow.records += 1;
        Ok(Some(()))
    }

    /// Returns the number of bytes that there is room for, as far as this endpoint knows.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.flow.room()
    }

    /// Returns the size in bytes of the largest record that this ring takes (R-21), or that the [first of several
    /// rings](Handover::keep_message_max) took.
    #[must_use]
    pub fn message_max(&self) -> u64 {
        limits::message_max(self.flow.ring.capacity).min(self.flow.longest)
    }

    /// Returns the size of the ring in bytes.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.flow.ring.capacity
    }

    /// Returns the number of bytes published and not yet read, as far as this endpoint knows.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.flow.in_flight()
    }

    /// Returns the position after the last byte published.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.flow.tail
    }

    /// Sets when writes check for a sleeping reader.
    pub fn set_flush_policy(&mut self, policy: FlushPolicy) {
        self.flow.flush();
        self.flow.policy = policy;
    }

    /// Checks whether the reader is asleep and has to be woken for what was published (R-24).
    #[inline]
    pub fn flush(&mut self) {
        self.flow.flush();
    }

    /// Returns whether the peer must be notified now, and clears that request.
    #[inline]
    #[must_use]
    pub fn take_notification(&mut self) -> bool {
        self.flow.notifier.take_pending()
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.flow.counters()
    }

    /// Closes the writer, which publishes nothing more: the reader drains what is there and then finds the end (R-16).
    pub fn close(&mut self) {
        self.flow.finish(Phase::Closed);
    }

    /// Aborts the pipe: the reader still finds what was published, then learns that more was to come (R-19).
    pub fn abort(&mut self) {
        self.flow.finish(Phase::Aborted);
    }

    /// Returns whether [`close`](Self::close) or [`abort`](Self::abort) was called.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.flow.state.phase != Phase::Open
    }

    /// Returns this writer's view of its reader.
    pub fn reader(&mut self) -> ReaderView<'_, M> {
        ReaderView { flow: &mut self.flow }
    }

    /// Returns the steps by which the pipe moves to another ring.
    pub fn handover(&mut self) -> Handover<'_, M> {
        Handover { flow: &mut self.flow }
    }
}

impl<M: Mem> Side for Writer<M> {
    type Mem = M;

    #[inline]
    fn ready(&mut self, need: u64) -> Result<bool, Error> {
        if self.flow.room() >= need || self.flow.look_at_head()? >= need {
            return Ok(true);
        }
        // The caller must be told of a closed reader, and of a ring to go on in.
        self.flow.look_at_reader()?;
        Ok(matches!(self.flow.reader.phase, Phase::Closed | Phase::Aborted) || self.flow.reader_ready()?)
    }

    fn arm(&mut self, need: u64) {
        // Asks for more than one byte: room for an eighth of the ring is worth a wake-up, and a drained ring always has
        // it. A writer that waits has less room than it needs, so after a switch (H-3) the target lies in the present
        // ring.
        let room = need.max(self.flow.ring.capacity / 8);
        let target = self.flow.tail.wrapping_add(room).wrapping_sub(self.flow.ring.capacity);
        // ORDER R-12: Relaxed; the fence (A2) in `wait` pairs with the notifier's (B2).
        self.flow.want_space.store_relaxed(words::armed(target));
    }

    fn before_spin(&mut self) {
        self.flow.flush();
    }

    fn before_sleep(&mut self) {
        self.flow.notifier.check_peer(self.flow.tail);
    }

    fn take_notification(&mut self) -> bool {
        self.flow.notifier.take_pending()
    }

    fn ordering(&self) -> FenceMode {
        self.flow.ordering
    }

    fn waits(&mut self) -> &mut Waits {
        &mut self.flow.waits
    }

    fn counted(&self) -> Counters {
        self.flow.counters()
    }
}
