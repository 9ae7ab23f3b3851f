// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets the two endpoints of a TCP connection between two domains find each other. Each process shows its
//! addresses and the keys for which it waits in a page, and reads the pages of others.
//!
//! The process runs a program that is unaware of this, and none of its calls may wait for XenStore. So a thread makes
//! all requests to XenStore ([`worker`]), and the functions here only read memory.

mod worker;

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use tombolo_control::Name;
use tombolo_domain::{
    Connecting, Deadline, Endpoint, Error, Listener, PeerFinder, Rendezvous, Result, Sought, aside::ReservedFd,
};

use crate::{
    XenDomain,
    hints::{OwnHints, PeerHints},
    hypervisor::DomId,
    link::XenEndpoint,
    os::{eventfd, lock, raise},
    place::Pair,
};

/// Time to learn of peer processes, after which there are taken to be none.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time for which a process that could not be reached is not tried again.
const REST: Duration = Duration::from_secs(1);
/// Time for which a process that ends waits until others no longer find it.
const FAREWELL: Duration = Duration::from_millis(250);
/// Largest number of waiting dials, and of arrived connections that are not accepted yet.
const WAITING: usize = 64;
/// Largest number of processes that are remembered as not reached recently.
const FAILED: usize = 256;

/// A process of another domain that may be reached.
#[derive(Debug)]
struct PeerProcess {
    domain: DomId,
    /// Numbers of the pair of domains when the process was found: later a domain number may stand for another domain.
    pair: Pair,
    /// `NAME/SERVICE`.
    at: String,
    hints: PeerHints,
}

/// State that the thread and the program's calls share.
#[derive(Debug)]
struct Shared {
    /// Raised when the thread has something to do.
    kick: ReservedFd,
    hints: Arc<OwnHints>,
    state: Mutex<State>,
    /// Notified when the thread has ended.
    ended: Condvar,
    begun: Instant,
}

#[derive(Debug, Default)]
struct State {
    /// Whether nobody needs the thread any more; `done` is whether it has ended.
    over: bool,
    done: bool,
    /// Whether all peer processes were looked for once. None are known while dom0 publishes none.
    looked: bool,
    peer_processes: Vec<PeerProcess>,
    dials: VecDeque<Arc<Dial>>,
    failed: HashMap<String, Instant>,
    arrived: VecDeque<XenEndpoint>,
}

impl Shared {
    fn new() -> Result<Self> {
        let (hints, state, ended) = Default::default();
        Ok(Self { kick: eventfd()?, hints, state, ended, begun: Instant::now() })
    }
}

/// An attempt to connect to another process.
#[derive(Debug)]
struct Dial {
    at: String,
    outcome: Mutex<Option<Result<XenEndpoint>>>,
}

/// Programs of other domains, for connections that they have already (S-18).
pub struct XenNeighbours {
    make: fn() -> XenDomain,
    made: Mutex<Option<XenDomain>>,
    /// Addresses of the process; none: those that the kernel reports.
    addresses: Option<Vec<[u8; 16]>>,
    shared: Mutex<Option<(u32, Arc<Shared>)>>,
}

impl XenNeighbours {
    /// Finds programs through this Xen domain, if this process may use its drivers.
    #[must_use]
    pub fn find() -> Option<Self> {
        let may =
            |device| rustix::fs::access(device, rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK).is_ok();
        let devices = ["gntalloc", "gntdev", "evtchn", "xenbus"].map(|name| Path::new("/dev/xen").join(name));
        devices.iter().all(may).then(|| Self::on(None, None))
    }

    /// Finds programs through a domain of a test, for a process with these addresses.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn of(domain: &XenDomain, addresses: Vec<[u8; 16]>) -> Self {
        Self::on(Some(domain.clone()), Some(addresses))
    }

    fn on(made: Option<XenDomain>, addresses: Option<Vec<[u8; 16]>>) -> Self {
        Self { make: XenDomain::new, made: Mutex::new(made), addresses, shared: Mutex::default() }
    }

    /// Returns this process's state, and makes it and its thread if needed. A child made by fork uses nothing of its
    /// parent's, and locks nothing of it.
    fn begin(&self, service: Name) -> Result<Arc<Shared>> {
        let mut shared = lock(&self.shared);
        if let Some((_, shared)) = shared.as_ref().filter(|(process, _)| *process == std::process::id())
            && !lock(&shared.state).over
        {
            return Ok(Arc::clone(shared));
        }
        let domain = lock(&self.made).clone().unwrap_or_else(self.make);
        let fresh = Arc::new(Shared::new()?);
        worker::begin(Arc::clone(&fresh), domain, service, self.addresses.clone())?;
        std::mem::forget(shared.replace((std::process::id(), Arc::clone(&fresh))));
        Ok(fresh)
    }
}

impl fmt::Debug for XenNeighbours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("XenNeighbours")
    }
}

impl Rendezvous for XenNeighbours {
    fn scheme(&self) -> &'static str {
        "vm"
    }

    fn listen(&self, service: &str) -> Result<Box<dyn Listener>> {
        let domain = lock(&self.made).clone().unwrap_or_else(self.make);
        domain.names().listen(service)
    }

    fn connect(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        let domain = lock(&self.made).clone().unwrap_or_else(self.make);
        domain.names().connect(service, deadline)
    }

    fn begin_connect(&self, service: &str) -> Result<Box<dyn Connecting>> {
        let known = lock(&self.shared);
        let own = known.as_ref().filter(|(process, _)| *process == std::process::id());
        let (_, shared) = own.ok_or_else(|| Error::NotFound(format!("vm:{service}")))?;
        let mut state = lock(&shared.state);
        let rests = |since: &Instant| since.elapsed() < REST;
        if state.failed.get(service).is_some_and(rests) || state.dials.len() >= WAITING {
            return Err(Error::TimedOut);
        }
        let dial = Arc::new(Dial { at: service.into(), outcome: Mutex::default() });
        state.dials.push_back(Arc::clone(&dial));
        raise(&shared.kick);
        Ok(Box::new(OnTheWay(dial)))
    }

    fn peer_finder(&self, service: &str) -> Option<Box<dyn PeerFinder>> {
        let shared = self.begin(service.parse().ok()?).ok()?;
        Some(Box::new(XenFinder { shared, process: std::process::id() }))
    }
}

#[derive(Debug)]
struct OnTheWay(Arc<Dial>);

impl Connecting for OnTheWay {
    fn finish_connect(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        let outcome = lock(&self.0.outcome).take().transpose()?;
        Ok(outcome.map(|link| Box::new(link) as Box<dyn Endpoint>))
    }
}

/// Finder of one process.
#[derive(Debug)]
struct XenFinder {
    shared: Arc<Shared>,
    process: u32,
}

impl PeerFinder for XenFinder {
    fn is_near(&mut self, address: [u8; 16]) -> Option<bool> {
        let state = lock(&self.shared.state);
        if self.shared.hints.is_own(address) {
            return Some(false);
        }
        let near = state.peer_processes.iter().any(|it| it.hints.is_open() && it.hints.has_address(address));
        (near || state.looked || self.shared.begun.elapsed() >= PATIENCE).then_some(near)
    }

    fn claim_key(&mut self, key: u32) {
        self.shared.hints.add_key(key);
    }

    fn withdraw_key(&mut self, key: u32) {
        self.shared.hints.remove_key(key);
    }

    fn seek_key(&mut self, key: u32, address: [u8; 16]) -> Sought {
        let state = lock(&self.shared.state);
        let waits = |it: &&PeerProcess| it.hints.is_open() && it.hints.has_address(address) && it.hints.has_key(key);
        let rests = |it: &&PeerProcess| state.failed.get(&it.at).is_some_and(|since| since.elapsed() < REST);
        let found = state.peer_processes.iter().filter(|it| !rests(it)).find(waits);
        found.map_or(Sought::Nobody, |it| Sought::At(it.at.clone()))
    }

    /// A process that was not reached is not tried again for a while, whatever its page says.
    fn forget_key(&mut self, _key: u32) {}

    fn accept_peer(&mut self) -> Option<Box<dyn Endpoint>> {
        lock(&self.shared.state).arrived.pop_front().map(|link| Box::new(link) as Box<dyn Endpoint>)
    }
}

impl Drop for XenFinder {
    fn drop(&mut self) {
        // The thread is in the parent, and may have anything locked.
        if self.process != std::process::id() {
            return;
        }
        let mut state = lock(&self.shared.state);
        state.over = true;
        raise(&self.shared.kick);
        let until = Instant::now() + FAREWELL;
        while !state.done {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            match self.shared.ended.wait_timeout(state, left) {
                Ok((still, _)) => state = still,
                Err(_) => return,
            }
        }
    }
}

impl AsFd for Shared {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }
}
