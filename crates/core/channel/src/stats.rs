// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Statistics of a channel.

use tombolo_ring::Counters;

use crate::RingGrowth;

/// Counters and state of one direction of a channel, as seen by this endpoint.
///
/// # Example
/// See [`Statistics`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct PipeStatistics {
    /// Counters since the channel was made.
    pub counters: Counters,
    /// Current size of the ring in bytes.
    pub ring_size: u64,
    /// Number of bytes written and not yet read, as last seen.
    pub in_flight: u64,
    /// Growth state of the ring, if this endpoint writes it and lets it [follow its load](crate::Options::ring_growth).
    pub ring_growth: Option<RingGrowth>,
}

/// Counters and state of both directions of a channel, as seen by this endpoint.
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
    /// Direction that this endpoint writes.
    pub sent: PipeStatistics,
    /// Direction that this endpoint reads.
    pub received: PipeStatistics,
    /// Bytes of this endpoint's memory that the peer may still reach although this endpoint no longer uses them.
    pub quarantined: u64,
}
