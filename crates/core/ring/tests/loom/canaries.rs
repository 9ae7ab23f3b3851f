// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mutants, made from outside by the memory, the side or the waiter: the model must refute each.

use std::rc::Rc;

use loom::thread;
use tombolo_layout::state::Phase;
use tombolo_mem::Mem;
use tombolo_ring::{Counters, Error, FenceMode, Reader, Side, Waits, Writer};

use crate::{
    check,
    doorbell::Doorbells,
    memory::{Fault, Sound},
    pipe::{
        BATCH, Pipe, messages, next_ring, notify_if_owed, read, read_two_and_close, recv, send, sleep_until, stream,
        write_all, write_and_drain,
    },
};

const RELAXED: loom::sync::atomic::Ordering = loom::sync::atomic::Ordering::Relaxed;

/// Sends two records through a pipe, by mutants or over altered views.
fn two_records<W: Mem + 'static, R: Mem + 'static>(
    capacity: usize,
    spoil: impl Fn(&mut Pipe, &mut Doorbells) + Send + Sync + 'static,
    writer_of: fn(&Pipe) -> Writer<W>,
    reader_of: fn(&Pipe) -> Reader<R>,
) {
    check("canary", 3, move || {
        let mut pipe = Pipe::new(messages(capacity));
        let (mut writers, mut readers) = Doorbells::pair();
        spoil(&mut pipe, &mut readers);
        let (mut writer, mut reader) = (writer_of(&pipe), reader_of(&pipe));
        let other = thread::spawn(move || {
            for i in 0..2 {
                send(&mut writer, &mut writers, &[i; 3]).unwrap();
            }
        });
        for i in 0..2 {
            assert_eq!(recv(&mut reader, &mut readers), Ok(Ok(vec![i; 3])));
        }
        other.join().unwrap();
    });
}

/// A writer sends one record more than there is room for: only it waits, and only the reader notifies.
fn room_for_one_more<W: Mem + 'static, R: Mem + 'static>(
    writer_of: fn(&Pipe) -> Writer<W>,
    reader_of: fn(&Pipe) -> Reader<R>,
) {
    check("canary", 3, move || {
        let pipe = Pipe::new(messages(TIGHT));
        let (mut writers, mut readers) = Doorbells::pair();
        let (mut writer, mut reader) = (writer_of(&pipe), reader_of(&pipe));
        send(&mut writer, &mut writers, &[0; 3]).unwrap();
        let other = thread::spawn(move || send(&mut writer, &mut writers, &[1; 3]).unwrap());
        assert_eq!(recv(&mut reader, &mut readers), Ok(Ok(vec![0; 3])));
        other.join().unwrap();
    });
}

/// A writer sends `records`, checks for the reader only at the end, and closes, over altered views.
fn record_and_close<W: Mem + 'static>(
    records: u8,
    notifies: bool,
    spoil: fn(&mut Pipe),
    writer_of: fn(&Pipe) -> Writer<W>,
) {
    check("canary", 3, move || {
        let mut pipe = Pipe::new(messages(64));
        spoil(&mut pipe);
        let (mut writers, mut readers) = Doorbells::pair();
        let (mut writer, mut reader) = (writer_of(&pipe), pipe.reader::<true>());
        // A check would fence, which hides what the state word must order by itself.
        writer.set_flush_policy(BATCH);
        let other = thread::spawn(move || {
            for i in 0..records {
                send(&mut writer, &mut writers, &[i; 3]).unwrap();
            }
            writer.close();
            if notifies {
                notify_if_owed(&mut writer, &mut writers);
            }
        });
        for i in 0..records {
            assert_eq!(recv(&mut reader, &mut readers), Ok(Ok(vec![i; 3])));
        }
        assert_eq!(recv(&mut reader, &mut readers), Ok(Err(Phase::Closed)));
        other.join().unwrap();
    });
}

/// A reader waits for two bytes at once, which are written one by one, over altered views.
fn two_bytes_for_one_sleep(spoil: fn(&mut Pipe)) {
    check("canary", 3, move || {
        let mut pipe = Pipe::new(stream(8));
        spoil(&mut pipe);
        let (mut writers, mut readers) = Doorbells::pair();
        let (mut writer, mut reader) = (pipe.writer::<true>(), pipe.reader::<true>());
        let other = thread::spawn(move || (1..=2).for_each(|i| write_all(&mut writer, &mut writers, &[i]).unwrap()));
        sleep_until(&mut reader, &mut readers, 2).unwrap();
        assert_eq!(read(&mut reader, &mut readers, 2, 2), Ok((vec![1, 2], None)));
        other.join().unwrap();
    });
}

/// A reader reads both of two records and closes, over altered views.
fn drained_by_one_who_closes(spoil: fn(&mut Pipe)) {
    check("canary", 3, move || {
        let mut pipe = Pipe::new(messages(32));
        spoil(&mut pipe);
        let (mut writers, mut readers) = Doorbells::pair();
        let (mut writer, mut reader) = (pipe.writer::<true>(), pipe.reader::<true>());
        let other = thread::spawn(move || write_and_drain(&mut writer, &mut writers));
        read_two_and_close(&mut reader, &mut readers);
        other.join().unwrap();
    });
}

/// Room for both records: the writer never waits.
const WIDE: usize = 64;
/// Room for one record: the writer waits for the reader.
const TIGHT: usize = 16;

#[test]
fn control_of_the_canaries_unspoilt_passes() {
    two_records(WIDE, |_, _| {}, Pipe::writer::<true>, Pipe::reader::<true>);
    two_records(TIGHT, |_, _| {}, Pipe::writer::<true>, Pipe::reader::<true>);
    room_for_one_more(Pipe::writer::<true>, Pipe::reader::<true>);
    record_and_close(1, true, |_| {}, Pipe::writer::<true>);
    two_bytes_for_one_sleep(|_| {});
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_notifier_that_remembers_one_notification_for_all_sleeps_is_refuted() {
    two_records(
        WIDE,
        |pipe, _| pipe.want_data.peer.fault = Fault::Sticks(Rc::default()),
        Pipe::writer::<true>,
        Pipe::reader::<true>,
    );
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_ringer_that_remembers_a_target_that_was_not_reached_is_refuted() {
    two_bytes_for_one_sleep(|pipe| pipe.want_data.peer.fault = Fault::Once(Rc::default()));
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_writer_that_rings_without_a_fence_is_refuted() {
    two_records(WIDE, |_, _| {}, Pipe::writer::<false>, Pipe::reader::<true>);
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_reader_that_waits_without_a_fence_is_refuted() {
    two_records(WIDE, |_, _| {}, Pipe::writer::<true>, Pipe::reader::<false>);
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_reader_that_rings_without_a_fence_is_refuted() {
    room_for_one_more(Pipe::writer::<true>, Pipe::reader::<false>);
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_writer_that_waits_without_a_fence_is_refuted() {
    room_for_one_more(Pipe::writer::<false>, Pipe::reader::<true>);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn canary_r5_tail_published_relaxed_is_refuted() {
    two_records(WIDE, |pipe, _| pipe.tail.own.publish = RELAXED, Pipe::writer::<true>, Pipe::reader::<true>);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn canary_r5_tail_loaded_relaxed_is_refuted() {
    two_records(WIDE, |pipe, _| pipe.tail.peer.acquire = RELAXED, Pipe::writer::<true>, Pipe::reader::<true>);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn canary_r5_head_published_relaxed_is_refuted() {
    two_records(TIGHT, |pipe, _| pipe.head.own.publish = RELAXED, Pipe::writer::<true>, Pipe::reader::<true>);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn canary_r5_head_loaded_relaxed_is_refuted() {
    two_records(TIGHT, |pipe, _| pipe.head.peer.acquire = RELAXED, Pipe::writer::<true>, Pipe::reader::<true>);
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_look_at_the_wait_word_before_publishing_is_refuted() {
    two_records(
        WIDE,
        |pipe, _| pipe.tail.own.hold_until_access_to(&mut pipe.want_data.peer),
        Pipe::writer::<true>,
        Pipe::reader::<true>,
    );
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_d4_bell_that_is_not_sticky_is_refuted() {
    two_records(WIDE, |_, doorbells| doorbells.sticky = false, Pipe::writer::<true>, Pipe::reader::<true>);
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r16_closing_without_ringing_is_refuted() {
    record_and_close(0, false, |_| {}, Pipe::writer::<true>);
}

/// An eventfd orders memory; a doorbell that does not would lose the end.
#[test]
#[should_panic(expected = "deadlock")]
fn canary_r16_closing_without_a_fence_is_refuted() {
    record_and_close(0, true, |_| {}, Pipe::writer::<false>);
}

#[test]
#[should_panic(expected = "assertion")]
fn canary_r16_state_before_the_final_tail_is_refuted() {
    record_and_close(
        1,
        true,
        |pipe| pipe.tail.own.hold_until_access_to(&mut pipe.writer_state.own),
        Pipe::writer::<true>,
    );
}

#[test]
#[should_panic(expected = "assertion")]
fn canary_r16_state_published_relaxed_is_refuted() {
    record_and_close(1, true, |pipe| pipe.writer_state.own.publish = RELAXED, Pipe::writer::<true>);
}

#[test]
#[should_panic(expected = "assertion")]
fn canary_r17_state_loaded_relaxed_is_refuted() {
    record_and_close(1, true, |pipe| pipe.writer_state.peer.acquire = RELAXED, Pipe::writer::<true>);
}

#[test]
#[should_panic(expected = "assertion")]
fn canary_r17_no_look_at_the_tail_after_the_state_is_refuted() {
    record_and_close(
        1,
        true,
        |pipe| pipe.tail.peer.do_not_load_after_end_in(&mut pipe.writer_state.peer),
        Pipe::writer::<true>,
    );
}

#[test]
#[should_panic(expected = "Closed")]
fn canary_r33_last_head_after_the_state_is_refuted() {
    drained_by_one_who_closes(|pipe| pipe.head.own.hold_until_access_to(&mut pipe.reader_state.own));
}

#[test]
#[should_panic(expected = "Closed")]
fn canary_r33_no_look_at_the_head_after_the_state_is_refuted() {
    drained_by_one_who_closes(|pipe| pipe.head.peer.do_not_load_after_end_in(&mut pipe.reader_state.peer));
}

/// A reader that does not look again once it has armed.
struct Careless<'a> {
    reader: &'a mut Reader<Sound>,
    armed: bool,
}

impl Side for Careless<'_> {
    type Mem = Sound;

    fn ready(&mut self, need: u64) -> Result<bool, Error> {
        Ok(!std::mem::take(&mut self.armed) && self.reader.ready(need)?)
    }

    fn arm(&mut self, need: u64) {
        self.armed = true;
        self.reader.arm(need);
    }

    fn before_sleep(&mut self) {
        self.reader.before_sleep();
    }

    fn take_notification(&mut self) -> bool {
        self.reader.take_notification()
    }

    fn ordering(&self) -> FenceMode {
        self.reader.ordering()
    }

    fn waits(&mut self) -> &mut Waits {
        self.reader.waits()
    }

    fn counted(&self) -> Counters {
        self.reader.counted()
    }
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_no_look_after_arming_is_refuted() {
    check("canary", 3, || {
        let pipe = Pipe::new(messages(WIDE));
        let (mut writers, mut readers) = Doorbells::pair();
        let (mut writer, mut reader) = (pipe.writer::<true>(), pipe.reader::<true>());
        let other = thread::spawn(move || send(&mut writer, &mut writers, &[7]).unwrap());
        sleep_until(&mut Careless { reader: &mut reader, armed: false }, &mut readers, 1).unwrap();
        assert_eq!(recv(&mut reader, &mut readers), Ok(Ok(vec![7])));
        other.join().unwrap();
    });
}

/// A writer goes ahead when its ring is full, over an altered view of its state.
fn gone_ahead(spoil: fn(&mut Pipe)) {
    check("canary", 2, move || {
        let mut pipe = Pipe::new(stream(8));
        let (own, seen) = next_ring(32);
        spoil(&mut pipe);
        let (mut writers, mut readers) = Doorbells::pair();
        let (mut writer, mut reader) = (pipe.writer::<true>(), pipe.reader::<true>());
        let other = thread::spawn(move || {
            write_all(&mut writer, &mut writers, &[1; 8]).unwrap();
            writer.handover().go_ahead(own);
            notify_if_owed(&mut writer, &mut writers);
            write_all(&mut writer, &mut writers, &[2; 8]).unwrap();
        });
        reader.handover().allow_ahead();
        let (mut seen, mut got) = (Some(seen), Vec::new());
        while got.len() < 16 {
            let mut piece = [0; 8];
            let read = reader.read(&mut piece).expect("assertion: an honest writer");
            notify_if_owed(&mut reader, &mut readers);
            if let Some(n) = read {
                got.extend_from_slice(&piece[..n]);
            } else if let Some(generation) = reader.handover().announced().unwrap() {
                reader.handover().prepare(generation, seen.take().unwrap()).expect("assertion: an honest writer");
                notify_if_owed(&mut reader, &mut readers);
            } else {
                sleep_until(&mut reader, &mut readers, 1).expect("assertion: an honest writer");
            }
        }
        assert_eq!(got, [[1; 8], [2; 8]].concat());
        other.join().unwrap();
    });
}

#[test]
fn control_of_the_canaries_that_go_ahead_unspoilt_passes() {
    gone_ahead(|_| {});
}

/// The reader would enter the ring before it can see where that begins, or read the old one to an earlier end.
#[test]
#[should_panic(expected = "assertion")]
fn canary_h9_ring_gone_ahead_to_published_relaxed_is_refuted() {
    gone_ahead(|pipe| pipe.writer_state.own.publish = RELAXED);
}
