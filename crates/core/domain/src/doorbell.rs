// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The doorbell: wakes a waiter.

use std::{os::fd::BorrowedFd, time::Duration};

use tombolo_ring::Spin;

use crate::{Deadline, Result};

/// Selects one of the two waiters that an endpoint can have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slot {
    /// The reader, who waits for data.
    Data,
    /// The writer, who waits for space.
    Space,
}

impl Slot {
    /// Both slots.
    pub const ALL: [Self; 2] = [Self::Data, Self::Space];

    /// Returns 0 or 1, as an index into tables.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Reason why a wait ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// The doorbell was notified, by the peer or without a particular cause: check again.
    Notified,
    /// The deadline passed.
    TimedOut,
    /// The peer's process or domain is gone, or the path to it: no notification will ever come again.
    PeerGone,
}

/// The notification primitive of one channel: an event channel, an MSI-X vector, an eventfd.
///
/// Doorbells are *sticky*: a notification that comes while nothing waits is kept until [`drain`](Self::drain)ed,
/// however many came. They may be notified for nothing (in some backends many channels share one doorbell), so a waiter
/// that wakes checks again.
///
/// Whatever the peer does to its side of the doorbell, no call here blocks longer than documented: `notify` and `drain`
/// never block, and `wait` ends at its deadline.
///
/// At most one thread waits on a slot. Both slots may be waited on at once.
pub trait Doorbell: Send + Sync + std::fmt::Debug {
    /// Wakes the peer's waiter in `slot`. Never blocks; notifying a peer that is gone does nothing.
    fn notify(&self, slot: Slot);

    /// Blocks until this endpoint's `slot` is notified, the peer is gone or `deadline` passes. A notification that came
    /// before ends the wait at once, and is kept until drained. A notification takes precedence over a peer that is
    /// gone.
    ///
    /// # Errors
    /// Only conditions that make further waiting impossible (the descriptor is broken); never the peer's behaviour.
    fn wait(&self, slot: Slot, deadline: Deadline) -> Result<Woken>;

    /// Discards notifications of this endpoint's `slot` that came before this call. Never blocks.
    fn drain(&self, slot: Slot);

    /// Ends every wait of this endpoint, now and from now on, as if the peer were gone. Called after a protocol
    /// violation, because the peer is not waited for any more. The peer's liveness is still reported as before. A
    /// backend that cannot end a wait that has begun leaves it to its deadline. Never blocks.
    fn end_waits(&self) {}

    /// Returns whether the link is about to be taken away (V-9). A backend that knows this wakes the waits of this
    /// endpoint once, so that each half learns of it. Costs one load.
    fn is_leaving(&self) -> bool {
        false
    }

    /// Returns the longest spin that pays before a sleep that this doorbell ends: about the cost of a wake-up by it.
    fn worth_spinning(&self) -> Duration {
        Spin::MOST
    }

    /// Returns a descriptor that polls readable (`POLLIN` or `POLLHUP`) while a notification is undrained or the peer
    /// is gone. It is for poll and epoll only, never to be read.
    fn fd(&self, slot: Slot) -> BorrowedFd<'_>;
}
