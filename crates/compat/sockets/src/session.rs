// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the connections between two processes have in common: the path from one to the other, and its end.

use std::{
    collections::HashMap,
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::io::Errno;
use tombolo_domain::{
    Endpoint, SingleDoorbell,
    aside::{self, ReservedFd},
};
use tombolo_mem::PeerSegment;
use tombolo_os::lock::lock;

use crate::offered_ring::OfferedRing;

/// A child's copy of its parent's link, and what of it is watched for its end.
#[derive(Debug)]
pub(crate) struct Inherited {
    pub link: Box<dyn Endpoint>,
    pub _path: Arc<ReservedFd>,
}

/// What the connections between two processes have in common.
#[derive(Debug)]
pub(crate) struct Session {
    /// The path to the peer's process, which tells when that is gone. Its owner is who has the link.
    pub path: Weak<ReservedFd>,
    /// Of the connections that go over it. Only used while the links are held.
    pub bells: Mutex<Vec<Weak<SingleDoorbell>>>,
    /// S-20. Where rings go that the peer offers to these, by the number of this end. Likewise.
    pub rings: Mutex<HashMap<u64, Weak<OfferedRing>>>,
    /// The peer's process, or the path to it, is gone.
    pub gone: AtomicBool,
    /// In a child made by fork: its copy of the link, which tells of the peer's life as long as anybody here has it.
    pub inherited: Mutex<Option<Inherited>>,
}

impl Session {
    pub fn new(path: &Arc<ReservedFd>) -> Self {
        let path = Arc::downgrade(path);
        let (bells, rings, inherited) = Default::default();
        Self { path, bells, rings, gone: AtomicBool::new(false), inherited }
    }

    /// The peer's process, or the path to it, is gone.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// The path to the peer's process, while it is there.
    pub fn path(&self) -> Option<Arc<ReservedFd>> {
        self.path.upgrade()
    }

    /// The path has ended: all who wait for a connection over it look again. While the links are held.
    pub fn end(&self) {
        if !self.gone.swap(true, Ordering::SeqCst) {
            lock(&self.bells).drain(..).filter_map(|bell| bell.upgrade()).for_each(|bell| bell.notify());
        }
    }

    /// A ring came for the end with this number.
    pub fn deliver_ring(&self, to: u64, generation: u16, segment: PeerSegment) {
        if let Some(offered) = lock(&self.rings).get(&to).and_then(Weak::upgrade) {
            offered.put(generation, segment);
        }
    }

    /// A connection goes over it from now on: where it is woken, its number here, and where rings for it go. While the links are
    /// held.
    pub fn carries(&self, bell: &Arc<SingleDoorbell>, id: u64, offered: &Arc<OfferedRing>) {
        let mut rings = lock(&self.rings);
        if rings.len() == rings.capacity() {
            rings.retain(|_, ring| ring.strong_count() > 0);
            let more = rings.len() + 1;
            rings.reserve(more);
        }
        rings.insert(id, Arc::downgrade(offered));
        drop(rings);
        let mut bells = lock(&self.bells);
        if bells.len() == bells.capacity() {
            bells.retain(|bell| bell.strong_count() > 0);
            let more = bells.len() + 1;
            bells.reserve(more);
        }
        bells.push(Arc::downgrade(bell));
    }

    /// In a child: whether the peer is gone by now, as its parent's link tells. Messages on it are the parent's.
    pub(crate) fn peer_is_gone(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        if let Some(Inherited { link, .. }) = &*lock(&self.inherited) {
            let mut one = [PollFd::from_borrowed_fd(link.fd(), PollFlags::RDHUP)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let hung_up = matches!(poll(&mut one, Some(&now)), Ok(1));
            if hung_up && link.liveness().is_gone() {
                self.end();
            }
        }
        self.gone.load(Ordering::SeqCst)
    }
}

/// A descriptor of our own for the path that `fd` is.
pub(crate) fn path_of(fd: BorrowedFd<'_>) -> Result<Arc<ReservedFd>, Errno> {
    let copy = || ReservedFd::new(rustix::io::fcntl_dupfd_cloexec(fd, 0)?);
    let made = aside::lifted(copy);
    made.map(Arc::new).map_err(|error| error.raw_os_error().map_or(Errno::MFILE, Errno::from_raw_os_error))
}
