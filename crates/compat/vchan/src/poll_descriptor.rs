// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Descriptor of a vchan: an epoll set that polls readable when something changed since the last wait.
//!
//! The set is edge-triggered. So `wait` clears the descriptor, and it is quiet again although bytes may still lie in
//! the ring: a program that cannot use them now, because its own output is full, can sleep. Programs for libxenvchan
//! expect an event channel to behave like that.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    event::{Timespec, epoll},
    io::Errno,
};
use tombolo_os::event::{eventfd, raise};

use crate::border::Outcome;

#[derive(Debug)]
pub(crate) struct PollDescriptor {
    set: OwnedFd,
    /// Eventfd that only this process raises.
    news: OwnedFd,
}

impl PollDescriptor {
    pub(crate) fn new() -> Outcome<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let news = eventfd(0)?;
        let poll_descriptor = Self { set, news };
        poll_descriptor.follow_descriptor(poll_descriptor.news.as_fd())?;
        Ok(poll_descriptor)
    }

    /// Makes the set poll readable with every change that `fd` reports, until `fd` is closed.
    pub(crate) fn follow_descriptor(&self, fd: BorrowedFd<'_>) -> Outcome<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        match epoll::add(&self.set, fd, epoll::EventData::new_u64(0), flags) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes the descriptor readable.
    pub(crate) fn notify(&self) {
        raise(&self.news);
    }

    /// Waits until the descriptor is readable, and clears it.
    pub(crate) fn wait(&self) -> Outcome<()> {
        let mut events = [MaybeUninit::uninit(); 8];
        loop {
            match epoll::wait(&self.set, &mut events, None) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Clears the descriptor. Returns whether it was readable.
    pub(crate) fn clear(&self) -> bool {
        let mut events = [MaybeUninit::uninit(); 8];
        matches!(epoll::wait(&self.set, &mut events, Some(&Timespec::default())), Ok((ready, _)) if !ready.is_empty())
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
