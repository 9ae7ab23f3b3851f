// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How one waits: spins before a sleep, offers its CPU, or sleeps at once. Learnt from what each has cost.
//!
//! Spinning as long as a wake-up costs is at most twice the optimum, and pays only where the peer tends to answer within that
//! time. It takes CPU time, though, and where others compute, the scheduler takes that back. It stops one who spins for a whole
//! time slice, and lets one wait who has used up his share, where it lets a waiter run at once. So who was stopped, or whose
//! offer was taken, sleeps at once for a time in which that was a small part: 32 times as long, and twice as long each time
//! that it soon happens again.

use std::{
    marker::PhantomData,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tombolo_mem::Mem;

use crate::{
    Deadline,
    pause::{clock, leaves_machine, pause},
};

/// Budget to begin with, and to come back to when short waits are seen again.
const BEGIN: Duration = Duration::from_micros(20);
/// One who always spins looks this often whether the peer still lives.
const SLICE: Duration = Duration::from_millis(5);
/// Looks at the peer's word between two looks at the clock, at least and at most.
const LOOKS: (u32, u32) = (1, 4096);
/// To begin with.
const FIRST_LOOKS: u32 = 32;
/// A look at the clock is a system call where the kernel does not trust the CPU's (Xen's PV domains): the looks between two
/// take so many times as long.
const CLOCK_SHARE: u32 = 16;
/// While it never spins, it looks how long one sleep in so many took.
const TIMED: u32 = 4;
/// A spin that has lasted this long offers its CPU to others each time it looks at the clock: where there are more
/// threads than CPUs, the peer that is waited for may be one of them.
const ALONE: Duration = Duration::from_micros(5);

/// One who did not run for so long was stopped, or somebody computes who took his offer.
const STOPPED: Duration = Duration::from_micros(100);
/// He sleeps at once for so many times as long as that took, or twice as long as the last time, up to the most.
const REPAID: u32 = 32;
const REPAID_MOST: Duration = Duration::from_secs(4);
/// The last time is forgotten after so many times as long.
const FORGOTTEN: u32 = 8;
/// Spins in a row after which the sleep was shorter than the spin: it was this CPU that the peer waited for.
const IN_VAIN: u8 = 4;
/// Threads of this process for each CPU that offer theirs at the same time: whoever takes so long to come back then was behind
/// those, who wait for each other, and not behind one who computes.
const CROWD: usize = 4;

/// In a crowd: where an offer of the CPU takes this long, averaged over the last of them, it goes to somebody who computes, and who uses his
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

/// What a wait needs of the machine.
trait Machine {
    fn now(&mut self) -> Instant;
    /// One moment of a spin.
    fn pause(&mut self);
    /// Lets others have the CPU; says whether that was in a crowd.
    fn offer(&mut self) -> bool;
}

struct Native<M>(PhantomData<M>);

impl<M: Mem> Machine for Native<M> {
    #[inline]
    fn now(&mut self) -> Instant {
        Instant::now()
    }

    #[inline]
    fn pause(&mut self) {
        pause::<M>();
    }

    fn offer(&mut self) -> bool {
        offer_cpu()
    }
}

/// Threads of this process that offer their CPU now.
static OFFERING: AtomicUsize = AtomicUsize::new(0);

/// Lets others have the CPU; says whether that was in a crowd.
fn offer_cpu() -> bool {
    let before = OFFERING.fetch_add(1, Ordering::Relaxed);
    thread::yield_now();
    let after = OFFERING.fetch_sub(1, Ordering::Relaxed) - 1;
    before.max(after) >= CROWD * cpus()
}

fn cpus() -> usize {
    static CPUS: OnceLock<usize> = OnceLock::new();
    *CPUS.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

/// The waiting policy of one who waits: of a half of a channel, or of a thread.
#[derive(Clone, Copy, Debug)]
pub struct Spin {
    budget: Duration,
    most: Duration,
    /// How long a look takes.
    look: Duration,
    /// It sleeps at once until then, and for how long it was to do so.
    sleeps_until: Option<Instant>,
    repays: Duration,
    /// The spin before the sleep was in vain, and so were so many in a row.
    spun: bool,
    in_vain: u8,
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
    /// (measured in docs/lab/vm-waking.md).
    #[must_use]
    pub fn most_between_machines() -> Duration {
        if leaves_machine() { Self::MOST * 4 } else { Self::MOST }
    }

    /// Finds out now what the first wait would: a child made by fork in the middle of that would wait for it for ever.
    pub fn prepare() {
        let _ = (clock(), cpus());
    }

    /// In a child made by fork: the threads that offered their CPU meanwhile are its parent's.
    pub fn begin_anew() {
        OFFERING.store(0, Ordering::Relaxed);
    }

    /// Spins for ever, never sleeps: for ends with a CPU to spare each. A dead peer is still noticed.
    pub const ALWAYS: Duration = Duration::MAX;

    /// Spins up to `most` before each sleep, less where that does not pay; zero never spins, [`ALWAYS`](Self::ALWAYS) never
    /// sleeps.
    #[must_use]
    pub fn new(most: Duration) -> Self {
        let budget = if most == Self::ALWAYS { SLICE } else { BEGIN.min(most) };
        Self { budget, most, ..Self::DEFAULT }
    }

    /// As by default.
    pub const DEFAULT: Self = Self {
        budget: BEGIN,
        most: Self::MOST,
        look: Duration::from_nanos(100),
        sleeps_until: None,
        repays: Duration::ZERO,
        spun: false,
        in_vain: 0,
        looks: FIRST_LOOKS,
        untimed: 0,
        offer: Duration::ZERO,
        of: 0,
        passes: 0,
        passed: 0,
    };

    /// Whether it never sleeps.
    #[must_use]
    pub fn always(&self) -> bool {
        self.most == Self::ALWAYS
    }

    pub(crate) fn worthwhile(&self) -> bool {
        !self.budget.is_zero() && !self.is_repaying(Instant::now)
    }

    /// Whether it is to sleep at once. The clock is looked at only by one who was stopped before.
    fn is_repaying(&self, now: impl FnOnce() -> Instant) -> bool {
        self.sleeps_until.is_some_and(|until| now() < until)
    }

    /// It did not run for so long, although it wanted to.
    fn stopped(&mut self, took: Duration, now: Instant) {
        let long_ago = |until: Instant| now.saturating_duration_since(until) > self.repays * FORGOTTEN;
        let again = if self.sleeps_until.is_none_or(long_ago) { Duration::ZERO } else { self.repays * 2 };
        self.repays = took.saturating_mul(REPAID).max(again).min(REPAID_MOST);
        self.sleeps_until = Some(now + self.repays);
    }

    /// The time, if the sleep that begins is one to learn from.
    pub fn now(&mut self) -> Option<Instant> {
        if self.most.is_zero() || self.always() {
            return None;
        }
        self.untimed = if !self.budget.is_zero() { 0 } else { (self.untimed + 1) % TIMED };
        (self.untimed == 0).then(Instant::now)
    }

    /// Looks until it finds, the budget is spent, the deadline passes, or it was stopped meanwhile. Not at all where spinning
    /// does not pay now.
    ///
    /// # Errors
    /// What a look says.
    #[inline]
    pub fn spin_for<M: Mem, E>(&mut self, look: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
        if self.worthwhile() { self.run::<M, E, _>(Deadline::NEVER, look) } else { Ok(false) }
    }

    #[inline]
    pub(crate) fn run<M: Mem, E, F: FnMut() -> Result<bool, E>>(
        &mut self,
        deadline: Deadline,
        look: F,
    ) -> Result<bool, E> {
        self.run_on(&mut Native::<M>(PhantomData), deadline, look)
    }

    #[inline]
    fn run_on<E>(
        &mut self,
        machine: &mut impl Machine,
        deadline: Deadline,
        mut look: impl FnMut() -> Result<bool, E>,
    ) -> Result<bool, E> {
        let mut since = None;
        let mut last: Option<Instant> = None;
        self.spun = false;
        loop {
            for _ in 0..self.looks {
                machine.pause();
                if look()? {
                    // What came while it was stopped is no success.
                    if let Some(last) = last {
                        let now = machine.now();
                        if now - last > STOPPED + self.look * self.looks * 8 && !self.always() {
                            self.stopped(now - last, now);
                        }
                    }
                    return Ok(true);
                }
            }
            let now = machine.now();
            if let Some(last) = last.replace(now) {
                let took = now - last;
                if self.was_stopped(took) && !self.always() {
                    self.stopped(took, now);
                    return look();
                }
                self.pace(took, clock());
            }
            let spun = now - *since.get_or_insert(now);
            if spun >= self.budget || deadline.expired() {
                self.spun = true;
                return Ok(false);
            }
            if spun >= ALONE && self.offers() {
                let crowd = machine.offer();
                let back = machine.now();
                self.offered(back - now, back, crowd);
                last = Some(back);
                if self.is_repaying(|| back) && !self.always() {
                    return look();
                }
            }
        }
    }

    /// Whether so many looks took so long because it did not run all the time. Learns how long they take.
    fn was_stopped(&mut self, took: Duration) -> bool {
        let usual = self.look * self.looks;
        let each = took / self.looks;
        let stopped = took > STOPPED + usual * 8;
        self.look = if stopped { each.min(self.look * 2) } else { (self.look + each) / 2 };
        stopped
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
        if self.is_repaying(Instant::now) && !self.always() {
            return false;
        }
        let due = self.passes == 0;
        self.passes = self.passes.saturating_sub(1);
        due
    }

    /// Offers the CPU once, if that was no loss lately; says whether it did.
    pub(crate) fn offer(&mut self) -> bool {
        let offers = self.offers();
        if offers {
            let since = Instant::now();
            let crowd = offer_cpu();
            let back = Instant::now();
            self.offered(back - since, back, crowd);
        }
        offers
    }

    /// After an offer: how long it took until this thread ran again.
    fn offered(&mut self, took: Duration, now: Instant, crowd: bool) {
        if took > STOPPED && !crowd {
            self.stopped(took, now);
            return;
        }
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
    pub fn learn(&mut self, asleep_since: Option<Instant>) {
        let Some(since) = asleep_since else { return };
        if self.always() {
            return;
        }
        let now = Instant::now();
        let slept = now.saturating_duration_since(since);
        self.in_vain = if self.spun && slept < self.budget { self.in_vain + 1 } else { 0 };
        self.spun = false;
        if self.in_vain >= IN_VAIN {
            self.in_vain = 0;
            self.stopped(self.budget, now);
        }
        // The sleep itself costs about as much as the longest spin.
        if slept <= self.most.saturating_mul(2) {
            self.budget = (self.budget * 2).clamp(BEGIN.min(self.most), self.most);
        } else {
            self.budget /= 2;
            if self.budget < Duration::from_micros(2) {
                self.budget = Duration::ZERO;
            }
        }
    }
}

impl Default for Spin {
    fn default() -> Self {
        Self::DEFAULT
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
                    spin.offered(took, Instant::now(), true);
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
            spin.offered(if turn < 4 { TAKEN * 100 } else { TAKEN / 8 }, Instant::now(), true);
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
        assert_eq!(spin.looks, FIRST_LOOKS);
        (0..20).for_each(|_| spin.pace(took, dear));
        assert_eq!(spin.looks, LOOKS.1);
        // Who spins for a little while looks in time whether that is over.
        let mut spin = Spin::default();
        (0..20).for_each(|_| spin.pace(BEGIN / 2, dear));
        assert_eq!(spin.looks, FIRST_LOOKS);
    }

    /// A machine on which time passes by what is done. Who has run for a slice is stopped while another computes.
    struct Simulated {
        now: Instant,
        /// What a moment of a spin takes.
        moment: Duration,
        /// How much longer it runs until it is stopped, if somebody computes, and for how long it is then.
        share: Duration,
        slice: Option<Duration>,
        spun: Duration,
    }

    impl Simulated {
        fn new(slice: Option<Duration>) -> Self {
            let moment = Duration::from_nanos(50);
            Self { now: Instant::now(), moment, share: slice.unwrap_or_default(), slice, spun: Duration::ZERO }
        }

        fn stop(&mut self) {
            if let Some(slice) = self.slice {
                self.now += slice;
                self.share = slice;
            }
        }

        fn run(&mut self, time: Duration) {
            self.now += time;
            self.share = self.share.saturating_sub(time);
            if self.share.is_zero() {
                self.stop();
            }
        }
    }

    impl Machine for Simulated {
        fn now(&mut self) -> Instant {
            self.now
        }

        fn pause(&mut self) {
            self.spun += self.moment;
            self.run(self.moment);
        }

        fn offer(&mut self) -> bool {
            self.run(Duration::from_nanos(400));
            self.stop();
            false
        }
    }

    /// Waits `turns` times for an answer that takes `answer`, sleeps included; gives how long all took, by length.
    fn turns(machine: &mut Simulated, spin: &mut Spin, turns: usize, answer: Duration) -> Vec<Duration> {
        let wake = Duration::from_micros(20);
        let mut all: Vec<_> = (0..turns)
            .map(|_| {
                let begun = machine.now;
                let there = begun + answer;
                let mut found = false;
                if !spin.budget.is_zero() && !spin.is_repaying(|| machine.now) {
                    // The machine is both looked at and run: each look is one moment.
                    let mut seen = machine.now;
                    found = spin_on(machine, spin, &mut seen, there);
                }
                if !found {
                    let since = machine.now;
                    machine.now = machine.now.max(there) + wake;
                    // A waiter gains on those who compute.
                    machine.share = machine.slice.unwrap_or_default().min(machine.share + (machine.now - since) / 2);
                    let slept = machine.now - since;
                    spin.in_vain = 0;
                    spin.budget = if slept <= spin.most * 2 {
                        (spin.budget * 2).clamp(BEGIN, spin.most)
                    } else {
                        spin.budget / 2
                    };
                }
                machine.run(Duration::from_micros(2));
                machine.now - begun
            })
            .collect();
        all.sort();
        all
    }

    fn spin_on(machine: &mut Simulated, spin: &mut Spin, seen: &mut Instant, there: Instant) -> bool {
        struct Watched<'a>(&'a mut Simulated, &'a std::cell::Cell<Instant>);
        impl Machine for Watched<'_> {
            fn now(&mut self) -> Instant {
                self.0.now()
            }
            fn pause(&mut self) {
                self.0.pause();
                self.1.set(self.0.now);
            }
            fn offer(&mut self) -> bool {
                let crowd = self.0.offer();
                self.1.set(self.0.now);
                crowd
            }
        }
        let now = std::cell::Cell::new(*seen);
        let found = spin.run_on(&mut Watched(machine, &now), Deadline::NEVER, || Ok::<_, ()>(now.get() >= there));
        *seen = now.get();
        found.unwrap_or(false)
    }

    #[test]
    fn beside_one_who_computes_it_takes_no_longer_than_a_sleeper() {
        for slice in [1500, 3000, 10_000].map(Duration::from_micros) {
            for answer in [1, 15, 40, 200].map(Duration::from_micros) {
                let policy = turns(&mut Simulated::new(Some(slice)), &mut Spin::default(), 100_000, answer);
                let asleep = turns(&mut Simulated::new(Some(slice)), &mut Spin::new(Duration::ZERO), 100_000, answer);
                let sum = |all: &[Duration]| all.iter().sum::<Duration>();
                let slow = |all: &[Duration]| all[all.len() * 99 / 100];
                let case = format!("a slice of {slice:?}, an answer after {answer:?}");
                assert!(sum(&policy) <= sum(&asleep) * 21 / 20, "{case}: {:?}, {:?}", sum(&policy), sum(&asleep));
                assert!(slow(&policy) <= slow(&asleep) * 21 / 20, "{case}: {:?}, {:?}", slow(&policy), slow(&asleep));
            }
        }
    }

    #[test]
    fn alone_it_spins_and_finds_at_once() {
        let all = turns(&mut Simulated::new(None), &mut Spin::default(), 10_000, Duration::from_micros(10));
        assert!(all[all.len() * 99 / 100] <= Duration::from_micros(14), "{:?}", all[all.len() * 99 / 100]);
    }

    #[test]
    fn it_spins_again_once_nobody_computes_any_more() {
        let (mut machine, mut spin) = (Simulated::new(Some(Duration::from_millis(3))), Spin::default());
        turns(&mut machine, &mut spin, 100_000, Duration::from_micros(10));
        machine.slice = None;
        machine.now += REPAID_MOST;
        let all = turns(&mut machine, &mut spin, 1000, Duration::from_micros(10));
        assert!(all[900] <= Duration::from_micros(14), "{:?}", all[900]);
    }

    #[test]
    fn spins_that_the_peer_could_not_answer_end_soon() {
        let mut spin = Spin::default();
        for turn in 0..IN_VAIN {
            assert!(spin.worthwhile(), "after {turn}");
            spin.spun = true;
            spin.learn(Some(Instant::now()));
        }
        assert!(!spin.worthwhile());
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
