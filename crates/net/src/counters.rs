// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an interface has sent and received, and what it dropped and why.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::frame::DropReason;

/// A number that one thread counts and others read.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
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
    /// Frames that went on.
    pub frames: Counter,
    /// Their bytes.
    pub bytes: Counter,
    /// Those of them that were still to be divided.
    pub segments: Counter,
    /// Times that the ring was full.
    pub full: Counter,
    short: Counter,
    long: Counter,
    header: Counter,
    feature: Counter,
    source: Counter,
    /// Frames that waited when the link began.
    pub stale: Counter,
    /// Frames that the kernel did not take.
    pub refused: Counter,
    /// Frames that came while the interface was switched off.
    pub down: Counter,
    /// Frames for which the kernel had no memory.
    pub memory: Counter,
}

impl Direction {
    /// Counts a frame that goes no further.
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

/// Counters of both.
#[derive(Debug, Default)]
pub struct Counters {
    /// From the interface to the peer.
    pub sent: Direction,
    /// From the peer to the interface.
    pub received: Direction,
}

impl Counters {
    /// What they are now: sent and received.
    pub fn figures(&self) -> [Figures; 2] {
        [self.sent.figures(), self.received.figures()]
    }
}

/// What was counted in one direction since the interface was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Frames that went on.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those of them that were still to be divided.
    pub segments: u64,
    /// Times that the ring was full and the interface had to wait.
    pub full: u64,
    /// Frames that went no further.
    pub dropped: Dropped,
}

/// Frames that went no further, by reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Dropped {
    /// Too short to be any.
    pub short: u64,
    /// Longer than was agreed on.
    pub long: u64,
    /// Their header makes no sense.
    pub header: u64,
    /// They need a feature that was not agreed on.
    pub feature: u64,
    /// They come from another address than their sender's.
    pub source: u64,
    /// They waited when the link began.
    pub stale: u64,
    /// The kernel did not take them.
    pub refused: u64,
    /// The interface was switched off.
    pub down: u64,
    /// The kernel had no memory.
    pub memory: u64,
}

impl Dropped {
    /// All of them, by the names that scripts see.
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
