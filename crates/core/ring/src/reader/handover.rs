// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Following a pipe to another ring: the reader's side (H-1 to H-4).

use tombolo_layout::state::State;
use tombolo_mem::{Mem, PeerWord};

use super::Inflow;
use crate::{Corrupt, Error, PeerRing};

/// The steps by which a reader follows its pipe to another ring; see [`Reader::handover`](super::Reader::handover).
#[derive(Debug)]
pub struct Handover<'a, M: Mem> {
    pub(crate) flow: &'a mut Inflow<M>,
}

impl<M: Mem> Handover<'_, M> {
    /// The ring that the writer has announced and this reader has not got yet, if any (H-1). A wait ends for an
    /// announcement until it was asked for here, once: a reader may leave an offer where it is.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where the writer's state word is impossible.
    pub fn announced(&mut self) -> Result<Option<u16>, Error> {
        self.flow.look_at_writer()?;
        self.flow.told = self.flow.writer.ready;
        Ok((self.flow.writer.ready != self.flow.state.ready).then_some(self.flow.writer.ready))
    }

    /// Has ring `generation` mapped and declares itself ready to follow (H-2). Only after
    /// [`announced`](Self::announced) named it: the control message may be there before the writer says so.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where it is not the ring that was announced.
    pub fn prepare(&mut self, generation: u16, next: PeerRing<M>) -> Result<(), Error> {
        // Everything before the last switch point may have been read without a step into the ring behind it.
        self.flow.follow()?;
        if self.announced()? != Some(generation) || self.flow.next.is_some() {
            let (found, bound) = (generation.into(), self.flow.state.ready.wrapping_add(1).into());
            return self.flow.latch_error(Err(Corrupt { clause: "H-5", what: "a ring out of turn", found, bound }));
        }
        self.flow.next = Some(next);
        self.flow.publish_state(State { ready: generation, ..self.flow.state });
        Ok(())
    }

    /// Looks how many bytes were published and not read, in this ring and in the one that the writer has gone on to.
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

    /// Bytes in the next ring, if the writer has gone on to it: they come after all that is in this one, whose tail is the last.
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

    /// Goes on in the next ring if there is nothing else to be read, or says whether `need` bytes are there with what is in it.
    #[cold]
    #[inline(never)]
    pub(crate) fn is_ready_beyond(&mut self, need: u64) -> Result<bool, Error> {
        if !self.is_left() {
            return Ok(false);
        }
        Ok((self.flow.available() == 0 && self.flow.follow()?)
            || self.flow.available() + self.available_later()? >= need)
    }

    /// How far beyond the reader's position the writer can come before anything is read.
    #[must_use]
    pub fn reach(&self) -> u64 {
        self.flow.ring.capacity + self.flow.next.as_ref().map_or(0, |next| next.capacity)
    }

    /// Lets the writer go on in a ring before it was taken here (H-9).
    pub fn allow_ahead(&mut self) {
        self.flow.follows_ahead = true;
    }

    /// Whether the writer went ahead to a ring that was not taken yet, as last seen: what it publishes there comes next (H-9).
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.flow.next.is_none() && self.flow.writer.current != self.flow.generation()
    }

    /// Whether the writer has gone on to the next ring, as last seen, and the reader has not.
    pub(crate) fn is_left(&self) -> bool {
        self.flow.next.is_some() && self.flow.writer.current != self.flow.generation()
    }

    /// Returns the number of the ring that the writer is in, as far as was seen: its tail says how much there is. The reader
    /// may still be in the one before.
    #[must_use]
    pub fn ring_written(&self) -> u16 {
        if self.is_left() { self.flow.state.ready } else { self.flow.generation() }
    }
}
