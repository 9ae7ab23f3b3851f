// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Temporal slipping: a reader right behind its writer is bound by the transfer of single lines; one that lets the
//! writer run ahead a little moves many at once. How long to hold back is learnt: longer while it brings more, shorter
//! while it brings nothing, so that a ping-pong pays nothing.

use tombolo_mem::Mem;

/// Longest hold-back, in pauses.
const MOST: u32 = 64;
/// One in so many refreshes tries a single pause where none is in force.
const PROBE_EVERY: u32 = 16;

#[derive(Debug, Default)]
pub(crate) struct Slip {
    pauses: u32,
    since_probe: u32,
}

impl Slip {
    /// Holds back as learnt; says whether it did, so that another look is worth it.
    #[inline]
    pub(crate) fn pause<M: Mem>(&mut self) -> bool {
        let pauses = if self.pauses != 0 {
            self.pauses
        } else {
            self.since_probe += 1;
            if self.since_probe < PROBE_EVERY {
                return false;
            }
            self.since_probe = 0;
            1
        };
        for _ in 0..pauses {
            M::pause();
        }
        true
    }

    /// What the look after the pause brought: more than before, and still too little?
    #[inline]
    pub(crate) fn learn(&mut self, more: bool, too_little: bool) {
        if more && too_little {
            self.pauses = (self.pauses * 2).clamp(1, MOST);
        } else if !more {
            self.pauses /= 2;
        }
    }
}
