// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a writer sees of its reader, and how a pipe ends for it.

use tombolo_layout::state::Phase;
use tombolo_mem::Mem;

use super::Outflow;
use crate::Error;

/// What a writer sees of its reader; see [`Writer::reader`](super::Writer::reader).
#[derive(Debug)]
pub struct ReaderView<'a, M: Mem> {
    pub(super) flow: &'a mut Outflow<M>,
}

impl<M: Mem> ReaderView<'_, M> {
    /// Whether the reader has read everything, looked at afresh.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its position is impossible.
    pub fn is_drained(&mut self) -> Result<bool, Error> {
        self.flow.is_drained()
    }

    /// Whether the reader has read everything, also where it has closed since.
    ///
    /// # Errors
    /// [`Error::Closed`] where it closed or gave up before it had, [`Error::Corrupt`] where its words are impossible.
    pub fn has_read_all(&mut self) -> Result<bool, Error> {
        if self.flow.is_drained()? {
            return Ok(true);
        }
        if !self.flow.reader_closed()? {
            return Ok(false);
        }
        // Its last head is visible with its state.
        if self.flow.is_drained()? { Ok(true) } else { Err(Error::Closed) }
    }

    /// Whether the reader has closed or given up, looked at afresh.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its state word is impossible.
    pub fn is_closed(&mut self) -> Result<bool, Error> {
        self.flow.reader_closed()
    }

    /// Whether the reader has begun: it maps the ring and keeps it. Looked at afresh.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its state word is impossible.
    pub fn has_begun(&mut self) -> Result<bool, Error> {
        self.flow.look_at_reader()?;
        Ok(self.flow.reader.phase != Phase::Fresh)
    }
}
