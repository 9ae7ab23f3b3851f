// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two machines with a program in each, and a connection between them that both kernels carry. The backend is that of
//! virtual machines; its broker and devices are test doubles.
#![allow(dead_code, reason = "each test uses its part")]

#[path = "../../../../backends/ivshmem/tests/support/mod.rs"]
pub mod support;

#[path = "../pair/wire.rs"]
mod wire;

use std::{
    collections::HashMap,
    io::{IoSlice, IoSliceMut},
    os::{fd::RawFd, unix::fs::PermissionsExt},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::io::Errno;
use support::{Windows, World};
use tombolo_domain::{Connecting, Deadline, Endpoint, Listener, PeerFinder, Rendezvous, Sought};
use tombolo_domain_ivshmem::VmDomain;
use tombolo_domain_local::LocalDomain;
use tombolo_sockets::{
    Process, ProgramCall, Read, Reason, Settings,
    connection::{Connection, Direction, Stage},
    kernel::{Kernel, Sample},
    switch::Transport,
    tuple::Tuple,
};
use wire::{Carried, Wire};

/// Largest time that anything may take, however busy the machine is.
pub const SOON: Duration = Duration::from_secs(60);
pub const PAGE: u64 = 4 << 10;
pub const FIRST: u64 = 16 << 10;
pub const MOST: u64 = 1 << 20;
/// Length of a window that a broker gives by default.
pub const WINDOW: u64 = 2 << 20;

/// The kernel of one machine: its wires by their descriptors.
#[derive(Clone, Default)]
pub struct Sockets(Arc<Mutex<HashMap<RawFd, Arc<Wire>>>>);

impl Sockets {
    pub fn of(&self, fd: RawFd) -> Arc<Wire> {
        Arc::clone(&self.0.lock().unwrap()[&fd])
    }
}

impl Kernel for Sockets {
    fn tuple(&self, fd: RawFd) -> Option<Tuple> {
        self.of(fd).tuple(fd)
    }
    fn cookie(&self, _: RawFd) -> u64 {
        1
    }
    fn counts(&self, fd: RawFd, dialled: bool) -> Option<Sample> {
        self.of(fd).counts(fd, dialled)
    }
    fn sequences(&self, fd: RawFd, dialled: bool) -> Option<[u32; 2]> {
        let number = 2 * fd.unsigned_abs();
        Some(if dialled { [number, number + 1] } else { [number + 1, number] })
    }
    fn push(&self, _: RawFd) {}
    fn recv(&self, fd: RawFd, to: &mut [IoSliceMut<'_>], peek: bool) -> Result<usize, Errno> {
        self.of(fd).recv(fd, to, peek)
    }
    fn send(&self, fd: RawFd, from: &[IoSlice<'_>]) -> Result<usize, Errno> {
        self.of(fd).send(fd, from)
    }
    fn poll(&self, fd: RawFd, events: i16) -> i16 {
        self.of(fd).poll(fd, events)
    }
    fn reset(&self, _: RawFd) {}
}

/// Services of the waiting programs by key, as all brokers know them.
pub type Keys = Arc<Mutex<HashMap<u32, String>>>;

/// Addresses that programs looked up, and keys whose answers they forgot.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    pub addresses: Arc<Mutex<Vec<[u8; 16]>>>,
    pub forgotten: Arc<Mutex<Vec<u32>>>,
    /// Whether no address belongs to a peer domain.
    pub is_far: Arc<AtomicBool>,
}

/// A machine's broker, which takes each address for that of a peer domain.
#[derive(Debug)]
pub struct Broker(VmDomain, Keys, Asked);

impl Rendezvous for Broker {
    fn scheme(&self) -> &'static str {
        self.0.scheme()
    }
    fn listen(&self, service: &str) -> tombolo_domain::Result<Box<dyn Listener>> {
        self.0.listen(service)
    }
    fn connect(&self, service: &str, deadline: Deadline) -> tombolo_domain::Result<Box<dyn Endpoint>> {
        self.0.connect(service, deadline)
    }
    fn begin_connect(&self, service: &str) -> tombolo_domain::Result<Box<dyn Connecting>> {
        self.0.begin_connect(service)
    }
    fn peer_finder(&self, service: &str) -> Option<Box<dyn PeerFinder>> {
        // Both machines listen in `a`; only one of the two is called.
        let listener = self.0.listen(service).ok()?;
        let (keys, asked) = (Arc::clone(&self.1), self.2.clone());
        Some(Box::new(Finder { service: format!("a/{service}"), listener, keys, asked }))
    }
}

#[derive(Debug)]
pub struct Finder {
    service: String,
    listener: Box<dyn Listener>,
    keys: Keys,
    asked: Asked,
}

impl PeerFinder for Finder {
    fn is_near(&mut self, address: [u8; 16]) -> Option<bool> {
        self.asked.addresses.lock().unwrap().push(address);
        Some(!self.asked.is_far.load(Ordering::SeqCst))
    }
    fn claim_key(&mut self, key: u32) {
        self.keys.lock().unwrap().insert(key, self.service.clone());
    }
    fn withdraw_key(&mut self, key: u32) {
        self.keys.lock().unwrap().remove(&key);
    }
    fn seek_key(&mut self, key: u32, _: [u8; 16]) -> Sought {
        self.keys.lock().unwrap().get(&key).cloned().map_or(Sought::Nobody, Sought::At)
    }
    fn forget_key(&mut self, key: u32) {
        self.asked.forgotten.lock().unwrap().push(key);
    }
    fn accept_peer(&mut self) -> Option<Box<dyn Endpoint>> {
        self.listener.accept().ok()?
    }
}

/// A program in each of two machines: the one in `a` accepted all connections, the one in `b` made them.
pub struct Programs {
    pub world: World,
    pub processes: [Process; 2],
    pub kernels: [Sockets; 2],
    pub keys: Keys,
    pub asked: Asked,
    _folders: [tempfile::TempDir; 2],
}

/// Both endpoints of one connection, as the programs hold them.
pub struct Ends<'a> {
    pub programs: &'a Programs,
    pub ends: [Arc<Connection>; 2],
    pub fd: RawFd,
    pub sent: [u64; 2],
    pub received: [u64; 2],
}

/// Returns the byte at `position` of a stream that repeats itself only after a long time.
pub fn byte(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8
}

/// Returns the number of bytes that a call moved; 0 if it would have blocked.
pub fn done(said: Result<usize, Errno>) -> usize {
    assert!(!matches!(said, Err(errno) if errno != Errno::AGAIN), "{said:?}");
    said.unwrap_or(0)
}

impl Programs {
    pub fn new(windows: Windows) -> Self {
        let world = World::with_windows(windows);
        let (keys, asked) = (Keys::default(), Asked::default());
        let folders =
            [(); 2].map(|()| tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o700)).tempdir().unwrap());
        let kernels = [Sockets::default(), Sockets::default()];
        let processes = [0, 1].map(|at| {
            let settings = Settings {
                folder: folders[at].path().into(),
                ring: MOST,
                tries_larger: false,
                first_ring: 256 << 10,
                after: Some(0),
                memory: u64::MAX,
                // Each kernel counts its namespaces from 1, so an equal number proves nothing (S-6).
                loopback: false,
                flip: None,
                log: Some(folders[at].path().join("log")),
                report: None,
                ports: tombolo_sockets::ports::Ports::default(),
            };
            let domain = LocalDomain::in_folder(folders[at].path()).with_unique_names();
            let broker = Broker([&world.a, &world.b][at].clone(), Arc::clone(&keys), asked.clone());
            Process::new(settings, Box::new(kernels[at].clone()), Box::new(domain))
                .with_machines(Some(Box::new(broker)))
        });
        Self { world, processes, kernels, keys, asked, _folders: folders }
    }

    /// Makes a connection that is on TCP, over which a request and its answer went.
    pub fn connect(&self, number: u16) -> Ends<'_> {
        self.connect_between(["10.0.0.1", "10.0.0.2"], number)
    }

    pub fn connect_between(&self, hosts: [&str; 2], number: u16) -> Ends<'_> {
        let ways: [Arc<Mutex<Carried>>; 2] = Default::default();
        let fd = -1 - RawFd::from(number);
        let host = |at: usize| hosts[at].parse::<std::net::IpAddr>().unwrap();
        let addresses = [(host(0), 80).into(), (host(1), 1000 + number).into()];
        let ends = [0, 1].map(|at| {
            let tuple = Tuple::new(addresses[at], addresses[1 - at]);
            let wire = Wire { tuple, out: Arc::clone(&ways[at]), inward: Arc::clone(&ways[1 - at]) };
            self.kernels[at].0.lock().unwrap().insert(fd, Arc::new(wire));
            let connection = Arc::new(self.processes[at].track(at == 1, fd));
            connection.wiring.set_wired();
            connection.wiring.waits().note_both_asked();
            connection
        });
        for (from, to) in [(1, 0), (0, 1)] {
            let text = b"what each has seen of the other, and nobody else did";
            let sent = ends[from].plain(Direction::Out).unwrap();
            assert_eq!(self.kernels[from].send(fd, &[IoSlice::new(text)]), Ok(text.len()));
            sent.moved(text.len(), [text.as_slice()].into_iter());
            let read = ends[to].plain(Direction::In).unwrap();
            let mut seen = [0; 52];
            assert_eq!(self.kernels[to].recv(fd, &mut [IoSliceMut::new(&mut seen)], false), Ok(text.len()));
            read.moved(seen.len(), [seen.as_slice()].into_iter());
        }
        Ends { programs: self, ends, fd, sent: [0; 2], received: [0; 2] }
    }

    /// Lets both programs make calls until the connection is in memory, or stays on TCP. Returns the reason for the
    /// latter.
    pub fn join(&self, number: u16) -> Result<Ends<'_>, Reason> {
        let ends = self.connect(number);
        let deadline = Instant::now() + SOON;
        while ends.ends.iter().any(|end| end.stage() != Stage::Joined) {
            ends.advance();
            if let Some(reason) = ends.ends.iter().find_map(|end| end.reason()) {
                return Err(reason);
            }
            assert!(
                Instant::now() < deadline,
                "connection {number}: {:?}",
                ends.ends.each_ref().map(|end| end.stage())
            );
            std::thread::yield_now();
        }
        Ok(ends)
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self._folders[1].path().join("log")).unwrap_or_default()
    }
}

impl Ends<'_> {
    pub fn advance(&self) {
        (0..2).for_each(|at| self.programs.processes[at].advance(&self.ends[at]));
    }

    /// Makes a call of one program.
    pub fn call(&self, at: usize) -> ProgramCall<'_> {
        self.ends[at].for_call(&self.programs.processes[at], self.fd)
    }

    pub fn send(&mut self, from: usize, most: usize) -> usize {
        let bytes: Vec<u8> = (0..most as u64).map(|at| byte(self.sent[from] + at)).collect();
        let n = done(self.call(from).send(&[IoSlice::new(&bytes)]));
        self.sent[from] += n as u64;
        n
    }

    pub fn receive(&mut self, from: usize, most: usize) -> usize {
        let mut to = vec![0; most];
        let n = done(self.call(1 - from).recv(&mut [IoSliceMut::new(&mut to)], Read::Take));
        for (at, found) in to[..n].iter().enumerate() {
            assert_eq!(*found, byte(self.received[from] + at as u64), "byte {}", self.received[from] + at as u64);
        }
        self.received[from] += n as u64;
        n
    }

    /// Lets both programs send and receive until both directions are in memory.
    pub fn move_into_memory(&mut self) {
        let deadline = Instant::now() + SOON;
        while self.ends.iter().any(|end| end.transports() != [Transport::Pipe; 2]) {
            for from in 0..2 {
                self.send(from, 1000);
                self.receive(from, 1000);
            }
            assert!(Instant::now() < deadline, "not in memory");
        }
    }

    /// Sends and receives on a connection in any state: before it is joined, the kernel carries out the call.
    pub fn carry(&mut self, from: usize, most: usize) -> usize {
        let end = Arc::clone(&self.ends[from]);
        self.programs.processes[from].advance(&end);
        let Some(plain) = end.plain(Direction::Out) else { return self.send(from, most) };
        let bytes: Vec<u8> = (0..most as u64).map(|at| byte(self.sent[from] + at)).collect();
        let n = done(self.programs.kernels[from].send(self.fd, &[IoSlice::new(&bytes)]));
        plain.moved(n, [bytes.as_slice()].into_iter());
        self.sent[from] += n as u64;
        n
    }

    pub fn take_bytes(&mut self, from: usize, most: usize) -> usize {
        let end = Arc::clone(&self.ends[1 - from]);
        self.programs.processes[1 - from].advance(&end);
        let Some(plain) = end.plain(Direction::In) else { return self.receive(from, most) };
        let mut to = vec![0; most];
        let n = done(self.programs.kernels[1 - from].recv(self.fd, &mut [IoSliceMut::new(&mut to)], false));
        plain.moved(n, [&to[..n]].into_iter());
        for (at, found) in to[..n].iter().enumerate() {
            assert_eq!(*found, byte(self.received[from] + at as u64), "byte {}", self.received[from] + at as u64);
        }
        self.received[from] += n as u64;
        n
    }

    /// Does what a call of a program begins with: a new connection replaces one that may be joined again. Returns
    /// whether it did.
    pub fn renew(&mut self, at: usize) -> bool {
        let old = &self.ends[at];
        let may = self.programs.processes[at].may_return(old) && self.programs.processes[at].may_return_now(old);
        if may {
            let new = Arc::new(old.begin_anew());
            new.wiring.set_wired();
            new.wiring.waits().note_both_asked();
            self.ends[at] = new;
        }
        may
    }

    /// Returns the sizes in bytes of both directions' rings, by sender.
    pub fn rings(&self) -> [u64; 2] {
        self.ends.each_ref().map(|end| end.ring_sizes().unwrap()[0])
    }

    /// Sends in bulk from one endpoint, until its ring has not grown for a while. Returns the largest size.
    pub fn be_busy(&mut self, from: usize) -> u64 {
        let (mut largest, mut since, deadline) = (0, Instant::now(), Instant::now() + SOON);
        while since.elapsed() < Duration::from_millis(300) {
            // More than any ring holds.
            for _ in 0..40 {
                self.send(from, 64 << 10);
            }
            while self.receive(from, 64 << 10) > 0 {}
            self.programs.processes.iter().for_each(Process::before_sleep);
            if self.rings()[from] != largest {
                (largest, since) = (self.rings()[from], Instant::now());
            }
            assert!(Instant::now() < deadline, "it grows without end");
        }
        largest
    }

    /// Lets both endpoints sleep now and then until their rings have their first sizes again, and then a few rounds
    /// more, because each was notified.
    pub fn be_idle(&self) {
        let (mut rounds, deadline) = (0, Instant::now() + SOON);
        while rounds < 3 {
            rounds = if self.rings() == [FIRST; 2] { rounds + 1 } else { 0 };
            for at in 0..2 {
                self.programs.processes[at].before_sleep();
                self.call(at).arm(true, false);
            }
            assert!(Instant::now() < deadline, "{:?}", self.rings());
            std::thread::yield_now();
        }
    }
}

/// Returns windows that all have the same length.
pub fn of(length: u64) -> Windows {
    Box::new(move || Some(length))
}
