// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a channel is set up.

use std::time::Duration;

use tombolo_layout::limits;
use tombolo_ring::FlushPolicy;

/// How a channel is set up and how its end behaves. Each end chooses for itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// None: as much as the backend can afford, up to the default.
    pub(crate) capacity: Option<u64>,
    pub(crate) map_limit: u64,
    /// None: as long as a wake-up by the backend's bell costs.
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
            map_limit: limits::CONTROL_LEN + limits::CAPACITY_MAX,
            spin: None,
            flush: FlushPolicy::Immediate,
            barrier: true,
            handshake_timeout: Duration::from_secs(5),
            connect_timeout: None,
        }
    }
}

impl Options {
    /// The defaults: 1 MiB rings, smaller ones where memory to share is scarce (Xen's grants), a learnt spin of at most
    /// 50 µs (200 between emulated machines), flush at every write, 5 s for a handshake.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes of the ring this end writes into: rounded up to a power of two, at least 4 KiB, at most 1 GiB. A channel
    /// costs this and a page for each end.
    #[must_use]
    pub fn ring_size(mut self, bytes: u64) -> Self {
        let bytes = bytes.clamp(limits::CAPACITY_MIN, limits::CAPACITY_MAX);
        self.capacity = Some(bytes.next_power_of_two());
        self
    }

    /// Largest ring of the peer that this end is willing to map, in bytes. A larger one is refused.
    #[must_use]
    pub fn largest_peer_ring(mut self, bytes: u64) -> Self {
        self.map_limit = limits::CONTROL_LEN + bytes.clamp(limits::CAPACITY_MIN, limits::CAPACITY_MAX);
        self
    }

    /// Spins at most this long before each sleep; less where spinning is seen not to pay, never where both ends share
    /// a CPU. Zero never spins; [`Duration::MAX`] never sleeps.
    #[must_use]
    pub fn spin(mut self, most: Duration) -> Self {
        self.spin = Some(most);
        self
    }

    /// When the writing side looks whether the reader sleeps.
    #[must_use]
    pub fn flush_policy(mut self, policy: FlushPolicy) -> Self {
        self.flush = policy;
        self
    }

    /// Whether the kernel's `membarrier` may stand in for the fence at every write where both ends run on one kernel
    /// (the default: cheap writes, dearer sleeps).
    #[must_use]
    pub fn membarrier(mut self, allowed: bool) -> Self {
        self.barrier = allowed;
        self
    }

    /// How long a peer that knocked may take to introduce itself before it is dropped.
    #[must_use]
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// How long to wait for a listener that is not there yet. By default none is waited for.
    #[must_use]
    pub fn wait_for_listener(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }
}
