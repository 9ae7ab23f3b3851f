// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Calls that the kernel carries out while a connection has no pipes: what they move is counted and the beginning kept.

use std::{io::IoSliceMut, sync::atomic::Ordering};

use tombolo_os::lock::lock;

use super::{Connection, Direction};
use crate::{
    kernel::{Kernel, Sample},
    proof::HISTORY,
};

/// A kernel call of the program that moves bytes, while it lasts.
#[derive(Debug)]
pub struct Plain<'a> {
    connection: &'a Connection,
    direction: Direction,
    /// The connection may come to be joined: it was counted as a call that is inside.
    candidate: bool,
}

impl<'a> Plain<'a> {
    pub(super) fn new(connection: &'a Connection, direction: Direction, candidate: bool) -> Self {
        Self { connection, direction, candidate }
    }

    /// The call moved these bytes: `n` of them, from or to the beginning of the parts.
    pub fn moved<'p>(&self, n: usize, parts: impl Iterator<Item = &'p [u8]>) {
        let connection = self.connection;
        if !self.candidate {
            connection.count(self.direction, n);
            return;
        }
        let turn = self.direction as u8;
        if connection.last.load(Ordering::Relaxed) != turn {
            connection.last.store(turn, Ordering::Relaxed);
            connection.turns.fetch_add(1, Ordering::Relaxed);
        }
        let position = connection.count(self.direction, n);
        if connection.remembers[self.direction as usize].load(Ordering::Relaxed) {
            self.remember(position, n, parts);
        }
    }

    /// Whether the bytes that a call moves are still wanted for a proof.
    #[must_use]
    pub fn remembers(&self) -> bool {
        self.candidate && self.connection.remembers[self.direction as usize].load(Ordering::Relaxed)
    }

    /// The call moved `n` bytes that nobody here saw.
    pub fn moved_unseen(&self, n: usize) {
        self.connection.remembers[self.direction as usize].store(false, Ordering::Relaxed);
        self.moved(n, std::iter::empty());
    }

    fn remember<'p>(&self, mut position: u64, n: usize, parts: impl Iterator<Item = &'p [u8]>) {
        let mut guard = lock(&self.connection.history);
        let Some(history) = guard.as_deref_mut() else { return };
        let (mut left, mut wanted) = (n, true);
        for part in parts {
            let taken = &part[..part.len().min(left)];
            left -= taken.len();
            wanted &= match self.direction {
                Direction::Out => history.sent(position, taken),
                Direction::In => history.received(position, taken),
            };
            position += taken.len() as u64;
        }
        self.connection.remembers[self.direction as usize].store(wanted, Ordering::Relaxed);
    }
}

impl Drop for Plain<'_> {
    fn drop(&mut self) {
        if self.candidate {
            self.connection.inside[self.direction as usize].fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Connection {
    /// S-6. Keeps the beginning of what the kernel had received when it was `seen`, and the program has not read: that it may leave
    /// for later, or for good.
    pub(crate) fn remember_unread(&self, kernel: &dyn Kernel, seen: &Sample) {
        let mut guard = lock(&self.history);
        let Some(history) = guard.as_deref_mut() else { return };
        let known = u64::from(history.known()[Direction::In as usize]);
        if seen.unread == 0 || known >= seen.counts.received.min(HISTORY as u64) {
            return;
        }
        let mut unread = [0; HISTORY];
        let Ok(n) = kernel.recv(self.fd(), &mut [IoSliceMut::new(&mut unread)], true) else { return };
        // Where somebody has read meanwhile, they may stand further on.
        if kernel.counts(self.fd(), self.dialled).is_some_and(|now| now.read() == seen.read()) {
            history.received(seen.read(), &unread[..n]);
        }
    }
}
