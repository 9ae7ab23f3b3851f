// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A sleeper whose barrier fails does not rely on being rung: it looks again by itself, and not all the time.
//! The barrier is forbidden here after the channel was agreed upon, to one thread.

mod common;

use std::{
    collections::BTreeMap,
    io::Write as _,
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use common::{SOON, World};
use rustix::thread::{MembarrierCommand, membarrier};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use tombolo_channel::{Deadline, Error, ReadHalf};
use tombolo_domain::wait_readable;

/// How long nothing comes.
const QUIET: Duration = Duration::from_millis(300);
/// Looks in that time of one who looks every two milliseconds: on a busy machine fewer, never many more.
const LOOKS: std::ops::RangeInclusive<u64> = 10..=160;

const EPERM: u32 = 1;
#[cfg(target_arch = "x86_64")]
const MEMBARRIER: i64 = 324;
#[cfg(not(target_arch = "x86_64"))]
const MEMBARRIER: i64 = 283;

fn has_barrier(test: &str) -> bool {
    let has = membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok();
    if !has {
        // Around the capture of the test's output.
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

/// Runs `wait` on a thread of its own, with or without a barrier.
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

/// The clock that stood in for the barrier does not go on once there is one again.
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
