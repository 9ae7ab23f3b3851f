// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements temporal slipping. A reader right behind its writer is bound by the transfer of single lines. A reader
//! that lets the writer run ahead a little moves many lines at once. The reader learns how long to hold back: longer
//! while that brings more bytes, shorter while it brings none, so that a ping-pong pays nothing.

use tombolo_mem::Mem;

use crate::pause::pause;

/// Longest hold-back in pauses: some 10 µs, which is needed where the two CPUs do not share a cache.
const MOST: u32 = 512;
/// Length of a trial, in pauses, while there is no hold-back. A shorter one would not see the next line arrive from a
/// distant CPU.
const TRIAL: u32 = 16;
/// Number of checks between two trials, at first and at most. Each trial in vain doubles it, so a ping-pong has next to
/// none.
const TRIAL_EVERY: (u32, u32) = (16, 4096);

#[derive(Debug)]
pub(crate) struct Slip {
    pauses: u32,
    looks: u32,
    trial_every: u32,
}

impl Default for Slip {
    fn default() -> Self {
        Self { pauses: 0, looks: 0, trial_every: TRIAL_EVERY.0 }
    }
}

impl Slip {
    /// Holds back for as long as was learnt. Returns whether it did, so that another check is worth while.
    #[inline]
    pub(crate) fn pause<M: Mem>(&mut self) -> bool {
        if self.pauses == 0 {
            self.looks += 1;
            if self.looks < self.trial_every {
                return false;
            }
        }
        for _ in 0..self.pauses.max(TRIAL) {
            pause::<M>();
        }
        true
    }

    /// Learns from the check after the pause: whether it found more bytes than before, and whether these are still too
    /// few.
    #[inline]
    pub(crate) fn learn(&mut self, more: bool, too_little: bool) {
        match (more, too_little) {
            (true, true) => {
                self.pauses = (self.pauses * 2).clamp(TRIAL, MOST);
                self.trial_every = TRIAL_EVERY.0;
            }
            (true, false) => {}
            (false, _) if self.pauses == 0 => {
                self.trial_every = (self.trial_every * 2).min(TRIAL_EVERY.1);
            }
            (false, _) => self.pauses = if self.pauses > TRIAL { self.pauses / 2 } else { 0 },
        }
        self.looks = 0;
    }
}
