// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the thread of a process that has connections with other domains. The thread makes the requests to XenStore, so
//! that no call of the program does.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec};
use tombolo_control::Name;
use tombolo_domain::{Endpoint, Error, Listener, Result, aside::ReservedFd};
use tombolo_layout::xen as at;
use tombolo_os::addresses::{AddressWatch, own_addresses};

use super::{Dial, FAILED, PeerProcess, Shared, WAITING};
use crate::{
    XenDomain,
    core::{Core, folder},
    hints::PeerHints,
    hypervisor::DomId,
    link::XenEndpoint,
    map_listener_page,
    named::{NamedListener, call_named},
    names::Record,
    os::{eventfd, lock, spawn},
    place::ServiceAddress,
};

/// Time after which another attempt is made if dom0 publishes nothing or XenStore does not answer.
const REST: Duration = Duration::from_secs(5);
/// Time within which a process must answer a dial.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time between two looks at the peers' nodes in XenStore when they change: at first, and at most. It doubles while
/// they change all the time.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];
/// Interval at which the thread checks whether a peer process died, which nothing reports.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Largest number of processes of one domain, and of all.
const EACH_MAX: usize = 64;
const ALL_MAX: usize = 256;
/// Largest number of nodes of dead processes that a new process removes.
const SWEPT: usize = 64;
/// Prefix of the service of a process (S-7).
const SERVICE: &str = "sockets-";

/// Starts the thread. `domain` is this process's, and the process can be reached at `service`.
pub(super) fn begin(
    shared: Arc<Shared>,
    domain: XenDomain,
    service: Name,
    addresses: Option<Vec<[u8; 16]>>,
) -> Result<()> {
    spawn("tombolo-find", move || {
        loop {
            // After a failure it tries again, because dom0's broker may start, and XenStore may return.
            let _ = Worker::new(&shared, &domain, &service, addresses.as_deref()).and_then(|mut worker| worker.work());
            {
                let mut state = lock(&shared.state);
                state.peer_processes.clear();
                state.looked = true;
                if state.over {
                    break;
                }
            }
            sleep(&[shared.as_fd()], Some(REST));
        }
        shared.hints.withdraw_all();
        lock(&shared.state).done = true;
        shared.ended.notify_all();
    })
}

/// Sleeps until one of the descriptors is readable, for at most `most`.
fn sleep(fds: &[BorrowedFd<'_>], most: Option<Duration>) {
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let most = most.and_then(|most| Timespec::try_from(most).ok());
    let _interrupted = rustix::event::poll(&mut polled, most.as_ref());
}

struct Worker<'a> {
    shared: &'a Shared,
    core: Arc<Core>,
    listener: NamedListener,
    /// Eventfds that are raised when the domains that may be reached change, and when peers' nodes in XenStore change.
    names: Arc<ReservedFd>,
    folders: Arc<ReservedFd>,
    addresses: Option<AddressWatch>,
    dialled: Vec<(Arc<Dial>, XenEndpoint, Instant)>,
    /// Time from which the peers may be looked at again, the pause after that, and whether a look is wanted.
    next: Instant,
    pause: Duration,
    wanted: bool,
    /// Domains whose folders may have nodes of dead processes.
    unswept: Vec<DomId>,
}

impl<'a> Worker<'a> {
    fn new(
        shared: &'a Arc<Shared>,
        domain: &XenDomain,
        service: &Name,
        addresses: Option<&[[u8; 16]]>,
    ) -> Result<Self> {
        let core = domain.names().published_core()?;
        let (names, folders) = (core.names().ear()?, Arc::new(eventfd()?));
        core.listen_to_folders(&folders);
        let watch = if addresses.is_none() { AddressWatch::new().ok() } else { None };
        shared.hints.set_addresses(addresses.map_or_else(|| own_addresses(at::ADDRESSES), <[_]>::to_vec));
        let hints = Arc::clone(&shared.hints);
        let listener = NamedListener::new(Arc::clone(&core), service.clone(), Some(hints))?;
        let unswept = core.names().callers(service).into_keys().collect();
        let next = Instant::now();
        Ok(Self {
            shared,
            core,
            listener,
            names,
            folders,
            addresses: watch,
            dialled: Vec::new(),
            next,
            pause: PAUSES[0],
            wanted: true,
            unswept,
        })
    }

    /// Works until nobody needs the thread any more.
    fn work(&mut self) -> Result<()> {
        loop {
            if self.wanted && Instant::now() >= self.next {
                self.wanted = false;
                self.find_peer_processes()?;
                // Nodes of dead processes are not urgent.
                self.unswept.drain(..).for_each(|peer| drop(sweep_folder(&self.core, peer)));
                let has_rested = self.next.elapsed() >= PAUSES[1];
                self.pause = if has_rested { PAUSES[0] } else { PAUSES[1].min(2 * self.pause) };
                self.next = Instant::now() + self.pause;
            }
            self.accept_callers();
            self.get_on_with_dials();
            if lock(&self.shared.state).over {
                return Ok(());
            }
            self.wait();
        }
    }

    fn wait(&mut self) {
        let some = !lock(&self.shared.state).peer_processes.is_empty();
        let until_next = self.wanted.then(|| self.next.saturating_duration_since(Instant::now()));
        let most = until_next.or((some || !self.dialled.is_empty()).then_some(LOOK_EVERY));
        let mut fds = vec![self.shared.as_fd(), self.names.as_fd(), self.folders.as_fd()];
        // Connections that arrive while there is no room are accepted later.
        if lock(&self.shared.state).arrived.len() < WAITING {
            fds.push(self.listener.fd());
        }
        fds.extend(self.addresses.as_ref().map(AddressWatch::fd));
        fds.extend(self.dialled.iter().map(|(_, link, _)| link.fd()));
        sleep(&fds, most);
        let take_event = |fd: &ReservedFd| rustix::io::read(fd, &mut [0; 8]).is_ok();
        take_event(&self.shared.kick);
        self.wanted |= take_event(&self.names) | take_event(&self.folders);
        if let Some(watch) = &self.addresses
            && tombolo_os::poll::polls_as(watch.fd(), PollFlags::IN)
        {
            watch.drain();
            self.shared.hints.set_addresses(own_addresses(at::ADDRESSES));
        }
        // A mapping of a dead process's page keeps the page from being freed.
        lock(&self.shared.state).peer_processes.retain(|it| it.hints.is_open());
    }

    /// Maps the hints of new processes, and drops those of processes that may not be reached any more.
    fn find_peer_processes(&mut self) -> Result<()> {
        let all: BTreeMap<DomId, Record> = self.core.names().all().into_iter().collect();
        lock(&self.shared.state)
            .peer_processes
            .retain(|it| it.hints.is_open() && all.get(&it.domain).is_some_and(|record| record.pair == it.pair));
        for (domain, record) in &all {
            // The domain is watched from now on.
            let _peer = self.core.peer(*domain)?;
            let nodes = lock(&self.core.store).list(&folder(*domain, self.core.own))?;
            let services = nodes.into_iter().filter(|node| !node.contains('@') && node.starts_with(SERVICE));
            for service in services.filter_map(|node| node.parse::<Name>().ok()).take(EACH_MAX) {
                self.look_at_process(*domain, record, &service);
            }
        }
        lock(&self.shared.state).looked = true;
        Ok(())
    }

    fn look_at_process(&self, domain: DomId, record: &Record, service: &Name) {
        let at = format!("{}/{service}", record.view.name);
        let is_known = {
            let state = lock(&self.shared.state);
            let of_it = state.peer_processes.iter().filter(|it| it.domain == domain).count();
            of_it >= EACH_MAX
                || state.peer_processes.len() >= ALL_MAX
                || state.peer_processes.iter().any(|it| it.at == at)
        };
        if is_known || !record.view.theirs.iter().any(|pattern| pattern.matches(service)) {
            return;
        }
        let hints = || -> Result<PeerHints> {
            let place = ServiceAddress::parse(&format!("{domain}/{service}"))?.of_pair(record.pair);
            let reference = map_listener_page(&self.core, &place)?.word(at::AT_HINTS).hint() as u32;
            PeerHints::map(&*self.core.xen, domain, reference)
        };
        if let Ok(hints) = hints() {
            lock(&self.shared.state).peer_processes.push(PeerProcess { domain, pair: record.pair, at, hints });
        }
    }

    fn accept_callers(&mut self) {
        while lock(&self.shared.state).arrived.len() < WAITING {
            let Ok(Some((link, pair))) = self.listener.accept_link() else { return };
            link.leave_once_withdrawn(pair);
            lock(&self.shared.state).arrived.push_back(link);
        }
    }

    fn get_on_with_dials(&mut self) {
        while self.dialled.len() < WAITING {
            let Some(dial) = lock(&self.shared.state).dials.pop_front() else { break };
            match self.dial(&dial.at) {
                Ok(link) => self.dialled.push((dial, link, Instant::now())),
                Err(error) => self.fail(&dial, error),
            }
        }
        for (dial, mut link, since) in std::mem::take(&mut self.dialled) {
            match link.settle_request() {
                Ok(true) => *lock(&dial.outcome) = Some(Ok(link)),
                // The caller has dropped this dial.
                Ok(false) if Arc::strong_count(&dial) == 1 => {}
                Ok(false) if since.elapsed() < PATIENCE => self.dialled.push((dial, link, since)),
                Ok(false) => self.fail(&dial, Error::TimedOut),
                Err(error) => self.fail(&dial, error),
            }
        }
    }

    fn dial(&self, at: &str) -> Result<XenEndpoint> {
        let nobody = || Error::NotFound(format!("vm:{at}"));
        let (domain, service) = at.split_once('/').ok_or_else(nobody)?;
        let names = domain.parse::<Name>().ok().zip(service.parse::<Name>().ok());
        let (domain, service) = names.ok_or_else(nobody)?;
        let (link, pair) = call_named(&self.core, &domain, &service)?;
        link.leave_once_withdrawn(pair);
        Ok(link)
    }

    fn fail(&self, dial: &Dial, error: Error) {
        let mut state = lock(&self.shared.state);
        if state.failed.len() >= FAILED {
            state.failed.retain(|_, since| since.elapsed() < super::REST);
        }
        if state.failed.len() < FAILED {
            state.failed.insert(dial.at.clone(), Instant::now());
        }
        drop(state);
        *lock(&dial.outcome) = Some(Err(error));
    }
}

/// Removes the nodes that processes of this domain left for `peer` when they died.
fn sweep_folder(core: &Arc<Core>, peer: DomId) -> Result<()> {
    let path = folder(core.own, peer);
    let nodes = lock(&core.store).list(&path)?;
    for service in nodes.iter().filter(|node| !node.contains('@') && node.starts_with(SERVICE)).take(SWEPT) {
        let Ok(place) = ServiceAddress::parse(&format!("{peer}/{service}")) else { continue };
        // A live listener holds the claim on its name.
        if let Some(_claim) = core.xen.claim(&place.to_string())? {
            lock(&core.store).remove(&format!("{path}/{service}"))?;
        }
    }
    Ok(())
}
