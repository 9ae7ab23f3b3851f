// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A machine whose devices go while it runs, and that meets another host (B-27).

mod common;

use std::{
    io::{Read, Write},
    thread,
};

use common::endpoint::{FakeRegion, LINK, World};
use tombolo_channel::{Address, Backends, Listener, Options, Stream};
use tombolo_control::Message;
use tombolo_testing::conformance::eventually;

#[test]
fn child_process() {
    common::endpoint::play();
}

fn backends(world: &World) -> [Backends; 2] {
    [&world.a, &world.b].map(|machine| Backends::new().with(machine.domain.clone()))
}

/// Returns a listener in a, and a stream from b that it accepted.
fn stream(world: &World) -> (Address, Listener<Stream>, [Stream; 2]) {
    let [a, b] = backends(world);
    let address: Address = format!("vm:{}", world.service()).parse().unwrap();
    let mut listener = a.listen::<Stream>(&address, &Options::new()).unwrap();
    let connected = thread::spawn({
        let address = address.clone();
        move || b.connect::<Stream>(&address, &Options::new()).unwrap()
    });
    let accepted = listener.accept().unwrap();
    (address, listener, [accepted, connected.join().unwrap()])
}

fn echoes([one, other]: &mut [Stream; 2]) -> bool {
    let (mut byte, sent) = ([0], other.write_all(&[7]).is_ok());
    sent && one.read_exact(&mut byte).is_ok() && byte == [7]
}

#[test]
fn b27_machine_whose_devices_go_forgets_all_and_who_listens_is_reached_by_the_next() {
    let mut world = World::new();
    let (address, mut listener, mut streams) = stream(&world);
    assert!(echoes(&mut streams));
    world.a.lose_devices();
    world.b.lose_devices();
    let is_over = |stream: &mut Stream| {
        let ended = stream.read(&mut [0]);
        assert!(!matches!(ended, Ok(read) if read != 0), "{ended:?}");
    };
    streams.iter_mut().for_each(is_over);
    let [_, b] = backends(&world);
    let client = thread::spawn({
        let address = address.clone();
        // Until there is a host again, and both brokers have met.
        move || {
            let mut found = None;
            eventually("the listener is reached", || {
                found = b.connect::<Stream>(&address, &Options::new()).ok();
                found.is_some()
            });
            found.unwrap()
        }
    });
    // Link and generation have the same numbers there.
    let [to_b, to_a] = FakeRegion::pair();
    world.a.plug_devices(to_b);
    world.b.plug_devices(to_a);
    let accepted = listener.accept().unwrap();
    drop(streams);
    assert!(echoes(&mut [accepted, client.join().unwrap()]));
    let released = Message::Released { link: LINK, generation: 1 };
    assert!(!world.a.host.heard(&released) && !world.b.host.heard(&released), "that was another host's");
}

#[test]
fn b27_host_with_another_boot_is_another_host_and_one_with_the_same_is_not() {
    let mut world = World::new();
    world.a.renew_host(1);
    let (_, _listener, mut streams) = stream(&world);
    // The host's broker starts anew in the same boot, so the machine keeps its connection.
    world.a.renew_host(1);
    eventually("the machine has greeted it", || {
        world.a.host.heard_like(|said| matches!(said, Message::Usage { connections: 1, .. }))
    });
    assert!(echoes(&mut streams));
    world.a.renew_host(2);
    eventually("the machine has greeted another", || {
        world.a.host.heard_like(|said| matches!(said, Message::Usage { connections: 0, .. }))
    });
    let ended = streams[0].read(&mut [0]);
    assert!(!matches!(ended, Ok(read) if read != 0), "{ended:?}");
}
