// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Receives records, whole or not at all, also while the writer is still publishing them.

use tombolo_layout::{limits::RECORD_ALIGN, record};
use tombolo_mem::Mem;

use super::{
    Reader,
    inflow::{PATIENCE, PATIENCE_FOR},
};
use crate::{Error, pause::pause};

impl<M: Mem> Reader<M> {
    /// Receives the next record into `to`, whole or not at all, and returns its length, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`] if `to` cannot hold it (it stays in the ring); [`Error::Corrupt`] if the writer's
    /// words are impossible.
    #[inline]
    pub fn recv(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error> {
        let Some(len) = self.flow.next_record()? else { return Ok(None) };
        if len > to.len() as u64 {
            return Err(Error::BufferTooSmall { len, buffer: to.len() as u64 });
        }
        let to = &mut to[..len as usize];
        let span = record::span(len);
        if span <= self.flow.available() {
            self.flow.ring.copy_out(self.flow.head.wrapping_add(RECORD_ALIGN), to);
        } else if !self.copy_behind_writer(to)? {
            self.flow.waits.stalls += 1;
            return Ok(None);
        }
        self.flow.advance(span)?;
        self.flow.records += 1;
        Ok(Some(to.len()))
    }

    /// Copies the payload of a record that the writer is publishing in steps, for as long as more of it arrives.
    /// Returns whether it is whole; if not, nothing was consumed.
    #[inline(never)]
    fn copy_behind_writer(&mut self, to: &mut [u8]) -> Result<bool, Error> {
        let payload = self.flow.head.wrapping_add(RECORD_ALIGN);
        let (mut done, mut paid, mut patience) = (0, 0, PATIENCE);
        loop {
            let there = (self.flow.available() - RECORD_ALIGN).min(to.len() as u64) as usize;
            if there > done {
                self.flow.ring.copy_out(payload.wrapping_add(done as u64), &mut to[done..there]);
                done = there;
                if done - paid >= PATIENCE_FOR {
                    (paid, patience) = (done, PATIENCE);
                }
            }
            if self.flow.available() >= record::span(to.len() as u64) {
                return Ok(true);
            }
            if patience == 0 {
                return Ok(false);
            }
            patience -= 1;
            pause::<M>();
            self.flow.look_at_tail()?;
        }
    }

    /// Returns the number of bytes to [`wait`](crate::wait) for so that the next call delivers something: one, or in
    /// message mode a whole record whose beginning is there.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if that beginning is impossible.
    pub fn need(&mut self) -> Result<u64, Error> {
        if self.flow.messages && self.flow.available() >= RECORD_ALIGN {
            return Ok(self.flow.next_record()?.map_or(1, record::span));
        }
        Ok(1)
    }
}
