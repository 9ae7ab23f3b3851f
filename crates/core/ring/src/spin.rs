// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decides how a thread waits: it spins before a sleep, offers its CPU, or sleeps at once. Learns from the cost of
//! each.
//!
//! Spinning for as long as a wake-up costs is at most twice the optimum, and pays only where the peer tends to answer
//! within that time. But it takes CPU time, and where other threads compute, the scheduler takes that time back. It
//! stops a spinning thread for a whole time slice. It makes a thread that has used up its share wait, but lets a thread
//! that slept run at once. So a thread that was stopped, or whose offered CPU was taken, then sleeps without spinning
//! for 32 times as long as it did not run. This period at least doubles each time that it soon happens again.

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

/// Initial budget, to which it also returns when short waits are seen again.
const BEGIN: Duration = Duration::from_micros(20);
/// Interval at which a thread that always spins checks whether the peer is still alive.
const SLICE: Duration = Duration::from_millis(5);
/// Smallest and largest number of checks of the peer's word between two reads of the clock.
const LOOKS: (u32, u32) = (1, 4096);
/// Initial number of these checks.
const FIRST_LOOKS: u32 = 32;
/// Factor by which the checks between two reads of the clock take longer than one read. A read is a system call where
/// the kernel does not trust the CPU's clock (Xen's PV domains).
const CLOCK_SHARE: u32 = 16;
/// Number of sleeps of which one is timed while the thread never spins.
const TIMED: u32 = 4;
/// Time after which a spin offers its CPU to other threads at each read of the clock. Where there are more threads than
/// CPUs, the peer that it waits for may be one of them.
const ALONE: Duration = Duration::from_micros(5);

/// Time without running from which a thread counts as stopped, or its offered CPU as taken by a thread that computes.
const STOPPED: Duration = Duration::from_micros(100);
/// Multiple of that time for which the thread then sleeps without spinning. The period is at least twice the last one,
/// up to `REPAID_MOST`.
const REPAID: u32 = 32;
const REPAID_MOST: Duration = Duration::from_secs(4);
/// Multiple of the last period after which it is forgotten.
const FORGOTTEN: u32 = 8;
/// Number of spins in a row, each followed by a shorter sleep, from which the peer must have been waiting for this CPU.
const IN_VAIN: u8 = 4;
/// Number of this process's threads for each CPU from which offers at the same time are a crowd. A thread that runs
/// again late in a crowd waited behind these threads, which wait for each other, and not behind one that computes.
const CROWD: usize = 4;

/// In a crowd: average time of the last offers from which a thread that computes has taken the CPU for its whole time
/// slice. Many threads that wait for each other run again sooner.
const TAKEN: Duration = Duration::from_micros(3500);
/// Number of offers in that average: at first, and after a pause. Each offer taken in this way costs a whole time
/// slice. But a thread that stops offering in a crowd makes the others wait longer for the CPU, until all have stopped.
const JUDGED_OF: (u32, u32) = (16, 4);
/// Longest time that an offer counts in the average: when a crowd begins, a few take very long, but beside a thread
/// that computes all take a time slice.
const COUNTED: Duration = TAKEN.saturating_mul(2);
/// Number of offers that are then skipped before the next few are made, at first and at most. It quadruples each time.
/// It is small at first, so that a crowd that had a bad beginning soon offers again.
const PASSES: (u32, u32) = (16, 65_536);

/// Machine operations that a wait needs.
trait Machine {
    fn now(&mut self) -> Instant;
    /// Pauses for one moment of a spin.
    fn pause(&mut self);
    /// Offers the CPU to other threads, and returns whether that was in a crowd.
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

/// Number of this process's threads that offer their CPU now.
static OFFERING: AtomicUsize = AtomicUsize::new(0);

/// Offers the CPU to other threads, and returns whether that was in a crowd.
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

/// Waiting policy of one waiter: of a half of a channel, or of a thread.
#[derive(Clone, Copy, Debug)]
pub struct Spin {
    budget: Duration,
    most: Duration,
    /// Time that one check takes.
    look: Duration,
    /// Time until which the waiter sleeps at once. `repays` is the length of that period.
    sleeps_until: Option<Instant>,
    repays: Duration,
    /// Whether the spin before the sleep was in vain. `in_vain` counts such spins in a row.
    spun: bool,
    in_vain: u8,
    /// Number of checks between two reads of the clock.
    looks: u32,
    /// Number of sleeps since the last one that was timed.
    untimed: u32,
    /// Average time of an offer of the CPU, the number of offers in it, the number of offers to skip before the next,
    /// and the number last skipped.
    offer: Duration,
    of: u32,
    passes: u32,
    passed: u32,
}

impl Spin {
    /// Longest spin unless a caller asks for another: about the cost of a wake-up between two idle virtual CPUs.
    pub const MOST: Duration = Duration::from_micros(50);

    /// Returns the longest spin between machines that may be emulated. There a wake-up takes several times as long
    /// (measured in docs/lab/vm-waking.md).
    #[must_use]
    pub fn most_between_machines() -> Duration {
        if leaves_machine() { Self::MOST * 4 } else { Self::MOST }
    }

    /// Determines in advance what the first wait would: a child forked while that is under way would wait for it for
    /// ever.
    pub fn prepare() {
        let _ = (clock(), cpus());
    }

    /// Resets the count in a child made by fork: the threads that were offering their CPU are its parent's.
    pub fn begin_anew() {
        OFFERING.store(0, Ordering::Relaxed);
    }

    /// Makes a waiter spin for ever and never sleep: for endpoints with a CPU to spare each. A dead peer is still
    /// noticed.
    pub const ALWAYS: Duration = Duration::MAX;

    /// Makes a policy that spins up to `most` before each sleep, and less where that does not pay. With zero it never
    /// spins, with [`ALWAYS`](Self::ALWAYS) it never sleeps.
    #[must_use]
    pub fn new(most: Duration) -> Self {
        let budget = if most == Self::ALWAYS { SLICE } else { BEGIN.min(most) };
        Self { budget, most, ..Self::DEFAULT }
    }

    /// Default policy.
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

    /// Returns whether the waiter never sleeps.
    #[must_use]
    pub fn always(&self) -> bool {
        self.most == Self::ALWAYS
    }

    pub(crate) fn worthwhile(&self) -> bool {
        !self.budget.is_zero() && !self.is_repaying(Instant::now)
    }

    /// Returns whether the waiter is to sleep at once. The clock is read only if it was stopped before.
    fn is_repaying(&self, now: impl FnOnce() -> Instant) -> bool {
        self.sleeps_until.is_some_and(|until| now() < until)
    }

    /// Notes that the waiter did not run for `took`, although it was ready to.
    fn stopped(&mut self, took: Duration, now: Instant) {
        let long_ago = |until: Instant| now.saturating_duration_since(until) > self.repays * FORGOTTEN;
        let again = if self.sleeps_until.is_none_or(long_ago) { Duration::ZERO } else { self.repays * 2 };
        self.repays = took.saturating_mul(REPAID).max(again).min(REPAID_MOST);
        self.sleeps_until = Some(now + self.repays);
    }

    /// Returns the time, if the policy is to learn from the sleep that begins.
    pub fn now(&mut self) -> Option<Instant> {
        if self.most.is_zero() || self.always() {
            return None;
        }
        self.untimed = if !self.budget.is_zero() { 0 } else { (self.untimed + 1) % TIMED };
        (self.untimed == 0).then(Instant::now)
    }

    /// Calls `look` until it succeeds, the budget is spent, or the thread was stopped. Returns at
    /// once where spinning does not pay now.
    ///
    /// # Errors
    /// The error of a call of `look`.
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
                    // A result that came while this thread was stopped is no success of the spin.
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

    /// Returns whether the checks took so long because the thread did not run all the time. Learns how long a check
    /// takes.
    fn was_stopped(&mut self, took: Duration) -> bool {
        let usual = self.look * self.looks;
        let each = took / self.looks;
        let stopped = took > STOPPED + usual * 8;
        self.look = if stopped { each.min(self.look * 2) } else { (self.look + each) / 2 };
        stopped
    }

    /// Adapts the number of checks to the time that the last ones took with one read of the clock, which takes `clock`.
    fn pace(&mut self, took: Duration, clock: Duration) {
        let enough = (clock * CLOCK_SHARE).min(self.budget / 2);
        if took < enough {
            self.looks = (self.looks * 2).min(LOOKS.1);
        } else if took / 4 > enough {
            self.looks = (self.looks / 2).max(LOOKS.0);
        }
    }

    /// Returns whether to offer the CPU now. It is not offered for a while after a thread that computes took it for a
    /// whole time slice, as a sleep and a wake-up would have cost a thousandth of that.
    pub(crate) fn offers(&mut self) -> bool {
        if self.is_repaying(Instant::now) && !self.always() {
            return false;
        }
        let due = self.passes == 0;
        self.passes = self.passes.saturating_sub(1);
        due
    }

    /// Offers the CPU once, unless that was a loss lately. Returns whether it did.
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

    /// Learns from an offer after which this thread ran again `took` later.
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

    /// Learns from a sleep: a longer spin would have avoided a short one, and a long one makes spinning a waste.
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
        // As long as 32 looks take with a cheap clock, and the same with an expensive one.
        let (took, cheap, dear) = (Duration::from_micros(1), Duration::from_nanos(25), Duration::from_micros(14));
        let mut spin = Spin::new(Spin::ALWAYS);
        (0..20).for_each(|_| spin.pace(took, cheap));
        assert_eq!(spin.looks, FIRST_LOOKS);
        (0..20).for_each(|_| spin.pace(took, dear));
        assert_eq!(spin.looks, LOOKS.1);
        // A waiter that spins for a short time checks in time whether that is over.
        let mut spin = Spin::default();
        (0..20).for_each(|_| spin.pace(BEGIN / 2, dear));
        assert_eq!(spin.looks, FIRST_LOOKS);
    }

    /// A machine on which time passes by actions. A thread that has run for a slice is stopped while another computes.
    struct Simulated {
        now: Instant,
        /// Duration of a moment of a spin.
        moment: Duration,
        /// Time that the thread runs until it is stopped, if another computes, and the time for which it is stopped
        /// then.
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

    /// Waits `turns` times for an answer that takes `answer`, sleeps included. Returns the times of all, sorted.
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
                    // A waiter gains on threads that compute.
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
