// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two domains that can meet, on every backend that needs no hypervisor.
#![allow(dead_code, unused_imports)]

pub mod raw;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use tombolo_channel::{Address, Backends, Channel, Deadline, Listener, Options, Stream};
use tombolo_domain::{Endpoint, Listener as DomainListener, Rendezvous};
pub use tombolo_testing::conformance::eventually;
use tombolo_testing::harsh::{HarshDomain, Hypervisor};

/// Long enough for anything that should happen, short enough for a test that hangs.
pub const SOON: Duration = Duration::from_secs(10);

/// A listening side, a connecting side, and the place where they meet.
pub struct World {
    pub listening: Backends,
    pub connecting: Backends,
    pub address: Address,
    pub hypervisor: Option<(Hypervisor, HarshDomain, HarshDomain)>,
    /// The two backends themselves, for peers that speak the protocol by hand.
    ends: [Arc<dyn Rendezvous>; 2],
    _folder: Option<tempfile::TempDir>,
}

impl World {
    pub fn harsh() -> Self {
        let hypervisor = Hypervisor::new();
        let (a, b) = (hypervisor.domain("a"), hypervisor.domain("b"));
        Self {
            listening: Backends::new().with(a.clone()),
            connecting: Backends::new().with(b.clone()),
            address: "harsh:a/test".parse().unwrap(),
            ends: [Arc::new(a.clone()), Arc::new(b.clone())],
            hypervisor: Some((hypervisor, a, b)),
            _folder: None,
        }
    }

    pub fn local() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let backends = || Backends::new().with(tombolo_domain_local::LocalDomain::new());
        Self {
            listening: backends(),
            connecting: backends(),
            address: format!("local:{}/test.sock", folder.path().display()).parse().unwrap(),
            ends: [(); 2].map(|()| Arc::new(tombolo_domain_local::LocalDomain::new()) as Arc<dyn Rendezvous>),
            hypervisor: None,
            _folder: Some(folder),
        }
    }

    /// Returns a connection to the listener, of a caller that has sent nothing yet.
    pub fn connect_raw(&self) -> Box<dyn Endpoint> {
        self.ends[1].connect(self.address.service(), Deadline::after(SOON)).unwrap()
    }

    /// Returns a listener that sends nothing by itself.
    pub fn domain_listener(&self) -> Box<dyn DomainListener> {
        self.ends[0].listen(self.address.service()).unwrap()
    }

    pub fn listen<C: Channel>(&self) -> Listener<C> {
        self.listening.listen(&self.address, &Options::new()).unwrap()
    }

    /// Returns a channel's two endpoints: the listener's, then the connecting one's.
    pub fn pair<C: Channel + Send>(&self) -> (C, C) {
        self.pair_with(&Options::new())
    }

    pub fn pair_with<C: Channel + Send>(&self, options: &Options) -> (C, C) {
        let mut listener = self.listening.listen::<C>(&self.address, options).unwrap();
        thread::scope(|scope| {
            let client = scope.spawn(|| self.connecting.connect::<C>(&self.address, options).unwrap());
            let server = listener.accept_until(Deadline::after(SOON)).unwrap();
            (server, client.join().unwrap())
        })
    }

    pub fn connect<C: Channel>(&self) -> C {
        self.connecting.connect(&self.address, &Options::new()).unwrap()
    }

    pub fn streams(&self) -> (Stream, Stream) {
        self.pair()
    }
}

/// Lets `time` pass, where there is no condition to wait for: a random moment, a measured interval. A thread's
/// `park_timeout` alone is not enough: threads that ended may have left it a reason to return at once.
pub fn let_pass(time: Duration) {
    let until = Instant::now() + time;
    while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        thread::park_timeout(left);
    }
}

/// Returns bytes that repeat late and do not compress.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Runs each test on every backend that needs no hypervisor.
#[macro_export]
macro_rules! on_every_backend {
    ($($(#[$meta:meta])* fn $name:ident($world:ident) $body:block)*) => {
        $($(#[$meta])* fn $name($world: $crate::common::World) $body)*
        mod harsh { $(#[test] fn $name() { super::$name($crate::common::World::harsh()) })* }
        mod local { $(#[test] fn $name() { super::$name($crate::common::World::local()) })* }
    };
}
