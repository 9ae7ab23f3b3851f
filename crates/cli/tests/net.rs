// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net` between two network namespaces: which frames cross, how links end and begin, and peers that do not
//! fit.

mod common;
mod wires;

use std::{
    io::{Read, Write},
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use common::{noise, wait_until};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{AddressFamily, RecvFlags, SendFlags, SocketType, ipproto, sockopt},
    process::{Pid, Resource, Rlimit, Signal},
};
use tombolo::{Deadline, Messages, Options};
use tombolo_net::{
    Config, Engine, EngineKind, FRAME_MOST, Features, HEADER, HELLO_LEN, Hello, Mac, NicConfig, Place as Net,
    RING_DEFAULT,
};
use wires::{
    ADDRESSES, Netns, PATIENCE, Wires, assert_no_wait, can_run, connect_tcp, echo_udp, routes::Routes, run,
    wait_carrier,
};

/// Asserts that no frame was dropped, in both directions of both ends.
fn assert_nothing_dropped(wires: &Wires) {
    for end in [0, 1] {
        let status = wires.status(end);
        for way in ["sent", "received"] {
            let mut dropped = status[way]["dropped"].as_object().unwrap().clone();
            // Frames that the kernel sent before there was a peer.
            dropped.remove("stale");
            assert!(dropped.values().all(|count| *count == 0), "end {end}, {way}: {status:#}");
        }
    }
}

/// Sends an ICMP echo request with so many bytes, and waits for its answer.
fn ping(socket: &impl std::os::fd::AsFd, len: usize, number: u16) -> bool {
    let mut request = vec![8, 0, 0, 0, 0x54, 0x6d];
    request.extend(number.to_be_bytes());
    request.extend(noise(len));
    let words = request.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum: u32 = words.sum();
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = !((sum >> 16) + (sum & 0xffff)) as u16;
    request[2..4].copy_from_slice(&sum.to_be_bytes());
    rustix::net::send(socket, &request, SendFlags::empty()).unwrap();
    let mut answer = vec![0; 70_000];
    while let Ok((got, _)) = rustix::net::recv(socket, &mut answer[..], RecvFlags::empty()) {
        // Behind the IP header: an answer with the bytes that were sent.
        if got == 20 + request.len() && answer[20] == 0 && answer[24..got] == request[4..] {
            return true;
        }
    }
    false
}

#[test]
fn n7_n9_ping_datagrams_and_streams_cross_both_ways() {
    if !can_run("n7_n9_ping_datagrams_and_streams_cross_both_ways") {
        return;
    }
    let wires = Wires::new();
    let _running = wires.pair([&[], &[]]);
    let raw = wires.netns[1].enter(|| {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP)).unwrap();
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(Duration::from_millis(500))).unwrap();
        rustix::net::connect(&socket, &format!("{}:0", ADDRESSES[0]).parse::<std::net::SocketAddrV4>().unwrap())
            .unwrap();
        socket
    });
    for (number, len) in [0, 1, 56, 1472, 1473, 9000, 65_507].into_iter().enumerate() {
        wait_until("an echo", || ping(&raw, len, number as u16));
    }
    let (there, here) = (wires.netns[0].udp(0), wires.netns[1].udp(1));
    for len in [0, 1, 17, 1471, 1472, 1473, 4000, 65_507] {
        echo_udp(&there, &here, &noise(len));
    }
    // Once in each direction, with all bytes compared.
    let bytes = noise(if std::env::var_os("TOMBOLO_LONG").is_some() { 1 << 30 } else { 24 << 20 });
    for server in [0, 1] {
        let address = ADDRESSES[server].parse().unwrap();
        let [mut client, mut receiver] = connect_tcp(&wires.netns[1 - server], &wires.netns[server], address);
        thread::scope(|scope| {
            scope.spawn(|| {
                client.write_all(&bytes).unwrap();
                client.shutdown(std::net::Shutdown::Write).unwrap();
            });
            let mut came = Vec::with_capacity(bytes.len());
            receiver.read_to_end(&mut came).unwrap();
            assert!(came == bytes, "{} of {} bytes, or others", came.len(), bytes.len());
        });
    }
    // Segments crossed whole, in both directions: they were not divided before.
    for end in [0, 1] {
        let status = wires.status(end);
        for way in ["sent", "received"] {
            assert!(status[way]["segments"].as_u64().unwrap() > 20, "end {end}, {way}: {status:#}");
        }
    }
    assert_nothing_dropped(&wires);
}

#[test]
fn n4_frames_are_plain_where_the_peer_takes_no_others() {
    if !can_run("n4_frames_are_plain_where_the_peer_takes_no_others") {
        return;
    }
    let wires = Wires::new();
    let _running = wires.up(0, &[]);
    let own = Hello { features: Features::none(), mtu: 1500, frame_most: 1518, mac: Mac([2, 0, 0, 0, 0, 9]) };
    let mut peer = join(&wires, &own);
    wires.wait_for(0, "a link", |status| status["state"] == "linked");
    wires.add_address(0);
    let socket = wires.netns[0].udp(0);
    // Without an answer to ARP only broadcasts are sent: one with a checksum, one that is divided.
    socket.set_broadcast(true).unwrap();
    let bytes = noise(4000);
    let mut buffer = vec![0; 70_000];
    let (mut packets, until) = (0, Instant::now() + PATIENCE);
    while packets < 8 {
        assert!(Instant::now() < until, "{packets} packets came");
        for len in [100, 4000] {
            let _ = socket.send_to(&bytes[..len], "10.77.0.255:9");
        }
        while let Ok(Some(len)) = peer.split().1.recv_until(&mut buffer, Deadline::after(Duration::from_millis(200))) {
            assert!(len <= HEADER + 1518, "a frame of {len} bytes");
            assert_eq!(buffer[..HEADER], [0; HEADER], "a header of a frame that is not plain");
            packets += usize::from(buffer[HEADER + 12..HEADER + 14] == [8, 0]);
        }
    }
}

#[test]
fn n4_n5_peer_that_takes_segments_and_no_long_frames_gets_what_this_kernel_divided() {
    if !can_run("n4_n5_peer_that_takes_segments_and_no_long_frames_gets_what_this_kernel_divided") {
        return;
    }
    let wires = Wires::new();
    let _running = wires.up(0, &[]);
    let mut peer = join(&wires, &Hello { frame_most: 1518, ..hello() });
    wires.wait_for(0, "a link", |status| status["state"] == "linked");
    wires.add_address(0);
    let socket = wires.netns[0].udp(0);
    socket.set_broadcast(true).unwrap();
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::UdpGsoSegment, &1000).unwrap();
    let bytes = noise(8000);
    let mut buffer = vec![0; 70_000];
    let (mut packets, until) = (0, Instant::now() + PATIENCE);
    while packets < 16 {
        assert!(Instant::now() < until, "{packets} packets came: {:#}", wires.status(0));
        let _ = socket.send_to(&bytes, "10.77.0.255:9");
        while let Ok(Some(len)) = peer.split().1.recv_until(&mut buffer, Deadline::after(Duration::from_millis(200))) {
            assert!(len <= HEADER + 1518, "a frame of {len} bytes");
            packets += usize::from(buffer[HEADER + 12..HEADER + 14] == [8, 0]);
        }
    }
    assert_eq!(wires.status(0)["sent"]["dropped"]["long"], 0);
}

#[test]
fn n5_link_has_the_smaller_mtu_and_each_interface_its_own_again_afterwards() {
    if !can_run("n5_link_has_the_smaller_mtu_and_each_interface_its_own_again_afterwards") {
        return;
    }
    let wires = Wires::new();
    let [first, second] = wires.pair([&["--mtu", "9000"], &["--mtu", "1400"]]);
    for end in [0, 1] {
        assert!(wires.netns[end].has_mtu(1400), "{}", wires.netns[end].shown());
    }
    let status = wires.status(0);
    assert_eq!((&status["mtu"], &status["peer"]["mtu"]), (&1400.into(), &1400.into()), "{status:#}");
    echo_udp(&wires.netns[0].udp(0), &wires.netns[1].udp(1), &noise(20_000));
    drop(second);
    wait_until("the interface has its own MTU", || wires.netns[0].has_mtu(9000));
    // A change of an interface's MTU during a link changes the link's.
    let _second = wires.up(1, &["--mtu", "1400"]);
    wires.wait_for(1, "a link", |status| status["state"] == "linked");
    wires.netns[1].ip(&["link", "set", "tmb0", "mtu", "2000"]);
    for end in [0, 1] {
        wires.wait_for(end, "a link anew", |status| status["state"] == "linked" && status["mtu"] == 2000);
        wait_until("the MTU", || wires.netns[end].has_mtu(2000));
    }
    drop(first);
}

#[test]
fn n6_interfaces_new_address_is_told_anew() {
    if !can_run("n6_interfaces_new_address_is_told_anew") {
        return;
    }
    let wires = Wires::new();
    let _running = wires.pair([&["--mac", "02:00:00:00:00:11"], &[]]);
    let peer_of = |end: usize| wires.status(end)["peer"]["mac"].clone();
    assert_eq!(peer_of(1), "02:00:00:00:00:11");
    wires.assert_joined();
    wires.netns[0].ip(&["link", "set", "tmb0", "address", "02:00:00:00:00:12"]);
    wires.wait_for(1, "the new address", |status| status["peer"]["mac"] == "02:00:00:00:00:12");
    wires.assert_joined();
}

#[test]
fn n6_interface_that_is_moved_to_another_namespace_and_renamed_keeps_its_link() {
    if !can_run("n6_interface_that_is_moved_to_another_namespace_and_renamed_keeps_its_link") {
        return;
    }
    let wires = Wires::new();
    let [moved, _peer] = wires.pair([&[], &[]]);
    let other = Netns::new();
    wires.netns[0].ip(&["link", "set", "tmb0", "netns", &other.0, "name", "moved0"]);
    other.ip(&["addr", "add", &format!("{}/24", ADDRESSES[0]), "dev", "moved0"]);
    other.ip(&["link", "set", "moved0", "up"]);
    echo_udp(&other.udp(0), &wires.netns[1].udp(1), b"from there");
    assert_eq!(wires.status(0)["links"], 1, "nothing was told anew");
    // The interface is examined in its present namespace.
    other.ip(&["link", "set", "moved0", "mtu", "1400"]);
    wires.wait_for(0, "another link", |status| status["links"] == 2 && status["mtu"] == 1400);
    wait_until("the peer's MTU", || wires.netns[1].has_mtu(1400));
    echo_udp(&other.udp(0), &wires.netns[1].udp(1), b"from there");
    other.ip(&["link", "set", "moved0", "netns", &wires.netns[0].0, "name", "tmb0"]);
    wires.netns[0].ip(&["link", "set", "tmb0", "up"]);
    wires.add_address(0);
    wires.assert_joined();
    wires.netns[0].ip(&["link", "set", "tmb0", "mtu", "1500"]);
    wires.wait_for(0, "another link", |status| status["links"] == 3 && status["mtu"] == 1500);
    wires.assert_joined();
    // A deleted interface ends its link permanently, in whichever namespace it is.
    wires.netns[0].ip(&["link", "set", "tmb0", "netns", &other.0]);
    // Also after it was examined there: only the interface keeps that namespace.
    other.ip(&["link", "set", "tmb0", "mtu", "1300", "up"]);
    wires.wait_for(0, "another link", |status| status["links"] == 4 && status["mtu"] == 1300);
    drop(other);
    moved.end().expect(1);
}

#[test]
fn n10_n11_killed_peer_takes_the_carrier_and_a_new_one_brings_it_back() {
    if !can_run("n10_n11_killed_peer_takes_the_carrier_and_a_new_one_brings_it_back") {
        return;
    }
    let wires = Wires::new();
    let mut running = wires.pair([&[], &[]]).map(Some);
    wires.assert_joined();
    // First the connecting side, then the listening side.
    for end in [1, 0] {
        let links = wires.status(1 - end)["links"].as_u64().unwrap();
        running[end].take().unwrap().signal(Signal::KILL);
        wait_carrier(&wires.netns[1 - end], false);
        assert!(wires.status(1 - end)["reason"].as_str().is_some_and(|reason| !reason.is_empty()));
        wait_until("the interface goes with its process", || !wires.netns[end].has_interface());
        running[end] = Some(wires.up(end, &[]));
        for end in [0, 1] {
            wires.wait_for(end, "a link", |status| status["state"] == "linked");
            wait_carrier(&wires.netns[end], true);
        }
        wires.add_address(end);
        assert!(wires.status(1 - end)["links"].as_u64().unwrap() > links);
        wires.assert_joined();
    }
}

#[test]
fn n9_n10_stopped_peer_keeps_the_carrier_and_what_was_sent() {
    if !can_run("n9_n10_stopped_peer_keeps_the_carrier_and_what_was_sent") {
        return;
    }
    let wires = Wires::new();
    let running = wires.pair([&[], &[]]);
    wires.assert_joined();
    let (there, here) = (wires.netns[1].udp(1), wires.netns[0].udp(0));
    running[1].signal(Signal::STOP);
    let bytes = noise(60_000);
    let to = there.local_addr().unwrap();
    let status = loop {
        // A ring holds fewer frames than these.
        for _ in 0..20 {
            let _ = here.send_to(&bytes, to);
        }
        let status = wires.status(0);
        if status["sent"]["full"] != 0 {
            break status;
        }
    };
    // Longer than a dead peer would keep the carrier.
    let stopped = Instant::now();
    wait_until("two seconds", || {
        assert!(wires.netns[0].has_carrier(), "the carrier went");
        stopped.elapsed() > Duration::from_secs(2)
    });
    assert_eq!(wires.status(0)["links"], status["links"]);
    running[1].signal(Signal::CONT);
    wires.assert_joined();
    assert_eq!(wires.status(0)["links"], status["links"], "it is the same link");
    assert_nothing_dropped(&wires);
}

/// Returns a peer that the test plays. It has sent its hello and accepted the interface's.
fn join(wires: &Wires, hello: &Hello) -> Messages {
    let mut peer = connect(wires);
    peer.send(&hello.encode()).unwrap();
    let mut bytes = [0; HELLO_LEN];
    let len = peer.split().1.recv_until(&mut bytes, Deadline::after(PATIENCE)).unwrap().expect("a hello");
    let theirs = Hello::decode(&bytes[..len]).unwrap();
    assert!(theirs.features.has(Features::all().without(Features::USO)) && theirs.frame_most == FRAME_MOST);
    peer
}

fn connect(wires: &Wires) -> Messages {
    tombolo::connect_with(&wires.place.address(), &Options::new().wait_for_listener(PATIENCE)).unwrap()
}

fn hello() -> Hello {
    Hello { features: Features::all(), mtu: 1500, frame_most: FRAME_MOST, mac: Mac([2, 0, 0, 0, 0, 9]) }
}

#[test]
fn n1_n2_n3_n5_n6_peers_that_do_not_fit_are_refused_and_the_next_one_is_not() {
    if !can_run("n1_n2_n3_n5_n6_peers_that_do_not_fit_are_refused_and_the_next_one_is_not") {
        return;
    }
    let wires = Wires::new();
    let running = wires.up(0, &["--mac", "02:00:00:00:00:01"]);
    let good = hello().encode();
    let changed = |at: usize, byte: u8| {
        let mut bytes = good;
        bytes[at] = byte;
        bytes.to_vec()
    };
    for (bytes, why) in [
        (b"GET / HTTP/1.1\r\n".to_vec(), "has 16 bytes, a hello 64"),
        (vec![0; 65], "has 65 bytes, a hello 64"),
        (changed(0, b'x'), "is no hello"),
        ([&good[..8], &[2, 0, 3, 0], &good[12..]].concat(), "speaks versions 2 to 3 of the interface, this end 1"),
        (changed(0x3f, 1), "must be 0"),
        (
            changed(0x18, 0).into_iter().enumerate().map(|(at, byte)| if at == 0x19 { 0 } else { byte }).collect(),
            "MTU is 0",
        ),
        (changed(0x20, 3), "is none of an interface"),
        (changed(0x25, 1), "both ends have the address 02:00:00:00:00:01"),
    ] {
        let mut peer = connect(&wires);
        peer.send(&bytes).unwrap();
        let mut buffer = [0; 100];
        let deadline = Deadline::after(PATIENCE);
        assert_eq!(peer.split().1.recv_until(&mut buffer, deadline).unwrap(), Some(HELLO_LEN));
        assert_eq!(peer.split().1.recv_until(&mut buffer, deadline).unwrap(), None, "{why}");
        let status = wires.wait_for(0, why, |status| status["reason"].as_str().is_some_and(|said| said.contains(why)));
        assert_eq!((&status["state"], &status["links"]), (&"waiting".into(), &0.into()));
        assert!(!wires.netns[0].has_carrier());
    }
    // No message is sent at all.
    let silent = connect(&wires);
    wires
        .wait_for(0, "patience ends", |status| status["reason"].as_str().is_some_and(|said| said.contains("no hello")));
    drop(silent);
    let peer = join(&wires, &hello());
    wires.wait_for(0, "a link", |status| status["state"] == "linked");
    wait_carrier(&wires.netns[0], true);
    // While there is one peer, another is refused at once, and gets nothing else (N-11).
    let mut other = connect(&wires);
    let ended = other.split().1.recv_until(&mut [0; 100], Deadline::after(PATIENCE));
    assert!(matches!(ended, Ok(None)), "{ended:?}");
    assert_eq!(wires.status(0)["state"], "linked");
    drop(peer);
    wait_carrier(&wires.netns[0], false);
    drop(running);
}

#[test]
fn n1_n11_callers_who_say_nothing_or_nonsense_keep_no_peer_waiting() {
    if !can_run("n1_n11_callers_who_say_nothing_or_nonsense_keep_no_peer_waiting") {
        return;
    }
    let wires = Wires::new();
    let _running = wires.up(0, &[]);
    // More callers than are served at once, and some that are refused.
    let silent: Vec<_> = (0..24).map(|_| connect(&wires)).collect();
    let nonsense: Vec<_> = (0..10)
        .map(|_| {
            let mut peer = connect(&wires);
            peer.send(b"GET / HTTP/1.1\r\n").unwrap();
            peer
        })
        .collect();
    let asked = Instant::now();
    let _peer = join(&wires, &hello());
    // One of them may be silent for longer than that.
    assert!(asked.elapsed() < Duration::from_secs(4), "a hello after {:?}", asked.elapsed());
    wires.wait_for(0, "a link", |status| status["state"] == "linked" && status["links"] == 1);
    assert!(asked.elapsed() < Duration::from_secs(4), "a link after {:?}", asked.elapsed());
    // All others were refused.
    for mut other in silent.into_iter().chain(nonsense) {
        let mut buffer = [0; 100];
        while let Ok(Some(len)) = other.split().1.recv_until(&mut buffer, Deadline::after(PATIENCE)) {
            assert_eq!(len, HELLO_LEN);
        }
        assert!(other.split().1.ending().is_some());
    }
    assert_eq!(wires.status(0)["links"], 1);
}

/// Starts an interface of this process, in the first namespace.
fn engine(wires: &Wires, place: Net) -> Engine {
    let netns = Some(wires.netns[0].0.clone());
    let nic = NicConfig { name: "tmb0".into(), netns, mac: None, default_mac: None, mtu: None, ip: None, port: None };
    let (engine, ring) = (EngineKind::Tap, RING_DEFAULT);
    let config = Config { nic, engine, place, any_source: false, ring, by_rule: false, member: None };
    Engine::start(config, Box::new(|_| {})).unwrap()
}

#[test]
fn n10_engine_ends_at_once_whatever_its_peer_does_not_say() {
    if !can_run("n10_engine_ends_at_once_whatever_its_peer_does_not_say") {
        return;
    }
    let wires = Wires::new();
    let address = wires.place.address();
    let stops = |engine: Engine, what: &str| {
        let asked = Instant::now();
        engine.stop().unwrap();
        assert!(!wires.netns[0].has_interface(), "{what}: the interface is still there");
        assert!(asked.elapsed() < Duration::from_secs(3), "{what}: after {:?}", asked.elapsed());
    };
    // One that has a caller which sends no hello, and one that called and waits for a hello.
    let listening = engine(&wires, Net::Listen(address.clone()));
    let mut silent = connect(&wires);
    assert_eq!(silent.split().1.recv_until(&mut [0; 100], Deadline::after(PATIENCE)).unwrap(), Some(HELLO_LEN));
    stops(listening, "a silent caller");
    assert!(!wires.place.socket_is_there(), "a socket stays behind");
    let mut listener = tombolo::listen_with::<Messages>(&address, &Options::new()).unwrap();
    let connecting = engine(&wires, Net::Connect(address.clone()));
    let mut silent = listener.accept_until(Deadline::after(PATIENCE)).unwrap();
    assert_eq!(silent.split().1.recv_until(&mut [0; 100], Deadline::after(PATIENCE)).unwrap(), Some(HELLO_LEN));
    stops(connecting, "a silent listener");
    // A listener that does not even make a channel.
    let connecting = engine(&wires, Net::Connect(address));
    wait_until("it connects", || is_readable(&listener));
    stops(connecting, "a listener that does not answer");
}

fn is_readable(listener: &impl AsFd) -> bool {
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

#[test]
fn n4_peers_may_take_what_this_kernel_cannot_send() {
    if !can_run("n4_peers_may_take_what_this_kernel_cannot_send") {
        return;
    }
    let wires = Wires::new();
    let _running = wires.up(0, &[]);
    // Congestion marks without segments; segments of either kind alone; all bits that will ever be.
    for (at, bits) in [0x09, 0x19, 0x03, 0x05, 0x11, u64::MAX, 0x1e].into_iter().enumerate() {
        let mut bytes = hello().encode();
        bytes[0x10..0x18].copy_from_slice(&bits.to_le_bytes());
        let mut peer = connect(&wires);
        peer.send(&bytes).unwrap();
        wires.wait_for(0, "a link", |status| status["state"] == "linked" && status["links"] == at as u64 + 1);
        drop(peer);
        wires.wait_for(0, "its end", |status| status["state"] == "waiting");
    }
}

#[test]
fn n5_link_that_fails_gives_the_mtu_back() {
    if !can_run("n5_link_that_fails_gives_the_mtu_back") {
        return;
    }
    let wires = Wires::new();
    // So that the interface stays when its process ends.
    wires.netns[0].ip(&["tuntap", "add", "tmb0", "mode", "tap"]);
    wires.netns[0].ip(&["link", "set", "tmb0", "mtu", "9000"]);
    let running = wires.up(0, &[]);
    let mut peer = connect(&wires);
    assert_eq!(peer.split().1.recv_until(&mut [0; 100], Deadline::after(PATIENCE)).unwrap(), Some(HELLO_LEN));
    // No file can be opened any more, and a link needs one after it has set the MTU.
    let id = Pid::from_child(&running.child);
    let limit = Rlimit { current: Some(8), ..rustix::process::getrlimit(Resource::Nofile) };
    rustix::process::prlimit(Some(id), Resource::Nofile, limit).unwrap();
    peer.send(&Hello { mtu: 1400, ..hello() }.encode()).unwrap();
    running.end().expect_failure(1, &["eventfd"]);
    assert!(wires.netns[0].has_mtu(9000), "{}", wires.netns[0].shown());
}

/// Returns an ARP frame from `mac` that asks for the interface's address.
fn question(mac: Mac) -> Vec<u8> {
    let mut message = vec![0; HEADER];
    message.extend([0xff; 6]);
    message.extend(mac.0);
    message.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    message.extend(mac.0);
    message.extend([10, 77, 0, 9]);
    message.extend([0; 6]);
    message.extend([10, 77, 0, 1]);
    message
}

#[test]
fn n8_hostile_peer_spoils_its_frames_and_nothing_else() {
    if can_run("n8_hostile_peer_spoils_its_frames_and_nothing_else") {
        assail(&[]);
    }
}

/// The test must find an interface that accepts frames from any source.
#[test]
fn n8_canary_interface_that_does_not_look_at_sources_is_found() {
    if can_run("n8_canary_interface_that_does_not_look_at_sources_is_found") {
        let found = thread::spawn(|| assail(&["--any-source"])).join().unwrap_err();
        let found = found.downcast_ref::<String>().unwrap();
        assert!(found.starts_with("source: "), "{found}");
    }
}

/// Plays a peer that sends garbage to an interface with these options.
fn assail(options: &[&str]) {
    let wires = Wires::new();
    let _running = wires.up(0, options);
    let mac = hello().mac;
    let peer = join(&wires, &hello());
    wires.wait_for(0, "a link", |status| status["state"] == "linked");
    wires.add_address(0);
    let frames: u64 = if std::env::var_os("TOMBOLO_LONG").is_some() { 2_000_000 } else { 20_000 };
    // This thread receives the answers of the interface, and discards those to garbage.
    let (mut sender, mut receiver) = peer.into_split();
    let (answered, hears) = std::sync::mpsc::channel();
    let listening = thread::spawn(move || {
        let mut buffer = vec![0; 70_000];
        while let Ok(Some(len)) = receiver.recv(&mut buffer) {
            // An ARP answer to this peer.
            if len >= HEADER + 42 && buffer[HEADER + 12..HEADER + 14] == [8, 6] && buffer[HEADER + 21] == 2 {
                let _ = answered.send(());
            }
        }
    });
    let rubbish = noise(1 << 20);
    let mut state = 88_172_645_463_325_252_u64;
    for number in 0..frames {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let len = [state as usize >> 8 & 0x3f, state as usize >> 8 & 0x7ff, state as usize >> 8 & 0x1_ffff];
        let len = len[number as usize % 3];
        let mut message = rubbish[state as usize >> 40 & 0xffff..][..len].to_vec();
        if state & 3 != 0 && len >= 26 {
            // Partly valid headers, from the right address, of invalid IP packets.
            message[0] &= 3;
            message[1] = [0, 1, 4, 5, 0x81, 0x84, 3, 0][state as usize >> 4 & 7];
            message[10..12].fill(0);
            message[18..24].copy_from_slice(&mac.0);
            let kinds = [[8, 0], [0x86, 0xdd], [0x81, 0], [8, 6]];
            message[24..26].copy_from_slice(&kinds[state as usize >> 32 & 3]);
            // Some from another address.
            message[23] ^= u8::from(state & 0xf0_0000 == 0);
            if state & 4 != 0 {
                message[6..10].copy_from_slice(&[34, 0, 16, 0]);
            }
        }
        sender.send_until(&message, Deadline::after(PATIENCE)).unwrap();
    }
    // The interface lives, and valid frames get through.
    wait_until("an answer to a question", || {
        sender.send_until(&question(mac), Deadline::after(PATIENCE)).unwrap();
        hears.recv_timeout(Duration::from_millis(100)).is_ok()
    });
    let status = wires.status(0);
    assert_eq!((&status["state"], &status["links"]), (&"linked".into(), &1.into()), "{status:#}");
    let dropped = &status["received"]["dropped"];
    for why in ["short", "long", "header", "source", "refused"] {
        assert!(dropped[why].as_u64().unwrap() > frames / 1000, "{why}: {status:#}");
    }
    assert!(status["received"]["frames"].as_u64().unwrap() > frames / 100, "{status:#}");
    drop(sender);
    listening.join().unwrap();
    wait_carrier(&wires.netns[0], false);
}

#[test]
fn n10_what_a_peer_sent_before_it_closed_is_handed_over() {
    if !can_run("n10_what_a_peer_sent_before_it_closed_is_handed_over") {
        return;
    }
    const FRAMES: u64 = 500;
    let wires = Wires::new();
    let _running = wires.up(0, &[]);
    let hello = hello();
    for round in 1..=10 {
        let mut peer = join(&wires, &hello);
        wires.wait_for(0, "a link", |status| status["state"] == "linked" && status["links"] == round);
        if round == 1 {
            wires.add_address(0);
        }
        let socket = wires.netns[0].udp(0);
        socket.set_broadcast(true).unwrap();
        let received = |status: &serde_json::Value| status["received"]["frames"].as_u64().unwrap();
        let before = received(&wires.status(0));
        for number in 0..FRAMES {
            // So that the sending side, too, may be the first to see that the peer is gone.
            if number % 50 == 0 {
                let _ = socket.send_to(b"is anybody there?", "10.77.0.255:9");
            }
            peer.split().0.send_until(&question(hello.mac), Deadline::after(PATIENCE)).unwrap();
        }
        drop(peer);
        let _ = socket.send_to(b"is anybody there?", "10.77.0.255:9");
        let status = wires.wait_for(0, "the end", |status| status["state"] == "waiting");
        assert_eq!(received(&status) - before, FRAMES, "round {round}: {status:#}");
    }
}

#[test]
fn interfaces_are_listed_shown_and_ended_by_name() {
    if !can_run("interfaces_are_listed_shown_and_ended_by_name") {
        return;
    }
    let wires = Wires::new();
    assert_eq!(wires.tombolo(&["ls", "--json"]).end().expect(0).out, b"");
    let [first, second] = wires.pair([&[], &[]]);
    let list = || String::from_utf8(wires.tombolo(&["ls"]).end().expect(0).out).unwrap();
    wait_until("both are listed", || list().lines().count() == 3);
    let listed = list();
    assert!(listed.contains("linked") && listed.contains(&wires.place.address()), "{listed}");
    let netns = wires.netns[0].0.as_str();
    let shown = wires.tombolo(&["stat", "tmb0", "--netns", netns]).end().expect(0);
    let shown = String::from_utf8(shown.out).unwrap();
    for words in ["tmb0: linked with", "MTU 1500", "checksum tso4 tso6 ecn", "frames", "listen local:"] {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    wires.tombolo(&["stat", "tmb0"]).end().expect_failure(2, &["several", "--netns"]);
    wires.tombolo(&["down", "tmb7"]).end().expect_failure(1, &["no interface tmb7", "net ls"]);
    let ended = wires.tombolo(&["down", "tmb0", "--netns", netns, "--json"]).end().expect(0);
    let ended: serde_json::Value = serde_json::from_slice(&ended.out).unwrap();
    assert_eq!((&ended["interface"], &ended["netns"]), (&"tmb0".into(), &netns.into()));
    assert!(first.end().expect(0).said.contains("tmb0: linked with"));
    assert!(!wires.netns[0].has_interface() && wires.netns[1].has_interface());
    // Now there is one of that name.
    wires.tombolo(&["down", "tmb0"]).end().expect(0);
    second.end().expect(0);
    assert_eq!(wires.tombolo(&["ls", "--json"]).end().expect(0).out, b"");
}

#[test]
fn n10_signals_end_it_and_the_peer_sees_it_close() {
    if !can_run("n10_signals_end_it_and_the_peer_sees_it_close") {
        return;
    }
    let wires = Wires::new();
    let [first, second] = wires.pair([&[], &[]]);
    first.signal(Signal::TERM);
    first.end().expect(0);
    wait_carrier(&wires.netns[1], false);
    assert!(!wires.netns[0].has_interface());
    let closed = |status: &serde_json::Value| status["state"] == "waiting";
    wires.wait_for(1, "it waits", closed);
    second.signal(Signal::INT);
    let said = second.end().expect(0).said;
    assert!(said.contains("the link ended: the peer closed"), "{said}");
    assert!(std::fs::read_dir(wires.folder()).unwrap().next().is_none(), "a socket stays behind");
}

#[test]
fn what_is_missing_is_said_with_what_to_do() {
    if !can_run("what_is_missing_is_said_with_what_to_do") {
        return;
    }
    let wires = Wires::new();
    let address = wires.place.address();
    let fails = |words: &[&str], code: i32, said: &[&str]| {
        wires.tombolo(words).end().expect_failure(code, said);
    };
    let netns = wires.netns[0].0.as_str();
    let up = |name| ["up", name, "--connect", &address, "--netns", netns];
    fails(&up("a/b"), 2, &["no name of an interface"]);
    fails(&up("lo"), 2, &["lo already", "choose another name"]);
    fails(&["up", "tmb0", "--connect", &address, "--netns", "tmb-nowhere"], 2, &["tmb-nowhere", "ip netns list"]);
    fails(&["up", "tmb0", "--connect", "pigeon:x"], 2, &["pigeon", "there are: local"]);
    fails(&["up", "tmb0", "--listen", "local:/nowhere/at/all"], 2, &["/nowhere/at/all"]);
    let running = wires.up(0, &[]);
    wires.wait_for(0, "it waits", |status| status["reason"].as_str().is_some_and(|said| said.contains("waits at")));
    fails(&up("tmb0"), 2, &["tmb0 already", "choose another name"]);
    // Another process removes the interface.
    wires.netns[0].ip(&["link", "del", "tmb0"]);
    running.end().expect_failure(1, &["tmb0 was removed"]);
    // Another user may not make an interface, wherever it may start the program.
    std::fs::create_dir(wires.place.path("his")).unwrap();
    rustix::fs::chown(wires.place.path("his"), Some(rustix::fs::Uid::from_raw(65534)), None).unwrap();
    rustix::fs::chmod(wires.place.path(""), 0o755.into()).unwrap();
    let folder = wires.place.path("his/net").display().to_string();
    let words = ["net", "--folder", &folder, "up", "tmb9", "--connect", &address];
    let his = common::Running::start(&words, |command| {
        std::os::unix::process::CommandExt::uid(command, 65534);
    });
    his.end().expect_failure(2, &["not permitted", "ip tuntap add tmb9"]);
    // A container without the device, simulated in a mount namespace where its folder is empty.
    let program = env!("CARGO_BIN_EXE_tombolo");
    let script = "mount -t tmpfs none /dev/net && exec \"$@\"";
    let folder = wires.folder();
    let shell = ["unshare", "-m", "sh", "-c", script, "sh"];
    if !run(&[&shell[..], &["true"]].concat()).0 {
        let _ = writeln!(
            std::io::stderr(),
            "SKIP what_is_missing_is_said_with_what_to_do (needs mounts): unshare -m fails"
        );
        return;
    }
    let words = [program, "net", "--folder", &folder, "up", "tmb9", "--connect", "local:x"];
    let (done, said) = run(&[&shell[..], &words].concat());
    assert!(!done && said.contains("modprobe tun") && said.contains("--device /dev/net/tun"), "{said}");
}

/// Two namespaces with a `veth` between them and addresses of their own, and beside it an interface that has the same
/// (N-13).
#[test]
fn n13_routes_over_the_interface_count_while_it_has_a_carrier_and_others_take_over_at_once() {
    if !can_run("n13_routes_over_the_interface_count_while_it_has_a_carrier_and_others_take_over_at_once") {
        return;
    }
    let wires = Wires::new();
    let names = [0, 1].map(|end: usize| wires.netns[end].0.clone());
    wires.netns[0].ip(&["link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", &names[1]]);
    for end in [0, 1] {
        wires.netns[end].be_quiet();
        wires.netns[end].ip(&["addr", "add", &format!("{}/24", ADDRESSES[end]), "dev", "eth0"]);
        wires.netns[end].ip(&["link", "set", "eth0", "up"]);
    }
    let way = || wires.netns[0].ip(&["route", "get", ADDRESSES[1]]);
    let ip = |end: usize| ["--ip", ADDRESSES[end], "--peer-ip", ADDRESSES[1 - end]];
    let up = |end: usize| wires.up(end, &ip(end)).heard();
    let mut running = [0, 1].map(|end| Some(up(end)));
    // A connection that survives all of it.
    let [mut client, mut server] = connect_tcp(&wires.netns[0], &wires.netns[1], ADDRESSES[1].parse().unwrap());
    let mut echo = |what: &str| {
        client.write_all(what.as_bytes()).unwrap();
        let mut came = vec![0; what.len()];
        server.read_exact(&mut came).unwrap();
        assert_eq!(came, what.as_bytes());
    };
    let routes = Routes::of(&wires.netns[0]);
    let (card, to) = (wires.netns[0].index("eth0"), ADDRESSES[1].parse().unwrap());
    let mut best = [Duration::MAX; 2];
    for round in 0..8 {
        wait_until("the memory is the way", || way().contains("dev tmb0"));
        echo("over memory");
        // Both kinds of end: the process is killed, and it closes in order.
        let signal = [Signal::KILL, Signal::TERM][round % 2];
        let (gone, ending) = (Instant::now(), running[1].take().unwrap());
        ending.signal(signal);
        wait_until("eth0 is the way", || routes.way_to(to) == Some(card));
        best[round % 2] = best[round % 2].min(gone.elapsed());
        echo("over eth0");
        drop(ending);
        running[1] = Some(up(1));
    }
    assert_no_wait(&best, "a process that is killed, one that closes");
}

#[test]
fn ip_addresses_that_do_not_fit_are_refused_with_what_to_write() {
    let up = |more: &[&str]| {
        let words = [&["net", "up", "tmb0", "--listen", "local:/nowhere/x"], more].concat();
        common::Running::start(&words, |_| {}).end()
    };
    for bad in ["10.9.0", "10.9.0.1/33", "10.9.0.1/0", "fd00::1/129"] {
        let ended = up(&["--ip", bad]).expect(2);
        assert!(ended.said.contains("write it as 10.9.0.1"), "{}", ended.said);
    }
    up(&["--ip", "10.9.0.1", "--peer-ip", "fd00::1"]).expect_failure(2, &["of two kinds"]);
}

#[test]
fn doctor_tells_of_interfaces_that_run_and_of_peers_that_break_the_rules() {
    if !can_run("doctor_tells_of_interfaces_that_run_and_of_peers_that_break_the_rules") {
        return;
    }
    let wires = Wires::new();
    let services = wires.place.path("services").display().to_string();
    let doctor = || {
        let ended = common::Running::start(&["doctor", "--json"], |command| _ = command.env("TOMBOLO_DIR", &services));
        let lines = String::from_utf8(ended.end().expect(0).out).unwrap();
        let mut findings = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        findings.find(|finding| finding["check"] == "interfaces").unwrap()
    };
    let is_graded = |grade: &str, says: &str| {
        let finding = doctor();
        finding["grade"] == grade && finding["says"].as_str().is_some_and(|said| said.contains(says))
    };
    let address = wires.place.address();
    let words = ["net", "up", "tmb0", "--listen", &address, "--netns", &wires.netns[0].0];
    let _running = common::Running::start(&words, |command| _ = command.env("TOMBOLO_DIR", &services)).hush().heard();
    wait_until("it waits", || is_graded("info", "0 of 1 interfaces and ports have their peer; tmb0: waits at local:"));
    let mut peer = join(&wires, &hello());
    wait_until("it has its peer", || is_graded("ok", "1 of 1 "));
    peer.send(&[0xff; 100]).unwrap();
    wait_until("the peer is warned of", || is_graded("warning", "must not send: 1 header"));
    assert!(doctor()["remedy"].as_str().is_some_and(|remedy| remedy == "tombolo net stat tmb0"));
}
