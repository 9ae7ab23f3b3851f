// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves a pipe to another ring: the writer's side (H-1 to H-6).

use std::time::Instant;

use tombolo_layout::{
    limits,
    state::{Phase, State},
};
use tombolo_mem::{Mem, OwnWord};

use super::Outflow;
use crate::{Corrupt, Error, OwnRing};

/// Steps by which a writer moves its pipe to another ring; see [`Writer::handover`](super::Writer::handover).
#[derive(Debug)]
pub struct Handover<'a, M: Mem> {
    pub(super) flow: &'a mut Outflow<M>,
}

impl<M: Mem> Handover<'_, M> {
    /// Returns whether a new ring may be offered: none is outstanding, and the reader has left the previous one (H-5).
    pub fn can_offer(&mut self) -> Result<bool, Error> {
        if self.flow.previous.is_some() {
            self.flow.look_at_head()?;
        }
        if self.flow.reader.ready != self.flow.state.ready {
            self.flow.look_at_reader()?;
        }
        Ok(self.flow.state.ready == self.flow.state.current
            && self.flow.reader.ready == self.flow.state.ready
            && self.flow.previous.is_none()
            && self.flow.state.phase == Phase::Open)
    }

    /// Sets whether records keep the largest size of the present ring, also in a larger one.
    pub fn keep_message_max(&mut self, kept: bool) {
        self.flow.longest = if kept { limits::message_max(self.flow.ring.capacity) } else { u64::MAX };
    }

    /// Returns the generation of the next ring (H-1).
    #[must_use]
    pub fn next_generation(&self) -> u16 {
        self.flow.state.current.wrapping_add(1)
    }

    /// Publishes that the next ring was offered over the control path, and returns its generation (H-1). Notifies, so
    /// that a sleeping reader maps it.
    pub fn announce(&mut self) -> u16 {
        self.flow.publish_state(State { ready: self.next_generation(), ..self.flow.state });
        self.flow.state.ready
    }

    /// Returns whether the reader has published that it is ready for the ring announced (H-2).
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the reader's state word is impossible.
    pub fn reader_ready(&mut self) -> Result<bool, Error> {
        self.flow.reader_ready()
    }

    /// Continues in `next` from the present position. The previous ring keeps the bytes that the reader has not read
    /// yet (H-3).
    ///
    /// # Panics
    /// If the reader is not ready for it: bytes would be lost.
    pub fn switch_to(&mut self, next: OwnRing<M>) {
        assert!(
            self.flow.reader.ready == self.flow.state.ready && self.flow.state.ready != self.flow.state.current,
            "H-3: reader not ready"
        );
        self.go_on_in(next, self.flow.state.ready);
    }

    /// Continues in `next`, which was offered over the control path, before the reader is ready for it (H-9). Notifies,
    /// so that a sleeping reader maps it.
    ///
    /// # Panics
    /// If no ring may be offered ([`can_offer`](Self::can_offer)): bytes would be lost.
    pub fn go_ahead(&mut self, next: OwnRing<M>) {
        let State { ready, current, .. } = self.flow.state;
        assert!(
            ready == current && self.flow.reader.ready == ready && self.flow.previous.is_none(),
            "H-5: the last move is not over"
        );
        self.go_on_in(next, self.next_generation());
    }

    fn go_on_in(&mut self, next: OwnRing<M>, generation: u16) {
        // A reader that follows finds at least the switch point in this word.
        next.tail.store_relaxed(self.flow.tail);
        self.flow.limit = self.flow.tail.wrapping_add(next.capacity);
        self.flow.previous = Some(std::mem::replace(&mut self.flow.ring, next));
        self.flow.floor = self.flow.tail;
        self.flow.stores.enter_ring(self.flow.tail, Instant::now());
        self.flow.publish_state(State { ready: generation, current: generation, ..self.flow.state });
    }

    /// Appends the bytes that the reader has not read, from its position `from` on, to `to`. The writer keeps unread
    /// bytes, so any transport can continue where the reader stopped (H-6).
    ///
    /// # Errors
    /// [`Error::Corrupt`] if `from` is not between the last head seen and the tail; [`Error::Revoked`] if the memory
    /// was taken away, so that the bytes copied are not the writer's (D-3).
    pub fn unread_from(&self, from: u64, to: &mut Vec<u8>) -> Result<(), Error> {
        let unread = self.flow.tail.wrapping_sub(from);
        if unread > self.flow.tail.wrapping_sub(self.flow.head_seen) {
            let what = "resume position outside what is unread";
            return Err(Corrupt { clause: "H-6", what, found: from, bound: self.flow.head_seen }.into());
        }
        let in_previous = (self.flow.floor.wrapping_sub(from) as i64).clamp(0, unread as i64) as u64;
        let begin = to.len();
        to.resize(begin + unread as usize, 0);
        let (old, new) = to[begin..].split_at_mut(in_previous as usize);
        if let Some(previous) = &self.flow.previous {
            previous.copy_back(from, old);
        }
        self.flow.ring.copy_back(from.wrapping_add(in_previous), new);
        if self.flow.ring.is_lost() || self.flow.previous.as_ref().is_some_and(OwnRing::is_lost) {
            return Err(Error::Revoked);
        }
        Ok(())
    }
}
