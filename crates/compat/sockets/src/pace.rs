// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bounds the share of a program's time that goes into joining its connections.
//!
//! Joining a connection takes each endpoint 0.2 to 0.7 ms of CPU time, a request over TCP a tenth of that. Where many
//! connections begin at once, all requests wait for the joins of all connections. Beside programs that compute they
//! wait much longer. A process that answers requests sleeps between them and so runs as soon as one comes. One that has
//! used up its time slice for joins is stopped until the others have used up theirs. So joins get an eighth of the time
//! at most where more than a few are under way, and requests go over TCP meanwhile (ADR 0100).

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use tombolo_os::clock::exact_time;

/// Connections that may be joined at once without any rest.
const FEW: usize = 4;
/// Multiple of the work for which joins then rest: they get an eighth of the time.
const REST: u64 = 8;
/// Work that may be done at once after a rest: the join of one or two connections. Much less than a time slice, so that
/// the requests that come meanwhile fit into it too.
const AT_ONCE: Duration = Duration::from_micros(500);
/// Longest time that one step counts. A step that takes longer was stopped for other programs.
const COUNTED: Duration = Duration::from_millis(1);

/// Work of this process on joins.
#[derive(Debug)]
pub(crate) struct JoinPace {
    /// Whether it is bounded: not where the user said when to join (`after`).
    is_bounded: bool,
    /// Time at which all of it has been rested for, in nanoseconds of the system's clock.
    rested_at: AtomicU64,
    /// Number of connections that were claimed or proposed, and not joined yet.
    under_way: AtomicUsize,
}

impl JoinPace {
    pub fn new(is_bounded: bool) -> Self {
        Self { is_bounded, rested_at: AtomicU64::new(0), under_way: AtomicUsize::new(0) }
    }

    /// Returns whether there is time for a step towards a join. If not, a later call takes it.
    pub fn has_time(&self) -> bool {
        // ORDER: Relaxed, here and below; each word stands for itself.
        !self.is_bounded || self.under_way.load(Ordering::Relaxed) <= FEW || self.has_time_at(exact_time())
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
        self.rested_at.load(Ordering::Relaxed) <= nanoseconds(now + AT_ONCE * REST as u32)
    }

    fn count(&self, work: Duration, now: Duration) {
        let rest = nanoseconds(work.min(COUNTED)) * REST;
        let more = |rested_at: u64| Some(rested_at.max(nanoseconds(now)) + rest);
        let _ = self.rested_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_micros(250);

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
    fn joins_get_an_eighth_of_the_time_after_a_few_at_once() {
        let begun = Duration::from_secs(1000);
        let pace = JoinPace::new(true);
        let at_once = steps_within(&pace, begun, Duration::from_millis(1));
        assert!((2..=4).contains(&at_once), "{at_once}");
        let second = steps_within(&pace, begun + Duration::from_millis(1), Duration::from_secs(1));
        assert!((470..=505).contains(&second), "{second}");
        // Rested for, it may be done at once again, and no more than at first.
        let again = steps_within(&pace, begun + Duration::from_secs(60), Duration::from_millis(1));
        assert!(again.abs_diff(at_once) <= 1, "{again}");
    }

    #[test]
    fn few_connections_need_no_rest_and_more_do() {
        let pace = JoinPace::new(true);
        (0..10).for_each(|_| pace.count(COUNTED, exact_time()));
        for (count, has_time) in [(0, true), (FEW, true), (FEW + 1, false)] {
            pace.note_under_way(count);
            assert_eq!(pace.has_time(), has_time, "{count}");
        }
        let unbounded = JoinPace::new(false);
        unbounded.count(COUNTED, exact_time());
        unbounded.note_under_way(FEW + 1);
        assert!(unbounded.has_time());
    }

    #[test]
    fn step_that_was_stopped_counts_as_a_millisecond() {
        let pace = JoinPace::new(true);
        let now = Duration::from_secs(1000);
        pace.count(Duration::from_secs(5), now);
        assert!(!pace.has_time_at(now) && pace.has_time_at(now + Duration::from_millis(4)));
    }
}
