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

/// The words and data that a [`Reader`] is made of.
#[derive(Debug)]
pub struct ReaderParts<M: Mem> {
    /// The first ring.
    pub ring: PeerRing<M>,
    /// Own position.
    pub head: M::OwnWord,
    /// Own wait word.
    pub want_data: M::OwnWord,
    /// Own state.
    pub state: M::OwnWord,
    /// The writer's wait word.
    pub want_space: M::PeerWord,
    /// The writer's state.
    pub writer_state: M::PeerWord,
    /// Position of the first byte.
    pub start: u64,
    /// Records instead of a stream.
    pub messages: bool,
    /// Who fences.
    pub ordering: FenceMode,
}

/// The reading half of a pipe: one reader, who alone writes the head, its wait word and its state.
///
/// No call blocks; where there is nothing the answer is `Ok(None)`, and `wait` waits. At the end of file, calls answer
/// `Ok(None)` too and [`finished`](Self::finished) tells. After each call the doorbell must be rung if
/// [`take_ring`](Self::take_ring) says so.
#[derive(Debug)]
pub struct Reader<M: Mem> {
    pub(crate) flow: Inflow<M>,
}

impl<M: Mem> Reader<M> {
    /// A reader at the beginning of its pipe. Publishes that it is open.
    pub fn new(parts: ReaderParts<M>) -> Self {
        Self { flow: Inflow::new(parts) }
    }

    /// Reads what is there into `to`, at most as much as fits, at least one byte; `None` while there is nothing.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where the writer's words are impossible.
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

    /// Reads what is there into `to`, all of that or nothing if `whole`, where that is short work: how many bytes. Of 0
    /// [`read`](Self::read) knows more: it may find some, or why there are none.
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

    /// Bytes published and not yet read, as last seen.
    #[inline]
    #[must_use]
    pub fn available(&self) -> u64 {
        self.flow.available()
    }

    /// Position of the next byte to be read.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.flow.head
    }

    /// Largest record that this ring takes, in bytes.
    #[must_use]
    pub fn message_max(&self) -> u64 {
        limits::message_max(self.flow.ring.capacity)
    }

    /// Bytes of the ring.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.flow.ring.capacity
    }

    /// Whether the doorbell must be rung now; asking answers it.
    #[inline]
    #[must_use]
    pub fn take_ring(&mut self) -> bool {
        self.flow.notifier.take_pending()
    }

    /// Whether what was shown since the last call, or found wrong, came from memory that is still there (D-3).
    ///
    /// # Errors
    /// [`Error::Revoked`] where it was taken away.
    #[inline]
    pub fn check_memory(&mut self) -> Result<(), Error> {
        self.flow.check_memory()
    }

    /// Loads the tail again, whatever is cached, and says how many bytes there are. Where there are none, all that was read is
    /// handed back.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where it is impossible.
    pub fn refresh(&mut self) -> Result<u64, Error> {
        self.flow.look_at_tail()?;
        if self.flow.available() == 0 && !self.flow.follow()? {
            self.flow.release();
        }
        Ok(self.flow.available())
    }

    /// Hands back all that was read, now: for one who has the other pipe to wait on. Otherwise it is done in steps, and
    /// before this reader waits.
    #[inline]
    pub fn hand_back(&mut self) {
        self.flow.release();
    }

    /// What was counted.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.flow.counters()
    }

    /// Wants no more: the writer's next call fails.
    pub fn close(&mut self) {
        self.flow.finish(Phase::Closed);
    }

    /// Gives up: like [`close`](Self::close), said differently.
    pub fn abort(&mut self) {
        self.flow.finish(Phase::Aborted);
    }

    /// How the pipe ended for one who has read everything. `None` while more may come; else whether the writer closed in
    /// order or gave up in the middle, of a record for instance.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its state word is impossible.
    pub fn finished(&mut self) -> Result<Option<Phase>, Error> {
        self.flow.look_at_writer()?;
        if matches!(self.flow.writer.phase, Phase::Fresh | Phase::Open) {
            return Ok(None);
        }
        // The final tail is visible with the state; only what is left decides.
        self.flow.look_at_tail()?;
        if self.flow.available() == 0 && self.flow.follow()? {
            return Ok(None);
        }
        // The rest is in a ring that is to be taken first (H-9).
        if self.handover().is_behind() {
            return Ok(None);
        }
        Ok(match (self.flow.available(), self.flow.partial_record()?) {
            (0, _) => Some(self.flow.writer.phase),
            (_, true) => Some(Phase::Aborted),
            (_, false) => None,
        })
    }

    /// Whether the writer has closed or given up, looked at afresh; what it published before may still be there.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its state word is impossible.
    pub fn writer_closed(&mut self) -> Result<bool, Error> {
        self.flow.look_at_writer()?;
        Ok(matches!(self.flow.writer.phase, Phase::Closed | Phase::Aborted))
    }

    /// The steps by which this reader follows its pipe to another ring.
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
        // The end, or a ring to follow to, is something to tell the caller.
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

    fn take_ring(&mut self) -> bool {
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
