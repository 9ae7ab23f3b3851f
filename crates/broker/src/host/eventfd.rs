// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Creates eventfds, notifies through them, and reads them without waiting.

use std::{
    io::{self, IoSliceMut},
    os::fd::{AsFd, OwnedFd},
};

use rustix::{event::EventfdFlags, io::ReadWriteFlags};

/// Creates an eventfd.
///
/// # Errors
/// No descriptor is available.
pub fn event() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Notifies through an eventfd that nobody else holds (for others there is a [`Lane`](crate::host::notifier::Lane)). A
/// full eventfd holds a notification that is not received yet, which is enough.
pub fn notify_event(event: impl AsFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Returns how often the eventfd was notified. Does not wait, whatever others made of its flags.
pub fn drain(event: impl AsFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::preadv2(event, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT) {
        Ok(8) => u64::from_ne_bytes(count),
        _ => 0,
    }
}
