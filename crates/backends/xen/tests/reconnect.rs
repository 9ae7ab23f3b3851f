// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reconnect pages, over the simulated Xen: a caller that connects again does so without XenStore, and a caller without
//! a reconnect page still gets in.

use tombolo_domain::{Endpoint, Listener, Rendezvous};
use tombolo_domain_xen::{FakeXen, XenDomain};
use tombolo_layout::xen::RECONNECT_PAGES;
use tombolo_testing::conformance::{self, accept, patience};

/// Returns the number of connect requests in XenStore.
fn requests(xen: &FakeXen) -> usize {
    xen.nodes(7).iter().filter(|node| node.contains('@')).count()
}

/// Domain 7 connects, and both sides send a word.
fn call(seven: &XenDomain, listener: &mut dyn Listener) -> [Box<dyn Endpoint>; 2] {
    let called = seven.connect("5/door", patience()).expect("somebody listens");
    greet(called, listener)
}

fn greet(mut called: Box<dyn Endpoint>, listener: &mut dyn Listener) -> [Box<dyn Endpoint>; 2] {
    called.send(b"hello", None).expect("there is room");
    let mut accepted = accept(listener);
    assert_eq!(conformance::receive(&mut *accepted, patience()).expect("sent").message, b"hello");
    accepted.send(b"welcome", None).expect("there is room");
    assert_eq!(conformance::receive(&mut *called, patience()).expect("sent").message, b"welcome");
    [accepted, called]
}

#[test]
fn x11_only_the_first_knock_of_a_process_is_a_node() {
    let xen = FakeXen::new();
    let (five, seven) = (xen.domain(5), xen.domain(7));
    let mut listener = five.listen("7/door").expect("free");
    let first = seven.connect("5/door", patience()).expect("somebody listens");
    assert_eq!(requests(&xen), 1, "the first has no line yet");
    let mut open = vec![greet(first, &mut *listener)];
    for _ in 0..100 {
        let called = seven.connect("5/door", patience()).expect("somebody listens");
        assert_eq!(requests(&xen), 0, "connected through XenStore although there is a reconnect page");
        open.push(greet(called, &mut *listener));
    }
}

#[test]
fn x11_knocks_that_come_together_are_all_answered() {
    let xen = FakeXen::new();
    let (five, seven) = (xen.domain(5), xen.domain(7));
    let mut listener = five.listen("7/door").expect("free");
    let _first = call(&seven, &mut *listener);
    // Callers that gave up before they were read are skipped.
    for _ in 0..50 {
        drop(seven.connect("5/door", patience()).expect("somebody listens"));
    }
    let called: Vec<_> = (0..200).map(|_| seven.connect("5/door", patience()).expect("somebody listens")).collect();
    assert_eq!(requests(&xen), 0);
    let accepted: Vec<_> = (0..200).map(|_| accept(&mut *listener)).collect();
    drop((called, accepted));
}

#[test]
fn x11_processes_beyond_the_lines_knock_through_xenstore() {
    let xen = FakeXen::new();
    let five = xen.domain(5);
    let mut listener = five.listen("7/door").expect("free");
    let mut processes: Vec<_> = (0..=RECONNECT_PAGES)
        .map(|_| {
            let seven = xen.domain(7);
            (call(&seven, &mut *listener), seven)
        })
        .collect();
    let request = |seven: &XenDomain, listener: &mut dyn Listener| {
        let called = seven.connect("5/door", patience()).expect("somebody listens");
        let through_store = requests(&xen);
        greet(called, listener);
        through_store
    };
    let (last, rest) = processes.split_last().expect("25");
    assert!(rest.iter().all(|(_, seven)| request(seven, &mut *listener) == 0));
    assert_eq!(request(&last.1, &mut *listener), 1, "a page beyond those that a listener page listens to");
    // One of them goes, and its place is free for the next.
    drop(processes.remove(0));
    let until = patience();
    let next = xen.domain(7);
    while request(&next, &mut *listener) > 0 {
        assert!(!until.expired(), "the place of a line that went is never free again");
    }
}

#[test]
fn x11_next_listener_of_the_name_gets_a_line_of_its_own() {
    let xen = FakeXen::new();
    let (five, seven) = (xen.domain(5), xen.domain(7));
    for _ in 0..3 {
        let mut listener = five.listen("7/door").expect("free");
        let _first = call(&seven, &mut *listener);
        let second = seven.connect("5/door", patience()).expect("somebody listens");
        assert_eq!(requests(&xen), 0, "connected through XenStore although there is a reconnect page");
        greet(second, &mut *listener);
    }
}
