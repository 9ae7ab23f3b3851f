// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One step of waiting in a loop. CPUs have an instruction for it that takes some dozen nanoseconds. In an emulated
//! machine the instruction leaves the machine each time, for a microsecond and with its locks held. There a short loop
//! replaces it.

use std::{
    hint::{black_box, spin_loop},
    sync::OnceLock,
    time::{Duration, Instant},
};

use tombolo_mem::Mem;

/// Time that no CPU needs for the instruction by itself.
const DEAR: Duration = Duration::from_nanos(300);
/// Number of instructions that are timed together. Of `TIMES` such timings the quickest counts, as other work may have
/// interrupted the rest.
const ONES: u32 = 8;
const TIMES: u32 = 4;
/// Number of turns of an empty loop that take about as long as the instruction.
const TURNS: u32 = 16;

/// Waits for a moment.
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

/// Returns whether the instruction leaves the machine, which is then an emulated one.
#[inline]
pub(crate) fn leaves_machine() -> bool {
    static IS_DEAR: OnceLock<bool> = OnceLock::new();
    *IS_DEAR.get_or_init(|| is_dear(measured()))
}

fn is_dear(quickest: Duration) -> bool {
    quickest >= DEAR * ONES
}

/// Returns the time that `ONES` instructions take, without the read of the clock, which may cost even more.
fn measured() -> Duration {
    let some = |_| {
        let since = Instant::now();
        (0..ONES).for_each(|_| spin_loop());
        since.elapsed()
    };
    (0..TIMES).map(some).min().unwrap_or_default().saturating_sub(clock())
}

/// Returns the time that one read of the clock takes.
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
