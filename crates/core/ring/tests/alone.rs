// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests for Miri: pipes over memory of one process. Miri checks every access for its bounds, its alignment, its
//! aliases and its order among threads, with the stale values that weak memory allows.
//!
//! ```text
//! cargo xtask test miri
//! ```
//!
//! Without Miri they run over a memfd, so that code which does not compile is noticed.

use std::{io::IoSlice, thread};

use tombolo_layout::{Features, SegmentHeader, limits, state::Phase, words};
#[cfg(miri)]
use tombolo_mem::create_alone;
use tombolo_mem::{Mapped, OwnData, OwnWord, PeerData, PeerSegment, PeerWord};
use tombolo_ring::{FenceMode, Fresh, Halves, Mode, Reader, StatsPage, Writer, follow, halves};

const CAPACITY: u64 = limits::CAPACITY_MIN;

#[cfg(not(miri))]
fn create_alone(len: usize) -> (tombolo_mem::OwnSegment, PeerSegment) {
    let (own, memory) = tombolo_mem::create_sealed("tombolo-alone", len).unwrap();
    (own, PeerSegment::map(std::os::fd::AsFd::as_fd(&memory), len).unwrap())
}

fn fresh(generation: u16, start: u64, features: Features) -> (Fresh, PeerSegment) {
    let (own, seen) = create_alone((limits::CONTROL_LEN + CAPACITY) as usize);
    (Fresh::new(own, &SegmentHeader::new(CAPACITY, generation, start, features, 1)), seen)
}

fn ends(messages: bool, start: u64) -> [Halves; 2] {
    let mode = Mode { messages, ordering: FenceMode::Fences };
    let ((a, a_seen), (b, b_seen)) = (fresh(0, start, Features::STATISTICS), fresh(0, start, Features::STATISTICS));
    [halves(a, &b_seen, mode).unwrap().0, halves(b, &a_seen, mode).unwrap().0]
}

fn pipe(messages: bool, start: u64) -> (Writer<Mapped>, Reader<Mapped>) {
    let [a, b] = ends(messages, start);
    (a.writer, b.reader)
}

/// Returns bytes derived from their positions.
fn bytes(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|at| (at * 7 % 251) as u8).collect()
}

#[test]
fn r5_stream_of_all_lengths_crosses_the_wrap() {
    let (mut writer, mut reader) = pipe(false, u64::MAX - 100);
    let (mut at, mut out) = (0, vec![0; 2000]);
    for len in (0..40).chain([63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 1500, 1999, 1200, 1777]) {
        let sent = bytes(at, len);
        assert_eq!(writer.write(&sent).unwrap(), Some(len));
        assert!(reader.refresh().unwrap() >= len as u64);
        if len > 0 {
            assert_eq!(reader.read(&mut out[..len]).unwrap(), Some(len));
        }
        assert_eq!(out[..len], sent);
        at += len;
    }
    assert!(at as u64 > CAPACITY, "it wrapped");
}

#[test]
fn r22_records_cross_the_wrap_in_place_and_copied() {
    let (mut writer, mut reader) = pipe(true, 1 << 62);
    let mut out = vec![0; 1500];
    for (round, len) in [0, 1, 7, 8, 9, 700, 1200, 1500, 33, 900].into_iter().enumerate() {
        let sent = bytes(round, len);
        if round % 2 == 0 {
            writer.send_vectored(&[IoSlice::new(&sent[..len / 2]), IoSlice::new(&sent[len / 2..])]).unwrap().unwrap();
        } else {
            let (first, second) = writer.in_place().reserve(len).unwrap().unwrap();
            let middle = first.len();
            first.copy_from_slice(&sent[..middle]);
            second.copy_from_slice(&sent[middle..]);
            writer.in_place().commit(len).unwrap();
        }
        if round % 3 == 0 {
            let (first, second) = reader.in_place().peek().unwrap().unwrap();
            let middle = first.len();
            assert_eq!(middle + second.len(), len);
            first.copy_to(&mut out[..middle]);
            second.copy_to(&mut out[middle..len]);
            reader.in_place().consume(0);
        } else {
            assert_eq!(reader.recv(&mut out), Ok(Some(len)));
        }
        assert_eq!(out[..len], sent);
    }
}

/// The data are not atomics: positions must keep both sides from accessing the same bytes at once.
#[test]
fn r5_two_threads_never_access_the_same_bytes_at_once() {
    let (mut writer, mut reader) = pipe(false, 0);
    const TOTAL: usize = 3 * CAPACITY as usize;
    thread::scope(|scope| {
        scope.spawn(move || {
            let (all, mut at) = (bytes(0, TOTAL), 0);
            while at < TOTAL {
                match writer.write(&all[at..TOTAL.min(at + 700)]).unwrap() {
                    Some(n) => at += n,
                    None => thread::yield_now(),
                }
            }
            writer.close();
        });
        let (mut got, mut out) = (Vec::new(), [0; 500]);
        loop {
            match reader.read(&mut out).unwrap() {
                Some(n) => got.extend_from_slice(&out[..n]),
                None if reader.finished().unwrap() == Some(Phase::Closed) => break,
                None => thread::yield_now(),
            }
        }
        assert!(got == bytes(0, TOTAL));
    });
}

#[test]
fn h4_pipe_that_moves_keeps_its_bytes() {
    let (mut writer, mut reader) = pipe(false, 0);
    assert_eq!(writer.write(&bytes(0, 100)).unwrap(), Some(100));
    let (next, seen) = fresh(1, 0, Features::NONE);
    let generation = writer.handover().announce();
    assert_eq!(reader.handover().announced().unwrap(), Some(generation));
    reader.handover().prepare(generation, follow(&seen, generation).unwrap().0).unwrap();
    assert!(writer.handover().reader_ready().unwrap());
    writer.handover().switch_to(next.into_ring());
    assert_eq!(writer.write(&bytes(100, 100)).unwrap(), Some(100));
    let mut unread = Vec::new();
    writer.handover().unread_from(0, &mut unread).unwrap();
    assert_eq!(unread, bytes(0, 200));
    let mut got = [0; 200];
    assert_eq!(reader.read(&mut got).unwrap(), Some(200));
    assert_eq!(got[..], bytes(0, 200));
}

#[test]
fn c12_stats_pages_and_words_stand_where_they_should() {
    let [a, _b] = ends(false, 0);
    let (page, _): &(StatsPage, StatsPage) = a.boards.as_ref().unwrap();
    page.publish(&a.writer.counters());
    let (own, seen) = create_alone(8192);
    let (control, mut data) = own.split(4096);
    control.word(words::CPU).store_release(9);
    data.put_word(8, 11);
    assert_eq!((seen.word(words::CPU).load_acquire().hint(), seen.data(4096).word(8).hint()), (9, 11));
    assert!(!seen.word(words::CPU).is_lost());
}

/// A reader that reads unpublished bytes: Miri must refute it. The test runs only on request, because it ends the whole
/// program.
#[test]
#[ignore = "undefined behaviour, to see that it is found"]
fn canary_bytes_read_before_they_were_published() {
    let (own, seen) = create_alone(8192);
    let (_control, mut data) = own.split(4096);
    thread::scope(|scope| {
        scope.spawn(move || (0..64).for_each(|_| data.copy_in(0, &[7; 64])));
        (0..64).for_each(|_| seen.data(4096).copy_out(0, &mut [0; 64]));
    });
}
