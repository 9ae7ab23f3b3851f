// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Watches Xen domains that go without a message: before they came to their server, or where the original's layout
//! leaves nobody who could send one. A thread asks for them once a second, as long as there are any to ask for.
//!
//! Xen itself knows which domains exist. A domain whose pages this process maps, as a client maps its server's, lingers
//! until they are unmapped; but its nodes in XenStore are gone at once.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, Weak},
    thread,
    time::{Duration, Instant},
};
use tombolo_os::lock::lock;

use crate::{
    border::{Fault, Outcome},
    original,
    place::{Role, VchanAddress},
    threads::spawn,
    vchan::Inner,
};

/// Time between two queries for one domain.
const EVERY: Duration = Duration::from_secs(1);

/// One domain that is watched.
#[derive(Debug)]
pub(crate) struct Domain {
    number: u16,
    /// Whether it existed once: a domain that is still to be created is waited for.
    seen: bool,
    asked: Option<Instant>,
}

impl Domain {
    /// Returns the Xen domain that `place` leads to, if there is one.
    pub(crate) fn of(place: &VchanAddress) -> Option<Self> {
        place.domain_of_xen().map(Self::new)
    }

    fn new(number: u16) -> Self {
        Self { number, seen: false, asked: None }
    }

    /// Returns whether the domain existed and is gone; asks at most once a second, and returns `false` in between.
    pub(crate) fn is_gone(&mut self) -> bool {
        if self.asked.is_some_and(|asked| asked.elapsed() < EVERY) {
            return false;
        }
        self.asked = Some(Instant::now());
        match original::is_there(self.number) {
            Ok(true) => {
                self.seen = true;
                false
            }
            Ok(false) => self.seen,
            // Nothing is known.
            Err(_) => false,
        }
    }

    pub(crate) fn fault(&self) -> Fault {
        Fault::with(libc::ECONNRESET, format!("domain {} is gone", self.number))
    }
}

/// A vchan whose peer's domain is watched, and for a client the path of its server in XenStore.
type Vchan = (Weak<Inner>, Option<String>);

/// Watched domains by their numbers.
#[derive(Debug, Default)]
struct WatchedDomains {
    domains: HashMap<u16, (Domain, Vec<Vchan>)>,
    /// Process in which the thread runs, if it does.
    runs: Option<u32>,
}

static MINDED: LazyLock<Mutex<WatchedDomains>> = LazyLock::new(Mutex::default);

/// Watches the domain that `place` leads to, until it is gone or the vchan is closed.
pub(crate) fn mind(place: &VchanAddress, vchan: &Arc<Inner>) -> Outcome<()> {
    let Some(number) = place.domain_of_xen() else { return Ok(()) };
    let mut minded = lock(&MINDED);
    let (_, vchans) = minded.domains.entry(number).or_insert_with(|| (Domain::new(number), Vec::new()));
    let server = match (vchan.peer.role, place) {
        (Role::Client, VchanAddress::Original(_, path)) => Some(path.clone()),
        _ => None,
    };
    vchans.push((Arc::downgrade(vchan), server));
    if minded.runs != Some(std::process::id()) {
        spawn("vchan-domains", watch_domains)?;
        minded.runs = Some(std::process::id());
    }
    Ok(())
}

/// Returns whether that domain was found to exist.
#[cfg(all(test, feature = "testing"))]
pub(crate) fn was_seen(number: u16) -> bool {
    lock(&MINDED).domains.get(&number).is_some_and(|(domain, _)| domain.seen)
}

fn watch_domains() {
    loop {
        let mut minded = lock(&MINDED);
        let mut gone = Vec::new();
        minded.domains.retain(|number, (domain, vchans)| {
            let all = domain.is_gone();
            let served = |server: &Option<String>| {
                server.as_ref().is_none_or(|path| original::is_served(*number, path).unwrap_or(true))
            };
            vchans.retain(|(vchan, server)| {
                let Some(vchan) = vchan.upgrade() else { return false };
                let there = !all && served(server);
                if !there {
                    gone.push((vchan, domain.fault()));
                }
                there
            });
            !vchans.is_empty()
        });
        let idle = minded.domains.is_empty();
        if idle {
            minded.runs = None;
        }
        drop(minded);
        gone.into_iter().for_each(|(vchan, fault)| vchan.peers_domain_is_gone(fault));
        if idle {
            return;
        }
        thread::park_timeout(EVERY);
    }
}
