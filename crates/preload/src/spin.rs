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

/// Looks until `found`, or until the budget is spent.
pub(crate) fn until(mut found: impl FnMut() -> bool) -> bool {
    let budget = BUDGET.load(Ordering::Relaxed);
    if budget == 0 || *CPUS == 1 {
        return false;
    }
    let since = Instant::now();
    loop {
        for _ in 0..LOOKS {
            hint::spin_loop();
            if found() {
                return true;
            }
        }
        let spun = since.elapsed();
        if spun >= Duration::from_micros(budget.into()) {
            return false;
        }
        if spun >= ALONE {
            thread::yield_now();
        }
    }
}

/// A sleep begins.
pub(crate) fn asleep() -> Instant {
    Instant::now()
}

/// A sleep ended: a short one would have been caught by a longer spin, a long one makes spinning a waste.
pub(crate) fn learn(since: Instant) {
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
