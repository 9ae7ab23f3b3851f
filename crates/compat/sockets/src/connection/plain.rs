// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Calls that the kernel carries out while a connection has no pipes: counts their bytes and keeps the beginning.

use super::{Connection, Direction};

/// A kernel call of the program that moves bytes, while it lasts.
#[derive(Debug)]
pub struct Plain<'a> {
    connection: &'a Connection,
    direction: Direction,
    /// Whether the connection may still be joined, so that this call was counted as one inside the kernel.
    candidate: bool,
}

impl<'a> Plain<'a> {
    pub(super) fn new(connection: &'a Connection, direction: Direction, candidate: bool) -> Self {
        Self { connection, direction, candidate }
    }

    /// Notes that the call moved `n` bytes, from or to the beginning of the parts.
    pub fn moved<'p>(&self, n: usize, parts: impl Iterator<Item = &'p [u8]>) {
        let Self { connection, direction, candidate } = *self;
        if !candidate {
            connection.count(direction, n);
            return;
        }
        connection.worth.count_turn(direction);
        connection.count_parts(direction, n, parts);
    }

    /// Returns whether the bytes that the call moves are still wanted for a proof.
    #[must_use]
    pub fn remembers(&self) -> bool {
        self.candidate && self.connection.plain_calls.wants(self.direction)
    }

    /// Notes that the call moved `n` bytes that this library did not see.
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
