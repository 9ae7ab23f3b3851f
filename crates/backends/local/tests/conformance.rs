// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite on this backend, with peers in separate processes that are stopped and killed.

mod support;

use rustix::process::Signal;
use support::{Child, Folder, patience};
use tombolo_domain::{Endpoint, Rendezvous};
use tombolo_testing::{
    conformance::{self, Fixture, Mortal},
    waits::check_that_giving_up_ends_waits,
};

tombolo_testing::conformance!(Folder::new());

#[test]
fn child_process() {
    support::play();
}

#[test]
fn d6_end_that_caught_its_peer_ends_its_own_waits() {
    let folder = Folder::new();
    let [mut link, mut peer] = folder.pair();
    peer.send(b"hello", None).unwrap();
    conformance::receive(&mut *link, patience()).unwrap();
    check_that_giving_up_ends_waits(link, peer);
}

impl Fixture for Folder {
    fn listening(&self) -> &dyn Rendezvous {
        &self.domain
    }

    fn connecting(&self) -> &dyn Rendezvous {
        &self.domain
    }

    fn service(&self) -> String {
        self.service()
    }

    fn stale_service(&self) -> Option<String> {
        Some(self.stale())
    }

    fn mortal(&self) -> Option<Box<dyn Mortal>> {
        let (child, link) = self.mortal(&[]);
        Some(Box::new(Process { child, link }))
    }
}

struct Process {
    child: Child,
    link: Box<dyn Endpoint>,
}

impl Mortal for Process {
    fn link(&mut self) -> &mut dyn Endpoint {
        &mut *self.link
    }

    fn pause(&mut self) {
        self.child.signal(Signal::STOP);
    }

    fn resume(&mut self) {
        self.child.signal(Signal::CONT);
    }

    fn kill(&mut self) {
        self.child.kill();
    }
}
