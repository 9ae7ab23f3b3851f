// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The pipes of a connection, which it gets once.

use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use tombolo_domain::SingleDoorbell;

use crate::{pipes::Pipes, session::SessionPath};

/// Pipes of a connection, once it is joined, and what they show without a system call and without a lock. Before that
/// they show nothing, and no peer asks for anything.
#[derive(Debug, Default)]
pub struct JoinedPipes(OnceLock<Pipes>);

impl JoinedPipes {
    #[inline]
    pub(crate) fn get(&self) -> Option<&Pipes> {
        self.0.get()
    }

    /// Gives the connection these pipes. Returns whether it had none.
    pub(super) fn set(&self, pipes: Pipes) -> bool {
        self.0.set(pipes).is_ok()
    }

    // ---- arrivals

    /// Returns whether something happened in shared memory that makes a read worth a try: a hint.
    #[inline]
    #[must_use]
    pub fn has_unread(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.hints().has_unread())
    }

    /// Returns a position that grows with every byte that arrives in the pipe.
    #[inline]
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.get().map_or(0, |pipes| pipes.hints().arrived())
    }

    /// Returns whether the last read ended where the sender has left a transport: the other one may have more (S-15).
    #[inline]
    #[must_use]
    pub fn is_crossing(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.hints().is_crossing())
    }

    /// Returns whether the peer asks for TCP, and waits for this endpoint to look.
    #[inline]
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.hints().is_asked())
    }

    /// Keeps an error that a call met after it had moved bytes: the next call reports it, as in the kernel.
    pub fn store_error(&self, error: Errno) {
        if let Some(pipes) = self.get() {
            pipes.store_error(error);
        }
    }

    /// Returns whether nobody looks at their memory any more (S-19). The program may still have to read what the peer
    /// left there when it ended.
    #[must_use]
    pub fn have_left_memory(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.hints().is_detached())
    }

    // ---- doorbell and session

    /// Returns the doorbell that wakes the waiters of this connection, once it has pipes (S-13).
    #[must_use]
    pub fn doorbell(&self) -> Option<&Arc<SingleDoorbell>> {
        self.get().map(|pipes| &pipes.doorbell)
    }

    /// Returns the path to the peer's process, as long as it exists: to be watched for its end (`EPOLLRDHUP`) and for
    /// nothing else.
    #[must_use]
    pub fn path(&self) -> Option<Arc<SessionPath>> {
        self.get()?.session.path()
    }

    /// Returns whether the path to the peer's process is gone, perhaps with the process. No more notifications come
    /// then, and only TCP reports an end.
    #[must_use]
    pub fn are_cut_off(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.session.is_gone())
    }

    /// Returns whether the memory that carries them may be taken away (V-9).
    #[inline]
    #[must_use]
    pub fn are_revocable(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.session.is_revocable())
    }

    /// Returns whether a child made by fork has the memory that carries them.
    #[must_use]
    pub fn are_inherited(&self) -> bool {
        self.get().is_none_or(|pipes| pipes.session.is_inherited())
    }

    /// Returns whether their memory will be taken away (V-9).
    pub fn are_to_leave(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.session.is_leaving())
    }
}
