// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where threads wait: epoll instances of this library's.
//!
//! A thread that blocks for one connection sleeps at an instance of that connection, which watches its socket, its bell and the
//! path to the peer: one system call. A thread that polls several uses one of the process's, beside the descriptors that it
//! names. No instance is watched by another one, so the kernel's limits on chains of them do not count here, and nothing is
//! watched that a peer could ring for all: a path is watched for its end alone.

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

use crate::{
    connection::Connection,
    pipes::Session,
    process::{Process, lock},
};

/// What the events of an instance are about.
const PATH: u64 = 0;
const BELL: u64 = 1;
const SOCKET: u64 = 2;

/// The epoll instances that this process made, also those at which a thread waits now.
static ALL: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// The descriptor of an epoll instance. A child made by fork takes it from whoever waits there, by its copy of this.
#[derive(Debug)]
struct Shared(Mutex<Option<ReservedFd>>);

/// The instances of this process before a fork.
#[derive(Debug)]
pub struct Instances {
    all: Vec<Arc<Shared>>,
    _no_more: MutexGuard<'static, Vec<Weak<Shared>>>,
}

/// The same, which nobody is about to change while this is held.
#[derive(Debug)]
pub(crate) struct HeldInstances<'a>(Vec<MutexGuard<'a, Option<ReservedFd>>>);

impl Instances {
    /// All that there are. Nobody makes more of them while this is held.
    #[must_use]
    pub fn list() -> Self {
        let all = lock(&ALL);
        Self { all: all.iter().filter_map(Weak::upgrade).collect(), _no_more: all }
    }

    pub(crate) fn hold(&self) -> HeldInstances<'_> {
        HeldInstances(self.all.iter().map(|instance| lock(&instance.0)).collect())
    }
}

impl HeldInstances<'_> {
    /// In the child. Who waits at an instance of the parent's is not here, or was interrupted by the handler that forked. It must
    /// not share the instance with the parent: an edge that one of the two takes does not wake the other.
    pub fn forget(self) {
        self.0.into_iter().for_each(|mut instance| drop(instance.take()));
    }
}

fn watch(epoll: &ReservedFd, fd: BorrowedFd<'_>, about: u64) -> rustix::io::Result<()> {
    let events = match about {
        SOCKET => epoll::EventFlags::IN | epoll::EventFlags::RDHUP,
        BELL => epoll::EventFlags::OUT | epoll::EventFlags::ET,
        // What comes over it is for those who negotiate. Its end wakes all.
        _ => epoll::EventFlags::RDHUP | epoll::EventFlags::ET,
    };
    epoll::add(epoll, fd, epoll::EventData::new_u64(about), events)
}

/// An epoll instance, and what it watches.
#[derive(Debug)]
pub(crate) struct Instance {
    number: RawFd,
    epoll: Arc<Shared>,
    /// In the order of their addresses.
    bells: Vec<Arc<SingleDoorbell>>,
    /// Paths, as long as they are there: nothing is kept open by being watched.
    paths: Vec<Weak<ReservedFd>>,
}

impl Instance {
    fn new() -> io::Result<Self> {
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
        Ok(Self { number, epoll, bells: Vec::new(), paths: Vec::new() })
    }

    /// Whether it is this process's, and none of a parent's which forked while a thread waited there.
    fn is_own(&self) -> bool {
        lock(&self.epoll.0).is_some()
    }

    fn watch_socket(&self, fd: BorrowedFd<'_>) -> rustix::io::Result<()> {
        watch(lock(&self.epoll.0).as_ref().ok_or(Errno::BADF)?, fd, SOCKET)
    }

    /// Watches these and no others.
    fn turn_to(&mut self, bells: Vec<Arc<SingleDoorbell>>, paths: Vec<Arc<ReservedFd>>) -> rustix::io::Result<()> {
        let epoll = lock(&self.epoll.0);
        let epoll = epoll.as_ref().ok_or(Errno::BADF)?;
        let before = std::mem::take(&mut self.bells);
        before.iter().filter(|bell| !has(&bells, bell)).try_for_each(|bell| epoll::delete(epoll, bell.as_fd()))?;
        bells.iter().filter(|bell| !has(&before, bell)).try_for_each(|bell| watch(epoll, bell.as_fd(), BELL))?;
        self.bells = bells;
        let before: Vec<_> = std::mem::take(&mut self.paths).iter().filter_map(Weak::upgrade).collect();
        let has = |all: &[Arc<ReservedFd>], path: &Arc<ReservedFd>| all.iter().any(|other| Arc::ptr_eq(other, path));
        before.iter().filter(|path| !has(&paths, path)).try_for_each(|path| epoll::delete(epoll, path.as_fd()))?;
        paths.iter().filter(|path| !has(&before, path)).try_for_each(|path| watch(epoll, path.as_fd(), PATH))?;
        self.paths = paths.iter().map(Arc::downgrade).collect();
        Ok(())
    }

    fn is_for(&self, bells: &[Arc<SingleDoorbell>]) -> bool {
        self.bells.len() == bells.len() && self.bells.iter().zip(bells).all(|(one, other)| Arc::ptr_eq(one, other))
    }

    pub fn has(&self, bell: &Arc<SingleDoorbell>) -> bool {
        has(&self.bells, bell)
    }
}

/// Whether `bell` is one of `bells`, which are in the order of their addresses.
fn has(bells: &[Arc<SingleDoorbell>], bell: &Arc<SingleDoorbell>) -> bool {
    bells.binary_search_by_key(&Arc::as_ptr(bell), Arc::as_ptr).is_ok()
}

impl Process {
    /// An epoll instance for one who is about to wait for these connections: it polls readable when one of their bells rang
    /// after [`Waiter::forget`], or the path to one of their peers has ended.
    #[must_use]
    pub fn waiter<'c>(&self, connections: impl Iterator<Item = &'c Arc<Connection>>) -> Option<Waiter<'_>> {
        let connections: Vec<_> = connections.collect();
        let mut bells: Vec<_> = connections.iter().filter_map(|connection| connection.bell().cloned()).collect();
        bells.sort_by_key(Arc::as_ptr);
        bells.dedup_by_key(|bell| Arc::as_ptr(bell));
        let pooled = {
            let mut pool = lock(&self.waiters);
            let fit = pool.iter().rposition(|instance| instance.is_for(&bells));
            fit.map(|at| pool.swap_remove(at)).or_else(|| pool.pop())
        };
        let mut instance = pooled.map_or_else(|| Instance::new().ok(), Some)?;
        if !instance.is_for(&bells) {
            let mut paths: Vec<_> = connections.iter().filter_map(|connection| connection.path()).collect();
            paths.sort_by_key(Arc::as_ptr);
            paths.dedup_by_key(|path| Arc::as_ptr(path));
            instance.turn_to(bells, paths).ok()?;
        }
        Some(Waiter { process: self, instance: Some(instance) })
    }

    /// The last descriptor of `connection` is closed: nobody begins to wait for it any more.
    pub fn unwatch(&self, connection: &Connection) {
        drop(lock(&connection.seat).take());
        if let Some(bell) = connection.bell() {
            lock(&self.waiters).retain(|instance| !instance.has(bell));
        }
    }
}

/// One who waits for several connections.
#[derive(Debug)]
pub struct Waiter<'a> {
    process: &'a Process,
    instance: Option<Instance>,
}

impl Waiter<'_> {
    /// Polls readable when a bell rang since the last [`forget`](Self::forget).
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.instance.as_ref().expect("until it is dropped").number
    }

    /// R-12, A0: forgets rings that came before now.
    pub fn forget(&self) {
        let mut room = [const { std::mem::MaybeUninit::uninit() }; 16];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let instance = self.instance.as_ref().expect("until it is dropped");
        let epoll = lock(&instance.epoll.0);
        let Some(epoll) = &*epoll else { return };
        while let Ok((rung, _)) = epoll::wait(epoll, &mut room, Some(&now)) {
            if rung.iter().any(|event| event.data.u64() == PATH) {
                self.process.rang();
            }
            if rung.len() < 16 {
                break;
            }
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let instance = self.instance.take().filter(Instance::is_own);
        lock(&self.process.waiters).extend(instance);
    }
}

impl Connection {
    /// A place for a thread that is about to wait for this connection alone, which has the descriptor `fd`. None where there is no
    /// descriptor to spare.
    #[must_use]
    pub fn seat(&self, fd: BorrowedFd<'_>) -> Option<Seat<'_>> {
        let free = lock(&self.seat).take();
        let make = || -> Option<Instance> {
            let bell = self.bell()?;
            let mut instance = Instance::new().ok()?;
            instance.turn_to(vec![Arc::clone(bell)], self.path().into_iter().collect()).ok()?;
            instance.watch_socket(fd).ok()?;
            Some(instance)
        };
        let instance = free.or_else(make)?;
        Some(Seat { connection: self, instance: Some(instance) })
    }

    /// The path to the peer's process, while it is there: to be watched for its end (`EPOLLRDHUP`) and for nothing else.
    #[must_use]
    pub fn path(&self) -> Option<Arc<ReservedFd>> {
        self.pipes.get()?.line.path()
    }
}

/// A place where one thread waits for one connection, by `epoll_wait`: for whatever TCP has to say, its bell, and the end of the
/// path to its peer.
#[derive(Debug)]
pub struct Seat<'a> {
    connection: &'a Connection,
    instance: Option<Instance>,
}

impl Seat<'_> {
    /// To wait at. Rings that came before are reported too, once.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.instance.as_ref().expect("until it is dropped").number
    }

    /// An event of it came: says whether it is TCP that has something to say, which stays until it was heard.
    pub fn came(&self, process: &Process, data: u64, events: u32) -> bool {
        match data {
            SOCKET => self.connection.heard(events as i16),
            PATH => process.rang(),
            _ => {}
        }
        data == SOCKET
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let instance = self.instance.take().filter(Instance::is_own);
        let mut seat = lock(&self.connection.seat);
        // Another thread that waited for it at the same time was faster.
        let spare =
            if seat.is_none() && instance.is_some() { std::mem::replace(&mut *seat, instance) } else { instance };
        drop(seat);
        drop(spare);
    }
}

impl Session {
    /// The path to the peer's process, while it is there.
    pub fn path(&self) -> Option<Arc<ReservedFd>> {
        self.path.upgrade()
    }

    /// The path has ended: all who wait for a connection over it look again. While the links are held.
    pub fn end(&self) {
        if !self.gone.swap(true, std::sync::atomic::Ordering::SeqCst) {
            lock(&self.bells).drain(..).filter_map(|bell| bell.upgrade()).for_each(|bell| bell.notify());
        }
    }

    /// A connection goes over it from now on, whose bell this is. While the links are held.
    pub fn carries(&self, bell: &Arc<SingleDoorbell>) {
        let mut bells = lock(&self.bells);
        if bells.len() == bells.capacity() {
            bells.retain(|bell| bell.strong_count() > 0);
            let more = bells.len() + 1;
            bells.reserve(more);
        }
        bells.push(Arc::downgrade(bell));
    }
}

/// A descriptor of our own for the path that `fd` is.
pub(crate) fn path_of(fd: BorrowedFd<'_>) -> Result<Arc<ReservedFd>, Errno> {
    let copy = || ReservedFd::new(rustix::io::fcntl_dupfd_cloexec(fd, 0)?);
    let made = aside::lifted(copy);
    made.map(Arc::new).map_err(|error| error.raw_os_error().map_or(Errno::MFILE, Errno::from_raw_os_error))
}
