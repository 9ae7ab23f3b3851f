// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the connections between two processes have in common: the path from one to the other, and its end.

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

/// What tells of the end of a session.
#[derive(Debug)]
pub struct SessionPath {
    fd: ReservedFd,
    /// It becomes readable, at the end as for messages; else it hangs up (S-17).
    is_readable_at_end: bool,
}

impl SessionPath {
    /// Whether it tells by being readable (`EPOLLIN`), and not by a hang-up (`EPOLLRDHUP`).
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

/// A child's copy of its parent's link, and what of it is watched for its end.
#[derive(Debug)]
pub(crate) struct Inherited {
    pub link: Box<dyn Endpoint>,
    pub _path: Arc<SessionPath>,
}

/// What the connections between two processes have in common.
#[derive(Debug)]
pub(crate) struct Session {
    /// The path to the peer's process, which tells when that is gone. Its owner is who has the link.
    pub path: Weak<SessionPath>,
    /// Of the connections that go over it. Only used while the links are held.
    pub doorbells: Mutex<Vec<Weak<SingleDoorbell>>>,
    /// Where rings go that the peer offers to these, by the number of this end (S-20). Likewise.
    pub rings: Mutex<HashMap<u64, Weak<OfferedRing>>>,
    /// The peer's process, or the path to it, is gone.
    pub gone: AtomicBool,
    /// Its memory may be taken away; and it will be (V-9).
    is_revocable: bool,
    /// A child made by fork has it too.
    is_inherited: bool,
    pub leaving: AtomicBool,
    /// In a child made by fork: its copy of the link, which tells of the peer's life as long as anybody here has it.
    pub inherited: Mutex<Option<Inherited>>,
}

impl Session {
    pub fn new(path: &Arc<SessionPath>, is_inherited: bool) -> Self {
        let (is_revocable, path) = (path.is_readable_at_end, Arc::downgrade(path));
        let (doorbells, rings, inherited) = Default::default();
        let (gone, leaving) = Default::default();
        Self { path, doorbells, rings, gone, is_revocable, is_inherited, leaving, inherited }
    }

    /// The peer's process, or the path to it, is gone.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// The path to the peer's process, while it is there.
    pub fn path(&self) -> Option<Arc<SessionPath>> {
        self.path.upgrade()
    }

    /// The path has ended: all who wait for a connection over it look again. While the links are held.
    pub fn end(&self) {
        if !self.gone.swap(true, Ordering::SeqCst) {
            lock(&self.doorbells)
                .drain(..)
                .filter_map(|doorbell| doorbell.upgrade())
                .for_each(|doorbell| doorbell.notify());
        }
    }

    /// Whether what goes over it is in memory that may be taken away (V-9).
    pub fn is_revocable(&self) -> bool {
        self.is_revocable
    }

    /// Whether a child made by fork has its memory.
    pub fn is_inherited(&self) -> bool {
        self.is_inherited
    }

    /// Its memory will be taken away, and its connections go back to TCP (V-9).
    #[inline]
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Its memory will be taken away: all who wait for a connection over it look again. While the links are held.
    pub fn begin_to_leave(&self) {
        if !self.leaving.swap(true, Ordering::SeqCst) {
            lock(&self.doorbells).iter().filter_map(Weak::upgrade).for_each(|doorbell| doorbell.notify());
        }
    }

    /// A ring came for the end with this number. False if that has one which it did not look at yet, none if it is not there.
    pub fn deliver_ring(&self, to: u64, generation: u16, segment: PeerSegment) -> Option<bool> {
        let offered = lock(&self.rings).get(&to).and_then(Weak::upgrade);
        offered.map(|offered| offered.put(generation, segment))
    }

    /// A connection goes over it from now on: where it is woken, its number here, and where rings for it go. While the links are
    /// held.
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

    /// In a child: hears what its parent's link tells of its end. Messages on it are the parent's. Says whether the memory was taken
    /// away.
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

    /// In a child: nothing needs the memory any more.
    pub(crate) fn let_go(&self) {
        drop(lock(&self.inherited).take());
    }
}

/// A descriptor of our own for the path of `link`.
pub(crate) fn path_of(link: &dyn Endpoint) -> Result<Arc<SessionPath>, Errno> {
    let copy = || ReservedFd::new(rustix::io::fcntl_dupfd_cloexec(link.fd(), 0)?);
    let made = aside::lifted(copy);
    let is_readable_at_end = !link.same_kernel();
    made.map(|fd| Arc::new(SessionPath { fd, is_readable_at_end }))
        .map_err(|error| error.raw_os_error().map_or(Errno::MFILE, Errno::from_raw_os_error))
}
