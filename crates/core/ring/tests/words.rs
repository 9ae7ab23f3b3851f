// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The contents of the segments after every possible operation (M-5), and which side fences, and how often.
#![cfg(not(loom))]
#![forbid(unsafe_code)]

mod common;

use std::{cell::Cell, collections::BTreeSet, time::Duration};

use common::{fresh, memory};
use tombolo_layout::{header, limits, words};
use tombolo_mem::{
    Mapped, MappedOwnWord, MappedPeerWord, Mem, OwnBytes, OwnWord, PeerBytes, PeerData, PeerSegment, PeerWord,
};
use tombolo_ring::{
    Deadline, Error, FenceMode, Halves, Mode, OwnRing, PeerRing, Reader, ReaderParts, Side, Spin, WaitContext, Waited,
    Woken, Writer, WriterParts, follow, halves, wait,
};

const CONTROL: usize = limits::CONTROL_LEN as usize;

/// Returns the offsets of the words behind the header that are not zero.
fn live(segment: &PeerSegment) -> BTreeSet<usize> {
    let mut control = [0; CONTROL];
    segment.data(0).copy_out(0, &mut control);
    let live = (header::LEN..CONTROL).filter(|at| control[*at] != 0);
    live.map(|at| at & !7).collect()
}

fn move_on(from: &mut Writer<Mapped>, to: &mut Reader<Mapped>, generation: u16) -> PeerSegment {
    let (own, seen) = fresh(8192, generation, 0);
    from.handover().announce();
    assert_eq!(to.handover().announced(), Ok(Some(generation)));
    to.handover().prepare(generation, follow(&seen, generation).unwrap().0).unwrap();
    assert_eq!(from.handover().reader_ready(), Ok(true));
    from.handover().switch_to(own.into_ring());
    seen
}

#[test]
fn m5_only_the_words_of_the_table_change_each_by_its_owner_and_the_rest_stays_zero() {
    // Far from zero, so that no byte of a word is zero by chance and a torn or misplaced word shows.
    let start = 0x0123_4567_89ab_cdef & !7;
    let ((a_own, a_seen), (b_own, b_seen)) = (fresh(4096, 0, start), fresh(4096, 0, start));
    let mode = Mode { messages: false, ordering: FenceMode::Fences };
    let (mut a, mut b): (Halves, Halves) =
        (halves(a_own, &b_seen, mode).unwrap().0, halves(b_own, &a_seen, mode).unwrap().0);
    // B only listens, so each word that A writes in a role must show in A's segment, and none in B's.
    let run = |writer: &mut Writer<Mapped>, reader: &mut Reader<Mapped>| {
        for round in 0..100 {
            reader.arm(1);
            while writer.write(&vec![0xa5; 1 + round * 40]).unwrap().is_some() {}
            writer.arm(1);
            while reader.read(&mut vec![0; 700 - round]).unwrap().is_some() {}
        }
    };
    run(&mut a.writer, &mut b.reader);
    a.own_cpu.store_relaxed(words::encode_cpu(0));
    let as_writer = [words::TAIL, words::WANT_SPACE, words::WRITER_STATE];
    let as_reader = [words::HEAD, words::WANT_DATA, words::READER_STATE];
    // Both began both halves: the positions and states of the idle pipe have their first values.
    let began = [words::TAIL, words::HEAD, words::WRITER_STATE, words::READER_STATE];
    assert_eq!(live(&a_seen), BTreeSet::from_iter(as_writer.into_iter().chain(began).chain([words::CPU])));
    assert_eq!(live(&b_seen), BTreeSet::from_iter(as_reader.into_iter().chain(began)));

    let word = |segment: &PeerSegment, at| segment.word(at).load_relaxed().hint();
    assert_eq!((word(&a_seen, words::HEAD), word(&b_seen, words::TAIL)), (start, start));
    assert_eq!((word(&a_seen, words::TAIL), word(&b_seen, words::HEAD)), (a.writer.position(), b.reader.position()));

    run(&mut b.writer, &mut a.reader);
    let next = move_on(&mut a.writer, &mut b.reader, 1);
    run(&mut a.writer, &mut b.reader);
    a.writer.close();
    b.writer.abort();
    a.reader.close();
    let all = BTreeSet::from_iter(as_writer.into_iter().chain(as_reader));
    assert_eq!(live(&a_seen), &all | &BTreeSet::from([words::CPU]));
    assert_eq!(live(&b_seen), all);
    assert_eq!(live(&next), BTreeSet::from([words::TAIL]), "of a later ring only the tail is used");
}

thread_local! {
    static FENCES: Cell<u32> = const { Cell::new(0) };
    static LIGHT: Cell<u32> = const { Cell::new(0) };
}

/// Returns the full fences and the light ones of this thread since the last call.
fn fences() -> (u32, u32) {
    (FENCES.take(), LIGHT.take())
}

/// Mapped memory that counts fences.
#[derive(Debug)]
enum Counted {}

impl Mem for Counted {
    type OwnWord = MappedOwnWord;
    type PeerWord = MappedPeerWord;
    type OwnData = OwnBytes;
    type PeerData = PeerBytes;

    fn fence() {
        FENCES.set(FENCES.get() + 1);
        Mapped::fence();
    }

    fn light_fence() {
        LIGHT.set(LIGHT.get() + 1);
        Mapped::light_fence();
    }

    fn pause() {
        Mapped::pause();
    }
}

fn counted(ordering: FenceMode) -> (Writer<Counted>, Reader<Counted>) {
    let ((writers, of_writer), (readers, of_reader)) = (memory(4096), memory(4096));
    let ((writers, data), (readers, _)) = (writers.split(CONTROL), readers.split(CONTROL));
    let writer = Writer::new(WriterParts {
        ring: OwnRing::new(writers.word(words::TAIL), data),
        want_space: writers.word(words::WANT_SPACE),
        state: writers.word(words::WRITER_STATE),
        head: of_reader.word(words::HEAD),
        want_data: of_reader.word(words::WANT_DATA),
        reader_state: of_reader.word(words::READER_STATE),
        start: 0,
        messages: false,
        ordering,
    });
    let reader = Reader::new(ReaderParts {
        ring: PeerRing::new(of_writer.word(words::TAIL), of_writer.data(CONTROL)),
        head: readers.word(words::HEAD),
        want_data: readers.word(words::WANT_DATA),
        state: readers.word(words::READER_STATE),
        want_space: of_writer.word(words::WANT_SPACE),
        writer_state: of_writer.word(words::WRITER_STATE),
        start: 0,
        messages: false,
        ordering,
    });
    (writer, reader)
}

/// A waiter that is woken twice for nothing, then not at all.
#[derive(Default)]
struct Sleepless {
    barriers: u32,
    sleeps: u32,
}

impl WaitContext for Sleepless {
    type Error = Error;

    fn notify(&mut self) {}

    fn drain(&mut self) {}

    fn barrier(&mut self) {
        self.barriers += 1;
    }

    fn sleep(&mut self, _: Deadline) -> Result<Woken, Error> {
        self.sleeps += 1;
        Ok(if self.sleeps < 3 { Woken::Notified } else { Woken::TimedOut })
    }

    fn may_spin(&mut self) -> bool {
        false
    }
}

#[test]
fn r12_r13_ringer_fences_once_a_publication_and_not_at_all_where_the_sleeper_issues_the_barrier() {
    for ordering in [FenceMode::Fences, FenceMode::WaiterBarrier] {
        let (mut writer, mut reader) = counted(ordering);
        let asymmetric = ordering == FenceMode::WaiterBarrier;
        let notifiers = |count| if asymmetric { (0, count) } else { (count, 0) };
        fences();
        for _ in 0..10 {
            assert_eq!(writer.write(&[1; 60]), Ok(Some(60)));
        }
        assert_eq!(fences(), notifiers(10), "the writer, as notifier for data");
        assert_eq!(reader.read(&mut [0; 511]), Ok(Some(511)));
        assert_eq!(fences(), (0, 0), "nothing handed back yet, nobody to look for");
        assert_eq!(reader.read(&mut [0; 89]), Ok(Some(89)));
        assert_eq!(fences(), notifiers(1), "the reader, as notifier for space");
        writer.close();
        assert_eq!(fences(), notifiers(1), "a state is fenced like a position");
    }
}

#[test]
fn r12_r13_sleeper_fences_or_issues_the_barrier_once_each_time_it_arms() {
    for ordering in [FenceMode::Fences, FenceMode::WaiterBarrier] {
        let (_writer, mut reader) = counted(ordering);
        let mut waiter = Sleepless::default();
        fences();
        let waited = wait(&mut reader, &mut waiter, &mut Spin::new(Duration::ZERO), 1, Deadline::NEVER);
        assert_eq!((waited, waiter.sleeps), (Ok(Waited::TimedOut), 3));
        let issued = if ordering == FenceMode::WaiterBarrier { (0, 3) } else { (3, 0) };
        assert_eq!((fences().0, waiter.barriers), issued);
    }
}
