// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net follow`: interfaces that come and go with the host's rules, whatever the brokers do. A broker of this
//! test lists the interfaces; their peers do not exist.

mod common;
mod wires;

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
};

use common::{Place, Running, wait_until};
use rustix::{
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
    process::Signal,
};
use serde_json::Value;
use tombolo_control::{Envelope, Message, NetRole, Path as Way, Seen, VERSION, code};
use wires::{Netns, can_run};

/// Interfaces that a broker lists, or `None` if it does not know them; and the number of queries.
type Nets = Arc<Mutex<(Option<Vec<Message>>, u32)>>;

/// A broker that lets everybody listen, and has no callers.
struct Broker {
    listener: Arc<OwnedFd>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Broker {
    fn start(socket: &Path, nets: Nets) -> Self {
        let _ = std::fs::remove_file(socket);
        let flags = SocketFlags::CLOEXEC;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 16).unwrap();
        let listener = Arc::new(listener);
        let ears = Arc::clone(&listener);
        let thread = thread::spawn(move || {
            let mut programs = Vec::new();
            while let Ok(program) = rustix::net::accept_with(&*ears, SocketFlags::CLOEXEC) {
                let program = Arc::new(program);
                programs.push(Arc::clone(&program));
                let nets = Arc::clone(&nets);
                thread::spawn(move || serve(&program, &nets));
            }
            // The broker ends, and its connections to programs with it.
            for program in programs {
                let _ = rustix::net::shutdown(&*program, rustix::net::Shutdown::Both);
            }
        });
        Self { listener, thread: Some(thread) }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

fn serve(program: &OwnedFd, nets: &Nets) {
    let mut buffer = [0; 1024];
    while let Ok(len @ 1..) = rustix::io::read(program, &mut buffer) {
        let asked = Envelope::decode(Way::Socket, &buffer[..len]).unwrap();
        let say = |message| {
            let _ = rustix::io::write(program, &Envelope { serial: asked.serial, message }.encode());
        };
        match asked.message {
            Message::Hello { .. } => {
                let (version_min, version_max, epoch, boot) = (VERSION, VERSION, 0, [0; 16]);
                say(Message::Hello { version_min, version_max, epoch, boot, name: "a".parse().unwrap() });
            }
            Message::Look { at: Seen::Nets, after } => match count(nets) {
                None => say(Message::Refuse { code: code::FAILED, reason: "not yet".into() }),
                Some(rows) => {
                    let behind = |row: &Message| matches!(row, Message::Net { at, .. } if *at > after);
                    // Two rows at a time.
                    rows.into_iter().filter(behind).take(2).for_each(say);
                    say(Message::Done {});
                }
            },
            Message::Listen { .. } => say(Message::Done {}),
            _ => say(Message::Refuse { code: code::NOT_FOUND, reason: "there is no link with b".into() }),
        }
    }
}

/// Returns the listed interfaces, and counts the query.
fn count(nets: &Nets) -> Option<Vec<Message>> {
    let mut nets = nets.lock().unwrap();
    nets.1 += 1;
    nets.0.clone()
}

fn net(at: u64, interface: &str, role: NetRole, own: [u8; 16], prefix: u8, theirs: [u8; 16]) -> Message {
    let (interface, service) = (interface.parse().unwrap(), format!("net.{interface}").parse().unwrap());
    let (peer, network, own_mac, their_mac) = ("b".parse().unwrap(), "".into(), [0; 6], [0; 6]);
    let mtu = 1400;
    Message::Net { at, interface, peer, service, role, mtu, own, prefix, theirs, network, own_mac, their_mac }
}

/// Returns a port of the network `lan`, to the machine with this name and number.
fn port(peer: &str, number: u8, prefix: u8) -> Message {
    let (interface, service) = (format!("lan-{peer}").parse().unwrap(), format!("net.lan-{peer}").parse().unwrap());
    Message::Net {
        at: number.into(),
        interface,
        peer: peer.parse().unwrap(),
        service,
        role: NetRole::Listen,
        mtu: 1400,
        own: mapped(100),
        prefix,
        theirs: mapped(number),
        network: "lan".into(),
        own_mac: [2, 0, 0, 0, 0, 100],
        their_mac: [2, 0, 0, 0, 0, number],
    }
}

fn mapped(last: u8) -> [u8; 16] {
    std::net::Ipv4Addr::new(10, 77, 0, last).to_ipv6_mapped().octets()
}

struct Rules {
    netns: Netns,
    place: Place,
    nets: Nets,
    broker: Option<Broker>,
}

impl Rules {
    fn new(nets: Option<Vec<Message>>) -> Self {
        let (netns, place) = (Netns::new(), Place::new());
        let nets = Nets::new((nets, 0).into());
        let broker = Some(Broker::start(&place.path("broker.sock"), Arc::clone(&nets)));
        Self { netns, place, nets, broker }
    }

    fn set_nets(&self, nets: Option<Vec<Message>>) {
        self.nets.lock().unwrap().0 = nets;
    }

    /// Waits until the broker was queried twice.
    fn wait_until_asked(&self) {
        let before = self.nets.lock().unwrap().1;
        wait_until("the broker is asked", || self.nets.lock().unwrap().1 > before + 1);
    }

    fn socket(&self) -> PathBuf {
        self.place.path("broker.sock")
    }

    fn folder(&self) -> String {
        self.place.path("net").display().to_string()
    }

    fn follow(&self) -> Running {
        let words = ["net", "--folder", &self.folder(), "follow", "--netns", &self.netns.0, "--engine", "tap"];
        let socket = self.socket();
        Running::start(&words, |command| {
            command.env("TOMBOLO_BROKER", socket);
        })
        .hush()
        .heard()
    }

    fn tombolo(&self, words: &[&str]) -> common::Ended {
        Running::start(&[&["net", "--folder", &self.folder()], words].concat(), |_| {}).end()
    }

    fn listed(&self) -> Vec<Value> {
        let found = self.tombolo(&["ls", "--json"]).expect(0);
        String::from_utf8(found.out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the index that the kernel gave an interface: another index is another interface.
    fn index(&self, interface: &str) -> Option<String> {
        let (found, shown) = wires::run(&["ip", "-n", &self.netns.0, "-o", "link", "show", interface]);
        found.then(|| shown.split(':').next().unwrap().to_owned())
    }
}

#[test]
fn b28_interfaces_come_and_go_with_the_rules_and_survive_the_brokers() {
    if !can_run("b28_interfaces_come_and_go_with_the_rules_and_survive_the_brokers") {
        return;
    }
    let mut rules = Rules::new(None);
    let rows = |role| {
        let one = net(1, "tmb0", role, mapped(1), 120, mapped(2));
        vec![one, net(2, "lan-b", NetRole::Listen, mapped(3), 0, mapped(4)), net(3, "lan-c", role, [0; 16], 0, [0; 16])]
    };
    let following = rules.follow();
    rules.set_nets(Some(rows(NetRole::Listen)));
    wait_until("they are there", || ["tmb0", "lan-b", "lan-c"].iter().all(|name| rules.index(name).is_some()));
    wait_until("they are listed", || rules.listed().len() == 3);
    for status in rules.listed() {
        assert_eq!((&status["by_rule"], &status["mtu"]), (&true.into(), &1400.into()), "{status:#}");
    }
    // A network behind the one, only the peer behind the other.
    wait_until("their addresses", || rules.netns.ip(&["route"]).lines().count() == 2);
    let routes = rules.netns.ip(&["route"]);
    assert!(routes.contains("10.77.0.0/24 dev tmb0") && routes.contains("10.77.0.4 dev lan-b"), "{routes}");
    assert!(routes.lines().all(|route| route.contains("linkdown")), "{routes}");
    let shown = rules.tombolo(&["ls"]).expect(0);
    assert!(String::from_utf8(shown.out).unwrap().contains("rule"));
    rules.tombolo(&["down", "tmb0"]).expect_failure(2, &["by a rule of the host's"]);
    // Neither a broker that knows no interfaces nor one that begins anew removes any.
    let before = rules.index("tmb0");
    rules.set_nets(None);
    rules.wait_until_asked();
    rules.broker = None;
    rules.broker = Some(Broker::start(&rules.socket(), Arc::clone(&rules.nets)));
    rules.wait_until_asked();
    assert_eq!(rules.index("tmb0"), before);
    // An interface with other settings is made anew; one that is not listed goes, and the third stays.
    let third = rules.index("lan-c");
    rules.set_nets(Some(
        [&rows(NetRole::Connect)[..1], &[net(3, "lan-c", NetRole::Listen, [0; 16], 0, [0; 16])]].concat(),
    ));
    wait_until("one goes", || rules.index("lan-b").is_none());
    wait_until("one is another", || rules.index("tmb0").is_some_and(|now| Some(now) != before));
    assert_eq!(rules.index("lan-c"), third);
    // An interface that another process removes is made again.
    let before = rules.index("lan-c");
    rules.netns.ip(&["link", "del", "lan-c"]);
    wait_until("it is made again", || rules.index("lan-c").is_some_and(|now| Some(now) != before));
    following.signal(Signal::TERM);
    following.end().expect(0);
    assert!(rules.index("tmb0").is_none() && rules.index("lan-c").is_none());
}

/// Returns everything that the kernel shows of a link.
fn details(rules: &Rules, interface: &str) -> String {
    rules.netns.ip(&["-d", "-o", "link", "show", interface])
}

fn is_port(rules: &Rules, interface: &str) -> bool {
    rules.index(interface).is_some() && details(rules, interface).contains(" master lan ")
}

#[test]
fn n14_network_of_many_is_one_interface_with_a_port_for_each_peer() {
    if !can_run("n14_network_of_many_is_one_interface_with_a_port_for_each_peer") {
        return;
    }
    let rules = Rules::new(Some(vec![port("b", 1, 120), port("c", 2, 120)]));
    let following = rules.follow();
    wait_until("they are there", || is_port(&rules, "lan-b") && is_port(&rules, "lan-c"));
    let lan = details(&rules, "lan");
    for word in [" bridge ", "stp_state 0", "mcast_snooping 0", "02:00:00:00:00:64", "mtu 1400"] {
        assert!(lan.contains(word), "{word}: {lan}");
    }
    for (interface, peer) in [("lan-b", "02:00:00:00:00:01"), ("lan-c", "02:00:00:00:00:02")] {
        let shown = details(&rules, interface);
        // One address for all; no learning, no flooding of unknown addresses, nothing from port to port.
        for word in ["02:00:00:00:00:64", "learning off", " flood off", "isolated on", "mtu 1400"] {
            assert!(shown.contains(word), "{word}: {shown}");
        }
        let (_, table) = wires::run(&["bridge", "-n", &rules.netns.0, "fdb", "show", "dev", interface]);
        let entry = table.lines().find(|line| line.contains(peer)).expect("the peer's address is known");
        assert!(entry.contains("static") && entry.contains("sticky"), "{entry}");
        // The port has no address of its own, which would be that of all.
        assert!(!rules.netns.ip(&["addr", "show", interface]).contains("inet"));
    }
    wait_until("its route", || rules.netns.ip(&["route"]).contains("10.77.0.0/24 dev lan "));
    assert_eq!(rules.netns.ip(&["route"]).lines().count(), 1);
    // The host, and not a peer, determines which of the existing peers has an address.
    let known = |number: u8| {
        let lasting = format!("10.77.0.{number} dev lan lladdr 02:00:00:00:00:0{number} PERMANENT");
        rules.netns.ip(&["neigh"]).contains(&lasting)
    };
    wait_until("nobody need be asked", || known(1) && known(2));
    let find = |name: &str| rules.listed().into_iter().find(|status| status["interface"] == *name);
    wait_until("all are listed", || rules.listed().len() == 3);
    let status = find("lan").unwrap();
    assert_eq!((&status["kind"], &status["by_rule"]), (&"network".into(), &true.into()), "{status:#}");
    assert_eq!(status["ports"].as_array().unwrap().len(), 2, "{status:#}");
    assert_eq!(find("lan-b").unwrap()["network"], "lan");
    let shown = String::from_utf8(rules.tombolo(&["ls"]).expect(0).out).unwrap();
    assert!(shown.contains("ports lan-b lan-c"), "{shown}");
    let shown = String::from_utf8(rules.tombolo(&["stat", "lan"]).expect(0).out).unwrap();
    assert!(shown.contains("0 of 2 ports linked") && shown.contains("lan-c, waiting"), "{shown}");
    for name in ["lan", "lan-b"] {
        rules.tombolo(&["down", name]).expect_failure(2, &["by a rule of the host's"]);
    }
    // Members come and go, and the others stay.
    let index = |name: &str| rules.index(name);
    let before = ["lan", "lan-b"].map(index);
    rules.set_nets(Some(vec![port("b", 1, 120), port("d", 3, 120)]));
    wait_until("one comes and one goes", || is_port(&rules, "lan-d") && rules.index("lan-c").is_none());
    assert_eq!(["lan", "lan-b"].map(index), before);
    wait_until("nobody need be asked", || known(1) && known(3) && !known(2));
    // A removed bridge, or a port taken out of it, is restored.
    rules.netns.ip(&["link", "set", "lan-b", "nomaster"]);
    wait_until("it is a port again", || is_port(&rules, "lan-b"));
    assert!(details(&rules, "lan-b").contains("isolated on"));
    rules.netns.ip(&["link", "del", "lan"]);
    wait_until("it is there again", || is_port(&rules, "lan-b") && is_port(&rules, "lan-d"));
    assert_eq!(rules.index("lan-b"), before[1]);
    wait_until("nobody need be asked", || known(1) && known(3));
    rules.netns.ip(&["link", "set", "lan", "address", "02:00:00:00:00:65"]);
    wait_until("its address is its own again", || details(&rules, "lan").contains("02:00:00:00:00:64"));
    // A network with other settings is made anew.
    let before = rules.index("lan");
    rules.set_nets(Some(vec![port("b", 1, 112), port("d", 3, 112)]));
    wait_until("it is another", || rules.index("lan").is_some_and(|now| Some(now) != before));
    wait_until("its route", || rules.netns.ip(&["route"]).contains("10.77.0.0/16 dev lan "));
    wait_until("its ports", || is_port(&rules, "lan-b") && is_port(&rules, "lan-d"));
    following.signal(Signal::TERM);
    following.end().expect(0);
    assert!(["lan", "lan-b", "lan-d"].iter().all(|name| rules.index(name).is_none()));
}

#[test]
fn n14_network_of_a_process_that_died_is_taken_over_or_removed() {
    if !can_run("n14_network_of_a_process_that_died_is_taken_over_or_removed") {
        return;
    }
    let rules = Rules::new(Some(vec![port("b", 1, 120)]));
    let kill = |following: Running| {
        following.signal(Signal::KILL);
        drop(following);
        wait_until("its port goes with it", || rules.index("lan-b").is_none());
    };
    let following = rules.follow();
    wait_until("it is there", || is_port(&rules, "lan-b"));
    wait_until("its route", || rules.netns.ip(&["route"]).contains("10.77.0.0/24 dev lan "));
    let before = rules.index("lan");
    kill(following);
    assert_eq!(rules.index("lan"), before);
    let following = rules.follow();
    wait_until("it has its port again", || is_port(&rules, "lan-b"));
    assert_eq!(rules.index("lan"), before);
    kill(following);
    // The rule goes meanwhile; an interface of others stays.
    rules.netns.ip(&["link", "add", "br0", "type", "bridge"]);
    rules.set_nets(Some(Vec::new()));
    let following = rules.follow();
    wait_until("it goes", || rules.index("lan").is_none());
    assert!(rules.index("br0").is_some());
    following.signal(Signal::TERM);
    let said = following.end().expect(0).said;
    assert!(said.contains("lan: left by a process that died"), "{said}");
}

#[test]
fn n14_interface_of_somebody_else_is_left_alone_and_the_network_waits() {
    if !can_run("n14_interface_of_somebody_else_is_left_alone_and_the_network_waits") {
        return;
    }
    let rules = Rules::new(Some(vec![port("b", 1, 120)]));
    rules.netns.ip(&["link", "add", "lan", "type", "bridge"]);
    let before = rules.index("lan");
    let following = rules.follow();
    rules.wait_until_asked();
    rules.wait_until_asked();
    assert_eq!((rules.index("lan"), rules.index("lan-b")), (before, None));
    rules.netns.ip(&["link", "del", "lan"]);
    wait_until("it is made", || is_port(&rules, "lan-b"));
    following.signal(Signal::TERM);
    let said = following.end().expect(0).said;
    assert!(said.contains("lan: there is an interface lan already, which is none that"), "{said}");
}

#[test]
fn n14_peers_without_a_network_behind_them_are_behind_their_ports() {
    if !can_run("n14_peers_without_a_network_behind_them_are_behind_their_ports") {
        return;
    }
    let rules = Rules::new(Some(vec![port("b", 1, 0), port("c", 2, 0)]));
    let netns = &rules.netns;
    netns.enter(|| std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1")).unwrap();
    let following = rules.follow();
    wait_until("its routes", || {
        let routes = netns.ip(&["route"]);
        ["10.77.0.1 dev lan-b ", "10.77.0.2 dev lan-c "].iter().all(|route| routes.contains(route))
    });
    assert!(netns.ip(&["addr", "show", "lan"]).contains("inet 10.77.0.100/32"));
    let known = || netns.ip(&["neigh"]);
    wait_until("nobody need be asked", || known().contains("10.77.0.2 dev lan-c lladdr 02:00:00:00:00:02 PERMANENT"));
    // Packets of peers come in by the one interface, while the path back is by a port.
    let filter = netns.enter(|| std::fs::read_to_string("/proc/sys/net/ipv4/conf/lan/rp_filter")).unwrap();
    assert_eq!(filter.trim(), "2");
    // The same without the one interface.
    following.signal(Signal::TERM);
    following.end().expect(0);
    let plain = ["net", "--folder", &rules.folder(), "follow", "--netns", &netns.0, "--engine", "tap", "--plain"];
    let socket = rules.socket();
    let following = Running::start(&plain, |command| {
        command.env("TOMBOLO_BROKER", socket);
    });
    let following = following.hush().heard();
    wait_until("its routes", || {
        let routes = netns.ip(&["route"]);
        ["10.77.0.1 dev lan-b ", "10.77.0.2 dev lan-c "].iter().all(|route| routes.contains(route))
    });
    assert!(rules.index("lan").is_none() && !is_port(&rules, "lan-b"));
    assert!(details(&rules, "lan-b").contains("02:00:00:00:00:64"));
    following.signal(Signal::TERM);
    following.end().expect(0);
}
