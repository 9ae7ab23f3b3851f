// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Streams whose rings begin small, and whose writers go ahead (H-9, ADR 0066): a program that relies on the default
//! room has it.

mod common;

use std::{
    io::{IoSlice, Read, Write},
    os::fd::AsFd,
    thread,
    time::Duration,
};

use common::{SOON, World, eventually, noise, raw};
use tombolo_channel::{Deadline, Ending, Error, Options, RingBudget, RingChoice, RingReason, Stream};
use tombolo_domain::{Endpoint, Received, wait_readable};
use tombolo_layout::{
    Features,
    handshake::{Greeting, Message, Refusal},
    limits::{CAPACITY_DEFAULT, CONTROL_LEN},
    state::{Phase, State},
    words,
};
use tombolo_mem::{OwnControl, OwnWord, PeerSegment, PeerWord};

const FIRST: u64 = 8 << 10;
/// Size of a ring before rings followed their load.
const ROOM: usize = CAPACITY_DEFAULT as usize;

fn soon() -> Deadline {
    Deadline::after(SOON)
}

fn target() -> u64 {
    RingChoice::of_this_machine().bytes()
}

fn growing() -> Options {
    Options::new().ring_growth(RingBudget::of_process())
}

fn pair() -> (Stream, Stream) {
    World::local().pair_with(&growing())
}

fn ring(stream: &Stream) -> (u64, RingReason) {
    let sent = stream.statistics().sent;
    (sent.ring_size, sent.ring_growth.expect("growth is the default").reason)
}

#[test]
fn h9_ring_of_one_end_grows_beside_a_fixed_one_of_the_other() {
    let world = World::local();
    let mut listener = world.listening.listen::<Stream>(&world.address, &growing()).unwrap();
    let (mut server, mut client) = thread::scope(|scope| {
        let client = scope.spawn(|| world.connect::<Stream>());
        (listener.accept_until(soon()).unwrap(), client.join().unwrap())
    });
    assert_eq!((ring(&server).0, client.statistics().sent.ring_size), (FIRST, CAPACITY_DEFAULT));
    let data = noise(ROOM, 11);
    let mut got = vec![0; ROOM];
    // Each endpoint writes as much as a ring used to hold, before the other reads.
    server.split().1.write_all_until(&data, soon()).unwrap();
    client.split().1.write_all_until(&data, soon()).unwrap();
    server.read_exact(&mut got).unwrap();
    assert!(got == data);
    client.read_exact(&mut got).unwrap();
    assert!(got == data && ring(&server).0 == target());
}

#[test]
fn h9_two_ends_that_each_write_a_mebibyte_before_either_reads_are_done() {
    for round in 0..3 {
        let (mut server, mut client) = pair();
        let (there, back) = (noise(ROOM, 1 + round), noise(ROOM, 100 + round));
        client.split().1.write_all_until(&there, soon()).unwrap();
        server.split().1.write_all_until(&back, soon()).unwrap();
        let mut got = vec![0; ROOM];
        server.read_exact(&mut got).unwrap();
        assert!(got == there);
        client.read_exact(&mut got).unwrap();
        assert!(got == back);
        // In pieces, by calls that never block, and with the reader notified by its poll descriptor. A reader that
        // finds nothing hands all of its ring back, which may have no more than this.
        let unread = [&mut server, &mut client].map(|end| end.split().0.available(1).unwrap());
        assert_eq!(unread, [0, 0]);
        let mut sent = 0;
        for piece in there.chunks(10_000) {
            sent += client.split().1.try_write(piece).unwrap().expect("there is room");
        }
        assert_eq!(sent, ROOM);
        assert_eq!(server.split().1.try_write(&back).unwrap(), Some(ROOM));
        server.read_exact(&mut got).unwrap();
        assert!(got == there);
        client.read_exact(&mut got).unwrap();
        assert!(got == back);
    }
}

#[test]
fn h9_every_call_that_writes_what_there_is_room_for_takes_what_the_ring_took_before() {
    type Call = fn(&mut Stream, &[IoSlice<'_>]) -> usize;
    fn whole(parts: &[IoSlice<'_>]) -> Vec<u8> {
        parts.iter().flat_map(|part| part.iter().copied()).collect()
    }
    let calls: [(&str, Call); 6] = [
        ("write_until", |stream, parts| stream.split().1.write_until(&whole(parts), soon()).unwrap()),
        ("try_write", |stream, parts| stream.split().1.try_write(&whole(parts)).unwrap().unwrap()),
        ("write_vectored_until", |stream, parts| stream.split().1.write_vectored_until(parts, soon()).unwrap()),
        ("try_write_vectored", |stream, parts| stream.split().1.try_write_vectored(parts).unwrap().unwrap()),
        ("write", |stream, parts| stream.write(&whole(parts)).unwrap()),
        ("write_vectored", |stream, parts| stream.write_vectored(parts).unwrap()),
    ];
    let data = noise(ROOM - 100, 13);
    // The first ring ends in the second part, or in the last.
    for cuts in [[0, 5000, 300_000], [0, 1000, 8000]] {
        let parts = [&data[cuts[0]..cuts[1]], &data[cuts[1]..cuts[2]], &[], &data[cuts[2]..]].map(IoSlice::new);
        for (name, call) in &calls {
            let (mut server, mut client) = pair();
            client.write_all(&[1; 100]).unwrap();
            assert_eq!(call(&mut client, &parts), data.len(), "{name}");
            let mut got = vec![0; ROOM];
            server.read_exact(&mut got).unwrap();
            assert!(got[100..] == data, "{name}");
        }
    }
}

#[test]
fn h9_first_call_that_never_blocks_takes_what_the_ring_took_before_and_the_next_is_told_by_its_descriptor() {
    let (mut server, mut client) = pair();
    let (_, write) = client.split();
    let fd = write.poll_fd().unwrap().try_clone_to_owned().unwrap();
    let data = noise(4 << 20, 3);
    let mut sent = write.try_write(&data[..ROOM]).unwrap().expect("there is room");
    assert_eq!(sent, ROOM);
    while let Some(n) = write.try_write(&data[sent..]).unwrap() {
        sent += n;
    }
    assert_eq!(sent as u64, FIRST + target(), "the first ring and the one that was gone ahead to");
    let mut got = vec![0; sent];
    server.read_exact(&mut got[..1]).unwrap();
    while !wait_readable(fd.as_fd(), Deadline::NOW).unwrap() || client.split().1.try_write(&[1]).unwrap().is_none() {
        let done = sent - client.split().1.statistics().in_flight as usize;
        assert!(done < sent, "all was read, and the writer is not told");
        let n = server.split().0.try_read(&mut got[1..4097]).unwrap().expect("there is more");
        assert!(n > 0);
    }
}

#[test]
fn h9_both_ends_that_poll_and_write_first_are_done() {
    let (mut server, mut client) = pair();
    let data = noise(ROOM, 8);
    let mut ends = [(&mut server, 0, 0), (&mut client, 0, 0)];
    let mut got = vec![0; ROOM];
    eventually("both are done", || {
        for (stream, wrote, read) in &mut ends {
            let (reader, writer) = stream.split();
            let ready = wait_readable(writer.poll_fd().unwrap(), Deadline::NOW).unwrap();
            if *wrote < ROOM {
                assert!(ready, "there is room, by all that a program knows");
                *wrote += writer.try_write(&data[*wrote..(*wrote + 7000).min(ROOM)]).unwrap().unwrap_or_default();
            } else if let Some(n) = reader.try_read(&mut got[*read..]).unwrap() {
                assert!(got[*read..*read + n] == data[*read..*read + n]);
                *read += n;
            }
        }
        ends.iter().all(|(_, _, read)| *read == ROOM)
    });
}

#[test]
fn h9_reserve_takes_as_much_as_the_ring_may_have_and_no_more() {
    let (mut server, mut client) = pair();
    let most = target() as usize;
    let too_much = client.split().1.try_reserve(most + 1);
    assert!(matches!(too_much, Err(Error::TooLarge { max, .. }) if max == most as u64), "{too_much:?}");
    let (mut server2, mut client2) = pair();
    let (first, second) = client2.split().1.reserve_until(most, soon()).unwrap();
    assert_eq!(first.len() + second.len(), most);
    first.fill(5);
    second.fill(5);
    client2.split().1.commit(most).unwrap();
    let mut got = vec![0; most.max(6 + ROOM)];
    server2.read_exact(&mut got[..most]).unwrap();
    assert!(got[..most].iter().all(|&byte| byte == 5));
    // After a few bytes that are still unread.
    let (mut server3, mut client3) = pair();
    client3.write_all(b"before").unwrap();
    assert!(client3.split().1.try_reserve(ROOM).unwrap().is_some());
    client3.split().1.commit(ROOM).unwrap();
    server3.read_exact(&mut got[..6 + ROOM]).unwrap();
    assert_eq!(&got[..6], b"before");
    // And the writer reports the room that it can get.
    assert!(server.split().1.room(ROOM).unwrap() >= ROOM as u64);
}

#[test]
fn h9_r10_reader_that_waits_for_more_than_the_ring_of_the_moment_gets_it() {
    let (mut server, mut client) = pair();
    let data = &noise(ROOM, 4)[..];
    thread::scope(|scope| {
        let waiting = scope.spawn(|| server.split().0.wait_for(ROOM, soon()));
        client.split().1.write_all_until(data, soon()).unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), ROOM as u64);
    });
    let mut got = vec![0; ROOM];
    assert_eq!(server.split().0.try_read(&mut got).unwrap(), Some(ROOM), "in one call");
    assert!(got == data);
    // Notified by a descriptor, until all of it is there.
    let (reader, _) = server.split();
    let fd = reader.poll_fd().unwrap().try_clone_to_owned().unwrap();
    client.split().1.write_all_until(&data[..ROOM / 2], soon()).unwrap();
    let mut last = reader.available(ROOM).unwrap();
    assert!(last <= ROOM as u64 / 2);
    client.split().1.write_all_until(&data[..ROOM / 2], soon()).unwrap();
    eventually("the rest is told", || {
        assert!(wait_readable(fd.as_fd(), soon()).unwrap());
        last = reader.available(ROOM).unwrap();
        last == ROOM as u64
    });
    // The end of the stream also ends a wait for more bytes than there are. The ring may have no more than `ROOM`.
    reader.read_exact(&mut got[..ROOM / 2]).unwrap();
    client.write_all(b"rest").unwrap();
    drop(client);
    assert_eq!(reader.wait_for(ROOM, soon()).unwrap(), ROOM as u64 / 2 + 4);
}

#[test]
fn h9_wait_for_more_than_a_ring_sleeps_meanwhile() {
    let (mut server, mut client) = pair();
    client.split().1.write_all_until(&[1; 100_000], soon()).unwrap();
    let before = server.statistics().received.counters.sleeps;
    let wait = Duration::from_millis(200);
    assert!(matches!(server.split().0.wait_for(ROOM, Deadline::after(wait)), Err(Error::TimedOut)));
    assert!(server.statistics().received.counters.sleeps - before < 20, "it looks again and again");
}

#[test]
fn h9_what_was_gone_ahead_to_is_read_after_its_writer_closed_or_went() {
    for closes in [true, false] {
        let (mut server, mut client) = pair();
        let data = noise(ROOM, 6);
        client.split().1.write_all_until(&data, soon()).unwrap();
        if closes {
            client.split().1.close();
        } else {
            client.split().1.abort();
            drop(client);
        }
        let mut got = Vec::new();
        server.read_to_end(&mut got).unwrap();
        assert!(got == data);
        assert_eq!(server.split().0.ending(), Some(if closes { Ending::Closed } else { Ending::Aborted }));
    }
}

#[test]
fn h9_idle_ring_shrinks_and_whoever_counts_on_room_after_that_has_it() {
    let options = growing().ring_idle_time(Duration::from_millis(10));
    let (mut server, mut client) = World::local().pair_with::<Stream>(&options);
    let data = noise(ROOM, 7);
    for _ in 0..5 {
        client.split().1.write_all_until(&data, soon()).unwrap();
        let mut got = vec![0; ROOM];
        server.read_exact(&mut got).unwrap();
        assert!(got == data);
        // The bytes that were read are handed back. The reader gets ready for the small ring, and does not enter it
        // before there is something in it.
        assert_eq!(server.split().0.try_read(&mut got).unwrap(), None);
        eventually("it shrinks", || {
            client.split().1.follow_load().unwrap();
            if client.split().1.is_moving() && ring(&client).0 != 4096 {
                assert_eq!(server.split().0.try_read(&mut got).unwrap(), None);
            }
            ring(&client).0 == 4096
        });
    }
}

#[test]
fn h9_budget_below_one_ring_bounds_and_says_so_and_loses_nothing() {
    let budget = RingBudget::unwatched(4096);
    let (mut server, mut client) = World::local().pair_with::<Stream>(&Options::new().ring_growth(&budget));
    let data = noise(100_000, 9);
    let waited = client.split().1.write_all_until(&data, Deadline::after(Duration::from_millis(50)));
    assert!(matches!(waited, Err(Error::TimedOut)), "{waited:?}");
    assert_eq!((ring(&client), budget.used()), ((FIRST, RingReason::Budget), 0));
    assert!(matches!(client.split().1.try_reserve(100_000), Err(Error::TooLarge { max: FIRST, .. })));
    let mut got = vec![0; FIRST as usize];
    server.read_exact(&mut got).unwrap();
    assert!(got[..] == data[..got.len()]);
    let rest = &data[got.len()..];
    thread::scope(|scope| {
        scope.spawn(|| client.write_all(rest).unwrap());
        let mut got = vec![0; rest.len()];
        server.read_exact(&mut got).unwrap();
        assert!(got == rest);
    });
}

#[test]
fn c4_listener_that_knows_no_writer_that_goes_ahead_is_asked_anew_for_a_channel_as_ever() {
    let world = World::local();
    let mut listener = world.domain_listener();
    thread::scope(|scope| {
        let client = scope.spawn(|| world.connecting.connect::<Stream>(&world.address, &growing()));
        let mut link = raw::open(&mut *listener);
        let (hello, segment) = receive_hello(&mut *link);
        let required = Features::HANDOVER.or(Features::AHEAD);
        assert_eq!((hello.required, segment.len() as u64), (required, CONTROL_LEN + FIRST));
        // The answer of an earlier version, which has not yet told its program of a caller.
        link.send(&Message::Refuse(Refusal::Feature, "features 0x10 are required".into()).encode(), None).unwrap();
        drop(link);
        let mut link = raw::open(&mut *listener);
        let (hello, segment) = receive_hello(&mut *link);
        assert_eq!((hello.required, segment.len() as u64), (Features::NONE, CONTROL_LEN + CAPACITY_DEFAULT));
        let _kept = raw::send_with_segment(&mut *link, &Message::Welcome(raw::greeting()).encode(), 0);
        let mut stream = client.join().unwrap().unwrap();
        let sent = stream.statistics().sent;
        // Whether the stream would try a larger ring depends on this machine's caches.
        assert!(sent.ring_growth.is_none_or(|growth| growth.reason == RingReason::First));
        assert_eq!(sent.ring_size, CAPACITY_DEFAULT);
        assert_eq!(stream.split().1.try_write(&noise(2 * ROOM, 1)).unwrap(), Some(ROOM));
    });
}

#[test]
fn c4_caller_is_refused_for_good_by_who_refuses_it_as_ever_or_for_another_reason() {
    // The program gets the second answer; where the reason is another one, it gets the first.
    for (codes, attempts) in [(vec![Refusal::Feature, Refusal::Feature], 2), (vec![Refusal::Quota], 1)] {
        let world = World::local();
        let mut listener = world.domain_listener();
        thread::scope(|scope| {
            let client = scope.spawn(|| world.connecting.connect::<Stream>(&world.address, &growing()));
            for code in &codes {
                let mut link = raw::open(&mut *listener);
                receive_hello(&mut *link);
                link.send(&Message::Refuse(*code, "no".into()).encode(), None).unwrap();
            }
            let told = client.join().unwrap().map(drop);
            assert!(matches!(&told, Err(Error::Refused { code, .. }) if *code == codes[attempts - 1]), "{told:?}");
            assert!(listener.accept().unwrap().is_none(), "it asks no more");
        });
    }
}

#[test]
fn c4_welcome_that_offers_less_than_the_small_ring_requires_is_refused() {
    for offered in [Features::HANDOVER, Features::AHEAD] {
        let world = World::local();
        let mut listener = world.domain_listener();
        thread::scope(|scope| {
            let client = scope.spawn(|| world.connecting.connect::<Stream>(&world.address, &growing()));
            let mut link = raw::open(&mut *listener);
            receive_hello(&mut *link);
            let welcome = Greeting { offered, ..raw::greeting() };
            let _kept = raw::send_with_segment(&mut *link, &Message::Welcome(welcome).encode(), 0);
            let told = client.join().unwrap().map(drop);
            assert!(matches!(told, Err(Error::Malformed { clause: "C-4", .. })), "{told:?}");
            let said = raw::receive_message(&mut *link).unwrap();
            assert!(matches!(said, Message::Refuse(Refusal::Feature, _)), "{said:?}");
        });
    }
}

/// Returns a caller's first message, with its segment.
fn receive_hello(link: &mut dyn Endpoint) -> (Greeting, PeerSegment) {
    loop {
        if let Some(Received { message, segment }) = link.recv(1 << 31).unwrap() {
            let Ok(Message::Hello(hello)) = Message::decode(&message) else { panic!("no greeting") };
            return (hello, segment.expect("its segment"));
        }
        assert!(wait_readable(link.fd(), soon()).unwrap(), "the peer says nothing");
    }
}

/// Returns a stream whose peer is the test; the peer's greeting says that it reads on where its peer goes ahead.
fn with_raw_peer(options: &Options) -> (Stream, Box<dyn Endpoint>, OwnControl, PeerSegment) {
    with_raw_peer_that_says(&raw::ahead(), options)
}

/// Returns a stream whose peer is the test, which sent `greeting`.
fn with_raw_peer_that_says(
    greeting: &Greeting,
    options: &Options,
) -> (Stream, Box<dyn Endpoint>, OwnControl, PeerSegment) {
    let world = World::local();
    let mut listener = world.listening.listen::<Stream>(&world.address, options).unwrap();
    let mut link = world.connect_raw();
    let (control, offer) = raw::send_with_segment(&mut *link, &Message::Hello(*greeting).encode(), 0);
    std::mem::forget(offer);
    let stream = listener.accept_until(soon()).unwrap();
    let welcome = link.recv(1 << 31).unwrap().expect("it was sent before the listener agreed");
    (stream, link, control, welcome.segment.unwrap())
}

#[test]
fn h9_peer_that_never_takes_the_ring_costs_one_and_nobody_waits_for_it_beyond_its_deadline() {
    let budget = RingBudget::unwatched(1 << 30);
    let options = Options::new().ring_size(256 << 10).ring_growth(&budget);
    let (mut stream, mut link, control, theirs) = with_raw_peer(&options);
    let waited = stream.split().1.write_all_until(&noise(2 << 20, 2), Deadline::after(Duration::from_millis(100)));
    assert!(matches!(waited, Err(Error::TimedOut)), "{waited:?}");
    let tail = || theirs.word(words::TAIL).load_acquire().check(Ok::<_, ()>).unwrap();
    assert_eq!((tail(), stream.statistics().sent.in_flight), (FIRST, FIRST + (256 << 10)));
    assert_eq!(budget.used(), (256 << 10) + CONTROL_LEN);
    // The peer reads the first ring, and is never ready for the other.
    control.word(words::HEAD).store_release(FIRST);
    assert_eq!(stream.split().1.try_write(&[1; 100]).unwrap(), None);
    let mut offers = 0;
    while let Some(received) = link.recv(1 << 31).unwrap() {
        assert!(matches!(Message::decode(&received.message), Ok(Message::Ring { generation: 1, .. })));
        offers += 1;
    }
    assert_eq!((offers, budget.used()), (1, (256 << 10) + CONTROL_LEN));
    drop(stream);
    assert_eq!(budget.used(), 0);
}

/// Stores a state by which the writer is in ring `generation`, which its reader has not taken.
fn go_ahead(control: &OwnControl, generation: u16) {
    let state = State { phase: Phase::Open, ready: generation, current: generation };
    control.word(words::WRITER_STATE).store_release(state.encode());
}

#[test]
fn h9_peer_that_goes_ahead_without_a_ring_or_too_far_is_corrupt_and_what_it_wrote_before_is_read() {
    for (generation, clause) in [(1, "H-1"), (2, "H-5"), (u16::MAX, "H-5")] {
        let (mut stream, _link, control, _theirs) = with_raw_peer(&growing());
        control.word(words::TAIL).store_release(100);
        go_ahead(&control, generation);
        let mut got = [1; 200];
        assert_eq!(stream.split().0.try_read(&mut got).unwrap(), Some(100));
        let told = stream.split().0.try_read(&mut got);
        let found = match &told {
            Err(Error::Malformed { clause, .. }) => clause,
            Err(Error::Corrupt(corrupt)) => corrupt.clause,
            other => panic!("{other:?}"),
        };
        assert_eq!(found, clause, "{told:?}");
    }
}

#[test]
fn c4_ahead_is_not_in_force_where_the_peer_offers_it_with_messages_or_without_handover() {
    for offered in [Features::AHEAD, raw::ahead().offered.or(Features::MESSAGES)] {
        let greeting = Greeting { offered, ..raw::greeting() };
        let options = Options::new().ring_size(256 << 10).ring_growth(&RingBudget::unwatched(1 << 30));
        let (mut stream, _link, control, theirs) = with_raw_peer_that_says(&greeting, &options);
        let waited = stream.split().1.write_all_until(&noise(1 << 20, 2), Deadline::after(Duration::from_millis(100)));
        assert!(matches!(waited, Err(Error::TimedOut)), "{waited:?}");
        let state = theirs.word(words::WRITER_STATE).load_acquire().check(Ok::<_, ()>).unwrap();
        assert_eq!(State::decode(state).unwrap().current, 0, "{offered:?}");
        go_ahead(&control, 1);
        let told = stream.split().0.try_read(&mut [0; 100]);
        assert!(matches!(&told, Err(Error::Corrupt(corrupt)) if corrupt.clause == "H-5"), "{told:?}");
    }
}

#[test]
fn h9_peer_that_goes_ahead_without_end_keeps_no_call_busy_and_costs_two_mappings() {
    let world = World::local();
    let mut listener = world.listening.listen::<Stream>(&world.address, &growing()).unwrap();
    let mut link = world.connect_raw();
    let (control, _offer) = raw::send_with_segment(&mut *link, &Message::Hello(raw::ahead()).encode(), 0);
    let mut stream = listener.accept_until(soon()).unwrap();
    for generation in 1..500 {
        let message = Message::Ring { generation, epoch: raw::EPOCH }.encode();
        let _kept = raw::send_with_segment(&mut *link, &message, generation);
        go_ahead(&control, generation);
        // Each call takes one ring at most, finds nothing in it, and returns.
        assert_eq!(stream.split().0.try_read(&mut [0; 8]).unwrap(), None, "{generation}");
    }
    let mapped = std::fs::read_to_string("/proc/self/maps").unwrap();
    let place = world.address.service();
    let of_peer = mapped.lines().filter(|line| line.contains("memfd:") && line.contains(place)).count();
    assert!(of_peer < 16, "{of_peer} mappings");
}

#[test]
fn h9_peer_that_understates_where_its_next_ring_begins_is_corrupt_and_one_that_falls_silent_there_is_no_end() {
    for understates in [true, false] {
        let (mut stream, mut link, control, _theirs) = with_raw_peer(&growing());
        control.word(words::TAIL).store_release(100);
        let message = Message::Ring { generation: 1, epoch: raw::EPOCH }.encode();
        let (next, _offer) = raw::send_with_segment(&mut *link, &message, 1);
        next.word(words::TAIL).store_release(if understates { 50 } else { 100 });
        go_ahead(&control, 1);
        assert_eq!(stream.split().0.read_until(&mut [0; 200], soon()).unwrap(), 100);
        let shortly = || Deadline::after(Duration::from_millis(100));
        let told = stream.split().0.read_until(&mut [0; 200], shortly());
        if understates {
            assert!(matches!(&told, Err(Error::Corrupt(corrupt)) if corrupt.clause == "R-7"), "{told:?}");
            continue;
        }
        assert!(matches!(told, Err(Error::TimedOut)), "{told:?}");
        drop(link);
        assert_eq!(stream.split().0.read_until(&mut [0; 200], soon()).unwrap(), 0);
        assert_eq!(stream.split().0.ending(), Some(Ending::ProcessGone));
    }
}
