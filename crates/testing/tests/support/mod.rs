// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two domains of the harsh double, as a fixture.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    sync::atomic::{AtomicU32, Ordering},
    thread::{self, JoinHandle},
};

use tombolo_domain::{Deadline, Endpoint, Rendezvous};
use tombolo_testing::{
    conformance::{Fixture, Mortal, mortal_peer},
    harsh::{HarshDomain, Hypervisor},
};

pub struct Harsh {
    pub hypervisor: Hypervisor,
    pub a: HarshDomain,
    pub b: HarshDomain,
    services: AtomicU32,
}

impl Harsh {
    pub fn new() -> Self {
        let hypervisor = Hypervisor::new();
        let (a, b) = (hypervisor.domain("a"), hypervisor.domain("b"));
        Self { hypervisor, a, b, services: AtomicU32::new(0) }
    }

    /// Returns a peer that can be killed, on the other side of a connection that `wrap` may alter.
    pub fn mortal_behind(&self, wrap: impl FnOnce(Box<dyn Endpoint>) -> Box<dyn Endpoint>) -> Box<dyn Mortal> {
        let (victim, service) = (self.hypervisor.domain("b"), self.service());
        let mut listener = self.a.listen(&service).expect("a fresh service is free");
        let peer = victim.connect(&service, Deadline::NEVER).expect("somebody listens");
        let link = wrap(listener.accept().expect("there is room").expect("one connected"));
        let thread = Some(thread::spawn(move || mortal_peer(peer)));
        Box::new(Victim { link, victim, hypervisor: self.hypervisor.clone(), thread })
    }
}

impl Fixture for Harsh {
    fn listening(&self) -> &dyn Rendezvous {
        &self.a
    }

    fn connecting(&self) -> &dyn Rendezvous {
        &self.b
    }

    fn service(&self) -> String {
        format!("a/service{}", self.services.fetch_add(1, Ordering::Relaxed))
    }

    fn stale_service(&self) -> Option<String> {
        let (victim, service) = (self.hypervisor.domain("a"), self.service());
        let listener = victim.listen(&service).expect("a fresh service is free");
        self.hypervisor.kill_process(&victim);
        // A dead process cleans nothing up.
        std::mem::forget(listener);
        Some(service)
    }

    fn mortal(&self) -> Option<Box<dyn Mortal>> {
        Some(self.mortal_behind(|link| link))
    }
}

struct Victim {
    link: Box<dyn Endpoint>,
    victim: HarshDomain,
    hypervisor: Hypervisor,
    thread: Option<JoinHandle<()>>,
}

impl Mortal for Victim {
    fn link(&mut self) -> &mut dyn Endpoint {
        &mut *self.link
    }

    fn pause(&mut self) {
        self.hypervisor.pause(&self.victim);
    }

    fn resume(&mut self) {
        self.hypervisor.resume(&self.victim);
    }

    fn kill(&mut self) {
        self.hypervisor.kill_domain(&self.victim);
        let thread = self.thread.take().expect("one dies once");
        thread.join().expect("the thread that plays the dead ends quietly");
    }
}
