// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The descriptors by which this process has a connection.

use std::{
    os::fd::RawFd,
    sync::atomic::{AtomicI32, AtomicU32, Ordering},
};

/// How many descriptors of a connection are open in this process, and the number of one of them.
#[derive(Debug)]
pub struct Descriptors {
    one: AtomicI32,
    open: AtomicU32,
}

impl Descriptors {
    pub(super) fn new(fd: RawFd) -> Self {
        Self { one: AtomicI32::new(fd), open: AtomicU32::new(1) }
    }

    /// The same ones, of an end that takes the place of this one.
    pub(super) fn begin_anew(&self) -> Self {
        let Self { one, open } = self;
        Self { one: AtomicI32::new(one.load(Ordering::SeqCst)), open: AtomicU32::new(open.load(Ordering::SeqCst)) }
    }

    /// The number of one that is open.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.one.load(Ordering::Relaxed)
    }

    /// Another one was made.
    pub fn add(&self, fd: RawFd) {
        self.open.fetch_add(1, Ordering::Relaxed);
        self.one.store(fd, Ordering::Relaxed);
    }

    /// Whether there is one and no other.
    #[must_use]
    pub fn is_single(&self) -> bool {
        self.open.load(Ordering::Relaxed) == 1
    }

    /// Whether the last one was closed: its number may be another file's by now.
    #[must_use]
    pub fn are_closed(&self) -> bool {
        self.open.load(Ordering::SeqCst) == 0
    }

    /// One is about to be closed; `other` is one that stays, if there is one. Says whether this is the last.
    pub fn close_one(&self, other: Option<RawFd>) -> bool {
        if let Some(fd) = other {
            self.one.store(fd, Ordering::Relaxed);
        }
        // ORDER SeqCst: who closes it says so and then wakes; who was woken looks at this.
        self.open.fetch_sub(1, Ordering::SeqCst) == 1
    }
}
