// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Working in place: the writer fills the ring itself, the reader looks at it where it lies. Not across a step of the
//! protocol: what was reserved or peeked ends with the next call.

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
    /// The ring, to be filled where it lies.
    #[inline]
    pub fn in_place(&mut self) -> WriteInPlace<'_> {
        WriteInPlace { flow: &mut self.flow }
    }
}

impl<M: Mem> Reader<M> {
    /// The ring, to be read where it lies.
    #[inline]
    pub fn in_place(&mut self) -> ReadInPlace<'_, M> {
        ReadInPlace { flow: &mut self.flow }
    }
}

impl<'a> WriteInPlace<'a> {
    /// Room for `len` bytes to be filled in place, as two slices (the second is empty unless the ring wraps there);
    /// `None` while there is no such room. In message mode it becomes the payload of one record.
    ///
    /// Nothing is published before [`commit`](Self::commit); reserving again starts over.
    ///
    /// # Errors
    /// As [`Writer::send`]; a stream takes at most its ring at once.
    pub fn reserve(mut self, len: usize) -> Result<Option<Reserved<'a>>, Error> {
        Ok(if self.find_room(len)? { self.found_room(len) } else { None })
    }

    /// Whether there is room for [`reserve`](Self::reserve): then [`found_room`](Self::found_room) shows it.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn find_room(&mut self, len: usize) -> Result<bool, Error> {
        self.flow.has_room(len as u64)
    }

    /// Room for `len` bytes, if it was found. Looks at no word of the reader again.
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

    /// Publishes the first `len` bytes of what was last reserved: as a record, or as the stream's next bytes.
    ///
    /// # Errors
    /// [`Error::TooLarge`] where there is not that much room, so it was not reserved.
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
    /// Whether there is something for [`peek`](Self::peek): then [`found`](Self::found) shows it.
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

    /// Hands back `len` bytes of the stream, or the record, that was last peeked at.
    ///
    /// # Panics
    /// If more is handed back than was peeked at, or nothing was.
    pub fn consume(self, len: usize) {
        let (flow, len) = (self.flow, len as u64);
        if flow.broken.is_some() {
            return; // The writer was caught lying since; what it had there is nobody's any more.
        }
        let peeked = flow.peeked.expect("consume after a peek that found something");
        let most = if flow.messages { record::span(peeked) } else { peeked };
        assert!(len <= most, "{len} bytes handed back, {most} peeked at");
        let consumed = flow.advance(if flow.messages { most } else { len });
        flow.records += u64::from(consumed.is_ok());
    }

    /// Copies what comes `skip` bytes after the next byte of a stream into `to`, as much as is there and fits, and
    /// leaves it where it is, also where the writer has gone on to the next ring meanwhile. Says how much; 0 where there is
    /// nothing so far on.
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

    /// What was last found: how many bytes to skip and to show.
    fn range(&self) -> Option<(u64, u64)> {
        self.flow.peeked.map(|len| (if self.flow.messages { RECORD_ALIGN } else { 0 }, len))
    }
}

impl<'a> ReadInPlace<'a, Mapped> {
    /// What comes next, where it lies: all that is there (a stream), or the payload of the next record, as two slices
    /// (the second is empty unless the ring wraps there); `None` while there is nothing. The writer cannot reuse the
    /// bytes before [`consume`](Self::consume), but a hostile one can still change them: look at them once, or copy.
    ///
    /// # Errors
    /// As [`Reader::read`] and [`Reader::recv`].
    pub fn peek(mut self) -> Result<Option<Peeked<'a>>, Error> {
        self.find()?;
        Ok(self.found())
    }

    /// What [`find`](Self::find) or [`peek`](Self::peek) found, until something else is asked. Looks at no word of the writer
    /// again, so whatever the writer stored since, this is what was checked.
    #[must_use]
    pub fn found(self) -> Option<Peeked<'a>> {
        let (skip, len) = self.range()?;
        let flow: &'a Inflow<Mapped> = self.flow;
        let offset = flow.ring.offset(flow.head.wrapping_add(skip));
        let first = (len as usize).min(flow.ring.data.len() - offset);
        Some((flow.ring.data.slice(offset, first), flow.ring.data.slice(0, len as usize - first)))
    }
}
