// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite on this backend, between two domains that know each other's names, over the simulated Xen.

#[path = "support/pair.rs"]
mod pair;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use tombolo_domain::{Deadline, wait_readable};
use tombolo_domain_xen::{FakeXen, State, View, XenNames};

use self::pair::{Pair, Side};

tombolo_testing::conformance!(pair());

/// A broker that watches XenStore until this is dropped, as a real one does: XenStore's thread waits for clients that
/// do not.
struct Broker(Arc<AtomicBool>);

impl Drop for Broker {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Domains 5 and 7, `left` and `right`.
fn pair() -> Pair<XenNames> {
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
    host.publish_views(&[told(0), told(1)].into()).expect("dom0 may");
    let over = Arc::new(AtomicBool::new(false));
    let end = Arc::clone(&over);
    thread::spawn(move || {
        while !end.load(Ordering::Relaxed) {
            let _ = wait_readable(host.fd(), Deadline::after(Duration::from_millis(50)));
            host.changed().expect("XenStore answers");
        }
    });
    let side = |id| Side { domain: xen.domain(id).names(), here: "", there: "left/" };
    Pair::of(side(5), side(7), Broker(over))
}
