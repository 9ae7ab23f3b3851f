// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two honest processes, a connection between them, and a kernel that carries its bytes without losing any.

use std::{
    collections::VecDeque,
    io::{IoSlice, IoSliceMut},
    os::{fd::RawFd, unix::fs::PermissionsExt},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rustix::{event::PollFlags, io::Errno};
use tombolo_domain_local::LocalDomain;
use tombolo_layout::sockets::Counts;
use tombolo_sockets::{
    Process, Read, Settings,
    connection::{Connection, Stage},
    kernel::{Kernel, Sample},
    tuple::Tuple,
};

/// Bytes of a first ring.
pub const FIRST: u64 = 16 << 10;
/// What may take at most, however busy the machine is.
pub const SOON: Duration = Duration::from_secs(60);

/// One direction of the kernel's connection.
#[derive(Debug, Default)]
struct Carried {
    written: u64,
    under_way: VecDeque<u8>,
}

/// The kernel as one end sees it: what it sends and what it receives.
struct Wire {
    tuple: Tuple,
    out: Arc<Mutex<Carried>>,
    inward: Arc<Mutex<Carried>>,
}

impl Kernel for Wire {
    fn tuple(&self, _: RawFd) -> Option<Tuple> {
        Some(self.tuple)
    }
    fn cookie(&self, _: RawFd) -> u64 {
        7
    }
    fn counts(&self, _: RawFd, _: bool) -> Option<Sample> {
        let (out, inward) = (self.out.lock().unwrap(), self.inward.lock().unwrap());
        let counts = Counts { written: out.written, acked: out.written, received: inward.written };
        Some(Sample { counts, unread: inward.under_way.len() as u64 })
    }
    fn push(&self, _: RawFd) {}
    fn recv(&self, _: RawFd, to: &mut [IoSliceMut<'_>], peek: bool) -> Result<usize, Errno> {
        let mut inward = self.inward.lock().unwrap();
        if inward.under_way.is_empty() {
            return Err(Errno::AGAIN);
        }
        let mut done = 0;
        for part in to {
            let n = part.len().min(inward.under_way.len() - done);
            inward.under_way.iter().skip(done).zip(part.iter_mut()).for_each(|(byte, to)| *to = *byte);
            done += n;
        }
        if !peek {
            inward.under_way.drain(..done);
        }
        Ok(done)
    }
    fn send(&self, _: RawFd, from: &[IoSlice<'_>]) -> Result<usize, Errno> {
        let mut out = self.out.lock().unwrap();
        from.iter().for_each(|part| out.under_way.extend(part.iter()));
        let n: usize = from.iter().map(|part| part.len()).sum();
        out.written += n as u64;
        Ok(n)
    }
    fn poll(&self, _: RawFd, events: i16) -> i16 {
        let readable = !self.inward.lock().unwrap().under_way.is_empty();
        if readable { events & PollFlags::IN.bits() as i16 } else { 0 }
    }
    fn reset(&self, _: RawFd) {}
}

/// One process and its end.
pub struct End {
    pub process: Process,
    pub connection: Arc<Connection>,
}

impl End {
    /// Sends what there is room for.
    pub fn send(&self, bytes: &[u8]) -> usize {
        match self.connection.for_call(&self.process, -1).send(&[IoSlice::new(bytes)]) {
            Ok(n) => n,
            Err(errno) => {
                assert_eq!(errno, Errno::AGAIN);
                0
            }
        }
    }

    /// Receives what is there.
    pub fn receive(&self, to: &mut [u8], read: Read) -> usize {
        match self.connection.for_call(&self.process, -1).recv(&mut [IoSliceMut::new(to)], read) {
            Ok(n) => n,
            Err(errno) => {
                assert_eq!(errno, Errno::AGAIN);
                0
            }
        }
    }

    /// What a thread does before it sleeps for this connection.
    pub fn prepare_sleep(&self, data: bool, space: bool) {
        self.process.before_sleep();
        self.connection.for_call(&self.process, -1).arm(data, space);
    }

    pub fn sends_by(&self) -> u64 {
        self.connection.ring_sizes().unwrap()[0]
    }
}

/// Both ends, joined. Each may be changed before.
pub fn joined(change: impl Fn(&mut Settings)) -> ([End; 2], tempfile::TempDir) {
    let folder = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o700)).tempdir().unwrap();
    let ways: [Arc<Mutex<Carried>>; 2] = Default::default();
    let [low, high] = ["10.0.0.1:80", "10.0.0.2:4000"].map(|address| address.parse().unwrap());
    let ends = [(low, high, 0), (high, low, 1)].map(|(own, peer, at)| {
        let mut settings = Settings {
            folder: folder.path().into(),
            ring: 1 << 20,
            first_ring: FIRST,
            after: 0,
            memory: u64::MAX,
            loopback: true,
            flip: None,
            log: None,
            report: None,
            ports: tombolo_sockets::ports::Ports::default(),
        };
        change(&mut settings);
        let tuple = Tuple::new(own, peer);
        let wire = Wire { tuple, out: Arc::clone(&ways[at]), inward: Arc::clone(&ways[1 - at]) };
        let domain = LocalDomain::in_folder(folder.path()).with_unique_names();
        let process = Process::new(settings, Box::new(wire), Box::new(domain));
        let connection = Arc::new(process.track(at == 1, -1));
        connection.wiring.set_wired();
        End { process, connection }
    });
    // A request and its answer, which both know of.
    for (from, to) in [(1, 0), (0, 1)] {
        let text = b"what each has seen of the other, and nobody else did";
        let sent = ends[from].connection.plain(tombolo_sockets::connection::Direction::Out).unwrap();
        assert_eq!(ends[from].process.kernel().send(-1, &[IoSlice::new(text)]), Ok(text.len()));
        sent.moved(text.len(), [text.as_slice()].into_iter());
        let read = ends[to].connection.plain(tombolo_sockets::connection::Direction::In).unwrap();
        let mut seen = [0; 52];
        assert_eq!(ends[to].process.kernel().recv(-1, &mut [IoSliceMut::new(&mut seen)], false), Ok(text.len()));
        read.moved(seen.len(), [seen.as_slice()].into_iter());
    }
    let deadline = Instant::now() + SOON;
    while ends.iter().any(|end| end.connection.stage() != Stage::Joined) {
        ends.iter().for_each(|end| end.process.advance(&end.connection));
        assert!(Instant::now() < deadline, "{:?}", ends.each_ref().map(|end| end.connection.reason()));
    }
    (ends, folder)
}
