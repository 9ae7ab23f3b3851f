// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Both sides of this crate, and each of them with a model of the original.

mod common;

use std::{sync::Arc, thread};

use common::{Domain, World, eventually, noise, original::Original};
use proptest::prelude::*;
use tombolo_vchan_wire::{Error, Live, Reader, Server, Writer, client};

const PATH: &str = "data/vchan/2/42";
/// Sizes of both rings: within the page, one page, 1 MiB and mixtures.
const SIZES: [(usize, usize); 6] =
    [(0, 0), (2048, 1000), (4096, 4096), (65_536, 2048), (1, 1 << 20), (1 << 20, 1 << 20)];

fn serve(world: &Arc<World>, read: usize, write: usize) -> (Server, Reader, Writer) {
    let (server, (reader, writer)) = Server::new(Arc::new(Domain(Arc::clone(world))), PATH, read, write).unwrap();
    (server, reader, writer)
}

fn write_all(writer: &mut Writer, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let written = writer.write(bytes).unwrap();
        bytes = &bytes[written..];
        if written == 0 {
            writer.wait_for(1).unwrap();
        }
    }
}

fn read_all(reader: &mut Reader, len: usize) -> Vec<u8> {
    let (mut bytes, mut done) = (vec![0; len], 0);
    while done < len {
        assert!(reader.wait_for(1).unwrap() > 0, "it ended after {done} of {len}");
        done += reader.read(&mut bytes[done..]).unwrap();
    }
    bytes
}

fn original_reads(peer: &Original, len: usize) -> Vec<u8> {
    let (mut bytes, mut done) = (vec![0; len], 0);
    while done < len {
        let read = peer.read(&mut bytes[done..(done + 5000).min(len)]);
        assert!(read > 0, "the original found the end after {done} of {len}");
        done += read;
    }
    bytes
}

#[test]
fn w3_client_does_not_come_to_a_server_that_has_one() {
    let world = World::new();
    let (server, reader, writer) = serve(&world, 4096, 4096);
    let first = Original::join(&world, PATH);
    let second = client(&Domain(Arc::clone(&world)), PATH);
    assert!(matches!(second, Err(Error::Busy(_))), "{second:?}");
    assert_eq!(server.live(), Live::Here, "the first is still there");
    drop(first);
    drop((reader, writer));
}

#[test]
fn w7_end_that_is_told_that_the_peers_domain_is_gone_waits_no_more() {
    let world = World::new();
    let (_server, mut reader, mut writer) = serve(&world, 4096, 4096);
    let watch = reader.watch();
    thread::scope(|scope| {
        let reads = scope.spawn(|| reader.wait_for(1).unwrap());
        watch.lost();
        assert_eq!(reads.join().unwrap(), 0);
    });
    assert!(watch.is_lost() && matches!(writer.wait_for(4096), Err(Error::Closed)));
}

#[test]
fn w3_w5_w6_server_talks_to_the_original_both_ways_in_rings_of_every_size() {
    for (read, write) in SIZES {
        let world = World::new();
        let (server, mut reader, mut writer) = serve(&world, read, write);
        assert_eq!(server.live(), Live::NotYet);
        let peer = Original::join(&world, PATH);
        assert_eq!(server.live(), Live::Here);
        let (there, back) = (&noise(150_000, 1), &noise(140_000, 2));
        thread::scope(|scope| {
            scope.spawn(|| write_all(&mut writer, there));
            scope.spawn(|| assert!(read_all(&mut reader, back.len()) == *back, "{read} {write}"));
            assert!(peer.exchange(back, there.len()) == *there, "{read} {write}");
        });
        drop((server, reader, writer));
        assert_eq!((peer.is_open(), peer.read(&mut [0; 4]), world.nodes()), (0, 0, 0));
    }
}

#[test]
fn w3_w5_w6_client_talks_to_the_original_both_ways_in_rings_of_every_order() {
    for (left, right) in [(10, 11), (11, 10), (12, 12), (16, 11), (11, 20), (20, 20)] {
        let world = World::new();
        let peer = Original::serve(&world, PATH, left, right);
        assert_eq!(peer.is_open(), 2);
        let (mut reader, mut writer) = client(&Domain(Arc::clone(&world)), PATH).unwrap();
        assert_eq!((peer.is_open(), reader.capacity(), writer.capacity()), (1, 1 << right, 1 << left));
        let (there, back) = (&noise(150_000, 3), &noise(140_000, 4));
        thread::scope(|scope| {
            scope.spawn(|| write_all(&mut writer, there));
            scope.spawn(|| assert!(read_all(&mut reader, back.len()) == *back, "{left} {right}"));
            assert!(peer.exchange(back, there.len()) == *there, "{left} {right}");
        });
        peer.close();
        assert_eq!((reader.wait_for(1).unwrap(), reader.live()), (0, Live::Gone));
        writer.write(&vec![0; 1 << left]).unwrap();
        assert!(matches!(writer.wait_for(1), Err(Error::Closed)));
    }
}

#[test]
fn w8_what_was_written_before_the_client_came_and_before_the_end_is_read() {
    let world = World::new();
    let (server, mut reader, mut writer) = serve(&world, 0, 0);
    assert_eq!(writer.write(b"early").unwrap(), 5);
    let peer = Original::join(&world, PATH);
    assert_eq!(original_reads(&peer, 5), b"early");
    assert!(peer.write(b"last words"));
    peer.close();
    assert_eq!(server.live(), Live::Gone);
    assert_eq!(read_all(&mut reader, 10), b"last words");
    assert_eq!(reader.wait_for(1).unwrap(), 0);
    // The next client continues at the rings' present positions.
    let peer = Original::join(&world, PATH);
    assert_eq!(server.live(), Live::Here);
    assert!(peer.write(b"again") && writer.write(b"welcome").unwrap() == 7);
    assert_eq!((read_all(&mut reader, 5), original_reads(&peer, 7)), (b"again".to_vec(), b"welcome".to_vec()));
    let (mut reader, mut writer) = {
        peer.close();
        client(&Domain(Arc::clone(&world)), PATH).unwrap()
    };
    assert_eq!(writer.write(b"own").unwrap(), 3);
    assert_eq!(reader.available(1).unwrap(), 0);
}

#[test]
fn w6_no_event_is_sent_that_nobody_asked_for() {
    let world = World::new();
    let (_server, mut reader, mut writer) = serve(&world, 65_536, 65_536);
    let peer = Original::join(&world, PATH);
    let before = peer.channel.sent.load(std::sync::atomic::Ordering::SeqCst);
    // The server asked for one event at the beginning, and not again.
    for _ in 0..100 {
        assert!(peer.write(&[7; 64]));
    }
    assert_eq!(peer.channel.sent.load(std::sync::atomic::Ordering::SeqCst) - before, 1);
    assert_eq!(reader.read(&mut [0; 6400]).unwrap(), 6400);
    for _ in 0..100 {
        assert_eq!(writer.write(&[7; 64]).unwrap(), 64);
    }
    assert_eq!(peer.channel.sent.load(std::sync::atomic::Ordering::SeqCst) - before, 1);
    assert_eq!(reader.available(1).unwrap(), 0);
    assert!(peer.write(&[7; 64]) && peer.write(&[7; 64]));
    assert_eq!(peer.channel.sent.load(std::sync::atomic::Ordering::SeqCst) - before, 2);
}

#[test]
fn w7_reader_and_writer_sleep_on_one_event_channel_and_both_wake() {
    let world = World::new();
    let (_server, mut reader, mut writer) = serve(&world, 1024, 1024);
    let peer = &Original::join(&world, PATH);
    let (there, back) = (&noise(100_000, 5), &noise(100_000, 6));
    for _ in 0..3 {
        thread::scope(|scope| {
            let writing = scope.spawn(|| write_all(&mut writer, there));
            let reading = scope.spawn(|| read_all(&mut reader, back.len()));
            // Never both at once: each sleeps while the other works.
            assert!(original_reads(peer, there.len()) == *there);
            writing.join().unwrap();
            assert!(peer.write(back));
            assert!(reading.join().unwrap() == *back);
        });
    }
}

#[test]
fn w3_client_without_a_server_is_told() {
    let world = World::new();
    let domain = Domain(Arc::clone(&world));
    assert!(matches!(client(&domain, PATH), Err(Error::NotFound(path)) if path == PATH));
    let (server, _, _) = serve(&world, 0, 0);
    drop(server);
    eventually("the nodes are gone", || world.nodes() == 0);
    assert!(matches!(client(&domain, PATH), Err(Error::NotFound(_))));
}

#[derive(Clone, Debug)]
enum Step {
    Write(usize),
    Read(usize),
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever the order of calls, the bytes come out as they went in, and positions wrap around 2^32.
    #[test]
    fn w5_bytes_come_out_as_they_went_in_across_the_end_of_the_count(
        steps in prop::collection::vec(
            prop_oneof![(0usize..3000).prop_map(Step::Write), (0usize..3000).prop_map(Step::Read)], 1..200),
        start in prop_oneof![Just(0u32), any::<u32>(), (u32::MAX - 3000)..],
    ) {
        let world = World::new();
        let peer = Original::serve(&world, PATH, 11, 10);
        let page = world.page(PATH);
        for at in [0, 4, 8, 12] {
            tombolo_vchan_wire::ground::Shared::store32(&*page, at, start);
        }
        let (_reader, mut writer) = client(&Domain(Arc::clone(&world)), PATH).unwrap();
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        for (number, step) in steps.iter().enumerate() {
            match step {
                Step::Write(len) => {
                    let bytes = noise(*len, number as u64 + 1);
                    let written = writer.write(&bytes).unwrap();
                    prop_assert_eq!(written, (*len).min(2048 - (sent.len() - got.len())));
                    sent.extend_from_slice(&bytes[..written]);
                }
                Step::Read(len) if sent.len() > got.len() && *len > 0 => {
                    let mut bytes = vec![0; *len];
                    let read = peer.read(&mut bytes);
                    got.extend_from_slice(&bytes[..read]);
                }
                Step::Read(_) => {}
            }
            prop_assert_eq!(&sent[..got.len()], &got[..]);
        }
    }
}
