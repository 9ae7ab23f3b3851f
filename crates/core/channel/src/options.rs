// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Options for setting up a channel.

use std::time::Duration;

use tombolo_layout::limits;
use tombolo_ring::FlushPolicy;

use tombolo_growth::GrowthRule;

use crate::{RingBudget, RingChoice};

/// Options for setting up a channel, and for the behaviour of this endpoint. Each endpoint chooses its own.
///
/// # Example
/// ```
/// use std::time::Duration;
/// use tombolo::Options;
///
/// let options = Options::new()
///     .ring_size(4 << 20) // 4 MiB for what this endpoint writes
///     .spin(Duration::ZERO) // sleep at once: less CPU time, longer round trips
///     .wait_for_listener(Duration::from_secs(60));
/// assert_ne!(options, Options::default());
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Size of the ring in bytes. `None`: as much as the backend can afford, up to the default.
    pub(crate) capacity: Option<u64>,
    /// Budget within which the ring of a stream grows. `None`: the ring keeps its size.
    pub(crate) growth: Option<RingBudget>,
    pub(crate) idle_time: Duration,
    /// Largest segment of the peer that this endpoint maps. `None`: the largest that a ring may have, where holes in
    /// the peer's memory are detected.
    pub(crate) map_limit: Option<u64>,
    /// Longest spin. `None`: as long as a wake-up by the backend's doorbell costs.
    pub(crate) spin: Option<Duration>,
    pub(crate) flush: FlushPolicy,
    pub(crate) barrier: bool,
    pub(crate) handshake_timeout: Duration,
    pub(crate) connect_timeout: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            capacity: None,
            growth: None,
            idle_time: GrowthRule::STREAM.idle,
            map_limit: None,
            spin: None,
            flush: FlushPolicy::Immediate,
            barrier: true,
            handshake_timeout: Duration::from_secs(5),
            connect_timeout: None,
        }
    }
}

impl Options {
    /// Returns the defaults: 1 MiB rings, an adaptive spin of at most 50 µs, a flush at every write, 5 s for the
    /// handshake.
    ///
    /// On one kernel, a channel that moves 400 MB/s or more tries a larger ring, if the CPU caches suggest that it is
    /// faster: four times the L2 cache of one CPU, at most 4 MiB. The channel keeps that ring while it is busy, unless
    /// it is slower there. Such rings of one process take at most half of the L3 cache. The largest message does not
    /// grow with the ring. Once idle for a second the channel goes back to 1 MiB; the memory of its first ring stays
    /// allocated too. To keep rings at one size, set their [size](Self::ring_size).
    ///
    /// Rings are smaller where memory to share is scarce (Xen's grants). Between emulated machines the spin is at most
    /// 200 µs.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the size in bytes of the ring that this endpoint writes into. It is fixed, unless the ring may
    /// [grow](Self::ring_growth).
    ///
    /// The size is rounded up to a power of two, at least 4 KiB and at most 1 GiB. A channel costs this and one page
    /// for each endpoint.
    #[must_use]
    pub fn ring_size(mut self, bytes: u64) -> Self {
        let bytes = bytes.clamp(limits::CAPACITY_MIN, limits::CAPACITY_MAX);
        self.capacity = Some(bytes.next_power_of_two());
        self
    }

    /// Sets the ring size that suits a bulk stream on this machine, by its CPU caches: see [`RingChoice`]. This is not
    /// the default, because a channel costs its ring even while it is idle.
    #[must_use]
    pub fn ring_size_by_caches(self) -> Self {
        self.ring_size(RingChoice::of_this_machine().bytes())
    }

    /// Lets the ring that this endpoint of a stream writes into follow its load, within `budget`. Off by default.
    ///
    /// The ring begins with 8 KiB. While bulk data fills it, it grows to the [ring size](Self::ring_size) if that was
    /// set, else to the [size by caches](Self::ring_size_by_caches). It shrinks to 4 KiB after a second, or another
    /// [time](Self::ring_idle_time), in which less than 8 KiB were written; sooner where another ring could not grow.
    /// It changes only in calls of this endpoint. A blocking read of a [`Stream`](crate::Stream) is such a call;
    /// programs that split the halves call [`follow_load`](crate::WriteHalf::follow_load).
    ///
    /// On one kernel the ring also grows if a writer finds no room and its reader returns none, or if the program
    /// [reserves](crate::Tx::reserve_until) more than the ring holds. So a program can count on the room of the largest
    /// ring, as long as the budget has it. If it connects there to a listener of an older version, the ring keeps its
    /// size. Elsewhere a reservation must fit the current ring, and so must what a peer [waits
    /// for](crate::ReadHalf::wait_for). Messages keep a ring of one size, because it bounds their length.
    ///
    /// # Example
    /// See [`RingGrowth`](crate::RingGrowth).
    #[must_use]
    pub fn ring_growth(mut self, budget: &RingBudget) -> Self {
        self.growth = Some(budget.clone());
        self
    }

    /// Sets how long a stream must be idle before its [grown](Self::ring_growth) ring shrinks. 1 s by default.
    #[must_use]
    pub fn ring_idle_time(mut self, time: Duration) -> Self {
        self.idle_time = time;
        self
    }

    /// Returns the size to which the ring of a growing stream grows.
    pub(crate) fn growth_target(&self) -> u64 {
        self.capacity.unwrap_or_else(|| RingChoice::of_this_machine().bytes())
    }

    /// Returns the size asked for as this endpoint's first ring. `None`: as much as the backend can afford, up to the
    /// default.
    pub(crate) fn first_ring(&self, messages: bool) -> Option<u64> {
        match self.growth {
            Some(_) if !messages => Some(self.growth_target().min(GrowthRule::STREAM.first)),
            _ => self.capacity,
        }
    }

    /// Sets the largest ring of the peer, in bytes, that this endpoint maps. It refuses a larger one.
    ///
    /// By default a listener maps a caller's first ring up to 16 MiB, or up to four times its own [ring
    /// size](Self::ring_size) where that is more. The ring that a peer grows to later, and the one with which a
    /// listener answers, may have 1 GiB. On kernels that cannot count the pages of a memfd (before Linux 6.5), 16 MiB
    /// bounds these as well.
    #[must_use]
    pub fn largest_peer_ring(mut self, bytes: u64) -> Self {
        self.map_limit = Some(limits::CONTROL_LEN + bytes.clamp(limits::CAPACITY_MIN, limits::CAPACITY_MAX));
        self
    }

    /// Returns the largest segment accepted from a caller before anything was agreed with it (C-7).
    pub(crate) fn first_map_limit(&self) -> u64 {
        self.map_limit.unwrap_or_else(|| {
            let own = self.capacity.unwrap_or(limits::CAPACITY_DEFAULT);
            let most = (4 * own).clamp(limits::FIRST_CAPACITY_MOST, limits::CAPACITY_MAX);
            limits::CONTROL_LEN + most
        })
    }

    /// Returns the largest segment that this endpoint announces it maps (C-2). `counted` is whether it detects holes in
    /// segments.
    pub(crate) fn map_limit(&self, counted: bool) -> u64 {
        let most = limits::CONTROL_LEN + limits::CAPACITY_MAX;
        self.map_limit.unwrap_or_else(|| if counted { most } else { self.first_map_limit() })
    }

    /// Sets the longest time to spin before each sleep. Zero never spins; [`Duration::MAX`] never sleeps.
    ///
    /// An endpoint spins less where it measures that spinning does not pay, and never where both endpoints share a CPU.
    #[must_use]
    pub fn spin(mut self, most: Duration) -> Self {
        self.spin = Some(most);
        self
    }

    /// Sets when a write checks whether the reader sleeps.
    #[must_use]
    pub fn flush_policy(mut self, policy: FlushPolicy) -> Self {
        self.flush = policy;
        self
    }

    /// Sets whether the kernel's `membarrier` may replace the fence at every write, where both endpoints run on one
    /// kernel.
    ///
    /// Allowed by default: small writes are up to a third cheaper. Sleeps cost more, and a long sleep is interrupted
    /// once, after 2 ms, for another check. The same holds for a program that sleeps in a poll of a descriptor (R-13).
    #[must_use]
    pub fn membarrier(mut self, allowed: bool) -> Self {
        self.barrier = allowed;
        self
    }

    /// Sets how long a peer, or the listener, may take for its part of the handshake. 5 s by default.
    #[must_use]
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// Sets how long connecting waits for a listener that is not there yet. By default it does not wait.
    #[must_use]
    pub fn wait_for_listener(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c7_callers_may_make_a_listener_map_little_and_peers_more() {
        let page = limits::CONTROL_LEN;
        let plain = Options::new();
        assert_eq!(plain.first_map_limit(), page + (16 << 20));
        assert_eq!((plain.map_limit(true), plain.map_limit(false)), (page + (1 << 30), page + (16 << 20)));
        assert_eq!(Options::new().ring_size(64 << 20).first_map_limit(), page + (256 << 20));
        assert_eq!(Options::new().ring_size(1 << 30).first_map_limit(), page + (1 << 30));
        let told = Options::new().largest_peer_ring(1 << 16);
        assert_eq!((told.first_map_limit(), told.map_limit(false)), (page + (1 << 16), page + (1 << 16)));
    }
}
