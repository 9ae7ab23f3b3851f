// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a channel is set up.

use std::time::Duration;

use tombolo_layout::limits;
use tombolo_ring::FlushPolicy;

use tombolo_growth::GrowthRule;

use crate::{RingBudget, RingChoice};

/// How a channel is set up and how this endpoint of it behaves. Each endpoint chooses for itself.
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
    /// None: as much as the backend can afford, up to the default.
    pub(crate) capacity: Option<u64>,
    /// What the ring of a stream may grow by; None: it stays as it is.
    pub(crate) growth: Option<RingBudget>,
    pub(crate) idle_time: Duration,
    /// None: as much as a ring may have, where holes in the peer's memory are seen.
    pub(crate) map_limit: Option<u64>,
    /// None: as long as a wake-up by the backend's doorbell costs.
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
    /// Returns the defaults: 1 MiB rings, a learnt spin of at most 50 µs, flush at every write, 5 s for a handshake.
    ///
    /// On one kernel, a channel that moves 400 MB/s or more tries a larger ring, where the caches let one expect that it is
    /// faster: four times the L2 cache of one CPU, at most 4 MiB. It keeps that while it is busy, unless it is slower there.
    /// Such rings of one process take half of the L3 cache at most. Messages become no longer by it. Once it is idle for a
    /// second the channel goes back to 1 MiB, and its first ring's memory stays as well. Whoever wants rings that stay as they
    /// are says their [size](Self::ring_size).
    ///
    /// Rings are smaller where memory to share is scarce (Xen's grants). Between emulated machines the spin is at most
    /// 200 µs.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the bytes of the ring that this endpoint writes into. It stays as it is, unless it is to [grow](Self::ring_growth).
    ///
    /// They are rounded up to a power of two, at least 4 KiB, at most 1 GiB. A channel costs this and a page for each
    /// endpoint.
    #[must_use]
    pub fn ring_size(mut self, bytes: u64) -> Self {
        let bytes = bytes.clamp(limits::CAPACITY_MIN, limits::CAPACITY_MAX);
        self.capacity = Some(bytes.next_power_of_two());
        self
    }

    /// The ring that suits a bulk stream on this machine, by its caches: see [`RingChoice`]. It is not the default, as a channel
    /// costs its ring even while it is idle.
    #[must_use]
    pub fn ring_size_by_caches(self) -> Self {
        self.ring_size(RingChoice::of_this_machine().bytes())
    }

    /// Lets the ring that this endpoint of a stream writes into follow its load, within `budget`. Off by default.
    ///
    /// The ring begins with 8 KiB. It grows while bulk data fills it, to the [ring size](Self::ring_size) where that
    /// was set, else to the [size by caches](Self::ring_size_by_caches). It shrinks to 4 KiB after a second in which
    /// less than 8 KiB were written, or another [time](Self::ring_idle_time); sooner where another could not grow. It
    /// changes only in calls of this endpoint: a blocking read of a [`Stream`](crate::Stream) is one, and whoever has
    /// the halves apart calls [`follow_load`](crate::WriteHalf::follow_load).
    ///
    /// On one kernel it grows as well where a writer finds no room and its reader hands none back, or where more is
    /// [reserved](crate::Tx::reserve_until) than it holds. So a program can count on the room of the largest ring, while the
    /// budget has it. Whoever connects there to a listener of an older version has a ring that stays as it is. Elsewhere a
    /// piece that is reserved must fit the ring of the moment, as must what a peer
    /// [waits for](crate::ReadHalf::wait_for). Messages keep a ring of one size, as it bounds their length.
    ///
    /// # Example
    /// See [`RingGrowth`](crate::RingGrowth).
    #[must_use]
    pub fn ring_growth(mut self, budget: &RingBudget) -> Self {
        self.growth = Some(budget.clone());
        self
    }

    /// Sets how long a stream is idle before its [grown](Self::ring_growth) ring shrinks. 1 s by default.
    #[must_use]
    pub fn ring_idle_time(mut self, time: Duration) -> Self {
        self.idle_time = time;
        self
    }

    /// The ring that a stream grows to, where it does.
    pub(crate) fn growth_target(&self) -> u64 {
        self.capacity.unwrap_or_else(|| RingChoice::of_this_machine().bytes())
    }

    /// The first ring of this endpoint: what was asked for. None: as much as the backend can afford, up to the default.
    pub(crate) fn first_ring(&self, messages: bool) -> Option<u64> {
        match self.growth {
            Some(_) if !messages => Some(self.growth_target().min(GrowthRule::STREAM.first)),
            _ => self.capacity,
        }
    }

    /// Sets the largest ring of the peer that this endpoint maps, in bytes. A larger one is refused.
    ///
    /// By default a listener maps no larger first ring of a caller than 16 MiB, or four times its own
    /// [ring size](Self::ring_size) where that is more. What a peer grows to later, and what a listener answers with, may
    /// have 1 GiB. On kernels that do not let one count a memfd's pages (before Linux 6.5) 16 MiB bounds these as well.
    #[must_use]
    pub fn largest_peer_ring(mut self, bytes: u64) -> Self {
        self.map_limit = Some(limits::CONTROL_LEN + bytes.clamp(limits::CAPACITY_MIN, limits::CAPACITY_MAX));
        self
    }

    /// The largest segment of a caller that nothing was agreed with yet (C-7).
    pub(crate) fn first_map_limit(&self) -> u64 {
        self.map_limit.unwrap_or_else(|| {
            let own = self.capacity.unwrap_or(limits::CAPACITY_DEFAULT);
            let most = (4 * own).clamp(limits::FIRST_CAPACITY_MOST, limits::CAPACITY_MAX);
            limits::CONTROL_LEN + most
        })
    }

    /// The largest segment that this endpoint says it maps (C-2). `counted` is whether holes in it are seen.
    pub(crate) fn map_limit(&self, counted: bool) -> u64 {
        let most = limits::CONTROL_LEN + limits::CAPACITY_MAX;
        self.map_limit.unwrap_or_else(|| if counted { most } else { self.first_map_limit() })
    }

    /// Sets the longest time to spin before each sleep. Zero never spins; [`Duration::MAX`] never sleeps.
    ///
    /// An endpoint spins less where spinning is seen not to pay, and never where both endpoints share a CPU.
    #[must_use]
    pub fn spin(mut self, most: Duration) -> Self {
        self.spin = Some(most);
        self
    }

    /// Sets when a write looks whether the reader sleeps.
    #[must_use]
    pub fn flush_policy(mut self, policy: FlushPolicy) -> Self {
        self.flush = policy;
        self
    }

    /// Sets whether the kernel's `membarrier` may replace the fence at every write, where both endpoints run on one
    /// kernel.
    ///
    /// Allowed by default: small writes are up to a third cheaper. Sleeps are dearer, and one that lasts is interrupted once,
    /// after 2 ms, for another look; so is the sleep of one who polls a descriptor (R-13).
    #[must_use]
    pub fn membarrier(mut self, allowed: bool) -> Self {
        self.barrier = allowed;
        self
    }

    /// Sets how long a peer, or the listener, may take to introduce itself. 5 s by default.
    #[must_use]
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// Sets how long connecting waits for a listener that is not there yet. Not at all by default.
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
