// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a waiter is woken.

use std::{os::fd::BorrowedFd, time::Duration};

use tombolo_ring::Spin;

use crate::{Deadline, Result};

/// Which of an endpoint's two possible waiters is meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slot {
    /// The reader, who waits for data.
    Data,
    /// The writer, who waits for space.
    Space,
}

impl Slot {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Data, Self::Space];

    /// 0 or 1, for tables.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Why a wait ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// The doorbell was rung, by the peer or by nobody in particular: look again.
    Notified,
    /// The deadline passed.
    TimedOut,
    /// The peer's process or domain is gone, or the path to it: nobody will ever ring again.
    PeerGone,
}

/// The notification primitive of one channel: an event channel, an MSI-X vector, an eventfd.
///
/// Doorbells are *sticky*: a ring that comes while nobody waits is kept until [`drain`](Self::drain)ed, however many
/// came. They may ring for nothing (some backends have one doorbell for many channels); whoever is woken looks again.
///
/// Whatever the peer does to its end of the doorbell, no call here blocks longer than it says: `ring` and `drain` never
/// block, `wait` ends at its deadline.
///
/// At most one thread waits on a slot; both slots may be waited on at once.
pub trait Doorbell: Send + Sync + std::fmt::Debug {
    /// Wakes the peer's waiter in `slot`. Never blocks; notifying a peer that is gone does nothing.
    fn notify(&self, slot: Slot);

    /// Blocks until this endpoint's `slot` is rung, the peer is gone or `deadline` passes. A ring that is already there
    /// ends it at once; it stays there until drained. A ring takes precedence over a peer that is gone.
    ///
    /// # Errors
    /// Only what makes further waiting impossible (the descriptor is broken); never the peer's doing.
    fn wait(&self, slot: Slot, deadline: Deadline) -> Result<Woken>;

    /// Forgets rings of this endpoint's `slot` that came before this call. Never blocks.
    fn drain(&self, slot: Slot);

    /// Ends every wait of this endpoint, now and from now on, as if the peer were gone: it was caught at a lie, and is
    /// waited for no more. How the peer fares is told as before. A backend that cannot leaves a wait that has begun to
    /// its deadline. Never blocks.
    fn end_waits(&self) {}

    /// Whether the link is about to be taken away (V-9). A backend that knows so wakes the waits of this endpoint once,
    /// so that each half learns of it. Costs a load.
    fn is_leaving(&self) -> bool {
        false
    }

    /// How long it pays to spin at most before a sleep that this doorbell ends: about what a wake-up by it costs.
    fn worth_spinning(&self) -> Duration {
        Spin::MOST
    }

    /// A descriptor that polls readable (`POLLIN` or `POLLHUP`) while a ring is undrained or the peer is gone. It is
    /// for poll and epoll only, never to be read.
    fn fd(&self, slot: Slot) -> BorrowedFd<'_>;
}
