// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a channel can tell of itself.

use tombolo_ring::Counters;

/// One pipe, as this end sees it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct PipeStatistics {
    /// What was counted.
    pub counters: Counters,
    /// Bytes of the ring now.
    pub ring_size: u64,
    /// Bytes written and not yet read, as last seen.
    pub in_flight: u64,
}

/// Both pipes of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Statistics {
    /// What this end writes.
    pub sent: PipeStatistics,
    /// What this end reads.
    pub received: PipeStatistics,
    /// Bytes of this end's memory that the peer may still reach although this end is done with it.
    pub quarantined: u64,
}
