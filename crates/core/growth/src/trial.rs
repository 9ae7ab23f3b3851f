// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether a ring beyond the one that programs count on is worth its memory: a busy stream tries it, and keeps it where it is
//! no slower there (ADR 0092).

use std::time::Duration;

/// A rate is taken over so much time at least.
const SAMPLE: Duration = Duration::from_millis(20);
/// And over so many bytes: one who moves less in that time is not busy.
const MUCH: u64 = 8 << 20;
/// The larger ring is kept if it has this part of the rate: what there is for others in the caches changes within seconds, and
/// where that is little for a while no ring is faster than another.
const WORTH: (u64, u64) = (31, 32);
/// After a trial in vain the next comes so much later, and after each one more in twice the time.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(64));

/// What is known of the larger ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Known {
    /// Nothing yet.
    Nothing,
    /// The rate in the ring of before, as the better of two samples is to be.
    Before { rate: u64 },
    /// It is tried, against that rate.
    Tried { rate: u64 },
    /// It is kept.
    Kept,
}

/// What a sample leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// The larger ring is to be tried.
    Try,
    /// It is slower: back.
    GoBack,
}

/// The trial of one larger ring.
#[derive(Clone, Debug)]
pub(crate) struct Trial {
    known: Known,
    /// When the sample began, if it has.
    since: Option<Duration>,
    /// At which byte it did, or the writer was when it was last looked at.
    from: u64,
    /// No trial before, and how long the pause was.
    next: Duration,
    pause: Duration,
}

impl Trial {
    pub fn new() -> Self {
        Self { known: Known::Nothing, since: None, from: 0, next: Duration::ZERO, pause: PAUSE.0 / 2 }
    }

    /// Whether the writer, at byte `moved`, has moved enough since the last look.
    #[inline]
    pub fn is_due(&self, moved: u64) -> bool {
        self.known != Known::Kept && moved.wrapping_sub(self.from) >= MUCH
    }

    /// Whether it is to be weighed, some ticks of the clock sooner or later.
    pub fn may_weigh(&mut self, moved: u64, about_now: Duration) -> bool {
        let is_early = self.known == Known::Nothing && about_now < self.next;
        if is_early {
            self.from = moved;
        }
        self.is_due(moved)
    }

    /// The writer is at byte `moved` of a busy stream.
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

    /// Bytes in a millisecond, once enough time has gone by; none of one who moved little in it.
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

    /// The writer is in another ring now, at byte `moved`: which was tried, or else one that nothing is known of. No sample has
    /// the first rounds in it, whose pages are new.
    pub fn enter(&mut self, moved: u64, is_tried: bool) {
        (self.since, self.from) = (None, moved);
        if !is_tried {
            self.known = Known::Nothing;
        }
    }

    /// There is none to be had now, or it was slower.
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

    /// A stream of so many bytes a millisecond, which is looked at every millisecond, and what is said of it when.
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
        // Much at once, and then nothing for long.
        for _ in 0..100 {
            assert_eq!(busy.next(10 * MIB, 15), None);
            busy.now += Duration::from_secs(1);
        }
    }
}
