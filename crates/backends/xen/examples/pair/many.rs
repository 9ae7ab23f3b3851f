// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Many channels at once, and how long each step of opening one takes.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use tombolo_domain::{Deadline, Endpoint, Offer, Rendezvous, Slot, Woken};
use tombolo_mem::{OwnSegment, PeerSegment};
use tombolo_testing::conformance;

use crate::{
    actors::forever,
    link::{Side, reach},
};

/// An open channel: what a handshake leaves behind.
struct Open {
    link: Box<dyn Endpoint>,
    _own: (OwnSegment, Offer),
    _peer: PeerSegment,
}

fn patience() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Answers each caller as a channel does, and echoes notifications and messages of all of them.
pub fn far(side: &Side, service: &str) {
    let mut listener = side.listen(service).expect("a fresh service is free");
    println!("ready");
    let mut open: Vec<Open> = Vec::new();
    loop {
        let link = conformance::wait_for(&mut *listener, Deadline::NEVER, |it| it.fd(), |it| it.accept());
        let mut link = link.expect("there is room");
        let greeting = conformance::receive(&mut *link, patience()).expect("it says hello");
        if greeting.message == b"ping" {
            break;
        }
        let peer = greeting.segment.expect("with a segment");
        let (own, offer) = link.allocate(peer.len()).expect("there is room");
        link.send(b"welcome", Some(&offer)).expect("there is room");
        open.push(Open { link, _own: (own, offer), _peer: peer });
    }
    // Every channel is there at once: each is asked, and answers.
    for channel in &mut open {
        let asked = conformance::receive(&mut *channel.link, patience()).expect("it asks");
        channel.link.send(&asked.message, None).expect("there is room");
        channel.link.doorbell().expect("a message came").notify(Slot::Data);
    }
    forever();
}

/// Where the time went, in all.
#[derive(Default)]
struct Steps([Duration; 4]);

/// Opens `count` channels with segments of `ring` bytes.
pub fn run(address: &str, other: &str, count: u32, ring: usize) -> bool {
    let (here, there) = (Side::new(other), reach(address));
    let service = format!("many{}", std::process::id());
    let actor = there.cast("many", &service);
    let mut steps = Steps::default();
    let mut open: VecDeque<Open> = VecDeque::new();
    let start = Instant::now();
    let mut last = start;
    let mut step = |which: usize| {
        let now = Instant::now();
        steps.0[which] += now - std::mem::replace(&mut last, now);
    };
    for _ in 0..count {
        let mut link = here.connect(&service, patience()).expect("somebody listens");
        step(0);
        let (own, offer) = link.allocate(ring).expect("there is room");
        step(1);
        link.send(b"hello", Some(&offer)).expect("there is room");
        tombolo_domain::wait_readable(link.fd(), patience()).expect("polling works");
        step(2);
        let welcome = conformance::receive(&mut *link, patience()).expect("it answers");
        let peer = welcome.segment.expect("with a segment");
        step(3);
        open.push_back(Open { link, _own: (own, offer), _peer: peer });
    }
    let took = start.elapsed();
    let each = |which: usize| steps.0[which].as_secs_f64() * 1000.0 / f64::from(count);
    println!(
        "open: {count} channels of {ring} bytes each way in {took:?}: {:.1} a second; each: connect {:.2} ms, allocate {:.2} ms, \
         answered after {:.2} ms, mapped after {:.2} ms",
        f64::from(count) / took.as_secs_f64(),
        each(0),
        each(1),
        each(2),
        each(3)
    );
    let mut ping = here.connect(&service, patience()).expect("somebody listens");
    ping.send(b"ping", None).expect("there is room");
    for (number, channel) in (0u32..).zip(&mut open) {
        channel.link.send(&number.to_le_bytes(), None).expect("there is room");
    }
    for (number, channel) in (0u32..).zip(&mut open) {
        let echo = conformance::receive(&mut *channel.link, patience()).expect("it answers");
        assert_eq!(echo.message, number.to_le_bytes(), "another channel's message");
        let doorbell = channel.link.doorbell().expect("a message came");
        assert_eq!(doorbell.wait(Slot::Data, patience()).expect("waiting works"), Woken::Notified);
    }
    println!("open: all {count} channels answered at once");
    let start = Instant::now();
    drop(open);
    println!("open: closed in {:?}", start.elapsed());
    actor.kill();
    true
}
