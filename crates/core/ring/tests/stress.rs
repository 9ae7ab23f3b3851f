// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Real threads on real memory, for what a model checker cannot see: the mode in which the waiter's barrier replaces
//! the notifier's fence relies on the kernel's promise, and the CPU must agree with the model.
//!
//! A wake-up is lost if, in one race, the waiter decides to sleep and the notifier finds nobody to notify. The races
//! are run one by one with gaps of a few nanoseconds, so that no thread needs to sleep and a loss is seen without a
//! time-out. Each search has a canary without the fence or the barrier, which must find losses. `TOMBOLO_LONG=1`
//! searches ten times as long.
#![cfg(not(loom))]
#![forbid(unsafe_code)]

use std::{
    hint::{black_box, spin_loop},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Release, Ordering::SeqCst, compiler_fence, fence,
        },
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    thread::{CpuSet, MembarrierCommand, membarrier, sched_getaffinity, sched_setaffinity},
};
use tombolo_layout::{limits, state::Phase, words};
use tombolo_mem::{
    Mapped, MappedOwnWord, MappedPeerWord, Mem, OwnBytes, OwnControl, PeerBytes, PeerSegment, create_sealed,
};
use tombolo_ring::{
    Deadline, Error, FenceMode, OwnRing, PeerRing, Reader, ReaderParts, Side, Spin, WaitContext, Woken, Writer,
    WriterParts, arm, wait,
};

/// Mapped memory, with or without its fences.
trait Real:
    Mem<OwnWord = MappedOwnWord, PeerWord = MappedPeerWord, OwnData = OwnBytes, PeerData = PeerBytes> + 'static
{
}

impl Real for Mapped {}

/// A mutant.
#[derive(Debug)]
enum Unfenced {}

impl Real for Unfenced {}

impl Mem for Unfenced {
    type OwnWord = MappedOwnWord;
    type PeerWord = MappedPeerWord;
    type OwnData = OwnBytes;
    type PeerData = PeerBytes;

    fn fence() {
        compiler_fence(SeqCst);
    }

    fn light_fence() {
        compiler_fence(SeqCst);
    }

    fn pause() {
        spin_loop();
    }
}

const CAPACITY: u64 = limits::CAPACITY_MIN;

fn segment() -> (OwnControl, OwnBytes, PeerSegment) {
    let len = (limits::CONTROL_LEN + CAPACITY) as usize;
    let (own, fd) = create_sealed("tombolo-stress", len).unwrap();
    let peer = PeerSegment::map(fd.as_fd(), len).unwrap();
    let (control, data) = own.split(limits::CONTROL_LEN as usize);
    (control, data, peer)
}

fn pipe<M: Real>(messages: bool, ordering: FenceMode) -> (Writer<M>, Reader<M>) {
    let ((writers, data, seen_by_reader), (readers, _, seen_by_writer)) = (segment(), segment());
    let writer = Writer::new(WriterParts {
        ring: OwnRing::new(writers.word(words::TAIL), data),
        want_space: writers.word(words::WANT_SPACE),
        state: writers.word(words::WRITER_STATE),
        head: seen_by_writer.word(words::HEAD),
        want_data: seen_by_writer.word(words::WANT_DATA),
        reader_state: seen_by_writer.word(words::READER_STATE),
        start: 0,
        messages,
        ordering,
    });
    let reader = Reader::new(ReaderParts {
        ring: PeerRing::new(seen_by_reader.word(words::TAIL), seen_by_reader.data(limits::CONTROL_LEN as usize)),
        head: readers.word(words::HEAD),
        want_data: readers.word(words::WANT_DATA),
        state: readers.word(words::READER_STATE),
        want_space: seen_by_reader.word(words::WANT_SPACE),
        writer_state: seen_by_reader.word(words::WRITER_STATE),
        start: 0,
        messages,
        ordering,
    });
    (writer, reader)
}

/// Runs one test at a time, because each needs both CPUs. Reports the reason if it cannot have them.
fn two_cpus(test: &str) -> Option<(MutexGuard<'static, ()>, [usize; 2])> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let allowed = sched_getaffinity(None).unwrap();
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let (Some(first), Some(second)) = (cpus.next(), cpus.next()) else {
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIP {test} (needs two-cpus): this process may use one only\n"),
        );
        return None;
    };
    Some((alone, [first, second]))
}

fn run_on(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).unwrap();
}

/// As [`run_on`], with a barrier of the kernel that reaches that CPU: another process runs there for a moment.
/// Otherwise the barrier omits a CPU on which a thread of this process has ended (ADR 0086), as the threads of the
/// previous test have.
fn run_noted_on(cpu: usize) {
    run_on(cpu);
    assert!(std::process::Command::new("true").status().unwrap().success());
}

fn is_long() -> bool {
    std::env::var_os("TOMBOLO_LONG").is_some_and(|value| value == "1")
}

/// A small generator of gaps and lengths (xorshift), the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    /// Mostly a few nanoseconds, at times a microsecond.
    fn gap(&mut self) {
        let most = if self.below(4) == 0 { 4096 } else { 64 };
        for i in 0..self.below(most) {
            black_box(i);
        }
    }

    /// Waits up to `about`, within the error that a busy machine may have caused in its measurement, and then a few
    /// nanoseconds.
    fn gap_up_to(&mut self, about: Duration) {
        let most = about * (1 << self.below(7)) / 8;
        if !most.is_zero() {
            let until = Instant::now() + Duration::from_nanos(self.below(most.as_nanos() as u64));
            while Instant::now() < until {}
        }
        self.gap();
    }
}

/// The waiter's barrier: the CPU that runs the notifier passes a full fence.
fn kernel_barrier() {
    membarrier(MembarrierCommand::GlobalExpedited).unwrap();
}

/// A mutant.
fn no_barrier() {
    compiler_fence(SeqCst);
}

/// A mutant: orders what the waiter does, not what the notifier does.
fn own_fence() {
    fence(SeqCst);
}

/// Has a barrier but never sleeps.
struct Sleepless(fn());

impl WaitContext for Sleepless {
    type Error = Error;

    fn notify(&mut self) {}

    fn drain(&mut self) {}

    fn barrier(&mut self) {
        (self.0)();
    }

    fn sleep(&mut self, _: Deadline) -> Result<Woken, Error> {
        unreachable!("races are armed for, not slept in")
    }

    fn may_spin(&mut self) -> bool {
        false
    }
}

/// A meeting point of two threads at each step: each reads what the other stored.
#[derive(Default)]
struct Meeting([Said; 2]);

/// Values of one thread, at even and at odd steps: by the time it stores the next, the other has read it.
#[derive(Default)]
#[repr(align(128))]
struct Said([AtomicU64; 2]);

impl Meeting {
    /// Stores `yes` for `step`, and waits for the other's value of the same step.
    fn at(&self, me: usize, step: u64, yes: bool) -> bool {
        let slot = (step % 2) as usize;
        self.0[me].0[slot].store(step << 1 | u64::from(yes), Release);
        let mut looks = 0u32;
        loop {
            let said = self.0[1 - me].0[slot].load(Acquire);
            if said >> 1 == step {
                return said & 1 == 1;
            }
            looks += 1;
            if looks % (1 << 14) == 0 { thread::yield_now() } else { spin_loop() }
        }
    }
}

/// Result of a search.
#[derive(Debug, Default)]
struct Found {
    races: u64,
    sleeps: u64,
    lost: u64,
}

/// Runs races for `time`, or until a wake-up is lost if that is enough. `notifier` returns whether it notified. It
/// waits a moment before it acts, so that it acts before, within and after the steps of a waiter that issues `barrier`.
fn race(
    cpus: [usize; 2],
    barrier: fn(),
    time: Duration,
    one_is_enough: bool,
    mut notifier: impl FnMut() -> bool + Send,
    mut waiter: impl FnMut(Waiter) -> bool,
) -> Found {
    let (meeting, moment, until) = (Meeting::default(), 2 * cost(cpus, barrier), Instant::now() + time);
    let before = sched_getaffinity(None).unwrap();
    let found = thread::scope(|scope| {
        scope.spawn(|| {
            run_noted_on(cpus[0]);
            let (mut dice, mut step) = (Dice(0x9e37_79b9_7f4a_7c15), 1);
            while !meeting.at(0, step, false) {
                dice.gap_up_to(moment);
                let notifies = notifier();
                meeting.at(0, step + 1, notifies);
                step += 2;
            }
        });
        run_noted_on(cpus[1]);
        let (mut found, mut dice, mut step) = (Found::default(), Dice(0xd1b5_4a32_d192_ed03), 1);
        loop {
            let over = found.races % 64 == 0 && Instant::now() >= until || one_is_enough && found.lost != 0;
            meeting.at(1, step, over);
            if over {
                break found;
            }
            dice.gap();
            let sleeps = waiter(Waiter::Race);
            let was_notified = meeting.at(1, step + 1, sleeps);
            found.races += 1;
            found.sleeps += u64::from(sleeps);
            found.lost += u64::from(sleeps && !was_notified);
            waiter(Waiter::Clear);
            step += 2;
        }
    });
    sched_setaffinity(None, &before).unwrap();
    found
}

/// Returns the cost of `barrier` while the other CPU runs this process: the median of the calls during which it did.
/// Less than a clock can measure counts as zero.
fn cost(cpus: [usize; 2], barrier: fn()) -> Duration {
    let (beats, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut costs = thread::scope(|scope| {
        scope.spawn(|| {
            run_on(cpus[0]);
            while !over.load(Acquire) {
                beats.fetch_add(1, Release);
            }
        });
        let measure = scope.spawn(|| {
            run_on(cpus[1]);
            let (mut costs, until) = (Vec::new(), Instant::now() + Duration::from_millis(500));
            while costs.len() < 200 && Instant::now() < until {
                let (beat, since) = (beats.load(Acquire), Instant::now());
                barrier();
                let took = since.elapsed();
                if beats.load(Acquire) != beat {
                    costs.push(took);
                }
            }
            over.store(true, Release);
            costs
        });
        measure.join().unwrap()
    });
    costs.sort_unstable();
    match costs.get(costs.len() / 2) {
        Some(cost) if *cost > Duration::from_micros(1) => *cost,
        // A system call that never met the other CPU at work: its usual cost when it does.
        Some(cost) if *cost > Duration::from_nanos(200) => Duration::from_micros(10),
        None => Duration::from_micros(10),
        Some(_) => Duration::ZERO,
    }
}

/// Tasks of a waiter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waiter {
    /// Arms, and reports whether it would sleep.
    Race,
    /// Makes the condition false again.
    Clear,
}

/// The reader waits for data, the writer publishes a record.
fn race_for_data<M: Real>(
    cpus: [usize; 2],
    ordering: FenceMode,
    barrier: fn(),
    time: Duration,
    one_is_enough: bool,
) -> Found {
    let (mut writer, mut reader) = pipe::<M>(true, ordering);
    let mut sent = 0u64;
    let notifier = move || {
        assert_eq!(writer.send(&sent.to_le_bytes()), Ok(Some(())));
        sent += 1;
        writer.take_notification()
    };
    let (mut received, mut record) = (0u64, [0; 8]);
    race(cpus, barrier, time, one_is_enough, notifier, move |what| match what {
        Waiter::Race => !arm(&mut reader, &mut Sleepless(barrier), 1).unwrap(),
        Waiter::Clear => {
            assert_eq!(reader.recv(&mut record), Ok(Some(8)));
            assert_eq!(u64::from_le_bytes(record), received);
            received += 1;
            let _ = reader.take_notification();
            false
        }
    })
}

/// The writer waits for space, the reader takes a record out of a full ring.
fn race_for_space<M: Real>(
    cpus: [usize; 2],
    ordering: FenceMode,
    barrier: fn(),
    time: Duration,
    one_is_enough: bool,
) -> Found {
    const SPAN: usize = (CAPACITY / 8) as usize;
    let payload = [7; SPAN - limits::RECORD_ALIGN as usize];
    let (mut writer, mut reader) = pipe::<M>(true, ordering);
    while writer.send(&payload).unwrap().is_some() {}
    let _ = writer.take_notification();
    let mut record = [0; SPAN];
    let notifier = move || {
        assert_eq!(reader.recv(&mut record), Ok(Some(payload.len())));
        reader.take_notification()
    };
    race(cpus, barrier, time, one_is_enough, notifier, move |what| match what {
        Waiter::Race => !arm(&mut writer, &mut Sleepless(barrier), SPAN as u64).unwrap(),
        Waiter::Clear => {
            assert_eq!(writer.send(&payload), Ok(Some(())));
            let _ = writer.take_notification();
            false
        }
    })
}

/// Long enough to find thousands of losses if losses were possible.
fn search(test: &str, find: impl FnOnce([usize; 2], Duration) -> Found) {
    let Some((_alone, cpus)) = two_cpus(test) else { return };
    let found = find(cpus, Duration::from_secs(if is_long() { 30 } else { 3 }));
    eprintln!("{test}: {found:?}");
    assert_eq!(found.lost, 0, "{found:?}");
    let (sleeps, races) = (found.sleeps, found.races);
    assert!(sleeps > 100 && races - sleeps > 100, "both must happen often: {found:?}");
}

/// As `search`, without the fence or barrier: ends with the first loss.
fn search_of_mutant(test: &str, find: impl FnOnce([usize; 2], Duration) -> Found) {
    let Some((_alone, cpus)) = two_cpus(test) else { return };
    // On two idle CPUs a loss is found within a second; the rest is for busy ones.
    let found = find(cpus, Duration::from_secs(60));
    eprintln!("{test}: {found:?}");
    assert!(found.lost > 0, "the search is blind: {found:?}");
}

fn has_membarrier(test: &str) -> bool {
    let registered = membarrier(MembarrierCommand::RegisterGlobalExpedited);
    if let Err(error) = registered {
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIP {test} (needs membarrier): {error}\n"),
        );
    }
    registered.is_ok()
}

#[test]
fn r12_race_for_data_with_fences_loses_no_wake_up() {
    search("data, fences", |cpus, time| race_for_data::<Mapped>(cpus, FenceMode::Fences, no_barrier, time, false));
}

#[test]
fn r12_race_for_space_with_fences_loses_no_wake_up() {
    search("space, fences", |cpus, time| race_for_space::<Mapped>(cpus, FenceMode::Fences, no_barrier, time, false));
}

#[test]
fn canary_r12_race_for_data_without_fences_loses_wake_ups() {
    let ordering = FenceMode::Fences;
    let find = |cpus, time| race_for_data::<Unfenced>(cpus, ordering, no_barrier, time, !is_long());
    search_of_mutant("data, no fences", find);
}

#[test]
fn canary_r12_race_for_space_without_fences_loses_wake_ups() {
    let ordering = FenceMode::Fences;
    let find = |cpus, time| race_for_space::<Unfenced>(cpus, ordering, no_barrier, time, !is_long());
    search_of_mutant("space, no fences", find);
}

#[test]
fn r13_race_for_data_with_the_sleepers_barrier_loses_no_wake_up() {
    if has_membarrier("data, membarrier") {
        let ordering = FenceMode::WaiterBarrier;
        let find = |cpus, time| race_for_data::<Mapped>(cpus, ordering, kernel_barrier, time, false);
        search("data, membarrier", find);
    }
}

#[test]
fn r13_race_for_space_with_the_sleepers_barrier_loses_no_wake_up() {
    if has_membarrier("space, membarrier") {
        let ordering = FenceMode::WaiterBarrier;
        let find = |cpus, time| race_for_space::<Mapped>(cpus, ordering, kernel_barrier, time, false);
        search("space, membarrier", find);
    }
}

#[test]
fn canary_r13_race_for_data_without_the_sleepers_barrier_loses_wake_ups() {
    let ordering = FenceMode::WaiterBarrier;
    for (barrier, test) in [(no_barrier as fn(), "data, no barrier"), (own_fence, "data, a fence for a barrier")] {
        search_of_mutant(test, |cpus, time| race_for_data::<Mapped>(cpus, ordering, barrier, time, !is_long()));
    }
}

#[test]
fn canary_r13_race_for_space_without_the_sleepers_barrier_loses_wake_ups() {
    let ordering = FenceMode::WaiterBarrier;
    for (barrier, test) in [(no_barrier as fn(), "space, no barrier"), (own_fence, "space, a fence for a barrier")] {
        search_of_mutant(test, |cpus, time| race_for_space::<Mapped>(cpus, ordering, barrier, time, !is_long()));
    }
}

/// Two eventfds, and a limit on the wait for the peer: a notification that has not come by then never will.
struct Doorbells {
    own: OwnedFd,
    peer: OwnedFd,
}

const PATIENCE: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

impl Doorbells {
    fn pair() -> [Self; 2] {
        let [a, b] = [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap());
        let [a2, b2] = [&a, &b].map(|doorbell| doorbell.try_clone().unwrap());
        [Self { own: a, peer: b }, Self { own: b2, peer: a2 }]
    }

    fn notify_if_owed(&mut self, side: &mut impl Side) {
        if side.take_notification() {
            self.notify();
        }
    }

    fn sleep_until(&mut self, side: &mut impl Side, need: u64) {
        wait(side, self, &mut Spin::new(Duration::ZERO), need, Deadline::NEVER).unwrap();
    }
}

impl WaitContext for Doorbells {
    type Error = Error;

    fn notify(&mut self) {
        rustix::io::write(&self.peer, &1u64.to_ne_bytes()).unwrap();
    }

    fn drain(&mut self) {
        let _ = rustix::io::read(&self.own, &mut [0; 8]);
    }

    fn barrier(&mut self) {
        kernel_barrier();
    }

    fn sleep(&mut self, _: Deadline) -> Result<Woken, Error> {
        let ready = poll(&mut [PollFd::new(&self.own, PollFlags::IN)], Some(&PATIENCE)).unwrap();
        assert_ne!(ready, 0, "a wake-up was lost, or the peer hangs");
        Ok(Woken::Notified)
    }

    fn may_spin(&mut self) -> bool {
        false
    }
}

/// Returns the bytes of a pipe by position, so that order and content are one check.
fn byte_at(position: u64) -> u8 {
    (position ^ position >> 8 ^ position >> 16) as u8
}

/// Sleeps and wakes for `time`: bursts with gaps, so that both endpoints wait at times.
fn soak(test: &str, ordering: FenceMode, messages: bool) {
    let Some((_alone, cpus)) = two_cpus(test) else { return };
    let time = Duration::from_secs(if is_long() { 20 } else { 2 });
    let (mut writer, mut reader) = pipe::<Mapped>(messages, ordering);
    let [mut writers, mut readers] = Doorbells::pair();
    let until = Instant::now() + time;
    let writing = thread::spawn(move || {
        run_on(cpus[0]);
        let (mut dice, mut position, mut bytes) = (Dice(0x2545_f491_4f6c_dd1d), 0u64, Vec::new());
        while Instant::now() < until {
            for _ in 0..=dice.below(20) {
                let len = if dice.below(8) == 0 { dice.below(CAPACITY - 8) } else { dice.below(64) };
                bytes.clear();
                bytes.extend((position..position + len).map(byte_at));
                let mut rest = &bytes[..];
                loop {
                    let done = if messages {
                        writer.send(rest).unwrap().map(|()| rest.len())
                    } else {
                        writer.write(rest).unwrap()
                    };
                    writers.notify_if_owed(&mut writer);
                    if let Some(n) = done {
                        rest = &rest[n..];
                        if rest.is_empty() {
                            break;
                        }
                    } else {
                        let need = if messages { tombolo_layout::record::span(len) } else { 1 };
                        writers.sleep_until(&mut writer, need);
                    }
                }
                position += len;
            }
            dice.gap();
        }
        writer.close();
        writers.notify_if_owed(&mut writer);
        (position, writer.counters())
    });
    let reading = thread::spawn(move || {
        run_on(cpus[1]);
        let (mut dice, mut position, mut bytes) = (Dice(0x8121_34bb_e7a5_1f0b), 0u64, vec![0; CAPACITY as usize]);
        loop {
            let got = if messages { reader.recv(&mut bytes) } else { reader.read(&mut bytes) }.unwrap();
            readers.notify_if_owed(&mut reader);
            if let Some(n) = got {
                for byte in &bytes[..n] {
                    assert_eq!(*byte, byte_at(position), "at {position}");
                    position += 1;
                }
                if dice.below(16) == 0 {
                    dice.gap();
                }
            } else if let Some(phase) = reader.finished().unwrap() {
                assert_eq!(phase, Phase::Closed);
                return (position, reader.counters());
            } else {
                let need = reader.need().unwrap();
                readers.sleep_until(&mut reader, need);
            }
        }
    });
    let ((written, of_writer), (read, of_reader)) = (writing.join().unwrap(), reading.join().unwrap());
    eprintln!("{test}: {written} bytes, sleeps of writer {}, of reader {}", of_writer.sleeps, of_reader.sleeps);
    assert_eq!(written, read);
    assert!(of_writer.sleeps > 0 && of_reader.sleeps > 0, "nobody slept: {of_writer:?} {of_reader:?}");
}

#[test]
fn r12_soak_with_fences_keeps_order_and_content() {
    soak("soak, stream, fences", FenceMode::Fences, false);
    soak("soak, records, fences", FenceMode::Fences, true);
}

#[test]
fn r13_soak_with_the_sleepers_barrier_keeps_order_and_content() {
    if has_membarrier("soak, membarrier") {
        soak("soak, stream, membarrier", FenceMode::WaiterBarrier, false);
        soak("soak, records, membarrier", FenceMode::WaiterBarrier, true);
    }
}
