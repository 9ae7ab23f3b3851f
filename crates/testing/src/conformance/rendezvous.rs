// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of how two endpoints meet (D-12).

use std::time::Duration;

use super::{
    Fixture,
    support::{accept, ending, message, patience, readable, skip, unblocked},
};
use tombolo_domain::{Deadline, Endpoint, Error};

/// Connects and sends its name.
fn call(fixture: &impl Fixture, service: &str, name: &[u8]) -> Box<dyn Endpoint> {
    let mut link = fixture.connecting().connect(service, patience()).expect("somebody listens");
    link.send(name, None).expect("a fresh path has room");
    link
}

/// Where no process listens, connecting fails at once, whatever its deadline (D-12).
pub fn d12_service_without_listener_is_not_found(fixture: &impl Fixture) {
    let found = fixture.connecting().connect(&fixture.service(), Deadline::after(Duration::from_secs(3600)));
    assert!(matches!(found, Err(Error::NotFound(_))), "D-12: {found:?}");
}

/// Both sides refuse an invalid name (D-12).
pub fn d12_empty_service_is_refused(fixture: &impl Fixture) {
    let listened = fixture.listening().listen("");
    assert!(matches!(listened, Err(Error::BadService { .. })), "D-12: {listened:?}");
    let connected = fixture.connecting().connect("", patience());
    assert!(matches!(connected, Err(Error::BadService { .. })), "D-12: {connected:?}");
}

/// A service has one listener; a second one is refused and does not disturb the first (D-12).
pub fn d12_service_in_use_is_refused_to_a_second_listener(fixture: &impl Fixture) {
    let service = fixture.service();
    let mut first = fixture.listening().listen(&service).expect("a fresh service is free");
    let second = fixture.listening().listen(&service);
    assert!(matches!(second, Err(Error::InUse(_))), "D-12: {second:?}");
    drop(second);
    let _caller = call(fixture, &service, b"caller");
    assert_eq!(message(&mut *accept(&mut *first)), b"caller", "D-12: the first listener was disturbed");
}

/// A dropped listener leaves nothing: its service is not found, and the name is free, even if a child between fork and
/// exec has a copy of its descriptor (D-12).
pub fn d12_dropped_listener_leaves_its_name_free(fixture: &impl Fixture) {
    let service = fixture.service();
    for _ in 0..3 {
        let mut listener = fixture.listening().listen(&service).expect("D-12: the name is not free again");
        let caller = call(fixture, &service, b"caller");
        let mut accepted = accept(&mut *listener);
        let copy = listener.fd().try_clone_to_owned().expect("room for a descriptor");
        drop(listener);
        assert_eq!(message(&mut *accepted), b"caller", "D-12: a link went with its listener");
        let found = fixture.connecting().connect(&service, patience());
        assert!(matches!(found, Err(Error::NotFound(_))), "D-12: {found:?}");
        drop((caller, copy));
    }
}

/// A caller that was not accepted learns that it never will be, even if a child between fork and exec has a copy of the
/// listener's descriptor (D-12).
pub fn d12_dropped_listener_lets_go_of_those_who_wait(fixture: &impl Fixture) {
    let service = fixture.service();
    for copied in [false, true] {
        let listener = fixture.listening().listen(&service).expect("a fresh service is free");
        let mut callers = [b"one", b"two"].map(|name| call(fixture, &service, name));
        let copy = copied.then(|| listener.fd().try_clone_to_owned().expect("room for a descriptor"));
        drop(listener);
        for caller in &mut callers {
            assert!(
                matches!(ending(&mut **caller), Error::PeerGone),
                "D-12: nobody will answer; a copy is held: {copied}"
            );
        }
        drop(copy);
    }
}

/// A listener takes over the name that a dead listener left behind (D-12).
pub fn d12_stale_name_is_taken_over(fixture: &impl Fixture) {
    let Some(service) = fixture.stale_service() else { return skip("d12_stale_name_is_taken_over", "stale_service") };
    let found = fixture.connecting().connect(&service, patience());
    assert!(matches!(found, Err(Error::NotFound(_))), "D-12: {found:?}");
    let mut listener = fixture.listening().listen(&service).expect("D-12: a dead listener holds on to its name");
    let _caller = call(fixture, &service, b"caller");
    assert_eq!(message(&mut *accept(&mut *listener)), b"caller");
}

/// While no caller waits, `accept` returns `None` at once, and its descriptor is not readable (D-12).
pub fn d12_accept_of_nobody_is_none_at_once(fixture: &impl Fixture) {
    let service = fixture.service();
    let mut listener = fixture.listening().listen(&service).expect("a fresh service is free");
    assert!(!readable(listener.fd()), "D-12: readable, and nobody connected");
    let (accepted, mut listener) = unblocked("D-12: accept", move || (listener.accept(), listener));
    assert!(matches!(accepted, Ok(None)), "D-12: {accepted:?}");
    let _caller = call(fixture, &service, b"caller");
    assert!(
        tombolo_domain::wait_readable(listener.fd(), patience()).expect("polling works"),
        "D-12: connected, and not readable"
    );
    accept(&mut *listener);
}

/// Clients that connect and send nothing do not delay other clients (D-12).
pub fn d12_silent_clients_hold_up_nobody(fixture: &impl Fixture) {
    let service = fixture.service();
    let mut listener = fixture.listening().listen(&service).expect("a fresh service is free");
    let connect = || fixture.connecting().connect(&service, patience()).expect("somebody listens");
    let silent: Vec<_> = (0..3).map(|_| connect()).collect();
    let _caller = call(fixture, &service, b"caller");

    let heard = unblocked("D-12: accept, for a client that is silent", move || {
        let mut links: Vec<Box<dyn Endpoint>> = Vec::new();
        let deadline = patience();
        while !deadline.expired() {
            links.extend(listener.accept().expect("there is room"));
            if links.iter_mut().any(|link| matches!(link.recv(0), Ok(Some(it)) if it.message == b"caller")) {
                return true;
            }
        }
        false
    });
    assert!(heard, "D-12: the client that spoke was not heard");
    drop(silent);
}

/// Each caller gets a link of its own, in order of arrival (D-12).
pub fn d12_every_caller_gets_a_link_of_its_own(fixture: &impl Fixture) {
    let service = fixture.service();
    let mut listener = fixture.listening().listen(&service).expect("a fresh service is free");
    let mut callers: Vec<_> =
        [b"one", b"two", b"thr"].iter().map(|name| call(fixture, &service, name.as_slice())).collect();
    for (caller, name) in callers.iter_mut().zip([b"one", b"two", b"thr"]) {
        let mut link = accept(&mut *listener);
        assert_eq!(message(&mut *link), name, "D-12: another's link");
        link.send(name, None).expect("the path has room");
        assert_eq!(message(&mut **caller), name, "D-12: another's link");
    }
}
