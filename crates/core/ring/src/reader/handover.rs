// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Following a pipe to another ring: the reader's side (H-1 to H-4).

use tombolo_layout::state::State;
use tombolo_mem::Mem;

use super::Inflow;
use crate::{Corrupt, Error, PeerCarrier};

/// The steps by which a reader follows its pipe to another ring; see [`Reader::handover`](super::Reader::handover).
#[derive(Debug)]
pub struct Handover<'a, M: Mem> {
    pub(super) flow: &'a mut Inflow<M>,
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
    pub fn prepare(&mut self, generation: u16, next: PeerCarrier<M>) -> Result<(), Error> {
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

    /// Returns the number of the ring that is being read; the next one may be mapped already.
    #[must_use]
    pub fn ring_number(&self) -> u16 {
        self.flow.ring()
    }
}
