// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counts the bytes that went through the pipes of a connection.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::direction::Direction;

/// Bytes of the program that this process moved through the pipes, for each direction.
#[derive(Debug, Default)]
pub(crate) struct PipedBytes([AtomicU64; 2]);

impl PipedBytes {
    /// Counts bytes that were moved. Returns the number including these.
    #[inline]
    pub fn count(&self, direction: Direction, bytes: usize) -> u64 {
        self.0[direction as usize].fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64
    }

    /// Returns the same counts, for the endpoint that takes the place of this one.
    pub fn begin_anew(&self) -> Self {
        Self(Direction::BOTH.map(|direction| AtomicU64::new(self.counted(direction))))
    }

    pub fn counted(&self, direction: Direction) -> u64 {
        self.0[direction as usize].load(Ordering::Relaxed)
    }
}
