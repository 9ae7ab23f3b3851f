// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The descriptors by which this process has a connection.

use std::{
    os::fd::RawFd,
    sync::atomic::{AtomicI32, AtomicU32, Ordering},
};

/// Number of descriptors of a connection that are open in this process, and one of them.
#[derive(Debug)]
pub struct Descriptors {
    one: AtomicI32,
    open: AtomicU32,
}

impl Descriptors {
    pub(super) fn new(fd: RawFd) -> Self {
        Self { one: AtomicI32::new(fd), open: AtomicU32::new(1) }
    }

    /// Returns the same descriptors, for the endpoint that takes the place of this one.
    pub(super) fn begin_anew(&self) -> Self {
        let Self { one, open } = self;
        Self { one: AtomicI32::new(one.load(Ordering::SeqCst)), open: AtomicU32::new(open.load(Ordering::SeqCst)) }
    }

    /// Returns a descriptor that is open.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.one.load(Ordering::Relaxed)
    }

    /// Notes that another one was made.
    pub fn add(&self, fd: RawFd) {
        self.open.fetch_add(1, Ordering::Relaxed);
        self.one.store(fd, Ordering::Relaxed);
    }

    /// Returns whether there is exactly one.
    #[must_use]
    pub fn is_single(&self) -> bool {
        self.open.load(Ordering::Relaxed) == 1
    }

    /// Returns whether the last one was closed: its number may be another file's by now.
    #[must_use]
    pub fn are_closed(&self) -> bool {
        self.open.load(Ordering::SeqCst) == 0
    }

    /// Notes that one is about to be closed; `other` is one that stays open, if any. Returns whether this is the last.
    pub fn close_one(&self, other: Option<RawFd>) -> bool {
        if let Some(fd) = other {
            self.one.store(fd, Ordering::Relaxed);
        }
        // ORDER SeqCst: a thread that closes it stores this and then wakes others; a thread that was woken loads it.
        self.open.fetch_sub(1, Ordering::SeqCst) == 1
    }
}
