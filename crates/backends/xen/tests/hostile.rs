// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Peers that write garbage into XenStore, leave, or are destroyed, over the simulated Xen.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tombolo_domain::{Deadline, Endpoint, Error, Liveness, Rendezvous, Result, Slot, Woken, wait_readable};
use tombolo_domain_xen::FakeXen;
use tombolo_testing::{
    conformance::{self, accept, patience},
    waits::check_that_giving_up_ends_waits,
};

fn message(link: &mut dyn Endpoint) -> Result<Vec<u8>> {
    conformance::receive(link, patience()).map(|received| received.message)
}

/// Returns the endpoints of domain 5 and of domain 7.
fn pair(xen: &FakeXen) -> [Box<dyn Endpoint>; 2] {
    let (five, seven) = (xen.domain(5), xen.domain(7));
    let mut listener = five.listen("7/service").expect("free");
    let mut called = seven.connect("5/service", patience()).expect("somebody listens");
    called.send(b"hello", None).expect("there is room");
    let mut accepted = accept(&mut *listener);
    assert_eq!(message(&mut *accepted).expect("sent"), b"hello");
    accepted.send(b"welcome", None).expect("there is room");
    assert_eq!(message(&mut *called).expect("sent"), b"welcome");
    [accepted, called]
}

#[test]
fn x5_knocks_that_are_garbage_disturb_nobody() {
    let xen = FakeXen::new();
    let _first = pair(&xen);
    let mut listener = xen.domain(5).listen("7/door").expect("free");
    for name in ["door@", "door@x", "door@0", "door@4294967295", "door@99999999999", "other@3", "@", "door@1@2", "door"]
    {
        xen.write_node(7, &format!("/local/domain/7/data/tombolo/5/{name}"), "garbage");
    }
    // References of pages that exist, and that are no mailboxes of a caller.
    for reference in 1..40 {
        xen.write_node(7, &format!("/local/domain/7/data/tombolo/5/door@{reference}"), "");
    }
    let seven = xen.domain(7);
    let mut called = seven.connect("5/door", patience()).expect("somebody listens");
    called.send(b"I am real", None).expect("there is room");
    let heard = (0..40).find_map(|_| {
        let mut link = accept(&mut *listener);
        let heard = conformance::receive(&mut *link, Deadline::after(Duration::from_millis(100)));
        heard.ok().filter(|it| it.message == b"I am real").map(|_| link)
    });
    assert!(heard.is_some(), "the caller among the liars was not heard");
}

#[test]
fn x1_domain_has_no_link_with_itself() {
    let domain = FakeXen::new().domain(5);
    assert!(matches!(domain.listen("5/door"), Err(Error::BadService { .. })));
    assert!(matches!(domain.connect("5/door", patience()), Err(Error::BadService { .. })));
}

#[test]
fn x5_listener_whose_node_is_garbage_is_not_found() {
    let xen = FakeXen::new();
    let _links = pair(&xen);
    for value in ["", "x", "-1", "0", "99999999999", "4294967295", "1", "2", "\u{fffd}"] {
        xen.write_node(5, "/local/domain/5/data/tombolo/7/door", value);
        let found = xen.domain(7).connect("5/door", patience());
        assert!(matches!(found, Err(Error::NotFound(_))), "{value:?}: {found:?}");
    }
}

#[test]
fn x5_door_that_the_node_of_a_dead_listener_leads_to_hears_knocks() {
    for round in 0..200 {
        let xen = FakeXen::new();
        drop(pair(&xen));
        // References are reused: the next listener's listener page has the reference of the last one's.
        xen.write_node(5, "/local/domain/5/data/tombolo/7/door", &xen.next_reference().to_string());
        let seven = xen.domain(7);
        let caller = std::thread::spawn(move || {
            loop {
                match seven.connect("5/door", patience()) {
                    Err(Error::NotFound(_)) => {}
                    link => return link.expect("a listener page"),
                }
            }
        });
        let mut listener = xen.domain(5).listen("7/door").expect("free");
        let heard = conformance::wait_for(&mut *listener, patience(), |it| it.fd(), |it| it.accept());
        assert!(heard.is_ok(), "round {round}: nobody heard the request");
        caller.join().expect("it did not panic");
    }
}

#[test]
fn x1_x4_nothing_but_the_folders_is_left_when_all_are_gone() {
    let xen = FakeXen::new();
    for _ in 0..3 {
        let [mut accepted, called] = pair(&xen);
        let (own, offer) = accepted.allocate(8192).expect("there is memory");
        accepted.send(b"take", Some(&offer)).expect("there is room");
        accepted.retire(Some(own), offer);
        drop((accepted, called));
    }
    assert_eq!(xen.nodes(5), ["/local/domain/5/data/tombolo/7"]);
    assert_eq!(xen.nodes(7), ["/local/domain/7/data/tombolo/5"]);
    // A domain's thread may be the one that releases the last.
    let until = patience();
    while xen.grants() > 0 && !until.expired() {
        std::thread::park_timeout(Duration::from_millis(1));
    }
    assert_eq!(xen.grants(), 0, "pages are still granted");
}

#[test]
fn x1_knock_that_the_dead_left_is_removed_by_the_next_process() {
    let xen = FakeXen::new();
    let left = "/local/domain/7/data/tombolo/5/service@77";
    let [_accepted, called] = pair(&xen);
    xen.write_node(7, left, "4711-the-token-of-one-who-died");
    let alive = xen.domain(7);
    // A live process has sent a connect request, which is not answered yet.
    let _listener = xen.domain(5).listen("7/other").expect("free");
    let _knocking = alive.connect("5/other", patience()).expect("somebody listens");
    drop(called);
    let nodes = xen.nodes(7);
    assert!(!nodes.iter().any(|node| node == left), "{nodes:?}");
    let next = xen.domain(7);
    let _folder = next.listen("5/mine").expect("free");
    assert!(xen.nodes(7).iter().any(|node| node.contains("other@")), "the request of one who lives was removed");
}

#[test]
fn x7_segments_beyond_the_places_are_a_limit() {
    let [mut link, _peer] = pair(&FakeXen::new());
    let mut made: Vec<_> = (0..64).map(|_| link.allocate(4096).expect("there is a place")).collect();
    assert!(matches!(link.allocate(4096), Err(Error::Limit { .. })), "a 65th place");
    let (own, offer) = made.pop().expect("64");
    link.retire(Some(own), offer);
    link.allocate(4096).expect("a place was given back");
}

#[test]
fn x7_long_segment_arrives_through_several_pages_of_references() {
    let [mut from, mut to] = pair(&FakeXen::new());
    let (own, offer) = from.allocate(1500 * 4096).expect("there is memory");
    from.send(b"long", Some(&offer)).expect("there is room");
    let segment = conformance::receive(&mut *to, patience()).expect("sent").segment.expect("with memory");
    assert_eq!(segment.len(), own.len());
}

#[test]
fn x8_what_one_sleeper_takes_is_left_to_the_others() {
    let [mut a, b] = pair(&FakeXen::new());
    let (notifier, doorbell) = (a.doorbell().expect("heard"), b.doorbell().expect("heard"));
    Slot::ALL.iter().for_each(|slot| doorbell.drain(*slot));
    a.send(b"both", None).expect("there is room");
    notifier.notify(Slot::Data);
    for slot in Slot::ALL {
        assert_eq!(doorbell.wait(slot, patience()).expect("waiting works"), Woken::Notified);
        doorbell.drain(slot);
    }
    assert!(wait_readable(b.fd(), patience()).expect("polling works"), "the message's event went with the doorbell's");
}

#[test]
fn x9_destroyed_domain_is_gone_and_its_memory_stays() {
    let xen = FakeXen::new();
    let [mut left, mut gone] = pair(&xen);
    let (_own, offer) = gone.allocate(4096).expect("there is memory");
    gone.send(b"last", Some(&offer)).expect("there is room");
    xen.destroy(7);
    let doorbell = left.doorbell().expect("heard");
    let woken = loop {
        match doorbell.wait(Slot::Data, patience()).expect("waiting works") {
            Woken::Notified => doorbell.drain(Slot::Data),
            other => break other,
        }
    };
    assert_eq!(woken, Woken::PeerGone);
    assert_eq!(left.liveness(), Liveness::DomainGone);
    assert_eq!(message(&mut *left).expect("sent before"), b"last");
    assert!(matches!(message(&mut *left), Err(Error::PeerGone)));
}

#[test]
fn d13_retired_before_the_answer_was_heard_is_kept_while_mapped() {
    let xen = FakeXen::new();
    let (five, seven) = (xen.domain(5), xen.domain(7));
    let mut listener = five.listen("7/service").expect("free");
    let mut called = seven.connect("5/service", patience()).expect("somebody listens");
    let (own, offer) = called.allocate(4096).expect("there is memory");
    called.send(b"take", Some(&offer)).expect("there is room");
    let mut accepted = accept(&mut *listener);
    // The caller has not looked at its listener page since.
    called.retire(Some(own), offer);
    let segment = conformance::receive(&mut *accepted, patience()).expect("sent").segment.expect("it is kept");
    assert_eq!(called.quarantined(), 4096);
    drop(called);
    drop(accepted);
    assert!(xen.grants() > 1, "memory that is mapped was let go of");
    drop(segment);
}

#[test]
fn x10_segment_that_nobody_sized_takes_an_eighth_of_what_is_left() {
    let xen = FakeXen::new();
    let [mut link, _peer] = pair(&xen);
    // An endpoint has one page, and the listener had its listener page.
    xen.limit_grants(1025);
    assert_eq!(link.affordable(1 << 20), 128 * 4096);
    assert_eq!(link.affordable(8192), 8192, "more than was wanted");
    let _half = link.allocate(512 * 4096).expect("there is memory");
    assert!(link.affordable(1 << 20) < 64 * 4096, "an eighth of what was there, not of what is left");
    xen.limit_grants(4);
    assert_eq!(link.affordable(1 << 20), 0);
}

#[test]
fn x9_peers_that_come_and_go_do_not_use_up_what_xenstore_watches() {
    let xen = FakeXen::new();
    let five = xen.domain(5);
    let mut stays = five.listen("7/service").expect("free");
    for id in 10..300 {
        five.listen(&format!("{id}/service")).unwrap_or_else(|error| panic!("domain {id}: {error}"));
    }
    // The remaining ones are still watched.
    let seven = xen.domain(7);
    let mut called = seven.connect("5/service", patience()).expect("somebody listens");
    called.send(b"hello", None).expect("there is room");
    let mut link = accept(&mut *stays);
    assert_eq!(message(&mut *link).expect("sent"), b"hello");
    xen.destroy(7);
    let gone = conformance::wait_for(
        &mut *link,
        patience(),
        |it| it.fd(),
        |it| Ok((it.liveness() == Liveness::DomainGone).then_some(())),
    );
    gone.expect("its end is seen");
}

#[test]
fn x5_nodes_that_are_written_without_end_keep_nobody_from_all_else() {
    let xen = FakeXen::new();
    let (five, seven) = (xen.domain(5), xen.domain(7));
    let _own = five.listen("7/own").expect("free");
    let mut listener = seven.listen("5/back").expect("free");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for writer in 0..2 {
            let (xen, over) = (&xen, &over);
            scope.spawn(move || {
                let node = format!("/local/domain/7/data/tombolo/5/own@{}", 1000 + writer);
                while !over.load(Ordering::Relaxed) {
                    xen.write_node(7, &node, "without end");
                }
            });
        }
        // The thread that watches the nodes checks whether it was answered.
        let met = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..5 {
                let mut called = five.connect("7/back", patience()).expect("somebody listens");
                let mut accepted = accept(&mut *listener);
                called.send(b"hello", None).expect("there is room");
                assert_eq!(message(&mut *accepted).expect("sent"), b"hello");
                accepted.send(b"welcome", None).expect("there is room");
                assert_eq!(message(&mut *called).expect("sent"), b"welcome");
            }
        }));
        over.store(true, Ordering::Relaxed);
        met.expect("all else goes on");
    });
}

#[test]
fn d6_end_that_caught_its_peer_ends_its_own_waits() {
    let xen = FakeXen::new();
    let [link, peer] = pair(&xen);
    check_that_giving_up_ends_waits(link, peer);
}
