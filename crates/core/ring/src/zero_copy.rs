// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Working in place: the writer fills the ring itself, the reader looks at it where it lies. Only over mapped memory,
//! and not across a step of the protocol: what was reserved or peeked ends with the next call.

use tombolo_layout::{limits::RECORD_ALIGN, record};
use tombolo_mem::{Mapped, Mem, OwnData, PeerData, SharedSlice};

use crate::{Error, Reader, Writer};

/// Room in the ring, as two slices in order; the second is empty unless the ring wraps there.
pub type Reserved<'a> = (&'a mut [u8], &'a mut [u8]);

/// Bytes in the ring, as two slices in order; the second is empty unless the ring wraps there.
pub type Peeked<'a> = (SharedSlice<'a>, SharedSlice<'a>);

impl Writer<Mapped> {
    /// Room for `len` bytes to be filled in place, as two slices (the second is empty unless the ring wraps there);
    /// `None` while there is no such room. In message mode it becomes the payload of one record.
    ///
    /// Nothing is published before [`commit`](Self::commit); reserving again starts over.
    ///
    /// # Errors
    /// As [`send`](Self::send); a stream takes at most its ring at once.
    pub fn reserve(&mut self, len: usize) -> Result<Option<Reserved<'_>>, Error> {
        Ok(if self.find_room(len)? { self.found_room(len) } else { None })
    }

    /// Whether there is room for [`reserve`](Self::reserve): then [`found_room`](Self::found_room) shows it.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn find_room(&mut self, len: usize) -> Result<bool, Error> {
        self.has_room(len as u64)
    }

    /// Room for `len` bytes, if it was found. Looks at no word of the reader again.
    #[must_use]
    pub fn found_room(&mut self, len: usize) -> Option<Reserved<'_>> {
        let span = if self.is_messages() { RECORD_ALIGN.checked_add(len as u64)? } else { len as u64 };
        if span > self.room() {
            return None;
        }
        let skip = if self.is_messages() { RECORD_ALIGN } else { 0 };
        let (carrier, tail) = self.carrier_mut();
        let offset = carrier.offset(tail.wrapping_add(skip));
        let first = len.min(carrier.data.len() - offset);
        Some(carrier.data.slices_mut((offset, first), (0, len - first)))
    }

    /// Publishes the first `len` bytes of what was last reserved: as a record, or as the stream's next bytes.
    ///
    /// # Errors
    /// [`Error::TooLarge`] where there is not that much room, so it was not reserved.
    pub fn commit(&mut self, len: usize) -> Result<(), Error> {
        let len = len as u64;
        if !self.has_room(len)? {
            return Err(Error::TooLarge { len, max: self.room() });
        }
        if self.is_messages() {
            let (carrier, tail) = self.carrier_mut();
            carrier.put_word(tail, len);
            self.publish_call(record::span(len));
        } else {
            self.publish_call(len);
        }
        Ok(())
    }
}

impl<M: Mem> Reader<M> {
    /// Copies what comes `skip` bytes after the next byte of a stream into `to`, as much as is there and fits, and
    /// leaves it where it is. Says how much; 0 where there is nothing so far on.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn copy_ahead(&mut self, skip: u64, to: &mut [u8]) -> Result<usize, Error> {
        self.find_peeked()?;
        let Some((_, there)) = self.peeked_range() else { return Ok(0) };
        let n = (there.saturating_sub(skip)).min(to.len() as u64) as usize;
        let (carrier, head) = self.carrier();
        carrier.copy_out(head.wrapping_add(skip), &mut to[..n]);
        self.check_memory()?;
        Ok(n)
    }
}

impl Reader<Mapped> {
    /// What comes next, where it lies: all that is there (a stream), or the payload of the next record, as two slices
    /// (the second is empty unless the ring wraps there); `None` while there is nothing. The writer cannot reuse the
    /// bytes before [`consume`](Self::consume), but a hostile one can still change them: look at them once, or copy.
    ///
    /// # Errors
    /// As [`read`](Self::read) and [`recv`](Self::recv).
    pub fn peek(&mut self) -> Result<Option<Peeked<'_>>, Error> {
        self.find()?;
        Ok(self.found())
    }

    /// Whether there is something for [`peek`](Self::peek): then [`found`](Self::found) shows it.
    ///
    /// # Errors
    /// As [`peek`](Self::peek).
    pub fn find(&mut self) -> Result<bool, Error> {
        self.find_peeked()
    }

    /// What [`find`](Self::find) or [`peek`](Self::peek) found, until something else is asked. Looks at no word of the writer
    /// again, so whatever the writer stored since, this is what was checked.
    #[must_use]
    pub fn found(&self) -> Option<Peeked<'_>> {
        let (skip, len) = self.peeked_range()?;
        let (carrier, head) = self.carrier();
        let offset = carrier.offset(head.wrapping_add(skip));
        let first = (len as usize).min(carrier.data.len() - offset);
        Some((carrier.data.slice(offset, first), carrier.data.slice(0, len as usize - first)))
    }

    /// Hands back `len` bytes of the stream, or the record, that was last peeked at.
    ///
    /// # Panics
    /// If more is handed back than was peeked at, or nothing was.
    pub fn consume(&mut self, len: usize) {
        self.consume_peeked(len as u64);
    }
}
