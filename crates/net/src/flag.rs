// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A one-time event for which several threads wait.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};

/// A flag that is raised once and never lowered.
#[derive(Debug)]
pub struct Flag {
    raised: AtomicBool,
    event: OwnedFd,
}

impl Flag {
    /// Makes a flag that is not raised.
    pub fn new() -> io::Result<Self> {
        Ok(Self { raised: AtomicBool::new(false), event: tombolo_os::event::eventfd(0)? })
    }

    /// Raises the flag, and wakes all threads that wait for it.
    pub fn raise(&self) {
        // ORDER: Release, for a thread that sees it raised and then reads the reason.
        self.raised.store(true, Ordering::Release);
        tombolo_os::event::raise(&self.event);
    }

    /// Returns whether the flag is raised.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }
}

/// Polls readable once the flag is raised.
impl AsFd for Flag {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Waits until one of `fds` is readable or broken, for at most `most`.
pub fn wait_any(fds: &[BorrowedFd<'_>], most: Option<Duration>) -> io::Result<()> {
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let most = most.and_then(|most| most.try_into().ok());
    match poll(&mut polled, most.as_ref()) {
        // The caller checks in any case what it waited for.
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Returns whether the descriptor is readable or broken now.
pub fn is_ready(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let now = Duration::ZERO.try_into().ok();
    match poll(&mut polled, now.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
