// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets the writer fill the ring in place, and the reader read it in place. A reservation or a peek does not outlast a
//! step of the protocol: it ends with the next call.

use tombolo_layout::{limits::RECORD_ALIGN, record};
use tombolo_mem::{Mapped, Mem, OwnData, PeerData, SharedSlice};

use crate::{
    Error, Reader, Writer,
    reader::{Handover, Inflow},
    writer::Outflow,
};

/// Room in the ring, as two slices in order; the second is empty unless the ring wraps there.
pub type Reserved<'a> = (&'a mut [u8], &'a mut [u8]);

/// Bytes in the ring, as two slices in order; the second is empty unless the ring wraps there.
pub type Peeked<'a> = (SharedSlice<'a>, SharedSlice<'a>);

/// Writes in place; see [`Writer::in_place`].
#[derive(Debug)]
pub struct WriteInPlace<'a> {
    flow: &'a mut Outflow<Mapped>,
}

/// Reads in place; see [`Reader::in_place`].
#[derive(Debug)]
pub struct ReadInPlace<'a, M: Mem> {
    flow: &'a mut Inflow<M>,
}

impl Writer<Mapped> {
    /// Returns the ring, to be filled in place.
    #[inline]
    pub fn in_place(&mut self) -> WriteInPlace<'_> {
        WriteInPlace { flow: &mut self.flow }
    }
}

impl<M: Mem> Reader<M> {
    /// Returns the ring, to be read in place.
    #[inline]
    pub fn in_place(&mut self) -> ReadInPlace<'_, M> {
        ReadInPlace { flow: &mut self.flow }
    }
}

impl<'a> WriteInPlace<'a> {
    /// Returns room for `len` bytes to be filled in place, as two slices (the second is empty unless the ring wraps
    /// there), or `None` while there is no such room. In message mode it becomes the payload of one record.
    ///
    /// Nothing is published before [`commit`](Self::commit). A second reservation replaces the first.
    ///
    /// # Errors
    /// As [`Writer::send`]; a stream takes at most the size of its ring at once.
    pub fn reserve(mut self, len: usize) -> Result<Option<Reserved<'a>>, Error> {
        Ok(if self.find_room(len)? { self.found_room(len) } else { None })
    }

    /// Returns whether there is room for [`reserve`](Self::reserve); [`found_room`](Self::found_room) then returns it.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn find_room(&mut self, len: usize) -> Result<bool, Error> {
        self.flow.has_room(len as u64)
    }

    /// Returns room for `len` bytes, if it was found. Does not load a word of the reader again.
    #[must_use]
    pub fn found_room(self, len: usize) -> Option<Reserved<'a>> {
        let skip = if self.flow.messages { RECORD_ALIGN } else { 0 };
        if skip.checked_add(len as u64)? > self.flow.room() {
            return None;
        }
        let (tail, ring) = (self.flow.tail, &mut self.flow.ring);
        let offset = ring.offset(tail.wrapping_add(skip));
        let first = len.min(ring.data.len() - offset);
        Some(ring.data.slices_mut((offset, first), (0, len - first)))
    }

    /// Publishes the first `len` bytes of the last reservation: as a record, or as the next bytes of the stream.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if there is not that much room, so that it was not reserved.
    pub fn commit(self, len: usize) -> Result<(), Error> {
        let (flow, len) = (self.flow, len as u64);
        if !flow.has_room(len)? {
            return Err(Error::TooLarge { len, max: flow.room() });
        }
        if flow.messages {
            flow.ring.put_word(flow.tail, len);
        }
        flow.publish(if flow.messages { record::span(len) } else { len });
        flow.records += 1;
        Ok(())
    }
}

impl<M: Mem> ReadInPlace<'_, M> {
    /// Returns whether there is something for [`peek`](Self::peek); [`found`](Self::found) then returns it.
    ///
    /// # Errors
    /// As [`peek`](Self::peek).
    pub fn find(&mut self) -> Result<bool, Error> {
        let flow = &mut *self.flow;
        flow.peeked = None;
        let len = if flow.messages {
            let Some(len) = flow.next_record()? else { return Ok(false) };
            if record::span(len) > flow.available() {
                flow.look_at_tail()?;
            }
            if record::span(len) > flow.available() {
                return Ok(false);
            }
            len
        } else {
            if flow.available() == 0 && !flow.look_for_more()? {
                return Ok(false);
            }
            flow.available()
        };
        flow.peeked = Some(len);
        Ok(true)
    }

    /// Hands back `len` bytes of the stream, or the record, returned by the last peek.
    ///
    /// # Panics
    /// If more is handed back than was peeked at, or if nothing was peeked at.
    pub fn consume(self, len: usize) {
        let (flow, len) = (self.flow, len as u64);
        if flow.broken.is_some() {
            return; // A protocol violation of the writer was found meanwhile; its bytes are of no more use.
        }
        let peeked = flow.peeked.expect("consume after a peek that found something");
        let most = if flow.messages { record::span(peeked) } else { peeked };
        assert!(len <= most, "{len} bytes handed back, {most} peeked at");
        let consumed = flow.advance(if flow.messages { most } else { len });
        flow.records += u64::from(consumed.is_ok());
    }

    /// Copies the bytes of a stream that come `skip` bytes after the next byte into `to`, as many as are there and fit.
    /// Leaves them in the ring. This includes bytes in the next ring, if the writer has moved there meanwhile. Returns
    /// the number of bytes copied: 0 if there is nothing that far ahead.
    ///
    /// # Errors
    /// As [`Reader::read`].
    pub fn copy_ahead(self, skip: u64, to: &mut [u8]) -> Result<usize, Error> {
        let flow = self.flow;
        let end = skip.saturating_add(to.len() as u64);
        if flow.available() < end {
            flow.look_for_more()?;
        }
        let later = if flow.available() < end { Handover { flow: &mut *flow }.available_later()? } else { 0 };
        let here = flow.available();
        let n = here.saturating_sub(skip).min(to.len() as u64) as usize;
        flow.ring.copy_out(flow.head.wrapping_add(skip), &mut to[..n]);
        flow.check_memory()?;
        let (skip, to) = (skip + n as u64, &mut to[n..]);
        let more = later.saturating_sub(skip.saturating_sub(here)).min(to.len() as u64) as usize;
        if let Some(next) = flow.next.as_ref().filter(|_| more > 0) {
            next.copy_out(flow.head.wrapping_add(skip), &mut to[..more]);
            if next.is_lost() {
                flow.note_loss()?;
            }
        }
        Ok(n + more)
    }

    /// Returns the number of bytes to skip and to show of what was last found.
    fn range(&self) -> Option<(u64, u64)> {
        self.flow.peeked.map(|len| (if self.flow.messages { RECORD_ALIGN } else { 0 }, len))
    }
}

impl<'a> ReadInPlace<'a, Mapped> {
    /// Returns the next bytes in place: all that are there (a stream), or the payload of the next record. They are two
    /// slices (the second is empty unless the ring wraps there), or `None` while there is nothing. The writer cannot
    /// reuse the bytes before [`consume`](Self::consume), but a hostile one can still change them: look at them once,
    /// or copy them.
    ///
    /// # Errors
    /// As [`Reader::read`] and [`Reader::recv`].
    pub fn peek(mut self) -> Result<Option<Peeked<'a>>, Error> {
        self.find()?;
        Ok(self.found())
    }

    /// Returns what [`find`](Self::find) or [`peek`](Self::peek) found, until another call is made. Does not load a
    /// word of the writer again, so these are the bytes that were checked, whatever the writer stored since.
    #[must_use]
    pub fn found(self) -> Option<Peeked<'a>> {
        let (skip, len) = self.range()?;
        let flow: &'a Inflow<Mapped> = self.flow;
        let offset = flow.ring.offset(flow.head.wrapping_add(skip));
        let first = (len as usize).min(flow.ring.data.len() - offset);
        Some((flow.ring.data.slice(offset, first), flow.ring.data.slice(0, len as usize - first)))
    }
}
