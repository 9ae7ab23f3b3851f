// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Publishes the counters of a half for tools that read its segment from outside (C-12). Written, never read.

use std::array;

use tombolo_layout::private::COUNTERS;
use tombolo_mem::{MappedOwnWord, OwnControl, OwnWord};

use crate::Counters;

/// The part of the stats page that belongs to one half.
#[derive(Debug)]
pub struct StatsPage([MappedOwnWord; COUNTERS]);

impl StatsPage {
    pub(crate) fn new(control: &OwnControl, at: usize) -> Self {
        Self(array::from_fn(|index| control.word(at + 8 * index)))
    }

    /// Brings the stats page up to date.
    pub fn publish(&self, counters: &Counters) {
        for (word, value) in self.0.iter().zip(counters.listed()) {
            // ORDER C-12: Relaxed; each word stands for itself.
            word.store_relaxed(value);
        }
    }
}
