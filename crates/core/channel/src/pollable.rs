// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A descriptor that polls readable while a half of a channel may have something to do, level- and edge-triggered.
//!
//! It is an epoll set of the doorbell, of a flag and, where the doorbell cannot be relied on, of a clock. The doorbell
//! alone is not enough: it reports what came while the half was armed. The flag, which only this process can raise and
//! lower, reports bytes left over from before.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, Timespec, epoll, eventfd},
    time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime},
};
use tombolo_domain::Error as DomainError;

use crate::Result;

#[derive(Debug)]
pub(crate) struct Pollable {
    set: OwnedFd,
    flag: OwnedFd,
    /// Whether the flag is raised. Saves a system call where there is nothing to lower.
    raised: AtomicBool,
    /// Timer, made once it is needed.
    clock: OnceLock<OwnedFd>,
    /// Whether the doorbell is in the set.
    listening: AtomicBool,
}

fn watch(set: &OwnedFd, source: BorrowedFd<'_>) -> rustix::io::Result<()> {
    epoll::add(set, source, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
}

impl Pollable {
    pub(crate) fn new(doorbell: BorrowedFd<'_>) -> Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| DomainError::os("epoll_create1", e))?;
        let flag =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| DomainError::os("eventfd2", e))?;
        for source in [doorbell, flag.as_fd()] {
            watch(&set, source).map_err(|e| DomainError::os("epoll_ctl", e))?;
        }
        let (clock, listening) = (OnceLock::new(), AtomicBool::new(true));
        Ok(Self { set, flag, raised: AtomicBool::new(false), clock, listening })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    /// Makes the descriptor readable until [`lower`](Self::lower). Only this process has the eventfd, so neither call
    /// can block or fail.
    pub(crate) fn raise(&self) {
        self.raised.store(true, Ordering::Relaxed);
        let _ = rustix::io::write(&self.flag, &1u64.to_ne_bytes());
    }

    pub(crate) fn lower(&self) {
        if self.raised.swap(false, Ordering::Relaxed) {
            let _ = rustix::io::read(&self.flag, &mut [0u8; 8]);
        }
    }

    /// Makes the descriptor readable once `time` has passed, and unreadable until then if only the clock had made it
    /// readable. Stops polling `doorbell` if one is given, because it is notified for nothing. Returns whether this
    /// succeeded: the clock takes a descriptor.
    pub(crate) fn wake_after(&self, time: Duration, doorbell: Option<BorrowedFd<'_>>) -> bool {
        if !self.set_clock(time) {
            return false;
        }
        if let Some(doorbell) = doorbell
            && self.listening.swap(false, Ordering::Relaxed)
        {
            let _ = epoll::delete(&self.set, doorbell);
        }
        true
    }

    /// Stops the clock, so that it no longer makes the descriptor readable.
    pub(crate) fn stop_clock(&self) {
        self.set_clock(Duration::ZERO);
    }

    /// Returns whether the descriptor becomes readable when the doorbell is notified.
    pub(crate) fn is_listening(&self) -> bool {
        self.listening.load(Ordering::Relaxed)
    }

    /// Polls `doorbell` again. If the kernel has no memory for that, [`is_listening`](Self::is_listening) stays
    /// `false`.
    pub(crate) fn listen(&self, doorbell: BorrowedFd<'_>) {
        if !self.listening.load(Ordering::Relaxed) && watch(&self.set, doorbell).is_ok() {
            self.listening.store(true, Ordering::Relaxed);
        }
    }

    /// Sets the clock to expire after `time`; zero stops it. Returns whether this succeeded.
    fn set_clock(&self, time: Duration) -> bool {
        if self.clock.get().is_none() && !time.is_zero() {
            let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
            let Ok(made) = timerfd_create(TimerfdClockId::Monotonic, flags) else { return false };
            if watch(&self.set, made.as_fd()).is_err() {
                return false;
            }
            let _ = self.clock.set(made);
        }
        let Some(clock) = self.clock.get() else { return time.is_zero() };
        let (it_interval, it_value) = (Timespec::default(), Timespec { tv_sec: 0, tv_nsec: time.as_nanos() as i64 });
        timerfd_settime(clock, TimerfdTimerFlags::empty(), &Itimerspec { it_interval, it_value }).is_ok()
    }
}
