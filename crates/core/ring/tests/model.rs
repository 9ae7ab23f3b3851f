// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random sequences of all operations of a pipe, compared with a model made of plain collections.
#![cfg(not(loom))]

mod common;

use std::{
    collections::VecDeque,
    io::{IoSlice, IoSliceMut},
    time::Duration,
};

use common::{Pair, next_ring, pair, pair_at};
use proptest::{prelude::*, sample::select};
use tombolo_layout::{record, state::Phase};
use tombolo_mem::Mapped;
use tombolo_ring::{
    Deadline, Error, FenceMode, FlushPolicy, Mode, OwnRing, Reader, Side, Spin, WaitContext, Waited, Woken, Writer,
    halves, wait,
};

/// Length of a piece: a number, or a difference from the largest that fits.
#[derive(Clone, Copy, Debug)]
enum Size {
    Bytes(usize),
    Full(isize),
}

#[derive(Clone, Debug)]
enum Op {
    Write(Size),
    WriteAtOnce(Size),
    WriteVectored(Vec<Size>),
    Reserve(Size, Size),
    Read(Size),
    ReadAtOnce(Size, bool),
    ReadVectored(Vec<Size>),
    Peek(Size),
    /// The next step of a move to a ring of so many bytes.
    Move(u64),
    /// The writer goes ahead to a ring of so many bytes, and the reader takes it.
    Ahead(u64),
    /// Resumes from so far behind the reader's position.
    Resume,
    Flush,
    Batch(u64),
}

fn size() -> impl Strategy<Value = Size> {
    prop_oneof![
        3 => (0usize..80).prop_map(Size::Bytes),
        3 => (0usize..3000).prop_map(Size::Bytes),
        1 => (3000usize..70_000).prop_map(Size::Bytes),
        2 => (-9isize..=9).prop_map(Size::Full),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => size().prop_map(Op::Write),
        2 => size().prop_map(Op::WriteAtOnce),
        2 => prop::collection::vec(size(), 0..4).prop_map(Op::WriteVectored),
        2 => (size(), size()).prop_map(|(reserved, committed)| Op::Reserve(reserved, committed)),
        6 => size().prop_map(Op::Read),
        2 => (size(), any::<bool>()).prop_map(|(size, whole)| Op::ReadAtOnce(size, whole)),
        2 => prop::collection::vec(size(), 0..4).prop_map(Op::ReadVectored),
        2 => size().prop_map(Op::Peek),
        3 => select(vec![4096, 8192, 65_536]).prop_map(Op::Move),
        1 => select(vec![4096, 8192, 65_536]).prop_map(Op::Ahead),
        1 => Just(Op::Resume),
        1 => Just(Op::Flush),
        1 => (0u64..10_000).prop_map(Op::Batch),
    ]
}

/// Returns where positions begin: also right before they wrap, as words, as wait words, and as numbers of 32 bits.
fn start() -> impl Strategy<Value = u64> {
    let near = [0, 1 << 32, 1 << 62, 1 << 63, 0u64];
    (select(near.to_vec()), 0u64..9000).prop_map(|(edge, before)| edge.wrapping_sub(before))
}

/// A pipe, its contents, and the progress of its move to another ring.
struct Model {
    writer: Writer<Mapped>,
    reader: Reader<Mapped>,
    messages: bool,
    stream: VecDeque<u8>,
    records: VecDeque<Vec<u8>>,
    next: u8,
    /// A ring that was announced, and not switched to yet.
    offered: Option<OwnRing<Mapped>>,
    /// Position at which the present ring began (H-3).
    switch_point: u64,
}

impl Model {
    fn new(messages: bool, start: u64) -> Self {
        let start = if messages { start & !7 } else { start };
        let Pair { writer, reader } = pair_at(4096, messages, start);
        let (stream, records) = Default::default();
        Self { writer, reader, messages, stream, records, next: 0, offered: None, switch_point: start }
    }

    fn len(&self, size: Size) -> usize {
        let full = if self.messages { self.writer.message_max() } else { self.writer.capacity() };
        match size {
            Size::Bytes(bytes) => bytes,
            Size::Full(off) => full.saturating_add_signed(off as i64) as usize,
        }
    }

    /// Returns bytes that were never the same before.
    fn bytes(&mut self, size: Size) -> Vec<u8> {
        let len = self.len(size);
        let bytes = (0..len).map(|at| self.next.wrapping_add((at * 7 + at / 251) as u8)).collect();
        self.next = self.next.wrapping_add(91);
        bytes
    }

    fn written(&mut self, bytes: &[u8]) {
        if self.messages {
            self.records.push_back(bytes.to_vec());
        } else {
            self.stream.extend(bytes);
        }
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Write(size) => {
                let bytes = self.bytes(*size);
                self.write(&[&bytes]);
            }
            Op::WriteAtOnce(size) if !self.messages => {
                let bytes = self.bytes(*size);
                self.write_at_once(&bytes);
            }
            Op::ReadAtOnce(size, whole) if !self.messages => self.read_at_once(self.len(*size), *whole),
            // Records have no such operation.
            Op::WriteAtOnce(_) | Op::ReadAtOnce(..) => {}
            Op::WriteVectored(sizes) => {
                let parts: Vec<Vec<u8>> = sizes.iter().map(|size| self.bytes(*size)).collect();
                self.write(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>());
            }
            Op::Reserve(reserved, committed) => self.reserve(*reserved, *committed),
            Op::Read(size) => self.read(&[self.len(*size)]),
            Op::ReadVectored(sizes) => self.read(&sizes.iter().map(|size| self.len(*size)).collect::<Vec<_>>()),
            Op::Peek(size) => self.peek(self.len(*size)),
            Op::Move(capacity) => self.go_on(*capacity),
            Op::Ahead(capacity) => self.go_ahead(*capacity),
            Op::Resume => self.resume(),
            Op::Flush => self.writer.flush(),
            Op::Batch(0) => self.writer.set_flush_policy(FlushPolicy::Immediate),
            Op::Batch(bytes) => {
                self.writer.set_flush_policy(FlushPolicy::Batch { bytes: *bytes, time: Duration::from_secs(1) });
            }
        }
        let _ = (self.writer.take_notification(), self.reader.take_notification());
        self.check();
    }

    /// Checks what each ring shows by itself, and that both sides and the model agree on the unread bytes.
    fn check(&self) {
        let (tail, head) = (self.writer.position(), self.reader.position());
        let begins = if (self.switch_point.wrapping_sub(head) as i64) > 0 { self.switch_point } else { head };
        assert!(tail.wrapping_sub(begins) <= self.writer.capacity(), "R-4: more than a ring published");
        let unread = if self.messages {
            self.records.iter().map(|payload| record::span(payload.len() as u64)).sum()
        } else {
            self.stream.len() as u64
        };
        assert_eq!(tail.wrapping_sub(head), unread);
    }

    fn write(&mut self, parts: &[&[u8]]) {
        let whole = parts.concat();
        let slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        if self.messages {
            let max = self.writer.message_max();
            let sent = match &slices[..] {
                [one] => self.writer.send(one),
                _ => self.writer.send_vectored(&slices),
            };
            match sent {
                Ok(Some(())) => self.written(&whole),
                Ok(None) => assert!(!self.records.is_empty() || self.unread_head(), "an empty ring refuses"),
                Err(Error::TooLarge { len, max: said }) => {
                    assert_eq!((len, said), (whole.len() as u64, max));
                    assert!(len > max);
                }
                Err(error) => panic!("{error}"),
            }
        } else {
            let written = match &slices[..] {
                [one] => self.writer.write(one),
                _ => self.writer.write_vectored(&slices),
            };
            match written.unwrap() {
                Some(n) => {
                    assert!(n <= whole.len() && (n > 0 || whole.is_empty()));
                    self.written(&whole[..n]);
                }
                None => assert!(!self.stream.is_empty() || self.unread_head(), "an empty ring refuses"),
            }
        }
    }

    fn write_at_once(&mut self, bytes: &[u8]) {
        let room = self.writer.capacity().saturating_sub(self.writer.in_flight());
        // The regular call must have seen the reader's state before.
        self.writer.write(&[]).unwrap();
        if self.writer.write_at_once(bytes) {
            self.written(bytes);
        } else {
            assert!(bytes.len() as u64 > room.min(16 << 10), "{} bytes refused where {room} fit", bytes.len());
        }
    }

    fn read_at_once(&mut self, len: usize, whole: bool) {
        let mut buffer = vec![0; len];
        let done = self.reader.read_at_once(&mut buffer, whole);
        assert!(!whole || done == 0 || done == len);
        assert_eq!(buffer[..done], self.stream.drain(..done).collect::<Vec<_>>());
    }

    /// Returns whether the reader has read more than it handed back: the writer then knows of less room than there is.
    fn unread_head(&self) -> bool {
        self.writer.in_flight() != 0
    }

    fn reserve(&mut self, reserved: Size, committed: Size) {
        let bytes = self.bytes(reserved);
        let fits = match self.writer.in_place().reserve(bytes.len()) {
            Ok(Some((first, second))) => {
                assert_eq!(first.len() + second.len(), bytes.len());
                first.copy_from_slice(&bytes[..first.len()]);
                second.copy_from_slice(&bytes[first.len()..]);
                true
            }
            Ok(None) => false,
            Err(Error::TooLarge { len, max }) => return assert!(len == bytes.len() as u64 && len > max),
            Err(error) => panic!("{error}"),
        };
        if fits {
            let len = self.len(committed).min(bytes.len());
            self.writer.in_place().commit(len).unwrap();
            self.written(&bytes[..len]);
        }
    }

    fn read(&mut self, lens: &[usize]) {
        let mut buffers: Vec<Vec<u8>> = lens.iter().map(|len| vec![0; *len]).collect();
        if self.messages {
            let Some(buffer) = buffers.first_mut() else { return };
            match (self.reader.recv(buffer), self.records.front()) {
                (Ok(Some(n)), Some(expected)) => {
                    assert_eq!(buffer[..n], expected[..]);
                    self.records.pop_front();
                }
                (Ok(None), None) => {}
                (Err(Error::BufferTooSmall { len, buffer: given }), Some(expected)) => {
                    assert_eq!((len, given), (expected.len() as u64, buffer.len() as u64));
                    assert!(len > given);
                }
                (result, expected) => panic!("{result:?} where the model has {expected:?}"),
            }
            return;
        }
        let read = match &mut buffers[..] {
            [one] => self.reader.read(one),
            _ => {
                let mut slices: Vec<IoSliceMut<'_>> = buffers.iter_mut().map(|b| IoSliceMut::new(b)).collect();
                self.reader.read_vectored(&mut slices)
            }
        };
        let wanted = lens.iter().sum::<usize>();
        match read.unwrap() {
            Some(n) => {
                assert!(n <= wanted && (n > 0 || wanted == 0));
                assert_eq!(buffers.concat()[..n], self.stream.drain(..n).collect::<Vec<_>>());
            }
            None => assert!(self.stream.is_empty() && wanted > 0, "nothing read where there is something"),
        }
    }

    fn peek(&mut self, most: usize) {
        let Some((first, second)) = self.reader.in_place().peek().unwrap() else {
            return assert!(self.stream.is_empty() && self.records.is_empty(), "nothing seen where there is something");
        };
        let mut seen = vec![0; first.len() + second.len()];
        let (a, b) = seen.split_at_mut(first.len());
        first.copy_to(a);
        second.copy_to(b);
        if self.messages {
            assert_eq!(Some(seen), self.records.pop_front());
            self.reader.in_place().consume(0);
        } else {
            let n = most.min(seen.len());
            self.reader.in_place().consume(n);
            assert_eq!(seen[..n], self.stream.drain(..n).collect::<Vec<_>>());
        }
    }

    /// Moves to another ring one step at a time, so that everything else happens in between (H-1 to H-4).
    fn go_on(&mut self, capacity: u64) {
        if self.offered.is_none() {
            if self.writer.handover().can_offer().unwrap() {
                let generation = self.writer.handover().announce();
                let (own, seen) = next_ring(capacity, generation);
                assert_eq!(self.reader.handover().announced(), Ok(Some(generation)));
                self.reader.handover().prepare(generation, seen).unwrap();
                self.offered = Some(own);
            }
        } else if self.writer.handover().reader_ready().unwrap() {
            self.switch_point = self.writer.position();
            self.writer.handover().switch_to(self.offered.take().unwrap());
        }
    }

    /// The writer continues in a ring at once, and the reader takes it then (H-9).
    fn go_ahead(&mut self, capacity: u64) {
        if self.offered.is_none() && self.writer.handover().can_offer().unwrap() {
            let generation = self.writer.handover().next_generation();
            let (own, seen) = next_ring(capacity, generation);
            self.switch_point = self.writer.position();
            self.reader.handover().allow_ahead();
            self.writer.handover().go_ahead(own);
            assert_eq!(self.reader.handover().announced(), Ok(Some(generation)));
            self.reader.handover().prepare(generation, seen).unwrap();
        }
    }

    fn resume(&mut self) {
        let mut unread = vec![0xee; 3];
        self.writer.handover().unread_from(self.reader.position(), &mut unread).unwrap();
        let unread = &unread[3..];
        if !self.messages {
            return assert_eq!(unread, self.stream.iter().copied().collect::<Vec<_>>());
        }
        let mut at = 0;
        for expected in &self.records {
            let len = record::decode(unread[at..at + 8].try_into().unwrap()).unwrap() as usize;
            assert_eq!(unread[at + 8..at + 8 + len], expected[..]);
            at += record::span(len as u64) as usize;
        }
        assert_eq!(at, unread.len());
    }

    /// Checks that the rest comes out, then the end; and that a drained ring takes whatever fits into it.
    fn finish(mut self, abort: bool) {
        while !(self.stream.is_empty() && self.records.is_empty()) {
            self.peek(usize::MAX);
        }
        let mut one = [0; 1];
        let nothing = if self.messages { self.reader.recv(&mut one) } else { self.reader.read(&mut one) };
        assert_eq!(nothing, Ok(None));
        self.write(&[&vec![5; if self.messages { self.writer.message_max() } else { 1 } as usize]]);
        assert!(self.stream.len() + self.records.len() == 1, "R-3: a drained ring has no room");
        assert_eq!(self.reader.finished(), Ok(None));
        let phase = if abort { Phase::Aborted } else { Phase::Closed };
        if abort {
            self.writer.abort()
        } else {
            self.writer.close()
        }
        assert!(self.writer.take_notification(), "R-16: an end without a notification");
        assert_eq!(self.reader.finished(), Ok(None), "R-17: the end before the last byte");
        self.peek(1);
        assert_eq!(self.reader.finished(), Ok(Some(phase)));
        assert_eq!(self.writer.write(b"x"), Err(Error::Closed));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn r1_r2_r4_r17_h4_h6_stream_is_what_the_model_says(
        start in start(), ops in prop::collection::vec(op(), 0..120), abort: bool
    ) {
        let mut model = Model::new(false, start);
        for op in &ops {
            model.run(op);
        }
        model.finish(abort);
    }

    #[test]
    fn r20_r21_r22_h4_h6_messages_are_what_the_model_says(
        start in start(), ops in prop::collection::vec(op(), 0..120), abort: bool
    ) {
        let mut model = Model::new(true, start);
        for op in &ops {
            model.run(op);
        }
        model.finish(abort);
    }
}

#[test]
#[should_panic(expected = "left == right")]
fn r2_canary_model_finds_a_byte_that_changed() {
    let mut model = Model::new(false, 0);
    model.run(&Op::Write(Size::Bytes(100)));
    model.stream[50] ^= 1;
    model.run(&Op::Read(Size::Bytes(100)));
}

#[test]
fn r18_writer_learns_that_the_reader_closed_at_its_next_write() {
    for messages in [false, true] {
        let Pair { mut writer, mut reader } = pair(4096, messages);
        assert_eq!(writer.reader().is_closed(), Ok(false));
        reader.close();
        assert!(reader.take_notification(), "R-16");
        let refused = if messages { writer.send(b"x").map(|_| ()) } else { writer.write(b"x").map(|_| ()) };
        assert_eq!(refused, Err(Error::Closed));
        assert_eq!(writer.reader().is_closed(), Ok(true));
        assert_eq!(writer.position(), 0, "nothing was published");
    }
}

#[test]
fn r19_r22_record_cut_off_in_the_middle_ends_as_aborted() {
    // Hand-made pages show a writer that died between two steps of a record, as its peer sees it.
    let (mut halves, mut pages) = common::victim(4096, true, 0);
    pages.put_header(0, 100);
    pages.set_tail(48);
    pages.set_writer_state(Phase::Closed);
    let mut buffer = [0; 200];
    assert_eq!(halves.reader.recv(&mut buffer), Ok(None), "whole or not at all");
    assert_eq!(halves.reader.finished(), Ok(Some(Phase::Aborted)), "whatever the phase says");
    assert_eq!(halves.reader.position(), 0);
}

#[test]
fn r3_head_is_handed_back_by_an_eighth_and_by_an_empty_look() {
    let Pair { mut writer, mut reader } = pair(4096, false);
    assert_eq!(writer.write(&[7; 4096]), Ok(Some(4096)));
    let mut buffer = [0; 511];
    assert_eq!(reader.read(&mut buffer), Ok(Some(511)));
    assert_eq!(writer.write(b"x"), Ok(None), "less than an eighth is not worth a line");
    assert_eq!(reader.read(&mut buffer[..1]), Ok(Some(1)));
    assert_eq!(writer.write(&[8; 600]), Ok(Some(512)), "an eighth is");
    while reader.read(&mut buffer).unwrap().is_some() {}
    assert_eq!(writer.write(&[9; 5000]), Ok(Some(4096)), "an empty look hands back all");
}

#[test]
fn r3_look_that_finds_nothing_hands_back_all_whoever_looks() {
    type Look = fn(&mut Reader<Mapped>) -> Result<u64, Error>;
    for look in [(|reader| reader.refresh()) as Look, |reader| reader.handover().find_unread()] {
        let Pair { mut writer, mut reader } = pair(4096, false);
        assert_eq!(writer.write(&[7; 100]), Ok(Some(100)));
        assert_eq!(reader.read(&mut [0; 60]), Ok(Some(60)));
        assert_eq!(look(&mut reader), Ok(40));
        assert_eq!(writer.reader().is_drained().map(|_| writer.in_flight()), Ok(100), "some is left: nothing is due");
        assert_eq!(reader.read(&mut [0; 40]), Ok(Some(40)));
        assert_eq!(look(&mut reader), Ok(0));
        assert_eq!(writer.reader().is_drained(), Ok(true));
    }
}

#[test]
fn r6_what_was_checked_once_is_decided_by_until_it_is_not_enough() {
    let (mut halves, pages) = common::victim(4096, false, 0);
    pages.set_tail(100);
    let mut buffer = [0; 60];
    assert_eq!(halves.reader.read(&mut buffer), Ok(Some(60)));
    pages.set_tail(1 << 40);
    assert_eq!(halves.reader.read(&mut buffer[..40]), Ok(Some(40)), "known to be there");
    assert!(matches!(halves.reader.read(&mut buffer), Err(Error::Corrupt(corrupt)) if corrupt.clause == "R-7"));
    assert_eq!(halves.reader.position(), 100);
}

#[test]
fn r24_gathered_bytes_are_looked_after_at_the_bound_at_a_flush_and_before_a_wait() {
    let policy = FlushPolicy::Batch { bytes: 100, time: Duration::from_secs(3600) };
    let asleep = || {
        let Pair { mut writer, mut reader } = pair(4096, false);
        writer.set_flush_policy(policy);
        reader.arm(1);
        (writer, reader)
    };
    let (mut writer, _reader) = asleep();
    assert_eq!(writer.write(&[0; 60]), Ok(Some(60)));
    assert!(!writer.take_notification(), "gathered");
    assert_eq!(writer.write(&[0; 60]), Ok(Some(60)));
    assert!(writer.take_notification(), "the bound");

    let (mut writer, _reader) = asleep();
    assert_eq!(writer.write(&[0; 60]), Ok(Some(60)));
    writer.flush();
    assert!(writer.take_notification(), "the caller asked");

    let (mut writer, _reader) = asleep();
    assert_eq!(writer.write(&[0; 60]), Ok(Some(60)));
    writer.before_spin();
    assert!(writer.take_notification(), "before a wait");

    let (mut writer, mut reader) = asleep();
    assert_eq!(writer.write(&[0; 60]), Ok(Some(60)));
    assert_eq!(reader.read(&mut [0; 99]), Ok(Some(60)), "one who is awake sees it at once");
}

#[test]
fn r25_one_notification_for_one_target_however_much_is_written() {
    let Pair { mut writer, mut reader } = pair(65_536, false);
    reader.arm(10);
    let mut notifications = 0;
    for _ in 0..1000 {
        assert_eq!(writer.write(&[0; 7]), Ok(Some(7)));
        notifications += u32::from(writer.take_notification());
    }
    assert_eq!(notifications, 1);
}

#[test]
fn h1_h2_h3_h7_pipe_goes_on_in_the_next_ring_where_the_last_one_stopped() {
    let Pair { mut writer, mut reader } = pair(4096, false);
    assert_eq!(writer.write(&[1; 3000]), Ok(Some(3000)));
    let (own, seen) = next_ring(8192, 1);
    assert_eq!((writer.handover().can_offer(), writer.handover().announce()), (Ok(true), 1));
    assert!(writer.take_notification(), "H-1: notified");
    assert_eq!(writer.handover().can_offer(), Ok(false), "H-5");
    assert_eq!((writer.handover().reader_ready(), reader.handover().announced()), (Ok(false), Ok(Some(1))));
    reader.handover().prepare(1, seen).unwrap();
    assert!(reader.take_notification(), "H-2: notified");
    assert_eq!((writer.handover().reader_ready(), reader.handover().announced()), (Ok(true), Ok(None)));
    writer.handover().switch_to(own);
    assert!(writer.take_notification(), "H-3: notified");
    assert_eq!(writer.write(&[2; 9000]), Ok(Some(8192)), "the old ring's bytes do not count");
    assert_eq!(writer.handover().can_offer(), Ok(false), "H-7: the old ring is in use");
    let mut got = vec![0; 12_000];
    assert_eq!(reader.read(&mut got), Ok(Some(3000 + 8192)));
    assert!(got[..3000].iter().all(|byte| *byte == 1) && got[3000..11_192].iter().all(|byte| *byte == 2));
    assert_eq!((reader.capacity(), reader.read(&mut got)), (8192, Ok(None)));
    assert_eq!(writer.handover().can_offer(), Ok(true), "H-7: it is not any more");
}

#[test]
fn h2_offer_that_is_left_where_it_is_keeps_nobody_busy() {
    let Pair { mut writer, mut reader } = pair(4096, false);
    writer.handover().announce();
    assert_eq!(reader.ready(1), Ok(true), "something to tell");
    assert_eq!(reader.handover().announced(), Ok(Some(1)));
    assert_eq!(reader.ready(1), Ok(false), "told once");
    assert_eq!(writer.write(&[1; 10]), Ok(Some(10)), "the pipe stays where it is");
    assert_eq!(reader.read(&mut [0; 20]), Ok(Some(10)));
}

#[test]
fn h4_one_look_after_the_writer_has_moved_finds_what_is_in_the_new_ring() {
    type Look = fn(&mut Reader<Mapped>) -> Result<u64, Error>;
    let ready: Look = |reader| reader.ready(1).map(|ready| u64::from(ready) * reader.available());
    for look in [ready, |reader| reader.refresh(), |reader| reader.handover().find_unread()] {
        let Pair { mut writer, mut reader } = pair(4096, false);
        let (own, seen) = next_ring(8192, 1);
        writer.handover().announce();
        assert_eq!(reader.handover().announced(), Ok(Some(1)));
        reader.handover().prepare(1, seen).unwrap();
        assert_eq!(writer.handover().reader_ready(), Ok(true));
        writer.handover().switch_to(own);
        assert_eq!(writer.write(&[4; 100]), Ok(Some(100)));
        assert_eq!(look(&mut reader), Ok(100));
    }
}

#[test]
fn h5_next_ring_is_taken_also_by_a_reader_that_stopped_at_the_switch_point() {
    let Pair { mut writer, mut reader } = pair(4096, false);
    for generation in 1..5 {
        let (own, seen) = next_ring(4096, generation);
        assert_eq!((writer.handover().can_offer(), writer.handover().announce()), (Ok(true), generation));
        assert_eq!(reader.handover().announced(), Ok(Some(generation)));
        reader.handover().prepare(generation, seen).unwrap();
        assert_eq!(writer.handover().reader_ready(), Ok(true));
        assert_eq!(writer.write(&[3; 4096]), Ok(Some(4096)));
        writer.handover().switch_to(own);
        // The reader reads, and hands back, exactly up to the switch point, and has no reason to look further.
        assert_eq!(reader.read(&mut [0; 4096]), Ok(Some(4096)));
    }
}

#[test]
fn h9_writer_that_goes_ahead_writes_on_and_its_reader_finds_all_once_it_has_the_ring() {
    let Pair { mut writer, mut reader } = pair(4096, false);
    reader.handover().allow_ahead();
    assert_eq!(writer.write(&[1; 5000]), Ok(Some(4096)));
    let (own, seen) = next_ring(8192, 1);
    writer.handover().go_ahead(own);
    assert!(writer.take_notification(), "H-9: notified");
    assert_eq!(writer.write(&[2; 9000]), Ok(Some(8192)), "nobody has read yet");
    assert_eq!(writer.handover().can_offer(), Ok(false), "H-5");
    writer.close();
    // Before the reader has the new ring it reads what is in its own, and that is not the end.
    let mut got = vec![0; 20_000];
    assert_eq!(reader.ready(4097), Ok(true), "something to tell");
    assert_eq!(reader.read(&mut got), Ok(Some(4096)));
    assert_eq!((reader.read(&mut got), reader.finished()), (Ok(None), Ok(None)));
    assert!(reader.handover().is_behind());
    assert_eq!(
        writer.handover().can_offer(),
        Ok(false),
        "H-9: all was read of the old ring, and the new one is not taken"
    );
    assert_eq!(reader.handover().announced(), Ok(Some(1)));
    reader.handover().prepare(1, seen).unwrap();
    assert_eq!(reader.handover().find_unread(), Ok(8192));
    assert_eq!((reader.read(&mut got), reader.finished()), (Ok(Some(8192)), Ok(Some(Phase::Closed))));
    assert!(got[..8192].iter().all(|byte| *byte == 2));
}

#[test]
fn h9_writer_may_go_ahead_from_a_ring_that_the_reader_is_ready_for_and_has_not_entered() {
    let Pair { mut writer, mut reader } = pair(8192, false);
    reader.handover().allow_ahead();
    let (small, seen) = next_ring(4096, 1);
    writer.handover().announce();
    assert_eq!(reader.handover().announced(), Ok(Some(1)));
    reader.handover().prepare(1, seen).unwrap();
    assert_eq!(writer.handover().reader_ready(), Ok(true));
    writer.handover().switch_to(small);
    assert_eq!((writer.handover().can_offer(), writer.write(&[1; 5000])), (Ok(true), Ok(Some(4096))));
    let (large, seen) = next_ring(8192, 2);
    writer.handover().go_ahead(large);
    assert_eq!(writer.write(&[2; 5000]), Ok(Some(5000)));
    assert_eq!(reader.handover().find_unread(), Ok(4096));
    assert_eq!(reader.handover().announced(), Ok(Some(2)));
    reader.handover().prepare(2, seen).unwrap();
    assert_eq!(reader.handover().find_unread(), Ok(9096));
    assert_eq!(reader.ready(9096), Ok(true));
    assert_eq!(reader.ready(9097), Ok(false), "nobody is kept busy by what is there");
    let mut got = vec![0; 9096];
    assert_eq!(reader.read(&mut got), Ok(Some(9096)));
    assert!(got[..4096].iter().all(|byte| *byte == 1) && got[4096..].iter().all(|byte| *byte == 2));
}

#[test]
fn h5_generations_wrap() {
    let Pair { mut writer, mut reader } = pair(4096, false);
    for round in 1..=65_540u32 {
        let generation = round as u16;
        let (own, seen) = next_ring(4096, generation);
        assert_eq!((writer.handover().can_offer(), writer.handover().announce()), (Ok(true), generation));
        assert_eq!(reader.handover().announced(), Ok(Some(generation)));
        reader.handover().prepare(generation, seen).unwrap();
        assert_eq!(writer.handover().reader_ready(), Ok(true));
        writer.handover().switch_to(own);
    }
    assert_eq!(writer.write(b"still here"), Ok(Some(10)));
    assert_eq!(reader.read(&mut [0; 20]), Ok(Some(10)));
}

#[test]
fn h6_resume_outside_what_is_unread_is_refused() {
    let Pair { mut writer, mut reader } = pair_at(4096, false, u64::MAX - 10);
    assert_eq!(writer.write(&[1; 100]), Ok(Some(100)));
    let mut to = Vec::new();
    for from in [u64::MAX - 11, 90, 1 << 63] {
        let Err(Error::Corrupt(corrupt)) = writer.handover().unread_from(from, &mut to) else {
            panic!("resumed at {from}")
        };
        assert_eq!((corrupt.clause, to.len()), ("H-6", 0));
    }
    assert_eq!(reader.read(&mut [0; 60]), Ok(Some(60)));
    writer.handover().unread_from(reader.position(), &mut to).unwrap();
    assert_eq!(to, [1; 40]);
    let end = writer.position();
    writer.handover().unread_from(end, &mut to).unwrap();
    assert_eq!(to.len(), 40, "nothing is unread at the tail");
}

/// A waiter that sleeps only until it learns that nothing came.
#[derive(Default)]
struct Dozer {
    barriers: u32,
    sleeps: u32,
    shares_a_cpu: bool,
}

impl WaitContext for Dozer {
    type Error = Error;

    fn notify(&mut self) {}

    fn drain(&mut self) {}

    fn barrier(&mut self) {
        self.barriers += 1;
    }

    fn sleep(&mut self, _: Deadline) -> Result<Woken, Error> {
        self.sleeps += 1;
        Ok(Woken::TimedOut)
    }

    fn may_spin(&mut self) -> bool {
        !self.shares_a_cpu
    }
}

#[test]
fn r13_sleeper_issues_the_barrier_where_it_is_in_force_and_only_there() {
    for (ordering, barriers) in [(FenceMode::Fences, 0), (FenceMode::WaiterBarrier, 1)] {
        let ((own, _), (_peer, seen)) = (common::fresh(4096, 0, 0), common::fresh(4096, 0, 0));
        let mut reader = halves(own, &seen, Mode { messages: false, ordering }).unwrap().0.reader;
        let mut dozer = Dozer::default();
        let waited = wait(&mut reader, &mut dozer, &mut Spin::new(Duration::ZERO), 1, Deadline::NEVER);
        assert_eq!((waited, dozer.sleeps, dozer.barriers), (Ok(Waited::TimedOut), 1, barriers));
    }
}

#[test]
fn r14_end_that_shares_a_cpu_sleeps_at_once_and_one_that_does_not_spins_first() {
    for shares_a_cpu in [true, false] {
        let Pair { mut reader, .. } = pair(4096, false);
        let mut dozer = Dozer { shares_a_cpu, ..Dozer::default() };
        let waited = wait(&mut reader, &mut dozer, &mut Spin::default(), 1, Deadline::NEVER);
        assert_eq!((waited, dozer.sleeps), (Ok(Waited::TimedOut), 1));
        assert_eq!(reader.counters().spins_wasted, u64::from(!shares_a_cpu));
    }
}
