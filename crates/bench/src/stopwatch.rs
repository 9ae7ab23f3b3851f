// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Times round trips.

use std::time::{Duration, Instant};

use crate::error::Result;
use crate::job::{Report, Times};
use crate::stats;

/// Nanoseconds that a block of round trips between two clock reads takes at most, roughly, and the most round trips
/// that it has.
const BLOCK: (f64, f64) = (2000.0, 16.0);
/// Stopwatch for round trips: it measures half of the time in blocks, for a median that no clock read disturbs, and
/// half one by one, for the tail.
pub(crate) struct Stopwatch {
    /// Number of round trips in a block.
    rounds: u32,
    /// Number of round trips in all.
    total: u64,
    /// Nanoseconds of a round trip, for each block.
    blocks: Vec<f64>,
    /// Nanoseconds of single round trips, the latest ones.
    singles: Vec<u32>,
}

impl Stopwatch {
    /// Number of single round trips that are kept; a power of two.
    const SINGLES: usize = 1 << 18;

    /// Calls `round` again and again for `time` from `start` on. A twentieth of that is for warming up.
    pub(crate) fn run(start: Instant, time: Duration, mut round: impl FnMut() -> Result<()>) -> Result<Self> {
        // Filled in advance: a page that is first touched in the middle of a round trip would distort the tail.
        let mut singles = vec![u32::MAX; Self::SINGLES];
        let mut warm = 0u32;
        let mut now = start;
        while warm == 0 || now - start < time / 20 {
            round()?;
            warm += 1;
            now = Instant::now();
        }
        let (long, many) = BLOCK;
        let rounds = (long * f64::from(warm) / (now - start).as_nanos().max(1) as f64).clamp(1.0, many) as u32;
        let mut blocks = Vec::new();
        while blocks.is_empty() || now - start < time / 2 {
            for _ in 0..rounds {
                round()?;
            }
            let before = std::mem::replace(&mut now, Instant::now());
            blocks.push((now - before).as_nanos() as f64 / f64::from(rounds));
        }
        let mut count = 0;
        while count == 0 || now - start < time {
            round()?;
            let before = std::mem::replace(&mut now, Instant::now());
            singles[count % Self::SINGLES] = u32::try_from((now - before).as_nanos()).unwrap_or(u32::MAX);
            count += 1;
        }
        singles.truncate(count);
        let total = u64::from(warm) + blocks.len() as u64 * u64::from(rounds) + count as u64;
        Ok(Self { rounds, total, blocks, singles })
    }

    /// Sums up, less the time for reading the clock and `known_ns` of each round trip.
    pub(crate) fn report(mut self, known_ns: f64) -> Report {
        let clock = clock_cost();
        let mut singles: Vec<f64> =
            self.singles.iter().map(|&ns| (f64::from(ns) - clock - known_ns).max(0.0)).collect();
        singles.sort_by(f64::total_cmp);
        let single = |percent| stats::percentile(&singles, percent).unwrap_or(f64::NAN);
        let times = Times {
            p50: single(50.0),
            p90: single(90.0),
            p99: single(99.0),
            p999: single(99.9),
            median: stats::median(&mut self.blocks)
                .map_or(f64::NAN, |ns| ns - clock / f64::from(self.rounds) - known_ns),
        };
        Report { messages: self.total, times: Some(times), ..Report::default() }
    }
}

/// Returns the nanoseconds that it takes to read the clock. It is the least of some tries, because an interrupted try
/// would subtract more than a clock read takes.
fn clock_cost() -> f64 {
    const READS: u32 = 100;
    let cost = |_| {
        let start = Instant::now();
        for _ in 1..READS {
            std::hint::black_box(Instant::now());
        }
        start.elapsed().as_nanos() as f64 / f64::from(READS)
    };
    (0..10).map(cost).fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stopwatch_of_instant_rounds_reports_in_order() {
        let report = Stopwatch::run(Instant::now(), Duration::from_millis(20), || Ok(())).unwrap().report(0.0);
        let rtt = report.times.unwrap();
        assert!(rtt.p50 <= rtt.p90 && rtt.p90 <= rtt.p99 && rtt.p99 <= rtt.p999 && rtt.median < 1000.0, "{rtt:?}");
    }
}
