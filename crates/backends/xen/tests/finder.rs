// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How processes of two domains find each other for existing connections, over the simulated Xen, and the
//! doorbell that these connections share.

use std::{collections::BTreeMap, os::fd::AsFd, time::Duration};

use rustix::event::{Timespec, epoll};
use tombolo_domain::{Deadline, Endpoint, Error, Liveness, PeerFinder, Rendezvous, Slot, Sought};
use tombolo_domain_xen::hostile::{FINDERS, LISTENERS};
use tombolo_domain_xen::{FakeXen, State, View, Views, XenHost, XenNeighbours};
use tombolo_testing::conformance::eventually;

const LEFT: u16 = 5;
const RIGHT: u16 = 7;
const THIRD: u16 = 9;
const SERVICE: [&str; 3] = ["sockets-0000000000000005", "sockets-0000000000000007", "sockets-0000000000000009"];

fn address(domain: u16) -> [u8; 16] {
    let mut address = [0xfd; 16];
    address[14..].copy_from_slice(&domain.to_be_bytes());
    address
}

/// Lets other threads work, where there is no condition to wait for because something must not happen.
#[expect(clippy::disallowed_methods, reason = "what must not come about is looked for after a while")]
fn rest(millis: u64) {
    std::thread::sleep(Duration::from_millis(millis));
}

/// Left and right may reach each other's `service`; the third domain is not named to anyone.
fn views(service: &str) -> Views {
    let rules = || vec![service.parse().unwrap()];
    let view = |name: &str| View { name: name.parse().unwrap(), state: State::Running, ours: rules(), theirs: rules() };
    let told = |name: &str, other, view| (name.parse().unwrap(), BTreeMap::from([(other, view)]));
    [(LEFT, told("left", RIGHT, view("right"))), (RIGHT, told("right", LEFT, view("left")))].into()
}

struct World {
    xen: FakeXen,
    host: XenHost,
    left: XenNeighbours,
    right: XenNeighbours,
}

fn world(service: &str) -> World {
    let xen = FakeXen::new();
    [(LEFT, "left"), (RIGHT, "right"), (THIRD, "third")].iter().for_each(|(id, name)| xen.name(*id, name));
    let mut host = xen.host().expect("dom0");
    host.publish_views(&views(service)).expect("dom0 may");
    let neighbours = |domain| XenNeighbours::of(&xen.domain(domain), vec![address(domain)]);
    World { left: neighbours(LEFT), right: neighbours(RIGHT), xen, host }
}

impl World {
    /// Returns the finder of one process in each domain.
    fn finders(&self) -> [Box<dyn PeerFinder>; 2] {
        let left = self.left.peer_finder(SERVICE[0]).expect("a finder");
        let right = self.right.peer_finder(SERVICE[1]).expect("a finder");
        [left, right]
    }
}

/// Connects to the process that waits for `key` at `address`.
fn reach(from: &XenNeighbours, finder: &mut dyn PeerFinder, key: u32, address: [u8; 16]) -> Box<dyn Endpoint> {
    let mut at = Sought::Nobody;
    eventually("who waits is found", || {
        at = finder.seek_key(key, address);
        matches!(at, Sought::At(_))
    });
    let Sought::At(service) = at else { unreachable!() };
    let mut connecting = from.begin_connect(&service).expect("it is known");
    let mut link = None;
    eventually("it is reached", || {
        link = connecting.finish_connect().expect("it lives");
        link.is_some()
    });
    link.expect("reached")
}

fn hear_message(link: &mut dyn Endpoint) -> Vec<u8> {
    let mut heard = None;
    eventually("a message comes", || {
        heard = link.recv(0).expect("it lives");
        heard.is_some()
    });
    heard.expect("a message").message
}

/// Returns both endpoints of a session.
fn join(world: &World, [left, right]: &mut [Box<dyn PeerFinder>; 2]) -> [Box<dyn Endpoint>; 2] {
    right.claim_key(77);
    let mut called = reach(&world.left, &mut **left, 77, address(RIGHT));
    called.send(b"hello", None).expect("there is room");
    let mut accepted = None;
    eventually("who came is let in", || {
        accepted = right.accept_peer();
        accepted.is_some()
    });
    let mut accepted = accepted.expect("let in");
    assert_eq!(hear_message(&mut *accepted), b"hello");
    accepted.send(b"welcome", None).expect("there is room");
    assert_eq!(hear_message(&mut *called), b"welcome");
    [called, accepted]
}

#[test]
fn x23_process_is_found_by_its_address_and_what_it_waits_for() {
    let world = world("sockets-*");
    let [mut left, mut right] = world.finders();
    eventually("the neighbour's address is known", || left.is_near(address(RIGHT)) == Some(true));
    eventually("and the other way round", || right.is_near(address(LEFT)) == Some(true));
    assert_eq!([LEFT, THIRD].map(|it| left.is_near(address(it))), [Some(false); 2], "one's own, and nobody's");
    right.claim_key(1);
    assert_eq!(left.seek_key(1, address(RIGHT)), Sought::At(format!("right/{}", SERVICE[1])));
    assert_eq!(left.seek_key(1, address(THIRD)), Sought::Nobody, "another address");
    assert_eq!(left.seek_key(2, address(RIGHT)), Sought::Nobody, "another key");
    right.withdraw_key(1);
    assert_eq!(left.seek_key(1, address(RIGHT)), Sought::Nobody, "it waits no longer");
    let mut finders = [left, right];
    let links = join(&world, &mut finders);
    assert_eq!([&links[0], &links[1]].map(|link| link.peer().domain), ["7", "5"]);
    drop(links);
    let [mut left, right] = finders;
    drop(right);
    eventually("who ended is forgotten", || left.is_near(address(RIGHT)) == Some(false));
    drop(left);
    let nodes = [LEFT, RIGHT].map(|it| world.xen.nodes(it)).concat();
    assert!(!nodes.iter().any(|node| node.contains("sockets-")), "and left nothing behind: {nodes:?}");
    eventually("nor any grant", || world.xen.grants() <= 3); // Grants by which dom0 shows each domain its liveness.
}

#[test]
fn x23_no_rule_no_hints() {
    let world = world("file");
    let [mut left, _right] = world.finders();
    eventually("it was looked for", || left.is_near(address(RIGHT)).is_some());
    rest(300);
    assert_eq!(left.is_near(address(RIGHT)), Some(false));
    assert!(
        !world.xen.nodes(RIGHT).iter().any(|node| node.contains("sockets-")),
        "nobody may come, so there is nothing to find: {:?}",
        world.xen.nodes(RIGHT)
    );
}

#[test]
fn x23_liars_nodes_cost_only_what_they_lie_about() {
    let world = world("sockets-*");
    let folder = format!("/local/domain/{RIGHT}/data/tombolo/{LEFT}");
    let (mut left, mut right) = (world.left.peer_finder(SERVICE[0]).unwrap(), None);
    // More nodes than are looked at: they lead nowhere, to a page that is not this domain's, and to a value that is no
    // number.
    eventually("it was looked for", || left.is_near(address(RIGHT)).is_some());
    let right = right.get_or_insert_with(|| world.right.peer_finder(SERVICE[1]).unwrap());
    eventually("the neighbour's address is known", || left.is_near(address(RIGHT)) == Some(true));
    for (at, value) in ["1", "4294967295", "x", "", "-1"].iter().cycle().take(80).enumerate() {
        world.xen.write_node(RIGHT, &format!("{folder}/sockets-ff{at:014x}"), value);
    }
    right.claim_key(5);
    assert_eq!(left.seek_key(5, address(RIGHT)), Sought::At(format!("right/{}", SERVICE[1])), "it is known still");
    let mut reached = world.left.begin_connect("right/sockets-ff00000000000001").unwrap();
    eventually("who leads nowhere is not reached", || matches!(reached.finish_connect(), Err(Error::NotFound(_))));
    let again = world.left.begin_connect("right/sockets-ff00000000000001");
    assert!(matches!(again, Err(Error::TimedOut)), "and left alone for a while: {again:?}");
    let mut third = world.left.begin_connect("third/sockets-0000000000000009").unwrap();
    eventually("nor who is not told of", || matches!(third.finish_connect(), Err(Error::NotFound(_))));
}

/// Left, right and the third may reach each other's `sockets-*`.
fn views_of_three() -> Views {
    let rules = || vec!["sockets-*".parse().unwrap()];
    let view = |name: &str| View { name: name.parse().unwrap(), state: State::Running, ours: rules(), theirs: rules() };
    let all = [(LEFT, "left"), (RIGHT, "right"), (THIRD, "third")];
    let others = |own: u16| all.iter().filter(move |(id, _)| *id != own).map(|(id, name)| (*id, view(name)));
    all.iter().map(|(id, name)| (*id, (name.parse().unwrap(), others(*id).collect()))).collect()
}

#[test]
fn x23_hostile_hints_hide_no_honest_process() {
    for (act, _) in FINDERS.iter().chain(&LISTENERS) {
        let mut world = world("sockets-*");
        world.host.publish_views(&views_of_three()).expect("dom0 may");
        let mut left = world.left.peer_finder(SERVICE[0]).expect("a finder");
        let third = world.xen.domain(THIRD);
        let mischief = std::thread::spawn(move || {
            let mut hostile = third.hostile(LEFT).expect("it is a domain");
            hostile.act(act, "sockets-bad", Deadline::after(Duration::from_millis(500))).expect("Xen lets it");
            rest(100);
        });
        let mut right = world.right.peer_finder(SERVICE[1]).expect("a finder");
        right.claim_key(77);
        eventually(&format!("the honest process is reached while another {act}"), || {
            // dom0 is notified of what the hostile domain writes too.
            world.host.changed().expect("dom0 may");
            let Sought::At(service) = left.seek_key(77, address(RIGHT)) else { return false };
            let Ok(mut connecting) = world.left.begin_connect(&service) else { return false };
            let mut reached = None;
            eventually("it answers, or does not", || {
                world.host.changed().expect("dom0 may");
                reached = connecting.finish_connect().transpose();
                reached.is_some()
            });
            matches!(reached, Some(Ok(link)) if link.peer().domain == "7")
        });
        eventually("the hostile one ends", || {
            world.host.changed().expect("dom0 may");
            mischief.is_finished()
        });
        mischief.join().expect("it ends");
        assert_eq!(left.is_near(address(RIGHT)), Some(true), "{act}");
    }
}

#[test]
fn x23_node_of_a_process_that_died_is_cleared_away_by_the_next() {
    let world = world("sockets-*");
    let folder = format!("/local/domain/{RIGHT}/data/tombolo/{LEFT}");
    let [_left, right] = world.finders();
    eventually("it listens", || world.xen.node(RIGHT, &format!("{folder}/{}", SERVICE[1])).is_some());
    let dead = format!("{folder}/{}", SERVICE[2]);
    world.xen.write_node(RIGHT, &dead, "123");
    let next = XenNeighbours::of(&world.xen.domain(RIGHT), vec![address(RIGHT)]);
    let _next = next.peer_finder("sockets-00000000000000aa").unwrap();
    eventually("the node is gone", || world.xen.node(RIGHT, &dead).is_none());
    assert!(world.xen.node(RIGHT, &format!("{folder}/{}", SERVICE[1])).is_some(), "and of one who lives it is not");
    drop(right);
}

#[test]
fn x23_domain_that_is_destroyed_ends_its_sessions_and_is_forgotten_once_dom0_says_so() {
    let mut world = world("sockets-*");
    let mut finders = world.finders();
    let [mut called, _accepted] = join(&world, &mut finders);
    world.xen.destroy(RIGHT);
    // Its processes live on in this test, and show liveness.
    eventually("the session ends", || {
        let _ = called.recv(0);
        called.liveness() == Liveness::DomainGone
    });
    world.host.publish_views(&[(LEFT, ("left".parse().unwrap(), BTreeMap::new()))].into()).expect("dom0 may");
    eventually("nobody is near", || finders[0].is_near(address(RIGHT)) == Some(false));
    let mut again = world.left.begin_connect(&format!("right/{}", SERVICE[1])).expect("it asks");
    eventually("nor reached", || matches!(again.finish_connect(), Err(Error::NotFound(_))));
}

#[test]
fn x24_each_notification_wakes_all_connections_and_so_does_the_end() {
    let world = world("sockets-*");
    let mut finders = world.finders();
    let [mut called, accepted] = join(&world, &mut finders);
    let one = || called.shared_doorbells().unwrap().expect("it stands in for doorbells").0;
    let doorbells = [one(), one()];
    let (_, notifier) = accepted.shared_doorbells().unwrap().unwrap();
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    for (at, doorbell) in doorbells.iter().enumerate() {
        assert!(doorbell.is_shared());
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&set, doorbell.as_fd(), epoll::EventData::new_u64(at as u64), flags).unwrap();
    }
    let woken = |millis: i64| {
        let mut room = [const { std::mem::MaybeUninit::uninit() }; 4];
        let most = Timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 };
        let (events, _) = epoll::wait(&set, &mut room, Some(&most)).unwrap();
        events.iter().map(|event| event.data.u64()).collect::<std::collections::BTreeSet<_>>()
    };
    woken(0);
    for round in 0..3 {
        // A process that is woken reads the control path before it sleeps again (S-17).
        assert!(called.recv(0).unwrap().is_none());
        woken(0);
        assert!(woken(20).is_empty(), "nobody notified in round {round}");
        notifier.notify();
        assert_eq!(woken(5000), [0, 1].into(), "round {round}");
    }
    assert!(called.recv(0).unwrap().is_none());
    woken(0);
    doorbells[0].notify();
    assert_eq!(woken(5000), [0, 1].into(), "this end's own");
    drop(accepted);
    let fd = called.fd();
    eventually("the end is told", || tombolo_os::poll::polls_as(fd, rustix::event::PollFlags::IN));
    assert!(called.doorbell().is_some_and(|doorbell| {
        doorbell.notify(Slot::Data);
        true
    }));
}

#[test]
fn x25_session_leaves_once_dom0_tells_of_the_peer_no_longer() {
    let mut world = world("sockets-*");
    let mut finders = world.finders();
    let links = join(&world, &mut finders);
    let doorbells = [&links[0], &links[1]].map(|link| link.doorbell().expect("heard"));
    assert!(!doorbells.iter().any(|doorbell| doorbell.is_leaving()));
    world.host.publish_views(&views("sockets-0*")).expect("dom0 may");
    rest(100);
    assert!(!doorbells.iter().any(|doorbell| doorbell.is_leaving()), "another rule for the same two domains");
    let told = |name: &str| (name.parse().unwrap(), BTreeMap::new());
    world.host.publish_views(&[(LEFT, told("left")), (RIGHT, told("right"))].into()).expect("dom0 may");
    eventually("both ends leave", || doorbells.iter().all(|doorbell| doorbell.is_leaving()));
    eventually("and nobody is near", || {
        finders[0].is_near(address(RIGHT)) == Some(false) && finders[1].is_near(address(LEFT)) == Some(false)
    });
    let nodes = [LEFT, RIGHT].map(|it| world.xen.nodes(it)).concat();
    assert!(!nodes.iter().any(|node| node.contains("sockets-")), "nor listens: {nodes:?}");
}
