// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite on this backend, between two domains over the Xen of tests.

use std::sync::atomic::{AtomicU32, Ordering};

use tombolo_domain::{Deadline, Link, Listener, Rendezvous, Result, conformance::Fixture};
use tombolo_domain_xen::{FakeXen, XenDomain};

tombolo_domain::conformance!(Pair::new());

/// Domains 5 and 7.
struct Pair {
    listening: Side,
    connecting: Side,
    made: AtomicU32,
}

/// A domain that puts the other's number in front of each name: the suite has one text for both.
#[derive(Debug)]
struct Side {
    domain: XenDomain,
    other: u16,
}

impl Side {
    fn service(&self, name: &str) -> String {
        format!("{}/{name}", self.other)
    }
}

impl Rendezvous for Side {
    fn scheme(&self) -> &'static str {
        self.domain.scheme()
    }

    fn listen(&self, name: &str) -> Result<Box<dyn Listener>> {
        self.domain.listen(&self.service(name))
    }

    fn connect(&self, name: &str, deadline: Deadline) -> Result<Box<dyn Link>> {
        self.domain.connect(&self.service(name), deadline)
    }
}

impl Pair {
    fn new() -> Self {
        let xen = FakeXen::new();
        let listening = Side { domain: xen.domain(5), other: 7 };
        let connecting = Side { domain: xen.domain(7), other: 5 };
        Self { listening, connecting, made: 0.into() }
    }
}

impl Fixture for Pair {
    fn listening(&self) -> &dyn Rendezvous {
        &self.listening
    }

    fn connecting(&self) -> &dyn Rendezvous {
        &self.connecting
    }

    fn service(&self) -> String {
        format!("service{}", self.made.fetch_add(1, Ordering::Relaxed))
    }
}
