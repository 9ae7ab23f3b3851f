// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Epoll instances: the descriptors that each watches, and all instances of the process before a fork.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use rustix::{event::epoll, io::Errno};
use tombolo_domain::{
    SingleDoorbell,
    aside::{self, ReservedFd},
};
use tombolo_os::lock::lock;

use crate::session::SessionPath;

/// Sources of an instance's events.
pub(super) const PATH: u64 = 0;
const DOORBELL: u64 = 1;
pub(super) const SOCKET: u64 = 2;

/// Epoll instances that this process made, also those at which a thread waits now.
static ALL: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Descriptor of an epoll instance. A child made by fork takes it from the threads that wait there, by its copy of
/// this.
#[derive(Debug)]
pub(super) struct Shared(pub(super) Mutex<Option<ReservedFd>>);

/// Instances of this process before a fork.
#[derive(Debug)]
pub struct Instances {
    all: Vec<Arc<Shared>>,
    _no_more: MutexGuard<'static, Vec<Weak<Shared>>>,
}

/// The same instances, locked so that no thread changes them.
#[derive(Debug)]
pub(crate) struct HeldInstances<'a>(Vec<MutexGuard<'a, Option<ReservedFd>>>);

impl Instances {
    /// Returns all instances. No thread makes more of them while the result is held.
    #[must_use]
    pub fn list() -> Self {
        let all = lock(&ALL);
        Self { all: all.iter().filter_map(Weak::upgrade).collect(), _no_more: all }
    }

    pub(crate) fn lock_instances(&self) -> HeldInstances<'_> {
        HeldInstances(self.all.iter().map(|instance| lock(&instance.0)).collect())
    }
}

impl HeldInstances<'_> {
    /// Drops the instances in the child. A thread that waits at one of the parent's is not here, or was interrupted by
    /// the handler that forked. It must not share the instance with the parent: an edge that one of the two takes does
    /// not wake the other.
    pub fn forget(self) {
        self.0.into_iter().for_each(|mut instance| drop(instance.take()));
    }
}

fn watch_doorbell(epoll: &ReservedFd, doorbell: &SingleDoorbell) -> rustix::io::Result<()> {
    let notified = if doorbell.is_shared() { epoll::EventFlags::IN } else { epoll::EventFlags::OUT };
    watch(epoll, doorbell.as_fd(), DOORBELL, notified | epoll::EventFlags::ET)
}

/// Watches a path for its end, which wakes all waiters. Messages over it are for the negotiation.
fn watch_path(epoll: &ReservedFd, path: &SessionPath) -> rustix::io::Result<()> {
    let told = if path.is_readable_at_end() { epoll::EventFlags::IN } else { epoll::EventFlags::RDHUP };
    watch(epoll, path.as_fd(), PATH, told | epoll::EventFlags::ET)
}

fn watch(epoll: &ReservedFd, fd: BorrowedFd<'_>, about: u64, events: epoll::EventFlags) -> rustix::io::Result<()> {
    epoll::add(epoll, fd, epoll::EventData::new_u64(about), events)
}

/// An epoll instance, and what it watches.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(super) number: RawFd,
    pub(super) epoll: Arc<Shared>,
    /// Doorbells, in the order of their addresses.
    doorbells: Vec<Arc<SingleDoorbell>>,
    /// Paths, as long as they exist: to be watched keeps none of them open.
    paths: Vec<Weak<SessionPath>>,
}

impl Instance {
    pub(super) fn new() -> io::Result<Self> {
        let made = aside::lifted(|| ReservedFd::new(epoll::create(epoll::CreateFlags::CLOEXEC)?))?;
        let (number, epoll) = (made.as_raw_fd(), Arc::new(Shared(Mutex::new(Some(made)))));
        let mut all = lock(&ALL);
        if all.len() == all.capacity() {
            all.retain(|instance| instance.strong_count() > 0);
            let more = all.len() + 1;
            all.reserve(more);
        }
        all.push(Arc::downgrade(&epoll));
        drop(all);
        Ok(Self { number, epoll, doorbells: Vec::new(), paths: Vec::new() })
    }

    /// Returns whether it is this process's, and not one of a parent that forked while a thread waited there.
    pub(super) fn is_own(&self) -> bool {
        lock(&self.epoll.0).is_some()
    }

    pub(super) fn watch_socket(&self, fd: BorrowedFd<'_>) -> rustix::io::Result<()> {
        watch(
            lock(&self.epoll.0).as_ref().ok_or(Errno::BADF)?,
            fd,
            SOCKET,
            epoll::EventFlags::IN | epoll::EventFlags::RDHUP,
        )
    }

    /// Watches these doorbells and paths, and no others.
    pub(super) fn turn_to(
        &mut self,
        doorbells: Vec<Arc<SingleDoorbell>>,
        paths: Vec<Arc<SessionPath>>,
    ) -> rustix::io::Result<()> {
        let epoll = lock(&self.epoll.0);
        let epoll = epoll.as_ref().ok_or(Errno::BADF)?;
        let before = std::mem::take(&mut self.doorbells);
        before
            .iter()
            .filter(|doorbell| !has(&doorbells, doorbell))
            .try_for_each(|doorbell| epoll::delete(epoll, doorbell.as_fd()))?;
        doorbells
            .iter()
            .filter(|doorbell| !has(&before, doorbell))
            .try_for_each(|doorbell| watch_doorbell(epoll, doorbell))?;
        self.doorbells = doorbells;
        let before: Vec<_> = std::mem::take(&mut self.paths).iter().filter_map(Weak::upgrade).collect();
        let has = |all: &[Arc<SessionPath>], path: &Arc<SessionPath>| all.iter().any(|other| Arc::ptr_eq(other, path));
        before.iter().filter(|path| !has(&paths, path)).try_for_each(|path| epoll::delete(epoll, path.as_fd()))?;
        paths.iter().filter(|path| !has(&before, path)).try_for_each(|path| watch_path(epoll, path))?;
        self.paths = paths.iter().map(Arc::downgrade).collect();
        Ok(())
    }

    pub(super) fn is_for(&self, doorbells: &[Arc<SingleDoorbell>]) -> bool {
        self.doorbells.len() == doorbells.len()
            && self.doorbells.iter().zip(doorbells).all(|(one, other)| Arc::ptr_eq(one, other))
    }

    pub fn has(&self, doorbell: &Arc<SingleDoorbell>) -> bool {
        has(&self.doorbells, doorbell)
    }
}

/// Returns whether `doorbell` is one of `doorbells`, which are in the order of their addresses.
fn has(doorbells: &[Arc<SingleDoorbell>], doorbell: &Arc<SingleDoorbell>) -> bool {
    doorbells.binary_search_by_key(&Arc::as_ptr(doorbell), Arc::as_ptr).is_ok()
}
