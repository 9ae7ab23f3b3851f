// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One step of waiting in a loop. CPUs have an instruction for it, of some dozen nanoseconds; in an emulated machine it leaves
//! the machine each time, for a microsecond and with its locks held: then something else that takes a moment stands for it.

use std::{
    hint::{black_box, spin_loop},
    sync::OnceLock,
    time::{Duration, Instant},
};

use tombolo_mem::Mem;

/// No CPU takes this long by itself.
const DEAR: Duration = Duration::from_nanos(300);
/// It is timed some at once, some times, of which the quickest counts: in the others something else may have come between.
const ONES: u32 = 8;
const TIMES: u32 = 4;
/// Turns of an empty loop that take about as long as the instruction.
const TURNS: u32 = 16;

/// Lets a moment pass.
#[inline]
pub(crate) fn pause<M: Mem>() {
    if leaves_machine() {
        for turn in 0..TURNS {
            black_box(turn);
        }
    } else {
        M::pause();
    }
}

/// Whether the instruction leaves the machine, which is an emulated one then.
#[inline]
pub(crate) fn leaves_machine() -> bool {
    static IS_DEAR: OnceLock<bool> = OnceLock::new();
    *IS_DEAR.get_or_init(|| is_dear(measured()))
}

fn is_dear(quickest: Duration) -> bool {
    quickest >= DEAR * ONES
}

/// How long some of them take, without the look at the clock, which may be dearer still.
fn measured() -> Duration {
    let some = |_| {
        let since = Instant::now();
        (0..ONES).for_each(|_| spin_loop());
        since.elapsed()
    };
    (0..TIMES).map(some).min().unwrap_or_default().saturating_sub(clock())
}

/// How long a look at the clock takes.
pub(crate) fn clock() -> Duration {
    static TOOK: OnceLock<Duration> = OnceLock::new();
    *TOOK.get_or_init(|| {
        let look = || Instant::now().elapsed();
        (0..8).map(|_| look()).min().unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_that_leaves_the_machine_is_told_from_one_that_is_slow() {
        // 140 cycles of a slow CPU; an exit of an emulator.
        assert!(!is_dear(Duration::from_nanos(150) * ONES));
        assert!(is_dear(Duration::from_nanos(800) * ONES));
    }
}
