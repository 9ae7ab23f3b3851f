// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Halves that carry the bytes of a vchan, one for each direction.

use std::{fmt::Debug, os::fd::BorrowedFd};

use tombolo::{Deadline, Ending, ReadHalf, WriteHalf};
use tombolo_backends::vchan::Watch;
use tombolo_channel::fast::{FastRead, FastWrite};

use crate::border::{Fault, Outcome};

/// The half that reads.
pub(crate) trait Incoming: Send + Debug {
    /// Reads what is there, or with `whole` all of `to` or nothing, where that is quick, and consumes the bytes at
    /// once. Returns the number of bytes; `read` explains a 0.
    fn read_at_once(&mut self, to: &mut [u8], whole: bool) -> usize;
    /// Reads what is there, and consumes the bytes at once. Returns `None` while there is nothing, 0 once nothing will
    /// come.
    fn read(&mut self, to: &mut [u8]) -> Outcome<Option<usize>>;
    /// Returns how many bytes are there. If there are fewer than `need`, the descriptor polls readable once there are
    /// so many, or once no more will come.
    fn available(&mut self, need: usize) -> Outcome<usize>;
    /// Notes that the descriptor was found readable.
    fn note_readable(&mut self) {}
    /// Does the same as `available` for a caller that calls `note_readable` each time: it does not repeat an earlier
    /// request to the peer.
    fn available_while_quiet(&mut self, need: usize) -> Outcome<usize> {
        self.available(need)
    }
    /// Waits until `need` bytes are there or no more will come. Returns how many are there.
    fn wait_for(&mut self, need: usize) -> Outcome<usize>;
    /// Returns whether the peer closed or is gone, so that nothing will be added to what is there.
    fn is_last(&mut self) -> Outcome<bool>;
    /// Returns why nothing more will come.
    fn end(&self) -> Fault;
    /// Returns the watch of a half in the original's layout, where the halves outlive the peer and another peer may
    /// take its place.
    fn watch(&self) -> Option<Watch> {
        None
    }
    /// Returns the bytes of the ring.
    fn capacity(&self) -> usize;
    fn fd(&self) -> Outcome<BorrowedFd<'_>>;
}

/// The half that writes.
pub(crate) trait Outgoing: Send + Debug {
    /// Writes all of `bytes` if a peer is there to read them and the ring is known to have room. Returns whether it
    /// did; `write` explains why not.
    fn write_at_once(&mut self, bytes: &[u8]) -> bool;
    /// Writes what there is room for. Returns `None` where there is none.
    fn write(&mut self, bytes: &[u8]) -> Outcome<Option<usize>>;
    /// Returns whether there is room for `need` bytes at once; looks only if that was not known.
    fn fits(&mut self, need: usize) -> Outcome<bool>;
    /// Waits until there is room for `need` bytes at once.
    fn wait_for(&mut self, need: usize) -> Outcome<()>;
    /// Returns for how many bytes there is room. If that is less than `need`, the descriptor polls readable once there
    /// is so much.
    fn room(&mut self, need: usize) -> Outcome<usize>;
    /// Returns the bytes of the ring.
    fn capacity(&self) -> usize;
    fn fd(&self) -> Outcome<BorrowedFd<'_>>;
}

impl Incoming for ReadHalf {
    fn read_at_once(&mut self, to: &mut [u8], whole: bool) -> usize {
        let done = FastRead::read_at_once(self, to, whole);
        if done > 0 {
            // As in `read`. The next call finds any error as well.
            let _ = self.release();
        }
        done
    }

    fn read(&mut self, to: &mut [u8]) -> Outcome<Option<usize>> {
        let read = self.try_read(to)?;
        // The peer may sleep until it gets just this space, and this endpoint's next call may be far off.
        self.release()?;
        Ok(read)
    }

    fn available(&mut self, need: usize) -> Outcome<usize> {
        Ok(ReadHalf::available(self, need)? as usize)
    }

    fn note_readable(&mut self) {
        self.note_poll_readable();
    }

    fn available_while_quiet(&mut self, need: usize) -> Outcome<usize> {
        Ok(FastRead::available_while_quiet(self, need)? as usize)
    }

    fn wait_for(&mut self, need: usize) -> Outcome<usize> {
        Ok(ReadHalf::wait_for(self, need, Deadline::NEVER)? as usize)
    }

    fn is_last(&mut self) -> Outcome<bool> {
        Ok(FastRead::is_last(self)?)
    }

    fn end(&self) -> Fault {
        match self.ending() {
            Some(Ending::DomainGone) => Fault::new(libc::ECONNRESET, "the other end's domain is gone"),
            Some(Ending::ProcessGone) => Fault::new(libc::ECONNRESET, "the other end's process is gone"),
            Some(Ending::Revoked) => Fault::new(libc::ECONNRESET, "the memory of the vchan was taken back"),
            _ => Fault::new(libc::EPIPE, "the other end has closed"),
        }
    }

    fn capacity(&self) -> usize {
        self.statistics().ring_size as usize
    }

    fn fd(&self) -> Outcome<BorrowedFd<'_>> {
        Ok(self.poll_fd()?)
    }
}

impl Outgoing for WriteHalf {
    fn write_at_once(&mut self, bytes: &[u8]) -> bool {
        FastWrite::write_at_once(self, bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> Outcome<Option<usize>> {
        Ok(self.try_write(bytes)?)
    }

    fn fits(&mut self, need: usize) -> Outcome<bool> {
        Ok(self.try_reserve(need)?.is_some())
    }

    fn wait_for(&mut self, need: usize) -> Outcome<()> {
        self.reserve_until(need, Deadline::NEVER)?;
        Ok(())
    }

    fn room(&mut self, need: usize) -> Outcome<usize> {
        Ok(WriteHalf::room(self, need)? as usize)
    }

    fn capacity(&self) -> usize {
        self.statistics().ring_size as usize
    }

    fn fd(&self) -> Outcome<BorrowedFd<'_>> {
        Ok(self.poll_fd()?)
    }
}
