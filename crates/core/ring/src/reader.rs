// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The reading half of a pipe.

mod handover;
mod inflow;
mod private;
mod records;

use std::io::IoSliceMut;

use tombolo_layout::{limits, state::Phase, words};
use tombolo_mem::{Mem, OwnWord};

pub use self::handover::Handover;
pub(crate) use self::inflow::Inflow;
use self::inflow::SHORT_WORK;
use crate::{
    Counters, Error, FenceMode,
    ring::PeerRing,
    wait::{Side, Waits},
};

/// Words and data that make up a [`Reader`].
#[derive(Debug)]
pub struct ReaderParts<M: Mem> {
    /// First ring.
    pub ring: PeerRing<M>,
    /// The reader's own position.
    pub head: M::OwnWord,
    /// The reader's own wait word.
    pub want_data: M::OwnWord,
    /// The reader's own state.
    pub state: M::OwnWord,
    /// Wait word of the writer.
    pub want_space: M::PeerWord,
    /// State of the writer.
    pub writer_state: M::PeerWord,
    /// Position of the first byte.
    pub start: u64,
    /// Whether the pipe carries records instead of a stream.
    pub messages: bool,
    /// Fence mode: which side pays for the order of a store and a load.
    pub ordering: FenceMode,
}

/// The reading half of a pipe. Its one reader alone writes the head, its wait word and its state.
///
/// No call blocks. Where there is nothing to read a call returns `Ok(None)`, and `wait` waits. At the end of file calls
/// return `Ok(None)` as well, and [`finished`](Self::finished) tells the two apart. After each call the peer must be
/// notified through the doorbell if [`take_notification`](Self::take_notification) returns true.
#[derive(Debug)]
pub struct Reader<M: Mem> {
    pub(crate) flow: Inflow<M>,
}

impl<M: Mem> Reader<M> {
    /// Makes a reader at the beginning of its pipe. Publishes that it is open.
    pub fn new(parts: ReaderParts<M>) -> Self {
        Self { flow: Inflow::new(parts) }
    }

    /// Reads the available bytes into `to`, as many as fit and at least one. Returns their number, or `None` if there
    /// are none.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the writer's words are impossible.
    #[inline]
    pub fn read(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error> {
        let len = to.len() as u64;
        if len <= self.flow.available() && len <= self.flow.release_step {
            self.flow.ring.copy_out(self.flow.head, to);
            self.flow.advance(len)?;
            self.flow.records += 1;
            return Ok(Some(to.len()));
        }
        self.flow.read_in_steps(to)
    }

    /// Reads the available bytes into `to` if that is short work; with `whole` only if they fill `to`. Returns their
    /// number. After 0 call [`read`](Self::read): it may find some, or tells why there are none.
    #[inline]
    pub fn read_at_once(&mut self, to: &mut [u8], whole: bool) -> usize {
        let len = to.len() as u64;
        if len > SHORT_WORK.min(self.flow.release_step)
            || (len > self.flow.available() && self.flow.look_at_tail().is_err())
        {
            return 0;
        }
        let there = len.min(self.flow.available());
        if there == 0 || (whole && there < len) {
            return 0;
        }
        self.flow.ring.copy_out(self.flow.head, &mut to[..there as usize]);
        if self.flow.advance(there).is_err() {
            return 0;
        }
        self.flow.records += 1;
        there as usize
    }

    /// Reads into `parts` in order; see [`read`](Self::read).
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Error> {
        let mut done = 0;
        for part in parts.iter_mut().filter(|part| !part.is_empty()) {
            match self.read(part) {
                Ok(Some(n)) => {
                    done += n;
                    if n < part.len() {
                        break;
                    }
                }
                Ok(None) if done == 0 => return Ok(None),
                Err(error) if done == 0 => return Err(error),
                Ok(None) | Err(_) => break,
            }
        }
        Ok(Some(done))
    }

    /// Returns the number of bytes published and not yet read, as last seen.
    #[inline]
    #[must_use]
    pub fn available(&self) -> u64 {
        self.flow.available()
    }

    /// Returns the position of the next byte to be read.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.flow.head
    }

    /// Returns the size in bytes of the largest record that this ring takes.
    #[must_use]
    pub fn message_max(&self) -> u64 {
        limits::message_max(self.flow.ring.capacity)
    }

    /// Returns the size of the ring in bytes.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.flow.ring.capacity
    }

    /// Returns whether the peer must be notified now, and clears that request.
    #[inline]
    #[must_use]
    pub fn take_notification(&mut self) -> bool {
        self.flow.notifier.take_pending()
    }

    /// Checks that the bytes shown since the last call, or an error found, came from memory that is still there (D-3).
    ///
    /// # Errors
    /// [`Error::Revoked`] if the memory was taken away.
    #[inline]
    pub fn check_memory(&mut self) -> Result<(), Error> {
        self.flow.check_memory()
    }

    /// Loads the tail again, whatever is cached, and returns the number of bytes that can be read. If there are none,
    /// hands back all that was read.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the tail is impossible.
    pub fn refresh(&mut self) -> Result<u64, Error> {
        self.flow.look_at_tail()?;
        if self.flow.available() == 0 && !self.flow.follow()? {
            self.flow.release();
        }
        Ok(self.flow.available())
    }

    /// Hands back at once all that was read, for a caller that is about to wait on the other pipe. Otherwise space is
    /// handed back in steps, and before this reader waits.
    #[inline]
    pub fn hand_back(&mut self) {
        self.flow.release();
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.flow.counters()
    }

    /// Closes the reader, which wants no more bytes: the writer's next call fails.
    pub fn close(&mut self) {
        self.flow.finish(Phase::Closed);
    }

    /// Aborts the pipe: like [`close`](Self::close), but published as *aborted* (R-19).
    pub fn abort(&mut self) {
        self.flow.finish(Phase::Aborted);
    }

    /// Returns how the pipe ended, for a reader that has read everything: whether the writer closed in order or
    /// gave up in the middle, of a record for instance. Returns `None` while more may come.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the writer's state word is impossible.
    pub fn finished(&mut self) -> Result<Option<Phase>, Error> {
        self.flow.look_at_writer()?;
        if matches!(self.flow.writer.phase, Phase::Fresh | Phase::Open) {
            return Ok(None);
        }
        // The final tail is visible with the state; only the bytes that are left decide.
        self.flow.look_at_tail()?;
        if self.flow.available() == 0 && self.flow.follow()? {
            return Ok(None);
        }
        // The rest is in a ring that must be taken first (H-9).
        if self.handover().is_behind() {
            return Ok(None);
        }
        Ok(match (self.flow.available(), self.flow.partial_record()?) {
            (0, _) => Some(self.flow.writer.phase),
            (_, true) => Some(Phase::Aborted),
            (_, false) => None,
        })
    }

    /// Loads the writer's state again and returns whether it has closed or aborted. Bytes that it published before may
    /// be left.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the writer's state word is impossible.
    pub fn writer_closed(&mut self) -> Result<bool, Error> {
        self.flow.look_at_writer()?;
        Ok(matches!(self.flow.writer.phase, Phase::Closed | Phase::Aborted))
    }

    /// Returns the steps by which this reader follows its pipe to another ring.
    pub fn handover(&mut self) -> Handover<'_, M> {
        Handover { flow: &mut self.flow }
    }
}

impl<M: Mem> Side for Reader<M> {
    type Mem = M;

    #[inline]
    fn ready(&mut self, need: u64) -> Result<bool, Error> {
        if self.flow.available() >= need {
            return Ok(true);
        }
        if let Some(error) = self.flow.broken {
            return Err(error);
        }
        self.flow.load_tail()?;
        if self.flow.available() >= need {
            self.flow.prefetch();
            return Ok(true);
        }
        // The caller must be told of the end, and of a ring to follow to.
        self.flow.look_at_writer()?;
        if self.flow.next.is_some() && self.handover().is_ready_beyond(need)? {
            return Ok(true);
        }
        let offered = self.flow.writer.ready != self.flow.told;
        Ok(offered || !matches!(self.flow.writer.phase, Phase::Fresh | Phase::Open))
    }

    fn arm(&mut self, need: u64) {
        self.flow.publish_head();
        // ORDER R-12: Relaxed; the fence (A2) in `wait` pairs with the notifier's (B2).
        self.flow.want_data.store_relaxed(words::armed(self.flow.head.wrapping_add(need)));
    }

    fn before_spin(&mut self) {
        self.flow.release();
    }

    fn before_sleep(&mut self) {
        self.flow.notifier.check_peer(self.flow.head);
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
