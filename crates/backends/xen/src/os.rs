// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks and eventfds, as this crate uses them.

use std::{
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::event::EventfdFlags;
use tombolo_domain::{Error, Result};

/// A lock whose holders do not leave it in disorder when they panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An eventfd that no call blocks on.
pub(crate) fn eventfd() -> Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    rustix::event::eventfd(0, flags).map_err(|error| Error::os("eventfd", error))
}

/// Makes an eventfd poll readable.
pub(crate) fn raise(event: &OwnedFd) {
    // Full is as good as one.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}
