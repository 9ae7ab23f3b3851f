// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a channel can tell of itself.

use tombolo_ring::Counters;

use crate::RingGrowth;

/// Counters and state of one direction of a channel, as this endpoint sees it.
///
/// # Example
/// See [`Statistics`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct PipeStatistics {
    /// What was counted since the channel was made.
    pub counters: Counters,
    /// Bytes of the ring now.
    pub ring_size: u64,
    /// Bytes written and not yet read, as last seen.
    pub in_flight: u64,
    /// Where the ring stands, if this endpoint writes it and lets it [follow its load](crate::Options::ring_growth).
    pub ring_growth: Option<RingGrowth>,
}

/// Counters and state of both directions of a channel, as this endpoint sees them.
///
/// # Example
/// ```
/// use std::io::Write;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let address = format!("local:{}/counted", folder.path().display());
/// # let mut listener = tombolo::listen(&address)?;
/// # let client = std::thread::spawn(move || tombolo::connect(&address));
/// # let _peer = listener.accept()?;
/// let mut stream = client.join().unwrap()?;
/// stream.write_all(b"12345").unwrap();
/// let statistics = stream.statistics();
/// assert_eq!(statistics.sent.counters.bytes, 5);
/// assert_eq!(statistics.received.counters.bytes, 0);
/// assert_eq!(statistics.sent.ring_size, 1 << 20); // the default
/// # Ok::<(), tombolo::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Statistics {
    /// The direction that this endpoint writes.
    pub sent: PipeStatistics,
    /// The direction that this endpoint reads.
    pub received: PipeStatistics,
    /// Bytes of this endpoint's memory that the peer may still reach although this endpoint is done with it.
    pub quarantined: u64,
}
