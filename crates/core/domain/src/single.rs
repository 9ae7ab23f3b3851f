// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A doorbell for one of many that share a link: whoever waits for that one alone watches it, and nobody else is woken.
//!
//! It is made as L-7 says and for the same reasons: the notifier reads an eventfd that is full, which never blocks, and
//! the waiter watches it for edges of writability and never reads it.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use tombolo_os::{
    event::{full_eventfd, raise_full},
    reserved::ReservedFd,
};

/// A doorbell that this endpoint waits at.
#[derive(Debug)]
pub struct SingleDoorbell(ReservedFd);

/// A doorbell that the peer waits at.
#[derive(Debug)]
pub struct SingleNotifier(ReservedFd);

impl SingleDoorbell {
    /// A silent doorbell.
    ///
    /// # Errors
    /// Where there is no descriptor for it.
    pub fn new() -> io::Result<Self> {
        Ok(Self(ReservedFd::new(full_eventfd()?)?))
    }

    /// Wakes all who wait at it, as the peer would.
    pub fn notify(&self) {
        raise_full(self);
    }
}

/// To be watched for `EPOLLOUT` with `EPOLLET`, and never to be read or written.
impl AsFd for SingleDoorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl SingleNotifier {
    /// Of an eventfd that the peer has sent.
    ///
    /// # Errors
    /// Where there is no number to spare.
    pub fn new(event: OwnedFd) -> io::Result<Self> {
        Ok(Self(ReservedFd::new(event)?))
    }

    /// Wakes all who wait at it. Never blocks.
    pub fn notify(&self) {
        raise_full(&self.0);
    }
}
