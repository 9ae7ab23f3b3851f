// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Processes made by fork use one half of a pipe in turns, and die at any step of a turn (R-26, H-8).
//!
//! # Safety
//! The tests fork, because that is what they test. A child has only the forking thread, while locks that other threads
//! held stay locked for ever. It therefore takes none of these locks (it prints nothing, and glibc's allocator handles
//! forks itself), and it exits without a return into the test runner.
#![cfg(not(loom))]
#![allow(unsafe_code)]

mod common;

use std::{
    io::{PipeReader, PipeWriter, Read, Write, pipe},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use common::{Pair, memory, next_ring, pair, pair_at, victim};
use nix::{
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, Pid, fork},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Signal, getpid, kill_process},
};
use tombolo_layout::{
    limits, private,
    record::{decode, span},
    state::{Phase, State},
    words,
};
use tombolo_mem::{
    Mapped, MappedOwnWord, MappedPeerWord, Mem, OwnBytes, OwnData, OwnWord, PeerBytes, PeerData, Untrusted,
};
use tombolo_ring::{Error, FenceMode, OwnRing, PeerRing, Reader, ReaderParts, Record, Side, Writer, WriterParts};

const TURNS: u64 = 1000;
/// Exit code of a child that finds something wrong.
const WRONG: i32 = 77;

struct Child(Pid);

impl Child {
    /// Runs `body` in a process of its own, which ends with it.
    fn fork(body: impl FnOnce()) -> Self {
        // SAFETY: (async-signal-safe calls only) the exceptions are those that the module's doc argues for.
        match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => Self(child),
            ForkResult::Child => {
                let done = catch_unwind(AssertUnwindSafe(body));
                if let Err(panic) = &done {
                    let what = panic.downcast_ref::<String>().map_or("a child panicked", String::as_str);
                    let _ = rustix::io::write(rustix::stdio::stderr(), format!("{what}\n").as_bytes());
                }
                // SAFETY: ends the process here and now; nothing of the parent's is to be cleaned up.
                unsafe { nix::libc::_exit(if done.is_ok() { 0 } else { WRONG }) }
            }
        }
    }

    /// Waits for the end of the process. Returns whether it was killed.
    fn was_killed(self) -> bool {
        match waitpid(self.0, None).unwrap() {
            WaitStatus::Signaled(_, nix::sys::signal::Signal::SIGKILL, _) => true,
            WaitStatus::Exited(_, 0) => false,
            other => panic!("a child found something wrong: {other:?}"),
        }
    }
}

/// Passes a record from process to process: its holder has the lock.
struct Baton(PipeReader, PipeWriter);

fn batons() -> (Baton, Baton) {
    let ((a, to_a), (b, to_b)) = (pipe().unwrap(), pipe().unwrap());
    (Baton(a, to_b), Baton(b, to_a))
}

impl Baton {
    fn pass(&self, record: Record) {
        (&self.1).write_all(&record.encode()).unwrap();
    }

    fn await_record(&self) -> Record {
        let soon = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(
            poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&soon)),
            Ok(1),
            "the other's turn never ended"
        );
        let mut bytes = [0; private::LEN];
        (&self.0).read_exact(&mut bytes).unwrap();
        Record::decode(&bytes).expect("a record")
    }
}

/// Returns the bytes at `position` of every pipe here.
fn sequence(position: u64, len: usize) -> Vec<u8> {
    let byte = |offset| (position.wrapping_add(offset).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
    (0..len as u64).map(byte).collect()
}

/// Continues the sequence. Returns whether there was room.
fn put<M: Mem>(writer: &mut Writer<M>, messages: bool, len: usize) -> bool {
    let bytes = sequence(writer.position(), len);
    if messages {
        return writer.send(&bytes).unwrap().is_some();
    }
    writer.write(&bytes).unwrap().is_some()
}

/// As [`put`], with a length from 1 to 700 derived from the position.
fn put_some<M: Mem>(writer: &mut Writer<M>, messages: bool) -> bool {
    let len = 1 + (writer.position().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize % 700;
    put(writer, messages, len)
}

/// Reads some of the sequence. Returns whether there was any.
fn get<M: Mem>(reader: &mut Reader<M>, messages: bool) -> bool {
    let (at, mut bytes) = (reader.position(), vec![0; 1 << 16]);
    let got = if messages { reader.recv(&mut bytes) } else { reader.read(&mut bytes[..300]) };
    let Some(len) = got.unwrap() else { return false };
    assert!(bytes[..len] == sequence(at, len), "not what was written at {at:#x}");
    true
}

#[test]
fn r26_h8_writer_that_two_processes_use_in_turns_loses_and_doubles_nothing() {
    for messages in [false, true] {
        let start = 0u64.wrapping_sub(80_000);
        let Pair { mut writer, mut reader } = pair_at(4096, messages, start);
        let (mine, childs) = batons();
        let child = Child::fork(|| {
            for _ in 0..TURNS {
                writer.load(&childs.await_record()).unwrap();
                for is_first in [true, false] {
                    assert!(put_some(&mut writer, messages));
                    assert_eq!(writer.take_notification(), is_first, "once for the reader's sleep");
                }
                childs.pass(writer.save());
            }
        });
        let mut record = writer.save();
        for _ in 0..TURNS {
            reader.arm(1);
            mine.pass(record);
            writer.load(&mine.await_record()).unwrap();
            assert!(put_some(&mut writer, messages));
            record = writer.save();
            assert!(!writer.take_notification(), "the other process notified for this sleep");
            while get(&mut reader, messages) {}
        }
        assert!(!child.was_killed());
        assert_eq!(reader.position(), writer.position());
        let counters = writer.counters();
        assert_eq!((counters.messages, counters.notifications_sent), (3 * TURNS, TURNS));
        assert_eq!(counters.bytes, reader.position().wrapping_sub(start));
    }
}

#[test]
fn r26_h8_reader_that_two_processes_use_in_turns_loses_and_doubles_nothing() {
    for messages in [false, true] {
        let Pair { mut writer, mut reader } = pair_at(4096, messages, 0u64.wrapping_sub(80_000));
        let (mine, childs) = batons();
        let child = Child::fork(|| {
            for _ in 0..TURNS {
                reader.load(&childs.await_record()).unwrap();
                for _ in 0..3 {
                    assert!(get(&mut reader, messages));
                }
                childs.pass(reader.save());
            }
        });
        let mut record = reader.save();
        for _ in 0..TURNS {
            while put_some(&mut writer, messages) {}
            writer.arm(1);
            mine.pass(record);
            reader.load(&mine.await_record()).unwrap();
            while get(&mut reader, messages) {}
            record = reader.save();
            assert_eq!(reader.position(), writer.position());
            assert_eq!(writer.reader().is_drained(), Ok(true), "all is handed back at the end of a turn");
        }
        assert!(!child.was_killed());
        assert_eq!(reader.counters().notifications_sent, TURNS, "once for each sleep of the writer, by whomever");
    }
}

/// Mapped memory of a process that dies before a store, a copy or a fence of its choice.
#[derive(Debug)]
enum Mortal {}

#[derive(Debug)]
struct MortalWord(MappedOwnWord);

#[derive(Debug)]
struct MortalBytes(OwnBytes);

#[derive(Debug)]
struct MortalView(PeerBytes);

/// Number of steps until the process dies.
static STEPS: AtomicU32 = AtomicU32::new(u32::MAX);

fn step() {
    if STEPS.fetch_sub(1, Relaxed) == 0 {
        kill_process(getpid(), Signal::KILL).unwrap();
    }
}

impl OwnWord for MortalWord {
    fn store_release(&self, value: u64) {
        step();
        self.0.store_release(value);
    }

    fn store_relaxed(&self, value: u64) {
        step();
        self.0.store_relaxed(value);
    }

    fn load(&self) -> u64 {
        self.0.load()
    }
}

impl OwnData for MortalBytes {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn copy_in(&mut self, offset: usize, from: &[u8]) {
        step();
        self.0.copy_in(offset, from);
    }

    fn put_word(&mut self, offset: usize, word: u64) {
        step();
        self.0.put_word(offset, word);
    }

    fn copy_back(&self, offset: usize, to: &mut [u8]) {
        self.0.copy_back(offset, to);
    }
}

impl PeerData for MortalView {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn copy_out(&self, offset: usize, to: &mut [u8]) {
        step();
        self.0.copy_out(offset, to);
    }

    fn word(&self, offset: usize) -> Untrusted<u64> {
        self.0.word(offset)
    }

    fn prefetch(&self, offset: usize, len: usize) {
        self.0.prefetch(offset, len);
    }
}

impl Mem for Mortal {
    type OwnWord = MortalWord;
    type PeerWord = MappedPeerWord;
    type OwnData = MortalBytes;
    type PeerData = MortalView;

    fn fence() {
        step();
        Mapped::fence();
    }

    fn light_fence() {
        step();
        Mapped::light_fence();
    }

    fn pause() {
        Mapped::pause();
    }
}

fn mortal_pair(capacity: u64, messages: bool) -> (Writer<Mortal>, Reader<Mortal>) {
    const DATA: usize = limits::CONTROL_LEN as usize;
    let ((writers, of_writer), (readers, of_reader)) = (memory(capacity), memory(capacity));
    let ((writers, data), (readers, _)) = (writers.split(DATA), readers.split(DATA));
    let (start, ordering) = (0, FenceMode::Fences);
    let writer = Writer::new(WriterParts {
        ring: OwnRing::new(MortalWord(writers.word(words::TAIL)), MortalBytes(data)),
        want_space: MortalWord(writers.word(words::WANT_SPACE)),
        state: MortalWord(writers.word(words::WRITER_STATE)),
        head: of_reader.word(words::HEAD),
        want_data: of_reader.word(words::WANT_DATA),
        reader_state: of_reader.word(words::READER_STATE),
        start,
        messages,
        ordering,
    });
    let reader = Reader::new(ReaderParts {
        ring: PeerRing::new(of_writer.word(words::TAIL), MortalView(of_writer.data(DATA))),
        head: MortalWord(readers.word(words::HEAD)),
        want_data: MortalWord(readers.word(words::WANT_DATA)),
        state: MortalWord(readers.word(words::READER_STATE)),
        want_space: of_writer.word(words::WANT_SPACE),
        writer_state: of_writer.word(words::WRITER_STATE),
        start,
        messages,
        ordering,
    });
    (writer, reader)
}

/// Returns how often the pipe ended whole, and how often aborted, where a process that held its writer died, over all
/// steps to die at.
fn writers_deaths(messages: bool, go_on: impl Fn(&mut Writer<Mortal>, &Record)) -> (u32, u32) {
    let (mut whole, mut aborted) = (0, 0);
    for steps in 0.. {
        let (mut writer, mut reader) = mortal_pair(1 << 16, messages);
        assert!(put(&mut writer, messages, 100) && put(&mut writer, messages, 50));
        while get(&mut reader, messages) {}
        reader.arm(1);
        let record = writer.save();
        let child = Child::fork(|| {
            STEPS.store(steps, Relaxed);
            writer.load(&record).unwrap();
            // The second is published in steps.
            for len in [500, 40_000, 9] {
                assert!(put(&mut writer, messages, len));
            }
            writer.save();
        });
        if !child.was_killed() {
            break;
        }
        if steps % 2 == 0 {
            while get(&mut reader, messages) {}
        }
        go_on(&mut writer, &record);
        if writer.is_finished() {
            while get(&mut reader, messages) {}
            assert_eq!((writer.send(b"more"), reader.finished()), (Err(Error::Closed), Ok(Some(Phase::Aborted))));
            aborted += 1;
        } else {
            assert!(put(&mut writer, messages, 77));
            while get(&mut reader, messages) {}
            assert_eq!((reader.position(), reader.finished()), (writer.position(), Ok(None)));
            whole += 1;
        }
    }
    (whole, aborted)
}

fn rebuild(writer: &mut Writer<Mortal>, _: &Record) {
    writer.rebuild().unwrap();
    assert!(writer.take_notification(), "the dead process may have owed a notification");
}

#[test]
fn r26_writer_that_died_at_any_step_of_a_stream_is_continued_behind_what_it_published() {
    let (whole, aborted) = writers_deaths(false, rebuild);
    assert!(whole > 10 && aborted == 0, "{whole} whole, {aborted} aborted");
}

#[test]
fn r19_r22_r26_writer_that_died_within_a_record_aborts_and_between_two_goes_on() {
    let (whole, aborted) = writers_deaths(true, rebuild);
    assert!(whole > 5 && aborted > 5, "{whole} whole, {aborted} aborted");
}

#[test]
#[should_panic(expected = "Corrupt")]
fn r26_canary_record_that_is_believed_after_a_death_is_noticed() {
    writers_deaths(false, |writer, record| writer.load(record).unwrap());
}

#[test]
fn r26_reader_that_died_at_any_step_is_continued_from_what_it_handed_back() {
    for messages in [false, true] {
        let (mut deaths, mut again, mut handed_back) = (0, 0, 0);
        for steps in 0.. {
            let (mut writer, mut reader) = mortal_pair(4096, messages);
            while put(&mut writer, messages, 300) {}
            writer.arm(1);
            assert!(get(&mut reader, messages));
            let record = reader.save();
            let (mut told, tell) = pipe().unwrap();
            let child = Child::fork(|| {
                STEPS.store(steps, Relaxed);
                reader.load(&record).unwrap();
                while get(&mut reader, messages) {
                    (&tell).write_all(&reader.position().to_le_bytes()).unwrap();
                }
                reader.save();
            });
            drop(tell);
            if !child.was_killed() {
                break;
            }
            let mut delivered = Vec::new();
            told.read_to_end(&mut delivered).unwrap();
            let delivered = delivered.last_chunk().map_or(record.position, |last| u64::from_le_bytes(*last));

            reader.rebuild().unwrap();
            assert!(reader.take_notification(), "the dead process may have owed a notification");
            again += u32::from(reader.position() < delivered);
            handed_back += u32::from(reader.position() > record.position);
            // It may have died after it handed one more back, and before it could report that.
            let latest = delivered + span(300);
            assert!((record.position..=latest).contains(&reader.position()), "what nobody read is lost");
            while get(&mut reader, messages) {}
            assert_eq!((reader.position(), writer.reader().is_drained()), (writer.position(), Ok(true)));
            assert!(put(&mut writer, messages, 300) && get(&mut reader, messages));
            deaths += 1;
        }
        assert!(deaths > 15 && again > 2 && handed_back > 2, "{deaths} deaths, {again}, {handed_back}");
    }
}

#[test]
fn r26_h4_reader_is_found_in_the_ring_to_which_another_process_followed() {
    for dies in [false, true] {
        let Pair { mut writer, mut reader } = pair(4096, false);
        assert!(put(&mut writer, false, 1000));
        let (own, seen) = next_ring(8192, 1);
        writer.handover().announce();
        assert_eq!(reader.handover().announced(), Ok(Some(1)));
        reader.handover().prepare(1, seen).unwrap();
        assert_eq!(writer.handover().reader_ready(), Ok(true));
        writer.handover().switch_to(own);
        assert!(put(&mut writer, false, 5000));

        let (mine, childs) = batons();
        let record = reader.save();
        let child = Child::fork(|| {
            reader.load(&record).unwrap();
            while reader.position() < 4000 {
                assert!(get(&mut reader, false));
            }
            let record = reader.save();
            if dies {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            childs.pass(record);
        });
        if dies {
            assert!(child.was_killed());
            reader.rebuild().unwrap();
        } else {
            reader.load(&mine.await_record()).unwrap();
            assert!(!child.was_killed());
        }
        assert!(reader.position() >= 4000 && reader.capacity() == 8192);
        while get(&mut reader, false) {}
        assert_eq!((reader.position(), writer.reader().is_drained()), (6000, Ok(true)));
    }
}

#[test]
fn r26_record_of_another_half_pipe_or_ring_is_refused() {
    let Pair { mut writer, mut reader } = pair(4096, false);
    let (written, read) = (writer.save(), reader.save());
    assert!(matches!(writer.load(&read), Err(Error::ForeignRecord { .. })));
    assert!(matches!(reader.load(&written), Err(Error::ForeignRecord { .. })));
    let start = written.start + 8;
    assert!(matches!(writer.load(&Record { start, ..written }), Err(Error::ForeignRecord { .. })));
    let position = written.position + 4097;
    assert!(matches!(writer.load(&Record { position, ..written }), Err(Error::ForeignRecord { .. })));
    let peer_position = read.position.wrapping_sub(1);
    assert!(matches!(reader.load(&Record { peer_position, ..read }), Err(Error::ForeignRecord { .. })));
    let elsewhere = Err(Error::Elsewhere { at: 1, mapped: 0 });
    assert_eq!(writer.load(&Record { ring: 1, ..written }), elsewhere);
    assert_eq!(reader.load(&Record { ring: 1, ..read }), elsewhere);
    let state = State { ready: 1, ..read.state };
    assert_eq!(reader.load(&Record { state, ..read }), elsewhere);
    assert_eq!((writer.load(&written), reader.load(&read)), (Ok(()), Ok(())));
}

#[test]
fn r26_lies_that_a_rebuilding_process_meets_are_caught() {
    for messages in [false, true] {
        for head in [0, 8, 4088, 4089, 4104, 8192, 8200, u64::MAX] {
            let (mut victim, pages) = victim(4096, messages, 0);
            pages.set(words::READER_STATE, State::OPEN.encode());
            let first = victim.writer.save();
            for handed_back in [4096, 8192] {
                while put(&mut victim.writer, messages, 504) {}
                pages.set(words::HEAD, handed_back);
            }
            // Continues as a process that has seen nothing of this.
            victim.writer.load(&first).unwrap();
            pages.set(words::HEAD, head);
            match victim.writer.rebuild() {
                // Between two records, every position is a multiple of eight.
                Err(Error::Corrupt(corrupt)) => {
                    assert!(
                        corrupt.clause == "R-8" || messages && head % 8 != 0 && corrupt.clause == "R-20",
                        "{corrupt:?}"
                    );
                }
                other => assert!(other == Ok(()) && (4096..=8192).contains(&head), "{other:?} at {head}"),
            }
            let _ = (victim.writer.write(&[0; 9000]), victim.writer.save());
        }
        for tail in [1, 4096, 4097, 1 << 63, u64::MAX] {
            let (mut victim, pages) = victim(4096, messages, 0);
            pages.set_tail(tail);
            match victim.reader.rebuild() {
                Err(Error::Corrupt(corrupt)) => assert!(["R-7", "R-20"].contains(&corrupt.clause)),
                other => assert!(other == Ok(()) && tail <= 4096, "{other:?} at {tail}"),
            }
            let _ = (victim.reader.read(&mut [0; 9000]), victim.reader.save());
        }
    }
}

#[test]
fn r26_end_that_was_seen_in_one_turn_is_known_in_the_next() {
    let Pair { mut writer, mut reader } = pair(4096, false);
    let (writing, reading) = (writer.save(), reader.save());
    reader.close();
    assert_eq!(writer.write(b"to nobody"), Err(Error::Closed));
    let writing_closed = writer.save();
    // Back to the state before; then, as another process would, to the state after.
    writer.load(&writing).unwrap();
    writer.load(&writing_closed).unwrap();
    assert_eq!(writer.write(b"to nobody"), Err(Error::Closed));
    writer.close();
    assert_eq!(reader.finished(), Ok(Some(Phase::Closed)));
    let reading_closed = reader.save();
    reader.load(&reading).unwrap();
    reader.load(&reading_closed).unwrap();
    assert_eq!(reader.finished(), Ok(Some(Phase::Closed)));
}

#[test]
fn h6_h8_pipe_goes_on_over_memory_of_another_process_from_where_the_reader_stopped() {
    for messages in [false, true] {
        let Pair { mut writer, mut reader } = pair_at(4096, messages, 0u64.wrapping_sub(2000));
        while put_some(&mut writer, messages) {}
        for _ in 0..3 {
            assert!(get(&mut reader, messages));
        }
        // The reader's word is decisive; the writer's memory supplies the bytes.
        let resume = reader.position();
        let mut unread = Vec::new();
        writer.handover().unread_from(resume, &mut unread).unwrap();

        let Pair { writer: mut next_writer, reader: mut next_reader } = pair_at(8192, messages, resume);
        let mut rest = &unread[..];
        while messages && !rest.is_empty() {
            let (header, behind) = rest.split_at(8);
            let len = decode(header.try_into().unwrap()).unwrap();
            assert_eq!(next_writer.send(&behind[..len as usize]), Ok(Some(())));
            rest = &rest[span(len.into()) as usize..];
        }
        if !messages {
            assert_eq!(next_writer.write(rest), Ok(Some(rest.len())));
        }
        assert_eq!(next_writer.position(), writer.position(), "the same positions in the new segment");
        assert!(put(&mut next_writer, messages, 500));
        while get(&mut next_reader, messages) {}
        assert_eq!(next_reader.position(), next_writer.position());
    }
}
