// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Limits untrusted processes to a share of the one thread that serves all, whatever they ask for and however often
//! (B-17).

use std::time::{Duration, Instant};

/// Factor by which the rest after work for untrusted processes is longer than the work, and the longest rest.
pub(crate) const SHARE: u32 = 9;
const REST_MAX: Duration = Duration::from_secs(1);

/// Returns how long no such work is done after work that took `took`.
pub(crate) fn rest_after(took: Duration) -> Duration {
    REST_MAX.min(took.saturating_mul(SHARE))
}

/// Decides when the broker reconciles because of what guests and QEMUs say. To reconcile is to look at everything.
#[derive(Debug, Default)]
pub(crate) struct ReconcilePace {
    is_due: bool,
    rests_until: Option<Instant>,
}

impl ReconcilePace {
    /// Records a change on which the broker has to act.
    pub(crate) fn request(&mut self) {
        self.is_due = true;
    }

    /// Returns whether there is a change on which the broker has not acted yet.
    pub(crate) fn is_due(&self) -> bool {
        self.is_due
    }

    /// Records that the broker begins to act on all changes until now.
    pub(crate) fn begin(&mut self) {
        self.is_due = false;
    }

    /// Records that this is done, and took from `began` to `now`.
    pub(crate) fn finish(&mut self, began: Instant, now: Instant) {
        self.rests_until = Some(now + rest_after(now.saturating_duration_since(began)));
    }

    /// Returns how long the broker has to wait before it acts.
    pub(crate) fn rest(&self, now: Instant) -> Duration {
        self.rests_until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b17_consequences_of_what_strangers_say_without_end_take_a_tenth_of_the_time() {
        let (begun, took) = (Instant::now(), Duration::from_millis(3));
        let (mut now, mut pace, mut spent) = (begun, ReconcilePace::default(), Duration::ZERO);
        for _ in 0..1000 {
            pace.request();
            assert!(pace.is_due());
            now += pace.rest(now);
            pace.begin();
            assert!(!pace.is_due());
            pace.finish(now, now + took);
            (now, spent) = (now + took, spent + took);
        }
        assert!(spent * 10 <= now - begun + 10 * took, "{spent:?} of {:?}", now - begun);
    }

    #[test]
    fn b17_rest_is_bounded_and_what_comes_after_it_does_not_wait() {
        let (now, mut pace) = (Instant::now(), ReconcilePace::default());
        assert_eq!(pace.rest(now), Duration::ZERO);
        pace.finish(now, now + Duration::from_secs(3600));
        let now = now + Duration::from_secs(3600);
        assert_eq!((pace.rest(now), pace.rest(now + REST_MAX)), (REST_MAX, Duration::ZERO));
    }
}
