// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who came to this end since the program's last call, and who waits for somebody.

use std::{
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use tombolo_os::{event::eventfd, lock::lock};

use super::Halves;
use crate::{border::Outcome, poll_descriptor::PollDescriptor};

/// Who came, or why nobody will, until the program's next call.
#[derive(Debug, Default)]
pub(crate) struct Arrival {
    who: Mutex<Option<Outcome<Halves>>>,
    came: Condvar,
    is_there: AtomicBool,
    /// Another thread than the program's met whoever came: `wait` is to return for that.
    pub(super) met_meanwhile: AtomicBool,
    /// Of a client that waits for its server: polls readable once that is decided.
    watch: Mutex<Option<OwnedFd>>,
    /// There is one.
    joining: AtomicBool,
}

impl Arrival {
    /// Brings a peer, or the reason why there will be none, and rings `poll_descriptor` for it.
    pub(crate) fn deliver(&self, who: Outcome<Halves>, poll_descriptor: &PollDescriptor) {
        *lock(&self.who) = Some(who);
        self.is_there.store(true, Ordering::Release);
        if let Some(watch) = &*lock(&self.watch) {
            let _ = rustix::io::write(watch, &1u64.to_ne_bytes());
        }
        self.came.notify_all();
        poll_descriptor.notify();
    }

    /// Whether somebody came whom the program has not met.
    #[inline]
    pub(super) fn is_there(&self) -> bool {
        self.is_there.load(Ordering::Acquire)
    }

    /// Who came; [`is_there`](Self::is_there) says so until [`clear`](Self::clear).
    pub(super) fn take_who(&self) -> Option<Outcome<Halves>> {
        lock(&self.who).take()
    }

    pub(super) fn clear(&self) {
        self.is_there.store(false, Ordering::Release);
    }

    /// Waits for somebody to come, or until the end `is_open` because another thread met them.
    pub(super) fn wait(&self, is_open: impl Fn() -> bool) {
        let mut who = lock(&self.who);
        while who.is_none() && !is_open() {
            who = self.came.wait(who).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wakes those who wait for whom this thread met.
    pub(super) fn wake_waiters(&self) {
        drop(lock(&self.who));
        self.came.notify_all();
    }

    /// A descriptor that polls readable once the server was found, or cannot be; it is closed by
    /// [`Inner::finish`](super::Inner::finish).
    pub(crate) fn watch(&self) -> Outcome<RawFd> {
        let mut watch = lock(&self.watch);
        self.joining.store(true, Ordering::Release);
        let fd = watch.insert(eventfd(self.is_there().into())?);
        Ok(fd.as_raw_fd())
    }

    /// Whether the program has not heard yet what became of its search for a server.
    #[inline]
    pub(crate) fn is_joining(&self) -> bool {
        self.joining.load(Ordering::Acquire)
    }

    /// The program has heard it.
    pub(super) fn end_joining(&self) {
        drop(lock(&self.watch).take());
        self.joining.store(false, Ordering::Release);
    }
}
