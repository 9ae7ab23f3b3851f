// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A broker whose peer's broker says what it likes: it harms its own link, and nothing else.

mod common;

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use common::{ALL, FakeRegion, LINK, Machine, accept, eventually, name, patience, told};
use tombolo_broker_guest::devices::{Pages, Region};
use tombolo_control::{Event, Life, Message, NO_BELL, Path, SLICES_AT, Said, Session, VERSION, Way, code};
use tombolo_domain::{Deadline, Error, Link, Rendezvous, conformance, wait_readable};

#[test]
fn child_process() {
    common::play();
}

/// A good machine `a`, and in the place of `b`'s broker this test.
struct Victim {
    a: Machine,
    liar: Liar,
    _folder: tempfile::TempDir,
}

struct Liar {
    region: FakeRegion,
    session: Session,
    epoch: u64,
    heard: Vec<Said>,
}

impl Victim {
    fn new(rules: &[(Way, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [to_b, mut region] = FakeRegion::pair();
        let a = Machine::new(folder.path(), "a", ("b", 0), to_b, rules);
        let session = Session::begin(Path::Link, 1, region.pages()).unwrap();
        Self { a, liar: Liar { region, session, epoch: 1, heard: Vec::new() }, _folder: folder }
    }

    /// One whose peer has said Hello as it should.
    fn greeted(rules: &[(Way, &str)]) -> Self {
        let mut victim = Self::new(rules);
        victim.liar.greet();
        victim
    }
}

impl Liar {
    fn say(&mut self, serial: u32, message: Message) {
        assert!(self.session.say(&Said { serial, message }));
        self.pump();
    }

    fn pump(&mut self) {
        loop {
            let (event, changed) = self.session.turn(self.region.pages()).unwrap();
            if changed {
                self.region.pages.ring();
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

    /// The next thing that is said to it.
    fn next(&mut self) -> Said {
        let deadline = patience();
        loop {
            self.region.pages.drain();
            self.pump();
            if !self.heard.is_empty() {
                return self.heard.remove(0);
            }
            assert!(wait_readable(self.region.pages.heard.as_fd(), deadline).unwrap(), "nothing is said");
        }
    }

    fn greet(&mut self) {
        let hello = self.next();
        assert!(matches!(&hello.message, Message::Hello { name, .. } if name.as_str() == "a"), "{hello:?}");
        self.hello("b");
    }

    fn hello(&mut self, own: &str) {
        let (epoch, boot) = (self.epoch, [2; 16]);
        self.say(0, Message::Hello { version_min: VERSION, version_max: VERSION, epoch, boot, name: name(own) });
    }

    fn begin_anew(&mut self) {
        self.epoch += 1;
        self.session = Session::begin(Path::Link, self.epoch, self.region.pages()).unwrap();
        self.region.pages.ring();
        self.heard.clear();
    }

    fn connect(&mut self, serial: u32, service: &str, number: u64) {
        let (offset, len) = (SLICES_AT + number * 4096, 4096);
        let channel = 1 + 3 * 169u16.saturating_sub(number as u16);
        self.say(serial, Message::Connect { peer: name("b"), service: name(service), offset, len, channel });
    }

    fn refusal(&mut self) -> u16 {
        match self.next().message {
            Message::Refuse { code, .. } => code,
            other => panic!("{other:?}"),
        }
    }

    /// Whether it is heard: it asks for what there is not, and that is answered.
    fn is_heard(&mut self) {
        self.connect(1002, "nothing", 60);
        assert_eq!(self.refusal(), code::NOT_FOUND);
    }
}

#[test]
fn b6_peer_that_breaks_the_rules_is_not_heard_until_it_begins_anew() {
    let mut victim = Victim::greeted(&ALL);
    victim.liar.is_heard();
    let accept = Message::Accept { offset: SLICES_AT, len: 4096 };
    let wrong: [(u32, Message); 4] = [
        (77, accept),
        (77, Message::Close {}),
        (77, Message::Refuse { code: 0, reason: "".into() }),
        (0, Message::Hello { version_min: 1, version_max: 1, epoch: 1, boot: [2; 16], name: name("b") }),
    ];
    for (serial, message) in wrong {
        victim.liar.say(serial, message.clone());
        victim.liar.connect(2, "nothing", 0);
        // The broker answers others meanwhile, and not this one.
        assert!(matches!(victim.a.domain.connect("b/x", patience()), Err(Error::NotFound(_))), "{message:?}");
        victim.liar.pump();
        assert!(victim.liar.heard.is_empty(), "{message:?}: {:?}", victim.liar.heard);
        victim.liar.begin_anew();
        victim.liar.greet();
        victim.liar.is_heard();
    }
}

#[test]
fn b6_machine_is_called_what_the_host_says() {
    let victim = Victim::new(&ALL);
    assert!(victim.a.domain.listen("web-1/s").is_err());
    victim.a.host.say(Message::You { name: name("web-1") });
    eventually("it has its name", || victim.a.domain.listen("web-1/s").is_ok());
    assert!(victim.a.domain.listen("a/s").is_err());
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

    // When the rules change, they count from then on.
    told("b", 0, 2, &[(Way::In, "*")]).into_iter().for_each(|message| victim.a.host.say(message));
    eventually("the new rules are there", || {
        victim.liar.connect(6, "secret", 1);
        matches!(victim.liar.next().message, Message::Accept { .. })
    });
}

#[test]
fn b14_calls_of_a_peer_that_never_closes_are_bounded() {
    let mut victim = Victim::greeted(&ALL);
    let mut listener = victim.a.domain.listen("s").unwrap();
    let mut calls = Vec::new();
    for number in 0.. {
        victim.liar.connect(2 * number + 2, "s", u64::from(number));
        match victim.liar.next().message {
            Message::Accept { .. } => calls.push(accept(&mut *listener)),
            Message::Refuse { code, .. } => {
                assert!(matches!(code, code::QUOTA | code::MALFORMED), "{code}");
                break;
            }
            other => panic!("{other:?}"),
        }
        assert!(number < 1000, "there is no bound");
    }
    assert!(calls.len() > 100, "{}", calls.len());
    // Closed by the program alone, a slice stays where the peer may look at it.
    drop(calls);
    victim.liar.connect(4000, "s", 0);
    let closes = std::iter::from_fn(|| match victim.liar.next().message {
        Message::Close {} => Some(()),
        _ => None,
    });
    closes.for_each(drop);
    let serials: Vec<u32> = (1..=100).map(|number| 2 * number).collect();
    for serial in serials {
        victim.liar.say(serial, Message::Close {});
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
    eventually("the peer is there", || {
        let before = Instant::now();
        let called = victim.a.domain.connect("b/x", Deadline::after(Duration::from_millis(100)));
        matches!(called, Err(Error::TimedOut)) && before.elapsed() < Duration::from_secs(10)
    });
    // An answer to who has gone is answered by Close.
    let Said { serial, message: Message::Connect { .. } } = victim.liar.next() else { panic!() };
    victim.liar.say(serial, Message::Accept { offset: SLICES_AT, len: 4096 });
    eventually("Close is said", || {
        victim.liar.region.pages.drain();
        victim.liar.pump();
        victim.liar.heard.iter().any(|said| said.serial == serial && said.message == Message::Close {})
    });
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
        // Now and then with a head that is right, so that what is behind it is looked at.
        if rounds % 2 == 0 {
            page[..16].copy_from_slice(&[&b"TOMBOLO\0"[..], &1u64.to_le_bytes()].concat());
        }
        rustix::io::pwrite(&victim.liar.region.pages.own, &page, 0).unwrap();
        victim.liar.region.pages.ring();
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
    let mut link: Box<dyn Link> = accept(&mut *listener);
    assert!(matches!(victim.liar.next().message, Message::Accept { .. }));
    victim.a.host.say(Message::Life { link: LINK, generation: 1, life: Life::DomainGone });
    assert!(matches!(conformance::receive(&mut *link, patience()), Err(Error::PeerGone)));
    assert_eq!(link.life(), tombolo_domain::Life::DomainGone);
    assert!(matches!(victim.a.domain.connect("b/x", patience()), Err(Error::NotFound(_))));

    victim.a.host.say(Message::Bell { link: LINK, bell: NO_BELL });
    victim.a.host.say(Message::Unlink { link: LINK, generation: 1 });
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
            rustix::io::write(&socket, &Said { serial: 3, message }.encode()).unwrap();
        }
        socket
    };
    let (early, silent) = (socket(Some(Message::Listen { service: name("s") })), socket(None));
    let mut buffer = [0; 1024];
    let len = rustix::io::read(&early, &mut buffer).unwrap();
    let said = Said::decode(Path::Socket, &buffer[..len]).unwrap();
    assert!(matches!(said, Said { serial: 3, message: Message::Refuse { code: code::MALFORMED, .. } }), "{said:?}");
    for socket in [early, silent] {
        assert!(wait_readable(socket.as_fd(), patience()).unwrap());
        assert_eq!(rustix::io::read(&socket, &mut buffer), Ok(0), "it is not waited for without end");
    }
}
