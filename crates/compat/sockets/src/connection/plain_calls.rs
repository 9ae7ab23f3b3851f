// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tracks the calls that the kernel carries out while a connection is a candidate, and keeps what a proof needs of
//! them.

use std::{
    io::IoSliceMut,
    os::fd::RawFd,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use tombolo_os::lock::lock;

use crate::{
    direction::Direction,
    kernel::{Kernel, Sample},
    proof::{HISTORY, History},
};

/// Calls that move bytes by the kernel now, and the beginning of what each direction has carried. Once it is decided
/// that the connection is joined, or never will be, nothing is kept; one that may be joined anew keeps it (S-22).
#[derive(Debug)]
pub(crate) struct PlainCalls {
    /// Number of threads inside a kernel call that moves bytes, for each direction.
    inside: [AtomicU32; 2],
    history: Mutex<Option<Box<History>>>,
    /// Whether the history still wants bytes of each direction.
    wants: [AtomicBool; 2],
}

impl PlainCalls {
    pub(super) fn new() -> Self {
        Self {
            inside: [const { AtomicU32::new(0) }; 2],
            history: Mutex::new(Some(Box::default())),
            wants: [const { AtomicBool::new(true) }; 2],
        }
    }

    /// Returns the state for the connection that takes this one's place, with what was kept.
    pub(super) fn begin_anew(&self) -> Self {
        Self {
            inside: [const { AtomicU32::new(0) }; 2],
            history: Mutex::new(lock(&self.history).take()),
            wants: [0, 1].map(|at: usize| AtomicBool::new(self.wants[at].load(Ordering::Relaxed))),
        }
    }

    // ---- calls

    pub(super) fn enter_call(&self, direction: Direction) {
        // ORDER SeqCst: a thread that joins stores the stage and then looks at `inside`; one that enters looks at the
        // stage after this. One of the two sees the other.
        self.inside[direction as usize].fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn leave_call(&self, direction: Direction) {
        self.inside[direction as usize].fetch_sub(1, Ordering::SeqCst);
    }

    pub fn is_inside(&self, direction: Direction) -> bool {
        self.inside[direction as usize].load(Ordering::SeqCst) != 0
    }

    /// Forgets the calls in a child made by fork: other threads of its parent were in them, and none is here.
    pub fn forget_calls(&self) {
        self.inside.iter().for_each(|inside| inside.store(0, Ordering::SeqCst));
    }

    // ---- history

    /// Returns whether more of the beginning of this direction is wanted.
    pub(super) fn wants(&self, direction: Direction) -> bool {
        self.wants[direction as usize].load(Ordering::Relaxed)
    }

    /// Returns whether a call is under way that sends some of the beginning, which is kept once it returns.
    pub fn is_beginning_under_way(&self) -> bool {
        self.is_inside(Direction::Out) && self.wants(Direction::Out)
    }

    /// Stops keeping bytes of this direction after some that this library did not see: what comes later is not its
    /// beginning.
    pub fn stop_wanting(&self, direction: Direction) {
        self.wants[direction as usize].store(false, Ordering::Relaxed);
    }

    /// Keeps the first `n` bytes of the parts, which went in this direction from `position` on.
    pub(super) fn remember<'p>(
        &self,
        direction: Direction,
        mut position: u64,
        n: usize,
        parts: impl Iterator<Item = &'p [u8]>,
    ) {
        let mut guard = lock(&self.history);
        let Some(history) = guard.as_deref_mut() else { return };
        let (mut left, mut wanted) = (n, true);
        for part in parts {
            let taken = &part[..part.len().min(left)];
            left -= taken.len();
            wanted &= match direction {
                Direction::Out => history.sent(position, taken),
                Direction::In => history.received(position, taken),
            };
            position += taken.len() as u64;
        }
        self.wants[direction as usize].store(wanted, Ordering::Relaxed);
    }

    /// Keeps the beginning of what the kernel had received when it was `seen` and the program has not read. The program
    /// may read it later, or never (S-6).
    pub fn remember_unread(&self, kernel: &dyn Kernel, fd: RawFd, dialled: bool, seen: &Sample) {
        let mut guard = lock(&self.history);
        let Some(history) = guard.as_deref_mut() else { return };
        let known = u64::from(history.known()[Direction::In as usize]);
        if seen.unread == 0 || known >= seen.counts.received.min(HISTORY as u64) {
            return;
        }
        let mut unread = [0; HISTORY];
        let Ok(n) = kernel.recv(fd, &mut [IoSliceMut::new(&mut unread)], true) else { return };
        // If another thread has read meanwhile, these bytes may begin at a later position.
        if kernel.counts(fd, dialled).is_some_and(|now| now.read() == seen.read()) {
            history.received(seen.read(), &unread[..n]);
        }
    }

    pub fn with_history<T>(&self, f: impl FnOnce(&History) -> T) -> T {
        let history = lock(&self.history);
        match history.as_deref() {
            Some(history) => f(history),
            None => f(&History::default()),
        }
    }

    /// Drops the history once it is decided that no proof comes any more.
    pub(super) fn forget_history(&self) {
        *lock(&self.history) = None;
        Direction::BOTH.into_iter().for_each(|direction| self.stop_wanting(direction));
    }

    /// Locks the history: no other thread looks at it while the result is held.
    pub fn hold_history(&self) -> MutexGuard<'_, Option<Box<History>>> {
        lock(&self.history)
    }
}
