// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A descriptor that polls readable while a half of a channel may have something to do, level- and edge-triggered:
//! an epoll set of the doorbell and of a flag of one's own.
//!
//! The doorbell alone would not do. It tells of what came while the half was armed; bytes that are left over from
//! before are told by the flag, which only this process can raise and lower.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::event::{EventfdFlags, epoll, eventfd};
use tombolo_domain::Error as DomainError;

use crate::Result;

#[derive(Debug)]
pub(crate) struct Pollable {
    set: OwnedFd,
    flag: OwnedFd,
    /// Saves a call of the kernel where there is nothing to lower.
    raised: AtomicBool,
}

impl Pollable {
    pub(crate) fn new(bell: BorrowedFd<'_>) -> Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| DomainError::os("epoll_create1", e))?;
        let flag =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| DomainError::os("eventfd2", e))?;
        for source in [bell, flag.as_fd()] {
            epoll::add(&set, source, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
                .map_err(|e| DomainError::os("epoll_ctl", e))?;
        }
        Ok(Self { set, flag, raised: AtomicBool::new(false) })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    /// Polls readable until lowered. Nobody else has this eventfd, so neither call can block or fail.
    pub(crate) fn raise(&self) {
        self.raised.store(true, Ordering::Relaxed);
        let _ = rustix::io::write(&self.flag, &1u64.to_ne_bytes());
    }

    pub(crate) fn lower(&self) {
        if self.raised.swap(false, Ordering::Relaxed) {
            let _ = rustix::io::read(&self.flag, &mut [0u8; 8]);
        }
    }
}
