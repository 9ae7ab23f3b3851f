// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Time that costs next to nothing.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// What time it was at the clock's last tick, which is up to 10 ms ago. To ask enters no kernel, where any other clock may be a
/// call of it (in Xen's PV domains).
#[must_use]
pub fn coarse_time() -> Duration {
    read(ClockId::MonotonicCoarse)
}

/// What time it is by the same clock, exactly.
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
