// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State of the hypervisor, behind its one lock. Nothing blocks while the lock is held.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use super::{
    MEMORY_MAX,
    end::{End, Event, Signal, Signals},
    grants::Grants,
    ids::{EndId, Process},
};
use tombolo_domain::{Error, Liveness, Result};

#[derive(Debug, Default)]
pub(super) struct World {
    state: Mutex<State>,
    /// Signalled when a backlog gets room or is removed.
    pub(super) backlog_changed: Condvar,
}

impl World {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // A test that panicked elsewhere is no reason to fail here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(super) struct Domain {
    pub(super) processes: BTreeSet<u64>,
    pub(super) paused: bool,
    pub(super) memory_max: u64,
}

/// Peers that wait for a listener.
#[derive(Debug)]
pub(super) struct Backlog {
    pub(super) process: Process,
    pub(super) waiting: VecDeque<EndId>,
    pub(super) signal: Signal,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) domains: BTreeMap<Arc<str>, Domain>,
    pub(super) ends: BTreeMap<EndId, End>,
    pub(super) listeners: BTreeMap<String, Backlog>,
    pub(super) grants: Grants,
    numbers: u64,
}

impl State {
    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(super) fn new_process(&mut self, domain: Arc<str>) -> Process {
        let number = self.number();
        let fresh = || Domain { processes: BTreeSet::new(), paused: false, memory_max: MEMORY_MAX };
        self.domains.entry(Arc::clone(&domain)).or_insert_with(fresh).processes.insert(number);
        Process { domain, number }
    }

    pub(super) fn is_alive(&self, process: &Process) -> bool {
        self.domains.get(&process.domain).is_some_and(|domain| domain.processes.contains(&process.number))
    }

    pub(super) fn is_paused(&self, domain: &str) -> bool {
        self.domains.get(domain).is_some_and(|domain| domain.paused)
    }

    /// Links two processes; the first endpoint belongs to the first one.
    pub(super) fn link(&mut self, first: &Process, second: &Process) -> Result<[(EndId, Signals); 2]> {
        let signals = [Signals::new()?, Signals::new()?];
        let ids = [EndId(self.number()), EndId(self.number())];
        for (at, (own, other)) in [(first, second), (second, first)].into_iter().enumerate() {
            let end = End::new(own.clone(), ids[1 - at], Arc::clone(&other.domain), signals[at].clone());
            self.ends.insert(ids[at], end);
        }
        let [a, b] = signals;
        Ok([(ids[0], a), (ids[1], b)])
    }

    /// Returns an endpoint that still exists, or the error for its users: to them, too, the peer is gone.
    pub(super) fn end(&mut self, id: EndId) -> Result<&mut End> {
        self.ends.get_mut(&id).ok_or(Error::PeerGone)
    }

    /// Delivers `event` to `id`, or holds it while one of the two domains is paused.
    pub(super) fn post(&mut self, id: EndId, event: Event) {
        let Some(end) = self.ends.get(&id) else { return };
        let held = self.is_paused(&end.process.domain) || self.is_paused(&end.peer_domain);
        let end = self.ends.get_mut(&id).expect("it was there");
        if held { end.hold(event) } else { end.deliver(event) }
    }

    /// Raises the one doorbell of `domain` for `from`: everyone who listens to it wakes. `None` stands for all its
    /// doorbells.
    pub(super) fn notify_ends(&mut self, domain: &str, from: Option<&str>) {
        let heard = |end: &End| *end.process.domain == *domain && from.is_none_or(|from| *end.peer_domain == *from);
        let hearers: Vec<_> = self.ends.iter().filter(|(_, end)| heard(end)).map(|(id, _)| *id).collect();
        for id in hearers {
            self.post(id, Event::Notify);
        }
    }

    /// Resumes `domain`, and delivers all that was held because of it.
    pub(super) fn resume(&mut self, domain: &str) {
        if let Some(domain) = self.domains.get_mut(domain) {
            domain.paused = false;
        }
        let Self { domains, ends, .. } = self;
        let paused = |name: &Arc<str>| domains.get(name).is_some_and(|domain| domain.paused);
        ends.values_mut()
            .filter(|end| !paused(&end.process.domain) && !paused(&end.peer_domain))
            .for_each(End::release);
    }

    /// Removes an endpoint; its peer gets `life` as the reason.
    pub(super) fn close(&mut self, id: EndId, life: Liveness) {
        if let Some(end) = self.ends.remove(&id) {
            end.signals.raise_all();
            self.post(end.peer, Event::Over(life));
        }
    }

    /// Removes all that the processes picked by `which` have.
    pub(super) fn kill(&mut self, which: impl Fn(&Process) -> bool, life: Liveness) {
        let ends: Vec<_> = self.ends.iter().filter(|(_, end)| which(&end.process)).map(|(id, _)| *id).collect();
        ends.into_iter().for_each(|id| self.close(id, life));
        let services: Vec<_> = self.listeners.iter().filter(|(_, backlog)| which(&backlog.process)).collect();
        let services: Vec<_> = services.into_iter().map(|(service, _)| service.clone()).collect();
        services.iter().for_each(|service| self.unlisten(service));
        self.grants.end(|_, grant| which(&grant.owner));
    }

    pub(super) fn unlisten(&mut self, service: &str) {
        if let Some(backlog) = self.listeners.remove(service) {
            backlog.signal.set(true);
            backlog.waiting.into_iter().for_each(|id| self.close(id, Liveness::ProcessGone));
        }
    }
}
