// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs of the host and of a machine: the same behaviour as between two machines.

mod common;

use std::{
    io::{self, Read, Write},
    os::fd::OwnedFd,
    thread,
    time::{Duration, Instant},
};

use common::{
    by_hand::ByHand,
    host::{World, accept, patience},
    until,
};
use rustix::net::SocketType;
use tombolo_broker::fd_passing;
use tombolo_channel::{Backends, Ending, Messages, Options, Stream};
use tombolo_control::{Message, Stage, code};
use tombolo_domain::{Error, Liveness, Rendezvous};
use tombolo_os::event::{drain, raise};
use tombolo_testing::conformance::{self, Actor};

#[test]
fn child_process() {
    common::host::play();
}

/// The conformance suite of backends, with the host on either side.
mod suite {
    use std::sync::Arc;

    use tombolo_domain::Rendezvous;
    use tombolo_testing::conformance::{Actor, Fixture, Mortal};

    use crate::common::{
        host::{World, accept, patience},
        until,
    };

    struct Both(Arc<World>, bool);

    impl Both {
        fn sides(&self) -> [&dyn Rendezvous; 2] {
            let (host, guest): (&dyn Rendezvous, &dyn Rendezvous) = (&self.0.host, &self.0.guest.domain);
            if self.1 { [host, guest] } else { [guest, host] }
        }
    }

    impl Fixture for Both {
        fn listening(&self) -> &dyn Rendezvous {
            self.sides()[0]
        }

        fn connecting(&self) -> &dyn Rendezvous {
            self.sides()[1]
        }

        fn service(&self) -> String {
            self.0.service(if self.1 { "host" } else { "a" })
        }

        fn stale_service(&self) -> Option<String> {
            let service = self.service();
            let socket = if self.1 { self.0.socket() } else { self.0.guest.socket.clone() };
            let mut actor = Actor::start("listen", &socket, &service);
            let found = || self.connecting().connect(&service, patience()).is_ok();
            until("the listener is there", || found().then_some(()));
            actor.kill();
            until("the listener is gone", || (!found()).then_some(()));
            Some(service)
        }

        /// The peer is in the guest, because a host is never paused.
        fn mortal(&self) -> Option<Box<dyn Mortal>> {
            let (world, service, socket) = (self.0.clone(), self.service(), &self.0.guest.socket);
            let (actor, link) = if self.1 {
                let mut listener = world.host.listen(&service).expect("a fresh service is free");
                let actor = Actor::start("mortal", socket, &service);
                (actor, accept(&mut *listener))
            } else {
                let actor = Actor::start("mortal-listener", socket, &service);
                (actor, until("it listens", || world.host.connect(&service, patience()).ok()))
            };
            let event = |is_paused| if is_paused { "STOP" } else { "RESUME" };
            Some(actor.into_mortal(link, move |is_paused| world.vm.qmp.event(event(is_paused))))
        }
    }

    mod guest_to_host {
        tombolo_testing::conformance!(super::Both(std::sync::Arc::new(crate::common::host::World::new()), true));
    }

    mod host_to_guest {
        tombolo_testing::conformance!(super::Both(std::sync::Arc::new(crate::common::host::World::new()), false));
    }
}

fn backends(world: &World) -> [Backends; 2] {
    [&world.host, &world.guest.domain].map(|domain| Backends::new().with(domain.clone()))
}

#[test]
fn v1_stream_between_host_and_machine_carries_every_byte_both_ways() {
    const LEN: usize = 8 << 20;
    let world = World::new();
    let [host, guest] = backends(&world);
    for (listens, connects, domain) in [(&host, &guest, "host"), (&guest, &host, "a")] {
        let address = format!("vm:{}", world.service(domain)).parse().unwrap();
        let mut listener = listens.listen::<Stream>(&address, &Options::new()).unwrap();
        let bytes: Vec<u8> = (0..LEN).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        thread::scope(|scope| {
            let echo = scope.spawn(move || {
                let (mut reader, mut writer) = listener.accept().unwrap().into_split();
                io::copy(&mut reader, &mut writer).unwrap()
            });
            let stream: Stream = connects.connect(&address, &Options::new()).unwrap();
            assert_eq!(stream.peer().domain, domain);
            let (mut reader, mut writer) = stream.into_split();
            let sent = &bytes;
            scope.spawn(move || writer.write_all(sent).unwrap());
            let mut got = Vec::new();
            reader.read_to_end(&mut got).unwrap();
            assert!(got == bytes, "{} bytes came back", got.len());
            assert_eq!(echo.join().unwrap(), LEN as u64);
        });
    }
}

#[test]
fn v3_sleepers_on_host_and_machine_wake_each_other() {
    let world = World::new();
    let [host, guest] = backends(&world);
    common::wake_each_other(&host, &guest, &world.service("host"));
}

#[test]
fn v4_program_of_the_host_that_is_killed_is_over_for_its_peer_at_once() {
    let world = World::new();
    let [_, guest] = backends(&world);
    let service = world.service("a");
    let address = format!("vm:{service}").parse().unwrap();
    let mut listener = guest.listen::<Stream>(&address, &Options::new()).unwrap();
    let mut actor = Actor::start("stream", &world.socket(), &service);
    let mut stream = listener.accept().unwrap();
    stream.read_exact(&mut [0]).unwrap();
    actor.kill();
    let before = Instant::now();
    assert!(io::copy(&mut stream, &mut io::sink()).is_ok());
    assert!(before.elapsed() < Duration::from_secs(5));
    assert_eq!(stream.into_split().0.ending(), Some(Ending::ProcessGone));
}

#[test]
fn b16_connections_of_the_host_outlive_a_broker_that_is_killed_again_and_again() {
    let mut world = World::new();
    let options = Options::new().spin(Duration::ZERO);
    let [host, guest] = backends(&world);
    let address = format!("vm:{}", world.service("host")).parse().unwrap();
    let mut listener = host.listen::<Messages>(&address, &options).unwrap();
    let echo = thread::spawn(move || {
        let (mut replies, mut questions) = listener.accept().unwrap().into_split();
        let mut message = [0; 64];
        let mut count = 0;
        while let Some(len) = questions.recv(&mut message).unwrap() {
            replies.send(&message[..len]).unwrap();
            count += 1;
        }
        count
    });
    let (mut questions, mut replies) = guest.connect::<Messages>(&address, &options).unwrap().into_split();
    let mut rounds = 0u32;
    let mut ask = |times: u32| {
        for _ in 0..times {
            rounds += 1;
            questions.send(&rounds.to_le_bytes()).unwrap();
            let mut answer = [0; 64];
            assert_eq!(replies.recv(&mut answer).unwrap(), Some(4));
            assert_eq!(answer[..4], rounds.to_le_bytes());
        }
    };
    ask(50);
    // A connection that only waits, to be asked about its peer.
    let service = world.service("host");
    let mut quiet_listener = world.host.listen(&service).unwrap();
    let client = world.guest.domain.connect(&service, patience()).unwrap();
    let mut quiet = accept(&mut *quiet_listener);
    for _ in 0..3 {
        world.daemon.kill();
        world.vm.qmp.forget_client();
        assert_eq!(quiet.liveness(), Liveness::Running, "nobody said otherwise");
        world.daemon.restart();
        ask(50);
        for (event, life) in [("STOP", Liveness::Paused), ("RESUME", Liveness::Running)] {
            until("QEMU is asked again", || world.vm.qmp.is_asked().then_some(()));
            world.vm.qmp.event(event);
            until("the new broker tells how the peer fares", || (quiet.liveness() == life).then_some(()));
        }
        // New connections get the numbers and memory that the old ones do not have.
        world.meet();
    }
    drop(client);
    assert!(matches!(conformance::receive(&mut *quiet, patience()), Err(Error::PeerGone)));
    drop(quiet);
    ask(50);
    drop((questions, replies));
    assert_eq!(echo.join().unwrap(), rounds);
    until("all connections are over", || {
        (!world.daemon.kept().iter().any(|key| key.starts_with("call/"))).then_some(())
    });
}

#[test]
fn b7_ends_of_a_link_are_told_with_their_guests_and_connections() {
    let daemon = common::Daemon::start(common::host::PAIR);
    let vm = common::Vm::without_broker(&daemon, "a");
    vm.qmp.state().unsealed = true;
    let of_a = |daemon: &common::Daemon| {
        daemon.client().ends().into_iter().find_map(|row| match row {
            Message::EndRow { name, stage, connections, used, .. } if name.as_str() == "a" => {
                Some((stage, connections, used))
            }
            _ => None,
        })
    };
    let host = tombolo_domain_ivshmem::VmDomain::through(tombolo_broker::host::paths::program_socket(daemon.path()));
    // The guest is empty: neither the list nor a caller takes that for a peer that does not listen.
    until("it is said", || of_a(&daemon).filter(|end| *end == (Stage::Silent, 0, 0)));
    let note = |daemon: &common::Daemon| {
        daemon.client().links().into_iter().find_map(|row| match row {
            Message::LinkRow { note, .. } => Some(note.to_string()),
            _ => None,
        })
    };
    until("the list says why", || note(&daemon).filter(|note| note.starts_with("a's guest says nothing")));
    let why = host.connect("a/service", patience()).map(drop).unwrap_err().to_string();
    assert!(why.contains("there is no link with a"), "{why}");
    assert!(vm.qmp.state().memories.is_empty(), "what is plugged before its kernel runs lies where it does not cache");
    vm.greet();
    let why = until("the host is told of the link", || {
        let why = host.connect("a/service", patience()).map(drop).unwrap_err().to_string();
        why.contains("has not opened the link").then_some(why)
    });
    assert!(why.contains("vm:a/service, as the broker of a"), "{why}");
    vm.qmp.event("STOP");
    until("the list says that it is paused", || note(&daemon).filter(|note| note == "a is paused"));
    until("and a caller is told", || {
        let why = host.connect("a/service", patience()).map(drop).unwrap_err().to_string();
        why.contains("has not opened the link (its machine is paused)").then_some(())
    });
    vm.qmp.event("RESUME");
    let guest = common::host::Guest::start(&daemon, &vm, 1);
    until("its broker is there", || of_a(&daemon).filter(|end| end.0 == Stage::Closed));
    until("the list says where to look", || {
        note(&daemon).filter(|note| note.starts_with("a's broker runs and has not"))
    });
    guest.plug(&daemon, &vm);
    until("it has opened the link", || of_a(&daemon).filter(|end| *end == (Stage::Open, 0, 0)));
    let mut listener = guest.domain.listen("service").unwrap();
    let client = until("it connects", || host.connect("a/service", patience()).ok());
    let accepted = accept(&mut *listener);
    until("the connection is counted", || of_a(&daemon).filter(|end| end.1 == 1 && end.2 > 0));
    drop((client, accepted));
    until("and its end", || of_a(&daemon).filter(|end| *end == (Stage::Open, 0, 0)));
}

/// Makes an eventfd full and blocking, as a hostile program may do with what it shares with its broker.
fn jam(event: &OwnedFd) {
    drain(event);
    rustix::io::write(event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rustix::io::ioctl_fionbio(event, false).unwrap();
}

#[test]
fn b8_eventfds_that_programs_and_qemus_fill_and_make_blocking_stop_no_broker() {
    let mut world = World::new();
    let program = ByHand::listen(&world.socket(), "jammed");
    let _client = world.guest.domain.connect("host/jammed", patience()).unwrap();
    let descriptors = program.accept();
    descriptors[2..].iter().for_each(jam);
    // The machine's QEMU does so too: with its broker's vector, and the links'.
    world.vm.own.iter().for_each(jam);
    for _ in 0..2 {
        world.daemon.kill();
        world.vm.qmp.forget_client();
        world.daemon.restart();
        until("links are answered for", || (!world.daemon.client().links().is_empty()).then_some(()));
        until("programs are served", || world.host.listen("another").ok());
    }
    // The machine becomes well-behaved, and is notified as before.
    for own in &world.vm.own {
        rustix::io::ioctl_fionbio(own, true).unwrap();
        drain(own);
    }
    raise(&world.vm.own[0]);
    world.meet();
}

#[test]
fn v7_connections_of_the_host_end_with_an_error_once_broker_and_store_are_gone() {
    for order in [&["holder", "broker"][..], &["broker", "holder"], &["broker", "holder", "broker again"]] {
        let mut world = World::new();
        let [host, guest] = backends(&world);
        let address = format!("vm:{}", world.service("host")).parse().unwrap();
        let options = Options::new().spin(Duration::ZERO);
        let mut listener = host.listen::<Messages>(&address, &options).unwrap();
        let waits = thread::spawn(move || {
            let (_sender, mut receiver) = listener.accept().unwrap().into_split();
            let received = receiver.recv(&mut [0; 64]).map(drop);
            (received, receiver.ending())
        });
        let client = guest.connect::<Messages>(&address, &options).unwrap();
        for who in order {
            match *who {
                "holder" => {
                    let store = rustix::process::Pid::from_raw(world.daemon.store()).unwrap();
                    rustix::process::kill_process(store, rustix::process::Signal::KILL).unwrap();
                    // A broker that begins must not meet a descriptor store that is about to die.
                    let place = world.daemon.file("holder.socket");
                    until("it is gone", || fd_passing::connect(&place, SocketType::SEQPACKET).is_err().then_some(()));
                }
                "broker" => world.daemon.kill(),
                _ => {
                    world.vm.qmp.forget_client();
                    world.daemon.restart();
                }
            }
        }
        until("who waits is woken", || waits.is_finished().then_some(()));
        let (received, ending) = waits.join().unwrap();
        assert_eq!(ending, Some(Ending::Revoked), "{order:?}: {received:?}");
        drop(client);
        // Its calls to a broker that is gone fail, which does not matter here.
        world.guest.forget();
    }
}

#[test]
fn b12_qemu_that_is_stopped_itself_is_paused() {
    let daemon = common::Daemon::start(common::TRIO);
    let life = |wanted: tombolo_control::Life| {
        common::until("it is said", || {
            let rows = daemon.client().domains();
            let is = |row: &Message| matches!(row, Message::DomainRow { name, life, .. } if name.as_str() == "a" && *life == wanted);
            rows.iter().any(is).then_some(())
        });
    };
    let mut qemu = Actor::start("qemu", daemon.path(), "a");
    life(tombolo_control::Life::Unknown);
    qemu.stop();
    life(tombolo_control::Life::Paused);
    qemu.go_on();
    life(tombolo_control::Life::Unknown);
    qemu.kill();
    life(tombolo_control::Life::DomainGone);
}

#[test]
fn c7_connect_to_a_paused_machine_says_that_it_is_paused() {
    let world = World::new();
    let [host, guest] = backends(&world);
    let address = format!("vm:{}", world.service("a")).parse().unwrap();
    // The listener accepts no caller: it is paused.
    let _listener = guest.listen::<Messages>(&address, &Options::new()).unwrap();
    world.vm.qmp.event("STOP");
    let options = Options::new().handshake_timeout(Duration::from_millis(200));
    let why = until("it is told", || {
        let error = host.connect::<Messages>(&address, &options).map(drop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        let why = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        why.contains("paused").then_some(why)
    });
    assert_eq!(why, "timed out, as the peer a is paused");
    world.vm.qmp.event("RESUME");
}

#[test]
fn b12_qemu_that_is_gone_is_told_to_programs_of_the_host_and_its_data_stays_readable() {
    let world = World::new();
    let service = world.service("host");
    let mut listener = world.host.listen(&service).unwrap();
    let mut client = world.guest.domain.connect(&service, patience()).unwrap();
    let mut link = accept(&mut *listener);
    let (segment, offer) = client.allocate(4096).unwrap();
    client.send(b"read me", Some(&offer)).unwrap();
    let received = conformance::receive(&mut *link, patience()).unwrap();
    assert_eq!((received.message.as_slice(), received.segment.is_some()), (&b"read me"[..], true));
    let World { vm, daemon, guest, .. } = world;
    let before = Instant::now();
    drop(vm);
    until("it is told", || (link.liveness() == Liveness::DomainGone).then_some(()));
    assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
    assert!(matches!(conformance::receive(&mut *link, patience()), Err(Error::PeerGone)));
    assert!(received.segment.is_some_and(|segment| !segment.is_lost()));
    drop((segment, client, guest, daemon));
}

#[test]
fn b8_machine_that_notifies_the_host_without_end_loses_that_doorbell_and_it_is_reported() {
    let world = World::new();
    let doorbell = world.guest.lines.lock().unwrap().values().next().unwrap().outgoing.try_clone().unwrap();
    let (a, before) = ("a rings host without end", Instant::now());
    let said = until("the storm is noticed", || {
        (0..10_000).for_each(|_| raise(&doorbell));
        world.daemon.client().links().into_iter().find_map(|row| match row {
            Message::LinkRow { note, .. } if note.as_str().starts_with(a) => Some(note),
            _ => None,
        })
    });
    assert!(said.as_str().ends_with("its doorbell is taken away for a while"), "{said} after {:?}", before.elapsed());
    let (number, gone) = world.vm.device.must();
    assert!(number >= 2 && gone.is_none());
    assert!(world.daemon.log().contains("host: a rings without end"), "{}", world.daemon.log());
    // The doorbell comes back under another number, and the programs did not notice.
    let (again, doorbell) = world.vm.device.must();
    assert!(again > number && doorbell.is_some());
}

#[test]
fn b19_numbers_are_told_to_who_has_a_link_and_anew_when_they_change() {
    let world = World::new();
    let known = |domain: &tombolo_domain_ivshmem::VmDomain, number| {
        domain.who(number).expect("the broker answers").map(|(number, name)| (number, name.to_string()))
    };
    let (host, a) = (Some((0, "host".to_owned())), Some((7, "a".to_owned())));
    let sides = [world.host.clone(), world.guest.domain.clone()];
    for side in &sides {
        common::until("the numbers are told", || {
            (known(side, Some(0)) == host && known(side, Some(7)) == a).then_some(())
        });
        assert_eq!(known(side, Some(8)), None);
    }
    assert_eq!((known(&sides[0], None), known(&sides[1], None)), (host.clone(), a));
    world.daemon.configure(&common::host::PAIR.replace("number = 7\n", "").replace("number = 0", "number = 9"));
    world.daemon.signal(rustix::process::Signal::HUP);
    for side in &sides {
        common::until("they are told anew", || {
            (known(side, Some(7)).is_none() && known(side, Some(0)).is_none()).then_some(())
        });
        assert_eq!(known(side, Some(9)), Some((9, "host".to_owned())));
    }
    assert_eq!(known(&sides[1], None), None);
}

#[test]
fn b15_user_without_an_account_is_told_so() {
    let test = "b15_user_without_an_account_is_told_so";
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(io::stderr(), "SKIP {test} (needs root): only root can become somebody else");
        return;
    }
    let config = common::host::PAIR.replace("[domain.a]", "[account.alice]\nuser = 12345\n[domain.a]");
    let daemon = common::Daemon::start(&config);
    let domain = tombolo_domain_ivshmem::VmDomain::through(tombolo_broker::host::paths::program_socket(daemon.path()));
    let asked = |user: u32| {
        let domain = domain.clone();
        let asked = thread::spawn(move || {
            use rustix::{fs::Uid, thread};
            let user = Uid::from_raw(user);
            thread::set_thread_res_uid(user, user, user).unwrap();
            domain.listen("service").map(drop)
        });
        asked.join().unwrap()
    };
    assert!(asked(12345).is_ok());
    assert!(matches!(asked(12346), Err(Error::Denied(_))));
    // A client that sends a request before the greeting has unread bytes when it is refused.
    for _ in 0..100 {
        let domain = domain.clone();
        let connected = thread::spawn(move || {
            let user = rustix::fs::Uid::from_raw(12346);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            domain.connect("a/service", patience()).map(drop)
        });
        let connected = connected.join().unwrap();
        assert!(matches!(connected, Err(Error::Denied(_))), "{connected:?}");
    }
    // Each account has its own names of services.
    let _mine = domain.listen("service").unwrap();
    assert!(asked(12345).is_ok());
    assert!(matches!(domain.listen("alice/service"), Err(Error::BadService { .. })));
}

#[test]
fn b13_what_no_rule_allows_between_host_and_machine_is_refused() {
    let daemon = common::Daemon::start(common::TRIO);
    let (number, why) = daemon.client().refusal(common::add("b", "host", 0));
    assert_eq!(number, code::DENIED, "{why}");
    let domain = tombolo_domain_ivshmem::VmDomain::through(tombolo_broker::host::paths::program_socket(daemon.path()));
    assert!(matches!(domain.connect("b/sql", patience()), Err(Error::NotFound(_))));
}
