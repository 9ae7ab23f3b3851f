// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite on this backend, between two domains that know each other's names, over the Xen of tests.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use tombolo_domain::{Deadline, Link, Listener, Rendezvous, Result, conformance::Fixture, wait_readable};
use tombolo_domain_xen::{FakeXen, State, View, XenNames};

tombolo_domain::conformance!(Pair::new());

/// Domains 5 and 7, `left` and `right`.
struct Pair {
    listening: Side,
    connecting: Side,
    made: AtomicU32,
    over: Arc<AtomicBool>,
}

/// A domain that puts the listener's name in front of each service: the suite has one text for both.
#[derive(Debug)]
struct Side(XenNames);

impl Rendezvous for Side {
    fn scheme(&self) -> &'static str {
        self.0.scheme()
    }

    fn listen(&self, name: &str) -> Result<Box<dyn Listener>> {
        self.0.listen(name)
    }

    fn connect(&self, name: &str, deadline: Deadline) -> Result<Box<dyn Link>> {
        self.0.connect(&format!("left/{name}"), deadline)
    }
}

impl Pair {
    fn new() -> Self {
        let xen = FakeXen::new();
        let domains = [(5, "left"), (7, "right")];
        domains.iter().for_each(|(id, name)| xen.name(*id, name));
        let mut host = xen.host().expect("dom0");
        let any = || vec!["*".parse().expect("a pattern")];
        let view = |(id, name): (u16, &str)| {
            (id, View { name: name.parse().expect("a name"), state: State::Running, ours: any(), theirs: any() })
        };
        let told = |at: usize| {
            let (id, name) = domains[at];
            (id, (name.parse().expect("a name"), BTreeMap::from([view(domains[1 - at])])))
        };
        host.tell(&[told(0), told(1)].into()).expect("dom0 may");
        let over = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&over);
        // The broker listens, as one does: XenStore's thread waits for who does not.
        thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                let _ = wait_readable(host.fd(), Deadline::after(Duration::from_millis(50)));
                host.changed().expect("XenStore answers");
            }
        });
        let side = |id| Side(xen.domain(id).names());
        Self { listening: side(5), connecting: side(7), made: 0.into(), over }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
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
