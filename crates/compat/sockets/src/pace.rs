// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bounds the share of a program's time that goes into joining its connections, while that stops the program.
//!
//! Joining a connection takes each endpoint 0.2 to 0.7 ms of CPU time, a request over TCP a tenth of that. A process
//! that answers requests sleeps between them, and so runs as soon as one comes. Beside programs that compute, one that
//! has used up its time slice for joins is stopped until the others have used up theirs. Once that was seen, joins get
//! a quarter of the time for a while, and requests go over TCP meanwhile (ADR 0100).

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use tombolo_os::clock::exact_time;

/// Number of connections that may always be joined at once.
const FEW: usize = 4;
/// A step that takes so long was stopped for other programs.
const STOPPED: Duration = Duration::from_millis(5);
/// Time for which the bound holds after a step that was stopped.
const HOLDS: Duration = Duration::from_secs(1);
/// Multiple of the work for which joins then rest: they get a quarter of the time.
const REST: u64 = 4;
/// Work that may be done at once after a rest: the join of one or two connections. Much less than a time slice, so that
/// the requests that come meanwhile fit into it too.
const AT_ONCE: Duration = Duration::from_micros(500);
/// Longest time that one step counts.
const COUNTED: Duration = Duration::from_millis(1);

/// Work of this process on joins. Times are nanoseconds of the system's clock.
#[derive(Debug)]
pub(crate) struct JoinPace {
    /// Whether it is ever bounded: not where the user said when to join (`after`).
    is_bounded: bool,
    /// Time until which the bound holds.
    holds_until: AtomicU64,
    /// Time at which all the work has been rested for.
    rested_at: AtomicU64,
    /// Number of connections that were claimed or proposed, and not joined yet.
    under_way: AtomicUsize,
}

impl JoinPace {
    pub fn new(is_bounded: bool) -> Self {
        Self {
            is_bounded,
            holds_until: AtomicU64::new(0),
            rested_at: AtomicU64::new(0),
            under_way: AtomicUsize::new(0),
        }
    }

    /// Returns whether there is time for a step towards a join. If not, a later call takes it.
    #[inline]
    pub fn has_time(&self) -> bool {
        // ORDER: Relaxed, here and below; each word stands for itself.
        self.holds_until.load(Ordering::Relaxed) == 0
            || self.under_way.load(Ordering::Relaxed) <= FEW
            || self.has_time_at(exact_time())
    }

    /// Notes how many connections are on their way to be joined.
    pub fn note_under_way(&self, count: usize) {
        self.under_way.store(count, Ordering::Relaxed);
    }

    /// Does a step towards a join, or what may be one, and counts the time that it takes.
    pub fn spend<T>(&self, step: impl FnOnce() -> T) -> T {
        let begun = exact_time();
        let done = step();
        let now = exact_time();
        self.count(now.saturating_sub(begun), now);
        done
    }

    fn has_time_at(&self, now: Duration) -> bool {
        let earliest = nanoseconds(now + AT_ONCE * REST as u32);
        !self.holds_at(now) || self.rested_at.load(Ordering::Relaxed) <= earliest
    }

    fn holds_at(&self, now: Duration) -> bool {
        nanoseconds(now) < self.holds_until.load(Ordering::Relaxed)
    }

    fn count(&self, took: Duration, now: Duration) {
        let is_stopped = took >= STOPPED && self.is_bounded;
        // Nothing rests for work that was done before the bound held.
        if is_stopped || self.holds_at(now) {
            let rest = nanoseconds(took.min(COUNTED)) * REST;
            let more = |rested_at: u64| Some(rested_at.max(nanoseconds(now)) + rest);
            let _ = self.rested_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        }
        if is_stopped {
            self.holds_until.store(nanoseconds(now + HOLDS), Ordering::Relaxed);
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_micros(250);
    const BEGUN: Duration = Duration::from_secs(1000);

    /// Takes steps as often as there is time, looking each 10 µs, and returns their number.
    fn steps_within(pace: &JoinPace, from: Duration, time: Duration) -> u32 {
        let (mut now, mut steps) = (from, 0);
        while now < from + time {
            if pace.has_time_at(now) {
                now += STEP;
                pace.count(STEP, now);
                steps += 1;
            }
            now += Duration::from_micros(10);
        }
        steps
    }

    #[test]
    fn joins_get_a_quarter_of_the_time_for_a_second_once_one_was_stopped() {
        let pace = JoinPace::new(true);
        assert!((3_800..=4_000).contains(&steps_within(&pace, BEGUN, Duration::from_secs(1))));
        let stopped = BEGUN + Duration::from_secs(1);
        pace.count(STOPPED, stopped);
        let bounded = steps_within(&pace, stopped, HOLDS);
        assert!((940..=1_005).contains(&bounded), "{bounded}");
        assert!((3_800..=4_000).contains(&steps_within(&pace, stopped + HOLDS, Duration::from_secs(1))));
    }

    #[test]
    fn few_connections_need_no_rest_and_more_do() {
        let pace = JoinPace::new(true);
        assert!(pace.has_time());
        (0..10).for_each(|_| pace.count(STOPPED, exact_time()));
        for (count, has_time) in [(0, true), (FEW, true), (FEW + 1, false)] {
            pace.note_under_way(count);
            assert_eq!(pace.has_time(), has_time, "{count}");
        }
        let unbounded = JoinPace::new(false);
        (0..10).for_each(|_| unbounded.count(STOPPED, exact_time()));
        unbounded.note_under_way(FEW + 1);
        assert!(unbounded.has_time());
    }

    #[test]
    fn step_that_was_stopped_counts_as_a_millisecond() {
        let pace = JoinPace::new(true);
        pace.count(Duration::from_secs(5), BEGUN);
        assert!(!pace.has_time_at(BEGUN) && pace.has_time_at(BEGUN + Duration::from_millis(2)));
    }
}
