// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A domain with a hostile peer, over any Xen: each call returns in time and with a typed error, and an honest process
//! of the same peer domain is served during and after the attack.

use std::time::{Duration, Instant};

use tombolo_domain::{Deadline, Endpoint, Error, Listener, Rendezvous, Slot};

/// Largest time of a call that waits for no peer, on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(2);
/// Largest message that the victim takes from any peer.
const LARGEST: u64 = 1 << 20;

/// The operations that the other domain offers.
pub trait Other {
    /// Runs a hostile process of that domain that does `act` to `service`, until the value is dropped.
    fn hostile(&self, act: &str, service: &str, until: Deadline) -> Box<dyn std::any::Any>;

    /// Returns that domain as an honest process sees it.
    fn honest(&self) -> &dyn Rendezvous;
}

fn at_once<T>(what: &str, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = call();
    assert!(start.elapsed() < AT_ONCE, "{what} took {:?}", start.elapsed());
    done
}

/// Checks that an error describes a fault of the peer, and not a failure here.
fn named<T>(what: &str, result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(Error::PeerGone | Error::Malformed { .. } | Error::Revoked | Error::Limit { .. } | Error::NotFound(_)) => {
            None
        }
        Err(error) => panic!("{what}: {error:?}"),
    }
}

/// Uses a connection as a trusting program would. Returns whether the connection is still of use.
fn use_up(link: &mut dyn Endpoint, spoken: &mut bool) -> bool {
    let received = named("recv", at_once("recv", || link.recv(LARGEST)));
    if !std::mem::replace(spoken, true) {
        for _ in 0..4 {
            if let Some((own, offer)) = named("allocate", at_once("allocate", || link.allocate(8192))) {
                named("send", at_once("send", || link.send(b"yours", Some(&offer))));
                at_once("retire", || link.retire(Some(own), offer));
            }
        }
    }
    at_once("life", || link.liveness());
    if let Some(doorbell) = link.doorbell() {
        for slot in Slot::ALL {
            at_once("ring", || doorbell.notify(slot));
            named("wait", at_once("wait", || doorbell.wait(slot, Deadline::after(Duration::from_millis(1)))));
            at_once("drain", || doorbell.drain(slot));
        }
    }
    received.is_some()
}

/// Checks that an honest caller is served among all the others.
fn serves(listener: &mut dyn Listener, other: &dyn Other, service: &str) {
    let until = Deadline::after(Duration::from_secs(20));
    let mut caller = other.honest().connect(service, until).expect("somebody listens");
    caller.send(b"honest", None).expect("there is room");
    let mut strangers: Vec<Box<dyn Endpoint>> = Vec::new();
    while !until.expired() {
        strangers.extend(named("accept", at_once("accept", || listener.accept())).flatten());
        let heard =
            strangers.iter_mut().position(|link| matches!(link.recv(0), Ok(Some(it)) if it.message == b"honest"));
        if let Some(heard) = heard {
            strangers[heard].send(b"heard", None).expect("there is room");
            let answer = tombolo_testing::conformance::receive(&mut *caller, until).expect("answered");
            assert_eq!(answer.message, b"heard");
            return;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    panic!("the honest caller was not heard");
}

/// Listens, while a process does `act` to it for `time`. The service is given as the hostile, the victim and the honest
/// process name it.
pub fn bears_a_caller(here: &dyn Rendezvous, other: &dyn Other, act: &str, services: [&str; 3], time: Duration) {
    let [theirs, mine, honest] = services;
    let mut listener = here.listen(mine).expect("a fresh service is free");
    let until = Deadline::after(time);
    let hostile = other.hostile(act, theirs, until);
    let mut links: Vec<(Box<dyn Endpoint>, bool)> = Vec::new();
    while !until.expired() {
        let accepted = named("accept", at_once("accept", || listener.accept())).flatten();
        links.extend(accepted.map(|link| (link, false)));
        links.iter_mut().for_each(|(link, spoken)| while use_up(&mut **link, spoken) && !until.expired() {});
        std::thread::park_timeout(Duration::from_millis(1));
    }
    // While the hostile process still keeps what it holds.
    serves(&mut *listener, other, honest);
    drop(hostile);
    serves(&mut *listener, other, honest);
    at_once("drop", || drop(links));
}

/// Connects, while a listener does `act` to it for `time`.
pub fn bears_a_listener(here: &dyn Rendezvous, other: &dyn Other, act: &str, services: [&str; 4], time: Duration) {
    let [theirs, mine, honest_theirs, honest_mine] = services;
    let until = Deadline::after(time);
    let hostile = other.hostile(act, theirs, until);
    let mut links: Vec<(Box<dyn Endpoint>, bool)> = Vec::new();
    while !until.expired() {
        if links.len() < 8 {
            let called = named("connect", at_once("connect", || here.connect(mine, until)));
            links.extend(called.map(|link| (link, false)));
        }
        links.iter_mut().for_each(|(link, spoken)| while use_up(&mut **link, spoken) && !until.expired() {});
        std::thread::park_timeout(Duration::from_millis(1));
    }
    let mut listener = other.honest().listen(honest_theirs).expect("a fresh service is free");
    let mut called = here.connect(honest_mine, until).expect("somebody listens");
    called.send(b"honest", None).expect("there is room");
    let patience = Deadline::after(Duration::from_secs(20));
    let accepted = tombolo_testing::conformance::wait_for(&mut *listener, patience, |it| it.fd(), |it| it.accept());
    let heard = tombolo_testing::conformance::receive(&mut *accepted.expect("one connected"), patience).expect("sent");
    assert_eq!(heard.message, b"honest");
    drop(hostile);
    at_once("drop", || drop(links));
}
