// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Networks of many: three members in network namespaces of one kernel, each with one interface and a port for each
//! other member.

mod common;
mod wires;

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddrV6, UdpSocket},
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{Place, Running, wait_until};
use rustix::{
    net::{AddressFamily, SendFlags, SocketType, ipproto, sockopt},
    process::Signal,
};
use tombolo_net::{
    Bridge, BridgeConfig, Config, Engine, EngineKind, Mac, Member, NicConfig, Place as Net, PortConfig, RING_DEFAULT,
    State, Status, split_ip,
};
use wires::{Netns, PATIENCE, assert_no_wait, can_run, connect_tcp, echo_udp, routes::Routes};

const NAMES: [&str; 3] = ["a", "b", "c"];

fn mac(of: usize) -> Mac {
    Mac([2, 0, 0, 0, 0, of as u8 + 1])
}

fn ip(of: usize) -> IpAddr {
    IpAddr::from([10, 77, 0, of as u8 + 1])
}

/// A machine's part of the network, as long as this value lives.
struct Seat {
    _bridge: Bridge,
    /// Ports by peer; `None` where the test is the peer, or there is none.
    ports: [Option<Engine>; 3],
}

impl Seat {
    fn end_ports(&mut self) {
        self.ports.iter_mut().filter_map(Option::take).for_each(|engine| engine.stop().unwrap());
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.end_ports();
        }
    }
}

struct Lan {
    place: Place,
    netns: [Netns; 3],
    prefix: Option<u8>,
}

impl Lan {
    fn new(prefix: Option<u8>) -> Self {
        let netns = [Netns::new(), Netns::new(), Netns::new()];
        netns.iter().for_each(Netns::be_quiet);
        Self { place: Place::new(), netns, prefix }
    }

    /// Returns the address at which two members meet.
    fn address(&self, own: usize, peer: usize) -> String {
        let (first, second) = (own.min(peer), own.max(peer));
        format!("local:{}", self.place.path(&format!("{first}-{second}")).display())
    }

    fn port(&self, own: usize, peer: usize) -> Engine {
        let address = self.address(own, peer);
        let nic = NicConfig {
            name: format!("lan-{}", NAMES[peer]),
            netns: Some(self.netns[own].0.clone()),
            mac: Some(mac(own)),
            default_mac: None,
            mtu: None,
            ip: split_ip(ip(own), self.prefix, Some(ip(peer))).1,
            port: Some(PortConfig { bridge: "lan".into(), peer: mac(peer), peer_ip: self.prefix.map(|_| ip(peer)) }),
        };
        let place = if own < peer { Net::Listen(address) } else { Net::Connect(address) };
        let member = Some(Member { network: "lan".into(), mac: mac(peer), mtu: 1500 });
        let (engine, ring) = (EngineKind::Tap, RING_DEFAULT);
        let config = Config { nic, engine, place, any_source: false, ring, by_rule: true, member };
        Engine::start(config, Box::new(|_| {})).unwrap()
    }

    /// Starts a member with ports to these peers.
    fn seat(&self, own: usize, peers: &[usize]) -> Seat {
        let netns = Some(self.netns[own].0.clone());
        let ip = Some(split_ip(ip(own), self.prefix, None).0);
        let bridge = Bridge::open(&BridgeConfig { name: "lan".into(), netns, mac: mac(own), ip }).unwrap();
        let ports = [0, 1, 2].map(|peer| peers.contains(&peer).then(|| self.port(own, peer)));
        Seat { _bridge: bridge, ports }
    }

    /// Starts all three members, and waits until they are linked.
    fn fill(&self) -> [Seat; 3] {
        let seats = [self.seat(0, &[1, 2]), self.seat(1, &[0, 2]), self.seat(2, &[0, 1])];
        for seat in &seats {
            seat.ports.iter().flatten().for_each(wait_linked);
        }
        seats
    }

    /// Starts `tombolo net up`, a plain interface `wire`, as the machine `own`, for the peer `peer`.
    fn up(&self, own: usize, peer: usize, own_mac: Mac) -> Running {
        let [folder, address] = [self.place.path("net").display().to_string(), self.address(own, peer)];
        let (ip, mac) = (format!("{}/24", ip(own)), own_mac.to_string());
        let words = ["net", "--folder", &folder, "up", "wire", "--connect", &address, "--netns", &self.netns[own].0];
        Running::start(&[&words[..], &["--mac", &mac, "--ip", &ip]].concat(), |_| {}).hush().heard()
    }

    fn udp(&self, of: usize) -> UdpSocket {
        let socket = self.netns[of].enter(move || UdpSocket::bind((ip(of), 0))).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        socket.set_broadcast(true).unwrap();
        socket
    }

    /// Returns the route to a peer that the kernel takes.
    fn way(&self, own: usize, peer: usize) -> String {
        self.netns[own].ip(&["route", "get", &ip(peer).to_string()])
    }
}

fn status(seat: &Seat, peer: usize) -> Status {
    seat.ports[peer].as_ref().expect("a port to this peer").status()
}

fn wait_linked(engine: &Engine) {
    wait_until("a link", || engine.status().state == State::Linked);
}

#[test]
fn n14_all_reach_all_through_one_interface_each_and_one_who_ends_ends_alone() {
    if !can_run("n14_all_reach_all_through_one_interface_each_and_one_who_ends_ends_alone") {
        return;
    }
    let lan = Lan::new(Some(24));
    let mut seats = lan.fill();
    let sockets = [0, 1, 2].map(|of| lan.udp(of));
    for (one, other) in [(0, 1), (0, 2), (1, 2)] {
        echo_udp(&sockets[one], &sockets[other], b"are you there?");
        assert!(lan.way(one, other).contains("dev lan "), "{}", lan.way(one, other));
    }
    // Frames for one member go to that member, and frames for all go to each once.
    let sent = |seat: &Seat, peer| status(seat, peer).sent.frames;
    let before = [1, 2].map(|peer| sent(&seats[0], peer));
    let answering = sockets[1].try_clone().unwrap();
    for _ in 0..200 {
        sockets[0].send_to(b"to one", answering.local_addr().unwrap()).unwrap();
    }
    wait_until("they are sent", || sent(&seats[0], 1) >= before[0] + 200);
    assert!(sent(&seats[0], 2) < before[1] + 20, "frames for one went to another: {before:?}");
    // Frames for an address that no member has go nowhere.
    let before = [1, 2].map(|peer| sent(&seats[0], peer));
    lan.netns[0].ip(&["neigh", "replace", "10.77.0.9", "lladdr", "02:00:00:00:00:99", "dev", "lan"]);
    for _ in 0..200 {
        sockets[0].send_to(b"to nobody", "10.77.0.9:7777").unwrap();
    }
    echo_udp(&sockets[0], &sockets[1], b"did that go?");
    echo_udp(&sockets[0], &sockets[2], b"did that go?");
    for (at, peer) in [(0, 1), (1, 2)] {
        assert!(sent(&seats[0], peer) < before[at] + 20, "frames for nobody went to {peer}: {before:?}");
    }
    let hearing = [1, 2].map(|of| {
        let socket = lan.netns[of].enter(|| UdpSocket::bind(("0.0.0.0", 7777))).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    });
    sockets[0].send_to(b"to all", ("10.77.0.255", 7777)).unwrap();
    for socket in &hearing {
        let mut buffer = [0; 100];
        let (len, from) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], from.ip()), (&b"to all"[..], ip(0)));
    }
    // A member that ends takes only its own port's carrier.
    let [first, second, third] = &mut seats;
    third.end_ports();
    for seat in [&first, &second] {
        wait_until("its port is without a peer", || status(seat, 2).state == State::Waiting);
    }
    let shown = |name: &str| lan.netns[0].ip(&["-o", "link", "show", name]);
    wait_until("its carrier goes", || !shown("lan-c").contains("LOWER_UP"));
    assert!(shown("lan").contains("LOWER_UP") && shown("lan-b").contains("LOWER_UP"));
    echo_udp(&sockets[0], &sockets[1], b"still there?");
    second.end_ports();
    wait_until("the last carrier goes", || !shown("lan").contains("LOWER_UP"));
}

#[test]
fn n14_storm_of_one_peer_reaches_no_other_through_a_third() {
    if !can_run("n14_storm_of_one_peer_reaches_no_other_through_a_third") {
        return;
    }
    let lan = Lan::new(Some(24));
    let seats = lan.fill();
    let third = lan.udp(2);
    echo_udp(&lan.udp(0), &third, b"are you there?");
    // Frames that the first passes on to the second, which would drop them: their source is the third's address.
    let passed_on = || status(&seats[0], 1).sent.frames;
    let arrived = || status(&seats[0], 2).received.frames;
    let before = passed_on();
    for _ in 0..2_000 {
        third.send_to(b"to all", ("10.77.0.255", 7777)).unwrap();
    }
    // Behind those frames, by the same path.
    echo_udp(&lan.udp(0), &third, b"did they come?");
    assert!(arrived() > 500, "{:?}", status(&seats[0], 2));
    // And frames to the second's address, which the third sends over its path to the first.
    for command in ["link set lan-a nomaster", "addr flush dev lan", "addr add 10.77.0.3/24 dev lan-a"] {
        lan.netns[2].ip(&command.split(' ').collect::<Vec<_>>());
    }
    lan.netns[2].ip(&["neigh", "replace", "10.77.0.2", "lladdr", &mac(1).to_string(), "dev", "lan-a"]);
    let came = arrived();
    wait_until("they come to the first", || {
        let _ = third.send_to(b"by way of the first", "10.77.0.2:7777");
        arrived() >= came + 100
    });
    echo_udp(&lan.udp(0), &lan.udp(1), b"are you there?");
    let passed_on = passed_on() - before;
    assert!(passed_on < 50, "{passed_on} frames of the third went on to the second");
}

#[test]
fn n14_peer_that_says_another_address_is_refused_and_frames_from_another_are_dropped() {
    if !can_run("n14_peer_that_says_another_address_is_refused_and_frames_from_another_are_dropped") {
        return;
    }
    let lan = Lan::new(Some(24));
    let first = lan.seat(0, &[1, 2]);
    // The third claims to be the second.
    let liar = lan.up(2, 0, mac(1));
    let said = format!("the peer's address is {}, and in this network it is {}", mac(1), mac(2));
    wait_until("it is refused", || status(&first, 2).reason.contains(&said));
    assert_eq!(status(&first, 2).links, 0);
    drop(liar);
    let _honest = lan.up(2, 0, mac(2));
    wait_linked(first.ports[2].as_ref().unwrap());
    echo_udp(&lan.udp(0), &lan.udp(2), b"are you there?");
    // An interface behind the third's own, with the second's address.
    lan.netns[2].ip(&["link", "add", "link", "wire", "name", "lie", "address", &mac(1).to_string(), "type", "macvlan"]);
    lan.netns[2].ip(&["addr", "add", "10.78.0.3/24", "dev", "lie"]);
    lan.netns[2].ip(&["link", "set", "lie", "up"]);
    lan.netns[0].ip(&["addr", "add", "10.78.0.1/24", "dev", "lan"]);
    let lie = lan.netns[2].enter(|| UdpSocket::bind(("10.78.0.3", 0))).unwrap();
    wait_until("it is dropped and counted", || {
        let _ = lie.send_to(b"from the second", "10.78.0.1:7777");
        status(&first, 2).received.dropped.source > 2
    });
    let known = lan.netns[0].ip(&["neigh", "show", "10.78.0.3"]);
    assert!(!known.contains("lladdr"), "{known}");
}

#[test]
fn n14_peer_that_takes_the_address_of_ip_of_another_gets_nothing_that_is_for_that_one() {
    if !can_run("n14_peer_that_takes_the_address_of_ip_of_another_gets_nothing_that_is_for_that_one") {
        return;
    }
    let lan = Lan::new(Some(24));
    let first = lan.seat(0, &[1, 2]);
    let _thief = lan.seat(1, &[0]);
    wait_linked(first.ports[1].as_ref().unwrap());
    // While the third is absent, the second claims by ARP to be the third.
    lan.netns[1].ip(&["addr", "add", "10.77.0.3/24", "dev", "lan"]);
    let stolen = lan.netns[1].enter(|| UdpSocket::bind((ip(2), 7777))).unwrap();
    stolen.set_nonblocking(true).unwrap();
    let (here, there) = (lan.udp(0), lan.udp(1));
    let known = || lan.netns[0].ip(&["neigh", "show", "10.77.0.3"]);
    let steal = || {
        for _ in 0..20 {
            let _ = here.send_to(b"for the third", (ip(2), 7777));
            // Behind it, by the same path, and long enough for an ARP answer.
            echo_udp(&here, &there, b"did that go?");
        }
        assert!(stolen.recv(&mut [0; 100]).is_err(), "the second got what is for the third: {}", known());
    };
    steal();
    // Nor does it after the one interface was down, by which the kernel forgets its neighbour entries.
    for to in ["down", "up"] {
        lan.netns[0].ip(&["link", "set", "lan", to]);
    }
    assert!(!first.ports[2].as_ref().unwrap().keep_port().unwrap());
    steal();
    assert!(known().contains(&format!("lladdr {} PERMANENT", mac(2))), "{}", known());
    // The third gets it, once it is there.
    lan.netns[1].ip(&["addr", "del", "10.77.0.3/24", "dev", "lan"]);
    let _third = lan.seat(2, &[0]);
    wait_linked(first.ports[2].as_ref().unwrap());
    echo_udp(&lan.udp(0), &lan.udp(2), b"are you there?");
    // A member that is no peer any more has no address here.
    let mut first = first;
    first.ports[2].take().unwrap().stop().unwrap();
    assert!(!known().contains("PERMANENT"), "{}", known());
}

#[test]
fn n14_peer_that_says_it_is_a_router_is_none() {
    if !can_run("n14_peer_that_says_it_is_a_router_is_none") {
        return;
    }
    let lan = Lan::new(Some(24));
    for netns in &lan.netns[..2] {
        netns.enter(|| {
            for (which, setting, value) in
                [("all", "disable_ipv6", "0"), ("default", "disable_ipv6", "0"), ("default", "accept_dad", "0")]
            {
                std::fs::write(format!("/proc/sys/net/ipv6/conf/{which}/{setting}"), value).unwrap();
            }
        });
    }
    let first = lan.seat(0, &[1]);
    let _second = lan.seat(1, &[0]);
    wait_linked(first.ports[1].as_ref().unwrap());
    // A router advertisement to all, valid for half an hour.
    let index = lan.netns[1].index("lan");
    let advertise = move || {
        let socket = rustix::net::socket(AddressFamily::INET6, SocketType::RAW, Some(ipproto::ICMPV6)).unwrap();
        sockopt::set_ipv6_multicast_hops(&socket, 255).unwrap();
        let message = [134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
        let to = SocketAddrV6::new("ff02::1".parse().unwrap(), 0, 0, index);
        let _ = rustix::net::sendto(&socket, &message, SendFlags::empty(), &to);
    };
    let heard = || {
        let told = lan.netns[0].enter(|| std::fs::read_to_string("/proc/thread-self/net/snmp6").unwrap());
        let line = told.lines().find(|line| line.starts_with("Icmp6InRouterAdvertisements")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u32>().unwrap()
    };
    wait_until("it is heard", || {
        lan.netns[1].enter(advertise);
        heard() > 3
    });
    let routes = lan.netns[0].ip(&["-6", "route"]);
    assert!(routes.contains("dev lan") && !routes.contains("default"), "{routes}");
    // A user who wants a router enables it here, and the bridge keeps the setting.
    lan.netns[0].enter(|| std::fs::write("/proc/sys/net/ipv6/conf/lan/accept_ra", "1")).unwrap();
    wait_until("it is a router", || {
        lan.netns[1].enter(advertise);
        lan.netns[0].ip(&["-6", "route"]).contains("default via fe80:")
    });
}

/// Returns the bytes per second of a stream from one member to another, measured over `time`.
fn stream_rate(moved: &AtomicU64, time: Duration) -> f64 {
    let (before, begun) = (moved.load(Ordering::Relaxed), Instant::now());
    thread::park_timeout(time);
    (moved.load(Ordering::Relaxed) - before) as f64 / begun.elapsed().as_secs_f64()
}

#[test]
fn n14_stopped_or_dead_peer_stops_its_own_port_alone() {
    if !can_run("n14_stopped_or_dead_peer_stops_its_own_port_alone") {
        return;
    }
    let lan = Lan::new(Some(24));
    let first = lan.seat(0, &[1, 2]);
    let _second = lan.seat(1, &[0]);
    let third = lan.up(2, 0, mac(2));
    first.ports.iter().flatten().for_each(wait_linked);
    let (here, there) = (lan.udp(0), lan.udp(2));
    echo_udp(&there, &here, b"are you there?");
    let [mut client, mut server] = connect_tcp(&lan.netns[0], &lan.netns[1], ip(1));
    let (moved, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let reading = thread::spawn({
        let moved = Arc::clone(&moved);
        move || {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(len @ 1..) = server.read(&mut buffer) {
                moved.fetch_add(len as u64, Ordering::Relaxed);
            }
        }
    });
    let writing = thread::spawn({
        let over = Arc::clone(&over);
        move || {
            while !over.load(Ordering::Relaxed) && client.write_all(&[7; 1 << 16]).is_ok() {}
        }
    });
    let usual = stream_rate(&moved, Duration::from_secs(1));
    // The third is stopped, and frames for it come without end: its port is full.
    third.signal(Signal::STOP);
    let target = there.local_addr().unwrap();
    here.set_nonblocking(true).unwrap();
    let flooding = thread::spawn({
        let over = Arc::clone(&over);
        move || {
            while !over.load(Ordering::Relaxed) {
                for _ in 0..100 {
                    let _ = here.send_to(&[7; 1400], target);
                }
                thread::park_timeout(Duration::from_millis(2));
            }
        }
    });
    wait_until("its port is full", || status(&first, 2).sent.full > 0);
    let stopped = stream_rate(&moved, Duration::from_secs(2));
    // Paused is not gone (N-10).
    assert_eq!(status(&first, 2).state, State::Linked);
    third.signal(Signal::KILL);
    wait_until("its port is without a peer", || status(&first, 2).state == State::Waiting);
    let dead = stream_rate(&moved, Duration::from_secs(1));
    over.store(true, Ordering::Relaxed);
    for thread in [writing, flooding, reading] {
        thread.join().unwrap();
    }
    assert_eq!(status(&first, 1).links, 1);
    // A fifth allows for other load here, and for the flood itself.
    assert!(stopped > usual / 5.0 && dead > usual / 5.0, "bytes/s: {usual} then {stopped} then {dead}");
}

#[test]
fn n13_n14_each_peer_is_reached_another_way_once_its_own_port_has_no_carrier() {
    if !can_run("n13_n14_each_peer_is_reached_another_way_once_its_own_port_has_no_carrier") {
        return;
    }
    let lan = Lan::new(None);
    // All members have a card, at one switch.
    let switch = Netns::new();
    switch.ip(&["link", "add", "switch", "type", "bridge"]);
    switch.ip(&["link", "set", "switch", "up"]);
    for of in [0, 1, 2] {
        let (netns, plug) = (&lan.netns[of], format!("plug{of}"));
        netns.ip(&["link", "add", "eth0", "type", "veth", "peer", "name", &plug, "netns", &switch.0]);
        switch.ip(&["link", "set", &plug, "master", "switch", "up"]);
        netns.ip(&["addr", "add", &format!("{}/24", ip(of)), "dev", "eth0"]);
        netns.ip(&["link", "set", "eth0", "up"]);
        // Packets are accepted only from the interface over which the kernel would send.
        netns.enter(|| std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1")).unwrap();
    }
    let mut seats = lan.fill();
    for (own, peer) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
        let port = format!("dev lan-{} ", NAMES[peer]);
        wait_until("the memory is the way", || lan.way(own, peer).contains(&port));
    }
    let mut streams = [1, 2].map(|of| connect_tcp(&lan.netns[0], &lan.netns[of], ip(of)));
    let mut echo = |of: usize, what: &str| {
        let [client, server] = &mut streams[of - 1];
        client.write_all(what.as_bytes()).unwrap();
        let mut came = vec![0; what.len()];
        server.read_exact(&mut came).unwrap();
        assert_eq!(came, what.as_bytes());
    };
    let carried = |seats: &[Seat; 3], peer: usize| status(&seats[0], peer).sent.frames;
    for of in [1, 2] {
        let before = carried(&seats, of);
        echo(of, "over memory");
        wait_until("the memory carries it", || carried(&seats, of) > before);
    }
    let routes = Routes::of(&lan.netns[0]);
    let (card, to) = (lan.netns[0].index("eth0"), [1, 2].map(|of| Ipv4Addr::new(10, 77, 0, of + 1)));
    let mut best = [Duration::MAX; 2];
    for _ in 0..4 {
        // Frames came just now, so the ending sides wait for more. Two end at once: the kernel acts on both.
        [1, 2].into_iter().for_each(|of| echo(of, "over memory"));
        let gone = Instant::now();
        let (second, third) = (seats[1].ports[0].take().unwrap(), seats[2].ports[0].take().unwrap());
        let ending = [second, third].map(|engine| thread::spawn(|| engine.stop().unwrap()));
        let mut took = [None; 2];
        wait_until("eth0 is the way to both", || {
            for (took, to) in took.iter_mut().zip(to) {
                *took = took.or_else(|| (routes.way_to(to) == Some(card)).then(|| gone.elapsed()));
            }
            took.iter().all(Option::is_some)
        });
        let took = took.map(Option::unwrap);
        best = [best[0].min(took[0].min(took[1])), best[1].min(took[0].max(took[1]))];
        for of in [1, 2] {
            echo(of, "over eth0");
        }
        // The remaining ones are unchanged.
        assert!(lan.way(1, 2).contains("dev lan-c "), "{}", lan.way(1, 2));
        ending.into_iter().for_each(|thread| thread.join().unwrap());
        for of in [1, 2] {
            seats[of].ports[0] = Some(lan.port(of, 0));
        }
        for of in [1, 2] {
            wait_until("the memory is the way again", || lan.way(0, of).contains(&format!("dev lan-{} ", NAMES[of])));
        }
    }
    assert_no_wait(&best, "the first and the second of two");
}

#[test]
fn n14_port_or_network_that_is_switched_off_and_on_is_as_before() {
    if !can_run("n14_port_or_network_that_is_switched_off_and_on_is_as_before") {
        return;
    }
    let lan = Lan::new(None);
    let first = lan.seat(0, &[1]);
    let _second = lan.seat(1, &[0]);
    let port = first.ports[1].as_ref().unwrap();
    wait_linked(port);
    let sockets = [0, 1].map(|of| lan.udp(of));
    echo_udp(&sockets[0], &sockets[1], b"are you there?");
    let switch = |name| ["down", "up"].map(|to| lan.netns[0].ip(&["link", "set", name, to]));
    // The kernel forgets which peer is behind the port, and there is nobody to ask.
    switch("lan-b");
    assert!(!port.keep_port().unwrap(), "it is a port still");
    wait_until("the memory is the way again", || lan.way(0, 1).contains("dev lan-b "));
    echo_udp(&sockets[0], &sockets[1], b"and now?");
    assert_eq!(status(&first, 1).links, 1);
    // And IPv6 addresses.
    let netns = &lan.netns[2];
    netns.enter(|| std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "0")).unwrap();
    let ip = Some(split_ip("fd00::3".parse().unwrap(), Some(64), None).0);
    let config = BridgeConfig { name: "lan".into(), netns: Some(netns.0.clone()), mac: mac(2), ip };
    let bridge = Bridge::open(&config).unwrap();
    let has_address = || netns.ip(&["addr", "show", "lan"]).contains("fd00::3/64");
    assert!(has_address());
    for to in ["down", "up"] {
        netns.ip(&["link", "set", "lan", to]);
    }
    assert!(!has_address(), "the kernel forgets nothing any more: this test says nothing");
    assert!(bridge.keep_address().unwrap() && has_address());
}
