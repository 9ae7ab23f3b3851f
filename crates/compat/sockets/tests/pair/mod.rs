// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two honest processes, a connection between them, and a kernel that carries its bytes without losing any.
#![allow(dead_code, reason = "each test uses its part")]

mod wire;

use std::{
    io::{IoSlice, IoSliceMut},
    os::unix::fs::PermissionsExt,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rustix::io::Errno;
use tombolo_domain_local::LocalDomain;
use tombolo_sockets::{
    Process, Read, Settings,
    connection::{Connection, Stage},
    tuple::Tuple,
};
use wire::{Carried, Wire};

/// Size of a first ring in bytes.
pub const FIRST: u64 = 16 << 10;
/// Largest time that anything may take, however busy the machine is.
pub const SOON: Duration = Duration::from_secs(60);

/// One process and its side of the connection.
pub struct End {
    pub process: Process,
    pub connection: Arc<Connection>,
}

impl End {
    /// Sends as many bytes as there is room for.
    pub fn send(&self, bytes: &[u8]) -> usize {
        match self.connection.for_call(&self.process, -1).send(&[IoSlice::new(bytes)]) {
            Ok(n) => n,
            Err(errno) => {
                assert_eq!(errno, Errno::AGAIN);
                0
            }
        }
    }

    /// Receives the bytes that are there.
    pub fn receive(&self, to: &mut [u8], read: Read) -> usize {
        match self.connection.for_call(&self.process, -1).recv(&mut [IoSliceMut::new(to)], read) {
            Ok(n) => n,
            Err(errno) => {
                assert_eq!(errno, Errno::AGAIN);
                0
            }
        }
    }

    /// Prepares the sleep of a thread for this connection.
    pub fn prepare_sleep(&self, data: bool, space: bool) {
        self.process.before_sleep();
        self.connection.for_call(&self.process, -1).arm(data, space);
    }

    pub fn sends_by(&self) -> u64 {
        self.connection.ring_sizes().unwrap()[0]
    }
}

/// Returns both endpoints, joined. `change` may alter the settings of each before.
pub fn joined(change: impl Fn(&mut Settings)) -> ([End; 2], tempfile::TempDir) {
    let (ends, folder) = met(change);
    join(&ends);
    (ends, folder)
}

/// Lets both endpoints look for each other until they are joined.
pub fn join(ends: &[End; 2]) {
    let deadline = Instant::now() + SOON;
    while ends.iter().any(|end| end.connection.stage() != Stage::Joined) {
        ends.iter().for_each(|end| end.process.advance(&end.connection));
        assert!(Instant::now() < deadline, "{:?}", ends.each_ref().map(|end| end.connection.reason()));
    }
}

/// Returns both endpoints on TCP, after a request and its answer.
pub fn met(change: impl Fn(&mut Settings)) -> ([End; 2], tempfile::TempDir) {
    let folder = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o700)).tempdir().unwrap();
    let ways: [Arc<Mutex<Carried>>; 2] = Default::default();
    let [low, high] = ["10.0.0.1:80", "10.0.0.2:4000"].map(|address| address.parse().unwrap());
    let ends = [(low, high, 0), (high, low, 1)].map(|(own, peer, at)| {
        let mut settings = Settings {
            folder: folder.path().into(),
            ring: 1 << 20,
            tries_larger: false,
            first_ring: FIRST,
            after: Some(0),
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
        connection.wiring.waits().note_both_asked();
        End { process, connection }
    });
    // A request and its answer, which both endpoints have counted.
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
    (ends, folder)
}
