// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counts what an interface has sent and received, and what it dropped and why.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::frame::DropReason;

/// A counter that one thread increments and others read.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to the counter.
    pub fn add(&self, count: u64) {
        // ORDER: Relaxed; it is only counted.
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters of one direction.
#[derive(Debug, Default)]
pub struct Direction {
    /// Frames passed on.
    pub frames: Counter,
    /// Bytes in these frames.
    pub bytes: Counter,
    /// Those of these frames that were still to be divided into segments.
    pub segments: Counter,
    /// Times that the ring was full.
    pub full: Counter,
    short: Counter,
    long: Counter,
    header: Counter,
    feature: Counter,
    source: Counter,
    /// Frames that were already queued when the link began.
    pub stale: Counter,
    /// Frames that the kernel refused.
    pub refused: Counter,
    /// Frames that arrived while the interface was switched off.
    pub down: Counter,
    /// Frames for which the kernel had no memory.
    pub memory: Counter,
}

impl Direction {
    /// Counts a dropped frame.
    pub fn count_drop(&self, why: DropReason) {
        let counter = match why {
            DropReason::Short => &self.short,
            DropReason::Long => &self.long,
            DropReason::Header => &self.header,
            DropReason::Feature => &self.feature,
            DropReason::Source => &self.source,
        };
        counter.add(1);
    }

    fn figures(&self) -> Figures {
        Figures {
            frames: self.frames.get(),
            bytes: self.bytes.get(),
            segments: self.segments.get(),
            full: self.full.get(),
            dropped: Dropped {
                short: self.short.get(),
                long: self.long.get(),
                header: self.header.get(),
                feature: self.feature.get(),
                source: self.source.get(),
                stale: self.stale.get(),
                refused: self.refused.get(),
                down: self.down.get(),
                memory: self.memory.get(),
            },
        }
    }
}

/// Counters of both directions.
#[derive(Debug, Default)]
pub struct Counters {
    /// From the interface to the peer.
    pub sent: Direction,
    /// From the peer to the interface.
    pub received: Direction,
}

impl Counters {
    /// Returns the current values: sent and received.
    pub fn figures(&self) -> [Figures; 2] {
        [self.sent.figures(), self.received.figures()]
    }
}

/// Values of one direction's counters since the interface was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Frames passed on.
    pub frames: u64,
    /// Bytes in these frames.
    pub bytes: u64,
    /// Those of these frames that were still to be divided into segments.
    pub segments: u64,
    /// Times that the ring was full and the interface had to wait.
    pub full: u64,
    /// Frames dropped.
    pub dropped: Dropped,
}

/// Dropped frames by reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Dropped {
    /// Too short to be a frame.
    pub short: u64,
    /// Longer than agreed.
    pub long: u64,
    /// The header is invalid.
    pub header: u64,
    /// A feature is needed that was not agreed.
    pub feature: u64,
    /// The source is not the sender's address.
    pub source: u64,
    /// The frame was queued already when the link began.
    pub stale: u64,
    /// The kernel refused the frame.
    pub refused: u64,
    /// The interface was switched off.
    pub down: u64,
    /// The kernel had no memory.
    pub memory: u64,
}

impl Dropped {
    /// Returns all counts, by the names that scripts see.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 9] {
        [
            ("short", self.short),
            ("long", self.long),
            ("header", self.header),
            ("feature", self.feature),
            ("source", self.source),
            ("stale", self.stale),
            ("refused", self.refused),
            ("down", self.down),
            ("memory", self.memory),
        ]
    }
}
