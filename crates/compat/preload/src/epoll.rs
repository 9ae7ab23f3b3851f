// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program's epoll sets.
//!
//! A connection that has shared memory is registered in the kernel under a token of this library, edge-triggered, and
//! the program's request is kept here. Events carry the program's data and not descriptors, and a TCP socket whose
//! bytes go another way would be writable for ever. Once the connection is registered so, the kernel is not told of
//! changes any more, because programs change their mind at each request. Other registrations are left alone. Beside the
//! socket the set has the doorbell of the connection, whose edges wake whoever sleeps in the set, and nobody else.
//!
//! This module holds what this library keeps of a set. `wiring` is what the kernel has of it, `changes` is `epoll_ctl`,
//! and `waiting` is `epoll_wait`.

pub(crate) mod changes;
mod entry;
mod registry;
pub(crate) mod replacing;
mod unseen;
pub(crate) mod waiting;
pub(crate) mod wiring;

use std::{
    ops::{Deref, DerefMut},
    os::fd::RawFd,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
};

use tombolo_sockets::{SingleDoorbell, connection::Connection};

use self::registry::Registry;
use crate::inside::{self, Inside};

/// Returns where tokens begin, a number that no program's own data is likely to have.
fn tokens() -> u64 {
    static BEGIN: OnceLock<u64> = OnceLock::new();
    *BEGIN.get_or_init(|| {
        let mut bytes = [0; 4];
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        u64::from(u32::from_ne_bytes(bytes) | 1 << 31) << 32
    })
}

/// Returns the token of the paths to peers.
fn path() -> u64 {
    tokens()
}

/// Returns the token of the set's own doorbell.
fn kick() -> u64 {
    tokens() + 1
}

/// Number of threads of this process that are about to sleep in any set, or do.
static ASLEEP: AtomicUsize = AtomicUsize::new(0);

/// Wakes a thread that sleeps in a set, after a call found too little room and its program goes on. The thread has
/// asked its peer for what was missing before it slept. It looks again, and asks for room.
pub(crate) fn found_no_room(connection: &Connection) {
    // ORDER SeqCst: a thread counts itself asleep before its last look, and what fills the ring was published before
    // this.
    if ASLEEP.load(Ordering::SeqCst) > 0 && connection.wiring.is_wired() {
        connection.pipes.doorbell().inspect(|doorbell| doorbell.notify());
    }
}

/// An epoll set of the program's.
#[derive(Debug, Default)]
pub(crate) struct Set {
    inner: Mutex<Registry>,
    /// Number of registrations of connections; below, how many of them are wired.
    entries: AtomicUsize,
    wired: AtomicUsize,
    /// Whether the set's own doorbell is in the set.
    doorbells: AtomicBool,
    /// Doorbell that wakes the threads that sleep in the set.
    doorbell: OnceLock<SingleDoorbell>,
    /// Number of threads that are about to sleep in the set, or do.
    asleep: AtomicUsize,
    /// Whether the set is in another set, or polled: then threads sleep for it elsewhere.
    nested: AtomicBool,
    /// Side that had all the room of the last call (`waiting::Crowd`).
    crowd: AtomicU8,
    /// Number of decisions (`Journal::decided`) when the entries were last gone through.
    decided: AtomicU64,
}

/// The registry of a set, for the holder of its lock.
struct Locked<'a> {
    inner: MutexGuard<'a, Registry>,
    _inside: Inside,
}

impl Deref for Locked<'_> {
    type Target = Registry;

    fn deref(&self) -> &Registry {
        &self.inner
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Registry {
        &mut self.inner
    }
}

impl Set {
    fn lock(&self) -> Locked<'_> {
        let inside = inside::enter();
        Locked { inner: self.inner.lock().unwrap_or_else(PoisonError::into_inner), _inside: inside }
    }

    fn count(&self, inner: &Registry) {
        self.entries.store(inner.all().len(), Ordering::SeqCst);
        self.wired.store(inner.all().iter().filter(|entry| entry.wired).count(), Ordering::SeqCst);
    }

    /// Wakes the threads that sleep for this set, after a change that they did not see.
    fn changed(&self) {
        // ORDER SeqCst: a thread counts itself asleep before its last look, and the change was made before this.
        if self.asleep.load(Ordering::SeqCst) > 0 || self.nested.load(Ordering::SeqCst) {
            self.kick();
        }
    }

    /// Makes the threads that sleep in the set look again.
    fn kick(&self) {
        self.doorbell.get().inspect(|doorbell| doorbell.notify());
    }

    /// Returns whether something is left in shared memory.
    fn has_unread(&self) -> bool {
        self.lock().all().iter().any(|entry| entry.wired && entry.connection.pipes.has_unread())
    }
}

/// Applies what was asked for before `fd` was connected to `connection`. Returns whether that comes too late.
pub(crate) fn adopt(set: &Set, fd: RawFd, connection: &Arc<Connection>) -> bool {
    let mut guard = set.lock();
    let inner = &mut *guard;
    let Some(event) = inner.registered(fd) else { return false };
    if inner.find(fd, connection).is_none() {
        let at = inner.push(fd, connection, tokens());
        inner.wake(at).ask(event);
        set.count(inner);
    }
    connection.wiring.is_wired()
}

/// Locks these sets. While the result is held nobody changes them, nor is in the middle of a first use of anything
/// here.
pub(crate) fn hold(sets: &[(RawFd, Arc<Set>)]) -> Vec<impl Sized + '_> {
    let _ = tokens();
    sets.iter().map(|(_, set)| set.lock()).collect()
}

/// Makes the child of a fork, which has the parent's sets and what they watch, look at everything once.
pub(crate) fn inherit(sets: &[(RawFd, Arc<Set>)]) {
    // The parent's sleeping threads are not in this process.
    ASLEEP.store(0, Ordering::SeqCst);
    for (_, set) in sets {
        set.asleep.store(0, Ordering::SeqCst);
        let _ = set.lock().wake_all();
    }
}
