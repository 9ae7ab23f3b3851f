// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A broker whose peer's broker sends arbitrary messages: that broker harms its own link, and nothing else.

mod common;

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::{
    Client,
    endpoint::{ALL, FakeRegion, LINK, Machine, OWN, accept, link_messages, name, notify_event, patience},
};
use tombolo_broker::endpoint::{
    connections::Agreement,
    devices::{Pages, Region},
};
use tombolo_control::{
    Envelope, Event, Life, Message, NO_DOORBELL, Path, Session, Side, VERSION, VERSION_FIND, WINDOWS_AT, Way, code,
};
use tombolo_domain::{Deadline, Endpoint, Error, Rendezvous, wait_readable};
use tombolo_domain_ivshmem::{CLOSED, STATE_AT, VmDomain};
use tombolo_testing::conformance::{self, eventually};

#[test]
fn child_process() {
    common::endpoint::play();
}

/// An honest machine `a`, and this test in the place of `b`'s broker.
struct Victim {
    a: Machine,
    held: Arc<Mutex<Vec<Agreement>>>,
    storm: Arc<OwnedFd>,
    liar: Liar,
    _folder: tempfile::TempDir,
}

struct Liar {
    region: FakeRegion,
    session: Session,
    epoch: u64,
    heard: Vec<Envelope>,
}

impl Victim {
    fn new(rules: &[(Way, &str)]) -> Self {
        Self::resuming(rules, &[])
    }

    /// Makes a victim whose programs had these connections before its broker began.
    fn resuming(rules: &[(Way, &str)], held: &[Agreement]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [to_b, mut region] = FakeRegion::pair();
        *to_b.held.lock().unwrap() = held.to_vec();
        let (held, storm) = (to_b.held.clone(), to_b.storm.clone());
        let a = Machine::new(folder.path(), "a", ("b", 0), to_b, rules);
        let session = Session::begin(Path::Link, 1, region.pages()).unwrap();
        Self { a, held, storm, liar: Liar { region, session, epoch: 1, heard: Vec::new() }, _folder: folder }
    }

    /// Makes a victim that has received its peer's valid Hello.
    fn greeted(rules: &[(Way, &str)]) -> Self {
        let mut victim = Self::new(rules);
        victim.liar.greet();
        victim.liar.connect(1000, "nothing", 60);
        assert!(matches!(victim.liar.refusal(), code::NOT_FOUND | code::DENIED));
        victim
    }
}

impl Liar {
    fn send_message(&mut self, serial: u32, message: Message) {
        assert!(self.session.queue_message(&Envelope { serial, message }));
        self.pump();
    }

    fn pump(&mut self) {
        loop {
            let (event, changed) = self.session.turn(self.region.pages()).unwrap();
            if changed {
                self.region.pages.notify();
            }
            match event {
                Some(Event::Said(said)) => self.heard.push(said),
                Some(Event::Broke(fault)) => panic!("the good broker is wrong: {fault}"),
                Some(Event::Began) => {}
                None if !changed => return,
                None => {}
            }
        }
    }

    /// Returns the next message to the peer.
    fn next(&mut self) -> Envelope {
        let deadline = patience();
        loop {
            self.region.pages.drain();
            self.pump();
            if !self.heard.is_empty() {
                return self.heard.remove(0);
            }
            assert!(wait_readable(self.region.pages.incoming.as_fd(), deadline).unwrap(), "nothing is said");
        }
    }

    fn greet(&mut self) {
        let hello = self.next();
        assert!(matches!(&hello.message, Message::Hello { name, .. } if name.as_str() == "a"), "{hello:?}");
        self.hello("b");
        assert_eq!(self.recounted(), []);
        self.send_message(0, Message::Calls { connections: 0 });
    }

    /// Returns the connections that the broker lists.
    fn recounted(&mut self) -> Vec<Envelope> {
        let Message::Calls { connections } = self.next().message else { panic!("Calls comes behind Hello") };
        (0..connections).map(|_| self.next()).collect()
    }

    fn hello(&mut self, own: &str) {
        let (epoch, boot) = (self.epoch, [2; 16]);
        self.send_message(
            0,
            Message::Hello { version_min: VERSION, version_max: VERSION, epoch, boot, name: name(own) },
        );
    }

    fn begin_anew(&mut self) {
        self.epoch += 1;
        self.session = Session::begin(Path::Link, self.epoch, self.region.pages()).unwrap();
        self.region.pages.notify();
        self.heard.clear();
    }

    fn connect(&mut self, serial: u32, service: &str, number: u64) {
        let (offset, len) = (WINDOWS_AT + number * 4096, 4096);
        let channel = 1 + 3 * 169u16.saturating_sub(number as u16);
        self.send_message(serial, Message::Connect { peer: name("b"), service: name(service), offset, len, channel });
    }

    fn refusal(&mut self) -> u16 {
        match self.next().message {
            Message::Refuse { code, .. } => code,
            other => panic!("{other:?}"),
        }
    }

    /// Checks that the broker still reads messages: a request for a missing service is answered.
    fn is_heard(&mut self) {
        self.connect(1002, "nothing", 60);
        assert_eq!(self.refusal(), code::NOT_FOUND);
    }
}

#[test]
fn b6_peer_that_breaks_the_rules_is_not_heard_until_it_begins_anew() {
    let mut victim = Victim::greeted(&ALL);
    victim.liar.is_heard();
    let accept = Message::Accept { offset: WINDOWS_AT, len: 4096 };
    let wrong: [(u32, Message); 4] = [
        (77, accept),
        (77, Message::Close {}),
        (77, Message::Refuse { code: 0, reason: "".into() }),
        (0, Message::Hello { version_min: 1, version_max: 1, epoch: 1, boot: [2; 16], name: name("b") }),
    ];
    for (serial, message) in wrong {
        victim.liar.send_message(serial, message.clone());
        victim.liar.connect(2, "nothing", 0);
        // The broker answers other programs meanwhile, and sends nothing to this peer. It may forward the first of
        // their requests before it has read the wrong message.
        for _ in 0..2 {
            assert!(matches!(victim.a.domain.connect("b/x", patience()), Err(Error::NotFound(_))), "{message:?}");
        }
        victim.liar.pump();
        let asks =
            |said: &Envelope| matches!(&said.message, Message::Connect { service, .. } if service.as_str() == "x");
        let heard = &victim.liar.heard;
        assert!(heard.len() <= 1 && heard.iter().all(asks), "{message:?}: {heard:?}");
        victim.liar.begin_anew();
        victim.liar.greet();
        victim.liar.is_heard();
    }
}

#[test]
fn b6_machine_is_called_what_the_host_says() {
    let folder = tempfile::tempdir().unwrap();
    let [to_b, _] = FakeRegion::pair();
    let machine = Machine::new(folder.path(), "web-1", ("b", 0), to_b, &ALL);
    assert!(machine.domain.listen("web-1/s").is_ok());
    assert!(matches!(machine.domain.listen("a/s"), Err(Error::BadService { .. })));
}

#[test]
fn b6_programs_of_a_machine_that_the_host_does_not_name_are_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let [to_b, _] = FakeRegion::pair();
    let machine = Machine::unnamed(folder.path(), "a", to_b);
    let error = machine.domain.listen("s").unwrap_err();
    let source = std::error::Error::source(&error).expect("the reason").to_string();
    assert!(source.contains("is tombolod running there"), "{error}: {source}");
    machine.host.send_message(Message::You { name: name("a") });
    assert!(machine.domain.listen("a/s").is_ok());
}

#[test]
fn b6_peer_with_another_name_than_the_host_says_is_refused() {
    let mut victim = Victim::new(&ALL);
    victim.liar.next();
    victim.liar.hello("c");
    victim.liar.connect(2, "nothing", 0);
    assert!(matches!(victim.a.domain.connect("b/x", patience()), Err(Error::NotFound(_))));
}

#[test]
fn b13_what_no_rule_allows_is_refused_both_ways() {
    let mut victim = Victim::greeted(&[(Way::In, "web-*"), (Way::Out, "db")]);
    let _listeners = ["secret", "web-1"].map(|service| victim.a.domain.listen(service).unwrap());
    victim.liar.connect(2, "secret", 0);
    assert_eq!(victim.liar.refusal(), code::DENIED);
    victim.liar.connect(4, "web-1", 0);
    assert!(matches!(victim.liar.next().message, Message::Accept { .. }));
    assert!(matches!(victim.a.domain.connect("b/web-1", patience()), Err(Error::Denied(_))));

    // New rules apply as soon as they arrive.
    link_messages("b", 0, 2, &[(Way::In, "*")]).into_iter().for_each(|message| victim.a.host.send_message(message));
    eventually("the new rules are there", || {
        victim.liar.connect(6, "secret", 1);
        matches!(victim.liar.next().message, Message::Accept { .. })
    });
}

#[test]
fn b14_connections_of_a_peer_that_never_closes_are_bounded() {
    let mut victim = Victim::greeted(&ALL);
    let mut listener = victim.a.domain.listen("s").unwrap();
    let mut connections = Vec::new();
    for number in 0.. {
        victim.liar.connect(2 * number + 2, "s", u64::from(number));
        match victim.liar.next().message {
            Message::Accept { .. } => connections.push(accept(&mut *listener)),
            Message::Refuse { code, .. } => {
                assert!(matches!(code, code::QUOTA | code::MALFORMED), "{code}");
                break;
            }
            other => panic!("{other:?}"),
        }
        assert!(number < 1000, "there is no bound");
    }
    assert!(connections.len() > 100, "{}", connections.len());
    // A window that only the program has closed stays where the peer may look at it.
    drop(connections);
    victim.liar.connect(4000, "s", 0);
    let closes = std::iter::from_fn(|| match victim.liar.next().message {
        Message::Close {} => Some(()),
        _ => None,
    });
    closes.for_each(drop);
    let serials: Vec<u32> = (1..=100).map(|number| 2 * number).collect();
    for serial in serials {
        victim.liar.send_message(serial, Message::Close {});
    }
    victim.liar.heard.clear();
    eventually("what both sides closed is free again", || {
        victim.liar.connect(5000, "s", 0);
        matches!(victim.liar.next().message, Message::Accept { .. })
    });
}

#[test]
fn b14_peer_that_never_answers_costs_the_caller_its_deadline() {
    let mut victim = Victim::greeted(&ALL);
    let before = Instant::now();
    let connected = victim.a.domain.connect("b/x", Deadline::after(Duration::from_millis(100)));
    assert!(matches!(connected, Err(Error::TimedOut)), "{connected:?}");
    assert!(before.elapsed() < Duration::from_secs(10));
    // An answer for a caller that is gone is answered by Close.
    let Envelope { serial, message: Message::Connect { .. } } = victim.liar.next() else { panic!() };
    victim.liar.send_message(serial, Message::Accept { offset: WINDOWS_AT, len: 4096 });
    eventually("Close is said", || {
        victim.liar.region.pages.drain();
        victim.liar.pump();
        victim.liar.heard.iter().any(|said| said.serial == serial && said.message == Message::Close {})
    });
}

#[test]
fn v2_what_a_caller_says_before_the_peer_accepts_is_there_when_it_looks() {
    let mut victim = Victim::greeted(&ALL);
    let mut link = victim.a.domain.connect_early("b/x", patience()).unwrap();
    let (_own, offer) = link.allocate(4096).unwrap();
    link.send(b"hello", Some(&offer)).unwrap();
    let Envelope { serial, message: Message::Connect { offset, .. } } = victim.liar.next() else { panic!("it asks") };
    let mut entry = [0; 0x25];
    rustix::io::pread(&victim.liar.region.pages.peer, &mut entry, offset + 0x400).unwrap();
    assert_eq!((entry[..2].as_ref(), entry[0x20..].as_ref()), (&[5, 0][..], &b"hello"[..]));
    assert!(matches!(link.recv(0), Ok(None)), "nobody answered");

    victim.liar.send_message(serial, Message::Accept { offset: WINDOWS_AT, len: 4096 });
    // An answer as the peer's program would put it into its mailbox.
    let answer = [&[2, 0][..], &[0; 0x1e], b"ok"].concat();
    let head = [&b"TOMBOLO\0"[..], &1u64.to_le_bytes()].concat();
    for (at, bytes) in [(0, &head[..]), (0x80, &1u64.to_le_bytes()), (0x400, &answer), (0x100, &1u64.to_le_bytes())] {
        rustix::io::pwrite(&victim.liar.region.pages.own, bytes, WINDOWS_AT + at).unwrap();
    }
    assert_eq!(conformance::receive(&mut *link, patience()).unwrap().message, b"ok");
}

#[test]
fn b14_window_of_a_refused_connection_is_nobody_elses_before_its_program_let_go() {
    let mut victim = Victim::greeted(&ALL);
    let ask = |victim: &mut Victim| {
        let link = victim.a.domain.connect_early("b/x", patience()).unwrap();
        let said = victim.liar.next();
        let Message::Connect { offset, len, channel, .. } = said.message else { panic!("{said:?}") };
        victim.liar.send_message(said.serial, Message::Refuse { code: code::NOT_FOUND, reason: "nobody".into() });
        (link, Agreement { serial: said.serial, own: (offset, len), theirs: (0, 0), channel })
    };
    let (mut link, made) = ask(&mut victim);
    let refused = conformance::receive(&mut *link, patience());
    assert!(matches!(refused, Err(Error::NotFound(_))), "{refused:?}");
    let (_other, meanwhile) = ask(&mut victim);
    assert!(meanwhile.own != made.own && meanwhile.channel != made.channel, "{meanwhile:?}");
    // The program's socket is closed, but the program, or a child of it, still has the window.
    victim.held.lock().unwrap().push(made);
    drop(link);
    let (_third, meanwhile) = ask(&mut victim);
    assert!(meanwhile.own != made.own && meanwhile.channel != made.channel, "{meanwhile:?}");
    victim.held.lock().unwrap().clear();
    victim.liar.region.pages.notify();
    eventually("the window is free again", || ask(&mut victim).1.own == made.own);
    // The peer knows of none of these connections, so it gets no message about their end.
    victim.liar.is_heard();
}

#[test]
fn b8_peer_that_notifies_without_end_is_reported_to_the_host() {
    let mut victim = Victim::greeted(&ALL);
    let storm = Message::Storm { link: LINK };
    assert!(!victim.a.host.heard(&storm));
    notify_event(&victim.storm);
    eventually("Storm is said", || victim.a.host.heard(&storm));
    // The host takes the doorbell away for a while; the link continues.
    victim.a.host.send_message(Message::Bell { link: LINK, doorbell: NO_DOORBELL });
    victim.liar.is_heard();
}

#[test]
fn b5_boxes_full_of_noise_stop_nothing_else() {
    let mut victim = Victim::greeted(&ALL);
    let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
    let until = Instant::now() + Duration::from_millis(300);
    let mut rounds = 0;
    while Instant::now() < until || rounds < 100 {
        let mut page = [0u8; 0x800];
        for word in page.as_chunks_mut::<8>().0 {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            *word = noise.to_le_bytes();
        }
        // At times with a valid head, so that the rest is checked.
        if rounds % 2 == 0 {
            page[..16].copy_from_slice(&[&b"TOMBOLO\0"[..], &1u64.to_le_bytes()].concat());
        }
        rustix::io::pwrite(&victim.liar.region.pages.own, &page, 0).unwrap();
        victim.liar.region.pages.notify();
        rounds += 1;
    }
    assert!(victim.a.domain.listen("still-there").is_ok());
    victim.liar.begin_anew();
    victim.liar.greet();
    victim.liar.is_heard();
}

#[test]
fn b12_death_of_the_machine_and_loss_of_the_link_are_told_to_programs() {
    let mut victim = Victim::greeted(&ALL);
    let mut listener = victim.a.domain.listen("s").unwrap();
    victim.liar.connect(2, "s", 0);
    let mut link: Box<dyn Endpoint> = accept(&mut *listener);
    assert!(matches!(victim.liar.next().message, Message::Accept { .. }));
    victim.a.host.send_message(Message::Life { link: LINK, generation: 1, life: Life::DomainGone });
    assert!(matches!(conformance::receive(&mut *link, patience()), Err(Error::PeerGone)));
    assert_eq!(link.liveness(), tombolo_domain::Liveness::DomainGone);
    assert!(matches!(victim.a.domain.connect("b/x", patience()), Err(Error::NotFound(_))));

    victim.a.host.send_message(Message::Bell { link: LINK, doorbell: NO_DOORBELL });
    victim.a.host.send_message(Message::Unlink { link: LINK, generation: 1 });
    let released = Message::Released { link: LINK, generation: 1 };
    assert!(!victim.a.host.heard(&released), "a program has its memory still");
    drop(link);
    eventually("the memory is given back", || victim.a.host.heard(&released));
}

#[test]
fn b15_program_that_does_not_say_hello_first_is_sent_away() {
    let victim = Victim::new(&ALL);
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let socket = |message: Option<Message>| {
        let kind = rustix::net::SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(rustix::net::AddressFamily::UNIX, kind, flags, None).unwrap();
        let address = rustix::net::SocketAddrUnix::new(&victim.a.socket).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        if let Some(message) = message {
            rustix::io::write(&socket, &Envelope { serial: 3, message }.encode()).unwrap();
        }
        socket
    };
    let (early, silent) = (socket(Some(Message::Listen { service: name("s") })), socket(None));
    let mut buffer = [0; 1024];
    let len = rustix::io::read(&early, &mut buffer).unwrap();
    let said = Envelope::decode(Path::Socket, &buffer[..len]).unwrap();
    assert!(matches!(said, Envelope { serial: 3, message: Message::Refuse { code: code::MALFORMED, .. } }), "{said:?}");
    for socket in [early, silent] {
        assert!(wait_readable(socket.as_fd(), patience()).unwrap());
        assert_eq!(rustix::io::read(&socket, &mut buffer), Ok(0), "it is not waited for without end");
    }
}

/// Makes a connection of which both windows have the `number`-th page.
fn connection(serial: u32, number: u64, channel: u16) -> Agreement {
    let at = (WINDOWS_AT + number * 4096, 4096);
    Agreement { serial, own: at, theirs: at, channel }
}

/// Returns the message by which its other endpoint lists it.
fn recount_of(made: &Agreement, side: Side) -> Message {
    let ((peer_offset, peer_len), (offset, len)) = (made.own, made.theirs);
    Message::Call { offset, len, peer_offset, peer_len, channel: made.channel, side }
}

#[test]
fn b18_broker_that_begins_goes_on_with_the_connections_whose_windows_are_held() {
    let (known, lost, over) = (connection(2, 0, 508), connection(4, 1, 505), connection(6, 2, 502));
    let mut victim = Victim::resuming(&ALL, &[known]);
    let _listener = victim.a.domain.listen("s").unwrap();
    victim.liar.next();
    victim.liar.hello("b");
    let Message::Call { offset, channel: 508, side: Side::Open, .. } = victim.liar.recounted()[0].message else {
        panic!("the connection that is held is told of")
    };
    assert_eq!(offset, known.own.0);
    victim.liar.send_message(0, Message::Calls { connections: 3 });
    for (made, side) in [(known, Side::Open), (lost, Side::Open), (over, Side::Over)] {
        victim.liar.send_message(made.serial, recount_of(&made, side));
    }
    // Connections that no program has here any more are closed, in their memory too if the peer's program looks at
    // that.
    let closed = [victim.liar.next(), victim.liar.next()].map(|said| (said.serial, said.message));
    assert_eq!(closed, [(4, Message::Close {}), (6, Message::Close {})]);
    let mut state = [0];
    rustix::io::pread(&victim.liar.region.pages.peer, &mut state, lost.own.0 + u64::from(STATE_AT)).unwrap();
    assert_eq!(state, [CLOSED]);
    // A new connection takes no memory of those that the peer's programs have.
    let _ = victim.a.domain.connect("b/x", Deadline::after(Duration::from_millis(100)));
    let Message::Connect { offset, len, .. } = victim.liar.next().message else { panic!("it asks") };
    for made in [known, lost] {
        assert!(made.own.0 + made.own.1 <= offset || offset + len <= made.own.0, "{offset:#x} is {made:?}");
    }
    victim.liar.connect(8, "s", 0);
    assert_eq!(victim.liar.refusal(), code::MALFORMED, "the peer's window is one of a connection");
    // The earlier connection ends with its windows.
    victim.held.lock().unwrap().clear();
    victim.liar.region.pages.notify();
    assert_eq!(victim.liar.next(), Envelope { serial: 2, message: Message::Close {} });
}

#[test]
fn b18_connection_outlives_the_broker_of_its_other_end() {
    let mut victim = Victim::greeted(&ALL);
    let mut listener = victim.a.domain.listen("s").unwrap();
    victim.liar.connect(2, "s", 0);
    let Message::Accept { offset, len } = victim.liar.next().message else { panic!("it is accepted") };
    let mut link: Box<dyn Endpoint> = accept(&mut *listener);
    let made = Agreement { serial: 2, own: (offset, len), theirs: (WINDOWS_AT, 4096), channel: 508 };

    victim.liar.begin_anew();
    victim.liar.next();
    victim.liar.hello("b");
    let recounted = victim.liar.recounted().remove(0);
    assert!(
        matches!(recounted, Envelope { serial: 2, message: Message::Call { offset: at, side: Side::Open, .. } } if at == offset)
    );
    victim.liar.send_message(0, Message::Calls { connections: 1 });
    victim.liar.send_message(2, recount_of(&made, Side::Open));
    victim.liar.is_heard();
    assert!(link.recv(0).unwrap().is_none());
    link.send(b"still there", None).unwrap();

    // This time the program ended with the broker.
    victim.liar.begin_anew();
    victim.liar.next();
    victim.liar.hello("b");
    assert_eq!(victim.liar.recounted().len(), 1);
    victim.liar.send_message(0, Message::Calls { connections: 1 });
    victim.liar.send_message(2, recount_of(&made, Side::Over));
    eventually("the end is told", || {
        victim.liar.pump();
        matches!(link.recv(0), Err(Error::PeerGone))
    });
    drop(link);
    assert_eq!(victim.liar.next(), Envelope { serial: 2, message: Message::Close {} });
}

#[test]
fn b18_connections_that_cannot_be_are_not_believed() {
    let good = connection(2, 0, 508);
    let with = |change: fn(&mut Agreement)| {
        let mut made = connection(4, 1, 505);
        change(&mut made);
        made
    };
    let wrong = [
        with(|it| it.serial = 0),
        with(|it| it.own = (0, 4096)),
        with(|it| it.theirs = (WINDOWS_AT + 1, 4096)),
        with(|it| it.theirs.1 = 1 << 40),
        with(|it| it.own.0 = u64::MAX - 4095),
        with(|it| it.own.0 = WINDOWS_AT),
        with(|it| it.theirs.0 = WINDOWS_AT),
        with(|it| it.channel = 508),
        with(|it| it.channel = 3),
        with(|it| it.serial = 2),
    ];
    let mut victim = Victim::resuming(&ALL, &[good]);
    let greet = |victim: &mut Victim, connections: u16, agreed: &[Agreement]| {
        victim.liar.next();
        victim.liar.hello("b");
        victim.liar.recounted();
        victim.liar.send_message(0, Message::Calls { connections });
        for made in agreed {
            victim.liar.send_message(made.serial, recount_of(made, Side::Open));
        }
        victim.liar.connect(1000, "nothing", 90);
        eventually("it is not believed", || {
            victim.liar.pump();
            let connected = victim.a.domain.connect("b/x", Deadline::after(Duration::from_millis(100)));
            matches!(connected, Err(Error::NotFound(_)))
        });
        // The broker may have made a call before it read all of that.
        let harmless = |message: &Message| matches!(message, Message::Close {} | Message::Connect { .. });
        assert!(victim.liar.heard.iter().all(|said| harmless(&said.message)), "{agreed:?}");
        victim.liar.begin_anew();
    };
    wrong.iter().for_each(|made| greet(&mut victim, 2, &[good, *made]));
    greet(&mut victim, 1, &[good, connection(4, 1, 505)]);
    greet(&mut victim, 2, &[good]);
    greet(&mut victim, 171, &[good]);
    victim.liar.next();
    victim.liar.hello("b");
    victim.liar.recounted();
    victim.liar.send_message(0, Message::Calls { connections: 0 });
    victim.liar.is_heard();
}

#[test]
fn b15_conversations_that_are_idle_make_room_for_who_asks() {
    let victim = Victim::greeted(&[]);
    // More conversations than one user's programs may have at a time; each program has its own, and leaves it open.
    let domains: Vec<_> = (0..150).map(|_| VmDomain::through(&victim.a.socket)).collect();
    for (turn, domain) in domains.iter().chain(&domains[..10]).enumerate() {
        let answer = domain.connect("b/x", patience());
        assert!(matches!(answer, Err(Error::Denied(_))), "{turn}: {answer:?}");
    }
    // No program keeps a conversation for ever either.
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let kind = rustix::net::SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(rustix::net::AddressFamily::UNIX, kind, flags, None).unwrap();
    rustix::net::connect(&socket, &rustix::net::SocketAddrUnix::new(&victim.a.socket).unwrap()).unwrap();
    let (version_min, version_max, epoch, boot) = (VERSION, VERSION, 0, [0; 16]);
    let (offset, len, channel) = (0, 0, 0);
    let hello = Message::Hello { version_min, version_max, epoch, boot, name: name("program") };
    let question = Message::Connect { peer: name("b"), service: name("x"), offset, len, channel };
    let mut buffer = [0; 1024];
    for (serial, message) in [(0, hello), (1, question.clone()), (2, question)] {
        rustix::io::write(&socket, &Envelope { serial, message }.encode()).unwrap();
        assert!(wait_readable(socket.as_fd(), patience()).unwrap(), "{serial} is not answered");
        assert_ne!(rustix::io::read(&socket, &mut buffer), Ok(0), "{serial} is not answered");
    }
    assert!(wait_readable(socket.as_fd(), patience()).unwrap());
    assert_eq!(rustix::io::read(&socket, &mut buffer), Ok(0), "it is not waited for without end");
}

/// An address that the peer has, according to the host.
const NEAR: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 203, 0, 113, 7];

/// Returns a victim with a program that listens, and a peer whose broker knows the questions of B-23. According to the
/// host, the peer has `NEAR`.
fn seeker() -> (Victim, Client) {
    let mut victim = Victim::new(&ALL);
    let hello = victim.liar.next();
    assert!(matches!(hello.message, Message::Hello { .. }), "{hello:?}");
    let (epoch, boot) = (victim.liar.epoch, [2; 16]);
    let hello = Message::Hello { version_min: VERSION, version_max: VERSION_FIND, epoch, boot, name: name("b") };
    victim.liar.send_message(0, hello);
    assert_eq!(victim.liar.recounted(), []);
    victim.liar.send_message(0, Message::Calls { connections: 0 });
    victim.liar.is_heard();
    victim.a.host.send_message(Message::Addresses { link: LINK, addresses: vec![NEAR] });
    let program = Client::of_socket(&victim.a.socket);
    program.send_message(1, Message::Listen { service: name("sockets-00000000000000aa") });
    assert!(matches!(program.receive_message().unwrap().message, Message::Done {}));
    eventually("the host's word about the address", || {
        program.send_message(2, Message::Locate { address: NEAR });
        matches!(program.receive_message().unwrap().message, Message::Near { domains: 1 })
    });
    (victim, program)
}

/// Checks that the program's question about `key` reaches the peer's broker, and returns its serial.
fn asked(victim: &mut Victim, key: u32) -> u32 {
    let said = victim.liar.next();
    assert_eq!(said.message, Message::Seek { key });
    said.serial
}

/// Returns the answer to the program. Meanwhile the peer's broker sends the messages that wait for room.
fn answer_to(victim: &mut Victim, program: &Client) -> Envelope {
    while !wait_readable(program.socket.as_fd(), Deadline::after(Duration::from_millis(5))).unwrap() {
        victim.liar.region.pages.drain();
        victim.liar.pump();
    }
    program.receive_message().expect("an answer")
}

fn refused(victim: &mut Victim, program: &Client) -> (u32, u16) {
    match answer_to(victim, program) {
        Envelope { serial, message: Message::Refuse { code, .. } } => (serial, code),
        other => panic!("{other:?}"),
    }
}

#[test]
fn b23_program_has_one_question_under_way() {
    let (mut victim, program) = seeker();
    program.send_message(3, Message::Find { key: 5, address: NEAR });
    let serial = asked(&mut victim, 5);
    program.send_message(4, Message::Find { key: 6, address: NEAR });
    assert_eq!(refused(&mut victim, &program).1, code::MALFORMED);
    victim.liar.send_message(serial, Message::Nobody {});
    assert_eq!(refused(&mut victim, &program).1, code::NOT_FOUND);
    program.send_message(5, Message::Find { key: 7, address: NEAR });
    let serial = asked(&mut victim, 7);
    let found = Message::Found { peer: name("b"), service: name("x") };
    victim.liar.send_message(serial, found);
    let answer = answer_to(&mut victim, &program);
    assert_eq!((answer.serial, answer.message), (5, Message::Found { peer: name("b"), service: name("x") }));
}

#[test]
fn b23_answer_that_comes_too_late_or_to_nothing_is_told_to_nobody() {
    let (mut victim, program) = seeker();
    let since = Instant::now();
    program.send_message(3, Message::Find { key: 5, address: NEAR });
    let late = asked(&mut victim, 5);
    assert_eq!(refused(&mut victim, &program), (3, code::NOT_FOUND));
    let waited = since.elapsed();
    assert!((Duration::from_millis(900)..Duration::from_secs(8)).contains(&waited), "{waited:?}");
    let found = |service: &str| Message::Found { peer: name("b"), service: name(service) };
    victim.liar.send_message(late, found("late"));
    program.send_message(4, Message::Find { key: 6, address: NEAR });
    let serial = asked(&mut victim, 6);
    assert_ne!(serial, late);
    for other in [late, serial.wrapping_add(1), 0] {
        victim.liar.send_message(other, found("late"));
        victim.liar.send_message(other, Message::Nobody {});
    }
    victim.liar.send_message(serial, found("right"));
    let answer = answer_to(&mut victim, &program);
    assert_eq!((answer.serial, answer.message), (4, found("right")));
    // The repeated answer is no answer to the next question.
    victim.liar.send_message(serial, found("again"));
    program.send_message(5, Message::Find { key: 7, address: NEAR });
    let serial = asked(&mut victim, 7);
    victim.liar.send_message(serial, Message::Nobody {});
    assert_eq!(refused(&mut victim, &program), (5, code::NOT_FOUND));
}

#[test]
fn b21_b23_peer_of_a_link_that_is_left_is_not_asked() {
    let (mut victim, program) = seeker();
    // A connection keeps the link until it is closed.
    let mut listener = victim.a.domain.listen("kept").unwrap();
    victim.liar.connect(2, "kept", 0);
    let accepted = victim.liar.next();
    assert!(matches!(accepted.message, Message::Accept { .. }), "{accepted:?}");
    let _link = accept(&mut *listener);
    victim.a.host.send_message(Message::Leave { link: LINK, generation: 1, wait: 5000 });
    eventually("the link is left", || {
        matches!(
            victim.a.domain.connect("b/x", patience()),
            Err(Error::Os { .. } | Error::NotFound(_) | Error::Denied(_))
        )
    });
    program.send_message(3, Message::Find { key: 5, address: NEAR });
    assert_eq!(refused(&mut victim, &program), (3, code::NOT_FOUND));
    assert_not_asked(&mut victim);
}

/// Asserts that the peer's broker got no question about an endpoint.
fn assert_not_asked(victim: &mut Victim) {
    victim.liar.region.pages.drain();
    victim.liar.pump();
    let heard = &victim.liar.heard;
    assert!(!heard.iter().any(|said| matches!(said.message, Message::Seek { .. })), "{heard:?}");
}

#[test]
fn b22_own_address_is_nobody_elses_whatever_the_host_says() {
    let (mut victim, program) = seeker();
    victim.a.host.send_message(Message::Addresses { link: LINK, addresses: vec![NEAR, OWN] });
    // The broker has read the host's messages once it knows that the other address is withdrawn.
    victim.a.host.send_message(Message::Addresses { link: LINK, addresses: vec![OWN] });
    let near = |address| {
        program.send_message(2, Message::Locate { address });
        match program.receive_message().unwrap().message {
            Message::Near { domains } => domains,
            other => panic!("{other:?}"),
        }
    };
    eventually("the host is heard", || near(NEAR) == 0);
    assert_eq!(near(OWN), 0);
    program.send_message(3, Message::Find { key: 5, address: OWN });
    assert_eq!(refused(&mut victim, &program), (3, code::NOT_FOUND));
    assert_not_asked(&mut victim);
}
