// SPDX-License-Identifier: Apache-2.0 OR MIT
//! SIGKILL, SIGSTOP and SIGCONT at random moments. The victim is this binary, started again.
//!
//! A victim writes a sequence that can be checked, and notes in a file, after each call has returned, how far it got.
//! Everything that it noted must arrive, in order.

mod common;

use std::{
    env, fs,
    io::{Read, Write},
    os::unix::{fs::FileExt, process::ExitStatusExt},
    path::PathBuf,
    process::{self, Command, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use common::{SOON, eventually, let_pass, noise};
use rustix::process::{Pid, Signal, kill_process};
use tombolo_channel::{
    Address, Backends, Channel, Deadline, Ending, Error, FlushPolicy, Liveness, MessageReceiver, MessageSender,
    Messages, Options, ReadHalf, Stream, WriteHalf,
};
use tombolo_domain_local::LocalDomain;

const ROLE: &str = "TOMBOLO_TEST_VICTIM";
/// Time within which a death must be detected.
const SEEN: Duration = Duration::from_millis(100);
/// Exit code of a victim whose peer sent something wrong.
const WRONG: i32 = 77;

fn backends() -> Backends {
    Backends::new().with(LocalDomain::new())
}

fn options() -> Options {
    Options::new().ring_size(16 << 10).wait_for_listener(Duration::from_millis(200))
}

/// Pseudo-random numbers that are the same for the same seed.
#[derive(Clone)]
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn pause(&mut self, most: Duration) {
        let_pass(Duration::from_micros(self.roll(most.as_micros() as u64)));
    }
}

/// Returns the bytes at `position` of every stream here.
fn sequence(position: u64, len: usize) -> Vec<u8> {
    let skip = (position % 8) as usize;
    let words = (position / 8..).flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    words.skip(skip).take(len).collect()
}

/// Returns the length of the message with this number.
fn message_len(number: u64) -> usize {
    Dice(number).roll(4000) as usize
}

/// A reading half that knows which data must come; a position is a byte's or a message's number.
enum Source {
    Bytes(ReadHalf),
    Records(MessageReceiver),
}

/// A writing half that continues the sequence.
enum Sink {
    Bytes(WriteHalf),
    Records(MessageSender),
}

impl Source {
    /// Takes the next data. Returns false at the end.
    fn next(&mut self, position: &mut u64) -> Result<bool, Error> {
        let mut buffer = [0; 5000];
        match self {
            Self::Bytes(half) => {
                let n = half.read_until(&mut buffer, Deadline::after(SOON))?;
                assert!(buffer[..n] == sequence(*position, n), "wrong bytes from {position} on");
                *position += n as u64;
                Ok(n != 0)
            }
            Self::Records(half) => {
                let Some(n) = half.recv_until(&mut buffer, Deadline::after(SOON))? else { return Ok(false) };
                let right = n == message_len(*position) && buffer[..n] == sequence(*position, n);
                assert!(right, "wrong message for number {position}");
                *position += 1;
                Ok(true)
            }
        }
    }

    fn ending(&self) -> Option<Ending> {
        match self {
            Self::Bytes(half) => half.ending(),
            Self::Records(half) => half.ending(),
        }
    }
}

impl Sink {
    fn put(&mut self, position: &mut u64, dice: &mut Dice) -> Result<(), Error> {
        let deadline = Deadline::after(SOON);
        match self {
            Self::Bytes(half) => {
                let most = if dice.roll(8) == 0 { 30_000 } else { 300 };
                let len = 1 + dice.roll(most) as usize;
                *position += half.write_until(&sequence(*position, len), deadline)? as u64;
            }
            Self::Records(half) => {
                half.send_until(&sequence(*position, message_len(*position)), deadline)?;
                *position += 1;
            }
        }
        Ok(())
    }

    /// At times moves to another ring, or pauses so that the peer falls asleep.
    fn vary(&mut self, dice: &mut Dice) -> Result<(), Error> {
        match dice.roll(60) {
            0..3 => {
                let size = 4096 << dice.roll(6);
                match match self {
                    Self::Bytes(half) => half.resize(size),
                    Self::Records(half) => half.resize(size),
                } {
                    Err(Error::Handover(_)) => Ok(()),
                    done => done,
                }
            }
            3 => {
                dice.pause(Duration::from_millis(2));
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Both kinds of channel, split alike.
trait Apart: Channel + Send {
    const ROLE: &str;
    fn apart(self) -> (Source, Sink);
}

impl Apart for Stream {
    const ROLE: &str = "stream";
    fn apart(self) -> (Source, Sink) {
        let (read, write) = self.into_split();
        (Source::Bytes(read), Sink::Bytes(write))
    }
}

impl Apart for Messages {
    const ROLE: &str = "messages";
    fn apart(self) -> (Source, Sink) {
        let (sender, receiver) = self.into_split();
        (Source::Records(receiver), Sink::Records(sender))
    }
}

/// Plays the part of a child process; does nothing in the parent.
#[test]
fn child_process() {
    let Ok(told) = env::var(ROLE) else { return };
    let words: Vec<_> = told.split(' ').collect();
    let [role, side, seed, address] = words[..] else { panic!("a role, a side, a seed and an address") };
    let address: Address = address.parse().unwrap();
    let dice = Dice(seed.parse().unwrap());
    match role {
        "stream" => victim(meet::<Stream>(side, &address), &address, dice),
        "messages" => victim(meet::<Messages>(side, &address), &address, dice),
        "leave" | "exit" => {
            let mut stream = meet::<Stream>(side, &address);
            stream.write_all(b"hello and goodbye").unwrap();
            if role == "exit" {
                process::exit(0);
            }
        }
        "echo" => {
            let (mut buffer, mut stream) = ([0; 5000], meet::<Stream>(side, &address));
            while let Ok(n @ 1..) = stream.read(&mut buffer) {
                stream.write_all(&buffer[..n]).unwrap();
            }
        }
        other => panic!("no such role: {other}"),
    }
}

fn meet<C: Channel>(side: &str, address: &Address) -> C {
    if side == "connects" {
        return backends().connect(address, &options()).unwrap_or_else(|_| process::exit(0));
    }
    backends().listen(address, &options()).unwrap().accept().unwrap()
}

fn victim(channel: impl Apart, address: &Address, mut dice: Dice) {
    let (mut source, mut sink) = channel.apart();
    let mut other = dice.clone();
    let reader = thread::spawn(move || {
        let mut position = 0;
        // The peer outlives this process, so an end of the stream would be wrong.
        while let Ok(Ok(true)) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| source.next(&mut position))) {
            if other.roll(40) == 0 {
                other.pause(Duration::from_millis(2));
            }
        }
        process::exit(WRONG);
    });
    let note = fs::File::options().write(true).open(note_of(address)).unwrap();
    let mut position = 0u64;
    while sink.put(&mut position, &mut dice).and_then(|()| sink.vary(&mut dice)).is_ok() {
        note.write_at(&position.to_le_bytes(), 0).unwrap();
    }
    let _ = reader.join();
}

fn note_of(address: &Address) -> PathBuf {
    PathBuf::from(format!("{}.note", address.service()))
}

/// A place to meet, and the resources that must not have grown afterwards. One test runs at a time, because descriptors
/// are counted.
struct Scene {
    folder: tempfile::TempDir,
    address: Address,
    before: [usize; 2],
    _alone: MutexGuard<'static, ()>,
}

/// Returns the numbers of descriptors and mapped segments of this process.
fn belongings() -> [usize; 2] {
    let entries = |path| fs::read_dir(path).unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    [entries("/proc/self/fd"), maps.matches("memfd:tombolo").count()]
}

impl Scene {
    fn new() -> Self {
        static ONE: Mutex<()> = Mutex::new(());
        let _alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = belongings();
        let folder = tempfile::tempdir().unwrap();
        let address: Address = format!("local:{}/scene", folder.path().display()).parse().unwrap();
        Self { folder, address, before, _alone }
    }

    fn victim(&self, role: &str, side: &str, seed: u64) -> Victim {
        fs::write(note_of(&self.address), 0u64.to_le_bytes()).unwrap();
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "child_process", "--nocapture"])
            .env(ROLE, format!("{role} {side} {seed} {}", self.address))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Victim { child: child.unwrap(), note: note_of(&self.address) }
    }

    /// Checks that nothing is left: no descriptor, no memory, no file.
    fn leave(self) {
        // The next listener takes over what a killed listener left, and leaves nothing.
        drop(backends().listen::<Stream>(&self.address, &options()).unwrap());
        let _ = fs::remove_file(note_of(&self.address));
        let left: Vec<_> = fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "files left: {left:?}");
        assert_eq!(belongings(), self.before, "descriptors and mappings left");
    }
}

struct Victim {
    child: process::Child,
    note: PathBuf,
}

impl Victim {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Kills the process. Returns when the kill began.
    fn kill(&mut self) -> Instant {
        let at = Instant::now();
        self.signal(Signal::KILL);
        at
    }

    /// Returns how far the dead process got; its peer must not have sent anything wrong.
    fn noted(&mut self) -> u64 {
        let status = self.child.wait().unwrap();
        assert_ne!(status.code(), Some(WRONG), "the victim was sent something wrong");
        assert_eq!(status.signal(), Some(9), "{status}");
        u64::from_le_bytes(fs::read(&self.note).unwrap().try_into().unwrap())
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a death was detected.
struct Sight {
    /// Time after which both halves had detected it.
    took: Duration,
    /// Part of it that was due to other work of this machine. It is the time that the dying process, the reader and the
    /// writer waited for a CPU, as the kernel counts it, plus three times the lateness of a thread that only wanted to
    /// run a millisecond later.
    stall: Duration,
}

/// Returns how long a thread, given by its folder under /proc, has waited for a CPU so far, where the kernel counts
/// that.
fn queued(thread: &str) -> Duration {
    let counted = fs::read_to_string(format!("/proc/{thread}/schedstat")).unwrap_or_default();
    Duration::from_nanos(counted.split(' ').nth(1).and_then(|it| it.parse().ok()).unwrap_or_default())
}

/// Ticks once a millisecond until it is stopped. Returns the lateness of the latest tick.
fn metronome(stop: &AtomicBool) -> Duration {
    const TICK: Duration = Duration::from_millis(1);
    let mut latest = Duration::ZERO;
    while !stop.load(Ordering::Relaxed) {
        let since = Instant::now();
        let_pass(TICK);
        latest = latest.max(since.elapsed() - TICK);
    }
    latest
}

/// Continues until `victim` has died, which happens after `when`.
fn survive(channel: impl Apart, victim: &mut Victim, mut dice: Dice, when: Duration) -> Sight {
    let (mut source, mut sink) = channel.apart();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let stalls = scope.spawn(|| metronome(&over));
        let reader = scope.spawn(move || {
            let mut position = 0;
            while source.next(&mut position).expect("reading ends with the end of file") {}
            (Instant::now(), position, source.ending(), queued("thread-self"))
        });
        let writer = scope.spawn(move || {
            let mut position = 0;
            let error = loop {
                if let Err(error) = sink.put(&mut position, &mut dice).and_then(|()| sink.vary(&mut dice)) {
                    break error;
                }
            };
            (Instant::now(), error, queued("thread-self"))
        });
        let_pass(when);
        let dying = victim.child.id().to_string();
        let before = queued(&dying);
        let killed = victim.kill();
        let (wrote, read) = (writer.join(), reader.join());
        over.store(true, Ordering::Relaxed);
        let stall = 3 * stalls.join().unwrap();
        let ((wrote, error, writer), (read, arrived, ending, reader)) = (wrote.unwrap(), read.unwrap());
        // The process is dead, and not waited for yet.
        let stall = stall + writer + reader + queued(&dying).saturating_sub(before);
        assert!(matches!(error, Error::PeerGone | Error::Closed), "{error:?}");
        assert_eq!(ending, Some(Ending::ProcessGone));
        let noted = victim.noted();
        assert!(arrived >= noted, "{noted} were published, {arrived} arrived");
        Sight { took: wrote.max(read).saturating_duration_since(killed), stall }
    })
}

/// Runs one victim until its death. Returns `None` if it died before there was a channel.
fn one_kill<C: Apart>(scene: &Scene, mut dice: Dice) -> Option<Sight> {
    let listens = dice.roll(2) == 0;
    let early = dice.roll(8) == 0;
    let listener = (!listens).then(|| backends().listen::<C>(&scene.address, &options()).unwrap());
    let mut victim = scene.victim(C::ROLE, if listens { "listens" } else { "connects" }, dice.roll(1 << 30));
    if early {
        // At a moment between its start and its first words; what it has sent is drained, and the rest refused.
        dice.pause(Duration::from_millis(8));
        victim.kill();
    }
    let mut options = options();
    if !early {
        options = options.wait_for_listener(SOON);
    }
    if dice.roll(4) == 0 {
        options = options.flush_policy(FlushPolicy::Batch { bytes: 4096, time: Duration::from_millis(1) });
    }
    let channel = match listener {
        None => match backends().connect::<C>(&scene.address, &options) {
            Err(error) if !early => panic!("a victim that lives is not reached: {error}"),
            reached => reached.ok(),
        },
        Some(mut listener) if early => {
            victim.child.wait().unwrap();
            listener.try_accept().unwrap()
        }
        Some(mut listener) => Some(listener.accept_until(Deadline::after(SOON)).unwrap()),
    };
    let when = Duration::from_micros(dice.roll(12_000));
    channel.map(|channel| survive(channel, &mut victim, dice, when)).filter(|_| !early)
}

#[test]
fn c10_victim_killed_at_any_moment_leaves_what_it_published_then_the_end_within_100_ms() {
    let kills = if env::var_os("TOMBOLO_LONG").is_some() { 10_000 } else { 300 };
    let scene = Scene::new();
    let (since, mut seen) = (Instant::now(), Vec::new());
    for seed in 0..kills {
        let dice = Dice(seed * 1_000_003);
        let took = if seed % 2 == 0 { one_kill::<Stream>(&scene, dice) } else { one_kill::<Messages>(&scene, dice) };
        seen.extend(took);
    }
    scene.leave();
    let count = seen.len();
    assert!(count > kills as usize / 2, "too few under load");
    seen.sort_unstable_by_key(|sight: &Sight| sight.took);
    let (median, last) = (seen[count / 2].took, &seen[count - 1]);
    eprintln!(
        "{kills} kills in {:?}, {count} under load: seen after {median:?}, at most {:?} (this machine's stall then: {:?})",
        since.elapsed(),
        last.took,
        last.stall,
    );
    for Sight { took, stall } in seen {
        assert!(took <= SEEN + stall, "seen after {took:?}, in which this machine stalled for {stall:?}");
    }
}

#[test]
fn c10_what_an_end_wrote_before_it_left_arrives_however_it_left() {
    let scene = Scene::new();
    for (role, ending) in [("leave", Ending::Closed), ("exit", Ending::ProcessGone)].repeat(10) {
        let mut listener = backends().listen::<Stream>(&scene.address, &options()).unwrap();
        let mut victim = scene.victim(role, "connects", 0);
        let mut stream = listener.accept_until(Deadline::after(SOON)).unwrap();
        drop(listener);
        victim.child.wait().unwrap();
        read_goodbye(&mut stream, ending);

        let mut victim = scene.victim(role, "listens", 0);
        let patient = options().wait_for_listener(SOON);
        let mut stream: Stream = backends().connect(&scene.address, &patient).unwrap();
        victim.child.wait().unwrap();
        read_goodbye(&mut stream, ending);
    }
    scene.leave();
}

fn read_goodbye(stream: &mut Stream, ending: Ending) {
    let mut words = String::new();
    stream.read_to_string(&mut words).unwrap();
    assert_eq!((words.as_str(), stream.split().0.ending()), ("hello and goodbye", Some(ending)));
    assert!(stream.liveness().is_gone());
}

#[test]
fn c8_stopped_peer_costs_the_deadline_and_is_paused_a_dead_one_is_gone() {
    let scene = Scene::new();
    let mut listener = backends().listen::<Stream>(&scene.address, &options()).unwrap();
    let mut victim = scene.victim("echo", "connects", 0);
    let mut stream = listener.accept_until(Deadline::after(SOON)).unwrap();
    drop(listener);
    assert_eq!(stream.liveness(), Liveness::Running);
    victim.signal(Signal::STOP);
    eventually("it is stopped", || stream.liveness() == Liveness::Paused);

    let wait = Duration::from_millis(200);
    let (mut read, mut write) = stream.split();
    let since = Instant::now();
    write.write_all_until(&[7; 1000], Deadline::after(wait)).unwrap();
    assert!(matches!(read.read_until(&mut [0; 8], Deadline::after(wait)), Err(Error::TimedOut)));
    assert!((wait..SOON / 2).contains(&since.elapsed()), "{:?}", since.elapsed());
    let full = write.write_all_until(&[7; 64 << 10], Deadline::after(wait));
    assert!(matches!(full, Err(Error::TimedOut)));
    assert_eq!((read.ending(), stream.liveness()), (None, Liveness::Paused));

    victim.signal(Signal::CONT);
    (read, write) = stream.split();
    let mut echo = [0; 1000 + (16 << 10) - 1000];
    read.read_until(&mut echo, Deadline::after(SOON)).unwrap();
    write.write_all_until(b"x", Deadline::after(SOON)).unwrap();

    victim.signal(Signal::STOP);
    eventually("it is stopped", || stream.liveness() == Liveness::Paused);
    victim.kill();
    eventually("it is gone", || stream.liveness() == Liveness::ProcessGone);
    stream.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(stream.split().0.ending(), Some(Ending::ProcessGone));
    drop((stream, victim));
    scene.leave();
}

#[test]
fn c10_storm_of_stops_and_goes_loses_nothing() {
    let scene = Scene::new();
    let mut listener = backends().listen::<Stream>(&scene.address, &options()).unwrap();
    let victim = scene.victim("echo", "connects", 0);
    let (mut read, mut write) = listener.accept_until(Deadline::after(SOON)).unwrap().into_split();
    drop(listener);
    let data = noise(if env::var_os("TOMBOLO_LONG").is_some() { 512 << 20 } else { 128 << 20 }, 11);
    let mut stops = 0;
    thread::scope(|scope| {
        let writer = scope.spawn(|| write.write_all(&data));
        let reader = scope.spawn(|| {
            let mut echo = vec![0; data.len()];
            read.read_exact(&mut echo).unwrap();
            assert!(echo == data);
        });
        let mut dice = Dice(3);
        while !reader.is_finished() {
            victim.signal(Signal::STOP);
            dice.pause(Duration::from_millis(2));
            victim.signal(Signal::CONT);
            dice.pause(Duration::from_millis(1));
            stops += 1;
        }
        writer.join().unwrap().unwrap();
    });
    eprintln!("{} MiB came back through {stops} stops", data.len() >> 20);
    assert!(stops > 20);
    drop((read, write, victim));
    scene.leave();
}
