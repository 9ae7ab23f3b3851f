// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The harsh double with one flaw, for the canaries.
#![allow(dead_code, reason = "each test binary uses its part")]

mod doorbell;
mod link;
mod rendezvous;

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
    time::Duration,
};

use tombolo_domain::{Doorbell, Endpoint, Rendezvous};
use tombolo_testing::conformance::{Fixture, Mortal, set_patience};

use crate::support::Harsh;

/// The flaw of a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    None,
    // Memory.
    DirtyAtOwner,
    DirtyAtPeer,
    LongMapping,
    CopyAtPeer,
    FirstSegmentAgain,
    RetiredIsReused,
    QuarantineForEver,
    OutlivesInWords,
    // Doorbell.
    NotSticky,
    LosesSomeNotifications,
    EndBeforeNotification,
    NotifyBlocks,
    WaitsForEver,
    WaitsForNothing,
    WakesOneSlot,
    SleepsThroughTheEnd,
    DrainsNothing,
    DrainsLate,
    DrainsAll,
    // Control messages.
    JoinsMessages,
    ReversesMessages,
    CutsMessages,
    RecvBlocks,
    SendBlocks,
    LosesMessages,
    EndBeforeMessages,
    IgnoresMax,
    AlwaysMemory,
    // Liveness.
    LifeIsEternal,
    DeadWhileAlive,
    PausedIsGone,
    // Rendezvous.
    ConnectTimesOut,
    RenamesServices,
    LeavesListener,
    KeepsStaleNames,
    AcceptBlocks,
    AcceptsNewest,
    // Links and doorbells.
    SilentDescriptors,
    RestlessDescriptors,
}

/// State that all parts of one flawed backend share.
#[derive(Clone)]
pub struct Shared {
    pub flaw: Flaw,
    /// A descriptor that is never readable, or always: with its other end, or without.
    stuck: Arc<(io::PipeReader, Option<io::PipeWriter>)>,
    /// Memory behind the last mapping that is a copy.
    pub copy: Arc<Mutex<Option<OwnedFd>>>,
    pub doorbells: Arc<Mutex<Vec<Arc<dyn Doorbell>>>>,
}

impl Shared {
    /// Returns `fd`, or a descriptor that is always or never readable.
    pub fn fd<'a>(&'a self, fd: BorrowedFd<'a>) -> BorrowedFd<'a> {
        let stuck = matches!(self.flaw, Flaw::SilentDescriptors | Flaw::RestlessDescriptors);
        if stuck { self.stuck.0.as_fd() } else { fd }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.flaw.fmt(f)
    }
}

/// Blocks until the end of the process.
fn block() -> ! {
    loop {
        std::thread::park();
    }
}

pub struct Flawed {
    inner: Harsh,
    shared: Shared,
    pub a: rendezvous::FlawedDomain,
    pub b: rendezvous::FlawedDomain,
}

impl Flawed {
    pub fn new(flaw: Flaw) -> Self {
        // The flaw prevents what the suite waits for, so the wait is short.
        set_patience(Duration::from_secs(1));
        let (reader, writer) = io::pipe().expect("there are descriptors");
        let stuck = Arc::new((reader, (flaw != Flaw::RestlessDescriptors).then_some(writer)));
        let shared = Shared { flaw, stuck, copy: Arc::default(), doorbells: Arc::default() };
        let inner = Harsh::new();
        let [a, b] = [&inner.a, &inner.b].map(|domain| rendezvous::FlawedDomain::new(domain.clone(), &shared));
        Self { inner, shared, a, b }
    }
}

impl Fixture for Flawed {
    fn listening(&self) -> &dyn Rendezvous {
        &self.a
    }

    fn connecting(&self) -> &dyn Rendezvous {
        &self.b
    }

    fn service(&self) -> String {
        self.inner.service()
    }

    fn stale_service(&self) -> Option<String> {
        if self.shared.flaw != Flaw::KeepsStaleNames {
            return self.inner.stale_service();
        }
        let service = self.inner.service();
        std::mem::forget(self.inner.a.listen(&service).expect("a fresh service is free"));
        Some(service)
    }

    fn mortal(&self) -> Option<Box<dyn Mortal>> {
        Some(self.inner.mortal_behind(|link| self.wrap(link)))
    }
}

impl Flawed {
    fn wrap(&self, link: Box<dyn Endpoint>) -> Box<dyn Endpoint> {
        Box::new(link::FlawedLink::new(link, &self.shared))
    }
}
