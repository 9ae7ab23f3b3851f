// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether to look at shared memory for a moment before sleeping: while short sleeps show that it would have paid, and
//! never where there is one CPU. After a few microseconds each look offers the CPU, for the peer may need this one.

use std::{
    hint,
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// The longest, in microseconds: about what a wake-up costs.
const MOST: u32 = 50;
/// To begin with.
const BEGIN: u32 = 20;
/// From here on the CPU is offered at each look at the clock.
const ALONE: Duration = Duration::from_micros(5);
const LOOKS: u32 = 32;

static BUDGET: AtomicU32 = AtomicU32::new(BEGIN);
static CPUS: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, usize::from));

/// Finds out now what the first wait would: a child made by fork finds it whole.
pub(crate) fn prepare() {
    LazyLock::force(&CPUS);
}

/// Looks until `found`, or until the budget is spent.
pub fn until(found: impl FnMut() -> bool) -> bool {
    let budget = BUDGET.load(Ordering::Relaxed);
    if budget == 0 || *CPUS == 1 {
        return false;
    }
    look(Duration::from_micros(budget.into()), found, thread::yield_now)
}

fn look(budget: Duration, mut found: impl FnMut() -> bool, offer: impl Fn()) -> bool {
    let since = Instant::now();
    loop {
        for _ in 0..LOOKS {
            hint::spin_loop();
            if found() {
                return true;
            }
        }
        let spun = since.elapsed();
        if spun >= budget {
            return false;
        }
        if spun >= ALONE {
            offer();
        }
    }
}

/// A sleep begins.
#[must_use]
pub fn asleep() -> Instant {
    Instant::now()
}

/// A sleep ended: a short one would have been caught by a longer spin, a long one makes spinning a waste.
pub fn learn(since: Instant) {
    let budget = BUDGET.load(Ordering::Relaxed);
    let next = if since.elapsed() <= Duration::from_micros((2 * MOST).into()) {
        (budget * 2).clamp(BEGIN, MOST)
    } else if budget < 4 {
        0
    } else {
        budget / 2
    };
    BUDGET.store(next, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use rustix::{
        thread::{CpuSet, sched_getaffinity, sched_setaffinity},
        time::{ClockId, clock_gettime},
    };

    use super::*;

    const TURNS: u32 = 300;

    /// Two threads that have one CPU spin for each other's word by turns. Gives the CPU time of a turn.
    fn ping_pong(offer: fn()) -> Duration {
        let word = AtomicU32::new(0);
        let turns = |own: u32| {
            let allowed = sched_getaffinity(None).unwrap();
            let mut one = CpuSet::new();
            one.set((0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap());
            sched_setaffinity(None, &one).unwrap();
            let begun = clock_gettime(ClockId::ThreadCPUTime);
            for turn in 0..TURNS {
                let wanted = 2 * turn + own;
                while !look(Duration::from_micros(MOST.into()), || word.load(Ordering::SeqCst) == wanted, offer) {
                    // Where the budget is spent a program sleeps, which takes the CPU away from nobody; here it goes on.
                }
                word.store(wanted + 1, Ordering::SeqCst);
            }
            let spent = clock_gettime(ClockId::ThreadCPUTime);
            let nanos = (spent.tv_sec - begun.tv_sec) * 1_000_000_000 + spent.tv_nsec - begun.tv_nsec;
            Duration::from_nanos(nanos as u64) / TURNS
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| turns(1));
            let mine = scope.spawn(|| turns(0)).join().unwrap();
            mine.max(other.join().unwrap())
        })
    }

    /// By CPU time, which others on the machine do not take from. A slice of the scheduler's is milliseconds.
    const GATE: Duration = Duration::from_micros(300);

    #[test]
    fn spinning_offers_the_cpu_to_who_is_waited_for() {
        let spent = ping_pong(thread::yield_now);
        assert!(spent < GATE, "{spent:?} of CPU time a turn");
    }

    #[test]
    fn canary_spinning_that_does_not_yield_is_caught() {
        let spent = ping_pong(|| {});
        assert!(spent >= GATE, "{spent:?} of CPU time a turn");
    }
}
