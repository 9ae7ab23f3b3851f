// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How many lines a log gets: strangers cause most of them.

use std::time::{Duration, Instant};

/// Lines at once, and how long until there may be one more.
const BURST: u32 = 200;
const STEP: Duration = Duration::from_millis(500);

/// What may still be written.
#[derive(Debug)]
pub(crate) struct Pace {
    left: u32,
    since: Instant,
    left_out: u64,
}

impl Pace {
    pub(crate) fn new(now: Instant) -> Self {
        Self { left: BURST, since: now, left_out: 0 }
    }

    /// Whether one more line may be written, and then how many were left out before it.
    pub(crate) fn take(&mut self, now: Instant) -> Option<u64> {
        let steps = now.saturating_duration_since(self.since).as_millis() / STEP.as_millis();
        let steps = u32::try_from(steps).unwrap_or(u32::MAX).min(BURST);
        if steps != 0 {
            self.left = (self.left + steps).min(BURST);
            self.since = if self.left == BURST { now } else { self.since + STEP * steps };
        }
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            return Some(std::mem::take(&mut self.left_out));
        }
        self.left_out = self.left_out.saturating_add(1);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_that_strangers_fill_gets_so_many_lines_in_a_time_and_says_what_it_left_out() {
        let now = Instant::now();
        let mut pace = Pace::new(now);
        assert_eq!((0..1000).filter(|_| pace.take(now).is_some()).count(), 200);
        assert_eq!(pace.take(now + STEP), Some(800));
        assert_eq!(pace.take(now + STEP), None);
        let later = now + Duration::from_secs(3600);
        assert_eq!(pace.take(later), Some(1));
        assert_eq!((0..1000).filter(|_| pace.take(later).is_some()).count(), 199);
    }
}
