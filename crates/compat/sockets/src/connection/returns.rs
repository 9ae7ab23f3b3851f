// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decides when an endpoint that was joined before may be joined again (S-22).

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Time for which an endpoint stays on TCP before it is tried again: twice as long each time, up to `LONGEST`. One that
/// stayed in memory for that long begins anew with `FIRST`.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// No moment yet.
const NEVER: u64 = 0;

/// State of an endpoint's returns to memory. All times are milliseconds of one clock, whose value the caller supplies.
#[derive(Debug)]
pub(crate) struct Returns {
    /// Whether it takes the place of an endpoint that was joined.
    again: bool,
    /// Time that it waits before the next try.
    pause: AtomicU64,
    /// Time of the next try, once it is known.
    next: AtomicU64,
    /// Time at which it was joined.
    joined: AtomicU64,
}

impl Default for Returns {
    fn default() -> Self {
        Self {
            again: false,
            pause: AtomicU64::new(millis(FIRST)),
            next: AtomicU64::new(NEVER),
            joined: AtomicU64::new(NEVER),
        }
    }
}

fn millis(time: Duration) -> u64 {
    time.as_millis() as u64
}

impl Returns {
    /// Returns the state of the endpoint that takes its place `now`, and may try at once.
    pub fn begin_anew(&self, now: Duration) -> Self {
        let pause = self.longer_pause();
        Self {
            again: true,
            pause: AtomicU64::new(pause),
            next: AtomicU64::new(millis(now)),
            joined: AtomicU64::new(NEVER),
        }
    }

    fn longer_pause(&self) -> u64 {
        (2 * self.pause.load(Ordering::Relaxed)).min(millis(LONGEST))
    }

    /// Returns whether it was joined before.
    #[inline]
    pub fn was_joined(&self) -> bool {
        self.again
    }

    /// Notes that it is joined `now`.
    pub fn note_join(&self, now: Duration) {
        self.joined.store(millis(now), Ordering::Relaxed);
        self.next.store(NEVER, Ordering::Relaxed);
    }

    /// Returns whether the time for the next try is known and has not come.
    pub fn is_waiting(&self, now: Duration) -> bool {
        millis(now) < self.next.load(Ordering::Relaxed)
    }

    /// Returns whether the time for the next try has come. For an endpoint that was joined, the pause begins with the
    /// first call of this function after it has left.
    pub fn is_due(&self, now: Duration) -> bool {
        let now = millis(now);
        match self.next.load(Ordering::Relaxed) {
            NEVER => {
                if now.saturating_sub(self.joined.load(Ordering::Relaxed)) >= millis(LONGEST) {
                    self.pause.store(millis(FIRST), Ordering::Relaxed);
                }
                self.next.store(now + self.pause.load(Ordering::Relaxed), Ordering::Relaxed);
                false
            }
            next => now >= next,
        }
    }

    /// Makes the next look wait for `pause`, as it cannot be tried `now`. This does not count as a failed try.
    pub fn look_later(&self, now: Duration, pause: Duration) {
        self.next.store(millis(now + pause), Ordering::Relaxed);
    }

    /// Notes that a try has failed `now`.
    pub fn postpone(&self, now: Duration) {
        let pause = self.pause.load(Ordering::Relaxed);
        self.next.store(millis(now) + pause, Ordering::Relaxed);
        self.pause.store(self.longer_pause(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(1000 + seconds)
    }

    /// Returns when a connection that left at `from` is due, at the earliest, in seconds after `from`.
    fn due(returns: &Returns, from: u64) -> u64 {
        assert!(!returns.is_waiting(at(from)), "who was not asked yet waits for nothing");
        assert!(!returns.is_due(at(from)), "the first question is asked when it leaves");
        assert!(returns.is_waiting(at(from)));
        (0..200).find(|after| returns.is_due(at(from + after))).unwrap()
    }

    #[test]
    fn s22_who_joins_and_leaves_at_once_waits_twice_as_long_each_time_up_to_a_minute() {
        let mut returns = Returns::default();
        assert!(!returns.was_joined());
        let mut now = 0;
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            returns.note_join(at(now));
            assert_eq!(due(&returns, now), pause);
            now += pause;
            returns = returns.begin_anew(at(now));
            assert!(returns.was_joined() && returns.is_due(at(now)), "what takes its place tries at once");
        }
        // A connection that stayed for a minute begins anew.
        returns.note_join(at(now));
        assert_eq!(due(&returns, now + 60), 1);
    }

    #[test]
    fn s22_tries_that_fail_are_twice_as_far_apart_each_time() {
        let returns = Returns::default().begin_anew(at(0));
        let mut now = 0;
        for pause in [2, 4, 8, 16, 32, 60, 60] {
            returns.postpone(at(now));
            assert_eq!((0..200).find(|after| returns.is_due(at(now + after))), Some(pause));
            now += pause;
        }
    }

    #[test]
    fn s22_what_could_not_be_tried_makes_no_pause_longer() {
        let returns = Returns::default();
        returns.note_join(at(0));
        let mut now = due(&returns, 0);
        for _ in 0..20 {
            returns.look_later(at(now), FIRST);
            assert!(!returns.is_due(at(now)));
            now += 1;
            assert!(returns.is_due(at(now)));
        }
        returns.postpone(at(now));
        assert!(!returns.is_due(at(now)) && returns.is_due(at(now + 1)), "the first try that fails");
    }
}
