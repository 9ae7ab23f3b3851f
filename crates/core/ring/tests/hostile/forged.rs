// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Words that a hostile peer forges.

use std::time::Duration;

use crate::common::Rng;
use tombolo_layout::state::{Phase, State};

pub const CAPACITY: u64 = 4096;
/// Far longer than any of these tests needs, and still finite.
pub const HANG: Duration = Duration::from_secs(1800);
/// Clauses that a victim may report.
pub const CLAUSES: [&str; 6] = ["R-7", "R-8", "R-15", "R-20", "R-21", "H-5"];

/// Returns how many mutations a test makes.
pub fn mutations(short: u64, long: u64) -> u64 {
    if std::env::var_os("TOMBOLO_LONG").is_some_and(|long| long == "1") { long } else { short }
}

/// Returns a position at which a pipe may begin.
pub fn start(rng: &mut Rng) -> u64 {
    rng.one_of(&[0u64, 1 << 32, 1 << 62, 1 << 63, 0]).wrapping_sub(rng.below(64) * 8)
}

/// Returns a position that the peer may store in place of `now`: a plausible one, an impossible one, or one of `seen`.
pub fn forge_position(rng: &mut Rng, now: u64, seen: &[u64]) -> u64 {
    let far = rng.one_of(&[1, 7, 8, CAPACITY - 8, CAPACITY, CAPACITY + 8, 1 << 31, 1 << 32, 1 << 62, 1 << 63]);
    match rng.below(8) {
        0 => rng.word(),
        1 => now ^ (1 << rng.below(64)),
        2 => now.wrapping_sub(far),
        3 => now.wrapping_add(far),
        4 if !seen.is_empty() => rng.one_of(seen),
        5 => rng.one_of(&[0, u64::MAX, 1 << 63]),
        _ => now.wrapping_add(rng.below(CAPACITY + 2)),
    }
}

/// Returns a state word, mostly a possible one.
pub fn forge_state(rng: &mut Rng) -> u64 {
    let state = |phase, ready, current| State { phase, ready, current }.encode();
    match rng.below(12) {
        0 => rng.word(),
        1 => state(Phase::Closed, 0, 0),
        2 => state(Phase::Aborted, 0, 0),
        3 => state(Phase::Fresh, 0, 0),
        4 => state(Phase::Open, rng.below(3) as u16, rng.below(3) as u16),
        5 => state(Phase::Open, 0, 0) ^ (1 << rng.below(64)),
        _ => state(Phase::Open, 0, 0),
    }
}
