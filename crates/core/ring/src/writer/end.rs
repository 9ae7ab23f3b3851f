// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a pipe ends: the writer's side.

use tombolo_layout::state::{Phase, State};
use tombolo_mem::Mem;

use super::Writer;
use crate::Error;

impl<M: Mem> Writer<M> {
    /// Whether the reader has read everything, looked at afresh.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its position is impossible.
    pub fn is_drained(&mut self) -> Result<bool, Error> {
        self.look_at_head()?;
        Ok(self.in_flight() == 0)
    }

    /// Whether the reader has read everything, also where it has closed since.
    ///
    /// # Errors
    /// [`Error::Closed`] where it closed or gave up before it had, [`Error::Corrupt`] where its words are impossible.
    pub fn check_drained(&mut self) -> Result<bool, Error> {
        if self.is_drained()? {
            return Ok(true);
        }
        if !self.reader_closed()? {
            return Ok(false);
        }
        // Its last head is visible with its state.
        if self.is_drained()? { Ok(true) } else { Err(Error::Closed) }
    }

    /// Publishes nothing more: the reader drains what is there and then finds the end.
    pub fn close(&mut self) {
        self.finish(Phase::Closed);
    }

    /// Gives up in the middle: the reader still finds what was published, then learns that more was to come.
    pub fn abort(&mut self) {
        self.finish(Phase::Aborted);
    }

    fn finish(&mut self, phase: Phase) {
        if self.state.phase == Phase::Open {
            self.publish_state(State { phase, ..self.state });
        }
    }

    /// Whether [`close`](Self::close) or [`abort`](Self::abort) was called.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.state.phase != Phase::Open
    }

    /// Whether the reader has closed or given up, looked at afresh.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its state word is impossible.
    pub fn reader_closed(&mut self) -> Result<bool, Error> {
        self.look_at_reader()?;
        Ok(matches!(self.reader.phase, Phase::Closed | Phase::Aborted))
    }

    /// Whether the reader has begun: it maps the ring and keeps it. Looked at afresh.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its state word is impossible.
    pub fn reader_begun(&mut self) -> Result<bool, Error> {
        self.look_at_reader()?;
        Ok(self.reader.phase != Phase::Fresh)
    }
}
