// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Calls that the kernel carries out while a connection has no pipes: what they move is counted and the beginning kept.

use std::sync::atomic::Ordering;

use tombolo_os::lock::lock;

use super::{Connection, Direction};

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
