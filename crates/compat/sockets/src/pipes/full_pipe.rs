// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Notes a pipe that was found full, and decides how long it may stay so (S-16).

use std::time::{Duration, Instant};

/// Time for which a peer may leave a pipe full while this endpoint reads what the peer sends, or there is nothing to
/// read.
const ONE_WAY: Duration = Duration::from_millis(500);
/// The same time while this endpoint leaves unread what the peer sends: each may be waiting for the other.
const BOTH_WAYS: Duration = Duration::from_millis(100);
/// Largest number of times that `BOTH_WAYS` is halved: once for each time that the pipe was left after it.
const HALVINGS: u32 = 5;
/// Number of looks that must find the same, so that a machine that stood still between two of them is no reason to
/// move.
const LOOKS: u32 = 3;

/// A pipe that was found full, and the positions that have to change.
#[derive(Debug)]
pub(super) struct FullPipe {
    since: Instant,
    looks: u32,
    /// How far the peer has read, and how far this endpoint has.
    head: u64,
    read_to: u64,
}

impl FullPipe {
    pub fn new(since: Instant, head: u64, read_to: u64) -> Self {
        Self { since, looks: 1, head, read_to }
    }

    /// Returns whether neither endpoint has read anything since.
    pub fn is_as_it_was(&self, head: u64, read_to: u64) -> bool {
        (self.head, self.read_to) == (head, read_to)
    }

    /// Counts one more look that found the pipe full. Returns whether it has been full for too long. If this endpoint
    /// reads nothing either, `before` is the number of times that the pipe was left for that.
    pub fn look_again(&mut self, now: Instant, before: Option<u32>) -> bool {
        self.looks += 1;
        let patience = before.map_or(ONE_WAY, |times| BOTH_WAYS / 2_u32.pow(times.min(HALVINGS)));
        self.looks >= LOOKS && now.duration_since(self.since) >= patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s16_pipe_is_left_after_a_while_and_sooner_where_that_was_right_before() {
        let begun = Instant::now();
        let after = |before, millis| {
            let mut full = FullPipe::new(begun, 5, 7);
            let now = begun + Duration::from_millis(millis);
            (full.look_again(begun, before), full.look_again(now, before)).1
        };
        assert!(after(None, 500) && !after(None, 499));
        assert!(after(Some(0), 100) && !after(Some(0), 99));
        assert!(after(Some(1), 50) && !after(Some(1), 49));
        assert!(after(Some(99), 4) && !after(Some(99), 3));
    }

    #[test]
    fn s16_one_look_after_a_long_pause_is_no_reason_and_neither_is_a_peer_that_reads() {
        let begun = Instant::now();
        let mut full = FullPipe::new(begun, 5, 7);
        assert!(!full.look_again(begun + Duration::from_secs(9), None));
        assert!(full.is_as_it_was(5, 7) && !full.is_as_it_was(6, 7) && !full.is_as_it_was(5, 8));
    }
}
