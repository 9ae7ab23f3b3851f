// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What carries the bytes of a vchan: one half for each direction.

use std::{fmt::Debug, os::fd::BorrowedFd};

use tombolo::{Deadline, Ending, ReadHalf, WriteHalf};
use tombolo_backends::vchan::Watch;
use tombolo_channel::fast::{FastRead, FastWrite};

use crate::border::{Fault, Outcome};

/// The half that reads.
pub(crate) trait Incoming: Send + Debug {
    /// Reads what is there, all of `to` or nothing if `whole`, and hands the space back at once, where that is short work: how
    /// many bytes. Of 0 `read` knows more.
    fn read_at_once(&mut self, to: &mut [u8], whole: bool) -> usize;
    /// Reads what is there, and hands the space back at once; `None` while there is nothing, 0 once nothing will come.
    fn read(&mut self, to: &mut [u8]) -> Outcome<Option<usize>>;
    /// How many bytes are there. Where there are fewer than `need`, the descriptor tells once there are so many, or once
    /// no more will come.
    fn available(&mut self, need: usize) -> Outcome<usize>;
    /// The descriptor was found readable.
    fn heard(&mut self) {}
    /// As `available`, for one who says `heard` each time: what the peer was asked for before is not asked for again.
    fn available_while_quiet(&mut self, need: usize) -> Outcome<usize> {
        self.available(need)
    }
    /// Waits until `need` bytes are there or no more will come.
    fn wait_for(&mut self, need: usize) -> Outcome<usize>;
    /// Whether the peer closed or is gone: nothing will be added to what is there.
    fn is_last(&mut self) -> Outcome<bool>;
    /// Why nothing more will come.
    fn end(&self) -> Fault;
    /// Who is there, in the layout of the original: there the halves outlive the peer, and another may take its place.
    fn watch(&self) -> Option<Watch> {
        None
    }
    /// Bytes of the ring.
    fn capacity(&self) -> usize;
    fn fd(&self) -> Outcome<BorrowedFd<'_>>;
}

/// The half that writes.
pub(crate) trait Outgoing: Send + Debug {
    /// Writes all of `bytes` if there is somebody to read them and known to be room: says whether. If not, `write` knows more.
    fn write_at_once(&mut self, bytes: &[u8]) -> bool;
    /// Writes what there is room for; `None` where there is none.
    fn write(&mut self, bytes: &[u8]) -> Outcome<Option<usize>>;
    /// Whether there is room for `need` bytes at once, looked at only if it was not known.
    fn fits(&mut self, need: usize) -> Outcome<bool>;
    /// Waits until there is room for `need` bytes at once.
    fn wait_for(&mut self, need: usize) -> Outcome<()>;
    /// For how many bytes there is room. Where that is less than `need`, the descriptor tells once it is so much.
    fn room(&mut self, need: usize) -> Outcome<usize>;
    /// Bytes of the ring.
    fn capacity(&self) -> usize;
    fn fd(&self) -> Outcome<BorrowedFd<'_>>;
}

impl Incoming for ReadHalf {
    fn read_at_once(&mut self, to: &mut [u8], whole: bool) -> usize {
        let done = FastRead::read_at_once(self, to, whole);
        if done > 0 {
            // As in `read`. What may go wrong is found by the next call as well.
            let _ = self.release();
        }
        done
    }

    fn read(&mut self, to: &mut [u8]) -> Outcome<Option<usize>> {
        let read = self.try_read(to)?;
        // The peer may sleep for as little as this, and this end may not come back for long.
        self.release()?;
        Ok(read)
    }

    fn available(&mut self, need: usize) -> Outcome<usize> {
        Ok(ReadHalf::available(self, need)? as usize)
    }

    fn heard(&mut self) {
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
