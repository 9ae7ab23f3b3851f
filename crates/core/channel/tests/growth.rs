// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rings that follow load (ADR 0055): no byte is lost or reordered, budgets hold, and a peer that does not follow costs
//! one ring.

mod common;

use std::{
    collections::VecDeque,
    fs,
    io::{Read, Write},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{SOON, World, eventually, let_pass, noise, raw};
use proptest::prelude::*;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tombolo_channel::{Deadline, Error, Messages, Options, RingBudget, RingChoice, RingReason, Stream};
use tombolo_layout::{
    Features,
    handshake::Greeting,
    handshake::Message,
    limits::{CAPACITY_DEFAULT, CONTROL_LEN, message_max},
    words,
};
use tombolo_mem::{OwnWord, PeerWord};

const FIRST: u64 = 8 << 10;
const MOST: u64 = 256 << 10;

fn growing(budget: &RingBudget) -> Options {
    Options::new().ring_size(MOST).ring_growth(budget)
}

fn ring(stream: &Stream) -> (u64, RingReason) {
    let sent = stream.statistics().sent;
    (sent.ring_size, sent.ring_growth.unwrap().reason)
}

/// Fills the ring and empties it, in turns, on this thread, until `done`.
fn turns(writer: &mut Stream, reader: &mut Stream, done: impl Fn(&Stream) -> bool) {
    let (piece, mut buffer) = (noise(100_000, 5), vec![0; 1 << 20]);
    let (mut wrote, mut read) = (0, 0);
    eventually("the ring follows its load", || {
        while let Some(n) = writer.split().1.try_write(&piece[wrote % piece.len()..]).unwrap() {
            wrote += n;
        }
        while let Some(n) = reader.split().0.try_read(&mut buffer).unwrap() {
            for &byte in &buffer[..n] {
                assert_eq!(byte, piece[read % piece.len()], "byte {read}");
                read += 1;
            }
        }
        done(writer)
    });
    assert_eq!(wrote, read);
}

fn grow(writer: &mut Stream, reader: &mut Stream) {
    turns(writer, reader, |writer| ring(writer) == (MOST, RingReason::Bulk));
}

/// Makes the calls of an idle writer that checks now and then, until the ring is small.
fn shrink(writer: &mut Stream, reader: &mut Stream) {
    eventually("the idle ring shrinks", || {
        writer.split().1.follow_load().unwrap();
        assert_eq!(reader.split().0.try_read(&mut [0; 8]).unwrap(), None);
        ring(writer) == (4096, RingReason::Idle)
    });
}

on_every_backend! {
    fn h1_ring_grows_in_bulk_shrinks_when_idle_and_grows_again(world) {
        let budget = RingBudget::unwatched(1 << 30);
        let options = growing(&budget).ring_idle_time(Duration::from_millis(20));
        let (mut server, mut client) = world.pair_with::<Stream>(&options);
        for round in 0..5 {
            let first = if round == 0 { (FIRST, RingReason::First) } else { (4096, RingReason::Idle) };
            assert_eq!((ring(&client), budget.used()), (first, 0));
            grow(&mut client, &mut server);
            assert_eq!(budget.used(), MOST + CONTROL_LEN);
            shrink(&mut client, &mut server);
        }
        assert_eq!(ring(&server), (FIRST, RingReason::First), "the other direction was never busy");
        grow(&mut server, &mut client);
        drop((server, client));
        assert_eq!(budget.used(), 0);
    }

    fn h3_bulk_across_threads_grows_in_the_middle_of_a_write_and_stays_whole(world) {
        let (mut server, mut client) = world.pair_with::<Stream>(&growing(&RingBudget::unwatched(1 << 30)));
        let data = &noise(16 << 20, 7)[..];
        thread::scope(|scope| {
            // The number of bytes sent before the ring has grown depends on speed: one round at least, and more until
            // it has grown.
            let writing = scope.spawn(|| {
                let mut rounds = 0;
                eventually("the ring grows", || {
                    client.write_all(data).unwrap();
                    rounds += 1;
                    ring(&client) == (MOST, RingReason::Bulk)
                });
                client.split().1.close();
                rounds
            });
            let (mut got, mut rounds) = (vec![0; data.len()], 0);
            while server.read(&mut got[..1]).unwrap() > 0 {
                server.read_exact(&mut got[1..]).unwrap();
                assert!(got == data);
                rounds += 1;
            }
            assert_eq!(rounds, writing.join().unwrap());
        });
    }

    fn h3_blocked_read_of_a_stream_lets_the_ring_shrink(world) {
        let budget = RingBudget::unwatched(1 << 30);
        let (mut server, mut client) = world.pair_with::<Stream>(&growing(&budget).ring_idle_time(Duration::from_millis(10)));
        grow(&mut client, &mut server);
        let client = &mut client;
        // The server is dropped inside, so that a failure ends the read.
        thread::scope(move |scope| {
            let waiting = scope.spawn(move || {
                let n = client.read(&mut [0; 8]).unwrap();
                (n, ring(client))
            });
            eventually("what the ring cost is returned", || {
                assert_eq!(server.split().0.try_read(&mut [0; 8]).unwrap(), None);
                budget.used() == 0
            });
            server.write_all(b"now").unwrap();
            assert_eq!(waiting.join().unwrap(), (3, (4096, RingReason::Idle)));
        });
    }

    fn requests_and_responses_that_carry_much_grow_rings_that_are_never_full(world) {
        let (mut server, mut client) = world.pair_with::<Stream>(&growing(&RingBudget::unwatched(1 << 30)));
        let (data, mut got) = (noise(4096, 12), [0; 4096]);
        eventually("both rings grow", || {
            client.write_all(&data).unwrap();
            server.read_exact(&mut got).unwrap();
            server.write_all(&got).unwrap();
            client.read_exact(&mut got).unwrap();
            assert!(got[..] == data);
            [&server, &client].map(ring) == [(MOST, RingReason::Bulk); 2]
        });
        assert_eq!(client.statistics().sent.counters.stalls, 0, "it never waited for room");
    }

    fn writes_that_are_done_in_part_are_bulk_too(world) {
        let (mut server, mut client) = world.pair_with::<Stream>(&growing(&RingBudget::unwatched(1 << 30)));
        let mut buffer = vec![0; MOST as usize];
        eventually("the ring grows", || {
            // There is room each time, but for less than this.
            assert!(client.split().1.try_write(&buffer[..MOST as usize - 1]).unwrap().is_some());
            while server.split().0.try_read(&mut buffer).unwrap().is_some() {}
            ring(&client) == (MOST, RingReason::Bulk)
        });
    }

    fn h3_trickle_lets_the_ring_shrink(world) {
        let (mut server, mut client) = world.pair_with::<Stream>(&growing(&RingBudget::unwatched(1 << 30)).ring_idle_time(Duration::from_millis(10)));
        grow(&mut client, &mut server);
        thread::scope(|scope| {
            let reading = scope.spawn(move || std::io::copy(&mut server, &mut std::io::sink()).unwrap());
            eventually("the ring of one who hardly writes shrinks", || {
                client.write_all(b"tick").unwrap();
                // The reader falls asleep: a writer notifies it.
                let_pass(Duration::from_millis(1));
                ring(&client) == (4096, RingReason::Idle)
            });
            drop(client);
            reading.join().unwrap();
        });
    }

    fn h2_reader_that_sleeps_through_the_offer_follows_when_it_reads(world) {
        let (mut server, mut client) = world.pair_with::<Stream>(&growing(&RingBudget::unwatched(1 << 30)));
        let mut buffer = vec![0; FIRST as usize];
        loop {
            while client.split().1.try_write(&[7; 1000]).unwrap().is_some() {}
            if ring(&client).1 == RingReason::Offered {
                break;
            }
            server.read_exact(&mut buffer).unwrap();
        }
        // The reader does nothing now. The writer therefore stays where it is, or has gone ahead and fills that ring
        // (H-9).
        let ahead = world.hypervisor.is_none();
        assert_eq!(ring(&client).0, if ahead { MOST } else { FIRST });
        assert_eq!(client.statistics().sent.in_flight, if ahead { MOST + FIRST } else { FIRST });
        for _ in 0..1000 {
            assert_eq!(client.split().1.try_write(&[7; 1000]).unwrap(), None);
        }
        buffer.resize(client.statistics().sent.in_flight as usize, 0);
        server.read_exact(&mut buffer).unwrap();
        assert!(buffer.iter().all(|&byte| byte == 7));
        grow(&mut client, &mut server);
    }

    fn c2_ring_never_grows_beyond_what_the_peer_maps(world) {
        let budget = RingBudget::unwatched(1 << 30);
        for (maps, reason) in [(FIRST, RingReason::Peer), (64 << 10, RingReason::Bulk)] {
            let options = growing(&budget).largest_peer_ring(maps);
            let (mut server, mut client) = world.pair_with::<Stream>(&options);
            assert_eq!(client.statistics().sent.ring_growth.unwrap().target, maps);
            thread::scope(|scope| {
                scope.spawn(|| client.write_all(&noise(8 << 20, 9)).unwrap());
                let mut got = vec![0; 8 << 20];
                server.read_exact(&mut got).unwrap();
                assert!(got == noise(8 << 20, 9));
            });
            // Where copies are quick, all of that was sent before the ring could follow.
            turns(&mut client, &mut server, |writer| ring(writer) == (maps, reason));
            assert_eq!(client.statistics().sent.ring_growth.unwrap().target, maps);
        }
    }

    fn budget_below_one_ring_leaves_the_stream_as_it_is(world) {
        let budget = RingBudget::unwatched(FIRST);
        let (mut server, mut client) = world.pair_with::<Stream>(&growing(&budget));
        turns(&mut client, &mut server, |writer| ring(writer).1 == RingReason::Budget);
        let data = &noise(8 << 20, 11)[..];
        thread::scope(|scope| {
            scope.spawn(|| client.write_all(data).unwrap());
            let mut got = vec![0; data.len()];
            server.read_exact(&mut got).unwrap();
            assert!(got == data);
        });
        assert_eq!((ring(&client), budget.used()), ((FIRST, RingReason::Budget), 0));
    }

    fn budget_is_shared_and_the_second_stream_has_what_the_first_left(world) {
        let budget = RingBudget::unwatched(MOST + CONTROL_LEN + (MOST / 2));
        let (mut server, mut client) = world.pair_with::<Stream>(&growing(&budget));
        grow(&mut client, &mut server);
        // A writer that goes ahead asks for more at once, and gets the answer that there is none.
        let reason = if world.hypervisor.is_none() { RingReason::Budget } else { RingReason::Bulk };
        turns(&mut server, &mut client, |writer| ring(writer) == (MOST / 4, reason));
        assert!(budget.used() <= budget.limit());
    }

    fn h2_peer_that_refuses_every_growth_costs_one_ring_and_loses_nothing(world) {
        let budget = RingBudget::unwatched(1 << 30);
        let mut listener = world.listening.listen::<Stream>(&world.address, &growing(&budget)).unwrap();
        let mut link = world.connect_raw();
        let (control, _offer) = raw::send_with_segment(&mut *link, &Message::Hello(raw::greeting()).encode(), 0);
        let mut stream = listener.accept_until(Deadline::after(SOON)).unwrap();
        let welcome = link.recv(1 << 31).unwrap().expect("it was sent before the listener agreed");
        let theirs = welcome.segment.unwrap();
        let mut moved = 0;
        while moved < 32 << 20 {
            // A reader that does not report that it is ready reads on in the first ring.
            let tail = theirs.word(words::TAIL).load_acquire().check(Ok::<_, ()>).unwrap();
            control.word(words::HEAD).store_release(tail);
            while let Some(n) = stream.split().1.try_write(&[3; 10_000]).unwrap() {
                moved += n;
            }
        }
        assert_eq!((ring(&stream), budget.used()), ((FIRST, RingReason::Offered), MOST + CONTROL_LEN));
        let mut offers = 0;
        while let Some(received) = link.recv(1 << 31).unwrap() {
            assert!(matches!(Message::decode(&received.message), Ok(Message::Ring { generation: 1, .. })));
            offers += 1;
        }
        assert_eq!(offers, 1);
        drop(stream);
        assert_eq!(budget.used(), 0);
    }

    fn c4_peer_without_hand_over_keeps_the_first_ring(world) {
        let budget = RingBudget::unwatched(1 << 30);
        let mut listener = world.listening.listen::<Stream>(&world.address, &growing(&budget)).unwrap();
        let mut link = world.connect_raw();
        let plain = Greeting { offered: Features::NONE, ..raw::greeting() };
        let (control, _offer) = raw::send_with_segment(&mut *link, &Message::Hello(plain).encode(), 0);
        let mut stream = listener.accept_until(Deadline::after(SOON)).unwrap();
        let theirs = link.recv(1 << 31).unwrap().unwrap().segment.unwrap();
        for _ in 0..1000 {
            let tail = theirs.word(words::TAIL).load_acquire().check(Ok::<_, ()>).unwrap();
            control.word(words::HEAD).store_release(tail);
            while stream.split().1.try_write(&[3; 20_000]).unwrap().is_some() {}
        }
        assert_eq!((ring(&stream), budget.used()), ((FIRST, RingReason::Peer), 0));
    }

    fn budget_that_was_full_is_the_next_streams_once_the_first_is_idle(world) {
        let budget = RingBudget::unwatched(MOST + CONTROL_LEN);
        // Once another stream could not grow, a quarter of so long an idle time is enough.
        let options = growing(&budget).ring_idle_time(Duration::from_millis(400));
        let (mut server, mut client) = world.pair_with::<Stream>(&options);
        grow(&mut client, &mut server);
        turns(&mut server, &mut client, |writer| ring(writer).1 == RingReason::Budget);
        shrink(&mut client, &mut server);
        grow(&mut server, &mut client);
        assert_eq!(budget.used(), budget.limit());
    }

    fn requests_and_responses_keep_their_ring_while_another_stream_grows_and_shrinks(world) {
        let budget = RingBudget::unwatched(1 << 30);
        let options = growing(&budget).ring_idle_time(Duration::from_millis(5));
        let (mut server, mut client) = world.pair_with::<Stream>(&options);
        let (mut far, mut near) = World::local().pair_with::<Stream>(&options);
        for _ in 0..5 {
            grow(&mut near, &mut far);
            for _ in 0..200 {
                client.write_all(&[1; 64]).unwrap();
                server.read_exact(&mut [0; 64]).unwrap();
                server.write_all(&[2; 64]).unwrap();
                client.read_exact(&mut [0; 64]).unwrap();
            }
            shrink(&mut near, &mut far);
        }
        for end in [&server, &client] {
            assert_eq!(ring(end), (FIRST, RingReason::First));
            assert_eq!(end.statistics().sent.counters.stalls, 0, "it never waited for room");
        }
    }

    fn messages_keep_their_ring(world) {
        let budget = RingBudget::unwatched(1 << 30);
        let (_server, client) = world.pair_with::<Messages>(&growing(&budget));
        let sent = client.statistics().sent;
        assert_eq!((sent.ring_size, sent.ring_growth), (MOST, None));
    }
}

/// Returns the bytes that the listener at `place` allocated and this process maps: each once as its owner and once as
/// the peer.
fn mapped(place: &str) -> u64 {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let of = |line: &str| {
        let (begin, end) = line.split(' ').next()?.split_once('-')?;
        Some(u64::from_str_radix(end, 16).ok()? - u64::from_str_radix(begin, 16).ok()?)
    };
    maps.lines().filter(|line| line.contains("memfd:") && line.contains(place)).filter_map(of).sum()
}

#[test]
fn h5_peer_that_grows_without_end_makes_nobody_map_more_than_three_rings() {
    let world = World::local();
    let options = Options::new().ring_size(4096).largest_peer_ring(MOST);
    let (mut server, mut client) = world.pair_with::<Stream>(&options);
    let place = world.address.service().to_owned();
    let (mut moves, mut most) = (0, 0);
    let mut size = 4096;
    while moves < 300 {
        let grown = server.split().1.resize(size);
        match grown {
            Ok(()) => {
                moves += 1;
                size *= 2;
            }
            Err(Error::TooLarge { .. }) => {
                assert!(size > MOST);
                size = 4096;
            }
            Err(error) => assert!(matches!(error, Error::Handover(_)), "{error}"),
        }
        server.write_all(b"x").unwrap();
        client.read_exact(&mut [0; 1]).unwrap();
        most = most.max(mapped(&place));
    }
    // For each endpoint: the first segment, the ring that is read and the next one.
    assert!(most <= 2 * (8192 + 2 * (MOST + CONTROL_LEN)), "{most} bytes were mapped");
    assert!(most > MOST, "nothing was seen");
}

#[test]
fn h7_shrunk_rings_leave_at_most_48_kib_where_both_directions_were_busy() {
    let world = World::local();
    let budget = RingBudget::unwatched(1 << 30);
    let (mut server, mut client) =
        world.pair_with::<Stream>(&growing(&budget).ring_idle_time(Duration::from_millis(20)));
    let place = world.address.service().to_owned();
    // The server's memory has the listener's name.
    assert_eq!(mapped(&place), 2 * (FIRST + CONTROL_LEN));
    grow(&mut server, &mut client);
    assert_eq!(mapped(&place), 2 * (FIRST + CONTROL_LEN + MOST + CONTROL_LEN));
    shrink(&mut server, &mut client);
    let one = FIRST + CONTROL_LEN + 4096 + CONTROL_LEN;
    eventually("the peer lets the old ring go, too", || {
        server.write_all(b"x").unwrap();
        client.read_exact(&mut [0; 1]).unwrap();
        mapped(&place) == 2 * one
    });
    assert!(2 * one <= 48 << 10, "{one}");
}

/// The next action of one of two endpoints.
#[derive(Clone, Debug)]
enum Step {
    Write(usize),
    Read(usize),
    /// Many pieces, each as large as the ring and read at once.
    Bulk,
    /// Nothing for longer than the idle time.
    Idle,
    Follow,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1usize..60_000).prop_map(Step::Write),
        6 => (1usize..80_000).prop_map(Step::Read),
        1 => Just(Step::Bulk),
        1 => Just(Step::Idle),
        3 => Just(Step::Follow),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn h3_h4_stream_is_what_the_model_says_across_growth_and_shrink(steps in proptest::collection::vec(step(), 1..60)) {
        let world = World::local();
        let budget = RingBudget::unwatched(1 << 30);
        let options = growing(&budget).ring_size(64 << 10).ring_idle_time(Duration::from_millis(2));
        let (mut server, mut client) = world.pair_with::<Stream>(&options);
        let (mut model, mut next) = (VecDeque::new(), 0u32);
        let mut buffer = vec![0; 80_000];
        let mut write = |client: &mut Stream, model: &mut VecDeque<u8>, len: usize| {
            let bytes: Vec<u8> = (next..).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_le_bytes()).take(len).collect();
            let n = client.split().1.try_write(&bytes).unwrap().unwrap_or_default();
            next = next.wrapping_add(1 + n as u32 / 4);
            model.extend(&bytes[..n]);
        };
        let mut read = |server: &mut Stream, model: &mut VecDeque<u8>, len: usize| {
            let n = server.split().0.try_read(&mut buffer[..len]).unwrap().unwrap_or_default();
            let expected: Vec<u8> = model.drain(..n).collect();
            assert!(buffer[..n] == expected, "{n} bytes");
            n
        };
        for step in steps {
            match step {
                Step::Write(len) => write(&mut client, &mut model, len),
                Step::Read(len) => { read(&mut server, &mut model, len); }
                Step::Bulk => for _ in 0..24 {
                    write(&mut client, &mut model, 70_000);
                    write(&mut client, &mut model, 1);
                    while read(&mut server, &mut model, 80_000) != 0 {}
                },
                Step::Idle => let_pass(Duration::from_millis(8)),
                Step::Follow => { client.split().1.follow_load().unwrap(); }
            }
            prop_assert!(budget.used() <= 2 * ((64 << 10) + CONTROL_LEN));
        }
        while read(&mut server, &mut model, 80_000) != 0 {}
        prop_assert!(model.is_empty());
    }
}

/// Prints figures, and tests nothing: memory, time to full speed, latency beside a stream that grows. Run with
/// `--ignored --nocapture`.
#[test]
#[ignore = "measures; run it alone, in a release build"]
fn figures() {
    let memory = || {
        let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        let field = |name: &str| -> u64 {
            let line = rollup.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse().unwrap()
        };
        (field("Rss:"), field("Pss:"))
    };
    let shmem = || -> u64 {
        let info = fs::read_to_string("/proc/meminfo").unwrap();
        info.lines()
            .find_map(|line| line.strip_prefix("Shmem:"))
            .unwrap()
            .trim()
            .trim_end_matches(" kB")
            .parse()
            .unwrap()
    };
    let budget = RingBudget::unwatched(1 << 30);
    let options = Options::new().ring_growth(&budget).ring_idle_time(Duration::from_millis(20));
    for (name, options) in [("default", Options::new()), ("growing", options)] {
        let worlds: Vec<World> = (0..200).map(|_| World::local()).collect();
        let (pss, shared) = (memory().1, shmem());
        let mut pairs: Vec<_> = worlds.iter().map(|world| world.pair_with::<Stream>(&options)).collect();
        let per = |now: u64, before: u64| (now - before) as f64 / worlds.len() as f64;
        println!("{name}: new: Pss {:.1} KiB, shmem {:.1} KiB a channel", per(memory().1, pss), per(shmem(), shared));
        if name == "growing" {
            for (a, b) in &mut pairs {
                turns(a, b, |writer| ring(writer).1 == RingReason::Bulk);
                eventually("it shrinks", || {
                    a.split().1.follow_load().unwrap();
                    assert_eq!(b.split().0.try_read(&mut [0; 8]).unwrap(), None);
                    ring(a).1 == RingReason::Idle
                });
                b.split().0.try_read(&mut [0; 8]).unwrap();
            }
            println!(
                "{name}: idle again: Pss {:.1} KiB, shmem {:.1} KiB a channel, budget {}",
                per(memory().1, pss),
                per(shmem(), shared),
                budget.used()
            );
        }
    }
    let bulk = |options: &Options| {
        let world = World::local();
        let (mut server, mut client) = world.pair_with::<Stream>(options);
        let piece = vec![1u8; 64 << 10];
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut buffer = vec![0; 64 << 10];
                while server.read(&mut buffer).unwrap() != 0 {}
            });
            let (since, mut grown, mut times) = (Instant::now(), None, Vec::new());
            while since.elapsed() < Duration::from_millis(600) {
                client.write_all(&piece).unwrap();
                times.push(since.elapsed());
                let sent = client.statistics().sent;
                if grown.is_none() && sent.ring_growth.is_some_and(|growth| sent.ring_size == growth.target) {
                    grown = Some(since.elapsed());
                }
            }
            client.split().1.close();
            let rate = |from: u64, to: u64| {
                let within = |at: &&Duration| (from..to).contains(&(at.as_millis() as u64));
                times.iter().filter(within).count() as f64 * 65536.0 / ((to - from) as f64 * 1e6)
            };
            let last = rate(300, 600);
            let full = (0..60).find(|ten| rate(ten * 10, ten * 10 + 10) >= 0.9 * last).map(|ten| ten * 10 + 10);
            println!("bulk: ring reached {grown:?}, 0.9 of {last:.2} GB/s in the 10 ms that end at {full:?} ms");
        });
    };
    for _ in 0..3 {
        bulk(&Options::new().ring_growth(&budget));
        bulk(&Options::new().ring_size_by_caches());
        bulk(&Options::new().ring_size(16 << 10));
    }
    // Requests and responses, alone and while other streams of the process grow and shrink all the time.
    let latency = |beside: bool| {
        let world = World::local();
        let (mut server, mut client) = world.pair_with::<Stream>(&Options::new().ring_growth(&budget));
        let over = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut buffer = [0; 64];
                while server.read_exact(&mut buffer).is_ok() {
                    server.write_all(&buffer).unwrap();
                }
            });
            if beside {
                scope.spawn(|| {
                    while !over.load(std::sync::atomic::Ordering::Relaxed) {
                        let world = World::local();
                        let (mut a, mut b) = world.pair_with::<Stream>(&Options::new().ring_growth(&budget));
                        turns(&mut a, &mut b, |writer| ring(writer).1 == RingReason::Bulk);
                        let_pass(Duration::from_millis(20));
                    }
                });
            }
            let mut times = Vec::new();
            for _ in 0..20_000 {
                let since = Instant::now();
                client.write_all(&[1; 64]).unwrap();
                client.read_exact(&mut [0; 64]).unwrap();
                times.push(since.elapsed());
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            drop(client);
            times.sort();
            println!("round trip, beside growth {beside}: p50 {:?} p99 {:?}", times[10_000], times[19_800]);
        });
    };
    for _ in 0..3 {
        latency(false);
        latency(true);
    }
}

/// Keeps this thread on one of this process's CPUs: endpoints that share one try no larger ring.
fn keep_to_cpu(nth: usize) {
    let all = sched_getaffinity(None).unwrap();
    let numbers: Vec<_> = (0..CpuSet::MAX_CPU).filter(|number| all.is_set(*number)).collect();
    let mut one = CpuSet::new();
    one.set(numbers[nth % numbers.len()]);
    sched_setaffinity(None, &one).unwrap();
}

/// Returns the size that a busy stream tries on this machine, if it tries any: by the caches larger than suits any
/// stream, and at most 4 MiB.
fn tried(stream: &Stream) -> Option<u64> {
    let growth = stream.statistics().sent.ring_growth?;
    let most = 2 * RingChoice::of_this_machine().bytes().max(2 << 20);
    assert!((RingChoice::of_this_machine().bytes()..=most).contains(&growth.target), "{growth:?}");
    Some(growth.target)
}

#[test]
fn busy_stream_that_nobody_gave_a_ring_tries_a_larger_one_and_loses_nothing() {
    let world = World::local();
    let (mut reader, mut writer) = world.pair_with::<Stream>(&Options::new());
    let piece = noise((1 << 20) + 13, 7);
    let target = tried(&writer);
    assert_eq!(target.is_none(), RingChoice::of_this_machine().tried() == CAPACITY_DEFAULT, "{target:?}");
    // Where the caches are unknown, or there is one CPU, so many bytes are sent that a stream would have tried.
    let least = 2 << 30;
    let over = AtomicBool::new(false);
    let cpus = sched_getaffinity(None).unwrap().count();
    thread::scope(|scope| {
        scope.spawn(|| {
            keep_to_cpu(1);
            let (mut at, mut buffer) = (0, vec![0; 1 << 20]);
            loop {
                let n = reader.split().0.read_until(&mut buffer, Deadline::after(SOON)).unwrap();
                if n == 0 {
                    break;
                }
                let (first, rest) = buffer[..n].split_at(n.min(piece.len() - at));
                assert!(first == &piece[at..at + first.len()] && *rest == piece[..rest.len()], "at {at}");
                at = (at + n) % piece.len();
            }
            assert!(over.load(Ordering::Relaxed), "the end comes last");
        });
        let (mut wrote, until) = (0, Instant::now() + 6 * SOON);
        keep_to_cpu(0);
        let target = target.filter(|_| cpus > 1);
        while target.map_or(wrote < least, |target| writer.statistics().sent.ring_size != target) {
            assert!(Instant::now() < until, "it stays with {:?} after {wrote} bytes", writer.statistics().sent);
            writer.split().1.write_all_until(&piece, Deadline::after(SOON)).unwrap();
            wrote += piece.len();
        }
        (0..100).for_each(|_| writer.split().1.write_all_until(&piece, Deadline::after(SOON)).unwrap());
        over.store(true, Ordering::Relaxed);
        writer.split().1.close();
    });
    if target.is_none() {
        assert_eq!(writer.statistics().sent.ring_size, CAPACITY_DEFAULT);
    }
}

#[test]
fn busy_sender_of_messages_tries_a_larger_ring_and_they_become_no_longer() {
    let world = World::local();
    let (mut receiver, mut sender) = world.pair_with::<Messages>(&Options::new());
    let target = sender.statistics().sent.ring_growth.map(|growth| growth.target);
    assert_eq!(target.is_none(), RingChoice::of_this_machine().tried() == CAPACITY_DEFAULT, "{target:?}");
    let most = sender.split().0.message_max();
    assert_eq!(most, message_max(CAPACITY_DEFAULT));
    let piece = noise(8000, 9);
    let cpus = sched_getaffinity(None).unwrap().count();
    thread::scope(|scope| {
        scope.spawn(|| {
            keep_to_cpu(1);
            let mut buffer = vec![0; most as usize];
            let mut received = 0_u64;
            while let Some(n) = receiver.split().1.recv_until(&mut buffer, Deadline::after(SOON)).unwrap() {
                if n == most as usize {
                    continue;
                }
                assert_eq!((n, &buffer[..8]), (piece.len(), &received.to_le_bytes()[..]));
                assert!(buffer[8..n] == piece[8..], "message {received}");
                received += 1;
            }
        });
        let (mut message, mut sent, until) = (piece.clone(), 0_u64, Instant::now() + 6 * SOON);
        keep_to_cpu(0);
        let target = target.filter(|_| cpus > 1);
        while target.map_or(sent < 1 << 18, |target| sender.statistics().sent.ring_size != target) {
            assert!(Instant::now() < until, "it stays with {:?} after {sent} messages", sender.statistics().sent);
            message[..8].copy_from_slice(&sent.to_le_bytes());
            sender.split().0.send_until(&message, Deadline::after(SOON)).unwrap();
            sent += 1;
        }
        let (half, _) = sender.split();
        assert_eq!(half.message_max(), most);
        half.send_until(&vec![1; most as usize], Deadline::after(SOON)).unwrap();
        let refused = half.send_until(&vec![1; most as usize + 1], Deadline::after(SOON));
        assert!(matches!(refused, Err(Error::TooLarge { max, .. }) if max == most), "{refused:?}");
        half.close();
    });
    // A program that asks for a size of ring also gets what goes with it.
    let world = World::local();
    let (mut receiver, mut sender) = world.pair_with::<Messages>(&Options::new());
    sender.split().0.resize(4 << 20).unwrap();
    eventually("the receiver takes the ring", || {
        while receiver.split().1.try_recv(&mut [0; 8]).unwrap().is_ready() {}
        sender.split().0.try_send(b"").unwrap();
        sender.split().0.message_max() == message_max(4 << 20)
    });
}

#[test]
fn ring_that_somebody_chose_tries_nothing() {
    let world = World::local();
    let (_reader, writer) = world.pair_with::<Stream>(&Options::new().ring_size(CAPACITY_DEFAULT));
    assert_eq!(writer.statistics().sent.ring_growth, None);
    // Memory that others may lack, as between machines, is not used for a trial.
    let world = World::harsh();
    let (_reader, writer) = world.pair_with::<Stream>(&Options::new());
    assert_eq!(writer.statistics().sent.ring_growth, None);
}

#[test]
fn stream_that_may_try_more_has_no_more_room_than_before() {
    let world = World::local();
    let (_reader, mut writer) = world.pair_with::<Stream>(&Options::new());
    let mut wrote = 0;
    while let Some(n) = writer.split().1.try_write(&[7; 100_000]).unwrap() {
        wrote += n as u64;
    }
    assert_eq!(wrote, CAPACITY_DEFAULT);
    let refused = writer.split().1.try_reserve(2 * CAPACITY_DEFAULT as usize).map(|there| there.is_some());
    assert!(matches!(refused, Err(Error::TooLarge { .. })), "{refused:?}");
}
