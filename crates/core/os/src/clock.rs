// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads the time at almost no cost.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the time at the clock's last tick, which is up to 10 ms ago. Reading it does not enter the kernel, while
/// reading any other clock may be a system call (in Xen's PV domains).
#[must_use]
pub fn coarse_time() -> Duration {
    read(ClockId::MonotonicCoarse)
}

/// Returns the exact time of the same clock.
#[must_use]
pub fn exact_time() -> Duration {
    read(ClockId::Monotonic)
}

fn read(clock: ClockId) -> Duration {
    let now = clock_gettime(clock);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on_by_ticks() {
        let begun = coarse_time();
        let fine = std::time::Instant::now();
        while coarse_time() == begun {
            assert!(fine.elapsed() < Duration::from_secs(60), "it stands still");
        }
        assert!(coarse_time() > begun && exact_time() >= coarse_time());
    }
}
