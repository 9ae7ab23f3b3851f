// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Single words and headers, each forged alone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::{
    common::{Rng, fresh, memory, next_ring, victim, within},
    forged::{CAPACITY, HANG, forge_state, mutations, start},
};
use tombolo_layout::{
    Features, SegmentHeader, limits,
    state::{Phase, State},
    words,
};
use tombolo_mem::{Mem, OwnData, OwnWord, PeerData, PeerWord, Untrusted};
use tombolo_ring::{
    Deadline, Error, FenceMode, Mode, PeerRing, Reader, ReaderParts, Spin, WaitContext, Waited, Woken, halves, wait,
};

/// A sleep in which the peer acts, and then notifies for nothing, as often as it can.
struct Storm<'a> {
    meddle: Box<dyn FnMut() + 'a>,
    notifications: u64,
    slept: u64,
}

impl WaitContext for Storm<'_> {
    type Error = Error;

    fn notify(&mut self) {
        self.notifications += 1;
    }

    fn drain(&mut self) {}

    fn barrier(&mut self) {}

    fn sleep(&mut self, _: Deadline) -> Result<Woken, Error> {
        self.slept += 1;
        (self.meddle)();
        Ok(Woken::Notified)
    }

    fn may_spin(&mut self) -> bool {
        self.slept % 2 == 0
    }
}

#[test]
fn r12_r25_wait_among_forged_words_and_false_notifications_ends_at_its_deadline() {
    within(HANG, || {
        let (mut rng, mut timed_out) = (Rng(5), 0);
        for round in 0..mutations(400, 10_000) {
            let start = start(&mut rng);
            let (mut halves, pages) = victim(CAPACITY, false, start);
            pages.set_tail(start);
            let is_valid = round % 2 == 0;
            let mut meddling = rng.clone();
            rng.word();
            let meddle = Box::new(move || match meddling.below(4) {
                0 => pages.set(words::WANT_SPACE, meddling.word()),
                1 => pages.set(words::WANT_DATA, meddling.word()),
                2 if !is_valid => pages.set(words::WRITER_STATE, forge_state(&mut meddling)),
                3 if !is_valid && meddling.below(64) == 0 => pages.set_tail(meddling.word()),
                _ => {}
            });
            let mut storm = Storm { meddle, notifications: 0, slept: 0 };
            let deadline = Deadline::after(Duration::from_millis(1));
            let waited = wait(&mut halves.reader, &mut storm, &mut Spin::default(), 1, deadline);
            assert!(
                storm.notifications <= storm.slept + 2,
                "R-25: {} notifications in {} sleeps",
                storm.notifications,
                storm.slept
            );
            match waited {
                Ok(Waited::TimedOut) => timed_out += 1,
                Ok(Waited::Ready) | Err(Error::Corrupt(_)) => assert!(!is_valid, "{waited:?}"),
                other => panic!("{other:?}"),
            }
        }
        assert!(timed_out > 0);
    });
}

#[test]
fn m1_m2_m3_m4_h1_header_of_any_bytes_is_refused_or_right() {
    let mut rng = Rng(6);
    for messages in [false, true] {
        let (segment, seen) = memory(CAPACITY);
        let (control, _) = segment.split(limits::CONTROL_LEN as usize);
        let (mut refused, mut taken) = (0, 0);
        for _ in 0..2000 {
            let mut header = SegmentHeader::new(CAPACITY, 0, rng.below(100), Features::NONE, 2).encode();
            for _ in 0..rng.below(3) {
                header[rng.below(0x80) as usize] ^= 1 << rng.below(8);
            }
            control.write_header(&header);
            let own = fresh(CAPACITY, 0, 0).0;
            match halves(own, &seen, Mode { messages, ordering: FenceMode::Fences }) {
                Ok((halves, header)) => {
                    assert_eq!((halves.reader.capacity(), halves.reader.position()), (CAPACITY, header.start));
                    assert!(!messages || header.start % 8 == 0, "M-4");
                    taken += 1;
                }
                Err(corrupt) => {
                    assert!(["M-1", "M-2", "M-3", "M-4", "H-1"].contains(&corrupt.clause), "{corrupt}");
                    refused += 1;
                }
            }
        }
        assert!(refused > 100 && taken > 100, "{refused} refused, {taken} taken");
    }
}

#[test]
fn m2_segment_smaller_than_any_ring_is_refused() {
    let (segment, fd) = tombolo_mem::create_sealed("tombolo-test", 4096).unwrap();
    let seen = tombolo_mem::PeerSegment::map(std::os::fd::AsFd::as_fd(&fd), 4096).unwrap();
    let mode = Mode { messages: false, ordering: FenceMode::Fences };
    let corrupt = halves(fresh(CAPACITY, 0, 0).0, &seen, mode).unwrap_err();
    assert_eq!((corrupt.clause, corrupt.found, corrupt.bound), ("M-2", 4096, 8192));
    drop(segment);
}

#[test]
fn m8_header_that_changes_later_changes_nothing() {
    let (mut halves, mut pages) = victim(CAPACITY, false, 40);
    for word in 0..words::TAIL / 8 {
        pages.set(word * 8, u64::MAX);
    }
    pages.data.copy_in(40, b"as agreed");
    pages.set_tail(49);
    let mut buffer = [0; 100];
    assert_eq!(halves.reader.read(&mut buffer), Ok(Some(9)));
    assert_eq!(&buffer[..9], b"as agreed");
}

#[test]
fn r2_r3_peer_that_has_published_nothing_yet_violates_nothing() {
    let start = 77 * 8;
    let ((a, a_seen), (b, b_seen)) = (fresh(CAPACITY, 0, start), fresh(CAPACITY, 0, start));
    let mode = Mode { messages: true, ordering: FenceMode::Fences };
    let (mut a, _) = halves(a, &b_seen, mode).unwrap();
    // The peer has offered its segment and not yet begun: its tail is there, its head has no meaning.
    assert_eq!(a.reader.recv(&mut [0; 8]), Ok(None));
    assert_eq!(a.writer.send(&[1; 4088]), Ok(Some(())));
    assert_eq!(a.writer.send(&[1; 8]), Ok(None), "full, and nobody has read anything");
    let (mut b, _) = halves(b, &a_seen, mode).unwrap();
    assert_eq!(a.writer.send(&[1; 8]), Ok(None));
    assert_eq!(b.reader.recv(&mut [0; 4088]), Ok(Some(4088)));
    assert_eq!(a.writer.send(&[1; 8]), Ok(Some(())));
}

#[test]
fn r15_phase_that_goes_back_is_corrupt() {
    let (mut halves, pages) = victim(CAPACITY, false, 0);
    pages.set_writer_state(Phase::Open);
    pages.set(words::READER_STATE, State::OPEN.encode());
    assert_eq!((halves.reader.finished(), halves.writer.reader().is_closed()), (Ok(None), Ok(false)));
    pages.set_writer_state(Phase::Fresh);
    pages.set(words::READER_STATE, State { phase: Phase::Fresh, ready: 0, current: 0 }.encode());
    let clause = |error| match error {
        Error::Corrupt(corrupt) => corrupt.clause,
        other => panic!("{other}"),
    };
    assert_eq!(halves.reader.finished().map_err(clause), Err("R-15"));
    assert_eq!(halves.writer.reader().is_closed().map_err(clause), Err("R-15"));
    assert_eq!(halves.writer.write(b"x").map_err(clause), Err("R-15"), "and stays so");
}

#[test]
fn h3_h5_reader_that_takes_its_readiness_back_is_corrupt() {
    let (mut halves, pages) = victim(CAPACITY, false, 0);
    let say = |ready| pages.set(words::READER_STATE, State { phase: Phase::Open, ready, current: 0 }.encode());
    say(0);
    assert_eq!(halves.writer.handover().announce(), 1);
    assert_eq!(halves.writer.handover().reader_ready(), Ok(false));
    say(1);
    assert_eq!(halves.writer.handover().reader_ready(), Ok(true));
    say(0);
    assert!(matches!(halves.writer.write(b"x"), Err(Error::Corrupt(corrupt)) if corrupt.clause == "H-5"));
    // The peer was ready when it mattered: continuing is safe, and must not panic.
    halves.writer.handover().switch_to(next_ring(CAPACITY, 1).0);
}

#[test]
fn h5_next_ring_may_be_offered_once_the_reader_is_at_the_switch_point_and_not_before() {
    let (mut halves, pages) = victim(CAPACITY, false, 0);
    let say = |ready| pages.set(words::READER_STATE, State { phase: Phase::Open, ready, current: 0 }.encode());
    say(0);
    assert_eq!(halves.writer.write(&[7; 100]), Ok(Some(100)));
    assert_eq!(halves.writer.handover().announce(), 1);
    say(1);
    assert_eq!(halves.writer.handover().reader_ready(), Ok(true));
    halves.writer.handover().switch_to(next_ring(CAPACITY, 1).0);
    pages.set(words::HEAD, 99);
    assert_eq!(halves.writer.handover().can_offer(), Ok(false), "a byte is left in the ring before");
    pages.set(words::HEAD, 100);
    assert_eq!(halves.writer.handover().can_offer(), Ok(true));
}

#[test]
fn h5_writer_that_is_out_of_turn_is_corrupt() {
    for (ready, current) in [(2, 0), (1, 1), (0, 1), (2, 1), (u16::MAX, 0), (0, u16::MAX)] {
        let (mut halves, pages) = victim(CAPACITY, false, 0);
        pages.set(words::WRITER_STATE, State { phase: Phase::Open, ready, current }.encode());
        let announced = halves.reader.handover().announced();
        assert!(
            matches!(announced, Err(Error::Corrupt(corrupt)) if corrupt.clause == "H-5"),
            "{ready} {current}: {announced:?}"
        );
    }
    let (mut halves, pages) = victim(CAPACITY, false, 0);
    pages.set(words::WRITER_STATE, State { phase: Phase::Open, ready: 1, current: 0 }.encode());
    assert_eq!(halves.reader.handover().announced(), Ok(Some(1)));
    let early = halves.reader.handover().prepare(2, next_ring(CAPACITY, 2).1);
    assert!(matches!(early, Err(Error::Corrupt(corrupt)) if corrupt.clause == "H-5"), "{early:?}");
}

#[test]
fn h9_writer_that_goes_ahead_out_of_turn_is_corrupt() {
    for (ready, current) in [(2, 2), (2, 1), (0, 1), (u16::MAX, u16::MAX), (1, u16::MAX)] {
        let (mut halves, pages) = victim(CAPACITY, false, 0);
        halves.reader.handover().allow_ahead();
        pages.set(words::WRITER_STATE, State { phase: Phase::Open, ready, current }.encode());
        let announced = halves.reader.handover().announced();
        assert!(
            matches!(announced, Err(Error::Corrupt(corrupt)) if corrupt.clause == "H-5"),
            "{ready} {current}: {announced:?}"
        );
    }
    // A writer that went ahead does not come back, and goes no further before it was followed.
    for (ready, current) in [(1, 0), (0, 0), (2, 1), (2, 2)] {
        let (mut halves, pages) = victim(CAPACITY, false, 0);
        halves.reader.handover().allow_ahead();
        let state = |ready, current| State { phase: Phase::Open, ready, current }.encode();
        pages.set(words::WRITER_STATE, state(1, 1));
        assert_eq!(halves.reader.handover().announced(), Ok(Some(1)));
        pages.set(words::WRITER_STATE, state(ready, current));
        let announced = halves.reader.handover().announced();
        assert!(matches!(announced, Err(Error::Corrupt(corrupt)) if corrupt.clause == "H-5"), "{announced:?}");
    }
    // The new ring begins where the last tail of the old ring says.
    let (mut halves, pages) = victim(CAPACITY, false, 0);
    halves.reader.handover().allow_ahead();
    pages.set_tail(100);
    pages.set(words::WRITER_STATE, State { phase: Phase::Open, ready: 1, current: 1 }.encode());
    assert_eq!(halves.reader.handover().announced(), Ok(Some(1)));
    halves.reader.handover().prepare(1, next_ring(CAPACITY, 1).1).unwrap();
    assert!(matches!(halves.reader.handover().find_unread(), Err(Error::Corrupt(corrupt)) if corrupt.clause == "R-7"));
}

/// Memory whose tail grows by a word after every few looks: a writer that keeps its reader busy for ever.
#[derive(Debug)]
enum Dripping {}

/// Begins at `first`.
#[derive(Clone, Debug, Default)]
struct Drip {
    looks: Arc<AtomicU64>,
    first: u64,
    looks_a_drop: u64,
}

impl Mem for Dripping {
    type OwnWord = Drip;
    type PeerWord = Drip;
    type OwnData = Zeros;
    type PeerData = Zeros;

    fn fence() {}

    fn light_fence() {}

    fn pause() {}
}

impl OwnWord for Drip {
    fn store_release(&self, _: u64) {}

    fn store_relaxed(&self, _: u64) {}

    fn load(&self) -> u64 {
        0
    }
}

impl PeerWord for Drip {
    fn load_acquire(&self) -> Untrusted<u64> {
        Untrusted::new(self.first + self.looks.fetch_add(1, Relaxed) / self.looks_a_drop * 8)
    }

    fn load_relaxed(&self) -> Untrusted<u64> {
        Untrusted::new(0)
    }
}

/// Data that are a header again and again.
#[derive(Debug)]
struct Zeros;

impl PeerData for Zeros {
    fn len(&self) -> usize {
        1 << 20
    }

    fn copy_out(&self, _: usize, to: &mut [u8]) {
        to.fill(0);
        to[..2].copy_from_slice(&60_000u16.to_le_bytes());
    }

    fn prefetch(&self, _: usize, _: usize) {}
}

impl OwnData for Zeros {
    fn len(&self) -> usize {
        1 << 20
    }

    fn copy_in(&mut self, _: usize, _: &[u8]) {}

    fn copy_back(&self, _: usize, _: &mut [u8]) {}
}

fn dripped_upon(drip: &Drip, messages: bool) -> Reader<Dripping> {
    Reader::new(ReaderParts {
        ring: PeerRing::new(drip.clone(), Zeros),
        head: Drip::default(),
        want_data: Drip::default(),
        state: Drip::default(),
        want_space: Drip::default(),
        writer_state: Drip::default(),
        start: 0,
        messages,
        ordering: FenceMode::Fences,
    })
}

#[test]
fn r23_record_that_drips_in_holds_a_call_up_for_a_bounded_time() {
    let drip = Drip { first: 8, looks_a_drop: 500, ..Drip::default() };
    assert_eq!(dripped_upon(&drip, true).recv(&mut vec![0; 60_000]), Ok(None));
    assert!(drip.looks.load(Relaxed) < 2000, "{:?} looks in one call", drip.looks);
}

#[test]
fn r23_stream_that_drips_in_holds_a_call_up_for_a_bounded_time() {
    let drip = Drip { first: 10_000, looks_a_drop: 8, ..Drip::default() };
    let read = dripped_upon(&drip, false).read(&mut vec![0; 60_000]).unwrap();
    assert!(read.is_some_and(|read| read >= 10_000), "{read:?}");
    assert!(drip.looks.load(Relaxed) < 2000, "{:?} looks in one call, which read {read:?}", drip.looks);
}

#[test]
fn r9_bytes_peeked_at_are_gone_once_their_writer_was_caught() {
    for messages in [false, true] {
        let (mut halves, mut pages) = victim(CAPACITY, messages, 0);
        pages.put_header(0, 100);
        pages.set_tail(112);
        assert!(halves.reader.in_place().peek().unwrap().is_some());
        pages.set_tail(1 << 40);
        assert!(halves.reader.refresh().is_err());
        halves.reader.in_place().consume(1);
        assert_eq!((halves.reader.position(), halves.reader.available()), (0, 0));
        assert!(halves.reader.read(&mut [0; 8]).is_err());
    }
}

#[test]
fn r22_what_was_found_is_shown_as_it_was_checked_whatever_its_writer_stored_since() {
    for messages in [false, true] {
        let (mut halves, mut pages) = victim(CAPACITY, messages, 0);
        pages.put_header(0, 100);
        pages.set_tail(112);
        assert_eq!(halves.reader.in_place().find(), Ok(true));
        pages.put_header(0, 1 << 40);
        pages.set_tail(1 << 40);
        let (first, second) = halves.reader.in_place().found().unwrap();
        assert_eq!(first.len() + second.len(), if messages { 100 } else { 112 });
        halves.reader.in_place().consume(0);
        assert_eq!(halves.reader.position(), if messages { 112 } else { 0 });
    }
}

/// Returns the clause and the value that were found wrong.
fn found<T: std::fmt::Debug>(result: Result<T, Error>) -> (&'static str, u64) {
    match result {
        Err(Error::Corrupt(corrupt)) => (corrupt.clause, corrupt.found),
        other => panic!("{other:?}"),
    }
}

#[test]
fn r7_tail_that_goes_back_or_runs_away_is_corrupt() {
    for start in [0, u64::MAX - 150] {
        for forged in [99, CAPACITY + 41, 39, 1 << 62] {
            let (mut halves, pages) = victim(CAPACITY, false, start);
            pages.set_tail(start.wrapping_add(100));
            assert_eq!(halves.reader.read(&mut [0; 40]), Ok(Some(40)));
            pages.set_tail(start.wrapping_add(forged));
            assert_eq!(found(halves.reader.refresh()), ("R-7", start.wrapping_add(forged)));
            assert_eq!(found(halves.reader.read(&mut [0; 40])), ("R-7", start.wrapping_add(forged)), "and stays so");
        }
    }
}

#[test]
fn r8_head_that_goes_back_or_runs_ahead_is_corrupt() {
    for start in [0, u64::MAX - 5000] {
        for forged in [1999, 4097 + 2000, 1 << 62] {
            let (mut halves, pages) = victim(CAPACITY, false, start);
            pages.set(words::READER_STATE, State::OPEN.encode());
            assert_eq!(halves.writer.write(&[0; 4096]), Ok(Some(4096)));
            pages.set(words::HEAD, start.wrapping_add(2000));
            assert_eq!(halves.writer.write(&[0; 3000]), Ok(Some(2000)));
            pages.set(words::HEAD, start.wrapping_add(forged));
            assert_eq!(found(halves.writer.write(b"x")), ("R-8", start.wrapping_add(forged)));
            pages.set(words::HEAD, start.wrapping_add(4096));
            assert_eq!(found(halves.writer.write(b"x")), ("R-8", start.wrapping_add(forged)), "and stays so");
        }
    }
}

#[test]
fn r20_head_inside_a_word_is_corrupt_where_there_are_records() {
    for (messages, caught) in [(true, true), (false, false)] {
        let (mut halves, pages) = victim(CAPACITY, messages, 0);
        pages.set(words::READER_STATE, State::OPEN.encode());
        let sent = if messages {
            halves.writer.send(&[1; 16]).unwrap().is_some()
        } else {
            halves.writer.write(&[1; 24]).unwrap() == Some(24)
        };
        assert!(sent);
        halves.writer.flush();
        pages.set(words::HEAD, 12);
        let read = halves.writer.reader().has_read_all();
        if caught {
            assert_eq!(found(read), ("R-20", 12));
        } else {
            assert_eq!(read, Ok(false), "of a stream any number of bytes may have been read");
        }
    }
}

#[test]
fn r20_r21_header_that_cannot_be_is_corrupt_and_the_longest_is_not() {
    let ask = |header: u64, tail: u64| {
        let (mut halves, mut pages) = victim(CAPACITY, true, 0);
        pages.data.put_word(0, header);
        pages.set_tail(tail);
        halves.reader.recv(&mut [0; CAPACITY as usize])
    };
    assert_eq!(ask(4088, 4096), Ok(Some(4088)));
    assert_eq!(ask(4088, 4088), Ok(None), "not whole yet");
    assert_eq!(found(ask(4089, 4096)), ("R-21", 4089));
    assert_eq!(found(ask(u32::MAX.into(), 8)), ("R-21", u32::MAX.into()), "at once, not when it is whole");
    assert_eq!(found(ask(1 << 32 | 8, 16)), ("R-20", 1 << 32 | 8));
    assert_eq!(found(ask(8, 12)), ("R-20", 12));
}
