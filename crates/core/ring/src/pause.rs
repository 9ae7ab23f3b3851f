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

/// Time of one instruction from which on it leaves the machine: no CPU needs as long for the instruction by itself.
const TRAPS_FROM: Duration = Duration::from_nanos(300);
/// Number of instructions that are timed together. Of `TIMINGS` such timings the quickest counts, because other work
/// may have interrupted the rest.
const BATCH: u32 = 8;
const TIMINGS: u32 = 4;
/// Number of turns of an empty loop that take about as long as the instruction.
const LOOPS: u32 = 16;

/// Waits for a moment.
#[inline]
pub(crate) fn pause<M: Mem>() {
    if leaves_machine() {
        for turn in 0..LOOPS {
            black_box(turn);
        }
    } else {
        M::pause();
    }
}

/// Returns whether the instruction leaves the machine, which is then an emulated one.
#[inline]
pub(crate) fn leaves_machine() -> bool {
    static LEAVES: OnceLock<bool> = OnceLock::new();
    *LEAVES.get_or_init(|| is_trapped(measured()))
}

fn is_trapped(quickest: Duration) -> bool {
    quickest >= TRAPS_FROM * BATCH
}

/// Returns the time that `BATCH` instructions take, without the read of the clock, which may cost even more.
fn measured() -> Duration {
    let some = |_| {
        let since = Instant::now();
        (0..BATCH).for_each(|_| spin_loop());
        since.elapsed()
    };
    (0..TIMINGS).map(some).min().unwrap_or_default().saturating_sub(clock())
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
        assert!(!is_trapped(Duration::from_nanos(150) * BATCH));
        assert!(is_trapped(Duration::from_nanos(800) * BATCH));
    }
}
