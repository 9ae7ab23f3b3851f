// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What ADR 0041 weighs: a waiter that its own event channel wakes, and one to whom a thread passes the event on.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::event::{EventfdFlags, eventfd};
use tombolo_domain::{Deadline, Doorbell, Endpoint, Rendezvous, Slot, Woken, wait_readable};
use tombolo_testing::conformance;

use crate::link::{Side, reach};

fn patience() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Sleeps until the peer notifies.
trait Waiter {
    fn sleep(&self) -> bool;
}

struct Direct(Arc<dyn Doorbell>);

impl Waiter for Direct {
    fn sleep(&self) -> bool {
        let woken = self.0.wait(Slot::Data, patience()).expect("waiting works");
        self.0.drain(Slot::Data);
        woken == Woken::Notified
    }
}

/// Sleeps on an eventfd that a thread writes when the event channel is notified. All channels of two domains would need
/// this if they had one event channel.
struct Passed(std::os::fd::OwnedFd);

impl Passed {
    fn new(doorbell: &Arc<dyn Doorbell>) -> Self {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("there are descriptors");
        let (doorbell, told) = (Arc::clone(doorbell), event.try_clone().expect("there are descriptors"));
        thread::spawn(move || {
            while doorbell.wait(Slot::Data, Deadline::NEVER).is_ok_and(|woken| woken == Woken::Notified) {
                doorbell.drain(Slot::Data);
                rustix::io::write(&told, &1u64.to_ne_bytes()).expect("one fits");
            }
        });
        Self(event)
    }
}

impl Waiter for Passed {
    fn sleep(&self) -> bool {
        let woken = wait_readable(std::os::fd::AsFd::as_fd(&self.0), patience()).expect("polling works");
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
        woken
    }
}

fn waiter(doorbell: &Arc<dyn Doorbell>, passed: bool) -> Box<dyn Waiter> {
    if passed { Box::new(Passed::new(doorbell)) } else { Box::new(Direct(Arc::clone(doorbell))) }
}

/// Answers each notification with one, until the peer goes.
pub fn far(mut link: Box<dyn Endpoint>) {
    link.send(b"here", None).expect("there is room");
    println!("ready");
    let told = conformance::receive(&mut *link, patience()).expect("it says how");
    let doorbell = link.doorbell().expect("a message came");
    doorbell.drain(Slot::Data);
    let waiter = waiter(&doorbell, told.message == b"passed");
    link.send(b"go", None).expect("there is room");
    while !link.liveness().is_gone() && waiter.sleep() {
        doorbell.notify(Slot::Data);
    }
}

/// Medians of `count` round trips, both ways of waking one after the other, five times.
pub fn run(address: &str, other: &str, count: usize) -> bool {
    let (here, there) = (Side::new(other), reach(address));
    for round in 0..5 {
        for passed in [false, true] {
            let service = format!("doorbell{}-{round}-{passed}", std::process::id());
            let mut listener = here.listen(&service).expect("a fresh service is free");
            let actor = there.cast("doorbell", &service);
            let link = conformance::wait_for(&mut *listener, patience(), |it| it.fd(), |it| it.accept());
            let mut link = link.expect("one connected");
            conformance::receive(&mut *link, patience()).expect("it is there");
            let doorbell = link.doorbell().expect("a message came");
            link.send(if passed { b"passed" } else { b"direct" }, None).expect("there is room");
            conformance::receive(&mut *link, patience()).expect("it is ready");
            doorbell.drain(Slot::Data);
            let waiter = waiter(&doorbell, passed);
            let mut times: Vec<_> = (0..count)
                .map(|_| {
                    let start = Instant::now();
                    doorbell.notify(Slot::Data);
                    assert!(waiter.sleep(), "the peer answers");
                    start.elapsed()
                })
                .collect();
            times.sort();
            let way = if passed { "through a thread" } else { "directly" };
            println!("doorbell: {way}: p50 {:?} p90 {:?} of {count}", times[count / 2], times[count * 9 / 10]);
            actor.kill();
        }
    }
    true
}
