// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds what all connections of a process share: XenStore, a thread that watches it, and the quarantine (X-1, X-2,
//!

use std::{
    collections::{HashMap, HashSet, VecDeque},
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec};
use tombolo_domain::{Result, aside::ReservedFd};
use tombolo_layout::xen as at;

use crate::{
    end::{End, PeerDomain},
    hypervisor::{DomId, Hypervisor},
    names::Names,
    os::{eventfd, lock, raise, random, spawn},
    page::PeerPage,
    quarantine::Quarantined,
    reaper_client::ReaperClient,
    reconnect_page::ReconnectPage,
    store::Store,
};

/// Interval at which the thread checks what no event reports: whether a listener page with pending connect requests is
/// still open, and whether the peer let go of memory in quarantine.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Number of watched domains from which on unused ones are dropped. Numbers of domains never come again, and XenStore
/// allows few watches for each domain.
const UNUSED_MAX: usize = 16;
/// Number of abandoned connect requests that a process checks when it begins: each costs a request to XenStore.
const REQUESTS_SWEPT: usize = 64;
/// Largest number of connect requests that a listener remembers. Further ones are lost, through the peer's own fault.
const REQUESTS_MAX: usize = 4096;

/// Returns the folder in which `owner` keeps what `reader` may see.
pub(crate) fn folder(owner: DomId, reader: DomId) -> String {
    format!("/local/domain/{owner}/data/tombolo/{reader}")
}

/// Connect requests that wait at a listener.
#[derive(Debug)]
pub(crate) struct ConnectRequests {
    pub peer: DomId,
    pub service: String,
    waiting: Mutex<Waiting>,
    event: ReservedFd,
}

#[derive(Debug, Default)]
struct Waiting {
    references: VecDeque<u32>,
    /// Whether the descriptor polls readable.
    told: bool,
}

impl ConnectRequests {
    pub(crate) fn new(peer: DomId, service: &str) -> Result<Arc<Self>> {
        let waiting = Mutex::default();
        Ok(Arc::new(Self { peer, service: service.into(), waiting, event: eventfd()? }))
    }

    /// Queues a connect request. The listener notices it after [`update_readiness`](Self::update_readiness).
    pub(crate) fn push(&self, reference: u32) {
        let queue = &mut lock(&self.waiting).references;
        if queue.len() < REQUESTS_MAX && !queue.contains(&reference) {
            queue.push_back(reference);
        }
    }

    /// Makes the descriptor readable exactly if a request waits.
    pub(crate) fn update_readiness(&self) {
        let mut waiting = lock(&self.waiting);
        let some = !waiting.references.is_empty();
        if std::mem::replace(&mut waiting.told, some) != some {
            if some {
                raise(&self.event);
            } else {
                let _ = rustix::io::read(&self.event, &mut [0; 8]);
            }
        }
    }

    /// Wakes the listener although no request waits.
    fn wake(&self) {
        let mut waiting = lock(&self.waiting);
        waiting.told = true;
        raise(&self.event);
    }

    /// Returns the first request, and leaves it in the queue.
    pub(crate) fn first(&self) -> Option<u32> {
        lock(&self.waiting).references.front().copied()
    }

    /// Removes the first request.
    pub(crate) fn pop(&self) {
        lock(&self.waiting).references.pop_front();
    }

    /// Returns a descriptor that polls readable while a request waits.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// A listener page to which this process has sent connect requests.
#[derive(Clone, Debug)]
pub(crate) struct ListenerPage {
    pub page: PeerPage,
    /// Domain that owns the page.
    pub domain: DomId,
    /// Page for further connect requests there, if there was room for it.
    pub reconnect_page: Option<Arc<ReconnectPage>>,
}

/// Number of times that fired watches are read before the thread does its other work.
const ROUNDS: usize = 16;
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// State on which the thread works.
#[derive(Debug)]
struct Watched {
    own: DomId,
    names: Arc<Names>,
    store: Mutex<Store>,
    /// Raised when the thread has something to check.
    kick: ReservedFd,
    /// Whether the thread checks again soon, even if `kick` is not raised.
    looks: AtomicBool,
    over: AtomicBool,
    peers: Mutex<HashMap<DomId, Weak<PeerDomain>>>,
    ends: Mutex<Vec<Weak<End>>>,
    listeners: Mutex<Vec<Weak<ConnectRequests>>>,
    quarantine: Mutex<Vec<Quarantined>>,
    /// Eventfds raised when anything but a connect request changes in a folder of a peer.
    folder_ears: Mutex<Vec<Weak<ReservedFd>>>,
    /// Listener pages to which connect requests were sent, by their nodes.
    listener_pages: Mutex<HashMap<String, ListenerPage>>,
}

/// This process's state in Xen.
#[derive(Debug)]
pub(crate) struct Core {
    pub xen: Arc<dyn Hypervisor>,
    pub own: DomId,
    pub store: Mutex<Store>,
    /// Value that this process writes into its connect requests. It is claimed for as long as the process lives.
    pub token: String,
    /// Connection to the grant reaper.
    pub keeping: ReaperClient,
    _alive: Option<ReservedFd>,
    /// Process that owns this: nothing of it works in a child made by fork.
    pid: u32,
    /// Peers for which a folder exists.
    folders: Mutex<HashSet<DomId>>,
    watched: Arc<Watched>,
}

impl Core {
    pub(crate) fn new(xen: Arc<dyn Hypervisor>) -> Result<Arc<Self>> {
        let mut store = Store::new(xen.store()?);
        let own = store.own_id()?;
        let watched = Arc::new(Watched::new(&xen, own)?);
        let work = Arc::clone(&watched);
        spawn("tombolo-xen", move || work.run())?;
        let pid = std::process::id();
        let token = format!("{pid}-{:016x}", u64::from_ne_bytes(random()?));
        let _alive = xen.claim(&token)?;
        let (store, folders) = (Mutex::new(store), Mutex::default());
        let keeping = ReaperClient::default();
        Ok(Arc::new(Self { xen, own, store, token, keeping, _alive, pid, folders, watched }))
    }

    /// Returns whether this process made it, and is not a child of the one that did.
    pub(crate) fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Returns what the broker of dom0 publishes to this domain.
    pub(crate) fn names(&self) -> &Names {
        &self.watched.names
    }

    /// Returns the known listener page of `node` if it is still open. Its listener then lives, so XenStore need not be
    /// asked.
    pub(crate) fn known_listener_page(&self, node: &str) -> Option<ListenerPage> {
        lock(&self.watched.listener_pages)
            .get(node)
            .filter(|listener_page| listener_page.page.state() == at::OPEN)
            .cloned()
    }

    pub(crate) fn remember_listener_page(&self, node: &str, listener_page: &ListenerPage) {
        lock(&self.watched.listener_pages).insert(node.into(), listener_page.clone());
    }

    /// Returns the folder that `peer` may see, and makes it if it is missing.
    pub(crate) fn own_folder(&self, peer: DomId) -> Result<String> {
        let path = folder(self.own, peer);
        let mut folders = lock(&self.folders);
        if !folders.contains(&peer) {
            lock(&self.store).make_folder(&path, self.own, peer)?;
            self.remove_requests_of_dead(&path)?;
            folders.insert(peer);
        }
        Ok(path)
    }

    /// Removes connect requests of processes that died before they could remove them.
    fn remove_requests_of_dead(&self, folder: &str) -> Result<()> {
        let mut store = lock(&self.store);
        for name in store.list(folder)?.iter().filter(|name| name.contains('@')).take(REQUESTS_SWEPT) {
            let path = format!("{folder}/{name}");
            if let Some(token) = store.read(&path)?
                && token != self.token
                && self.xen.claim(&token)?.is_some()
            {
                store.remove(&path)?;
            }
        }
        Ok(())
    }

    /// Returns the domain `id`, which is watched from now on.
    pub(crate) fn peer(&self, id: DomId) -> Result<Arc<PeerDomain>> {
        let mut peers = lock(&self.watched.peers);
        if let Some(peer) = peers.get(&id).and_then(Weak::upgrade) {
            return Ok(peer);
        }
        let known = peers.contains_key(&id);
        if !known && peers.len() >= UNUSED_MAX {
            for (id, _) in peers.extract_if(|_, peer| peer.strong_count() == 0) {
                lock(&self.watched.store).unwatch(&folder(id, self.own))?;
            }
        }
        let peer = Arc::new(PeerDomain::new(id, &self.watched.names));
        peers.insert(id, Arc::downgrade(&peer));
        drop(peers);
        if !known {
            // Each peer has one watch, which stays for later connections. The thread is woken for what fired meanwhile.
            let watched = lock(&self.watched.store).watch(&folder(id, self.own));
            if watched.is_err() {
                lock(&self.watched.peers).remove(&id);
            }
            watched?;
            raise(&self.watched.kick);
        }
        Ok(peer)
    }

    pub(crate) fn add_end(&self, end: &Arc<End>) {
        let mut ends = lock(&self.watched.ends);
        ends.retain(|end| end.strong_count() > 0);
        ends.push(Arc::downgrade(end));
        drop(ends);
        // An endpoint that was answered needs no checks.
        if end.peer.get().is_none() {
            self.watched.look_soon();
        }
    }

    pub(crate) fn add_listener(&self, requests: &Arc<ConnectRequests>) {
        let mut listeners = lock(&self.watched.listeners);
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(Arc::downgrade(requests));
    }

    /// Raises `ear` when something changes in the folder of a watched peer, except for connect requests.
    pub(crate) fn listen_to_folders(&self, ear: &Arc<ReservedFd>) {
        lock(&self.watched.folder_ears).push(Arc::downgrade(ear));
    }

    /// Keeps memory until its peer lets go of it (D-13).
    pub(crate) fn quarantine_memory(&self, memory: Quarantined) {
        lock(&self.watched.quarantine).push(memory);
        self.watched.look_soon();
    }

    /// Frees the memory that the peers have let go of.
    pub(crate) fn sweep(&self) {
        self.watched.sweep();
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.watched.over.store(true, Ordering::Release);
        raise(&self.watched.kick);
    }
}

/// Passes what `fired` returns to `look` until nothing is left, because what fires while an answer is awaited no longer
/// makes the descriptor readable. Stops after some rounds, so that a peer that writes nodes without end does not hold
/// up other work. Returns whether more may be left.
fn hear_in_turns(mut fired: impl FnMut() -> Result<Vec<String>>, mut look: impl FnMut(&[String])) -> Result<bool> {
    for _ in 0..ROUNDS {
        let paths = fired()?;
        if paths.is_empty() {
            return Ok(false);
        }
        look(&paths);
    }
    Ok(true)
}

impl Watched {
    fn new(xen: &Arc<dyn Hypervisor>, own: DomId) -> Result<Self> {
        Ok(Self {
            own,
            names: Arc::new(Names::new(xen, own)),
            store: Mutex::new(Store::new(xen.store()?)),
            kick: eventfd()?,
            looks: AtomicBool::new(false),
            over: AtomicBool::new(false),
            peers: Mutex::default(),
            ends: Mutex::default(),
            listeners: Mutex::default(),
            quarantine: Mutex::default(),
            folder_ears: Mutex::default(),
            listener_pages: Mutex::default(),
        })
    }

    /// Makes the thread check after there is something to check. A thread that has a timeout need not be woken for
    /// that.
    fn look_soon(&self) {
        if !self.looks.load(Ordering::SeqCst) {
            raise(&self.kick);
        }
    }

    /// Works until the [`Core`] is dropped or XenStore fails. Without XenStore no domain's end is noticed any more.
    fn run(&self) {
        let Ok(fd) = lock(&self.store).fd().try_clone_to_owned() else { return };
        let every = Timespec::try_from(LOOK_EVERY).ok();
        // If the folder cannot be watched, only the names that were read are known.
        let _ = lock(&self.store).watch(self.names.folder());
        raise(&self.kick);
        let mut more = false;
        loop {
            self.sweep();
            lock(&self.listener_pages).retain(|_, listener_page| listener_page.page.state() == at::OPEN);
            self.names.sweep();
            // ORDER SeqCst: whatever the checks below do not see is added after this store, and raises `kick`.
            self.looks.store(false, Ordering::SeqCst);
            let looks = self.wake_unanswered() || !lock(&self.quarantine).is_empty();
            self.looks.store(looks, Ordering::SeqCst);
            let timeout = if more { Some(&NOW) } else { every.as_ref().filter(|_| looks) };
            let mut fds = [PollFd::new(&fd, PollFlags::IN), PollFd::new(&self.kick, PollFlags::IN)];
            let _interrupted = rustix::event::poll(&mut fds, timeout);
            let _ = rustix::io::read(&self.kick, &mut [0; 8]);
            if self.over.load(Ordering::Acquire) {
                return;
            }
            let fired = || lock(&self.store).fired();
            let look = |paths: &[String]| {
                let known = paths.iter().filter(|path| self.names_changed(path) || self.changed(path)).count();
                if known < paths.len() {
                    lock(&self.folder_ears).retain(|ear| ear.upgrade().inspect(|ear| raise(&**ear)).is_some());
                    self.find_destroyed_domains();
                }
            };
            match hear_in_turns(fired, look) {
                Ok(left) => more = left,
                Err(_) => return,
            }
        }
    }

    /// Takes a changed node of the names that the broker publishes. Returns whether the node is one.
    fn names_changed(&self, path: &str) -> bool {
        // A node that cannot be read now will be read when it changes again.
        let is_name = self.names.is_about(path) && self.names.update_from_store(&mut lock(&self.store), path).is_ok();
        if is_name {
            let ends: Vec<_> = lock(&self.ends).iter().filter_map(Weak::upgrade).collect();
            ends.iter().for_each(|end| end.leave_if_withdrawn());
        }
        is_name
    }

    fn sweep(&self) {
        let freed: Vec<_> = lock(&self.quarantine).extract_if(.., |it| it.is_free()).collect();
        // The memory is freed without the lock, because that takes the kernel a while.
        drop(freed);
    }

    /// Wakes the endpoints that wait for an answer which will not come. Returns whether others wait for one.
    fn wake_unanswered(&self) -> bool {
        let ends: Vec<_> = lock(&self.ends).iter().filter_map(Weak::upgrade).collect();
        let mut others_wait = false;
        for end in ends.iter().filter(|end| end.peer.get().is_none()) {
            // This is asked before the endpoint is woken: one whose listener page closes in between counts as waiting,
            // so that the thread checks it again.
            others_wait |= !end.is_over();
            end.wake_if_over();
        }
        others_wait
    }

    /// Handles a change of a node called `SERVICE@REFERENCE`, which is a connect request or its removal. Returns
    /// whether the node is one.
    fn changed(&self, path: &str) -> bool {
        let Some((folder_of, name)) = path.rsplit_once('/') else { return false };
        let Some((service, reference)) = name.split_once('@') else { return false };
        let Ok(reference) = reference.parse() else { return false };
        let listeners: Vec<_> = lock(&self.listeners).iter().filter_map(Weak::upgrade).collect();
        let listener = listeners
            .iter()
            .find(|listener| listener.service == service && folder(listener.peer, self.own) == folder_of);
        if let Some(listener) = listener {
            listener.push(reference);
            listener.update_readiness();
        }
        true
    }

    /// Marks domains as destroyed whose folder was there and is not there any more.
    fn find_destroyed_domains(&self) {
        let peers: Vec<_> = lock(&self.peers).values().filter_map(Weak::upgrade).collect();
        for peer in peers.iter().filter(|peer| peer.seen.load(Ordering::Acquire) && !peer.gone.load(Ordering::Acquire))
        {
            let found = lock(&self.store).read(&folder(peer.id, self.own));
            if let Ok(None) = found {
                peer.gone.store(true, Ordering::Release);
                let ends: Vec<_> = lock(&self.ends).iter().filter_map(Weak::upgrade).collect();
                ends.iter().filter(|end| Arc::ptr_eq(&end.domain, peer)).for_each(|end| end.wake_if_over());
                // Mappings of a domain's memory keep the domain from disappearing completely.
                lock(&self.listener_pages).retain(|_, listener_page| listener_page.domain != peer.id);
                let listeners: Vec<_> = lock(&self.listeners).iter().filter_map(Weak::upgrade).collect();
                listeners.iter().filter(|it| it.peer == peer.id).for_each(|it| it.wake());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tombolo_domain::Error;

    use super::*;

    /// Endpoints of domain 5 that wait for answers of domain 7, each at a listener page of its own.
    #[cfg(feature = "testing")]
    mod unanswered {
        use tombolo_domain::{Deadline, Woken};

        use super::*;
        use crate::{FakeXen, page::OwnPage};

        /// An endpoint and its listener page.
        struct Caller {
            end: Arc<End>,
            listener_page: OwnPage,
        }

        impl Caller {
            fn new(here: &Arc<dyn Hypervisor>, there: &Arc<dyn Hypervisor>, names: &Arc<Names>) -> Self {
                let grants = there.grant(5, 1).unwrap();
                let reference = grants.references()[0];
                let listener_page = OwnPage::new(grants.map(0, 1).unwrap(), at::LISTENER_PAGE_MAGIC, 0);
                let seen = here.map(7, &[reference], None, Box::new(())).unwrap();
                let (seen, _port) = PeerPage::new(seen, at::LISTENER_PAGE_MAGIC).unwrap();
                let domain = Arc::new(PeerDomain::new(7, names));
                let end = End::new(&**here, &domain, here.offer_port(7).unwrap(), "echo").unwrap();
                *lock(&end.listener_page) = Some(seen);
                // What an event channel reports before the first event.
                end.control.drain();
                Self { end, listener_page }
            }

            fn is_woken(&self) -> bool {
                let woken = self.end.control.wait(Deadline::after(Duration::ZERO), || ()).unwrap();
                assert!(matches!(woken, Woken::PeerGone | Woken::TimedOut), "nobody sent an event: {woken:?}");
                woken == Woken::PeerGone
            }
        }

        /// Returns what the thread works on, without the thread, and some endpoints.
        fn setup(count: usize) -> (Watched, Vec<Caller>) {
            let xen = FakeXen::new();
            let (here, there) = (xen.domain(5).xen, xen.domain(7).xen);
            let watched = Watched::new(&here, 5).unwrap();
            let callers: Vec<_> = (0..count).map(|_| Caller::new(&here, &there, &watched.names)).collect();
            lock(&watched.ends).extend(callers.iter().map(|caller| Arc::downgrade(&caller.end)));
            (watched, callers)
        }

        #[test]
        fn x5_thread_looks_again_while_any_endpoint_waits_for_an_answer() {
            for left in 0..3 {
                let (watched, callers) = setup(3);
                assert!(watched.wake_unanswered(), "three wait");
                assert!(!callers.iter().any(Caller::is_woken), "the listeners are still there");
                let others = callers.iter().enumerate().filter(|(index, _)| *index != left);
                others.for_each(|(_, caller)| caller.listener_page.close());
                assert!(watched.wake_unanswered(), "only endpoint {left} of 3 still waits");
                let woken: Vec<_> = callers.iter().map(Caller::is_woken).collect();
                assert_eq!(woken, [0, 1, 2].map(|index| index != left));
                callers[left].listener_page.close();
                assert!(!watched.wake_unanswered(), "nobody waits any more");
                assert!(callers[left].is_woken(), "no answer will come");
            }
        }

        #[test]
        fn x5_thread_does_not_look_again_for_an_endpoint_that_was_answered() {
            let (watched, callers) = setup(2);
            for Caller { end, .. } in &callers {
                assert!(watched.wake_unanswered(), "not every endpoint was answered");
                // Any open page serves as the peer's mailbox.
                let mailbox = lock(&end.listener_page).clone().unwrap();
                end.peer.set(mailbox).unwrap();
            }
            assert!(!watched.wake_unanswered(), "all were answered");
            assert!(!callers.iter().any(Caller::is_woken), "the peers are open");
        }
    }

    #[test]
    fn x5_nodes_written_without_end_are_heard_in_turns() {
        let mut rounds = 0;
        let without_end = || {
            rounds += 1;
            // A thread that asks without end is stopped here, so that the test ends.
            if rounds > 1000 { Err(Error::PeerGone) } else { Ok(vec!["/written/again".to_owned()]) }
        };
        let mut seen = 0;
        let more = hear_in_turns(without_end, |paths| seen += paths.len());
        assert!(matches!(more, Ok(true)), "all else has no turn: {more:?}");
        assert_eq!((rounds, seen), (ROUNDS, ROUNDS), "what is read is looked at");
    }

    #[test]
    fn x5_everything_that_fired_is_heard_before_the_thread_sleeps() {
        let mut left = vec![vec!["c".to_owned()], vec!["a".to_owned(), "b".to_owned()]];
        let mut seen = Vec::new();
        let more = hear_in_turns(|| Ok(left.pop().unwrap_or_default()), |paths| seen.extend_from_slice(paths));
        assert!(matches!(more, Ok(false)), "nothing is left: {more:?}");
        assert_eq!(seen, ["a", "b", "c"]);
    }
}
