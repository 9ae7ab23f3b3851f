// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shows a writer the state of its reader, and how the pipe ends for the writer.

use tombolo_layout::state::Phase;
use tombolo_mem::Mem;

use super::Outflow;
use crate::Error;

/// A writer's view of its reader; see [`Writer::reader`](super::Writer::reader).
#[derive(Debug)]
pub struct ReaderView<'a, M: Mem> {
    pub(super) flow: &'a mut Outflow<M>,
}

impl<M: Mem> ReaderView<'_, M> {
    /// Loads the head again and returns whether the reader has read everything.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the reader's position is impossible.
    pub fn is_drained(&mut self) -> Result<bool, Error> {
        self.flow.is_drained()
    }

    /// Returns whether the reader has read everything, also if it has closed meanwhile.
    ///
    /// # Errors
    /// [`Error::Closed`] if it closed or aborted before it had, [`Error::Corrupt`] if its words are impossible.
    pub fn has_read_all(&mut self) -> Result<bool, Error> {
        if self.flow.is_drained()? {
            return Ok(true);
        }
        if !self.flow.reader_closed()? {
            return Ok(false);
        }
        // The reader's last head is visible with its state.
        if self.flow.is_drained()? { Ok(true) } else { Err(Error::Closed) }
    }

    /// Loads the reader's state again and returns whether it has closed or aborted.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the reader's state word is impossible.
    pub fn is_closed(&mut self) -> Result<bool, Error> {
        self.flow.reader_closed()
    }

    /// Loads the reader's state again and returns whether it has begun: then it has mapped the ring and keeps it.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the reader's state word is impossible.
    pub fn has_begun(&mut self) -> Result<bool, Error> {
        self.flow.look_at_reader()?;
        Ok(self.flow.reader.phase != Phase::Fresh)
    }
}
