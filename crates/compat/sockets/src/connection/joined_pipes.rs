// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The pipes of a connection, which it gets once.

use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use tombolo_domain::SingleDoorbell;

use crate::{pipes::Pipes, session::SessionPath};

/// The pipes of a connection, once it is joined, and what they show without a call of the kernel's and without a lock. Before that
/// nothing is in them and nobody asks for anything.
#[derive(Debug, Default)]
pub struct JoinedPipes(OnceLock<Pipes>);

impl JoinedPipes {
    #[inline]
    pub(crate) fn get(&self) -> Option<&Pipes> {
        self.0.get()
    }

    /// The connection gets these. Says whether it had none.
    pub(super) fn set(&self, pipes: Pipes) -> bool {
        self.0.set(pipes).is_ok()
    }

    // ---- what may have come

    /// Whether something happened in shared memory that makes a read worth a try: a hint.
    #[inline]
    #[must_use]
    pub fn has_unread(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.hints().has_unread())
    }

    /// A position that grows with every byte that arrives in the pipe.
    #[inline]
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.get().map_or(0, |pipes| pipes.hints().arrived())
    }

    /// Whether the last read ended where the sender has left a transport: there may be more on the other one (S-15).
    #[inline]
    #[must_use]
    pub fn is_crossing(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.hints().is_crossing())
    }

    /// Whether the peer asks for TCP, and waits for this end to look.
    #[inline]
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.hints().is_asked())
    }

    /// A call that has given bytes met this error: the next one gives it, as in the kernel.
    pub fn store_error(&self, error: Errno) {
        if let Some(pipes) = self.get() {
            pipes.store_error(error);
        }
    }

    /// Whether nobody looks at their memory any more (S-19). What the peer had left there before it ended the program may have to read
    /// still.
    #[must_use]
    pub fn have_left_memory(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.hints().is_detached())
    }

    // ---- whom they lead to

    /// Where who waits for this connection is woken, once it has pipes (S-13).
    #[must_use]
    pub fn doorbell(&self) -> Option<&Arc<SingleDoorbell>> {
        self.get().map(|pipes| &pipes.doorbell)
    }

    /// The path to the peer's process, while it is there: to be watched for its end (`EPOLLRDHUP`) and for nothing else.
    #[must_use]
    pub fn path(&self) -> Option<Arc<SessionPath>> {
        self.get()?.session.path()
    }

    /// The way to the peer's process is gone, perhaps with it: there will be no more notifications, and no end is told but by TCP.
    #[must_use]
    pub fn are_cut_off(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.session.is_gone())
    }

    /// Whether the memory that carries them may be taken away (V-9).
    #[inline]
    #[must_use]
    pub fn are_revocable(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.session.is_revocable())
    }

    /// Whether a child made by fork has the memory that carries them.
    #[must_use]
    pub fn are_inherited(&self) -> bool {
        self.get().is_none_or(|pipes| pipes.session.is_inherited())
    }

    /// Whether their memory will be taken away (V-9).
    pub fn are_to_leave(&self) -> bool {
        self.get().is_some_and(|pipes| pipes.session.is_leaving())
    }
}
