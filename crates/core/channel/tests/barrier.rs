// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A waiter whose barrier fails does not rely on a notification: it looks again by itself, at intervals. Here
//! the barrier is forbidden to one thread after the channel was agreed upon.
//!
//! Even where the barrier works it may have missed the peer: each wait therefore has one late look. The test plays a
//! peer that publishes and never notifies, like a peer that was missed.

mod common;

use std::{
    collections::BTreeMap,
    io::Write as _,
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use common::{SOON, World, let_pass, raw};
use rustix::thread::{MembarrierCommand, membarrier};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use tombolo_channel::{Deadline, Error, ReadHalf, Stream};
use tombolo_domain::{Endpoint, wait_readable};
use tombolo_layout::{
    Features,
    handshake::{Greeting, Message},
    words,
};
use tombolo_mem::{OwnControl, OwnWord};

/// Time in which nothing comes.
const QUIET: Duration = Duration::from_millis(300);
/// Number of looks in that time by a waiter that looks every two milliseconds: fewer on a busy machine, never many
/// more.
const LOOKS: std::ops::RangeInclusive<u64> = 10..=160;

const EPERM: u32 = 1;
#[cfg(target_arch = "x86_64")]
const MEMBARRIER: i64 = 324;
#[cfg(not(target_arch = "x86_64"))]
const MEMBARRIER: i64 = 283;

fn has_barrier(test: &str) -> bool {
    let has = membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok();
    if !has {
        // Written past the capture of the test's output.
        let skip = format!("SKIP {test} (needs membarrier): the kernel has none\n");
        std::io::stderr().write_all(skip.as_bytes()).unwrap();
    }
    has
}

/// Makes `membarrier` fail for this thread.
fn forbid_barrier() {
    let rules = BTreeMap::from([(MEMBARRIER, Vec::new())]);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(EPERM), arch).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
    assert!(membarrier(MembarrierCommand::GlobalExpedited).is_err());
}

/// Runs `wait` on a thread of its own, with the barrier or without it.
fn waits<T: Send>(forbidden: bool, wait: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let job = scope.spawn(|| {
            if forbidden {
                forbid_barrier();
            }
            wait()
        });
        job.join().unwrap()
    })
}

fn sleeps(read: &ReadHalf) -> u64 {
    read.statistics().counters.sleeps
}

#[test]
fn r13_sleeper_whose_barrier_failed_looks_again_by_itself() {
    if !has_barrier("r13_sleeper_whose_barrier_failed_looks_again_by_itself") {
        return;
    }
    for forbidden in [true, false] {
        let (server, mut client) = World::local().streams();
        let (mut read, _write) = server.into_split();
        let (waited, slept, read) = waits(forbidden, move || {
            let (since, before) = (Instant::now(), sleeps(&read));
            let nothing = read.read_until(&mut [0; 8], Deadline::after(QUIET));
            assert!(matches!(nothing, Err(Error::TimedOut)), "{nothing:?}");
            (since.elapsed(), sleeps(&read) - before, read)
        });
        assert!(waited >= QUIET, "gave up after {waited:?}");
        if forbidden {
            assert!(LOOKS.contains(&slept), "{slept} sleeps in {waited:?}");
        } else {
            assert!(slept <= 2, "{slept} sleeps although the barrier works");
        }
        client.split().1.write_all(&[7; 8]).unwrap();
        let (read, mut got) = (&mut { read }, [0; 8]);
        let got = waits(forbidden, || read.read_until(&mut got, Deadline::after(SOON)).unwrap());
        assert_eq!(got, 8);
    }
}

#[test]
fn r13_poller_whose_barrier_failed_looks_again_by_itself() {
    if !has_barrier("r13_poller_whose_barrier_failed_looks_again_by_itself") {
        return;
    }
    for forbidden in [true, false] {
        let (server, mut client) = World::local().streams();
        let (mut read, _write) = server.into_split();
        let (wakes, read) = waits(forbidden, move || {
            let fd = read.poll_fd().unwrap().try_clone_to_owned().unwrap();
            let (until, mut wakes) = (Deadline::after(QUIET), 0);
            while wait_readable(fd.as_fd(), until).unwrap() {
                wakes += 1;
                assert!(matches!(read.try_read(&mut [0; 8]), Ok(None)));
            }
            (wakes, read)
        });
        if forbidden {
            assert!(LOOKS.contains(&wakes), "{wakes} wake-ups in {QUIET:?}");
        } else {
            assert!(wakes <= 2, "{wakes} wake-ups although the barrier works");
        }
        client.split().1.write_all(&[7; 8]).unwrap();
        let read = &mut { read };
        let got = waits(forbidden, || {
            let mut got = None;
            while got.is_none() {
                assert!(wait_readable(read.poll_fd().unwrap(), Deadline::after(SOON)).unwrap(), "lost");
                got = read.try_read(&mut [0; 8]).unwrap();
            }
            got
        });
        assert_eq!(got, Some(8));
    }
}

/// The timer that replaced the barrier stops once the barrier works again.
#[test]
fn r13_poller_is_quiet_again_once_its_barrier_works() {
    if !has_barrier("r13_poller_is_quiet_again_once_its_barrier_works") {
        return;
    }
    let (server, _client) = World::local().streams();
    let (mut read, _write) = server.into_split();
    read.poll_fd().unwrap();
    let mut read = waits(true, move || {
        assert!(matches!(read.try_read(&mut [0; 8]), Ok(None)));
        read
    });
    let (until, mut wakes) = (Deadline::after(QUIET), 0);
    while wait_readable(read.poll_fd().unwrap(), until).unwrap() {
        wakes += 1;
        assert!(matches!(read.try_read(&mut [0; 8]), Ok(None)));
    }
    assert!(wakes <= 2, "{wakes} wake-ups");
}

/// A stream whose peer is played by the test, and the words by which the peer publishes.
struct Silent {
    stream: Stream,
    control: OwnControl,
    _link: Box<dyn Endpoint>,
}

impl Silent {
    fn new(features: Features) -> Self {
        let world = World::local();
        let mut listener = world.listen::<Stream>();
        let mut link = world.connect_raw();
        let offered = Features(Features::HANDOVER.0 | features.0);
        let hello = Message::Hello(Greeting { offered, ..raw::greeting() });
        let (control, _offer) = raw::send_with_segment(&mut *link, &hello.encode(), 0);
        let stream = listener.accept_until(Deadline::after(SOON)).unwrap();
        assert!(matches!(raw::receive_message(&mut *link), Ok(Message::Welcome(_))));
        Self { stream, control, _link: link }
    }

    /// Publishes bytes up to `tail`, and notifies nobody.
    fn publish(&self, tail: u64) {
        self.control.word(words::TAIL).store_release(tail);
    }

    /// Publishes a byte at about the time when the stream has fallen asleep. Returns whether the byte was found during
    /// the sleep; `None` if it came earlier.
    fn is_found_asleep(features: Features) -> Option<bool> {
        let silent = Self::new(features);
        thread::scope(|scope| {
            let Self { stream, control, _link } = silent;
            let reader = scope.spawn(move || {
                let (mut read, _write) = stream.into_split();
                let since = Instant::now();
                let got = read.read_until(&mut [0; 8], Deadline::after(QUIET)).unwrap();
                (sleeps(&read), got, since.elapsed())
            });
            let_pass(Duration::from_micros(700));
            control.word(words::TAIL).store_release(1);
            match reader.join().unwrap() {
                (0, ..) => None,
                // A wait that times out looks a last time.
                (_, got, waited) => {
                    assert_eq!(got, 1);
                    Some(waited < QUIET)
                }
            }
        })
    }
}

#[test]
fn r13_what_the_barrier_missed_is_found_by_a_late_look() {
    if !has_barrier("r13_what_the_barrier_missed_is_found_by_a_late_look") {
        return;
    }
    // On a busy machine the byte may come after the look; a real peer would then have seen that it must notify.
    let mut rounds = (0..40).map(|_| Silent::is_found_asleep(Features::MEMBARRIER));
    assert!(rounds.any(|found| found == Some(true)), "never found");
    // Canary: where both sides fence there is no late look.
    let fenced: Vec<_> = (0..40).filter_map(|_| Silent::is_found_asleep(Features::NONE)).take(2).collect();
    assert_eq!(fenced, [false; 2]);
}

#[test]
fn r13_who_polls_is_woken_for_a_late_look() {
    if !has_barrier("r13_who_polls_is_woken_for_a_late_look") {
        return;
    }
    let mut silent = Silent::new(Features::MEMBARRIER);
    let is_readable = |silent: &mut Silent, time| {
        let (read, _write) = silent.stream.split();
        wait_readable(read.poll_fd().unwrap(), Deadline::after(time)).unwrap()
    };
    let try_read = |silent: &mut Silent| silent.stream.split().0.try_read(&mut [0; 8]).unwrap();
    assert!(is_readable(&mut silent, SOON), "a new descriptor sends to look");
    let mut was_quiet = false;
    for tail in 1..=3 {
        assert_eq!(try_read(&mut silent), None);
        // The late look of the previous wait is over; on a busy machine that of this wait may be due already.
        was_quiet |= tail > 1 && !is_readable(&mut silent, Duration::ZERO);
        silent.publish(tail);
        assert!(is_readable(&mut silent, SOON), "what was published right after the arming");
        assert_eq!(try_read(&mut silent), Some(1));
    }
    assert!(was_quiet, "readable all the time");
    assert_eq!(try_read(&mut silent), None);
    // The timer of an earlier arming may expire first.
    let mut looks = 0;
    while is_readable(&mut silent, QUIET) {
        assert_eq!(try_read(&mut silent), None);
        looks += 1;
    }
    assert!((1..=2).contains(&looks), "{looks} looks");
    // After that look the peer would notify.
    silent.publish(4);
    assert!(!is_readable(&mut silent, QUIET), "looks on and on");
}
