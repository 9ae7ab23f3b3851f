// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs with TCP connections between two kernels. Kernels and network are simulated; both sides find each other
//! through the brokers that they are given.

use std::{
    collections::VecDeque,
    io::{IoSlice, IoSliceMut},
    os::{fd::RawFd, unix::fs::PermissionsExt},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rustix::{event::PollFlags, io::Errno};
use tombolo_domain::Rendezvous;
use tombolo_domain_ivshmem::VmDomain;
use tombolo_domain_local::LocalDomain;
use tombolo_layout::sockets::Counts;
use tombolo_sockets::{
    Process, Read, Settings,
    connection::{Connection, Direction, Stage},
    kernel::{Kernel, Sample},
    ports::Ports,
    tuple::Tuple,
};

pub const SOON: Duration = Duration::from_secs(20);
pub const NUMBERS: [u32; 2] = [0x1234_5678, 0x9abc_def0];

pub fn address(text: &str) -> [u8; 16] {
    text.parse::<std::net::Ipv4Addr>().unwrap().to_ipv6_mapped().octets()
}

/// One direction of a simulated TCP connection.
#[derive(Debug, Default)]
struct Wire {
    bytes: VecDeque<u8>,
    sent: u64,
}

/// One side of the connection, as its kernel sees it.
pub struct End {
    tuple: Tuple,
    out: Arc<Mutex<Wire>>,
    into: Arc<Mutex<Wire>>,
    numbers: Option<[u32; 2]>,
}

/// Connections of a program, as its kernel sees them: the first has number -1, the next -2.
struct Ends(Vec<End>);

impl Ends {
    fn of(&self, fd: RawFd) -> &End {
        &self.0[(-1 - fd) as usize]
    }
}

impl Kernel for Ends {
    fn tuple(&self, fd: RawFd) -> Option<Tuple> {
        Some(self.of(fd).tuple)
    }
    fn cookie(&self, _: RawFd) -> u64 {
        // Each kernel counts from 1.
        1
    }
    fn counts(&self, fd: RawFd, _: bool) -> Option<Sample> {
        let (out, into) = (self.of(fd).out.lock().unwrap().sent, self.of(fd).into.lock().unwrap());
        let counts = Counts { written: out, acked: out, received: into.sent };
        Some(Sample { counts, unread: into.bytes.len() as u64 })
    }
    fn sequences(&self, fd: RawFd, _: bool) -> Option<[u32; 2]> {
        self.of(fd).numbers
    }
    fn push(&self, _: RawFd) {}
    fn recv(&self, fd: RawFd, to: &mut [IoSliceMut<'_>], peek: bool) -> Result<usize, Errno> {
        let mut into = self.of(fd).into.lock().unwrap();
        let n = into.bytes.len().min(to[0].len());
        to[0][..n].iter_mut().zip(into.bytes.iter()).for_each(|(to, byte)| *to = *byte);
        if !peek {
            into.bytes.drain(..n);
        }
        if n == 0 { Err(Errno::AGAIN) } else { Ok(n) }
    }
    fn send(&self, fd: RawFd, from: &[IoSlice<'_>]) -> Result<usize, Errno> {
        let mut out = self.of(fd).out.lock().unwrap();
        out.bytes.extend(from[0].iter());
        out.sent += from[0].len() as u64;
        Ok(from[0].len())
    }
    fn poll(&self, fd: RawFd, events: i16) -> i16 {
        let there = !self.of(fd).into.lock().unwrap().bytes.is_empty();
        let ready = PollFlags::OUT | if there { PollFlags::IN } else { PollFlags::empty() };
        events & ready.bits() as i16
    }
    fn reset(&self, _: RawFd) {}
}

/// A program that knows nothing of the library.
pub struct Program {
    pub process: Arc<Process>,
    pub connection: Arc<Connection>,
    _folder: Arc<tempfile::TempDir>,
}

impl Program {
    /// Makes a program for each connection.
    pub fn all(ends: Vec<End>, dialled: bool, machines: Option<VmDomain>) -> Vec<Self> {
        let count = ends.len();
        let folder = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o700)).tempdir().unwrap();
        let settings = Settings {
            folder: folder.path().into(),
            ring: 64 << 10,
            tries_larger: false,
            first_ring: 64 << 10,
            after: Some(0),
            memory: u64::MAX,
            // A connection within one network namespace stays on TCP; connections of two kernels are never within one.
            loopback: false,
            flip: None,
            log: None,
            report: None,
            ports: Ports::default(),
        };
        let local = LocalDomain::in_folder(folder.path()).with_unique_names();
        let machines = machines.map(|it| Box::new(it) as Box<dyn Rendezvous>);
        let process = Process::new(settings, Box::new(Ends(ends)), Box::new(local)).with_machines(machines);
        let (process, folder) = (Arc::new(process), Arc::new(folder));
        let one = |index: usize| {
            let connection = Arc::new(process.track(dialled, -1 - index as RawFd));
            connection.wiring.set_wired();
            connection.wiring.waits().note_both_asked();
            Self { process: Arc::clone(&process), connection, _folder: Arc::clone(&folder) }
        };
        (0..count).map(one).collect()
    }

    pub fn fd(&self) -> RawFd {
        self.connection.descriptors.fd()
    }

    pub fn kernel(&self) -> &dyn Kernel {
        self.process.kernel()
    }

    /// Makes a call that sends.
    pub fn send(&mut self, bytes: &[u8]) -> usize {
        self.process.advance(&self.connection);
        if let Some(plain) = self.connection.plain(Direction::Out) {
            let n = self.kernel().send(self.fd(), &[IoSlice::new(bytes)]).unwrap();
            plain.moved(n, [&bytes[..n]].into_iter());
            return n;
        }
        match self.connection.for_call(&self.process, self.fd()).send(&[IoSlice::new(bytes)]) {
            Ok(n) => n,
            Err(Errno::AGAIN) => 0,
            Err(error) => panic!("{error}"),
        }
    }

    /// Makes a call that receives.
    pub fn receive(&mut self, to: &mut [u8]) -> usize {
        self.process.advance(&self.connection);
        if let Some(plain) = self.connection.plain(Direction::In) {
            let n = self.kernel().recv(self.fd(), &mut [IoSliceMut::new(to)], false).unwrap_or(0);
            plain.moved(n, [&to[..n]].into_iter());
            return n;
        }
        match self.connection.for_call(&self.process, self.fd()).recv(&mut [IoSliceMut::new(to)], Read::Take) {
            Ok(n) => n,
            Err(Errno::AGAIN) => 0,
            Err(error) => panic!("{error}"),
        }
    }

    /// Prepares a sleep, after the control path to the peer became readable.
    pub fn sleep(&self) {
        self.process.exchange.mark_notified();
        self.process.before_sleep();
    }

    pub fn is_joined(&self) -> bool {
        self.connection.stage() == Stage::Joined
    }
}

/// Makes a client and a server with a connection for each pair of numbers, each side with its broker.
pub fn pairs_between(
    domains: [&VmDomain; 2],
    numbers: &[[Option<[u32; 2]>; 2]],
    addresses: [&str; 2],
) -> (Vec<Program>, Vec<Program>) {
    let ends = numbers.iter().enumerate().map(|(index, numbers)| {
        let (there, back) = (Arc::<Mutex<Wire>>::default(), Arc::<Mutex<Wire>>::default());
        let own = format!("{}:{}", addresses[0], 40000 + index).parse().unwrap();
        let peer = format!("{}:80", addresses[1]).parse().unwrap();
        let client = End { tuple: Tuple::new(own, peer), out: there.clone(), into: back.clone(), numbers: numbers[0] };
        (client, End { tuple: Tuple::new(peer, own), out: back, into: there, numbers: numbers[1] })
    });
    let (clients, servers) = ends.unzip();
    let clients = Program::all(clients, true, Some(domains[0].clone()));
    (clients, Program::all(servers, false, Some(domains[1].clone())))
}

pub fn mirrored([own, peer]: [u32; 2]) -> [Option<[u32; 2]>; 2] {
    [Some([own, peer]), Some([peer, own])]
}

/// Waits until a broker knows that a peer domain may have an address. Programs reuse an answer for a while, so another
/// program asks each time.
pub fn until_near(domain: &VmDomain, address: [u8; 16]) {
    let deadline = Instant::now() + SOON;
    loop {
        let mut asks = domain.peer_finder("sockets-000000000000a5c5").unwrap();
        let near = loop {
            if let Some(near) = asks.is_near(address) {
                break near;
            }
            assert!(Instant::now() < deadline, "no answer");
        };
        if near {
            return;
        }
        assert!(Instant::now() < deadline, "it is not told");
    }
}

pub fn byte_at(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Exchanges questions and answers of 100 bytes, each checked, until `done` holds or so many were exchanged.
pub fn talk(
    client: &mut Program,
    server: &mut Program,
    at: &mut u64,
    most: u32,
    done: impl Fn(&Program, &Program) -> bool,
) {
    let deadline = Instant::now() + SOON;
    for _ in 0..most {
        for way in 0..2 {
            let (from, to) = if way == 0 { (&mut *client, &mut *server) } else { (&mut *server, &mut *client) };
            let bytes: Vec<u8> = (*at..*at + 100).map(byte_at).collect();
            let (mut sent, mut came) = (0, Vec::<u8>::new());
            while came.len() < 100 {
                sent += if sent < 100 { from.send(&bytes[sent..]) } else { 0 };
                let mut room = [0; 64];
                let n = to.receive(&mut room);
                came.extend(&room[..n]);
                // The sender checks for requests of its peer.
                from.connection.for_call(&from.process, from.fd()).send_recalled();
                assert!(Instant::now() < deadline, "{} of 100 bytes came", came.len());
            }
            assert_eq!(came, bytes, "at {at}");
            *at += 100;
        }
        if done(client, server) {
            return;
        }
    }
}

pub fn both_joined(client: &Program, server: &Program) -> bool {
    client.is_joined() && server.is_joined()
}

pub fn until_joined(client: &mut Program, server: &mut Program, at: &mut u64) {
    talk(client, server, at, u32::MAX, both_joined);
}

/// Sends a hundred bytes in one direction.
pub fn stream(from: &mut Program, to: &mut Program, at: &mut u64) {
    let bytes: Vec<u8> = (*at..*at + 100).map(byte_at).collect();
    let (mut sent, mut came, deadline) = (0, Vec::<u8>::new(), Instant::now() + SOON);
    while came.len() < 100 {
        let mut room = [0; 64];
        match sent < 100 {
            true => sent += from.send(&bytes[sent..]),
            // If some of these bytes are recalled, they go with its next call, whatever that is.
            false => assert_eq!(from.receive(&mut room), 0),
        }
        let n = to.receive(&mut room);
        came.extend(&room[..n]);
        assert!(Instant::now() < deadline, "{} of 100 bytes came", came.len());
    }
    assert_eq!(came, bytes, "at {at}");
    *at += 100;
}
