// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Notifications for nothing, at full rate, cost a poller no more than a waiter: a number of wake-ups, then a nap after
//! each. Nothing is lost meanwhile.

mod common;

use std::{
    io::{Read, Write},
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use common::{SOON, World, noise};
use tombolo_channel::fast::FastRead;
use tombolo_channel::{Deadline, Error, Options, Stream};
use tombolo_domain::wait_readable;
use tombolo_testing::harsh::{HarshDomain, Hypervisor, Storm};

/// Least duration of a storm. On a machine with other load it continues until there were enough notifications for a
/// storm.
const ENDURED: Duration = Duration::from_millis(500);

/// Wake-ups before the first nap and those of the short naps.
const BEFORE_LONG_NAPS: usize = 64 + 5;

/// Returns the largest number of wake-ups in a storm of this duration: those, and one for each of the long naps; twice
/// that.
fn most_wakes(endured: Duration) -> usize {
    2 * (BEFORE_LONG_NAPS + endured.as_millis() as usize / 16)
}

/// A storm that a poller endures.
struct Endured<'a> {
    storm: &'a Storm,
    begun: Instant,
    /// Number of notifications by its beginning, and by the last look.
    notifications: [u64; 2],
    wakes: usize,
    /// Looks without a notification before them, because of other load on the machine: the doorbell is trusted again,
    /// and the storm begins anew.
    pauses: usize,
}

impl<'a> Endured<'a> {
    fn new(storm: &'a Storm) -> Self {
        Self { storm, begun: Instant::now(), notifications: [storm.notifications(), u64::MAX], wakes: 0, pauses: 0 }
    }

    /// Counts a look that the descriptor asked for, and does it.
    fn count_look<T>(&mut self, look: impl FnOnce() -> T) -> T {
        self.wakes += 1;
        self.pauses += usize::from(self.storm.notifications() == self.notifications[1]);
        let looked = look();
        self.notifications[1] = self.storm.notifications();
        looked
    }

    fn most_wakes(&self) -> usize {
        most_wakes(self.begun.elapsed()) + 2 * BEFORE_LONG_NAPS * self.pauses
    }

    /// Returns whether it was long enough, and a storm: without a pause it would cause far more looks than are allowed.
    fn is_over(&self) -> bool {
        let (endured, notifications) = (self.begun.elapsed(), self.storm.notifications() - self.notifications[0]);
        assert!(endured < 6 * SOON, "no storm: {notifications} notifications, {} pauses", self.pauses);
        let enough = (20 * most_wakes(ENDURED)).max(2 * most_wakes(endured)) as u64;
        endured >= ENDURED && notifications > enough
    }

    fn check(self) {
        let (most, notifications) = (self.most_wakes(), self.storm.notifications() - self.notifications[0]);
        eprintln!("{notifications} notifications, {} pauses, {} wake-ups of {most}", self.pauses, self.wakes);
        assert!(self.wakes < most, "{} wake-ups in {:?}, {most} at most", self.wakes, self.begun.elapsed());
    }
}

fn pair() -> (World, Stream, Stream) {
    let world = World::harsh();
    let (server, client) = world.pair_with(&Options::new().ring_size(4096));
    (world, server, client)
}

fn hypervisor(world: &World) -> (&Hypervisor, &HarshDomain) {
    let (hypervisor, a, _) = world.hypervisor.as_ref().unwrap();
    (hypervisor, a)
}

/// Checks that a poller of `fd` is seldom made to look for nothing.
fn endure(fd: impl AsFd, storm: &Storm, mut look: impl FnMut()) {
    let mut endured = Endured::new(storm);
    while !endured.is_over() {
        let until = Deadline::after(ENDURED / 10);
        while wait_readable(fd.as_fd(), until).unwrap() {
            endured.count_look(&mut look);
        }
    }
    endured.check();
}

#[test]
fn r25_storm_of_notifications_wakes_a_polling_reader_seldom() {
    let (world, server, mut client) = pair();
    let (mut read, _write) = server.into_split();
    let fd = read.poll_fd().unwrap().try_clone_to_owned().unwrap();
    let (hypervisor, a) = hypervisor(&world);
    let storm = hypervisor.storm(a);
    for round in 0..2 {
        endure(&fd, &storm, || assert!(matches!(read.try_read(&mut [0; 8]), Ok(None))));
        client.write_all(&[round; 8]).unwrap();
        let (mut got, since) = (None, Instant::now());
        while got.is_none() {
            assert!(wait_readable(fd.as_fd(), Deadline::after(SOON)).unwrap(), "lost");
            got = read.try_read(&mut [0; 8]).unwrap();
        }
        assert!(since.elapsed() < Duration::from_secs(2), "found after {:?}", since.elapsed());
    }
    drop(storm);
    // A late drain may wake it a few times more; then it is quiet and waits again.
    while wait_readable(fd.as_fd(), Deadline::after(Duration::from_millis(100))).unwrap() {
        assert!(matches!(read.try_read(&mut [0; 8]), Ok(None)));
    }
    client.write_all(&[7; 8]).unwrap();
    assert!(wait_readable(fd.as_fd(), Deadline::after(SOON)).unwrap());
    assert!(matches!(read.try_read(&mut [0; 8]), Ok(Some(8))));
}

#[test]
fn r25_storm_of_notifications_wakes_one_who_polls_for_so_many_bytes_seldom() {
    let (world, server, _client) = pair();
    let (mut read, _write) = server.into_split();
    let fd = read.poll_fd().unwrap().try_clone_to_owned().unwrap();
    let (hypervisor, a) = hypervisor(&world);
    let storm = hypervisor.storm(a);
    for quiet in [false, true] {
        endure(&fd, &storm, || {
            read.note_poll_readable();
            let there = if quiet { read.available_while_quiet(8) } else { read.available(8) };
            assert!(matches!(there, Ok(0)));
        });
    }
}

#[test]
fn r25_storm_of_notifications_wakes_a_polling_writer_seldom() {
    let (world, server, mut client) = pair();
    let (_read, mut write) = server.into_split();
    let fd = write.poll_fd().unwrap().try_clone_to_owned().unwrap();
    while write.try_write(&[7; 4096]).unwrap().is_some() {}
    let (hypervisor, a) = hypervisor(&world);
    let storm = hypervisor.storm(a);
    endure(&fd, &storm, || assert!(matches!(write.try_write(&[7; 8]), Ok(None))));
    client.read_exact(&mut [0; 4096]).unwrap();
    loop {
        assert!(wait_readable(fd.as_fd(), Deadline::after(SOON)).unwrap(), "lost");
        if write.try_write(&[7; 8]).unwrap().is_some() {
            break;
        }
    }
}

/// A waiter in a call naps as well: neither too seldom nor for too long.
#[test]
fn r25_storm_of_notifications_wakes_a_waiting_reader_seldom_and_not_too_seldom() {
    let (world, server, mut client) = pair();
    let (mut read, _write) = server.into_split();
    let (hypervisor, a) = hypervisor(&world);
    let storm = hypervisor.storm(a);
    let sleeps = |read: &tombolo_channel::ReadHalf| read.statistics().counters.sleeps as usize;
    // On a busy machine the waiter sleeps less often than otherwise: then the test repeats.
    let begun = Instant::now();
    loop {
        let (before, since) = (sleeps(&read), Instant::now());
        assert!(matches!(read.read_until(&mut [0; 8], Deadline::after(ENDURED)), Err(Error::TimedOut)));
        let (slept, most) = (sleeps(&read) - before, most_wakes(since.elapsed()));
        eprintln!("{} notifications, {slept} sleeps", storm.notifications());
        assert!(slept < most, "{slept} sleeps in {:?}", since.elapsed());
        if slept >= most_wakes(ENDURED) / 4 {
            break;
        }
        assert!(begun.elapsed() < SOON, "{slept} sleeps in {ENDURED:?}");
    }
    // A nap ends in time.
    let (mut best, begun) = (Duration::MAX, Instant::now());
    while best >= Duration::from_millis(100) {
        assert!(begun.elapsed() < SOON, "{best:?}");
        assert!(matches!(read.read_until(&mut [0; 8], Deadline::after(ENDURED / 5)), Err(Error::TimedOut)));
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let since = Instant::now();
                assert_eq!(read.read_until(&mut [0; 8], Deadline::after(SOON)).unwrap(), 8);
                since.elapsed()
            });
            client.write_all(&[7; 8]).unwrap();
            best = best.min(reader.join().unwrap());
        });
    }
}

#[test]
fn r25_poller_in_a_storm_gets_every_byte() {
    let (world, server, mut client) = pair();
    let (mut read, _write) = server.into_split();
    let fd = read.poll_fd().unwrap().try_clone_to_owned().unwrap();
    let (hypervisor, a) = hypervisor(&world);
    let _storm = hypervisor.storm(a);
    let data = &noise(40_000, 3)[..];
    thread::scope(|scope| {
        scope.spawn(move || data.chunks(1000).for_each(|chunk| client.write_all(chunk).unwrap()));
        let (mut got, mut buffer) = (Vec::new(), [0; 300]);
        while got.len() < data.len() {
            assert!(wait_readable(fd.as_fd(), Deadline::after(SOON)).unwrap(), "lost after {} bytes", got.len());
            // A part of what is there, so that the rest must be reported as well.
            if let Some(len) = read.try_read(&mut buffer).unwrap() {
                got.extend_from_slice(&buffer[..len]);
            }
        }
        assert!(got == data);
    });
}

/// Repeated tries by the program itself do not count as notifications for nothing: the next notification wakes it at
/// once.
#[test]
fn r25_tries_without_a_notification_do_not_count_as_a_storm() {
    let (_world, server, mut client) = pair();
    let (mut read, _write) = server.into_split();
    let fd = read.poll_fd().unwrap().try_clone_to_owned().unwrap();
    let (mut best, begun) = (Duration::MAX, Instant::now());
    while best >= Duration::from_millis(1) {
        assert!(begun.elapsed() < SOON, "a nap of {best:?}");
        for _ in 0..1000 {
            assert!(matches!(read.try_read(&mut [0; 8]), Ok(None)));
        }
        client.write_all(&[7; 8]).unwrap();
        let since = Instant::now();
        assert!(wait_readable(fd.as_fd(), Deadline::after(SOON)).unwrap());
        best = best.min(since.elapsed());
        assert!(matches!(read.try_read(&mut [0; 8]), Ok(Some(8))));
    }
}

#[cfg(feature = "tokio")]
mod with_tokio {
    use std::{
        future::{Future, poll_fn},
        pin::pin,
        task::Poll,
    };

    use ::tokio::{
        io::{AsyncRead, AsyncReadExt, ReadBuf},
        runtime::Builder,
        time::sleep,
    };
    use tombolo_channel::tokio::AsyncStream;

    use super::*;

    #[test]
    fn r25_storm_of_notifications_wakes_a_task_seldom() {
        let (world, server, mut client) = pair();
        let (hypervisor, a) = hypervisor(&world);
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let storm = hypervisor.storm(a);
        runtime.block_on(async {
            let mut server = AsyncStream::new(server).unwrap();
            let mut endured = Endured::new(&storm);
            while !endured.is_over() {
                let mut end = pin!(sleep(ENDURED / 10));
                poll_fn(|cx| {
                    let mut buffer = [0; 8];
                    let mut buffer = ReadBuf::new(&mut buffer);
                    assert!(endured.count_look(|| pin!(&mut server).poll_read(cx, &mut buffer)).is_pending());
                    if end.as_mut().poll(cx).is_ready() { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
            }
            endured.check();
            client.write_all(&[7; 8]).unwrap();
            assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 8);
        });
    }
}
