// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net follow`: interfaces that come and go with the host's rules, whatever the brokers do. A broker of this test says
//! what there is to be; nobody is at the other ends.

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

/// What a broker says that there is to be, or that it does not know; and how often it was asked.
type Nets = Arc<Mutex<(Option<Vec<Message>>, u32)>>;

/// A broker that lets everybody listen, whom nobody calls.
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
            // It ends, and with it what it had of programs.
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
                    // Two at a time.
                    rows.into_iter().filter(behind).take(2).for_each(say);
                    say(Message::Done {});
                }
            },
            Message::Listen { .. } => say(Message::Done {}),
            _ => say(Message::Refuse { code: code::NOT_FOUND, reason: "there is no link with b".into() }),
        }
    }
}

/// What there is to be, for one who asks.
fn count(nets: &Nets) -> Option<Vec<Message>> {
    let mut nets = nets.lock().unwrap();
    nets.1 += 1;
    nets.0.clone()
}

fn net(at: u64, interface: &str, role: NetRole, own: [u8; 16], prefix: u8, theirs: [u8; 16]) -> Message {
    let (interface, service) = (interface.parse().unwrap(), format!("net.{interface}").parse().unwrap());
    Message::Net { at, interface, peer: "b".parse().unwrap(), service, role, mtu: 1400, own, prefix, theirs }
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

    /// Waits until the broker was asked twice.
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

    /// The index that the kernel gave an interface: another one is another interface.
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
    // A network behind the one, the peer alone behind the other.
    wait_until("their addresses", || rules.netns.ip(&["route"]).lines().count() == 2);
    let routes = rules.netns.ip(&["route"]);
    assert!(routes.contains("10.77.0.0/24 dev tmb0") && routes.contains("10.77.0.4 dev lan-b"), "{routes}");
    assert!(routes.lines().all(|route| route.contains("linkdown")), "{routes}");
    let shown = rules.tombolo(&["ls"]).expect(0);
    assert!(String::from_utf8(shown.out).unwrap().contains("rule"));
    rules.tombolo(&["down", "tmb0"]).expect_failure(2, &["by a rule of the host's"]);
    // Neither a broker that does not know nor one that begins anew takes anything.
    let before = rules.index("tmb0");
    rules.set_nets(None);
    rules.wait_until_asked();
    rules.broker = None;
    rules.broker = Some(Broker::start(&rules.socket(), Arc::clone(&rules.nets)));
    rules.wait_until_asked();
    assert_eq!(rules.index("tmb0"), before);
    // One that is wanted otherwise is made anew; one that is not wanted goes, and the third stays.
    let third = rules.index("lan-c");
    rules.set_nets(Some(
        [&rows(NetRole::Connect)[..1], &[net(3, "lan-c", NetRole::Listen, [0; 16], 0, [0; 16])]].concat(),
    ));
    wait_until("one goes", || rules.index("lan-b").is_none());
    wait_until("one is another", || rules.index("tmb0").is_some_and(|now| Some(now) != before));
    assert_eq!(rules.index("lan-c"), third);
    // What somebody removes is there again.
    let before = rules.index("lan-c");
    rules.netns.ip(&["link", "del", "lan-c"]);
    wait_until("it is made again", || rules.index("lan-c").is_some_and(|now| Some(now) != before));
    following.signal(Signal::TERM);
    following.end().expect(0);
    assert!(rules.index("tmb0").is_none() && rules.index("lan-c").is_none());
}
