// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Follows a pipe to another ring: the reader's side (H-1 to H-4).

use tombolo_layout::state::State;
use tombolo_mem::{Mem, PeerWord};

use super::Inflow;
use crate::{Corrupt, Error, PeerRing};

/// Steps by which a reader follows its pipe to another ring; see [`Reader::handover`](super::Reader::handover).
#[derive(Debug)]
pub struct Handover<'a, M: Mem> {
    pub(crate) flow: &'a mut Inflow<M>,
}

impl<M: Mem> Handover<'_, M> {
    /// Returns the generation of the ring that the writer has announced and this reader has not taken yet, if any
    /// (H-1). An announcement ends each wait until this function is called once: a reader may leave an offer untaken.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the writer's state word is impossible.
    pub fn announced(&mut self) -> Result<Option<u16>, Error> {
        self.flow.look_at_writer()?;
        self.flow.told = self.flow.writer.ready;
        Ok((self.flow.writer.ready != self.flow.state.ready).then_some(self.flow.writer.ready))
    }

    /// Takes ring `generation`, which is mapped, and publishes that this reader is ready to follow (H-2). Call it only
    /// after [`announced`](Self::announced) returned that generation: the control message may arrive before the
    /// writer's announcement.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it is not the ring that was announced.
    pub fn prepare(&mut self, generation: u16, next: PeerRing<M>) -> Result<(), Error> {
        // The reader may have read everything before the last switch point without moving to the ring after it.
        self.flow.follow()?;
        if self.announced()? != Some(generation) || self.flow.next.is_some() {
            let (found, bound) = (generation.into(), self.flow.state.ready.wrapping_add(1).into());
            return self.flow.latch_error(Err(Corrupt { clause: "H-5", what: "a ring out of turn", found, bound }));
        }
        self.flow.next = Some(next);
        self.flow.publish_state(State { ready: generation, ..self.flow.state });
        Ok(())
    }

    /// Loads again and returns the number of bytes published and not read, in this ring and in the one that the writer
    /// has moved to.
    ///
    /// # Errors
    /// As [`Reader::refresh`](super::Reader::refresh).
    pub fn find_unread(&mut self) -> Result<u64, Error> {
        self.flow.look_at_writer()?;
        self.flow.load_tail()?;
        if self.flow.available() == 0 && !self.flow.follow()? {
            self.flow.release();
        }
        Ok(self.available_later()? + self.flow.available())
    }

    /// Returns the number of bytes in the next ring, if the writer has moved to it. They follow all bytes of this ring,
    /// whose tail is final.
    pub(crate) fn available_later(&mut self) -> Result<u64, Error> {
        if self.flow.next.is_none() {
            return Ok(0);
        }
        self.flow.look_at_writer()?;
        if !self.is_left() {
            return Ok(0);
        }
        self.flow.load_tail()?;
        let Some(next) = &self.flow.next else { return Ok(0) };
        let (end, bound) = (self.flow.tail_seen, next.capacity);
        // ORDER R-5: Acquire; pairs with the Release in Outflow::publish. The bytes before it may be read.
        let seen = next.tail.load_acquire().check(|tail| match tail.wrapping_sub(end) {
            ahead if ahead <= bound => Ok(ahead),
            _ => Err(Corrupt { clause: "R-7", what: "tail more than a ring beyond the switch", found: tail, bound }),
        });
        self.flow.latch_error(seen)
    }

    /// Moves to the next ring if nothing is left to read in this one. Returns whether it did, or whether `need` bytes
    /// are there together with those in the next ring.
    #[cold]
    #[inline(never)]
    pub(crate) fn is_ready_beyond(&mut self, need: u64) -> Result<bool, Error> {
        if !self.is_left() {
            return Ok(false);
        }
        Ok((self.flow.available() == 0 && self.flow.follow()?)
            || self.flow.available() + self.available_later()? >= need)
    }

    /// Returns how many bytes beyond the reader's position the writer can publish before anything is read.
    #[must_use]
    pub fn reach(&self) -> u64 {
        self.flow.ring.capacity + self.flow.next.as_ref().map_or(0, |next| next.capacity)
    }

    /// Allows the writer to continue in a ring before this reader has taken it (H-9).
    pub fn allow_ahead(&mut self) {
        self.flow.follows_ahead = true;
    }

    /// Returns whether the writer, as last seen, went ahead to a ring that was not taken yet. The bytes published there
    /// come next (H-9).
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.flow.next.is_none() && self.flow.writer.current != self.flow.generation()
    }

    /// Returns whether the writer, as last seen, has moved to the next ring and the reader has not.
    pub(crate) fn is_left(&self) -> bool {
        self.flow.next.is_some() && self.flow.writer.current != self.flow.generation()
    }

    /// Returns the generation of the ring that the writer is in, as last seen; the tail of that ring tells how many
    /// bytes there are. The reader may still be in the previous one.
    #[must_use]
    pub fn ring_written(&self) -> u16 {
        if self.is_left() { self.flow.state.ready } else { self.flow.generation() }
    }
}
