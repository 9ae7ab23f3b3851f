// SPDX-License-Identifier: Apache-2.0 OR MIT
use proptest::prelude::*;

use super::*;
use crate::hello::FRAME_MOST;

const SENDER: Mac = Mac([2, 0, 0, 0, 0, 9]);

fn limits(features: Features) -> Limits {
    let receiver = Hello { features, mtu: 1500, frame_most: FRAME_MOST, mac: Mac([2, 0, 0, 0, 0, 1]) };
    Limits::new(&receiver, Some(SENDER))
}

/// Returns the beginning of a message: a header of these fields, and a frame of the sender's.
fn head(flags: u8, kind: u8, fields: [u16; 5]) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    (head[0], head[1]) = (flags, kind);
    for (at, field) in fields.into_iter().enumerate() {
        head[2 + 2 * at..4 + 2 * at].copy_from_slice(&field.to_le_bytes());
    }
    head[HEADER + 6..HEADER + 12].copy_from_slice(&SENDER.0);
    head
}

fn check(features: Features, len: usize, mut head: [u8; HEAD]) -> Result<Frame, DropReason> {
    limits(features).check(len, &mut head)
}

#[test]
fn n7_frames_of_every_length_that_was_agreed_on_pass() {
    let plain = head(0, PLAIN, [0; 5]);
    let most = FRAME_MOST as usize + HEADER;
    for len in [0, 11, 12, 25] {
        assert_eq!(check(Features::none(), len, plain), Err(DropReason::Short), "{len}");
    }
    for len in [26, 27, most] {
        assert_eq!(check(Features::none(), len, plain), Ok(Frame { len: len - HEADER, segments: false }));
    }
    for len in [most + 1, usize::MAX] {
        assert_eq!(check(Features::none(), len, plain), Err(DropReason::Long), "{len}");
    }
}

#[test]
fn n8_header_that_makes_no_sense_is_dropped() {
    let sums = |start, offset| head(NEEDS_CHECKSUM, PLAIN, [0, 0, start, offset, 0]);
    for (what, bad) in [
        ("a flag that there is not", head(4, PLAIN, [0; 5])),
        ("another", head(0x80, PLAIN, [0; 5])),
        ("several buffers", head(0, PLAIN, [0, 0, 0, 0, 1])),
        ("a sum before the packet", sums(13, 16)),
        ("a sum behind the frame", sums(90, 9)),
        ("a sum far behind", sums(0xffff, 0xffff)),
        ("segments of UDP as they were once", head(1, 3, [54, 1448, 34, 16, 0])),
        ("segments of a kind that there is not", head(1, 2, [54, 1448, 34, 16, 0])),
        ("UDP with congestion marks", head(1, UDP | MARKED, [54, 1448, 34, 6, 0])),
        ("marks alone", head(1, MARKED, [54, 1448, 34, 16, 0])),
        ("segments of no length", head(1, TCP4, [54, 0, 34, 16, 0])),
        ("segments without a sum", head(0, TCP4, [54, 1448, 34, 16, 0])),
        ("segments whose sum is said to be right", head(2, TCP4, [54, 1448, 34, 16, 0])),
        ("a head behind the frame", head(1, TCP6, [101, 1428, 54, 16, 0])),
    ] {
        assert_eq!(check(Features::all(), 112, bad), Err(DropReason::Header), "{what}");
    }
    assert_eq!(check(Features::all(), 112, sums(90, 8)), Ok(Frame { len: 100, segments: false }));
    assert_eq!(
        check(Features::all(), 112, head(1, TCP6, [100, 1428, 54, 16, 0])),
        Ok(Frame { len: 100, segments: true })
    );
}

#[test]
fn n4_what_was_not_offered_is_dropped() {
    for (needed, kind) in [
        (Features::TSO4, TCP4),
        (Features::TSO6, TCP6),
        (Features::USO, UDP),
        (Features::ECN, TCP4 | MARKED),
        (Features::ECN, TCP6 | MARKED),
    ] {
        let segments = head(1, kind, [54, 1448, 34, 16, 0]);
        assert!(check(Features::all(), 9000, segments).is_ok_and(|frame| frame.segments));
        assert_eq!(check(Features::all().without(needed), 9000, segments), Err(DropReason::Feature), "{needed:?}");
    }
    let sum = head(1, PLAIN, [0, 0, 34, 16, 0]);
    assert_eq!(check(Features::none(), 112, sum), Err(DropReason::Feature));
    // A verified checksum needs no feature.
    assert!(check(Features::none(), 112, head(2, PLAIN, [0; 5])).is_ok());
}

#[test]
fn n6_frame_from_another_address_is_dropped() {
    let mut other = head(0, PLAIN, [0; 5]);
    other[HEADER + 11] ^= 1;
    assert_eq!(check(Features::all(), 112, other), Err(DropReason::Source));
    let anybody = Limits { source: None, ..limits(Features::all()) };
    assert!(anybody.check(112, &mut other).is_ok());
}

#[test]
fn n8_header_that_goes_on_holds_what_was_checked_and_nothing_else() {
    // A plain frame ignores the other fields, whatever they hold.
    let mut plain = head(0, PLAIN, [0xffff, 0xffff, 0xffff, 0xffff, 0]);
    limits(Features::all()).check(112, &mut plain).unwrap();
    assert_eq!(plain, head(0, PLAIN, [0; 5]));
    let mut sum = head(1, PLAIN, [0xffff, 0xffff, 34, 16, 0]);
    limits(Features::all()).check(112, &mut sum).unwrap();
    assert_eq!(sum, head(1, PLAIN, [0, 0, 34, 16, 0]));
}

/// Asserts the properties of a header that passed, independently of how `check` computes them.
fn assert_sound(features: Features, len: usize, before: [u8; HEAD], after: [u8; HEAD]) {
    let frame = len - 12;
    let u16_at = |at: usize| usize::from(after[at]) | usize::from(after[at + 1]) << 8;
    assert!(after[0] <= 3 && u16_at(10) == 0 && (14..=FRAME_MOST as usize).contains(&frame));
    assert!(after[12..] == before[12..] && after[18..24] == SENDER.0);
    if after[0] & 1 == 1 {
        assert!(features.has(Features::CHECKSUM) && u16_at(6) >= 14 && u16_at(6) + u16_at(8) + 1 < frame);
    } else {
        assert!(u16_at(6) == 0 && u16_at(8) == 0 && after[1] == 0);
    }
    match after[1] {
        0 => assert!(u16_at(2) == 0 && u16_at(4) == 0),
        kind @ (1 | 4 | 5 | 0x81 | 0x84) => {
            let needed = match kind & 0x7f {
                1 => Features::TSO4,
                4 => Features::TSO6,
                _ => Features::USO,
            };
            assert!(features.has(needed) && (kind < 0x80 || features.has(Features::ECN)));
            assert!(u16_at(4) > 0 && u16_at(2) <= frame);
        }
        kind => panic!("kind {kind:#x} passed"),
    }
}

/// Random headers: a million in the short form, a hundred million in the long one.
#[test]
fn n8_hostile_headers_never_pass_unsound() {
    let rounds = if std::env::var_os("TOMBOLO_LONG").is_some() { 100_000_000 } else { 1_000_000 };
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut passed = [0_u64; 2];
    for _ in 0..rounds {
        let [choice, low, high, sizes] = [next(), next(), next(), next()];
        // Half of the fields are small, so that some headers are valid.
        let field = |word: u64, at: u32| match choice >> at & 3 {
            0 => 0,
            1 => (word >> at) as u16 & 0x7f,
            2 => (word >> at) as u16 & 0x7ff,
            _ => (word >> at) as u16,
        };
        let fields = [field(low, 0), field(low, 16), field(low, 32), field(high, 16), field(high, 32) & field(low, 8)];
        let kinds = [0, 1, 4, 5, 0x81, 0x84, 3, (high >> 8) as u8];
        let kind = kinds[choice as usize >> 60 & 7];
        let flags = if choice >> 56 & 7 == 0 { high as u8 } else { choice as u8 >> 6 };
        let mut before = head(flags, kind, fields);
        if choice >> 50 & 15 == 0 {
            before[18 + (sizes as usize >> 40) % 6] ^= 1 << (sizes >> 50 & 7);
        }
        let len = if choice >> 48 & 1 == 0 { sizes as usize & 0xff } else { sizes as usize & 0x1_ffff };
        let features = Features::from_bits(sizes >> 32 & 0x1f | 1);
        let mut after = before;
        match limits(features).check(len, &mut after) {
            Ok(frame) => {
                passed[usize::from(frame.segments)] += 1;
                assert_sound(features, len, before, after);
            }
            Err(_) => assert_eq!(before, after, "a header that is dropped is left alone"),
        }
    }
    // Otherwise nothing would have been tested.
    assert!(passed.iter().all(|count| *count > rounds / 1000), "{passed:?} of {rounds} passed");
}

#[test]
#[should_panic(expected = "kind 0x3 passed")]
fn canary_header_that_should_not_have_passed_is_seen() {
    let bad = head(1, 3, [54, 1448, 34, 16, 0]);
    assert_sound(Features::all(), 112, bad, bad);
}

proptest! {
    #[test]
    fn n8_any_beginning_of_any_length_is_dropped_or_sound(
        bytes in any::<[u8; HEAD]>(), len in 0..70_000_usize, bits in 0..32_u64,
    ) {
        let mut before = bytes;
        before[18..24].copy_from_slice(&SENDER.0);
        let (mut after, features) = (before, Features::from_bits(bits));
        if limits(features).check(len, &mut after).is_ok() {
            assert_sound(features, len, before, after);
        }
    }
}
