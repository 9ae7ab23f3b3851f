// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How long to spin before a sleep, learnt from the sleeps: spinning as long as a wake-up costs is at most twice the
//! optimum, and pays only where the peer tends to answer within that time.

use std::{
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use tombolo_mem::Mem;

use crate::{
    Deadline, Error,
    pause::{leaves_machine, pause},
};

/// Budget to begin with, and to come back to when short waits are seen again.
const BEGIN: Duration = Duration::from_micros(20);
/// One who always spins looks this often whether the peer still lives.
const SLICE: Duration = Duration::from_millis(5);
/// Looks at the peer's word between two looks at the clock, at least and at most.
const LOOKS: (u32, u32) = (32, 4096);
/// A look at the clock is a system call where the kernel does not trust the CPU's (Xen's PV domains): the looks between two
/// take so many times as long.
const CLOCK_SHARE: u32 = 16;
/// While it never spins, it looks how long one sleep in so many took.
const TIMED: u32 = 4;
/// A spin that has lasted this long offers its CPU to others each time it looks at the clock: where there are more
/// threads than CPUs, the peer that is waited for may be one of them.
const ALONE: Duration = Duration::from_micros(5);

/// Where an offer of the CPU takes this long, averaged over the last of them, it goes to somebody who computes, and who uses his
/// whole time slice. Many who wait for each other are back sooner.
const TAKEN: Duration = Duration::from_micros(3500);
/// Offers of which it is judged: at first, and of those after a pause. Each that is taken so costs a whole time slice, but one
/// who gives up offering in a crowd has the others wait longer for theirs, until all have given up.
const JUDGED_OF: (u32, u32) = (16, 4);
/// No offer counts for longer: in a crowd that begins a few take very long, beside one who computes all take a time slice.
const COUNTED: Duration = TAKEN.saturating_mul(2);
/// Offers not made from then on before the next few, four times as many each time, and the most. At first few, so that a crowd
/// that had a bad beginning comes back at once.
const PASSES: (u32, u32) = (16, 65_536);

/// The spin policy of one half of a channel.
#[derive(Debug)]
pub struct Spin {
    budget: Duration,
    most: Duration,
    /// Looks between two looks at the clock.
    looks: u32,
    /// Sleeps that were not timed since the last that was.
    untimed: u32,
    /// How long an offer of the CPU takes, of how many that is the average, how many to pass over before the next, and
    /// how many that were at last.
    offer: Duration,
    of: u32,
    passes: u32,
    passed: u32,
}

impl Spin {
    /// The longest that is ever spun unless a caller says otherwise: about what a wake-up between two idle virtual
    /// CPUs costs.
    pub const MOST: Duration = Duration::from_micros(50);

    /// The same between machines that may be emulated: there a wake-up takes several times as long
    /// (measured in docs/performance.md).
    #[must_use]
    pub fn most_between_machines() -> Duration {
        if leaves_machine() { Self::MOST * 4 } else { Self::MOST }
    }

    /// Spins for ever, never sleeps: for ends with a CPU to spare each. A dead peer is still noticed.
    pub const ALWAYS: Duration = Duration::MAX;

    /// Spins up to `most` before each sleep, less where that does not pay; zero never spins, [`ALWAYS`](Self::ALWAYS) never
    /// sleeps.
    #[must_use]
    pub fn new(most: Duration) -> Self {
        let budget = if most == Self::ALWAYS { SLICE } else { BEGIN.min(most) };
        Self { budget, most, looks: LOOKS.0, untimed: 0, offer: Duration::ZERO, of: 0, passes: 0, passed: 0 }
    }

    pub(crate) fn always(&self) -> bool {
        self.most == Self::ALWAYS
    }

    pub(crate) fn worthwhile(&self) -> bool {
        !self.budget.is_zero()
    }

    /// The time, if the sleep that begins is one to learn from.
    pub(crate) fn now(&mut self) -> Option<Instant> {
        if self.most.is_zero() || self.always() {
            return None;
        }
        self.untimed = if self.worthwhile() { 0 } else { (self.untimed + 1) % TIMED };
        (self.untimed == 0).then(Instant::now)
    }

    /// Looks until it finds, the budget is spent or the deadline passes.
    #[inline]
    pub(crate) fn run<M: Mem, F: FnMut() -> Result<bool, Error>>(
        &mut self,
        deadline: Deadline,
        mut look: F,
    ) -> Result<bool, Error> {
        let mut since = None;
        let mut last = None;
        loop {
            for _ in 0..self.looks {
                pause::<M>();
                if look()? {
                    return Ok(true);
                }
            }
            let now = Instant::now();
            if let Some(last) = last.replace(now) {
                self.pace(now - last, clock());
            }
            let spun = now - *since.get_or_insert(now);
            if spun >= self.budget || deadline.expired() {
                return Ok(false);
            }
            if spun >= ALONE && self.offers() {
                thread::yield_now();
                let back = Instant::now();
                self.offered(back - now);
                last = Some(back);
            }
        }
    }

    /// After looks that took so long, with one at the clock, which takes `clock`.
    fn pace(&mut self, took: Duration, clock: Duration) {
        let enough = (clock * CLOCK_SHARE).min(self.budget / 2);
        if took < enough {
            self.looks = (self.looks * 2).min(LOOKS.1);
        } else if took / 4 > enough {
            self.looks = (self.looks / 2).max(LOOKS.0);
        }
    }

    /// Whether to offer the CPU to others now: not for a while after one who computes took it for a whole time slice,
    /// where a sleep and a wake-up would have cost a thousandth of that.
    pub(crate) fn offers(&mut self) -> bool {
        let due = self.passes == 0;
        self.passes = self.passes.saturating_sub(1);
        due
    }

    /// After an offer: how long it took until this thread ran again.
    pub(crate) fn offered(&mut self, took: Duration) {
        let judged_of = if self.passed == 0 { JUDGED_OF.0 } else { JUDGED_OF.1 };
        self.of = (self.of + 1).min(judged_of);
        self.offer = (self.offer * (self.of - 1) + took.min(COUNTED)) / self.of;
        if self.of < judged_of {
            return;
        }
        if self.offer >= TAKEN {
            self.passed = (self.passed * 4).clamp(PASSES.0, PASSES.1);
            self.passes = self.passed;
            self.of = 0;
        } else if self.offer < TAKEN / 2 {
            self.passed = 0;
        }
    }

    /// After a sleep: one that was short would have been caught by a longer spin, a long one makes spinning a waste.
    pub(crate) fn learn(&mut self, asleep_since: Option<Instant>) {
        let Some(since) = asleep_since else { return };
        if self.always() {
            return;
        }
        // The sleep itself costs about as much as the longest spin.
        if since.elapsed() <= self.most.saturating_mul(2) {
            self.budget = (self.budget * 2).clamp(BEGIN.min(self.most), self.most);
        } else {
            self.budget /= 2;
            if self.budget < Duration::from_micros(2) {
                self.budget = Duration::ZERO;
            }
        }
    }
}

/// How long a look at the clock takes.
pub(crate) fn clock() -> Duration {
    static TOOK: OnceLock<Duration> = OnceLock::new();
    *TOOK.get_or_init(|| {
        let look = || Instant::now().elapsed();
        (0..8).map(|_| look()).min().unwrap_or_default()
    })
}

impl Default for Spin {
    fn default() -> Self {
        Self::new(Self::MOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_shrinks_to_nothing_on_long_sleeps_and_comes_back_on_a_short_one() {
        let mut spin = Spin::default();
        let long_ago = Instant::now().checked_sub(Duration::from_millis(4));
        for _ in 0..8 {
            spin.learn(long_ago);
        }
        assert!(!spin.worthwhile());
        spin.learn(Some(Instant::now()));
        assert_eq!(spin.budget, BEGIN);
    }

    #[test]
    fn longest_spin_of_many_years_is_one_to_learn_with() {
        let mut spin = Spin::new(Duration::MAX - Duration::from_nanos(1));
        spin.learn(Some(Instant::now()));
        assert!(spin.worthwhile());
    }

    #[test]
    fn offer_that_was_taken_for_long_is_seldom_made_again_and_often_once_it_is_not() {
        let mut spin = Spin::default();
        let mut made = |calls: u32, took| {
            let offers = (0..calls).filter(|_| {
                let offers = spin.offers();
                if offers {
                    spin.offered(took);
                }
                offers
            });
            offers.count()
        };
        assert_eq!(made(20_000, Duration::from_micros(300)), 20_000);
        let offers = made(20_000, TAKEN * 3);
        assert!((25..40).contains(&offers), "{offers} made, four after each 16, 64, 256, 1024 and 4096 passed over");
        let offers = made(100_000, Duration::ZERO);
        assert!((50_000..100_000).contains(&offers), "{offers} made, after some that showed that nobody takes them");
    }

    #[test]
    fn offers_that_took_very_long_when_all_began_do_not_end_them() {
        let mut spin = Spin::default();
        for turn in 0..100 {
            assert!(spin.offers(), "given up at turn {turn}");
            spin.offered(if turn < 4 { TAKEN * 100 } else { TAKEN / 8 });
        }
    }

    #[test]
    fn spin_that_may_not_spin_never_does() {
        let mut spin = Spin::new(Duration::ZERO);
        spin.learn(Some(Instant::now()));
        assert!(!spin.worthwhile());
        assert_eq!(spin.now(), None);
    }

    #[test]
    fn looks_at_the_clock_are_as_rare_as_they_are_dear() {
        // As long as 32 looks take with a clock that is cheap, and the same with one that is not.
        let (took, cheap, dear) = (Duration::from_micros(1), Duration::from_nanos(25), Duration::from_micros(14));
        let mut spin = Spin::new(Spin::ALWAYS);
        (0..20).for_each(|_| spin.pace(took, cheap));
        assert_eq!(spin.looks, LOOKS.0);
        (0..20).for_each(|_| spin.pace(took, dear));
        assert_eq!(spin.looks, LOOKS.1);
        // Who spins for a little while looks in time whether that is over.
        let mut spin = Spin::default();
        (0..20).for_each(|_| spin.pace(BEGIN / 2, dear));
        assert_eq!(spin.looks, LOOKS.0);
    }

    #[test]
    fn sleeps_are_timed_now_and_then_where_it_never_spins() {
        let mut spin = Spin::default();
        let timed = |spin: &mut Spin| (0..8).filter(|_| spin.now().is_some()).count();
        assert_eq!(timed(&mut spin), 8);
        spin.budget = Duration::ZERO;
        assert_eq!(timed(&mut spin), 2);
    }
}
