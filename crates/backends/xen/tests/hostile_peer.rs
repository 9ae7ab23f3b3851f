// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A hostile peer domain, over the simulated Xen: every act of `hostile`, and nothing of it is left afterwards.

#[path = "support/victim.rs"]
mod victim;

use std::{any::Any, thread, time::Duration};

use tombolo_domain::{Deadline, Rendezvous};
use tombolo_domain_xen::{
    FakeXen, XenDomain,
    hostile::{CALLERS, LISTENERS},
};

const TIME: Duration = Duration::from_millis(300);

/// Domain 7, whose victim is domain 5.
struct Seven {
    xen: FakeXen,
    honest: XenDomain,
}

/// A hostile process, which ends when this is dropped.
struct Running(Option<(std::sync::mpsc::Sender<()>, thread::JoinHandle<()>)>);

impl Drop for Running {
    fn drop(&mut self) {
        let (end, thread) = self.0.take().expect("once");
        drop(end);
        thread.join().expect("it does not panic");
    }
}

impl victim::Other for Seven {
    fn hostile(&self, act: &str, service: &str, until: Deadline) -> Box<dyn Any> {
        let mut it = self.xen.domain(7).hostile(5).expect("a connection");
        let (act, service) = (act.to_owned(), service.to_owned());
        let (end, ended) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            it.act(&act, &service, until).expect("the act succeeds");
            // It keeps what it holds until it is told to end.
            let _ = ended.recv();
        });
        Box::new(Running(Some((end, thread))))
    }

    fn honest(&self) -> &dyn Rendezvous {
        &self.honest
    }
}

fn seven() -> (FakeXen, XenDomain, Seven) {
    let xen = FakeXen::new();
    let five = xen.domain(5);
    let seven = Seven { xen: xen.clone(), honest: xen.domain(7) };
    (xen, five, seven)
}

#[test]
fn x5_x6_x7_hostile_caller_costs_its_own_channels_only() {
    for (act, _) in CALLERS {
        let (xen, five, seven) = seven();
        eprintln!("{act}");
        victim::bears_a_caller(&five, &seven, act, ["door", "7/door", "5/door"], TIME);
        drop((five, seven));
        assert!(left(&xen), "{act}: {} pages are still granted", xen.grants());
    }
}

#[test]
fn x5_x6_hostile_listener_costs_its_own_channels_only() {
    for (act, _) in LISTENERS {
        let (xen, five, seven) = seven();
        eprintln!("{act}");
        victim::bears_a_listener(&five, &seven, act, ["door", "7/door", "5/honest", "7/honest"], TIME);
        drop((five, seven));
        assert!(left(&xen), "{act}: {} pages are still granted", xen.grants());
    }
}

/// Returns whether all grants go, now or once a domain's thread has ended.
fn left(xen: &FakeXen) -> bool {
    let until = Deadline::after(Duration::from_secs(10));
    while xen.grants() > 0 && !until.expired() {
        thread::park_timeout(Duration::from_millis(1));
    }
    xen.grants() == 0
}
