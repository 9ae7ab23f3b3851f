// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One half of a ring with the means to wake its peer: the behaviour that both directions of an endpoint share.

use tombolo_mem::Mapped;
use tombolo_ring::{Reader, Side, Writer};

use crate::{stats::PipeStatistics, waiter::Waiter};

/// Operations that both halves of a ring support.
pub(crate) trait RingHalf: Side {
    /// Closes this half in order.
    fn close(&mut self);
    /// Aborts this half.
    fn abort(&mut self);
    /// Returns the size of the ring in bytes.
    fn capacity(&self) -> u64;
    /// Returns the number of bytes written and not read, as far as this half knows.
    fn in_flight(&self) -> u64;
}

impl RingHalf for Writer<Mapped> {
    fn close(&mut self) {
        Self::close(self);
    }

    fn abort(&mut self) {
        Self::abort(self);
    }

    fn capacity(&self) -> u64 {
        Self::capacity(self)
    }

    fn in_flight(&self) -> u64 {
        Self::in_flight(self)
    }
}

impl RingHalf for Reader<Mapped> {
    fn close(&mut self) {
        Self::close(self);
    }

    fn abort(&mut self) {
        Self::abort(self);
    }

    fn capacity(&self) -> u64 {
        Self::capacity(self)
    }

    fn in_flight(&self) -> u64 {
        self.available()
    }
}

/// A half of a ring and its side of the doorbell.
#[derive(Debug)]
pub(crate) struct SignalledRing<S> {
    pub half: S,
    pub waiter: Waiter,
}

impl<S: RingHalf> SignalledRing<S> {
    /// Notifies the peer if the work since the last call requires it.
    #[inline]
    pub(crate) fn notify_if_owed(&mut self) {
        if self.half.take_notification() {
            self.notify_peer();
        }
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn notify_peer(&self) {
        self.waiter.notify_peer();
        self.publish();
    }

    /// Publishes the counters. Returns whether the peer is gone.
    #[cold]
    #[inline(never)]
    pub(crate) fn check_peer(&mut self) -> bool {
        self.publish();
        self.waiter.gone_now()
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn publish(&self) {
        self.waiter.publish(&self.half.counted());
    }

    /// Ends publishing or reading. After a protocol violation of the peer, it aborts instead.
    pub(crate) fn close(&mut self) {
        if self.waiter.end().is_caught() {
            self.half.abort();
        } else {
            self.half.close();
        }
        self.notify_if_owed();
        self.publish();
    }

    pub(crate) fn abort(&mut self) {
        self.half.abort();
        self.notify_if_owed();
        self.publish();
    }

    pub(crate) fn statistics(&self) -> PipeStatistics {
        PipeStatistics {
            counters: self.half.counted(),
            ring_size: self.half.capacity(),
            in_flight: self.half.in_flight(),
            ring_growth: None,
        }
    }
}
