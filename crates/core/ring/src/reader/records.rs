// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Receiving records, whole or not at all, also while the writer is still at them.

use tombolo_layout::{limits::RECORD_ALIGN, record};
use tombolo_mem::Mem;

use super::Reader;
use crate::{Corrupt, Error, pause::pause};

/// Pauses after which what is still being written is left for later, unless so many bytes came: a writer that drips
/// them holds a call up no longer than these bytes at a slow pace.
pub(super) const PATIENCE: u32 = 512;
pub(super) const PATIENCE_FOR: usize = 4 << 10;

impl<M: Mem> Reader<M> {
    /// Receives the next record into `to`, whole or not at all, and says how long it is; `None` while there is none.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`] where `to` cannot hold it (it stays); [`Error::Corrupt`] where what the writer says is
    /// impossible.
    #[inline]
    pub fn recv(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error> {
        let Some(len) = self.next_record()? else { return Ok(None) };
        if len > to.len() as u64 {
            return Err(Error::BufferTooSmall { len, buffer: to.len() as u64 });
        }
        let to = &mut to[..len as usize];
        let span = record::span(len);
        if span <= self.available() {
            self.carrier.copy_out(self.head.wrapping_add(RECORD_ALIGN), to);
        } else if !self.copy_behind_writer(to)? {
            self.waits.stalls += 1;
            return Ok(None);
        }
        self.advance(span)?;
        self.records += 1;
        Ok(Some(to.len()))
    }

    /// Length of the next record once its header is there; its payload may still be on the way.
    #[inline]
    pub(super) fn next_record(&mut self) -> Result<Option<u64>, Error> {
        if self.available() < RECORD_ALIGN && !self.look_for_more()? {
            return Ok(None);
        }
        let max = self.message_max();
        let len = self.carrier.word(self.head).check(|word| match record::decode(word.to_le_bytes()) {
            Some(len) if u64::from(len) <= max => Ok(u64::from(len)),
            Some(_) => Err(Corrupt { clause: "R-21", what: "record longer than its ring", found: word, bound: max }),
            None => Err(Corrupt { clause: "R-20", what: "record header", found: word, bound: u64::from(u32::MAX) }),
        });
        self.latch_error(len).map(Some)
    }

    /// Copies the payload of a record that the writer is publishing in steps, as far and as long as it comes. Says
    /// whether it is whole; if not, nothing was consumed.
    #[inline(never)]
    fn copy_behind_writer(&mut self, to: &mut [u8]) -> Result<bool, Error> {
        let payload = self.head.wrapping_add(RECORD_ALIGN);
        let (mut done, mut paid, mut patience) = (0, 0, PATIENCE);
        loop {
            let there = (self.available() - RECORD_ALIGN).min(to.len() as u64) as usize;
            if there > done {
                self.carrier.copy_out(payload.wrapping_add(done as u64), &mut to[done..there]);
                done = there;
                if done - paid >= PATIENCE_FOR {
                    (paid, patience) = (done, PATIENCE);
                }
            }
            if self.available() >= record::span(to.len() as u64) {
                return Ok(true);
            }
            if patience == 0 {
                return Ok(false);
            }
            patience -= 1;
            pause::<M>();
            self.look_at_tail()?;
        }
    }

    /// Bytes to [`wait`](crate::wait) for so that the next call has something to deliver: one, or in message mode all
    /// of a record whose beginning is there.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where that beginning is impossible.
    pub fn need(&mut self) -> Result<u64, Error> {
        if self.messages && self.available() >= RECORD_ALIGN {
            return Ok(self.next_record()?.map_or(1, record::span));
        }
        Ok(1)
    }

    /// Whether what is left is the beginning of a record whose end will not come.
    pub(super) fn partial_record(&mut self) -> Result<bool, Error> {
        if !self.messages || self.available() < RECORD_ALIGN {
            return Ok(false);
        }
        Ok(self.next_record()?.is_some_and(|len| record::span(len) > self.available()))
    }
}
