// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a connection comes to its end.

use std::{
    os::fd::RawFd,
    sync::atomic::{AtomicBool, AtomicI64, Ordering},
};

use rustix::{
    event::PollFlags,
    time::{ClockId, clock_gettime},
};

use crate::kernel::Kernel;

/// How often who only sends asks the kernel.
const LOOKS_A_SECOND: i64 = 20;

/// What the kernel says where the peer sends no more, or is gone.
const ENDS: i16 = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR).bits() as i16;

/// What the program has shut, what the kernel has said of the end, and whether this end was broken or given up. Nothing of it is ever
/// taken back.
#[derive(Debug, Default)]
pub struct Ending {
    /// The program has ended its sending; and its receiving.
    shut: AtomicBool,
    deaf: AtomicBool,
    /// The kernel has ended it both ways (S-12); and when who only sends last asked for that.
    over: AtomicBool,
    asked: AtomicI64,
    /// The kernel has said that the peer sends no more, or is gone.
    end_heard: AtomicBool,
    /// The peer broke the specification.
    broken: AtomicBool,
    /// It was ended, because it had to be on TCP and could not.
    given_up: AtomicBool,
}

impl Ending {
    /// Whether nothing of it has come.
    pub(crate) fn is_far(&self) -> bool {
        let Self { shut, deaf, over, asked: _, end_heard, broken, given_up } = self;
        [shut, deaf, over, end_heard, broken, given_up].into_iter().all(|one| !one.load(Ordering::SeqCst))
    }

    // ---- what the program has shut

    /// The program sends no more.
    pub(super) fn end_sending(&self) {
        // ORDER SeqCst: whoever joins sets the pipes and then looks at this; one of the two sees the other.
        self.shut.store(true, Ordering::SeqCst);
    }

    /// Whether the program sends no more.
    #[must_use]
    pub fn has_ended_sending(&self) -> bool {
        self.shut.load(Ordering::SeqCst)
    }

    /// The program has shut the socket down: it receives no more, where that is `so`.
    pub(crate) fn end_receiving_if(&self, so: bool) {
        self.deaf.fetch_or(so, Ordering::SeqCst);
    }

    /// Whether the program receives no more, by its own word.
    #[must_use]
    pub fn is_deaf(&self) -> bool {
        self.deaf.load(Ordering::SeqCst)
    }

    // ---- what the kernel says

    /// The kernel says these of its socket. `POLLHUP` means that it neither sends nor receives any more, as both ends are done, the
    /// peer has reset it, or its packets were not answered for too long (S-12).
    #[inline]
    pub fn note_events(&self, events: i16) {
        if events & PollFlags::HUP.bits() as i16 != 0 {
            self.over.store(true, Ordering::Relaxed);
        }
        if events & ENDS != 0 {
            self.end_heard.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the kernel has said that it is over.
    #[inline]
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Whether the kernel has said that the peer sends no more, or is gone.
    pub(crate) fn is_end_heard(&self) -> bool {
        self.end_heard.load(Ordering::Relaxed)
    }

    /// Asks the kernel whether it is over, unless it has said so.
    pub(crate) fn ask_whether_over(&self, kernel: &dyn Kernel, fd: RawFd) -> bool {
        if !self.is_over() {
            self.note_events(kernel.poll(fd, 0));
        }
        self.is_over()
    }

    /// Before a call that sends: whether it is time to ask again how it is. The clock is one that costs nothing.
    #[inline]
    #[must_use]
    pub fn is_due(&self) -> bool {
        let now = clock_gettime(ClockId::MonotonicCoarse);
        let now = now.tv_sec * LOOKS_A_SECOND + now.tv_nsec / (1_000_000_000 / LOOKS_A_SECOND);
        self.asked.swap(now, Ordering::Relaxed) != now
    }

    /// The program was told of an end: it is time at its next call that sends.
    pub(crate) fn make_due(&self) {
        self.asked.store(0, Ordering::Relaxed);
    }

    /// Asks the kernel whether the peer sends no more, or is gone. Of an own end it says the same, which is no word of the peer.
    pub(crate) fn has_peer_ended(&self, kernel: &dyn Kernel, fd: RawFd) -> bool {
        let end = if self.is_deaf() { PollFlags::empty() } else { PollFlags::RDHUP };
        let ended = end.union(PollFlags::HUP).union(PollFlags::ERR).bits() as i16;
        kernel.poll(fd, ended) & ended != 0
    }

    // ---- what went wrong

    /// The peer broke the specification. Says whether this is news.
    pub(crate) fn mark_broken(&self) -> bool {
        !self.broken.swap(true, Ordering::Relaxed)
    }

    /// It has to be on TCP and cannot: it is ended. Says whether this is news.
    pub(crate) fn give_up(&self) -> bool {
        !self.given_up.swap(true, Ordering::SeqCst)
    }

    /// Whether it was ended, because it had to be on TCP and could not.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }
}
