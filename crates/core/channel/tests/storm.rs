// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rings for nothing, at full rate, cost one who polls no more than one who waits: so many wake-ups, then a nap after
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

/// How long a storm is endured.
const ENDURED: Duration = Duration::from_millis(500);
/// Wake-ups before the first nap, those of the short naps, and one for each of the long ones in that time; twice that.
const WAKES_MAX: usize = 2 * (64 + 5 + 500 / 16);

fn pair() -> (World, Stream, Stream) {
    let world = World::harsh();
    let (server, client) = world.pair_with(&Options::new().ring_size(4096));
    (world, server, client)
}

fn hypervisor(world: &World) -> (&Hypervisor, &HarshDomain) {
    let (hypervisor, a, _) = world.hypervisor.as_ref().unwrap();
    (hypervisor, a)
}

/// How often whoever polls `fd` is sent to look for nothing.
fn wakes(fd: impl AsFd, storm: &Storm, mut look: impl FnMut()) -> usize {
    let (until, before) = (Deadline::after(ENDURED), storm.rings());
    let mut wakes = 0;
    while wait_readable(fd.as_fd(), until).unwrap() {
        wakes += 1;
        look();
    }
    let rings = storm.rings() - before;
    eprintln!("{rings} rings, {wakes} wake-ups");
    assert!(rings > 20 * WAKES_MAX as u64, "no storm: {rings} rings");
    wakes
}

#[test]
fn r25_storm_of_rings_wakes_a_polling_reader_seldom() {
    let (world, server, mut client) = pair();
    let (mut read, _write) = server.into_split();
    let fd = read.poll_fd().unwrap().try_clone_to_owned().unwrap();
    let (hypervisor, a) = hypervisor(&world);
    let storm = hypervisor.storm(a);
    for round in 0..2 {
        let wakes = wakes(&fd, &storm, || assert!(matches!(read.try_read(&mut [0; 8]), Ok(None))));
        assert!(wakes < WAKES_MAX, "{wakes} wake-ups in {ENDURED:?}");
        client.write_all(&[round; 8]).unwrap();
        let (mut got, since) = (None, Instant::now());
        while got.is_none() {
            assert!(wait_readable(fd.as_fd(), Deadline::after(SOON)).unwrap(), "lost");
            got = read.try_read(&mut [0; 8]).unwrap();
        }
        assert!(since.elapsed() < Duration::from_secs(2), "found after {:?}", since.elapsed());
    }
    drop(storm);
    // What was drained late may wake it a few times more, then it is quiet and listens again.
    while wait_readable(fd.as_fd(), Deadline::after(Duration::from_millis(100))).unwrap() {
        assert!(matches!(read.try_read(&mut [0; 8]), Ok(None)));
    }
    client.write_all(&[7; 8]).unwrap();
    assert!(wait_readable(fd.as_fd(), Deadline::after(SOON)).unwrap());
    assert!(matches!(read.try_read(&mut [0; 8]), Ok(Some(8))));
}

#[test]
fn r25_storm_of_rings_wakes_one_who_polls_for_so_many_bytes_seldom() {
    let (world, server, _client) = pair();
    let (mut read, _write) = server.into_split();
    let fd = read.poll_fd().unwrap().try_clone_to_owned().unwrap();
    let (hypervisor, a) = hypervisor(&world);
    let storm = hypervisor.storm(a);
    for quiet in [false, true] {
        let wakes = wakes(&fd, &storm, || {
            read.note_poll_readable();
            let there = if quiet { read.available_while_quiet(8) } else { read.available(8) };
            assert!(matches!(there, Ok(0)));
        });
        assert!(wakes < WAKES_MAX, "{wakes} wake-ups in {ENDURED:?}");
    }
}

#[test]
fn r25_storm_of_rings_wakes_a_polling_writer_seldom() {
    let (world, server, mut client) = pair();
    let (_read, mut write) = server.into_split();
    let fd = write.poll_fd().unwrap().try_clone_to_owned().unwrap();
    while write.try_write(&[7; 4096]).unwrap().is_some() {}
    let (hypervisor, a) = hypervisor(&world);
    let storm = hypervisor.storm(a);
    let wakes = wakes(&fd, &storm, || assert!(matches!(write.try_write(&[7; 8]), Ok(None))));
    assert!(wakes < WAKES_MAX, "{wakes} wake-ups in {ENDURED:?}");
    client.read_exact(&mut [0; 4096]).unwrap();
    loop {
        assert!(wait_readable(fd.as_fd(), Deadline::after(SOON)).unwrap(), "lost");
        if write.try_write(&[7; 8]).unwrap().is_some() {
            break;
        }
    }
}

/// One who waits in a call naps as well: neither too seldom nor for too long.
#[test]
fn r25_storm_of_rings_wakes_a_waiting_reader_seldom_and_not_too_seldom() {
    let (world, server, mut client) = pair();
    let (mut read, _write) = server.into_split();
    let (hypervisor, a) = hypervisor(&world);
    let storm = hypervisor.storm(a);
    let sleeps = |read: &tombolo_channel::ReadHalf| read.statistics().counters.sleeps as usize;
    let before = sleeps(&read);
    assert!(matches!(read.read_until(&mut [0; 8], Deadline::after(ENDURED)), Err(Error::TimedOut)));
    let slept = sleeps(&read) - before;
    eprintln!("{} rings, {slept} sleeps", storm.rings());
    assert!((WAKES_MAX / 4..WAKES_MAX).contains(&slept), "{slept} sleeps in {ENDURED:?}");
    // A nap is over in time.
    let mut best = Duration::MAX;
    for _ in 0..10 {
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
    assert!(best < Duration::from_millis(100), "{best:?}");
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
            // Part of what is there, so that the rest has to be told as well.
            if let Some(len) = read.try_read(&mut buffer).unwrap() {
                got.extend_from_slice(&buffer[..len]);
            }
        }
        assert!(got == data);
    });
}

/// One who tries again and again by himself is not one who is rung for nothing: the next ring wakes him at once.
#[test]
fn r25_tries_that_nobody_rang_for_are_not_held_against_the_bell() {
    let (_world, server, mut client) = pair();
    let (mut read, _write) = server.into_split();
    let fd = read.poll_fd().unwrap().try_clone_to_owned().unwrap();
    let mut best = Duration::MAX;
    for _ in 0..20 {
        for _ in 0..1000 {
            assert!(matches!(read.try_read(&mut [0; 8]), Ok(None)));
        }
        client.write_all(&[7; 8]).unwrap();
        let since = Instant::now();
        assert!(wait_readable(fd.as_fd(), Deadline::after(SOON)).unwrap());
        best = best.min(since.elapsed());
        assert!(matches!(read.try_read(&mut [0; 8]), Ok(Some(8))));
    }
    assert!(best < Duration::from_millis(1), "a nap of {best:?}");
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
    fn r25_storm_of_rings_wakes_a_task_seldom() {
        let (world, server, mut client) = pair();
        let (hypervisor, a) = hypervisor(&world);
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let storm = hypervisor.storm(a);
        runtime.block_on(async {
            let mut server = AsyncStream::new(server).unwrap();
            let (mut polls, mut end) = (0, pin!(sleep(ENDURED)));
            poll_fn(|cx| {
                polls += 1;
                let mut buffer = [0; 8];
                let read = pin!(&mut server).poll_read(cx, &mut ReadBuf::new(&mut buffer));
                assert!(read.is_pending());
                if end.as_mut().poll(cx).is_ready() { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            eprintln!("{} rings, {polls} polls", storm.rings());
            assert!(storm.rings() > 20 * WAKES_MAX as u64, "no storm: {} rings", storm.rings());
            assert!(polls < WAKES_MAX, "{polls} polls in {ENDURED:?}");
            client.write_all(&[7; 8]).unwrap();
            assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 8);
        });
    }
}
