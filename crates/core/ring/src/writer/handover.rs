// SPDX-License-Identifier: Apache-2.0 OR MIT
//! H-1 to H-6. Moving a pipe to another ring: the writer's side.

use tombolo_layout::state::{Phase, State};
use tombolo_mem::{Mem, OwnWord};

use super::Writer;
use crate::{Corrupt, Error, OwnCarrier};

impl<M: Mem> Writer<M> {
    /// Whether a new ring may be offered: none is outstanding and the reader has left the one before (H-5).
    pub fn can_offer(&mut self) -> Result<bool, Error> {
        if self.previous.is_some() {
            self.look_at_head()?;
        }
        Ok(self.state.ready == self.state.current && self.previous.is_none() && self.state.phase == Phase::Open)
    }

    /// H-1. The number of the ring that comes next.
    #[must_use]
    pub fn next_generation(&self) -> u16 {
        self.state.current.wrapping_add(1)
    }

    /// H-1. Says that ring `generation` was offered over the control path; it is the number after the present one.
    /// Rings, so that a sleeping reader takes it.
    pub fn announce(&mut self) -> u16 {
        self.publish_state(State { ready: self.next_generation(), ..self.state });
        self.state.ready
    }

    /// H-2. Whether the reader has declared itself ready for the ring that was announced.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its state word is impossible.
    pub fn reader_ready(&mut self) -> Result<bool, Error> {
        self.look_at_reader()?;
        Ok(self.state.ready != self.state.current && self.reader.ready == self.state.ready)
    }

    /// H-3. Goes on in `next` from the present position: the ring so far keeps what the reader has not read yet.
    ///
    /// # Panics
    /// If the reader is not ready for it: bytes would be lost.
    pub fn switch_to(&mut self, next: OwnCarrier<M>) {
        assert!(
            self.reader.ready == self.state.ready && self.state.ready != self.state.current,
            "H-3: reader not ready"
        );
        // A reader that follows finds at least the switch point here.
        next.tail.store_relaxed(self.tail);
        self.limit = self.tail.wrapping_add(next.capacity);
        self.previous = Some(std::mem::replace(&mut self.carrier, next));
        self.floor = self.tail;
        self.publish_state(State { current: self.state.ready, ..self.state });
    }

    /// H-6. Copies what the reader has not read, from its position `from` on, out of this ring: the writer keeps unread
    /// bytes, so any carrier can go on where the reader stopped. Appends to `to`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where `from` is no position between the last head seen and the tail.
    pub fn unread_from(&self, from: u64, to: &mut Vec<u8>) -> Result<(), Error> {
        let unread = self.tail.wrapping_sub(from);
        if unread > self.tail.wrapping_sub(self.head_seen) {
            let what = "resume position outside what is unread";
            return Err(Corrupt { clause: "H-6", what, found: from, bound: self.head_seen }.into());
        }
        let in_previous = (self.floor.wrapping_sub(from) as i64).clamp(0, unread as i64) as u64;
        let begin = to.len();
        to.resize(begin + unread as usize, 0);
        let (old, new) = to[begin..].split_at_mut(in_previous as usize);
        if let Some(previous) = &self.previous {
            previous.copy_back(from, old);
        }
        self.carrier.copy_back(from.wrapping_add(in_previous), new);
        Ok(())
    }
}
