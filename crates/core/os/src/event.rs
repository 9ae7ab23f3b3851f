// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Eventfds: counters that wake those who poll them.
//!
//! [`eventfd`] makes one for a single process: [`raise`] makes it readable, [`drain`] takes that back.
//! [`full_eventfd`] makes one that a hostile peer may hold as well. Its notifier *reads* it ([`raise_full`]), which no
//! other holder can make block. Its waiter watches it for edges of writability and never reads it.

use std::{
    io::{self, IoSliceMut},
    os::fd::{AsFd, OwnedFd},
};

use rustix::{event::EventfdFlags, io::ReadWriteFlags};

/// Number of notifications that a full eventfd is good for: at a million a second, half a million years. It is all that
/// a counter holds, so that the first notification makes room.
const FILL: u64 = u64::MAX - 1;

/// Makes an eventfd that no call blocks on, with `count` in it.
///
/// # Errors
/// There are too many descriptors.
pub fn eventfd(count: u32) -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(count, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes an [`eventfd`] poll readable.
pub fn raise(event: impl AsFd) {
    // A full counter polls readable just as well.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Takes all out of an eventfd, and returns how much that was. Does not wait, whatever other holders made of its flags.
pub fn drain(event: impl AsFd) -> u64 {
    let mut count = [0; 8];
    // No offset: an eventfd has none.
    match rustix::io::preadv2(event, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT) {
        Ok(8) => u64::from_ne_bytes(count),
        _ => 0,
    }
}

/// Makes an eventfd in semaphore mode that is full: it is not writable until [`raise_full`].
///
/// # Errors
/// There are too many descriptors.
pub fn full_eventfd() -> io::Result<OwnedFd> {
    let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE)?;
    rustix::io::write(&event, &FILL.to_ne_bytes())?;
    Ok(event)
}

/// Takes one from a [`full_eventfd`], which wakes those who watch it for edges of writability. Never blocks, whatever
/// the other holder did to it; an error means that the waiter spoilt its own eventfd.
pub fn raise_full(event: impl AsFd) {
    drain(event);
}

#[cfg(test)]
mod tests {
    use rustix::event::PollFlags;

    use super::*;
    use crate::poll::polls_as;

    #[test]
    fn raised_eventfd_is_readable_and_a_fresh_one_is_not() {
        let (event, notified) = (eventfd(0).unwrap(), eventfd(1).unwrap());
        assert!(!polls_as(&event, PollFlags::IN) && polls_as(&notified, PollFlags::IN));
        raise(&event);
        assert!(polls_as(&event, PollFlags::IN));
        raise(&event);
        assert_eq!((drain(&event), drain(&event)), (2, 0));
        assert!(!polls_as(&event, PollFlags::IN));
    }

    #[test]
    fn full_eventfd_is_writable_once_it_is_raised() {
        let event = full_eventfd().unwrap();
        assert!(!polls_as(&event, PollFlags::OUT));
        raise_full(&event);
        assert!(polls_as(&event, PollFlags::OUT));
    }
}
