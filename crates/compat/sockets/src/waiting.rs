// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Epoll instances of this library, at which threads wait.
//!
//! A thread that blocks for one connection sleeps at an instance of that connection, which watches its socket, its
//! doorbell and the path to the peer: one system call. A thread that polls several connections uses an instance of the
//! process, beside the descriptors that it names. No instance is watched by another one, so the kernel's limits on
//! chains of them do not apply. Nothing is watched by which a peer could wake all threads: a path is watched for its
//! end alone.

mod instance;
mod seats;

use std::{
    os::fd::{BorrowedFd, RawFd},
    sync::{Arc, Mutex, MutexGuard},
};

use rustix::event::epoll;
use tombolo_os::lock::lock;

use crate::{connection::Connection, exchange::Exchange};
use instance::{PATH, SOCKET};

pub use instance::Instances;
pub(crate) use instance::{HeldInstances, Instance};
pub(crate) use seats::Seats;

/// Epoll instances of this process at which a thread waits for several connections, while no thread uses them.
#[derive(Debug, Default)]
pub struct WaiterPool(Mutex<Vec<Instance>>);

/// The same instances, locked while the process forks.
pub(crate) struct HeldWaiters<'a>(MutexGuard<'a, Vec<Instance>>);

impl WaiterPool {
    /// Returns an epoll instance for a thread that is about to wait for these connections. It polls readable when one
    /// of their doorbells was notified after [`Waiter::forget`], or the path to one of their peers has ended.
    #[must_use]
    pub fn find_waiter<'c>(&self, connections: impl Iterator<Item = &'c Arc<Connection>>) -> Option<Waiter<'_>> {
        let connections: Vec<_> = connections.collect();
        let mut doorbells: Vec<_> =
            connections.iter().filter_map(|connection| connection.pipes.doorbell().cloned()).collect();
        doorbells.sort_by_key(Arc::as_ptr);
        doorbells.dedup_by_key(|doorbell| Arc::as_ptr(doorbell));
        let pooled = {
            let mut pool = lock(&self.0);
            let fit = pool.iter().rposition(|instance| instance.is_for(&doorbells));
            fit.map(|at| pool.swap_remove(at)).or_else(|| pool.pop())
        };
        let mut instance = pooled.map_or_else(|| Instance::new().ok(), Some)?;
        if !instance.is_for(&doorbells) {
            let mut paths: Vec<_> = connections.iter().filter_map(|connection| connection.pipes.path()).collect();
            paths.sort_by_key(Arc::as_ptr);
            paths.dedup_by_key(|path| Arc::as_ptr(path));
            instance.turn_to(doorbells, paths).ok()?;
        }
        Some(Waiter { pool: self, instance: Some(instance) })
    }

    /// Removes `connection`, whose last descriptor is closed, so that no thread begins to wait for it any more.
    pub fn unwatch(&self, connection: &Connection) {
        connection.seats.clear();
        if let Some(doorbell) = connection.pipes.doorbell() {
            lock(&self.0).retain(|instance| !instance.has(doorbell));
        }
    }

    pub(crate) fn hold_all(&self) -> HeldWaiters<'_> {
        HeldWaiters(lock(&self.0))
    }
}

impl HeldWaiters<'_> {
    /// Drops the instances in the child: they are the parent's.
    pub fn forget(mut self) {
        self.0.clear();
    }
}

/// A thread that waits for several connections.
#[derive(Debug)]
pub struct Waiter<'a> {
    pool: &'a WaiterPool,
    instance: Option<Instance>,
}

impl Waiter<'_> {
    /// Returns a descriptor that polls readable when a doorbell was notified since the last [`forget`](Self::forget).
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.instance.as_ref().expect("until it is dropped").number
    }

    /// Forgets notifications that came before now (R-12, A0).
    pub fn forget(&self, exchange: &Exchange) {
        let mut room = [const { std::mem::MaybeUninit::uninit() }; 16];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let instance = self.instance.as_ref().expect("until it is dropped");
        let epoll = lock(&instance.epoll.0);
        let Some(epoll) = &*epoll else { return };
        while let Ok((notified, _)) = epoll::wait(epoll, &mut room, Some(&now)) {
            if notified.iter().any(|event| event.data.u64() == PATH) {
                exchange.mark_notified();
            }
            if notified.len() < 16 {
                break;
            }
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let instance = self.instance.take().filter(Instance::is_own);
        lock(&self.pool.0).extend(instance);
    }
}

/// A place where one thread waits for one connection by `epoll_wait`: for whatever TCP reports, its doorbell, and the
/// end of the path to its peer.
#[derive(Debug)]
pub struct Seat<'a> {
    connection: &'a Connection,
    instance: Option<Instance>,
}

impl<'a> Seat<'a> {
    /// Returns a place for a thread that is about to wait for this connection alone, which has the descriptor `fd`.
    /// Returns `None` where no descriptor is available.
    #[must_use]
    pub fn of(connection: &'a Connection, fd: BorrowedFd<'_>) -> Option<Self> {
        let make = || -> Option<Instance> {
            let doorbell = connection.pipes.doorbell()?;
            let mut instance = Instance::new().ok()?;
            instance.turn_to(vec![Arc::clone(doorbell)], connection.pipes.path().into_iter().collect()).ok()?;
            instance.watch_socket(fd).ok()?;
            Some(instance)
        };
        let instance = connection.seats.find_free().or_else(make)?;
        Some(Self { connection, instance: Some(instance) })
    }

    /// Returns the descriptor to wait at. Notifications that came before are reported too, once.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.instance.as_ref().expect("until it is dropped").number
    }

    /// Returns whether it is this process's, and not one of a parent that forked since it was taken.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.instance.as_ref().is_some_and(Instance::is_own)
    }

    /// Handles an event of it. Returns whether TCP has something to report, which stays until it was read.
    pub fn came(&self, exchange: &Exchange, data: u64, events: u32) -> bool {
        match data {
            SOCKET => self.connection.ending.note_events(events as i16),
            PATH => exchange.mark_notified(),
            _ => {}
        }
        data == SOCKET
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let instance = self.instance.take().filter(Instance::is_own);
        self.connection.seats.put_back(instance);
    }
}
