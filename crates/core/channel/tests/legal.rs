// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that does what the specification allows and this implementation never does: it is served like any other.

mod common;

use std::thread;

use common::{SOON, World, eventually, raw};
use tombolo_channel::{Channel, Deadline, Ending, Error, Messages, Stream};
use tombolo_domain::{Doorbell, Endpoint, Offer, Slot, Woken};
use tombolo_layout::{
    Features, SegmentHeader,
    handshake::{Greeting, Message},
    state::{Phase, State},
    words,
};
use tombolo_mem::{OwnBytes, OwnControl, OwnWord, PeerData, PeerSegment, PeerWord};

/// Size of the peer's ring, and its beginning: behind pages that have no use yet (M-4, R-30).
const CAPACITY: u64 = 4096;
const DATA_AT: u64 = 3 * 4096;
/// Bits that no version knows yet, beside the one that is known.
const UNKNOWN: Features = Features(1 << 63 | 1 << 40 | 1 << 10 | 1 << 9 | 1 << 8);

/// Makes a segment such as no endpoint of this implementation makes.
fn segment(link: &mut dyn Endpoint, generation: u16, start: u64, features: Features) -> (OwnControl, OwnBytes, Offer) {
    let header = SegmentHeader {
        generation,
        segment_len: DATA_AT + CAPACITY,
        data_offset: DATA_AT,
        capacity: CAPACITY,
        start,
        features,
        epoch: raw::EPOCH,
    };
    let (segment, offer) = link.allocate(header.segment_len as usize).unwrap();
    let (control, data) = segment.split(DATA_AT as usize);
    control.write_header(&header.encode());
    if generation == 0 {
        control.word(words::TAIL).store_release(start);
    }
    (control, data, offer)
}

/// The peer: what it writes, and what it sees of the other endpoint.
struct Odd {
    link: Box<dyn Endpoint>,
    control: OwnControl,
    data: OwnBytes,
    tail: u64,
    theirs: PeerSegment,
    _offers: Vec<Offer>,
}

impl Odd {
    fn set(&self, word: usize, value: u64) {
        self.control.word(word).store_release(value);
    }

    fn sees(&self, word: usize) -> u64 {
        self.theirs.word(word).load_acquire().check(Ok::<_, ()>).unwrap()
    }

    fn doorbell(&self) -> std::sync::Arc<dyn Doorbell> {
        self.link.doorbell().unwrap()
    }

    fn put(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.data.slice_mut((self.tail % CAPACITY) as usize, 1)[0] = *byte;
            self.tail = self.tail.wrapping_add(1);
        }
    }

    fn publish(&self) {
        self.set(words::TAIL, self.tail);
        self.doorbell().notify(Slot::Data);
    }

    /// Returns bytes of the other endpoint's first ring.
    fn read_ring(&self, from: u64, len: usize) -> Vec<u8> {
        let header = self.theirs.header::<{ tombolo_layout::header::LEN }>();
        let header = SegmentHeader::decode(&header, self.theirs.len() as u64).unwrap();
        let data = self.theirs.data(header.data_offset as usize);
        (0..len as u64)
            .map(|at| {
                let mut byte = [0];
                data.copy_out((from.wrapping_add(at) % header.capacity) as usize, &mut byte);
                byte[0]
            })
            .collect()
    }
}

fn greeting(messages: bool) -> Greeting {
    let mode = if messages { Features::MESSAGES } else { Features::NONE };
    Greeting {
        version_min: 0,
        offered: UNKNOWN.or(Features::HANDOVER).or(mode),
        // Exactly the size of the other's first segment.
        map_limit: 4096 + (1 << 18),
        ..raw::greeting()
    }
}

/// Makes a channel to which the peer connected, with positions that begin at `start`. The peer has not stored *open*
/// yet.
fn pair<C: Channel + Send>(world: &World, messages: bool, start: u64) -> (C, Odd) {
    let options = tombolo_channel::Options::new().ring_size(1 << 18);
    let mut listener = world.listening.listen::<C>(&world.address, &options).unwrap();
    let mut link = world.connect_raw();
    // The header has other features than the greeting: they are not compared (M-4).
    let (control, data, offer) = segment(&mut *link, 0, start, Features(1 << 50));
    link.send(&Message::Hello(greeting(messages)).encode(), Some(&offer)).unwrap();
    let end = listener.accept_until(Deadline::after(SOON)).unwrap();
    let welcome = link.recv(1 << 31).unwrap().expect("it was sent before the listener agreed");
    assert!(matches!(Message::decode(&welcome.message), Ok(Message::Welcome(_))));
    let theirs = welcome.segment.unwrap();
    (end, Odd { link, control, data, tail: start, theirs, _offers: vec![offer] })
}

const OPEN: u64 = 1;

on_every_backend! {
    fn m4_r1_stream_whose_positions_wrap_in_a_ring_behind_spare_pages_is_read(world) {
        let start = u64::MAX - 99;
        let (mut stream, mut peer) = pair::<Stream>(&world, false, start);
        peer.set(words::HEAD, 0);
        let said: Vec<u8> = (0..6000u32).map(|at| at as u8).collect();
        let mut got = Vec::new();
        // The peer publishes all bytes in phase *fresh* and then stores *closed*. That is what a reader sees that did
        // not look while the phase was *open* (R-15).
        for piece in said.chunks(1500) {
            peer.put(piece);
            peer.publish();
            let mut buffer = vec![0; piece.len()];
            std::io::Read::read_exact(&mut stream, &mut buffer).unwrap();
            got.extend(buffer);
            assert_eq!(peer.sees(words::READER_STATE) & 0xff, OPEN);
        }
        assert!(got == said);
        peer.set(words::WRITER_STATE, State { phase: Phase::Closed, ready: 0, current: 0 }.encode());
        peer.doorbell().notify(Slot::Data);
        assert_eq!(stream.split().0.read_until(&mut [0; 1], Deadline::after(SOON)).unwrap(), 0);
        assert_eq!(stream.split().0.ending(), Some(Ending::Closed));
        assert_eq!(peer.sees(words::HEAD), peer.tail, "all was handed back");
    }

    fn r3_reader_that_only_looks_hands_back_what_it_read(world) {
        let (mut stream, mut peer) = pair::<Stream>(&world, false, 0);
        peer.set(words::WRITER_STATE, OPEN);
        peer.put(&[7; 100]);
        peer.publish();
        std::io::Read::read_exact(&mut stream, &mut [0; 100]).unwrap();
        assert_eq!(stream.split().0.available(1).unwrap(), 0, "it looks, and finds nothing");
        assert_eq!(peer.sees(words::HEAD), 100);
    }

    fn r10_r12_peer_that_sleeps_for_the_largest_amount_is_notified_once(world) {
        let (mut stream, peer) = pair::<Stream>(&world, false, 0);
        let ring: u64 = 1 << 18;
        // The largest possible amount, and a head that lags by up to an eighth.
        let doorbell = peer.doorbell();
        doorbell.drain(Slot::Data);
        peer.set(words::WANT_DATA, words::armed(ring));
        let mut notifications = 0;
        let part = vec![5; ring as usize / 8];
        for eighth in 1..=8 {
            assert!(doorbell.wait(Slot::Data, Deadline::NOW).unwrap() != Woken::Notified || eighth == 1, "notified too early");
            doorbell.drain(Slot::Data);
            stream.split().1.write_all_until(&part, Deadline::after(SOON)).unwrap();
            notifications += u32::from(doorbell.wait(Slot::Data, Deadline::NOW).unwrap() == Woken::Notified);
        }
        assert_eq!(notifications, 1);
        assert!(peer.read_ring(0, ring as usize) == vec![5; ring as usize]);
        // The peer begins only now, and first stores that it closes: nothing was read.
        peer.set(words::HEAD, 0);
        peer.set(words::READER_STATE, State { phase: Phase::Closed, ready: 0, current: 0 }.encode());
        doorbell.notify(Slot::Space);
        let drained = stream.split().1.drained_until(Deadline::after(SOON));
        assert!(matches!(drained, Err(Error::Closed)), "{drained:?}");
    }

    fn r20_r22_messages_that_come_a_word_at_a_time_are_whole(world) {
        let start = 0u64.wrapping_sub(64);
        let (mut messages, mut peer) = pair::<Messages>(&world, true, start);
        peer.set(words::HEAD, 0);
        peer.set(words::WRITER_STATE, OPEN);
        let mut record = vec![20, 0, 0, 0, 0, 0, 0, 0];
        record.extend(0..20u8);
        // Padding has no meaning, and is not checked.
        record.extend([0xee; 4]);
        let mut buffer = [0; 64];
        for round in 0..200 {
            for word in record.chunks(8) {
                assert!(messages.split().1.try_recv(&mut buffer).unwrap().is_pending(), "round {round}");
                peer.put(word);
                peer.publish();
            }
            assert_eq!(messages.split().1.recv_until(&mut buffer, Deadline::after(SOON)).unwrap(), Some(20));
            assert_eq!(buffer[..20], record[8..28]);
        }
    }

    fn h1_h4_pipe_follows_a_peer_whose_messages_have_more_in_them_than_is_looked_at(world) {
        let start = u64::MAX - 1000;
        let (mut stream, mut peer) = pair::<Stream>(&world, false, start);
        peer.set(words::WRITER_STATE, OPEN);
        peer.put(&[1; 500]);
        peer.publish();
        let mut kept = Vec::new();
        for generation in 1..=5u16 {
            let mut ring = Message::Ring { generation, epoch: raw::EPOCH }.encode();
            // Versions other than the agreed ones, which only state what the peer speaks, and fields that a Ring does
            // not use (C-2).
            ring[0x0a..0x0e].copy_from_slice(&[0, 0, 9, 0]);
            ring[0x10..0x20].fill(0xff);
            ring[0x28..0x30].fill(0xff);
            // The start has no meaning here, nor have its features (M-4).
            let (control, mut data, offer) = segment(&mut *peer.link, generation, 12345, Features(u64::MAX));
            peer.link.send(&ring, Some(&offer)).unwrap();
            // The message may be there before the word: the reader does not yet report that it is ready (H-2).
            let mut byte = [0];
            std::io::Read::read_exact(&mut stream, &mut byte).unwrap();
            assert_eq!(peer.sees(words::READER_STATE) >> 16, u64::from(generation) - 1);
            let say = |ready: u16, current: u16| {
                peer.set(words::WRITER_STATE, State { phase: Phase::Open, ready, current }.encode());
                peer.doorbell().notify(Slot::Data);
            };
            say(generation, generation - 1);
            eventually("it is ready for the next ring", || {
                // Everything in this ring stays to be read from it.
                let _ = stream.split().0.available(1 << 20).unwrap();
                peer.sees(words::READER_STATE) >> 16 == u64::from(generation)
            });
            let switch = peer.tail;
            control.word(words::TAIL).store_release(switch);
            say(generation, generation);
            // Bytes that come now are in the new ring alone.
            for _ in 0..500 {
                data.slice_mut((peer.tail % CAPACITY) as usize, 1)[0] = 1 + generation as u8;
                peer.tail = peer.tail.wrapping_add(1);
            }
            control.word(words::TAIL).store_release(peer.tail);
            peer.doorbell().notify(Slot::Data);
            let mut got = [0; 499];
            std::io::Read::read_exact(&mut stream, &mut got).unwrap();
            assert!(got.iter().all(|byte| *byte == generation as u8), "what was published before comes first");
            let mut next = [0];
            std::io::Read::read_exact(&mut stream, &mut next).unwrap();
            assert_eq!(next[0], 1 + generation as u8, "and then the new ring");
            let behind = peer.sees(words::HEAD).wrapping_sub(switch);
            assert!(behind <= 1, "the old ring is left, and that is said");
            // The next round begins with 500 bytes unread, as the first one did.
            data.slice_mut((peer.tail % CAPACITY) as usize, 1)[0] = 1 + generation as u8;
            peer.tail = peer.tail.wrapping_add(1);
            control.word(words::TAIL).store_release(peer.tail);
            peer.doorbell().notify(Slot::Data);
            kept.push((control, data, offer));
        }
    }

    fn c3_c6_listener_that_says_more_than_is_known_is_joined(world) {
        let mut listener = world.domain_listener();
        thread::scope(|scope| {
            let client = scope.spawn(|| world.connect::<Stream>());
            let mut link = raw::open(&mut *listener);
            let Ok(Message::Hello(hello)) = raw::receive_message(&mut *link) else { panic!("no Hello") };
            let counts = !link.same_kernel() || tombolo_mem::counts_pages();
            assert_eq!(hello.map_limit, 4096 + if counts { 1 << 30 } else { 16 << 20 }, "the largest that it maps (C-2)");
            let (control, _data, offer) = segment(&mut *link, 0, 77, Features(1 << 50));
            // From now on the peer maps no more than this; existing mappings stay.
            let welcome = Greeting { map_limit: 8192, ..greeting(false) };
            link.send(&Message::Welcome(welcome).encode(), Some(&offer)).unwrap();
            let mut stream = client.join().unwrap();
            control.word(words::WRITER_STATE).store_release(State { phase: Phase::Closed, ready: 0, current: 0 }.encode());
            link.doorbell().unwrap().notify(Slot::Data);
            assert_eq!(stream.split().0.read_until(&mut [0; 1], Deadline::after(SOON)).unwrap(), 0);
            let refused = stream.split().1.resize(1 << 20);
            assert!(matches!(refused, Err(Error::TooLarge { max: 8192, .. })), "{refused:?}");
            stream.split().1.resize(4096).unwrap();
        });
    }
}
