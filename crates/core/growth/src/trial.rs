// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds out whether a ring beyond the size that programs count on is worth its memory: a busy stream tries it, and
//! keeps it if the stream is no slower there (ADR 0092).

use std::time::Duration;

/// Shortest time over which a rate is measured.
const SAMPLE: Duration = Duration::from_millis(20);
/// Smallest number of bytes over which a rate is measured. A writer that moves less in that time is not busy.
const MUCH: u64 = 8 << 20;
/// Fraction of the earlier rate at which the larger ring is kept. The share of the caches that is free changes within
/// seconds, and while it is small no ring is faster than another.
const WORTH: (u64, u64) = (31, 32);
/// First and longest pause after a trial in vain. Each further such trial doubles the pause.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(64));

/// State of the knowledge about the larger ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Known {
    /// Nothing is known yet.
    Nothing,
    /// First rate in the present ring. The better of two samples counts.
    Before { rate: u64 },
    /// The larger ring is being tried against this rate.
    Tried { rate: u64 },
    /// The larger ring is kept.
    Kept,
}

/// Conclusion from a sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Try the larger ring.
    Try,
    /// Go back, because the larger ring is slower.
    GoBack,
}

/// Trial of one larger ring.
#[derive(Clone, Debug)]
pub(crate) struct Trial {
    known: Known,
    /// Time when the sample began, if one is under way.
    since: Option<Duration>,
    /// Byte at which the sample began, or which the writer had reached at the last check.
    from: u64,
    /// Time before which there is no trial. `pause` is the length of the last pause.
    next: Duration,
    pause: Duration,
}

impl Trial {
    pub fn new() -> Self {
        Self { known: Known::Nothing, since: None, from: 0, next: Duration::ZERO, pause: PAUSE.0 / 2 }
    }

    /// Returns whether the writer, at byte `moved`, has moved enough since the last check.
    #[inline]
    pub fn is_due(&self, moved: u64) -> bool {
        self.known != Known::Kept && moved.wrapping_sub(self.from) >= MUCH
    }

    /// Returns whether to weigh the ring, with the accuracy of some ticks of the clock.
    pub fn may_weigh(&mut self, moved: u64, about_now: Duration) -> bool {
        let is_early = self.known == Known::Nothing && about_now < self.next;
        if is_early {
            self.from = moved;
        }
        self.is_due(moved)
    }

    /// Weighs the ring of a busy stream whose writer is at byte `moved`. Returns a verdict if there is one.
    pub fn weigh(&mut self, moved: u64, now: Duration) -> Option<Verdict> {
        let rate = self.sample(moved, now)?;
        match self.known {
            Known::Nothing => self.known = Known::Before { rate },
            Known::Before { rate: first } => {
                self.known = Known::Tried { rate: rate.max(first) };
                return Some(Verdict::Try);
            }
            Known::Tried { rate: before } if rate.saturating_mul(WORTH.1) >= before.saturating_mul(WORTH.0) => {
                (self.known, self.pause) = (Known::Kept, PAUSE.0 / 2);
            }
            Known::Tried { .. } => {
                self.put_off(now);
                return Some(Verdict::GoBack);
            }
            Known::Kept => {}
        }
        None
    }

    /// Returns the rate in bytes per millisecond once enough time has passed, or `None` if the writer moved little
    /// meanwhile.
    fn sample(&mut self, moved: u64, now: Duration) -> Option<u64> {
        let Some(since) = self.since else {
            (self.since, self.from) = (Some(now), moved);
            return None;
        };
        let (time, bytes) = (now.saturating_sub(since), moved.wrapping_sub(self.from));
        if time < SAMPLE {
            return None;
        }
        (self.since, self.from) = (Some(now), moved);
        let rate = u128::from(bytes) * 1_000_000 / time.as_nanos();
        (rate >= u128::from(MUCH) / SAMPLE.as_millis()).then_some(rate as u64)
    }

    /// Notes that the writer moved to another ring at byte `moved`: the one being tried, or else one of which nothing
    /// is known. The next sample begins at a later call, so it excludes the first rounds, whose pages are new.
    pub fn enter(&mut self, moved: u64, is_tried: bool) {
        (self.since, self.from) = (None, moved);
        if !is_tried {
            self.known = Known::Nothing;
        }
    }

    /// Puts the next trial off, because no ring is available now or the larger one was slower.
    pub fn put_off(&mut self, now: Duration) {
        self.pause = (2 * self.pause).min(PAUSE.1);
        (self.known, self.since, self.next) = (Known::Nothing, None, now + self.pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const MIB: u64 = 1 << 20;

    /// A stream of so many bytes a millisecond, which is looked at every millisecond, and the result of each look.
    struct Busy {
        trial: Trial,
        moved: u64,
        now: Duration,
    }

    impl Busy {
        fn new() -> Self {
            Self { trial: Trial::new(), moved: 0, now: Duration::from_secs(9) }
        }

        fn next(&mut self, rate: u64, most: u32) -> Option<(u32, Verdict)> {
            (1..=most).find_map(|at| {
                (self.moved, self.now) = (self.moved + rate, self.now + MS);
                let weighs = self.trial.may_weigh(self.moved, self.now);
                let verdict = weighs.then(|| self.trial.weigh(self.moved, self.now)).flatten();
                verdict.map(|verdict| (at, verdict))
            })
        }

        fn enter(&mut self, is_tried: bool) {
            self.trial.enter(self.moved, is_tried);
        }
    }

    #[test]
    fn ring_that_is_no_slower_is_kept_and_one_that_is_slower_is_left() {
        for (faster, is_kept) in [(2.0, true), (1.0, true), (0.98, true), (0.95, false), (0.5, false)] {
            let mut busy = Busy::new();
            let (at, verdict) = busy.next(10 * MIB, 100).unwrap();
            assert!(verdict == Verdict::Try && (40..50).contains(&at), "after {at} ms");
            busy.enter(true);
            let then = busy.next((10.0 * MIB as f64 * faster) as u64, 2000);
            assert_eq!(then.is_none(), is_kept, "{faster}");
            if let Some((at, verdict)) = then {
                assert!(verdict == Verdict::GoBack && (20..30).contains(&at), "after {at} ms");
            }
        }
    }

    #[test]
    fn trial_in_vain_is_made_again_after_twice_the_time() {
        let mut busy = Busy::new();
        for pause in [1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 64_000] {
            assert_eq!(busy.next(10 * MIB, 100).map(|(_, verdict)| verdict), Some(Verdict::Try));
            busy.enter(true);
            assert_eq!(busy.next(8 * MIB, 100).map(|(_, verdict)| verdict), Some(Verdict::GoBack));
            busy.enter(false);
            assert_eq!(busy.next(10 * MIB, pause), None, "{pause}");
        }
    }

    #[test]
    fn stream_that_is_not_busy_tries_nothing() {
        let mut busy = Busy::new();
        assert_eq!(busy.next(MUCH / 21, 10_000), None);
        // Much at once, and then nothing for a long time.
        for _ in 0..100 {
            assert_eq!(busy.next(10 * MIB, 15), None);
            busy.now += Duration::from_secs(1);
        }
    }
}
