// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The descriptor of a channel under poll and epoll, level- and edge-triggered: readable when something may be done,
//! silent when nothing can be.

mod common;

use std::{
    io::{Read, Write},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering},
    task::Poll,
    thread,
    time::{Duration, Instant},
};

use common::{SOON, World, eventually, let_pass, noise};
use rustix::{
    event::{Timespec, epoll},
    time::{ClockId, clock_gettime},
};
use tombolo_channel::{Deadline, Ending, Messages, Options, ReadHalf, Stream, WriteHalf};
use tombolo_domain::wait_readable;

const EDGE: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);
const LEVEL: epoll::EventFlags = epoll::EventFlags::IN;
/// Number of bytes that are sent one by one at moments when a call would block.
const ROUNDS: u64 = 20_000;

fn readable(fd: impl AsFd) -> bool {
    wait_readable(fd.as_fd(), Deadline::NOW).unwrap()
}

fn await_readable(fd: impl AsFd, what: &str) {
    assert!(wait_readable(fd.as_fd(), Deadline::after(SOON)).unwrap(), "lost: {what}");
}

/// An epoll set that reports numbers.
struct Set(OwnedFd);

impl Set {
    fn new() -> Self {
        Self(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap())
    }

    fn add(&self, fd: impl AsFd, number: u64, flags: epoll::EventFlags) {
        epoll::add(&self.0, fd.as_fd(), epoll::EventData::new_u64(number), flags).unwrap();
    }

    /// Returns the numbers that are ready within `patience`.
    fn wait(&self, patience: Duration) -> Vec<u64> {
        let mut events = [MaybeUninit::uninit(); 64];
        let timeout = Timespec::try_from(patience).unwrap();
        let (events, _) = epoll::wait(&self.0, &mut events, Some(&timeout)).unwrap();
        events.iter().map(|event| event.data.u64()).collect()
    }

    fn await_one(&self, what: &str) {
        assert_eq!(self.wait(SOON).len(), 1, "lost: {what}");
    }
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    /// Mostly no pause, sometimes one long enough for the other side to fall asleep.
    fn gap(&mut self) {
        match self.roll(8) {
            0 => let_pass(Duration::from_micros(self.roll(300))),
            1 => thread::yield_now(),
            2 => (0..self.roll(2000)).for_each(|_| std::hint::spin_loop()),
            _ => {}
        }
    }
}

fn small() -> Options {
    Options::new().ring_size(4096)
}

/// Writes `data` in pieces with gaps between them.
fn write_with_gaps(mut write: WriteHalf, data: &[u8], seed: u64) {
    let (mut dice, mut rest) = (Dice(seed), data);
    while !rest.is_empty() {
        let len = rest.len().min(1 + dice.roll(700) as usize);
        let deadline = Deadline::after(SOON);
        write.write_all_until(&rest[..len], deadline).unwrap();
        rest = &rest[len..];
        dice.gap();
    }
}

fn polled_reader_gets_all(world: &World, flags: epoll::EventFlags) {
    let (server, client) = world.pair_with::<Stream>(&small());
    let (_r, write) = client.into_split();
    let (mut read, _w) = server.into_split();
    let data = &noise(300_000, 21)[..];
    let set = Set::new();
    set.add(read.poll_fd().unwrap(), 0, flags);
    thread::scope(|scope| {
        scope.spawn(move || write_with_gaps(write, data, 5));
        let (mut got, mut dice, mut buffer) = (Vec::new(), Dice(6), [0; 1000]);
        loop {
            set.await_one("bytes to read");
            loop {
                let len = 1 + dice.roll(999) as usize;
                match read.try_read(&mut buffer[..len]).unwrap() {
                    Some(0) => {
                        assert!(got == data, "{} of {} bytes", got.len(), data.len());
                        return;
                    }
                    Some(n) => got.extend_from_slice(&buffer[..n]),
                    None => break,
                }
                // A level-triggered reader need not read everything.
                if flags == LEVEL && dice.roll(3) == 0 {
                    break;
                }
            }
            dice.gap();
        }
    });
}

/// Reads everything with gaps and checks it.
fn read_with_gaps(mut read: ReadHalf, data: &[u8], seed: u64) {
    let (mut got, mut dice, mut buffer) = (0, Dice(seed), [0; 900]);
    while got < data.len() {
        let n = read.read_until(&mut buffer, Deadline::after(SOON)).unwrap();
        assert!(n > 0 && buffer[..n] == data[got..got + n]);
        got += n;
        dice.gap();
    }
}

fn polled_writer_writes_all(world: &World, flags: epoll::EventFlags) {
    let (server, client) = world.pair_with::<Stream>(&small());
    let (_r, mut write) = client.into_split();
    let (read, _w) = server.into_split();
    let data = &noise(300_000, 22)[..];
    let set = Set::new();
    set.add(write.poll_fd().unwrap(), 0, flags);
    thread::scope(|scope| {
        let reader = scope.spawn(move || read_with_gaps(read, data, 7));
        let (mut rest, mut dice) = (data, Dice(8));
        while !rest.is_empty() {
            set.await_one("room to write");
            while !rest.is_empty() {
                let len = rest.len().min(1 + dice.roll(2000) as usize);
                match write.try_write(&rest[..len]).unwrap() {
                    Some(n) => rest = &rest[n..],
                    None => break,
                }
                if !write.is_moving() && dice.roll(50) == 0 {
                    write.resize(4096 << dice.roll(3)).unwrap();
                }
            }
        }
        reader.join().unwrap();
    });
}

/// Reads what there is of those channels, and counts it.
fn read_all(pairs: &mut [(Stream, Stream)], ready: &[u64], seen: &mut [u32]) {
    for &number in ready {
        let (server, _) = &mut pairs[number as usize];
        while let Some(n) = server.split().0.try_read(&mut [0; 64]).unwrap() {
            seen[number as usize] += n as u32;
        }
    }
}

on_every_backend! {
    fn r12_edge_triggered_reader_misses_nothing(world) {
        polled_reader_gets_all(&world, EDGE);
    }

    fn r12_level_triggered_reader_misses_nothing(world) {
        polled_reader_gets_all(&world, LEVEL);
    }

    fn r12_byte_that_comes_while_a_call_says_would_block_is_told(world) {
        let (server, client) = world.pair_with::<Stream>(&small());
        let (_r, mut write) = client.into_split();
        let (mut read, _w) = server.into_split();
        let (set, taken) = (Set::new(), AtomicU64::new(0));
        set.add(read.poll_fd().unwrap(), 0, LEVEL);
        thread::scope(|scope| {
            let taken = &taken;
            scope.spawn(move || {
                let mut dice = Dice(3);
                for number in 0..ROUNDS {
                    eventually("the byte before is taken", || taken.load(Ordering::Acquire) == number);
                    // Meets the reader's call at different points.
                    (0..dice.roll(1000)).for_each(|_| std::hint::spin_loop());
                    write.write_all_until(&[1], Deadline::after(SOON)).unwrap();
                }
            });
            for number in 1..=ROUNDS {
                let mut byte = [0];
                while read.try_read(&mut byte).unwrap().is_none() {
                    set.await_one("the byte of this round");
                }
                assert_eq!(byte, [1]);
                taken.store(number, Ordering::Release);
            }
        });
    }

    fn r12_edge_triggered_writer_misses_nothing(world) {
        polled_writer_writes_all(&world, EDGE);
    }

    fn r12_level_triggered_writer_misses_nothing(world) {
        polled_writer_writes_all(&world, LEVEL);
    }

    fn r12_polled_messages_come_whole_whatever_their_size(world) {
        let (server, client) = world.pair_with::<Messages>(&small());
        let (mut sender, _r) = client.into_split();
        let (_s, mut receiver) = server.into_split();
        let (inbox, outbox) = (Set::new(), Set::new());
        inbox.add(receiver.poll_fd().unwrap(), 0, EDGE);
        outbox.add(sender.poll_fd().unwrap(), 0, EDGE);
        let size = |number: u64| Dice(number).roll(4088) as usize;
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut dice = Dice(9);
                for number in 0..2000 {
                    let message = noise(size(number), number);
                    while sender.try_send(&message).unwrap().is_none() {
                        outbox.await_one("room for a message");
                    }
                    dice.gap();
                }
                sender.drained_until(Deadline::after(SOON)).unwrap();
            });
            let mut buffer = [0; 4096];
            let (mut number, mut dice) = (0, Dice(10));
            loop {
                match receiver.try_recv(&mut buffer).unwrap() {
                    Poll::Pending => inbox.await_one("a message"),
                    Poll::Ready(None) => break,
                    Poll::Ready(Some(len)) => {
                        assert!(buffer[..len] == noise(size(number), number));
                        number += 1;
                        dice.gap();
                    }
                }
            }
            assert_eq!(number, 2000);
        });
    }

    fn r12_descriptor_is_silent_after_would_block_and_speaks_when_there_is_something(world) {
        let (mut server, mut client) = world.pair_with::<Stream>(&small());
        let mut buffer = [0; 64];
        let (read, _) = server.split();
        assert!(readable(read.poll_fd().unwrap()), "nobody knows yet what is there");
        assert_eq!(read.try_read(&mut buffer).unwrap(), None);
        for round in 0..100 {
            assert!(!readable(read.poll_fd().unwrap()), "nothing is there in round {round}");
            client.write_all(&[7; 40]).unwrap();
            await_readable(read.poll_fd().unwrap(), "40 bytes");
            assert_eq!(read.try_read(&mut buffer[..30]).unwrap(), Some(30));
            assert!(readable(read.poll_fd().unwrap()), "ten bytes are left");
            assert_eq!(read.try_read(&mut buffer).unwrap(), Some(10));
            assert_eq!(read.try_read(&mut buffer).unwrap(), None);
        }
        let (_, write) = client.split();
        assert!(readable(write.poll_fd().unwrap()));
        while write.try_write(&[1; 100]).unwrap().is_some() {}
        assert!(!readable(write.poll_fd().unwrap()), "there is no room");
        read.read_until(&mut [0; 4096], Deadline::after(SOON)).unwrap();
        await_readable(write.poll_fd().unwrap(), "room");
    }

    fn r12_blocking_and_polled_calls_mix(world) {
        let (server, client) = world.pair_with::<Stream>(&small());
        let (_r, write) = client.into_split();
        let (mut read, _w) = server.into_split();
        let data = &noise(200_000, 23)[..];
        let set = Set::new();
        set.add(read.poll_fd().unwrap(), 0, EDGE);
        thread::scope(|scope| {
            scope.spawn(move || write_with_gaps(write, data, 11));
            let (mut got, mut dice, mut buffer) = (Vec::new(), Dice(12), [0; 500]);
            while got.len() < data.len() {
                let n = match dice.roll(4) {
                    0 => read.read_until(&mut buffer, Deadline::after(SOON)).unwrap(),
                    1 => read.read_until(&mut buffer, Deadline::after(Duration::from_micros(50))).unwrap_or(0),
                    _ => match read.try_read(&mut buffer).unwrap() {
                        Some(n) => n,
                        None => {
                            set.await_one("bytes after would-block");
                            0
                        }
                    },
                };
                got.extend_from_slice(&buffer[..n]);
            }
            assert!(got == data);
        });
    }

    fn c10_descriptor_wakes_when_the_peer_closes_or_stops_reading(world) {
        for flags in [EDGE, LEVEL] {
            let (mut server, client) = world.pair_with::<Stream>(&small());
            let (mut read, mut write) = server.split();
            let (inbox, outbox) = (Set::new(), Set::new());
            inbox.add(read.poll_fd().unwrap(), 0, flags);
            outbox.add(write.poll_fd().unwrap(), 0, flags);
            assert_eq!(read.try_read(&mut [0; 8]).unwrap(), None);
            while write.try_write(&[1; 1000]).unwrap().is_some() {}
            assert_eq!((inbox.wait(Duration::ZERO).len(), outbox.wait(Duration::ZERO).len()), (0, 0));
            drop(client);
            inbox.await_one("the end of file");
            outbox.await_one("the broken pipe");
            assert_eq!(read.try_read(&mut [0; 8]).unwrap(), Some(0));
            assert_eq!(read.ending(), Some(Ending::Closed));
            assert!(write.try_write(&[1; 8]).is_err());
            (read, write) = server.split();
            assert_eq!(read.try_read(&mut [0; 8]).unwrap(), Some(0), "and again");
            assert!(write.try_write(&[1; 8]).is_err());
        }
    }

    fn c7_listener_polls_readable_when_a_peer_is_there(world) {
        let mut listener = world.listen::<Stream>();
        assert!(!readable(&listener));
        let silent = world.connect_raw();
        await_readable(&listener, "a connection");
        assert!(listener.try_accept().unwrap().is_none());
        assert!(!readable(&listener), "one who is silent is no reason to look again");
        thread::scope(|scope| {
            let client = scope.spawn(|| world.connecting.connect::<Stream>(&world.address, &Options::new()).unwrap());
            let since = Instant::now();
            let _server = loop {
                await_readable(&listener, "a peer");
                if let Some(server) = listener.try_accept().unwrap() {
                    break server;
                }
                assert!(since.elapsed() < SOON);
            };
            client.join().unwrap();
        });
        drop(silent);
        let until = Instant::now() + SOON;
        while readable(&listener) {
            assert!(listener.try_accept().unwrap().is_none() && Instant::now() < until);
        }
    }

    fn r12_many_channels_share_a_set(world) {
        let mut pairs: Vec<(Stream, Stream)> = (0..20).map(|_| world.pair_with(&small())).collect();
        let set = Set::new();
        for (number, (server, _)) in pairs.iter_mut().enumerate() {
            set.add(server.as_fd(), number as u64, EDGE);
            assert_eq!(server.split().0.try_read(&mut [0; 8]).unwrap(), None);
        }
        let (mut expected, mut dice) = (vec![0u32; 20], Dice(13));
        let mut seen = expected.clone();
        for _ in 0..2000 {
            let number = dice.roll(20) as usize;
            pairs[number].1.write_all(&[1; 10]).unwrap();
            expected[number] += 10;
            read_all(&mut pairs, &set.wait(Duration::ZERO), &mut seen);
        }
        // Where one doorbell serves all channels, a waiter that was notified for other channels may nap.
        // Elsewhere everything is there at once.
        let since = Instant::now();
        while world.hypervisor.is_some() && seen != expected && since.elapsed() < SOON {
            read_all(&mut pairs, &set.wait(SOON), &mut seen);
        }
        assert_eq!(seen, expected);
    }
}

#[test]
fn r12_idle_polled_channel_costs_no_cpu() {
    let world = World::local();
    let (mut server, _client) = world.pair_with::<Stream>(&small());
    let set = Set::new();
    set.add(server.as_fd(), 0, LEVEL);
    assert_eq!(server.split().0.try_read(&mut [0; 8]).unwrap(), None);
    let own = || clock_gettime(ClockId::ThreadCPUTime);
    let before = own();
    // Allows for the late look.
    if !set.wait(Duration::from_millis(100)).is_empty() {
        assert_eq!(server.split().0.try_read(&mut [0; 8]).unwrap(), None);
    }
    assert!(set.wait(Duration::from_millis(500)).is_empty(), "woken for nothing");
    let (after, second) = (own(), 1_000_000_000);
    let spent = (after.tv_sec - before.tv_sec) * second + after.tv_nsec - before.tv_nsec;
    assert!(spent < 5_000_000, "{spent} ns of CPU");
}

#[test]
fn c10_descriptor_wakes_when_the_peer_is_killed() {
    let world = World::harsh();
    let (hypervisor, _, b) = world.hypervisor.as_ref().unwrap();
    let (server, mut client) = world.pair_with::<Stream>(&small());
    let (mut read, mut write) = server.into_split();
    let (inbox, outbox) = (Set::new(), Set::new());
    inbox.add(read.poll_fd().unwrap(), 0, EDGE);
    outbox.add(write.poll_fd().unwrap(), 0, EDGE);
    assert_eq!(read.try_read(&mut [0; 8]).unwrap(), None);
    while write.try_write(&[1; 1000]).unwrap().is_some() {}
    assert!(inbox.wait(Duration::ZERO).is_empty());
    client.write_all(b"last").unwrap();
    inbox.await_one("last words");
    hypervisor.kill_process(b);
    outbox.await_one("death");
    let (mut words, mut byte) = (Vec::new(), [0; 1]);
    while let Some(1) = read.try_read(&mut byte).unwrap() {
        words.push(byte[0]);
    }
    assert_eq!((words.as_slice(), read.ending()), (&b"last"[..], Some(Ending::ProcessGone)));
    assert!(write.try_write(&[1; 8]).is_err());
}

#[test]
fn r12_channel_is_read_by_blocking_calls_before_and_after_it_is_polled() {
    let world = World::local();
    let (mut server, mut client) = world.pair_with::<Stream>(&small());
    for round in 0..3u8 {
        client.write_all(&[round; 10]).unwrap();
        server.read_exact(&mut [0; 10]).unwrap();
        // A fresh descriptor is readable at first, so that its program looks.
        assert!(round > 0 || readable(&server));
        assert_eq!(server.split().0.try_read(&mut [0; 1]).unwrap(), None);
        assert!(!readable(&server));
    }
}

#[test]
fn r17_end_of_file_stays_readable_whenever_it_comes() {
    let world = World::local();
    for round in 0..500u32 {
        let (mut server, mut client) = world.pair_with::<Stream>(&small());
        server.split().0.poll_fd().unwrap();
        thread::scope(|scope| {
            let (read, write) = (server.split().0, client.split().1);
            scope.spawn(move || {
                (0..round % 500 * 20).for_each(|_| std::hint::spin_loop());
                write.close();
            });
            while read.try_read(&mut [0; 1]).unwrap() != Some(0) {}
            await_readable(read.poll_fd().unwrap(), "the end that was found already");
            assert_eq!(read.try_read(&mut [0; 1]).unwrap(), Some(0));
        });
    }
}

#[test]
fn c10_caller_that_only_tries_hears_of_a_death_in_time() {
    let world = World::harsh();
    let (mut server, _client) = world.streams();
    let (hypervisor, _, b) = world.hypervisor.as_ref().unwrap();
    hypervisor.kill_process(b);
    let (since, mut tries) = (std::time::Instant::now(), 0);
    while server.split().0.try_read(&mut [0; 8]).unwrap() != Some(0) {
        tries += 1;
        assert!(tries < 200, "{:?} and {tries} tries later nobody was missed", since.elapsed());
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
    assert_eq!(server.split().0.ending(), Some(tombolo_channel::Ending::ProcessGone));
}
