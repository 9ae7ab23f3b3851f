// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One half of a ring with what wakes its peer: what both directions of a channel's end do alike.

use tombolo_mem::Mapped;
use tombolo_ring::{Reader, Side, Writer};

use crate::{stats::PipeStatistics, waiter::Waiter};

/// What both halves of a ring can be asked for.
pub(crate) trait RingHalf: Side {
    /// Ends this half in order.
    fn close(&mut self);
    /// Gives up in the middle.
    fn abort(&mut self);
    /// Bytes of the ring.
    fn capacity(&self) -> u64;
    /// Bytes that are written and not read, as far as this half knows.
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
    /// Rings the peer if what was done since the last time asks for it.
    #[inline]
    pub(crate) fn notify_if_owed(&mut self) {
        if self.half.take_ring() {
            self.notify_peer();
        }
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn notify_peer(&self) {
        self.waiter.notify_peer();
        self.publish();
    }

    /// Publishes what was counted, and looks whether the peer is gone.
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

    /// Publishes or wants no more; where the peer was caught, says that it gave up.
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
