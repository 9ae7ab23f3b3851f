// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whole channels between two machines, as programs use them, over the shipping brokers.

mod common;

use std::{
    io::{Read, Write},
    thread,
};

use common::endpoint::World;
use tombolo_channel::{Backends, Ending, Error, Options, Stream};

#[test]
fn child_process() {
    common::endpoint::play();
}

fn backends(world: &World) -> [Backends; 2] {
    [&world.a, &world.b].map(|machine| Backends::new().with(machine.domain.clone()))
}

#[test]
fn v1_stream_between_machines_carries_every_byte_both_ways() {
    const LEN: usize = 8 << 20;
    let world = World::new();
    let [a, b] = backends(&world);
    let address = format!("vm:{}", world.service()).parse().unwrap();
    let mut listener = a.listen::<Stream>(&address, &Options::new()).unwrap();
    let bytes: Vec<u8> = (0..LEN).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    thread::scope(|scope| {
        let echo = scope.spawn(move || {
            let stream = listener.accept().unwrap();
            let (mut reader, mut writer) = stream.into_split();
            std::io::copy(&mut reader, &mut writer).unwrap()
        });
        let stream: Stream = b.connect(&address, &Options::new()).unwrap();
        assert_eq!(stream.peer().domain, "a");
        let (mut reader, mut writer) = stream.into_split();
        let sent = &bytes;
        scope.spawn(move || writer.write_all(sent).unwrap());
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        assert!(got == bytes, "{} bytes came back", got.len());
        assert_eq!(echo.join().unwrap(), LEN as u64);
    });
}

#[test]
fn v1_messages_between_machines_stay_apart_and_sleepers_wake() {
    let world = World::new();
    let [a, b] = backends(&world);
    common::wake_each_other(&a, &b, &world.service());
}

#[test]
fn v2_refusal_that_comes_late_is_waited_out_by_who_waits_for_a_listener() {
    let world = World::new();
    let [a, b] = backends(&world);
    let address: tombolo_channel::Address = format!("vm:{}", world.service()).parse().unwrap();
    let refused = b.connect::<Stream>(&address, &Options::new());
    assert!(matches!(&refused, Err(Error::Domain(tombolo_domain::Error::NotFound(_)))), "{refused:?}");
    let patient = Options::new().wait_for_listener(std::time::Duration::from_secs(30));
    thread::scope(|scope| {
        let caller = scope.spawn(|| b.connect::<Stream>(&address, &patient));
        let mut listener = a.listen::<Stream>(&address, &Options::new()).unwrap();
        listener.accept().unwrap();
        caller.join().unwrap().unwrap();
    });
}

#[test]
fn v7_streams_whose_peer_is_killed_end_and_say_why() {
    let world = World::new();
    let [a, _] = backends(&world);
    let service = world.service();
    let address = format!("vm:{service}").parse().unwrap();
    let mut listener = a.listen::<Stream>(&address, &Options::new()).unwrap();
    let mut child = world.streaming(&service);
    let mut stream = listener.accept().unwrap();
    let mut byte = [0];
    stream.read_exact(&mut byte).unwrap();
    child.kill();
    let ended = std::io::copy(&mut stream, &mut std::io::sink());
    assert!(ended.is_ok(), "{ended:?}");
    let (reader, _) = stream.into_split();
    assert_eq!(reader.ending(), Some(Ending::ProcessGone));
}
