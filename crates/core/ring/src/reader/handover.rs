// SPDX-License-Identifier: Apache-2.0 OR MIT
//! H-1 to H-4. Following a pipe to another ring: the reader's side.

use tombolo_layout::state::State;
use tombolo_mem::Mem;

use super::{Reader, release_step};
use crate::{Corrupt, Error, PeerCarrier};

impl<M: Mem> Reader<M> {
    /// H-1. The ring that the writer has announced and this reader has not got yet, if any. A wait ends for an
    /// announcement until it was asked for here, once: a reader may leave an offer where it is.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where the writer's state word is impossible.
    pub fn announced(&mut self) -> Result<Option<u16>, Error> {
        self.look_at_writer()?;
        self.told = self.writer.ready;
        Ok((self.writer.ready != self.state.ready).then_some(self.writer.ready))
    }

    /// H-2. Has ring `generation` mapped and declares itself ready to follow. Only after
    /// [`announced`](Self::announced) named it: the control message may be there before the writer says so.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where it is not the ring that was announced.
    pub fn prepare(&mut self, generation: u16, next: PeerCarrier<M>) -> Result<(), Error> {
        // Everything before the last switch point may have been read without a step into the ring behind it.
        self.follow()?;
        if self.announced()? != Some(generation) || self.next.is_some() {
            let (found, bound) = (generation.into(), self.state.ready.wrapping_add(1).into());
            return self.latch_error(Err(Corrupt { clause: "H-5", what: "a ring out of turn", found, bound }));
        }
        self.next = Some(next);
        self.publish_state(State { ready: generation, ..self.state });
        Ok(())
    }

    /// Returns the number of the ring that is being read; the next one may be mapped already.
    #[must_use]
    pub fn ring_number(&self) -> u16 {
        self.state.ready.wrapping_sub(self.next.is_some().into())
    }

    /// H-4. Goes on in the next ring if the writer has, and everything in this one was read.
    pub(super) fn follow(&mut self) -> Result<bool, Error> {
        if self.next.is_none() {
            return Ok(false);
        }
        self.look_at_writer()?;
        if self.writer.current != self.state.ready {
            return Ok(false);
        }
        self.load_tail()?;
        if self.available() != 0 {
            return Ok(true);
        }
        let Some(next) = self.next.take() else { return Ok(false) };
        self.enter(next);
        self.release();
        Ok(true)
    }

    pub(super) fn enter(&mut self, next: PeerCarrier<M>) {
        self.release_step = release_step(next.capacity);
        self.carrier = next;
    }

    /// H-5. Whether the writer's rings fit what this reader did: at most one move is outstanding, and none goes back.
    pub(super) fn in_turn(&self, state: State) -> bool {
        let own = self.state.ready;
        let forward = state.ready == self.writer.ready || state.ready == own.wrapping_add(1);
        forward
            && match (state.ready.wrapping_sub(own), own.wrapping_sub(state.current)) {
                (0 | 1, 0) => true,
                // Ready for the next ring, which the writer has not gone on to yet.
                (0, 1) => self.next.is_some() && self.writer.current != own,
                _ => false,
            }
    }
}
