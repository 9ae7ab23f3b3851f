// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Calls that the kernel carries out while a connection has no pipes: what they move is counted and the beginning kept.

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
        let Self { connection, direction, candidate } = *self;
        if !candidate {
            connection.count(direction, n);
            return;
        }
        connection.worth.count_turn(direction);
        connection.count_parts(direction, n, parts);
    }

    /// Whether the bytes that a call moves are still wanted for a proof.
    #[must_use]
    pub fn remembers(&self) -> bool {
        self.candidate && self.connection.plain_calls.wants(self.direction)
    }

    /// The call moved `n` bytes that nobody here saw.
    pub fn moved_unseen(&self, n: usize) {
        self.connection.plain_calls.stop_wanting(self.direction);
        self.moved(n, std::iter::empty());
    }
}

impl Drop for Plain<'_> {
    fn drop(&mut self) {
        if self.candidate {
            self.connection.plain_calls.leave_call(self.direction);
        }
    }
}
