// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Temporal slipping: a reader right behind its writer is bound by the transfer of single lines; one that lets the
//! writer run ahead a little moves many at once. How long to hold back is learnt: longer while it brings more, shorter
//! while it brings nothing, so that a ping-pong pays nothing.

use tombolo_mem::Mem;

use crate::pause::pause;

/// Longest hold-back, in pauses: some 10 µs, what it takes where the two CPUs do not share a cache.
const MOST: u32 = 512;
/// Length of a trial while none is in force. A shorter one would not see the next line arrive from a distant CPU.
const TRIAL: u32 = 16;
/// Looks between two trials, at first and at most: each trial in vain doubles it, so a ping-pong has next to none.
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
    /// Holds back as learnt; says whether it did, so that another look is worth it.
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

    /// What the look after the pause brought: more than before, and still too little?
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
