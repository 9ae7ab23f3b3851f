// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State that the connections between two processes share: the path from one to the other, and its end.

use std::{
    collections::HashMap,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::io::Errno;
use tombolo_domain::{
    Endpoint, Liveness, SingleDoorbell,
    aside::{self, ReservedFd},
};
use tombolo_mem::PeerSegment;
use tombolo_os::lock::lock;

use crate::offered_ring::OfferedRing;

/// Descriptor that reports the end of a session.
#[derive(Debug)]
pub struct SessionPath {
    fd: ReservedFd,
    /// Whether it becomes readable at the end, as it does for messages; otherwise it hangs up (S-17).
    is_readable_at_end: bool,
}

impl SessionPath {
    /// Returns whether it reports the end by being readable (`EPOLLIN`), and not by a hang-up (`EPOLLRDHUP`).
    #[must_use]
    pub fn is_readable_at_end(&self) -> bool {
        self.is_readable_at_end
    }
}

impl AsFd for SessionPath {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for SessionPath {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// A child's copy of its parent's endpoint of a session, and the descriptor that reports its end.
#[derive(Debug)]
pub(crate) struct Inherited {
    pub link: Box<dyn Endpoint>,
    pub _path: Arc<SessionPath>,
}

/// State that the connections between two processes share.
#[derive(Debug)]
pub(crate) struct Session {
    /// Path to the peer's process, which reports when that process is gone. Its owner is the owner of the session's
    /// endpoint.
    pub path: Weak<SessionPath>,
    /// Doorbells of the connections that use the session. Used only while the exchange is locked.
    pub doorbells: Mutex<Vec<Weak<SingleDoorbell>>>,
    /// Rings that the peer offers to these connections, by the number of this endpoint (S-20). Used only while the
    /// exchange is locked.
    pub rings: Mutex<HashMap<u64, Weak<OfferedRing>>>,
    /// Whether the peer's process, or the path to it, is gone.
    pub gone: AtomicBool,
    /// Whether its memory may be taken away; `leaving`: whether it will be (V-9).
    is_revocable: bool,
    /// Whether a child made by fork has its memory too.
    is_inherited: bool,
    pub leaving: AtomicBool,
    /// In a child made by fork: its copy of the endpoint, which reports the peer's liveness as long as a connection
    /// here uses the session.
    pub inherited: Mutex<Option<Inherited>>,
}

impl Session {
    pub fn new(path: &Arc<SessionPath>, is_inherited: bool) -> Self {
        let (is_revocable, path) = (path.is_readable_at_end, Arc::downgrade(path));
        let (doorbells, rings, inherited) = Default::default();
        let (gone, leaving) = Default::default();
        Self { path, doorbells, rings, gone, is_revocable, is_inherited, leaving, inherited }
    }

    /// Returns whether the peer's process, or the path to it, is gone.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Returns the path to the peer's process, as long as it exists.
    pub fn path(&self) -> Option<Arc<SessionPath>> {
        self.path.upgrade()
    }

    /// Notes that the path has ended, and wakes all who wait for a connection over it. Called while the exchange is
    /// locked.
    pub fn end(&self) {
        if !self.gone.swap(true, Ordering::SeqCst) {
            lock(&self.doorbells)
                .drain(..)
                .filter_map(|doorbell| doorbell.upgrade())
                .for_each(|doorbell| doorbell.notify());
        }
    }

    /// Returns whether its connections use memory that may be taken away (V-9).
    pub fn is_revocable(&self) -> bool {
        self.is_revocable
    }

    /// Returns whether a child made by fork has its memory.
    pub fn is_inherited(&self) -> bool {
        self.is_inherited
    }

    /// Returns whether its memory will be taken away, so that its connections go back to TCP (V-9).
    #[inline]
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Notes that its memory will be taken away, and wakes all who wait for a connection over it. Called while the
    /// exchange is locked.
    pub fn begin_to_leave(&self) {
        if !self.leaving.swap(true, Ordering::SeqCst) {
            lock(&self.doorbells).iter().filter_map(Weak::upgrade).for_each(|doorbell| doorbell.notify());
        }
    }

    /// Delivers a ring to the endpoint with this number. Returns `false` if that has a ring which it did not look at
    /// yet, `None` if there is no such endpoint.
    pub fn deliver_ring(&self, to: u64, generation: u16, segment: PeerSegment) -> Option<bool> {
        let offered = lock(&self.rings).get(&to).and_then(Weak::upgrade);
        offered.map(|offered| offered.put(generation, segment))
    }

    /// Adds a connection: the doorbell that wakes it, its number here, and the place for rings offered to it. Called
    /// while the exchange is locked.
    pub fn carries(&self, doorbell: &Arc<SingleDoorbell>, id: u64, offered: &Arc<OfferedRing>) {
        let mut rings = lock(&self.rings);
        if rings.len() == rings.capacity() {
            rings.retain(|_, ring| ring.strong_count() > 0);
            let more = rings.len() + 1;
            rings.reserve(more);
        }
        rings.insert(id, Arc::downgrade(offered));
        drop(rings);
        let mut doorbells = lock(&self.doorbells);
        if doorbells.len() == doorbells.capacity() {
            doorbells.retain(|doorbell| doorbell.strong_count() > 0);
            let more = doorbells.len() + 1;
            doorbells.reserve(more);
        }
        doorbells.push(Arc::downgrade(doorbell));
    }

    /// Looks, in a child, for news of the session's end on the copy of its parent's endpoint. Messages on it are for
    /// the parent. Returns whether the memory was taken away.
    pub(crate) fn hear_news(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let inherited = lock(&self.inherited);
        let Some(Inherited { link, .. }) = &*inherited else { return false };
        let tells = if link.same_kernel() { PollFlags::RDHUP } else { PollFlags::IN };
        let mut one = [PollFd::from_borrowed_fd(link.fd(), tells)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let life = if matches!(poll(&mut one, Some(&now)), Ok(1)) { link.liveness() } else { Liveness::Running };
        if self.is_revocable && link.doorbell().is_some_and(|doorbell| doorbell.is_leaving()) {
            self.begin_to_leave();
        }
        if life.is_gone() || life == Liveness::Revoked {
            self.end();
        }
        self.is_revocable && life == Liveness::Revoked
    }

    /// Drops the copy of the endpoint in a child, where nothing needs the memory any more.
    pub(crate) fn let_go(&self) {
        drop(lock(&self.inherited).take());
    }
}

/// Returns a descriptor of this library's own for the path of the endpoint `link`.
pub(crate) fn path_of(link: &dyn Endpoint) -> Result<Arc<SessionPath>, Errno> {
    let copy = || ReservedFd::new(rustix::io::fcntl_dupfd_cloexec(link.fd(), 0)?);
    let made = aside::lifted(copy);
    let is_readable_at_end = !link.same_kernel();
    made.map(|fd| Arc::new(SessionPath { fd, is_readable_at_end }))
        .map_err(|error| error.raw_os_error().map_or(Errno::MFILE, Errno::from_raw_os_error))
}
