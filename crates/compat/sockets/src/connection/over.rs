// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections that have come to their end before both programs ended them.

use std::{os::fd::RawFd, sync::atomic::Ordering};

use rustix::event::PollFlags;

use super::Connection;
use crate::{kernel::Kernel, process::Process};

impl Connection {
    /// Says whether this is news.
    pub(crate) fn give_up(&self) -> bool {
        !self.given_up.swap(true, Ordering::SeqCst)
    }

    /// The peer broke the specification. Says whether this is news.
    pub(crate) fn breaks(&self) -> bool {
        !self.broken.swap(true, Ordering::Relaxed)
    }

    /// Whether it was ended, because it had to be on TCP and could not.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// The kernel says these of its socket. S-12: `POLLHUP` means that it neither sends nor receives any more, as both ends
    /// are done, the peer has reset it, or its packets were not answered for too long.
    #[inline]
    pub fn heard(&self, events: i16) {
        if events & PollFlags::HUP.bits() as i16 != 0 {
            self.over.store(true, Ordering::Relaxed);
        }
        if events & Self::ENDS != 0 {
            self.end_heard.store(true, Ordering::Relaxed);
        }
    }

    /// What the kernel says where the peer sends no more, or is gone.
    const ENDS: i16 = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR).bits() as i16;

    /// After a read. Whoever was told of bytes alone, as some were unread, looks whether this is the end now.
    pub(super) fn tell_of_end(&self) {
        // ORDER Relaxed: who hears of the end stores that and then looks for bytes under the lock of this direction. Where that look
        // found what was read here, it had the lock before this read.
        if self.wiring.is_wired() && self.end_heard.load(Ordering::Relaxed) && !self.stirs() {
            self.bell().inspect(|bell| bell.notify());
        }
    }

    /// Whether the kernel has said so.
    #[inline]
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// S-12. The program has shut the socket down, for what it `receives` too where that is so. Where that was both ways and nothing
    /// is left to read, TCP refuses what comes.
    pub fn has_shut(&self, process: &Process, fd: RawFd, receives: bool) {
        self.deaf.fetch_or(receives, Ordering::SeqCst);
        if let Some(pipes) = self.pipes.get()
            && self.ask_whether_over(process.kernel(), fd)
        {
            pipes.end_reading_if_empty(self, process.kernel(), fd);
        }
    }

    /// Whether the kernel says that the peer sends no more, or is gone. Of an own end it says the same, which is no word of the peer.
    pub(crate) fn has_peer_ended(&self, kernel: &dyn Kernel, fd: RawFd) -> bool {
        let end = if self.deaf.load(Ordering::SeqCst) { PollFlags::empty() } else { PollFlags::RDHUP };
        let ended = end.union(PollFlags::HUP).union(PollFlags::ERR).bits() as i16;
        kernel.poll(fd, ended) & ended != 0
    }

    /// Asks the kernel.
    pub(crate) fn ask_whether_over(&self, kernel: &dyn Kernel, fd: RawFd) -> bool {
        if !self.is_over() {
            self.heard(kernel.poll(fd, 0));
        }
        self.is_over()
    }
}
