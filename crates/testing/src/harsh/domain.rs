// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets a process in a domain listen and connect.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, PoisonError},
    time::Duration,
};

use super::{
    BACKLOG_MAX,
    end::Signal,
    ids::Process,
    link::HarshLink,
    world::{Backlog, State, World},
};
use tombolo_domain::{Deadline, Endpoint, Error, Listener, Rendezvous, Result};

/// A process in a domain of a [`Hypervisor`](super::Hypervisor). Services are named `DOMAIN/SERVICE`; a process listens
/// only in its own domain.
#[derive(Clone, Debug)]
pub struct HarshDomain {
    pub(super) world: Arc<World>,
    pub(super) process: Process,
}

impl HarshDomain {
    /// Returns the domain's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.process.domain
    }

    fn ready<'a>(&'a self, service: &str) -> Result<std::sync::MutexGuard<'a, State>> {
        let state = self.world.state();
        if state.is_alive(&self.process) { Ok(state) } else { Err(Error::Denied(service.into())) }
    }
}

/// Returns the domain of a service.
fn home(service: &str) -> Result<&str> {
    let bad = |why| Err(Error::BadService { service: service.into(), why });
    match service.split_once('/') {
        None => bad("it needs a domain and a name, as in DOMAIN/SERVICE"),
        Some((domain, name)) if domain.is_empty() || name.is_empty() => bad("domain and name must not be empty"),
        Some((_, name)) if name.contains('/') => bad("it has more than two parts"),
        Some((domain, _)) => Ok(domain),
    }
}

impl Rendezvous for HarshDomain {
    fn scheme(&self) -> &'static str {
        "harsh"
    }

    fn listen(&self, service: &str) -> Result<Box<dyn Listener>> {
        if home(service)? != self.name() {
            return Err(Error::Denied(service.into()));
        }
        let signal = Signal::new()?;
        let mut state = self.ready(service)?;
        if state.listeners.contains_key(service) {
            return Err(Error::InUse(service.into()));
        }
        let backlog = Backlog { process: self.process.clone(), waiting: VecDeque::new(), signal: signal.clone() };
        state.listeners.insert(service.into(), backlog);
        drop(state);
        Ok(Box::new(HarshListener { home: self.clone(), service: service.into(), signal }))
    }

    fn connect(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        home(service)?;
        let mut state = self.ready(service)?;
        loop {
            let Some(backlog) = state.listeners.get(service) else { return Err(Error::NotFound(service.into())) };
            if backlog.waiting.len() < BACKLOG_MAX {
                break;
            }
            if deadline.expired() {
                return Err(Error::TimedOut);
            }
            let left = deadline.remaining().unwrap_or(Duration::MAX);
            let woken = self.world.backlog_changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        let listening = state.listeners[service].process.clone();
        let [(theirs, _), (ours, signals)] = state.link(&listening, &self.process)?;
        let backlog = state.listeners.get_mut(service).expect("looked up under this lock");
        backlog.waiting.push_back(theirs);
        backlog.signal.set(true);
        drop(state);
        Ok(Box::new(HarshLink::new(&self.world, ours, &self.process, &listening.domain, signals)))
    }
}

/// Listener for the peers of one service.
#[derive(Debug)]
struct HarshListener {
    home: HarshDomain,
    service: String,
    signal: Signal,
}

impl HarshListener {
    /// Returns this listener's backlog, unless its process was killed (and the name perhaps taken over).
    fn backlog<'a>(&self, state: &'a mut State) -> Option<&'a mut Backlog> {
        state.listeners.get_mut(&self.service).filter(|backlog| backlog.process == self.home.process)
    }
}

impl Listener for HarshListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        let mut state = self.home.world.state();
        let Some(backlog) = self.backlog(&mut state) else { return Ok(None) };
        let next = backlog.waiting.pop_front();
        if backlog.waiting.is_empty() {
            backlog.signal.set(false);
        }
        self.home.world.backlog_changed.notify_all();
        let Some(id) = next else { return Ok(None) };
        let end = state.end(id).expect("an end in a backlog goes only with its backlog");
        let (peer, signals) = (Arc::clone(&end.peer_domain), end.signals.clone());
        Ok(Some(Box::new(HarshLink::new(&self.home.world, id, &self.home.process, &peer, signals))))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }
}

impl Drop for HarshListener {
    fn drop(&mut self) {
        let mut state = self.home.world.state();
        if self.backlog(&mut state).is_some() {
            state.unlisten(&self.service);
        }
        self.home.world.backlog_changed.notify_all();
    }
}
