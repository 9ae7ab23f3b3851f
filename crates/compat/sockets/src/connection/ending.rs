// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a connection ends.

use std::{
    os::fd::RawFd,
    sync::atomic::{AtomicBool, AtomicI64, Ordering},
};

use rustix::{
    event::PollFlags,
    time::{ClockId, clock_gettime},
};

use crate::kernel::Kernel;

/// Number of times a second that a program that only sends asks the kernel.
const LOOKS_A_SECOND: i64 = 20;

/// Events that the kernel reports where the peer sends no more, or is gone.
const ENDS: i16 = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR).bits() as i16;

/// What the program has shut, what the kernel has reported of the end, and whether this endpoint was broken or given
/// up. None of these is ever reset.
#[derive(Debug, Default)]
pub struct Ending {
    /// Whether the program has ended its sending. `ended_receiving`: its receiving.
    shut: AtomicBool,
    ended_receiving: AtomicBool,
    /// Whether the kernel has ended it both ways (S-12). `asked`: when a program that only sends last asked for that.
    over: AtomicBool,
    asked: AtomicI64,
    /// Whether the kernel has reported that the peer sends no more, or is gone.
    end_reported: AtomicBool,
    /// Whether the peer violated the protocol.
    broken: AtomicBool,
    /// Whether it was ended, because it had to be on TCP and could not.
    given_up: AtomicBool,
}

impl Ending {
    /// Returns whether none of these has happened.
    pub(crate) fn is_far(&self) -> bool {
        let Self { shut, ended_receiving, over, asked: _, end_reported, broken, given_up } = self;
        [shut, ended_receiving, over, end_reported, broken, given_up].into_iter().all(|one| !one.load(Ordering::SeqCst))
    }

    // ---- shut by the program

    /// Notes that the program sends no more.
    pub(super) fn end_sending(&self) {
        // ORDER SeqCst: the thread that joins sets the pipes and then looks at this; one of the two sees the other.
        self.shut.store(true, Ordering::SeqCst);
    }

    /// Returns whether the program sends no more.
    #[must_use]
    pub fn has_ended_sending(&self) -> bool {
        self.shut.load(Ordering::SeqCst)
    }

    /// Notes that the program has shut the socket down, and receives no more if `so` is set.
    pub(crate) fn end_receiving_if(&self, so: bool) {
        self.ended_receiving.fetch_or(so, Ordering::SeqCst);
    }

    /// Returns whether the program has shut its receiving.
    #[must_use]
    pub fn has_ended_receiving(&self) -> bool {
        self.ended_receiving.load(Ordering::SeqCst)
    }

    // ---- reported by the kernel

    /// Notes the kernel's events of its socket. `POLLHUP` means that it neither sends nor receives any more, as both
    /// ends are done, the peer has reset it, or its packets were not answered for too long (S-12).
    #[inline]
    pub fn note_events(&self, events: i16) {
        if events & PollFlags::HUP.bits() as i16 != 0 {
            self.over.store(true, Ordering::Relaxed);
        }
        if events & ENDS != 0 {
            self.end_reported.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether the kernel has reported that it is over.
    #[inline]
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Returns whether the kernel has reported that the peer sends no more, or is gone.
    pub(crate) fn is_end_reported(&self) -> bool {
        self.end_reported.load(Ordering::Relaxed)
    }

    /// Asks the kernel whether it is over, unless the kernel has reported that already.
    pub(crate) fn ask_whether_over(&self, kernel: &dyn Kernel, fd: RawFd) -> bool {
        if !self.is_over() {
            self.note_events(kernel.poll(fd, 0));
        }
        self.is_over()
    }

    /// Returns whether it is time to ask the kernel again. Called before each send; reads a clock that costs nothing.
    #[inline]
    #[must_use]
    pub fn is_due(&self) -> bool {
        let now = clock_gettime(ClockId::MonotonicCoarse);
        let now = now.tv_sec * LOOKS_A_SECOND + now.tv_nsec / (1_000_000_000 / LOOKS_A_SECOND);
        self.asked.swap(now, Ordering::Relaxed) != now
    }

    /// Makes the next send ask the kernel, as the program was told of an end.
    pub(crate) fn make_due(&self) {
        self.asked.store(0, Ordering::Relaxed);
    }

    /// Asks the kernel whether the peer sends no more, or is gone. Once this program has shut its receiving, `RDHUP`
    /// says nothing of the peer.
    pub(crate) fn has_peer_ended(&self, kernel: &dyn Kernel, fd: RawFd) -> bool {
        let end = if self.has_ended_receiving() { PollFlags::empty() } else { PollFlags::RDHUP };
        let ended = end.union(PollFlags::HUP).union(PollFlags::ERR).bits() as i16;
        kernel.poll(fd, ended) & ended != 0
    }

    // ---- failures

    /// Notes that the peer violated the protocol. Returns whether this is news.
    pub(crate) fn mark_broken(&self) -> bool {
        !self.broken.swap(true, Ordering::Relaxed)
    }

    /// Notes that it is ended, because it has to be on TCP and cannot. Returns whether this is news.
    pub(crate) fn give_up(&self) -> bool {
        !self.given_up.swap(true, Ordering::SeqCst)
    }

    /// Returns whether it was ended, because it had to be on TCP and could not.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }
}
