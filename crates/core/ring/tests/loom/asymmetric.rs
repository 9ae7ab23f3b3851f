// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The order that endpoints on one kernel use: the notifier keeps only the compiler in order, and the waiter issues a
//! barrier that reaches the notifier's CPU.
//!
//! loom has no such barrier. The tests model the promise of the kernel's `membarrier` instead, and no more: while it
//! runs, each other thread passes a full fence at one point of its program. That point comes before or after the
//! thread's light fence. If before, everything that the thread does after its light fence sees all that the caller did
//! before the barrier. If after, the caller sees all that the thread did before its light fence. Each endpoint
//! therefore has a word that only the model knows. A light fence is a read-modify-write of the own word, and a barrier
//! is one of every endpoint's word. Those of one word are in one order, and the later one sees what came before the
//! earlier. Two light fences of different endpoints order nothing, as in reality.

use loom::{
    sync::atomic::{AtomicU64, Ordering as Order},
    thread,
};
use tombolo_layout::state::Phase;
use tombolo_mem::Mem;
use tombolo_ring::{FenceMode, Reader, Writer};

use crate::{
    check, check_large,
    doorbell::Doorbells,
    memory::{Bytes, Word},
    pipe::{Kind, Pipe, messages, notify_if_owed, read_two_and_close, recv, send, stream, write_and_drain},
};

/// The memory as endpoint `END` sees it; a mutant's light fence does nothing.
#[derive(Debug)]
pub enum Light<const END: usize, const SOUND: bool = true> {}

impl<const END: usize, const SOUND: bool> Mem for Light<END, SOUND> {
    type OwnWord = Word;
    type PeerWord = Word;
    type OwnData = Bytes;
    type PeerData = Bytes;

    fn fence() {
        unreachable!("nobody issues a fence where the waiter issues a barrier");
    }

    fn light_fence() {
        if SOUND {
            PASSED[END].fetch_add(1, Order::AcqRel);
        }
    }

    fn pause() {
        thread::yield_now();
    }
}

loom::lazy_static! {
    /// The word of each endpoint.
    static ref PASSED: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
}

/// Effect of an endpoint's barrier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Barrier {
    /// The kernel's promise holds.
    Sound,
    /// The barrier reaches no CPU but the caller's (ADR 0086). The sleep after it ends with a look, and the next
    /// barrier is sound: what the first one missed has become visible by then.
    LeavesOut,
    /// A mutant: the barrier fails, and the waiter sleeps all the same.
    Failed,
    /// A mutant: the barrier reaches no CPU but the caller's.
    Own,
}

impl Barrier {
    pub fn issue(self, end: usize) {
        if self != Self::Failed {
            PASSED[end].fetch_add(1, Order::AcqRel);
        }
        if self == Self::Sound {
            PASSED[1 - end].fetch_add(1, Order::AcqRel);
        }
    }
}

type Out<const SOUND: bool> = Writer<Light<0, SOUND>>;
type In<const SOUND: bool> = Reader<Light<1, SOUND>>;

/// Runs one writer, which is endpoint 0, and one reader, each on a thread of its own.
fn one_way<const WRITER: bool, const READER: bool>(
    kind: Kind,
    barriers: [Barrier; 2],
    write: impl FnOnce(&mut Out<WRITER>, &mut Doorbells) + 'static,
    read: impl FnOnce(&mut In<READER>, &mut Doorbells),
) {
    let pipe = Pipe::new(kind);
    let (mut writer, mut reader) = (pipe.writer_of(FenceMode::WaiterBarrier), pipe.reader_of(FenceMode::WaiterBarrier));
    let (mut writers, mut readers) = Doorbells::pair();
    (writers.barrier, readers.barrier) = (barriers[0], barriers[1]);
    let other = thread::spawn(move || write(&mut writer, &mut writers));
    read(&mut reader, &mut readers);
    other.join().unwrap();
}

fn records<const WRITER: bool, const READER: bool>(kind: Kind, barriers: [Barrier; 2], records: u8) {
    one_way::<WRITER, READER>(
        kind,
        barriers,
        move |writer, doorbells| (0..records).for_each(|i| send(writer, doorbells, &[i; 3]).unwrap()),
        move |reader, doorbells| (0..records).for_each(|i| assert_eq!(recv(reader, doorbells), Ok(Ok(vec![i; 3])))),
    );
}

const SOUND: [Barrier; 2] = [Barrier::Sound; 2];
/// Room for all records: only the reader waits.
const WIDE: usize = 64;
/// Room for one record: the writer waits as well.
const TIGHT: usize = 16;

#[test]
fn r13_records_through_a_ring_of_one_arrive_in_order() {
    for (count, switches) in [(2, 3), (3, 2)] {
        check("barrier, ring of one", switches, move || records::<true, true>(messages(TIGHT), SOUND, count));
    }
}

#[test]
fn r13_records_that_all_fit_arrive_in_order() {
    check("barrier, wide ring", 3, || records::<true, true>(messages(WIDE), SOUND, 3));
}

#[test]
fn r13_stream_that_ends_loses_nothing() {
    check("barrier, end of a stream", 2, || {
        one_way::<true, true>(
            stream(8),
            SOUND,
            |writer, doorbells| {
                crate::pipe::write_all(writer, doorbells, b"tombolo!!").unwrap();
                writer.close();
                notify_if_owed(writer, doorbells);
            },
            |reader, doorbells| {
                let all = crate::pipe::read(reader, doorbells, 8, usize::MAX);
                assert_eq!(all, Ok((b"tombolo!!".to_vec(), Some(Phase::Closed))));
            },
        );
    });
}

#[test]
fn r13_reader_that_closed_is_seen_by_one_who_waits_until_all_was_read() {
    check_large("barrier, drained", 3, || {
        one_way::<true, true>(messages(32), SOUND, write_and_drain, read_two_and_close);
    });
}

/// A request and its answer: each endpoint is notifier and waiter at once, over one pair of doorbells.
#[test]
fn r13_both_directions_at_once_over_one_pair_of_bells() {
    fn talk<M: Mem, N: Mem>(mut writer: Writer<M>, mut reader: Reader<N>, mut doorbells: Doorbells) {
        send(&mut writer, &mut doorbells, &[7; 3]).unwrap();
        assert_eq!(recv(&mut reader, &mut doorbells), Ok(Ok(vec![7; 3])));
    }
    check("barrier, both directions", 3, || {
        let (there, back) = (Pipe::new(messages(TIGHT)), Pipe::new(messages(TIGHT)));
        let (a, b) = Doorbells::pair();
        let order = FenceMode::WaiterBarrier;
        let (writer, reader) = (back.writer_of::<Light<1>>(order), there.reader_of::<Light<1>>(order));
        let other = thread::spawn(move || talk(writer, reader, b));
        talk(there.writer_of::<Light<0>>(order), back.reader_of::<Light<0>>(order), a);
        other.join().unwrap();
    });
}

#[test]
fn r13_late_look_finds_what_a_barrier_missed() {
    let missed = [Barrier::LeavesOut; 2];
    check_large("missed, ring of one", 3, move || records::<true, true>(messages(TIGHT), missed, 2));
    check("missed, wide ring", 3, move || records::<true, true>(messages(WIDE), missed, 2));
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r13_reader_that_sleeps_on_a_failed_barrier_is_refuted() {
    check("canary", 3, || records::<true, true>(messages(WIDE), [Barrier::Sound, Barrier::Failed], 2));
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r13_writer_that_sleeps_on_a_failed_barrier_is_refuted() {
    check("canary", 3, || records::<true, true>(messages(TIGHT), [Barrier::Failed, Barrier::Sound], 2));
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r13_barrier_that_reaches_only_the_sleeper_is_refuted() {
    check("canary", 3, || records::<true, true>(messages(WIDE), [Barrier::Sound, Barrier::Own], 2));
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r13_writer_that_rings_without_its_light_fence_is_refuted() {
    check("canary", 3, || records::<false, true>(messages(WIDE), SOUND, 2));
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r13_reader_that_rings_without_its_light_fence_is_refuted() {
    check("canary", 3, || records::<true, false>(messages(TIGHT), SOUND, 2));
}
