// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where the live words of a segment stand (M-5). Each is a naturally aligned `u64`, written by the segment's owner
//! only and read by the peer; hot words are 128 bytes apart, so that neither the line nor its prefetched neighbour is
//! shared by two of them.

use crate::{limits, private::COUNTERS};

/// Position after the last byte published. Owner: writer.
pub const TAIL: usize = 0x080;
/// Position of the next byte to be read. Owner: reader.
pub const HEAD: usize = 0x100;
/// The reader's wait word: wake me when the tail reaches the target. Owner: reader.
pub const WANT_DATA: usize = 0x180;
/// The reader's state, on the line that the writer looks at anyway. Owner: reader.
pub const READER_STATE: usize = 0x188;
/// The writer's wait word: wake me when the head reaches the target. Owner: writer.
pub const WANT_SPACE: usize = 0x200;
/// The writer's state, on the line that the reader looks at anyway. Owner: writer.
pub const WRITER_STATE: usize = 0x208;
/// Hint: which CPU this endpoint last ran on. Owner: the end.
pub const CPU: usize = 0x280;
/// From here to the stats page everything is zero and reserved (further reader words, pool descriptors) (M-5).
pub const RESERVED: usize = 0x300;
/// The stats page: what this endpoint counted as a writer, [`COUNTERS`] words in the order of R-26 (C-12). Nobody reads
/// it but tools.
pub const WRITER_COUNTERS: usize = 0xe00;
/// The stats page: how the ring that this endpoint writes follows its load, as [`encode_growth`] says (C-12).
pub const RING_GROWTH: usize = 0xe48;
/// The stats page: what this endpoint counted as a reader (C-12).
pub const READER_COUNTERS: usize = 0xe80;
/// The stats page: the epoch of this endpoint's peer, which says whose peer this endpoint is (C-12).
pub const PEER_EPOCH: usize = 0xf00;

const LINE: usize = 128;
const _: () = assert!(WRITER_COUNTERS % LINE == 0 && READER_COUNTERS % LINE == 0 && PEER_EPOCH % LINE == 0);
const _: () = assert!(RESERVED < WRITER_COUNTERS && 8 * COUNTERS <= LINE && (PEER_EPOCH as u64) < limits::CONTROL_LEN);
const _: () = assert!(crate::header::LEN <= TAIL);
const _: () = assert!(TAIL % LINE == 0 && HEAD % LINE == 0 && WANT_DATA % LINE == 0 && WANT_SPACE % LINE == 0);
const _: () = assert!(READER_STATE == WANT_DATA + 8 && WRITER_STATE == WANT_SPACE + 8 && CPU % LINE == 0);
const _: () = assert!((RESERVED as u64) < limits::CONTROL_LEN);

const _: () = assert!(RING_GROWTH == WRITER_COUNTERS + 8 * COUNTERS && RING_GROWTH < READER_COUNTERS);

/// Why a ring has the size that it has, by the code that stands on the stats page (C-12).
pub const RING_REASONS: [&str; 9] =
    ["unknown", "first", "offered", "bulk", "idle", "budget", "memory", "peer", "pressure"];

/// How a ring follows its load: the size that it grows to, a power of two, and the code of its reason (C-12). 0 stands
/// for a ring that does not.
#[must_use]
pub const fn encode_growth(target: u64, reason: u8) -> u64 {
    target | reason as u64
}

/// What [`encode_growth`] gave (C-12). `None` where a ring does not follow its load, or something else stands there.
#[must_use]
pub fn decode_growth(word: u64) -> Option<(u64, &'static str)> {
    let target = word & !0xff;
    let sound = target.is_power_of_two() && (limits::CAPACITY_MIN..=limits::CAPACITY_MAX).contains(&target);
    let reason = RING_REASONS.get((word & 0xff) as usize).unwrap_or(&RING_REASONS[0]);
    sound.then_some((target, *reason))
}

/// The CPU hint as it stands in memory: 0 while unknown, else the CPU's number plus one.
#[must_use]
pub const fn encode_cpu(cpu: u32) -> u64 {
    cpu as u64 + 1
}

/// The wait word of one who waits for `target`: shifted left, lowest bit set.
#[must_use]
pub const fn armed(target: u64) -> u64 {
    (target << 1) | 1
}

/// The wait word of one who is awake.
pub const AWAKE: u64 = 0;

/// Whether `word` is armed and `position` has reached its target. Positions wrap at 2^63 here, so a distance
/// below 2^62 decides.
#[must_use]
pub const fn reached(word: u64, position: u64) -> bool {
    word & 1 == 1 && ((position << 1).wrapping_sub(word & !1) as i64) >= 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r10_armed_word_is_never_awake() {
        for target in [0, 1, 7, 1 << 31, u64::MAX >> 1, u64::MAX] {
            assert_ne!(armed(target), AWAKE);
        }
    }

    #[test]
    fn c12_growth_comes_back_and_nonsense_is_none() {
        for (code, reason) in (0u8..).zip(RING_REASONS) {
            assert_eq!(decode_growth(encode_growth(1 << 21, code)), Some((1 << 21, reason)));
        }
        assert_eq!(decode_growth((1 << 21) | 0xff), Some((1 << 21, "unknown")));
        for nonsense in [0, 3, u64::MAX, (1 << 21) + (1 << 20), 2048, 1 << 40, (1 << 63) | 2] {
            assert_eq!(decode_growth(nonsense), None, "{nonsense:#x}");
        }
    }

    #[test]
    fn r11_target_is_reached_from_its_position_on_also_across_the_wrap() {
        for target in [0u64, 1, 4096, (1 << 63) - 1, 1 << 63, u64::MAX] {
            assert!(reached(armed(target), target));
            assert!(reached(armed(target), target.wrapping_add(9)));
            assert!(!reached(armed(target), target.wrapping_sub(1)));
        }
        assert!(!reached(AWAKE, 0), "one who is awake is never rung");
    }
}
