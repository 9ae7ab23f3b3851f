// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections between two machines: what the memory of their link has room for, whose rings grow there, and what comes back once
//! they are idle (S-18, S-19, S-20). The backend is that of virtual machines; its broker and devices are doubles.

#[path = "../../../backends/ivshmem/tests/support/mod.rs"]
mod support;

#[path = "pair/wire.rs"]
mod wire;

use std::{
    collections::HashMap,
    io::{IoSlice, IoSliceMut},
    os::{fd::RawFd, unix::fs::PermissionsExt},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rustix::io::Errno;
use support::{Slices, World};
use tombolo_domain::{Connecting, Deadline, Endpoint, Listener, PeerFinder, Rendezvous, Sought};
use tombolo_domain_ivshmem::VmDomain;
use tombolo_domain_local::LocalDomain;
use tombolo_sockets::{
    Process, ProgramCall, Read, Reason, Settings,
    connection::{Connection, Direction, Stage},
    kernel::{Kernel, Sample},
    tuple::{Tuple, key_of_sequences},
};
use wire::{Carried, Wire};

/// What may take at most, however busy the machine is.
const SOON: Duration = Duration::from_secs(60);
const PAGE: u64 = 4 << 10;
const FIRST: u64 = 16 << 10;
const MOST: u64 = 1 << 20;
/// A slice as brokers give it unless they are told otherwise.
const SLICE: u64 = 2 << 20;

/// The kernel of one machine: its ends by their descriptors.
#[derive(Clone, Default)]
struct Sockets(Arc<Mutex<HashMap<RawFd, Arc<Wire>>>>);

impl Sockets {
    fn of(&self, fd: RawFd) -> Arc<Wire> {
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

/// Who waits where, as all brokers know it.
type Keys = Arc<Mutex<HashMap<u32, String>>>;

/// Which addresses programs asked about, and which keys they forgot what they were told of.
#[derive(Clone, Debug, Default)]
struct Asked {
    addresses: Arc<Mutex<Vec<[u8; 16]>>>,
    forgotten: Arc<Mutex<Vec<u32>>>,
}

/// A machine's broker, which takes each address for a peer domain's.
#[derive(Debug)]
struct Broker(VmDomain, Keys, Asked);

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
        // Both listen in `a`, of which one is called.
        let listener = self.0.listen(service).ok()?;
        let (keys, asked) = (Arc::clone(&self.1), self.2.clone());
        Some(Box::new(Finder { service: format!("a/{service}"), listener, keys, asked }))
    }
}

#[derive(Debug)]
struct Finder {
    service: String,
    listener: Box<dyn Listener>,
    keys: Keys,
    asked: Asked,
}

impl PeerFinder for Finder {
    fn is_near(&mut self, address: [u8; 16]) -> Option<bool> {
        self.asked.addresses.lock().unwrap().push(address);
        Some(true)
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
struct Programs {
    world: World,
    processes: [Process; 2],
    kernels: [Sockets; 2],
    keys: Keys,
    asked: Asked,
    _folders: [tempfile::TempDir; 2],
}

/// Both ends of one connection, as the programs have it.
struct Ends<'a> {
    programs: &'a Programs,
    ends: [Arc<Connection>; 2],
    fd: RawFd,
    sent: [u64; 2],
    received: [u64; 2],
}

/// The byte at `position` of a stream that never repeats itself soon.
fn byte(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8
}

/// How much a call has moved, where it could be nothing.
fn done(said: Result<usize, Errno>) -> usize {
    assert!(!matches!(said, Err(errno) if errno != Errno::AGAIN), "{said:?}");
    said.unwrap_or(0)
}

impl Programs {
    fn new(slices: Slices) -> Self {
        let world = World::with_slices(slices);
        let (keys, asked) = (Keys::default(), Asked::default());
        let folders =
            [(); 2].map(|()| tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o700)).tempdir().unwrap());
        let kernels = [Sockets::default(), Sockets::default()];
        let processes = [0, 1].map(|at| {
            let settings = Settings {
                folder: folders[at].path().into(),
                ring: MOST,
                first_ring: 256 << 10,
                after: 0,
                memory: u64::MAX,
                loopback: true,
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

    /// A connection that is on TCP, over which a request and its answer went.
    fn connect(&self, number: u16) -> Ends<'_> {
        self.connect_between(["10.0.0.1", "10.0.0.2"], number)
    }

    fn connect_between(&self, hosts: [&str; 2], number: u16) -> Ends<'_> {
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

    /// Both programs make calls until the connection is in memory, or stays on TCP: then why.
    fn join(&self, number: u16) -> Result<Ends<'_>, Reason> {
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

    fn log(&self) -> String {
        std::fs::read_to_string(self._folders[1].path().join("log")).unwrap_or_default()
    }
}

impl Ends<'_> {
    fn advance(&self) {
        (0..2).for_each(|at| self.programs.processes[at].advance(&self.ends[at]));
    }

    /// A call of one program's.
    fn call(&self, at: usize) -> ProgramCall<'_> {
        self.ends[at].for_call(&self.programs.processes[at], self.fd)
    }

    fn send(&mut self, from: usize, most: usize) -> usize {
        let bytes: Vec<u8> = (0..most as u64).map(|at| byte(self.sent[from] + at)).collect();
        let n = done(self.call(from).send(&[IoSlice::new(&bytes)]));
        self.sent[from] += n as u64;
        n
    }

    fn receive(&mut self, from: usize, most: usize) -> usize {
        let mut to = vec![0; most];
        let n = done(self.call(1 - from).recv(&mut [IoSliceMut::new(&mut to)], Read::Take));
        for (at, found) in to[..n].iter().enumerate() {
            assert_eq!(*found, byte(self.received[from] + at as u64), "byte {}", self.received[from] + at as u64);
        }
        self.received[from] += n as u64;
        n
    }

    /// Bytes of both directions' rings, by who sends.
    fn rings(&self) -> [u64; 2] {
        self.ends.each_ref().map(|end| end.ring_sizes().unwrap()[0])
    }

    /// Bulk from one end, until its ring has not grown for a while.
    fn be_busy(&mut self, from: usize) -> u64 {
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

    /// Both ends sleep now and then, until their rings are as small as they were, and once more, as each was rung.
    fn be_idle(&self) {
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

/// All of one length.
fn of(length: u64) -> Slices {
    Box::new(move || Some(length))
}

#[test]
fn s20_ring_between_machines_begins_small_grows_for_bulk_and_gives_the_memory_back() {
    let programs = Programs::new(of(SLICE));
    let mut ends = programs.join(0).unwrap();
    assert_eq!(ends.rings(), [FIRST; 2]);
    // More often than the link has memory for, if any stayed.
    for round in 0..4 {
        assert_eq!(ends.be_busy(1), MOST, "round {round}");
        assert_eq!(ends.rings()[0], FIRST, "the other direction has nothing to carry");
        ends.be_idle();
    }
}

#[test]
fn s20_what_grows_leaves_room_for_first_rings_and_what_finds_none_stays_small() {
    let programs = Programs::new(of(SLICE));
    let mut all: Vec<_> = (0..3).map(|number| programs.join(number).unwrap()).collect();
    let sizes: Vec<_> = all.iter_mut().map(|ends| ends.be_busy(1)).collect();
    assert_eq!(sizes, [MOST, MOST / 2, MOST / 4], "each has what is left");
    let rest: Vec<_> = (3..11).map(|number| programs.join(number).unwrap()).collect();
    assert!(rest.iter().all(|ends| ends.rings() == [FIRST; 2]));
    // What is idle makes room.
    all[0].be_idle();
    let deadline = Instant::now() + SOON;
    while all[2].be_busy(1) <= MOST / 4 {
        assert!(Instant::now() < deadline, "{:?}", all[2].rings());
    }
}

/// What a region of 16 MiB gives, as V-8 says.
fn region() -> Slices {
    let mut left = (16 << 20) - PAGE;
    Box::new(move || {
        let slice = (left / 8 / PAGE * PAGE).clamp(72 << 10, SLICE);
        left = left.checked_sub(slice)?;
        Some(slice)
    })
}

#[test]
fn s18_a_thousand_connections_have_room_in_a_link_of_32_mib_and_what_has_none_says_so() {
    let programs = Programs::new(region());
    let mut all = Vec::new();
    let why = loop {
        match programs.join(all.len() as u16) {
            Ok(ends) => all.push(ends),
            Err(why) => break why,
        }
        assert!(all.len() < 2000, "the memory has no end");
    };
    assert!(all.len() >= 1000, "{} connections over {} sessions", all.len(), programs.world.calls());
    assert_eq!(why, Reason::Resources);
    assert!(programs.log().contains("no memory or descriptors left"), "{}", programs.log());
    // All are of use, the last as well, and one that has gone makes room for another.
    for ends in &mut all {
        assert!(ends.send(0, 1000) > 0 && ends.receive(0, 1000) > 0);
    }
    all.swap_remove(0);
    programs.join(3000).unwrap();
}

#[test]
fn s19_connection_leaves_a_ring_that_grew_and_one_that_was_offered_with_every_byte() {
    for takes in [true, false] {
        let programs = Programs::new(of(SLICE));
        let mut ends = programs.join(0).unwrap();
        // Once the ring has grown, and once one was offered that nobody has taken.
        let deadline = Instant::now() + SOON;
        while ends.rings()[1] == FIRST && (takes || ends.sent[1] < 64 * FIRST) {
            ends.send(1, 64 << 10);
            ends.receive(1, 8 << 10);
            // Who finds something each time takes no other ring.
            while takes && ends.receive(1, 8 << 10) > 0 {}
            assert!(Instant::now() < deadline);
        }
        ends.send(1, 64 << 10);
        assert!(ends.sent[1] > ends.received[1]);
        programs.world.leave();
        let deadline = Instant::now() + SOON;
        // Who hears of the peer's end first takes that for the reason.
        let is_left = |end: &Arc<Connection>| matches!(end.reason(), Some(Reason::TakenAway | Reason::PeerGone));
        while ends.received[1] < ends.sent[1] || !ends.ends.iter().all(is_left) {
            ends.advance();
            ends.receive(1, 64 << 10);
            ends.call(1).send_recalled();
            assert!(
                Instant::now() < deadline,
                "{} of {} bytes, {:?}",
                ends.received[1],
                ends.sent[1],
                ends.ends.each_ref().map(|end| end.reason())
            );
        }
        // And on, over TCP.
        assert!(ends.send(1, 100_000) == 100_000 && ends.receive(1, 200_000) == 100_000);
    }
}

#[test]
fn d3_what_was_recalled_from_a_ring_whose_memory_went_is_not_sent() {
    let programs = Programs::new(of(SLICE));
    let mut ends = programs.join(0).unwrap();
    assert_eq!(ends.be_busy(1), MOST);
    assert!(ends.send(1, 600_000) == 600_000);
    let wire = programs.kernels[1].of(ends.fd);
    wire.out.lock().unwrap().is_full = true;
    programs.world.leave();
    let deadline = Instant::now() + SOON;
    while !ends.call(1).send_recalled() {
        ends.advance();
        assert!(Instant::now() < deadline, "nothing was recalled");
    }
    // What lies in the second ring is gone; nothing else has been looked at since.
    rustix::fs::ftruncate(&programs.world.memories()[0], 0).unwrap();
    wire.out.lock().unwrap().is_full = false;
    for _ in 0..10 {
        ends.call(1).send_recalled();
        ends.advance();
    }
    let mut to = [0; 1000];
    let read = [IoSliceMut::new(&mut to)];
    let came = Kernel::recv(&programs.kernels[0], ends.fd, &mut { read }, false);
    assert_eq!(came, Err(Errno::AGAIN), "zeros went to the peer");
}

/// Each kernel has these, so they name no peer in another.
#[test]
fn s18_addresses_that_each_kernel_has_are_looked_for_at_no_broker() {
    for (number, hosts) in
        [["127.0.0.1", "127.0.0.2"], ["::1", "::1"], ["169.254.1.1", "169.254.1.2"], ["fe80::1", "fe80::2"]]
            .into_iter()
            .enumerate()
    {
        let programs = Programs::new(of(SLICE));
        let ends = programs.connect_between(hosts, number as u16);
        (0..200).for_each(|_| ends.advance());
        let asked = programs.asked.addresses.lock().unwrap().clone();
        assert_eq!((asked, programs.keys.lock().unwrap().len()), (vec![], 0), "{hosts:?}");
        assert_eq!(programs.world.calls(), 0, "{hosts:?}");
    }
}

#[test]
fn s18_service_where_nobody_listens_is_asked_for_anew() {
    let programs = Programs::new(of(SLICE));
    let ends = programs.connect(7);
    let number = 2 * ends.fd.unsigned_abs();
    let key = key_of_sequences([number, number + 1]).unwrap();
    programs.keys.lock().unwrap().insert(key, "a/sockets-00000000000000de".into());
    let deadline = Instant::now() + SOON;
    while !programs.asked.forgotten.lock().unwrap().contains(&key) {
        programs.processes[1].advance(&ends.ends[1]);
        assert!(Instant::now() < deadline, "what the broker said is believed on: {:?}", ends.ends[1].reason());
    }
    // Once the other end waits, and is told of, both are joined.
    let deadline = Instant::now() + SOON;
    while ends.ends.iter().any(|end| end.stage() != Stage::Joined) {
        ends.advance();
        assert!(Instant::now() < deadline, "{:?}", ends.ends.each_ref().map(|end| (end.stage(), end.reason())));
    }
}
