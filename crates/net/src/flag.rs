// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A thing that happens once, and that several threads wait for.

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

/// Raised once, for ever.
#[derive(Debug)]
pub struct Flag {
    raised: AtomicBool,
    event: OwnedFd,
}

impl Flag {
    /// One that is not raised.
    pub fn new() -> io::Result<Self> {
        Ok(Self { raised: AtomicBool::new(false), event: tombolo_os::event::eventfd(0)? })
    }

    /// Raises it, and wakes who waits.
    pub fn raise(&self) {
        // ORDER: Release, for who sees it raised and then reads why.
        self.raised.store(true, Ordering::Release);
        tombolo_os::event::raise(&self.event);
    }

    /// Whether it is raised.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }
}

/// It polls readable once it is raised.
impl AsFd for Flag {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Waits until one of `fds` is readable or broken, at most so long.
pub fn wait_any(fds: &[BorrowedFd<'_>], most: Option<Duration>) -> io::Result<()> {
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let most = most.and_then(|most| most.try_into().ok());
    match poll(&mut polled, most.as_ref()) {
        // Who waits looks at what it waits for in any case.
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether it is readable or broken now.
pub fn is_ready(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let now = Duration::ZERO.try_into().ok();
    match poll(&mut polled, now.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
