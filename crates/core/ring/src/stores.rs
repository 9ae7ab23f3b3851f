// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decides whether long pieces are stored past the caches: a busy writer measures it, again and again (ADR 0093).
//!
//! A plain store waits for the line that the reader's cache holds. Where that cache is far away, stores that bypass the
//! caches have six times the rate; where it is near, a third. A host moves virtual CPUs between the two cases within
//! seconds, without notice.

use std::time::{Duration, Instant};

use tombolo_mem::Mem;

use crate::ring::OwnRing;

/// Number of bytes from which a piece is long.
const LONG: usize = 2 << 10;
/// Number of bytes after which the clock is read.
const MUCH: u64 = 4 << 20;
/// Shortest time over which a rate is measured, by a writer that moved enough to make it worth while.
const SAMPLE: Duration = Duration::from_millis(10);
/// Time after which the other method is given up if it has less than half of the rate, so that a short stream does not
/// pay more.
const ENOUGH: Duration = Duration::from_millis(2);
/// Fewest bytes that a busy writer stores in a sample. Far from the reader's cache, and beside threads that compute,
/// plain stores into a small ring reach no more than a few hundred MB/s.
const LEAST: u64 = MUCH / 4;
/// Time for which a result is valid. `SETTLED` is the time for which the result from another ring is.
const GOOD_FOR: Duration = Duration::from_secs(1);
const SETTLED: Duration = Duration::from_millis(40);
/// Ratio to the plain rate from which stores bypass the caches, as the reader has to fetch such bytes from memory.
const WORTH: (u64, u64) = (5, 4);

/// Method by which one writer stores its long pieces.
#[derive(Clone, Debug)]
pub(crate) struct Stores {
    /// Whether this CPU and this memory have both methods.
    has_both: bool,
    bypasses: bool,
    stage: Stage,
    /// Position of the writer when the clock was last read or the sample began.
    from: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The result, if there is one, is valid until this time.
    Found(Option<Instant>),
    /// The method in use is measured since this time.
    Own(Instant),
    /// The other method is used and measured since this time, and compared with this rate.
    Other(Instant, u64),
}

impl Stores {
    pub fn new(has_both: bool, position: u64) -> Self {
        Self { has_both, bypasses: false, stage: Stage::Found(None), from: position }
    }

    /// Copies `bytes` into `ring` at `position`.
    #[inline(always)]
    pub fn copy_in<M: Mem>(&mut self, ring: &mut OwnRing<M>, position: u64, bytes: &[u8]) {
        if bytes.len() >= LONG && self.bypass(position) {
            ring.copy_in_past_caches(position, bytes);
        } else {
            ring.copy_in(position, bytes);
        }
    }

    /// Returns whether a long piece at `position` is stored past the caches.
    #[inline(always)]
    fn bypass(&mut self, position: u64) -> bool {
        if position.wrapping_sub(self.from) >= MUCH && self.has_both {
            self.weigh_now(position);
        }
        self.bypasses
    }

    /// Notes that the writer moved to another ring at `position`, so that the result is of the previous ring. A
    /// measurement of which ring is faster comes first, with the same stores in both.
    pub fn enter_ring(&mut self, position: u64, now: Instant) {
        if self.has_both && self.stage != Stage::Found(None) {
            (self.stage, self.from) = (Stage::Found(Some(now + SETTLED)), position);
        }
    }

    #[cold]
    #[inline(never)]
    fn weigh_now(&mut self, position: u64) {
        self.weigh(position, Instant::now());
    }

    fn weigh(&mut self, position: u64, now: Instant) {
        let taken = |since: Instant| {
            let (time, bytes) = (now.saturating_duration_since(since), position.wrapping_sub(self.from));
            (time, (u128::from(bytes) * 1_000_000 / time.as_nanos().max(1)) as u64)
        };
        let rate = |since: Instant| {
            let (time, rate) = taken(since);
            // A slower writer had nothing to store for a while.
            let is_busy = u128::from(rate) >= u128::from(LEAST) / SAMPLE.as_millis();
            (time >= SAMPLE).then_some(is_busy.then_some(rate))
        };
        let is_hopeless = |since: Instant, before: u64| {
            let (time, rate) = taken(since);
            (ENOUGH..SAMPLE).contains(&time) && rate < before / 2
        };
        let next = match self.stage {
            Stage::Found(until) => (until.is_none_or(|until| now >= until)).then_some(Stage::Own(now)),
            Stage::Own(since) => rate(since).map(|rate| {
                self.bypasses ^= rate.is_some();
                rate.map_or(Stage::Own(now), |rate| Stage::Other(now, rate))
            }),
            Stage::Other(since, before) if is_hopeless(since, before) => {
                self.bypasses ^= true;
                Some(Stage::Found(Some(now + GOOD_FOR)))
            }
            Stage::Other(since, before) => rate(since).map(|rate| {
                let [past, plain] = if self.bypasses { [rate, Some(before)] } else { [Some(before), rate] };
                // A writer that paused during the sample keeps the earlier method.
                let both = past.zip(plain);
                self.bypasses = both.map_or(!self.bypasses, |(past, plain)| past / WORTH.0 >= plain / WORTH.1);
                Stage::Found(Some(now + GOOD_FOR))
            }),
        };
        match (next, self.stage) {
            (Some(next), _) => (self.stage, self.from) = (next, position),
            (None, Stage::Found(_)) => self.from = position,
            // The sample continues.
            (None, _) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A writer of so many MiB a millisecond by plain stores, and by the others.
    struct Busy {
        stores: Stores,
        rates: [u64; 2],
        position: u64,
        now: Instant,
    }

    impl Busy {
        fn new(rates: [u64; 2]) -> Self {
            Self { stores: Stores::new(true, 7), rates, position: 7, now: Instant::now() }
        }

        /// Returns in how many of the next milliseconds the stores went past the caches.
        fn go_on(&mut self, most: u32) -> u32 {
            (0..most)
                .map(|_| {
                    let bypasses = self.stores.bypasses;
                    self.position += self.rates[usize::from(bypasses)] * MIB;
                    self.now += Duration::from_millis(1);
                    if self.position - self.stores.from >= MUCH {
                        self.stores.weigh(self.position, self.now);
                    }
                    u32::from(bypasses)
                })
                .sum()
        }
    }

    #[test]
    fn writer_uses_what_is_faster_and_pays_a_hundredth_for_the_knowledge() {
        // Far away, and near in rings of two sizes. Stores with less than half of the rate are soon given up.
        let (whole, short) = (80..=130, 15..=40);
        for (rates, is_past, cost) in
            [([3, 15], true, &short), ([12, 13], false, &whole), ([30, 12], false, &short), ([2, 3], true, &whole)]
        {
            let mut busy = Busy::new(rates);
            busy.go_on(40);
            let (all, past) = (10_000, busy.go_on(10_000));
            let wrong = if is_past { all - past } else { past };
            assert!(cost.contains(&wrong), "{rates:?}: {wrong} ms");
        }
    }

    #[test]
    fn writer_finds_out_within_a_second_that_its_reader_is_elsewhere() {
        let mut busy = Busy::new([30, 12]);
        busy.go_on(500);
        for rates in [[3, 15], [30, 12], [3, 15]] {
            busy.rates = rates;
            busy.go_on(1050);
            assert_eq!(busy.stores.bypasses, rates[1] > rates[0], "{rates:?}");
        }
    }

    #[test]
    fn writer_in_another_ring_measures_anew_but_not_at_once() {
        let mut busy = Busy::new([10, 15]);
        busy.go_on(100);
        assert!(busy.stores.bypasses);
        busy.rates = [30, 12];
        busy.stores.enter_ring(busy.position, busy.now);
        assert_eq!(busy.go_on(50), 50);
        busy.go_on(200);
        assert!(!busy.stores.bypasses);
    }

    #[test]
    fn writer_that_has_little_to_store_or_one_way_tries_nothing() {
        let mut slow = Busy::new([0, 99]);
        for _ in 0..1000 {
            (slow.position, slow.now) = (slow.position + MUCH, slow.now + Duration::from_millis(50));
            slow.stores.weigh(slow.position, slow.now);
            assert!(!slow.stores.bypasses);
        }
        let mut one = Stores::new(false, 0);
        assert!(!(0..100).any(|at| one.bypass(at * MUCH)) && one.stage == Stage::Found(None));
    }

    #[test]
    fn writer_that_stops_amid_a_sample_goes_on_as_before() {
        let mut busy = Busy::new([20, 20]);
        while busy.go_on(1) == 0 {}
        busy.now += Duration::from_secs(1);
        busy.go_on(1);
        assert!(!busy.stores.bypasses && matches!(busy.stores.stage, Stage::Found(Some(_))));
    }
}
