// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The stats page: what an endpoint publishes about itself, read as a tool reads it, from its segment alone (C-12).

mod common;

use std::time::{Duration, Instant};

use common::{SOON, World, raw};
use tombolo_channel::{Counters, Deadline, Error, Options, RingBudget, Stream};
use tombolo_domain::{Endpoint, Offer, wait_readable};
use tombolo_layout::{Features, SegmentHeader, handshake::Message, words};
use tombolo_mem::{OwnControl, OwnWord, PeerSegment, PeerWord};

/// A stream, the segment of its endpoint, and the peer, which the test plays.
struct Watched {
    stream: Stream,
    segment: PeerSegment,
    link: Box<dyn Endpoint>,
    own: OwnControl,
    _offer: Offer,
}

fn watched(world: &World, options: &Options) -> Watched {
    let mut listener = world.listening.listen::<Stream>(&world.address, options).unwrap();
    let mut link = world.connect_raw();
    let (own, offer) = raw::send_with_segment(&mut *link, &Message::Hello(raw::greeting()).encode(), 0);
    let stream = listener.accept_until(Deadline::after(SOON)).unwrap();
    assert!(wait_readable(link.fd(), Deadline::after(SOON)).unwrap());
    let segment = link.recv(1 << 31).unwrap().unwrap().segment.unwrap();
    Watched { stream, segment, link, own, _offer: offer }
}

/// Returns the words of the stats page.
fn counters(segment: &PeerSegment, at: usize) -> [u64; 9] {
    std::array::from_fn(|index| segment.word(at + 8 * index).load_relaxed().hint())
}

fn worlds() -> [World; 2] {
    [World::harsh(), World::local()]
}

#[test]
fn c12_endpoint_declares_its_stats_page_and_its_peer() {
    for world in worlds() {
        let Watched { segment, .. } = watched(&world, &Options::new());
        let header = SegmentHeader::decode(&segment.header(), segment.len() as u64).unwrap();
        assert!(header.features.has(Features::STATISTICS));
        assert_eq!(segment.word(words::PEER_EPOCH).load_relaxed().hint(), raw::EPOCH);
    }
}

#[test]
fn c12_stats_page_is_up_to_date_once_an_end_sleeps() {
    for world in worlds() {
        let Watched { mut stream, segment, link: _link, .. } = watched(&world, &Options::new());
        let began = Instant::now();
        // On a busy machine one deadline may pass before there was time to sleep.
        let counted = loop {
            let refused = stream.split().0.read_until(&mut [0], Deadline::after(Duration::from_millis(20)));
            assert!(matches!(refused, Err(Error::TimedOut)), "{refused:?}");
            let counted = stream.statistics().received.counters;
            if counted.sleeps > 0 {
                break counted;
            }
            assert!(began.elapsed() < SOON, "it never sleeps");
        };
        let published = Counters::from_listed(counted.bytes, counters(&segment, words::READER_COUNTERS));
        assert_eq!((published.sleeps, published.messages), (counted.sleeps, 0));
        assert_eq!(counters(&segment, words::WRITER_COUNTERS), Counters::default().listed());
    }
}

#[test]
fn c12_stats_page_is_never_more_than_1024_calls_behind() {
    for world in worlds() {
        let Watched { mut stream, segment, link: _link, .. } = watched(&world, &Options::new());
        for calls in 1..=3000u64 {
            assert_eq!(stream.split().1.try_write(b"x").unwrap(), Some(1));
            let behind = calls - counters(&segment, words::WRITER_COUNTERS)[0];
            assert!(behind <= 1024, "{behind} calls behind after {calls}");
        }
        stream.split().1.close();
        assert_eq!(counters(&segment, words::WRITER_COUNTERS), stream.statistics().sent.counters.listed());
    }
}

#[test]
fn c12_stats_page_shows_how_a_ring_follows_its_load() {
    for world in worlds() {
        let growth = |segment: &PeerSegment| segment.word(words::RING_GROWTH).load_relaxed().hint();
        let Watched { segment, link: _link, .. } = watched(&world, &Options::new().ring_size(1 << 20));
        assert_eq!(growth(&segment), 0, "it does not");
        let world = World::local();
        let options = Options::new().ring_size(64 << 10).ring_growth(&RingBudget::unwatched(5000));
        let mut listener = world.listening.listen::<Stream>(&world.address, &options).unwrap();
        let mut link = world.connect_raw();
        let (own, _offer) = raw::send_with_segment(&mut *link, &Message::Hello(raw::greeting()).encode(), 0);
        let mut stream = listener.accept_until(Deadline::after(SOON)).unwrap();
        let segment = link.recv(1 << 31).unwrap().unwrap().segment.unwrap();
        let told = || words::decode_growth(growth(&segment));
        assert_eq!(told(), Some((64 << 10, "first")));
        while told() != Some((64 << 10, "budget")) {
            let tail = segment.word(words::TAIL).load_acquire().hint();
            own.word(words::HEAD).store_release(tail);
            assert!(tail < 64 << 20, "it never wants to grow");
            while stream.split().1.try_write(&[3; 3000]).unwrap().is_some() {}
        }
        let growth = stream.statistics().sent.ring_growth.unwrap();
        assert_eq!(words::RING_REASONS[growth.reason as usize], "budget");
        let _ = stream.split().1.resize(4096);
        assert_eq!(told(), None, "its program answers for it from now on");
    }
}

#[test]
fn c12_invalid_words_on_a_stats_page_are_read_by_no_endpoint() {
    for world in worlds() {
        let Watched { mut stream, segment, link: _link, own, .. } = watched(&world, &Options::new());
        for at in (words::WRITER_COUNTERS..4096).step_by(8) {
            own.word(at).store_relaxed(u64::MAX);
        }
        own.word(words::TAIL).store_release(5);
        let mut five = [1; 5];
        assert_eq!(stream.split().0.read_until(&mut five, Deadline::after(SOON)).unwrap(), 5);
        assert_eq!(stream.split().1.write_until(b"fine", Deadline::after(SOON)).unwrap(), 4);
        assert_eq!(segment.word(words::TAIL).load_acquire().hint(), 4);
    }
}
