// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the program's calls do to a connection that has pipes.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::RawFd,
    sync::atomic::Ordering,
};

use rustix::io::Errno;

use super::Connection;
use crate::{
    Reason,
    direction::Direction,
    kernel::Kernel,
    pipes::{Failed, Pipes, Read, Source},
    process::Process,
    stage::ReturnStage,
    switch::Transport,
};

impl Connection {
    /// Sends what there is room for, by pipe or by TCP. Never blocks.
    ///
    /// # Errors
    /// What TCP would say; `AGAIN` where there is no room.
    pub fn send(&self, process: &Process, fd: RawFd, from: &[IoSlice<'_>]) -> Result<usize, Errno> {
        let Some(pipes) = self.pipes.get() else { return Err(Errno::NOTCONN) };
        match pipes.send(self, process.kernel(), fd, from, process.wanted(self)) {
            Ok((n, carrier)) => {
                self.moved(process, Direction::Out, carrier, n);
                if n < from.iter().map(|part| part.len()).sum() {
                    self.stalled(process);
                }
                Ok(n)
            }
            Err(failed) => Err(self.refuse_send(process, fd, failed)),
        }
    }

    /// The same for what a pipe of the program's has, up to `most` bytes; 0 is the end of that. Takes from it what it sends.
    ///
    /// # Errors
    /// What TCP would say; `AGAIN` where there is no room, or nothing in the pipe.
    pub fn send_from(
        &self,
        process: &Process,
        fd: RawFd,
        source: &mut dyn Source,
        most: usize,
    ) -> Result<usize, Errno> {
        let Some(pipes) = self.pipes.get() else { return Err(Errno::NOTCONN) };
        match pipes.send_from(self, process.kernel(), fd, source, most, process.wanted(self)) {
            Ok((n, carrier, full)) => {
                self.moved(process, Direction::Out, carrier, n);
                if full {
                    self.stalled(process);
                }
                Ok(n)
            }
            Err(failed) => Err(self.refuse_send(process, fd, failed)),
        }
    }

    /// What the program hears of a send that moved nothing.
    fn refuse_send(&self, process: &Process, fd: RawFd, failed: Failed) -> Errno {
        match failed {
            Failed::Os(errno) => {
                if errno == Errno::AGAIN {
                    self.stalled(process);
                    // Who tries again and again waits as well.
                    self.leave_full_pipe(process, fd);
                }
                errno
            }
            Failed::Broken(broken) => process.broken(self, broken),
        }
    }

    fn stalled(&self, process: &Process) {
        self.wiring.count_stall();
        process.stalls.fetch_add(1, Ordering::SeqCst);
        process.rings.grow_ring(&process.exchange, self);
    }

    /// So many bytes went by one of the two ways; those over TCP were counted when they went.
    #[inline]
    fn moved(&self, process: &Process, direction: Direction, carrier: Transport, bytes: usize) {
        process.journal.count_bytes(direction, carrier, bytes);
        if carrier == Transport::Pipe {
            let all = self.piped[direction as usize].fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
            self.row.count(direction, carrier, all);
        }
    }

    /// Receives what is there, by pipe or by TCP; 0 is the end. Never blocks.
    ///
    /// # Errors
    /// What TCP would say; `AGAIN` where there is nothing.
    pub fn recv(&self, process: &Process, fd: RawFd, to: &mut [IoSliceMut<'_>], read: Read) -> Result<usize, Errno> {
        let Some(pipes) = self.pipes.get() else { return Err(Errno::NOTCONN) };
        match pipes.recv(self, process.kernel(), fd, to, read) {
            Ok((n, carrier)) => {
                match read {
                    Read::Take => {
                        self.moved(process, Direction::In, carrier, n);
                        if n > 0 {
                            self.tell_of_end();
                        }
                    }
                    // Who looks for more than there is room for, and takes nothing, needs a larger ring.
                    Read::Peek => process.follow_ring(self),
                    Read::Look => {}
                }
                Ok(n)
            }
            Err(Failed::Os(errno)) => {
                if errno == Errno::AGAIN {
                    process.follow_ring(self);
                }
                Err(errno)
            }
            Err(Failed::Broken(broken)) => Err(process.broken(self, broken)),
        }
    }

    /// Whether a read would not block: bytes, the end, an error.
    pub fn is_readable(&self, process: &Process, fd: RawFd) -> bool {
        self.pipes.get().is_some() && !matches!(self.recv(process, fd, &mut [], Read::Look), Err(Errno::AGAIN))
    }

    /// Whether a send would find room; none where the kernel is to be asked.
    #[must_use]
    pub fn is_writable(&self) -> Option<bool> {
        self.pipes.get()?.has_room(self)
    }

    /// S-16. To be called now and then by one who waits for room: where nobody reads what is in the pipe, what comes next goes over
    /// TCP. Says whether that has come about just now.
    pub fn leave_full_pipe(&self, process: &Process, fd: RawFd) -> bool {
        self.pipes.get().is_some_and(|pipes| pipes.leave_if_full(self, process.kernel(), fd))
    }

    /// Bytes in the pipe that were not read.
    #[must_use]
    pub fn unread(&self) -> u64 {
        self.pipes.get().map_or(0, |pipes| pipes.unread(self))
    }

    /// Asks the peer to ring for what is waited for. Look again before you sleep.
    pub fn arm(&self, process: &Process, data: bool, space: bool) {
        if let Some(pipes) = self.pipes.get() {
            pipes.arm(self, data, space);
            process.follow_ring(self);
        }
    }

    /// Sends over TCP what the peer's end wants from there and not from the pipe (S-2), as far as there is room. Says
    /// whether something is left of it.
    pub fn owes(&self, process: &Process, fd: RawFd) -> bool {
        self.pipes.get().is_some_and(|pipes| pipes.owes(self, process.kernel(), fd))
    }

    /// Moves what this end sends to TCP, if that can be done now, and nothing else. Says whether what it sends next goes there.
    pub fn turn_back(&self, process: &Process, fd: RawFd) -> bool {
        self.pipes.get().is_none_or(|pipes| pipes.is_detached() || pipes.turn_back(self, process.kernel(), fd))
    }

    /// Moves towards TCP, with what is in the pipe.
    pub fn retreat(&self, kernel: &dyn Kernel, fd: RawFd, reason: Reason) -> ReturnStage {
        self.leave(reason);
        self.pipes.get().map_or(ReturnStage::Done, |pipes| pipes.retreat(self, kernel, fd))
    }

    /// V-9. Its memory will be taken away: moves back to TCP as far as that can be done now. Says whether it needs that memory no
    /// more.
    pub(crate) fn leave_memory(&self, process: &Process) -> bool {
        if self.descriptors.are_closed() {
            return true;
        }
        self.retreat(process.kernel(), self.descriptors.fd(), Reason::TakenAway);
        self.has_left_memory()
    }

    /// V-9. Whether it needs its memory no more.
    pub(crate) fn has_left_memory(&self) -> bool {
        self.descriptors.are_closed() || self.pipes.get().is_none_or(|pipes| pipes.detach(self))
    }

    /// V-9. Its memory was taken away: what was in it is lost, unless nothing was.
    pub(crate) fn lose_memory(&self, process: &Process) {
        let needs_it = self.pipes.get().is_some_and(|pipes| !pipes.is_detached());
        if needs_it && !self.descriptors.are_closed() && process.gives_up(self) {
            process.kernel().reset(self.descriptors.fd());
        }
    }

    /// This process's last descriptor is about to be closed. Says whether TCP would reset, because bytes were left unread.
    pub fn finish(&self) -> bool {
        self.depart() && self.pipes.get().is_some_and(|pipes| pipes.close(self))
    }

    /// Whether it was joined, and is back on TCP for good, and nobody looks at its memory any more: then the program's calls may as
    /// well be the kernel's.
    #[must_use]
    pub fn is_back_on_tcp(&self) -> bool {
        let is_over = |pipes: &Pipes| !pipes.line.is_revocable() || pipes.is_detached();
        self.leaves() && self.pipes.get().is_some_and(is_over) && self.carriers() == [Transport::Tcp; 2]
    }

    /// A call of the program's, which the kernel carried out, received so many bytes.
    pub fn received_back_on_tcp(&self, process: &Process, bytes: usize) {
        self.count(Direction::In, bytes);
        self.moved(process, Direction::In, Transport::Tcp, bytes);
    }

    /// Bytes of the rings of the two directions, sending and receiving, once it has any.
    #[must_use]
    pub fn ring_sizes(&self) -> Option<[u64; 2]> {
        self.pipes.get().map(|pipes| pipes.ring_sizes(self))
    }

    /// What carries the two directions: sending, receiving.
    #[must_use]
    pub fn carriers(&self) -> [Transport; 2] {
        self.pipes.get().map_or([Transport::Tcp; 2], |pipes| pipes.carriers(self))
    }

    /// After a read. Whoever was told of bytes alone, as some were unread, looks whether this is the end now.
    fn tell_of_end(&self) {
        // ORDER Relaxed: who hears of the end stores that and then looks for bytes under the lock of this direction. Where that look
        // found what was read here, it had the lock before this read.
        if self.wiring.is_wired() && self.ending.is_end_heard() && !self.stirs() {
            self.bell().inspect(|bell| bell.notify());
        }
    }

    /// The program has shut the socket down, for what it `receives` too where that is so. Where that was both ways and nothing is
    /// left to read, TCP refuses what comes (S-12).
    pub fn has_shut(&self, process: &Process, fd: RawFd, receives: bool) {
        self.ending.end_receiving_if(receives);
        if let Some(pipes) = self.pipes.get()
            && self.ending.ask_whether_over(process.kernel(), fd)
        {
            pipes.end_reading_if_empty(self, process.kernel(), fd);
        }
    }
}
