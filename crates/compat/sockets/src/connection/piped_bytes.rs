// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bytes that went through the pipes of a connection.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::direction::Direction;

/// Bytes of the program that this process moved through the pipes, of each direction.
#[derive(Debug, Default)]
pub(crate) struct PipedBytes([AtomicU64; 2]);

impl PipedBytes {
    /// So many went. Says how many there are by now.
    #[inline]
    pub fn count(&self, direction: Direction, bytes: usize) -> u64 {
        self.0[direction as usize].fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64
    }

    /// The same, of an end that takes the place of this one.
    pub fn begin_anew(&self) -> Self {
        Self(Direction::BOTH.map(|direction| AtomicU64::new(self.counted(direction))))
    }

    pub fn counted(&self, direction: Direction) -> u64 {
        self.0[direction as usize].load(Ordering::Relaxed)
    }
}
