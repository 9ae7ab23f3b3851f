// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds the peer that came to this endpoint since the program's last call, and wakes the threads that wait for one.

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

/// The peer that came, or why none will, until the program's next call.
#[derive(Debug, Default)]
pub(crate) struct Arrival {
    who: Mutex<Option<Outcome<Halves>>>,
    came: Condvar,
    is_there: AtomicBool,
    /// Whether a thread other than the program's took over the peer that came: `wait` must return for that.
    pub(super) met_meanwhile: AtomicBool,
    /// Descriptor of a client that waits for its server: polls readable once the outcome is known.
    watch: Mutex<Option<OwnedFd>>,
    /// Whether there is such a search.
    joining: AtomicBool,
}

impl Arrival {
    /// Delivers a peer, or the reason why there will be none, and raises `poll_descriptor` for it.
    pub(crate) fn deliver(&self, who: Outcome<Halves>, poll_descriptor: &PollDescriptor) {
        *lock(&self.who) = Some(who);
        self.is_there.store(true, Ordering::Release);
        if let Some(watch) = &*lock(&self.watch) {
            let _ = rustix::io::write(watch, &1u64.to_ne_bytes());
        }
        self.came.notify_all();
        poll_descriptor.notify();
    }

    /// Returns whether a peer came that the program has not taken over.
    #[inline]
    pub(super) fn is_there(&self) -> bool {
        self.is_there.load(Ordering::Acquire)
    }

    /// Takes the peer that came; [`is_there`](Self::is_there) stays true until [`clear`](Self::clear).
    pub(super) fn take_who(&self) -> Option<Outcome<Halves>> {
        lock(&self.who).take()
    }

    pub(super) fn clear(&self) {
        self.is_there.store(false, Ordering::Release);
    }

    /// Waits until a peer comes, or until the endpoint `is_open` because another thread took the peer over.
    pub(super) fn wait(&self, is_open: impl Fn() -> bool) {
        let mut who = lock(&self.who);
        while who.is_none() && !is_open() {
            who = self.came.wait(who).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wakes the threads that wait for the peer that this thread took over.
    pub(super) fn wake_waiters(&self) {
        drop(lock(&self.who));
        self.came.notify_all();
    }

    /// Returns a descriptor that polls readable once the server was found or cannot be found.
    /// [`Inner::finish`](super::Inner::finish) closes it.
    pub(crate) fn watch(&self) -> Outcome<RawFd> {
        let mut watch = lock(&self.watch);
        self.joining.store(true, Ordering::Release);
        let fd = watch.insert(eventfd(self.is_there().into())?);
        Ok(fd.as_raw_fd())
    }

    /// Returns whether the program does not know yet how its search for a server ended.
    #[inline]
    pub(crate) fn is_joining(&self) -> bool {
        self.joining.load(Ordering::Acquire)
    }

    /// Ends the search: the program knows its outcome.
    pub(super) fn end_joining(&self) {
        drop(lock(&self.watch).take());
        self.joining.store(false, Ordering::Release);
    }
}
