// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Short paths of a stream for the project's own front ends. Not part of the interface: it may change with any version.

use crate::{ReadHalf, Result, WriteHalf};

/// Short paths of a reading half.
pub trait FastRead {
    /// Copies bytes that are already visible, without a check of the peer's state. With `whole`, copies all of `buffer`
    /// or nothing. Returns the number of bytes copied, or 0 where this path does not apply: then call
    /// [`ReadHalf::try_read`].
    fn read_at_once(&mut self, buffer: &mut [u8], whole: bool) -> usize;

    /// Returns the number of bytes that can be read, like [`ReadHalf::available`]. Does not ask the peer again for a
    /// notification that was requested since [`note_poll_readable`](Self::note_poll_readable), which saves system
    /// calls.
    ///
    /// # Errors
    /// Those of [`ReadHalf::available`].
    fn available_while_quiet(&mut self, need: usize) -> Result<u64>;

    /// Notes that the descriptor was found readable, so that the next call asks for a notification again.
    fn note_poll_readable(&mut self);

    /// Returns whether the peer has closed or is gone, so that no more bytes will come. Checks only now and then
    /// whether the peer lives.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt).
    fn is_last(&mut self) -> Result<bool>;
}

/// The short path of a writing half.
pub trait FastWrite {
    /// Writes all of `bytes`, at most some KiB, if that is known to be possible without a look at the peer. Returns
    /// whether it did; if not, call [`WriteHalf::try_write`].
    #[must_use]
    fn write_at_once(&mut self, bytes: &[u8]) -> bool;
}

#[doc(hidden)]
impl FastRead for ReadHalf {
    #[inline]
    fn read_at_once(&mut self, buffer: &mut [u8], whole: bool) -> usize {
        self.0.read_at_once(buffer, whole)
    }

    fn available_while_quiet(&mut self, need: usize) -> Result<u64> {
        self.0.look_for(need as u64, true)
    }

    fn note_poll_readable(&mut self) {
        self.0.ring.waiter.forget_armed();
    }

    fn is_last(&mut self) -> Result<bool> {
        self.0.is_last()
    }
}

#[doc(hidden)]
impl FastWrite for WriteHalf {
    #[inline]
    fn write_at_once(&mut self, bytes: &[u8]) -> bool {
        self.0.try_at_once(|writer| writer.write_at_once(bytes))
    }
}
