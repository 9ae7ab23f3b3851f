// SPDX-License-Identifier: Apache-2.0 OR MIT
//! TCP connections of programs in two machines: found by the brokers, proved by the connection's own numbers, woken by
//! the session's doorbell (S-17, S-18, B-22, B-23). The machines are in this process; the kernels and the network of
//! the programs are simulated.

mod common;

use std::{
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use common::{
    Daemon, Vm,
    endpoint::{LINK, World, accept, patience, play},
    tcp::{
        NUMBERS, Program, SOON, address, both_joined, byte_at, mirrored, pairs_between, stream, talk, until_joined,
        until_near,
    },
};
use rustix::event::{Timespec, epoll};
use tombolo_control::{Message as Said, Way};
use tombolo_domain::{PeerFinder, Rendezvous, SingleDoorbell, Sought, wait_readable};
use tombolo_domain_ivshmem::VmDomain;
use tombolo_layout::sockets::{Counts, Message};
use tombolo_sockets::{Reason, connection::Stage, tuple::key_of_sequences};

const OF_A: &str = "10.0.0.1";
const OF_B: &str = "10.0.0.2";

#[test]
fn child_process() {
    play();
}

/// Returns a client in a and a server in b.
fn pair(world: &World, numbers: [Option<[u32; 2]>; 2], addresses: [&str; 2]) -> (Program, Program) {
    let (mut clients, mut servers) = pairs(world, &[numbers], addresses);
    (clients.remove(0), servers.remove(0))
}

/// As `pair`, with a connection for each pair of numbers.
fn pairs(world: &World, numbers: &[[Option<[u32; 2]>; 2]], addresses: [&str; 2]) -> (Vec<Program>, Vec<Program>) {
    pairs_between([&world.a.domain, &world.b.domain], numbers, addresses)
}

/// The host tells each machine where the other can be reached.
fn tell_addresses(world: &World, of_a: &[&str], of_b: &[&str]) {
    let list = |all: &[&str]| all.iter().map(|it| address(it)).collect();
    world.a.host.send_message(Said::Addresses { link: LINK, addresses: list(of_b) });
    world.b.host.send_message(Said::Addresses { link: LINK, addresses: list(of_a) });
    for (machine, all) in [(&world.a, of_b), (&world.b, of_a)] {
        all.iter().for_each(|it| until_near(&machine.domain, address(it)));
    }
}

#[test]
fn s18_b22_b23_programs_in_two_machines_are_joined_and_every_byte_arrives_once() {
    let world = World::new();
    tell_addresses(&world, &[OF_A], &[OF_B]);
    let (mut client, mut server) = pair(&world, mirrored(NUMBERS), [OF_A, OF_B]);
    let mut at = 0;
    until_joined(&mut client, &mut server, &mut at);
    talk(&mut client, &mut server, &mut at, 200, |_, _| false);
    let tcp = client.kernel().counts(-1, true).unwrap().counts;
    assert!(tcp.written + tcp.received < at, "all of {at} bytes went over TCP");
    let before = tcp.written;
    talk(&mut client, &mut server, &mut at, 200, |_, _| false);
    assert_eq!(client.kernel().counts(-1, true).unwrap().counts.written, before, "TCP carries some of it still");
}

/// Returns the numbers of so many connections.
fn numbers(count: u32) -> Vec<[Option<[u32; 2]>; 2]> {
    (0..count).map(|at| mirrored([NUMBERS[0] + 7 * at, NUMBERS[1] + 11 * at])).collect()
}

/// Number of connections between two processes: they fit into the memory of two sessions and not into that of one.
const MANY: u32 = 100;

#[test]
fn s18_more_connections_than_one_session_has_room_for_go_over_another() {
    let world = World::new();
    tell_addresses(&world, &[OF_A], &[OF_B]);
    let (mut clients, mut servers) = pairs(&world, &numbers(MANY), [OF_A, OF_B]);
    let mut positions = vec![0; MANY as usize];
    for round in 0.. {
        for (at, (client, server)) in positions.iter_mut().zip(clients.iter_mut().zip(&mut servers)) {
            talk(client, server, at, 3, both_joined);
        }
        let joined = clients.iter().zip(&servers).filter(|(client, server)| both_joined(client, server)).count();
        let reasons: Vec<_> = clients.iter().chain(&servers).filter_map(|it| it.connection.reason()).collect();
        assert_eq!(reasons, [], "{joined} are joined");
        if joined == MANY as usize {
            break;
        }
        assert!(round < 2000, "{joined} are joined");
    }
    for (at, (client, server)) in positions.iter_mut().zip(clients.iter_mut().zip(&mut servers)) {
        talk(client, server, at, 30, |_, _| false);
    }
    // Room that connections leave is used by others.
    clients.truncate(1);
    servers.truncate(1);
    talk(&mut clients[0], &mut servers[0], &mut positions[0], 30, |_, _| false);
}

/// Returns an epoll instance like those that the library makes for a program that waits for one connection.
fn waiting_at(doorbell: &SingleDoorbell) -> OwnedFd {
    assert!(doorbell.is_shared());
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&epoll, doorbell, epoll::EventData::new_u64(1), edges).unwrap();
    // Earlier notifications are reported once.
    while was_notified(&epoll) {}
    epoll
}

/// Returns whether a notification has come since, and takes it.
fn was_notified(epoll: &OwnedFd) -> bool {
    let (mut room, now) = ([std::mem::MaybeUninit::uninit(); 4], Timespec { tv_sec: 0, tv_nsec: 0 });
    !epoll::wait(epoll, &mut room, Some(&now)).unwrap().0.is_empty()
}

#[test]
fn s17_notification_of_a_session_wakes_all_who_wait_and_none_takes_it_from_another() {
    let world = World::new();
    let service = world.service();
    let mut listener = world.a.domain.listen(&service).unwrap();
    let mut caller = world.b.domain.connect(&service, patience()).unwrap();
    let mut connected = accept(&mut *listener);
    caller.send(b"hello", None).unwrap();
    connected.send(b"hello", None).unwrap();
    let deadline = Instant::now() + SOON;
    for link in [&mut caller, &mut connected] {
        while link.recv(0).unwrap().is_none() {
            assert!(Instant::now() < deadline, "no greeting");
        }
    }
    let own: Vec<_> = (0..3).map(|_| connected.shared_doorbells().unwrap().unwrap().0).collect();
    let waiting: Vec<_> = own.iter().map(waiting_at).collect();
    let (theirs, notifier) = caller.shared_doorbells().unwrap().unwrap();
    let other = waiting_at(&theirs);
    for round in 0..100 {
        notifier.notify();
        for (number, epoll) in waiting.iter().enumerate() {
            assert!(wait_readable(epoll.as_fd(), patience()).unwrap(), "round {round}: {number} sleeps on");
            assert!(was_notified(epoll) && !was_notified(epoll), "round {round}: {number}");
        }
        // Messages have a doorbell of their own, and taking them takes no notification of the shared doorbell.
        caller.send(b"more", None).unwrap();
        notifier.notify();
        while connected.recv(0).unwrap().is_none() {}
        assert!(waiting.iter().all(was_notified), "round {round}: a message was heard, and a notification is gone");
    }
    assert!(!was_notified(&other), "a notification wakes the peer alone");
    own[0].notify();
    assert!(waiting.iter().all(was_notified), "this end wakes its own");
}

/// Returns a pair that is joined, and the number of bytes that went between them.
fn joined(world: &World) -> (Program, Program, u64) {
    tell_addresses(world, &[OF_A], &[OF_B]);
    let (mut client, mut server) = pair(world, mirrored(NUMBERS), [OF_A, OF_B]);
    let mut at = 0;
    until_joined(&mut client, &mut server, &mut at);
    talk(&mut client, &mut server, &mut at, 50, |_, _| false);
    (client, server, at)
}

#[test]
fn s19_connections_of_a_link_that_is_left_go_on_over_tcp_and_look_at_its_memory_no_more() {
    let world = World::new();
    let (mut client, mut server, mut at) = joined(&world);
    // Bytes that are unread in the pipe when the link is left come over TCP.
    let unread: Vec<u8> = (0..3000).map(byte_at).collect();
    assert_eq!(client.send(&unread), 3000);
    let leave = Said::Leave { link: LINK, generation: 1, wait: 60_000 };
    world.a.host.send_message(leave.clone());
    world.b.host.send_message(leave);
    let (mut came, deadline) = (Vec::<u8>::new(), Instant::now() + SOON);
    while came.len() < 3000 {
        let mut room = [0; 500];
        [&client, &server].iter().for_each(|it| it.sleep());
        client.connection.for_call(&client.process, client.fd()).send_recalled();
        let n = server.receive(&mut room);
        came.extend(&room[..n]);
        assert!(Instant::now() < deadline, "{} of 3000 bytes came", came.len());
    }
    assert_eq!(came, unread);
    let left = Said::Left { link: LINK, generation: 1 };
    while !(world.a.host.heard(&left) && world.b.host.heard(&left)) {
        talk(&mut client, &mut server, &mut at, 1, |_, _| false);
        [&client, &server].iter().for_each(|it| it.sleep());
        let on = [&client, &server].map(|it| (it.connection.transports(), it.connection.reason()));
        let heard = [&world.a, &world.b].map(|it| it.host.heard(&left));
        assert!(Instant::now() < deadline, "the link is not left: {on:?}, {heard:?}");
    }
    world.take_memory();
    talk(&mut client, &mut server, &mut at, 200, |_, _| false);
    for end in [&client, &server] {
        assert!(end.connection.is_back_on_tcp() && end.connection.unread() == 0);
        assert!(!end.connection.for_call(&end.process, -1).is_readable(), "there is nothing to read");
    }
}

/// One sends and one receives, and neither ever sleeps: each learns of it in its calls.
#[test]
fn s19_link_is_left_by_programs_that_never_sleep() {
    let world = World::new();
    let (mut client, mut server, mut at) = joined(&world);
    let leave = Said::Leave { link: LINK, generation: 1, wait: 60_000 };
    world.a.host.send_message(leave.clone());
    world.b.host.send_message(leave);
    let left = Said::Left { link: LINK, generation: 1 };
    let deadline = Instant::now() + SOON;
    while !(world.a.host.heard(&left) && world.b.host.heard(&left)) {
        stream(&mut client, &mut server, &mut at);
        let on = [&client, &server].map(|it| (it.connection.transports(), it.connection.reason()));
        let heard = [&world.a, &world.b].map(|it| it.host.heard(&left));
        assert!(Instant::now() < deadline, "the link is not left: {on:?}, {heard:?}");
    }
    world.take_memory();
    (0..200).for_each(|_| stream(&mut client, &mut server, &mut at));
}

#[test]
#[should_panic(expected = "os error 104")]
fn s19_canary_memory_that_goes_before_a_connection_has_left_it_ends_the_connection() {
    let world = World::new();
    let (mut client, mut server, mut at) = joined(&world);
    world.take_memory();
    talk(&mut client, &mut server, &mut at, 200, |_, _| false);
}

#[test]
fn b22_connection_whose_peer_no_neighbour_may_be_is_sought_in_the_folder_alone() {
    let world = World::new();
    // The host reports b at another address.
    tell_addresses(&world, &[OF_A], &["10.0.0.3"]);
    let (mut client, mut server) = pair(&world, mirrored(NUMBERS), [OF_A, OF_B]);
    talk(&mut client, &mut server, &mut 0, 300, |_, _| false);
    assert!(!client.is_joined() && !server.is_joined());
    assert_eq!(client.connection.stage(), Stage::Candidate);
}

/// An address that no peer has is queried again soon, and then less and less often.
#[test]
fn b22_program_hears_soon_of_an_address_that_a_peer_has_since() {
    let world = World::new();
    let mut asks = world.a.domain.peer_finder("sockets-000000000000a5c5").unwrap();
    common::until("an answer", || asks.is_near(address(OF_B)).filter(|near| !near));
    let before = Instant::now();
    world.a.host.send_message(Said::Addresses { link: LINK, addresses: vec![address(OF_B)] });
    common::until("it is heard of", || asks.is_near(address(OF_B)).filter(|near| *near));
    assert!(before.elapsed().as_millis() < 1900, "{:?}", before.elapsed());
}

#[test]
fn s6_ends_with_other_numbers_or_none_never_join_over_a_link() {
    for numbers in [[Some([1, 2]), Some([3, 1])], [None, Some(NUMBERS)], [Some(NUMBERS), None], [None, None]] {
        let world = World::new();
        tell_addresses(&world, &[OF_A], &[OF_B]);
        let (mut client, mut server) = pair(&world, numbers, [OF_A, OF_B]);
        talk(&mut client, &mut server, &mut 0, 300, |_, _| false);
        assert!(!client.is_joined() && !server.is_joined(), "{numbers:?}");
    }
}

/// Two machines in which programs talk over loopback have the same four addresses, and by chance the same numbers.
#[test]
fn s18_twin_connections_over_loopback_in_two_machines_are_not_each_others() {
    let world = World::new();
    tell_addresses(&world, &["127.0.0.1"], &["127.0.0.1"]);
    let (mut client, mut server) = pair(&world, mirrored(NUMBERS), ["127.0.0.1", "127.0.0.1"]);
    talk(&mut client, &mut server, &mut 0, 300, |_, _| false);
    assert!(!client.is_joined() && !server.is_joined());
}

/// A peer process claims every address and the key, which it may have guessed, and answers every question.
#[test]
fn s6_s18_neighbour_that_claims_the_key_and_cannot_prove_costs_the_memory_alone() {
    let world = World::new();
    tell_addresses(&world, &[OF_A], &[OF_B]);
    let (mut client, mut server) = pair(&world, mirrored(NUMBERS), [OF_A, OF_B]);
    // The client does not ask the server's own broker, which knows no peer domain.
    world.b.host.send_message(Said::Addresses { link: LINK, addresses: Vec::new() });
    let mut liar = world.b.domain.peer_finder("sockets-0123456789abcdef").unwrap();
    let key = key_of_sequences(NUMBERS).unwrap();
    liar.claim_key(key);
    let (mut at, mut links, mut asked) = (0, Vec::new(), 0);
    let deadline = Instant::now() + SOON;
    while client.connection.stage() == Stage::Candidate {
        talk(&mut client, &mut server, &mut at, 1, |_, _| false);
        links.extend(liar.accept_peer());
        for link in &mut links {
            let Ok(Some(said)) = link.recv(1 << 20) else { continue };
            match Message::decode(&said.message).unwrap() {
                Message::Propose(proposal) => {
                    asked += 1;
                    answer_wrongly(&mut **link, &proposal);
                }
                said => assert!(matches!(said, Message::Refuse { .. }), "{said:?}"),
            }
        }
        assert!(Instant::now() < deadline, "it was asked {asked} times");
    }
    let said = (client.connection.stage(), client.connection.reason());
    let other = (server.connection.stage(), server.connection.reason());
    assert_eq!(
        (asked, said),
        (1, (Stage::Plain, Some(Reason::Hash))),
        "there is one try; {other:?}, {} links",
        links.len()
    );
    talk(&mut client, &mut server, &mut at, 100, |_, _| false);
    assert!(!server.is_joined());
}

/// A peer process that always reports that it has no room gets no second session.
#[test]
fn s18_neighbour_that_always_says_it_is_full_is_asked_once() {
    let world = World::new();
    tell_addresses(&world, &[OF_A], &[OF_B]);
    let (mut client, mut server) = pair(&world, mirrored(NUMBERS), [OF_A, OF_B]);
    world.b.host.send_message(Said::Addresses { link: LINK, addresses: Vec::new() });
    let mut liar = world.b.domain.peer_finder("sockets-0123456789abcdef").unwrap();
    liar.claim_key(key_of_sequences(NUMBERS).unwrap());
    let (mut at, mut links, mut asked) = (0, Vec::new(), 0);
    let deadline = Instant::now() + SOON;
    while client.connection.stage() == Stage::Candidate {
        talk(&mut client, &mut server, &mut at, 1, |_, _| false);
        links.extend(liar.accept_peer());
        for link in &mut links {
            let Ok(Some(said)) = link.recv(1 << 20) else { continue };
            if let Message::Propose(proposal) = Message::decode(&said.message).unwrap() {
                asked += 1;
                let full = Message::Refuse { to: proposal.id, reason: Reason::Resources as u16 };
                link.send(&full.encode(), None).unwrap();
            }
        }
        assert!(Instant::now() < deadline, "it was asked {asked} times");
    }
    assert_eq!((asked, links.len(), client.connection.reason()), (1, 1, Some(Reason::Resources)));
}

/// Answers with all that a hostile peer can know, a segment and a tag of its own.
fn answer_wrongly(link: &mut dyn tombolo_domain::Endpoint, proposal: &tombolo_layout::sockets::Claim) {
    use tombolo_layout::{Features, SegmentHeader, sockets::Proof};
    let claim = tombolo_layout::sockets::Claim {
        id: 0x4321,
        addresses: [proposal.addresses[1], proposal.addresses[0]],
        known: [proposal.known[1], proposal.known[0]],
        counts: Counts {
            written: proposal.counts.received,
            acked: proposal.counts.received,
            received: proposal.counts.written,
        },
        ..*proposal
    };
    let header = SegmentHeader::new(16 << 10, 0, 0, Features::NONE, claim.id);
    let (segment, offer) = link.allocate(header.segment_len as usize).unwrap();
    let (control, _data) = segment.split(header.geometry().data_offset);
    control.write_header(&header.encode());
    let proof = Proof { proposer: u32::from(proposal.known[0]), answerer: u32::from(proposal.known[1]), tag: [7; 32] };
    link.send(&Message::Answer { to: proposal.id, claim, proof }.encode(), Some(&offer)).unwrap();
}

/// A program in `a` that looks for keys in `b`.
struct Seeker(Box<dyn PeerFinder>);

impl Seeker {
    fn new(world: &World) -> Self {
        Self(finder(&world.a.domain, "sockets-00000000000000aa"))
    }

    /// Returns the current answer.
    fn find(&mut self, key: u32) -> Sought {
        let deadline = Instant::now() + SOON;
        self.0.forget_key(key);
        loop {
            match self.0.seek_key(key, address(OF_B)) {
                Sought::Later => assert!(Instant::now() < deadline, "no answer about {key}"),
                sought => return sought,
            }
        }
    }

    /// Waits for the answer `wanted`; the processes that are sought do `turn` meanwhile.
    fn until(&mut self, key: u32, wanted: &Sought, mut turn: impl FnMut()) {
        let deadline = Instant::now() + SOON;
        loop {
            turn();
            let sought = self.find(key);
            if sought == *wanted {
                return;
            }
            assert!(Instant::now() < deadline, "{sought:?}, and not {wanted:?}");
        }
    }
}

fn finder(domain: &VmDomain, service: &str) -> Box<dyn PeerFinder> {
    domain.peer_finder(service).unwrap()
}

/// Waits until the broker has read all earlier messages of this finder: answers come in order.
fn settle_claims(finder: &mut dyn PeerFinder, fresh: u8) {
    let deadline = Instant::now() + SOON;
    while finder.is_near([fresh; 16]).is_none() {
        assert!(Instant::now() < deadline, "no answer");
    }
}

#[test]
fn b23_key_is_told_while_its_process_waits_and_of_no_one_else_than_who_claims_it_alone() {
    let world = World::new();
    tell_addresses(&world, &[OF_A], &[OF_B]);
    let mut seeker = Seeker::new(&world);
    let mut one = finder(&world.b.domain, "sockets-00000000000000b1");
    let mut two = finder(&world.b.domain, "sockets-00000000000000b2");
    let at_one = Sought::At("b/sockets-00000000000000b1".into());
    seeker.until(5, &Sought::Nobody, || ());
    one.claim_key(5);
    seeker.until(5, &at_one, || drop(one.accept_peer()));
    two.claim_key(5);
    seeker.until(5, &Sought::Nobody, || drop(two.accept_peer()));
    // After a third claim the key belongs to none of them alone.
    let mut three = finder(&world.b.domain, "sockets-00000000000000b3");
    three.claim_key(5);
    settle_claims(&mut *three, 1);
    assert_eq!(seeker.find(5), Sought::Nobody);
    one.withdraw_key(5);
    one.claim_key(5);
    seeker.until(5, &at_one, || drop(one.accept_peer()));
    // A process cannot withdraw a claim that another one has now.
    two.withdraw_key(5);
    settle_claims(&mut *two, 2);
    assert_eq!(seeker.find(5), at_one);
    drop(one);
    seeker.until(5, &Sought::Nobody, || ());
}

#[test]
fn b23_key_of_a_service_that_no_rule_lets_the_neighbour_reach_is_not_told() {
    let world = World::under(&[(Way::In, "sockets-00000000000000b2"), (Way::Out, "*")]);
    tell_addresses(&world, &[OF_A], &[OF_B]);
    let mut seeker = Seeker::new(&world);
    for (service, key, wanted) in [
        ("sockets-00000000000000b1", 5, Sought::Nobody),
        ("sockets-00000000000000b2", 6, Sought::At("b/sockets-00000000000000b2".into())),
    ] {
        let mut waits = finder(&world.b.domain, service);
        waits.claim_key(key);
        settle_claims(&mut *waits, 1);
        assert_eq!(seeker.find(key), wanted, "{service}");
    }
}

#[test]
fn b22_host_tells_a_machines_neighbours_where_it_is_and_nobody_else_and_nothing_that_each_kernel_has() {
    let domains: String = ["a", "b", "c", "d"].map(|it| format!("[domain.{it}]\n")).concat();
    let daemon = Daemon::start(&format!(
        "[host]\nregion = \"1MiB\"\n{domains}[[allow]]\nfrom = \"*\"\nto = \"*\"\nservice = \"*\"\n"
    ));
    let [mut a, mut old, mut near, mut far] = ["a", "b", "c", "d"].map(|it| Vm::start(&daemon, it));
    for peer in ["b", "c"] {
        daemon.client().link("a", peer);
    }
    for (vm, version) in [(&mut a, 3), (&mut old, 2), (&mut near, 3), (&mut far, 3)] {
        vm.version = version;
        vm.boot(3, 1);
    }
    for vm in [&mut a, &mut old, &mut near] {
        vm.listen_until("the link", |said| matches!(said, Said::Link { .. }));
    }
    let is_address = |said: &Said| matches!(said, Said::Addresses { .. });
    let own = |all: &[&str]| Said::Addresses { link: 0, addresses: all.iter().map(|it| address(it)).collect() };
    for (says, wanted) in
        [(&[OF_A, "127.0.0.1", "169.254.0.9", OF_B][..], &[OF_A, OF_B][..]), (&[OF_B], &[OF_B]), (&[], &[])]
    {
        a.send_message(own(says));
        let heard = near.listen_until("the addresses", is_address);
        let Said::Addresses { addresses, .. } = &heard else { unreachable!() };
        assert_eq!(*addresses, wanted.iter().map(|it| address(it)).collect::<Vec<_>>(), "of {says:?}");
    }
    // They would have been told in the same turn.
    for vm in [&mut old, &mut far] {
        (0..50).for_each(|_| vm.listen_once());
        assert!(!vm.heard.iter().any(is_address), "{} was told", vm.name);
    }
    // A message about another domain's address is invalid.
    a.send_message(Said::Addresses { link: 1, addresses: vec![address(OF_B)] });
    a.boot(5, 1);
    a.listen_until("the link, anew", |said| matches!(said, Said::Link { .. }));
}
