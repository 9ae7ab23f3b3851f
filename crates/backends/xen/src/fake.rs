// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Simulates Xen in one process, for tests: grants are memfds, event channels are eventfds, and XenStore is a thread
//! for each connection.

mod store;

use std::{
    collections::HashMap,
    fmt,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock, Weak},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    fs::{CWD, FileType, Mode, OFlags},
    pipe::PipeFlags,
};
use tombolo_domain::{Error, Result, aside::ReservedFd};
use tombolo_layout::xen::PAGE;
use tombolo_mem::{CommonSegment, OwnSegment, PeerSegment, create_forgeable};

use self::store::Daemon;
use crate::{
    GrantReaper, XenDomain, XenHost,
    hypervisor::{DomId, Grants, Guard, Hypervisor, Port},
    os::{lock, reserve},
};

/// A simulated hypervisor and its XenStore.
#[derive(Clone, Default)]
pub struct FakeXen(Arc<World>);

#[derive(Default)]
struct World {
    store: Arc<Daemon>,
    state: Mutex<State>,
}

struct State {
    last: u32,
    /// Largest number of pages that a domain may grant.
    limit: usize,
    grants: HashMap<(DomId, u32), Grant>,
    ports: HashMap<(DomId, u32), Weak<FakePort>>,
    /// For each domain, the file whose bytes are locked for its names.
    claims: HashMap<DomId, OwnedFd>,
    /// Grants whose owner died or dropped them while their file or a duplicate of it is open, with the descriptor that
    /// tells when none is.
    held: Vec<(DomId, Vec<u32>, OwnedFd)>,
    /// Sockets at which the grant reapers of domains listen.
    grant_reapers: HashMap<DomId, PathBuf>,
}

impl State {
    /// Ends the grants that nobody holds any more.
    fn sweep(&mut self) {
        let over = self.held.extract_if(.., |(_, _, file)| {
            let mut fds = [PollFd::new(file, PollFlags::empty())];
            rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
        });
        for (owner, references, _) in over {
            for reference in references {
                self.grants.remove(&(owner, reference));
            }
        }
    }
}

impl Default for State {
    fn default() -> Self {
        let (grants, ports, claims) = (HashMap::new(), HashMap::new(), HashMap::new());
        Self { last: 0, limit: 1 << 20, grants, ports, claims, held: Vec::new(), grant_reapers: HashMap::new() }
    }
}

struct Grant {
    to: DomId,
    /// The memory, and the index of this page in it.
    place: Option<(Arc<OwnedFd>, usize)>,
}

impl FakeXen {
    /// Makes a hypervisor without domains.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a process in domain `id`.
    #[must_use]
    pub fn domain(&self, id: u16) -> XenDomain {
        self.0.store.add(id);
        XenDomain::on(Arc::new(FakeDomain { world: Arc::clone(&self.0), id }))
    }

    /// Makes dom0's broker, in a process of its own.
    ///
    /// # Errors
    /// There is one already.
    pub fn host(&self) -> Result<XenHost> {
        self.0.store.add(0);
        XenHost::on(Arc::new(FakeDomain { world: Arc::clone(&self.0), id: 0 }))
    }

    /// Makes the grant reaper of domain `id`, to which the domain's processes connect at `path` from now on.
    #[must_use]
    pub fn grant_reaper(&self, id: u16, path: PathBuf) -> GrantReaper {
        lock(&self.0.state).grant_reapers.insert(id, path);
        GrantReaper::on(Arc::new(FakeDomain { world: Arc::clone(&self.0), id }))
    }

    /// Gives domain `id` a name, as dom0 does.
    pub fn name(&self, id: u16, name: &str) {
        self.0.store.add(id);
        self.write_node(0, &format!("/local/domain/{id}/name"), name);
    }

    /// Returns the value of a node if domain `id` may read it.
    #[must_use]
    pub fn node(&self, id: u16, path: &str) -> Option<String> {
        self.0.store.read(id, path)
    }

    /// Destroys domain `id` and its nodes in XenStore. The memory that it shared stays mapped where it is mapped.
    pub fn destroy(&self, id: u16) {
        self.0.store.destroy(id);
    }

    /// Writes a node as a domain `id` that follows no rules would.
    pub fn write_node(&self, id: u16, path: &str, value: &str) {
        self.0.store.write(id, path, value.as_bytes());
    }

    /// Paths below which domain `id` has nodes of Tombolo's that no folder accounts for.
    #[must_use]
    pub fn nodes(&self, id: u16) -> Vec<String> {
        self.0.store.below(&format!("/local/domain/{id}/data/tombolo/"))
    }

    /// Lets each domain grant at most `pages` from now on.
    pub fn limit_grants(&self, pages: usize) {
        lock(&self.0.state).limit = pages;
    }

    /// Returns the reference of the next page to be granted.
    #[must_use]
    pub fn next_reference(&self) -> u32 {
        lock(&self.0.state).last + 1
    }

    /// Returns the number of existing grants.
    #[must_use]
    pub fn grants(&self) -> usize {
        let mut state = lock(&self.0.state);
        state.sweep();
        state.grants.len()
    }
}

struct FakeDomain {
    world: Arc<World>,
    id: DomId,
}

impl fmt::Debug for FakeDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "domain {} of a test", self.id)
    }
}

fn memfd(error: std::io::Error) -> Error {
    Error::os("memfd_create", error)
}

impl FakeDomain {
    fn port(&self, peer: Option<Arc<FakePort>>, to: DomId) -> Result<Arc<FakePort>> {
        let mut state = lock(&self.world.state);
        state.last += 1;
        let number = state.last;
        let port = Arc::new(FakePort::new(number, to)?);
        if let Some(peer) = peer {
            *lock(&port.peer) = Arc::downgrade(&peer);
            *lock(&peer.peer) = Arc::downgrade(&port);
            // As on Xen: events sent before the port was bound are unknown, so one is delivered.
            port.deliver();
        }
        state.ports.insert((self.id, number), Arc::downgrade(&port));
        Ok(port)
    }

    fn gone(&self, memory: &Arc<OwnedFd>, references: Vec<u32>, when_gone: Option<(usize, u32)>) -> Gone {
        Gone { world: Arc::clone(&self.world), owner: self.id, memory: Arc::clone(memory), references, when_gone }
    }

    /// Returns the memory that belongs to `references` of `peer`.
    fn granted(&self, peer: DomId, references: &[u32]) -> Result<Arc<OwnedFd>> {
        let state = lock(&self.world.state);
        let mut found: Option<Arc<OwnedFd>> = None;
        for (index, reference) in references.iter().enumerate() {
            let grant = state.grants.get(&(peer, *reference)).filter(|grant| grant.to == self.id);
            let (memory, page) = grant.and_then(|grant| grant.place.as_ref()).ok_or(Error::Revoked)?;
            // Xen maps any pages. This double maps whole allocations, as a well-behaved peer grants them.
            if *page != index || found.is_some_and(|found| !Arc::ptr_eq(&found, memory)) {
                return Err(Error::Revoked);
            }
            found = Some(Arc::clone(memory));
        }
        Ok(found.expect("at least one page"))
    }
}

/// Simulates what the kernel does when a mapping of memory that both endpoints write is gone.
struct Gone {
    world: Arc<World>,
    owner: DomId,
    memory: Arc<OwnedFd>,
    /// Grants that end with the mapping.
    references: Vec<u32>,
    when_gone: Option<(usize, u32)>,
}

impl Drop for Gone {
    fn drop(&mut self) {
        let mut state = lock(&self.world.state);
        if let Some((offset, port)) = self.when_gone {
            let cleared = rustix::io::pwrite(&self.memory, &[0], offset as u64);
            assert_eq!(cleared, Ok(1), "forgeable memory is written by its descriptor");
            if let Some(port) = state.ports.get(&(self.owner, port)).and_then(Weak::upgrade) {
                port.notify();
            }
        }
        for reference in &self.references {
            state.grants.remove(&(self.owner, *reference));
        }
    }
}

impl Hypervisor for FakeDomain {
    fn store(&self) -> Result<ReservedFd> {
        reserve(self.world.store.connect(self.id).map_err(|error| Error::os("socketpair", error))?)
    }

    fn grant(&self, peer: DomId, pages: usize) -> Result<Arc<dyn Grants>> {
        if pages > self.room() {
            return Err(Error::Limit { what: "grants of a test", remedy: "let there be more" });
        }
        let mut state = lock(&self.world.state);
        let mut references = Vec::with_capacity(pages);
        for _ in 0..pages {
            state.last += 1;
            references.push(state.last);
            let key = (self.id, state.last);
            state.grants.insert(key, Grant { to: peer, place: None });
        }
        drop(state);
        let (world, owner) = (Arc::clone(&self.world), self.id);
        Ok(Arc::new(FakeGrants { world, owner, references, when_gone: Mutex::new(None), file: OnceLock::new() }))
    }

    fn map(&self, peer: DomId, references: &[u32], port: Option<u32>, guard: Guard) -> Result<PeerSegment> {
        let memory = self.granted(peer, references)?;
        // The file is opened for reading, so that no later call makes the mapping writable.
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let file = rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let file = file.map_err(|error| Error::os("open", error))?;
        // The order matters: the memory is unmapped, then the event is sent, and then the guard is dropped.
        let tell = port.map(|port| Unmapped { world: Arc::clone(&self.world), domain: self.id, port });
        PeerSegment::map_guarded(file.as_fd(), references.len() * PAGE, (tell, guard)).map_err(memfd)
    }

    fn room(&self) -> usize {
        let mut state = lock(&self.world.state);
        state.sweep();
        state.limit.saturating_sub(state.grants.keys().filter(|key| key.0 == self.id).count())
    }

    fn share(&self, peer: DomId, pages: usize, when_gone: Option<(usize, u32)>) -> Result<(Vec<u32>, CommonSegment)> {
        let memory = Arc::new(create_forgeable("tombolo-xen", pages * PAGE).map_err(memfd)?.1);
        let mut state = lock(&self.world.state);
        let references: Vec<u32> = (0..pages)
            .map(|page| {
                state.last += 1;
                let (key, place) = ((self.id, state.last), Some((Arc::clone(&memory), page)));
                state.grants.insert(key, Grant { to: peer, place });
                state.last
            })
            .collect();
        drop(state);
        let gone = self.gone(&memory, references.clone(), when_gone);
        let segment = CommonSegment::map(memory.as_fd(), pages * PAGE, true, gone).map_err(memfd)?;
        Ok((references, segment))
    }

    fn join(
        &self,
        peer: DomId,
        references: &[u32],
        writable: bool,
        when_gone: Option<(usize, u32)>,
    ) -> Result<CommonSegment> {
        let memory = self.granted(peer, references)?;
        let gone = self.gone(&memory, Vec::new(), when_gone);
        CommonSegment::map(memory.as_fd(), references.len() * PAGE, writable, gone).map_err(memfd)
    }

    fn offer_port(&self, peer: DomId) -> Result<Arc<dyn Port>> {
        Ok(self.port(None, peer)?)
    }

    fn bind_port(&self, peer: DomId, port: u32) -> Result<Arc<dyn Port>> {
        let offered = lock(&self.world.state).ports.get(&(peer, port)).and_then(Weak::upgrade);
        let free = offered.filter(|port| port.to == self.id && lock(&port.peer).upgrade().is_none());
        Ok(self.port(Some(free.ok_or(Error::PeerGone)?), peer)?)
    }

    fn is_there(&self, peer: DomId) -> Result<bool> {
        Ok(!self.world.store.below(&format!("/local/domain/{peer}")).is_empty())
    }

    fn grant_reaper(&self) -> Option<PathBuf> {
        lock(&self.world.state).grant_reapers.get(&self.id).cloned()
    }

    fn is_grant(&self, file: BorrowedFd<'_>) -> bool {
        rustix::fs::fstat(file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo)
    }

    fn claim(&self, name: &str) -> Result<Option<ReservedFd>> {
        let mut state = lock(&self.world.state);
        let claims = match state.claims.remove(&self.id) {
            Some(file) => file,
            None => create_forgeable("claims", PAGE).map_err(memfd)?.1,
        };
        let path = format!("/proc/self/fd/{}", claims.as_raw_fd());
        let file = rustix::fs::openat(CWD, path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        state.claims.insert(self.id, claims);
        crate::sys::lock_byte(reserve(file.map_err(|error| Error::os("open", error))?)?, name)
    }
}

/// Sends an event when it is dropped.
struct Unmapped {
    world: Arc<World>,
    domain: DomId,
    port: u32,
}

impl Drop for Unmapped {
    fn drop(&mut self) {
        let port = lock(&self.world.state).ports.get(&(self.domain, self.port)).and_then(Weak::upgrade);
        if let Some(port) = port {
            port.notify();
        }
    }
}

struct FakeGrants {
    world: Arc<World>,
    owner: DomId,
    references: Vec<u32>,
    when_gone: Mutex<Option<(usize, Option<u32>)>>,
    /// A pipe, made when first needed: the end that is duplicated, and the end that tells when all duplicates are
    /// closed.
    file: OnceLock<(OwnedFd, OwnedFd)>,
}

impl fmt::Debug for FakeGrants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FakeGrants of {} pages", self.references.len())
    }
}

impl Grants for FakeGrants {
    fn references(&self) -> &[u32] {
        &self.references
    }

    fn map(self: Arc<Self>, first: usize, count: usize) -> Result<OwnSegment> {
        let (segment, memory) = create_forgeable("tombolo-xen", count * PAGE).map_err(memfd)?;
        let memory = Arc::new(memory);
        let mut state = lock(&self.world.state);
        for (page, reference) in self.references[first..first + count].iter().enumerate() {
            let grant = state.grants.get_mut(&(self.owner, *reference)).expect("granted");
            assert!(grant.place.is_none(), "a page is mapped twice by its owner");
            grant.place = Some((Arc::clone(&memory), page));
        }
        drop(state);
        Ok(segment.guarded(self))
    }

    fn file(&self) -> BorrowedFd<'_> {
        let pipe = || {
            let (tells, held) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).expect("a test has descriptors");
            (held, tells)
        };
        self.file.get_or_init(pipe).0.as_fd()
    }

    fn when_gone(&self, offset: usize, port: Option<u32>) -> Result<()> {
        *lock(&self.when_gone) = Some((offset, port));
        Ok(())
    }
}

impl Drop for FakeGrants {
    fn drop(&mut self) {
        let mut state = lock(&self.world.state);
        let when_gone = *lock(&self.when_gone);
        if let Some((offset, port)) = when_gone {
            let grant = state.grants.get(&(self.owner, self.references[offset / PAGE]));
            if let Some((memory, page)) = grant.and_then(|grant| grant.place.as_ref()) {
                let cleared = rustix::io::pwrite(memory, &[0], (page * PAGE + offset % PAGE) as u64);
                assert_eq!(cleared, Ok(1), "forgeable memory is written by its descriptor");
            }
            let port = port.and_then(|port| state.ports.get(&(self.owner, port))).and_then(Weak::upgrade);
            if let Some(port) = port {
                port.notify();
            }
        }
        match self.file.take() {
            Some((_held, tells)) => state.held.push((self.owner, std::mem::take(&mut self.references), tells)),
            None => self.references.iter().for_each(|reference| drop(state.grants.remove(&(self.owner, *reference)))),
        }
        // This comes after the file was closed.
        state.sweep();
    }
}

/// A full eventfd, from which each event takes one, so that it becomes writable again.
#[derive(Debug)]
struct FakePort {
    number: u32,
    to: DomId,
    event: OwnedFd,
    peer: Mutex<Weak<FakePort>>,
    /// Whether an event is uncleared, and whether another has arrived since.
    pending: Mutex<(bool, bool)>,
}

impl FakePort {
    fn new(number: u32, to: DomId) -> Result<Self> {
        let event = tombolo_os::event::full_eventfd().map_err(|error| Error::os("eventfd", error))?;
        Ok(Self { number, to, event, peer: Mutex::default(), pending: Mutex::default() })
    }

    fn deliver(&self) {
        let (masked, again) = &mut *lock(&self.pending);
        *again = *masked;
        if !*masked {
            *masked = true;
            self.fire();
        }
    }

    fn fire(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

impl Port for FakePort {
    fn number(&self) -> u32 {
        self.number
    }

    fn notify(&self) {
        let peer = lock(&self.peer).upgrade();
        if let Some(peer) = peer {
            peer.deliver();
        }
    }

    fn clear(&self) {
        let (masked, again) = &mut *lock(&self.pending);
        *masked = std::mem::take(again);
        if *masked {
            self.fire();
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
