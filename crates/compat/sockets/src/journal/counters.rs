// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a process has counted and said so far.

use std::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering},
};

use crate::{Reason, direction::Direction, switch::Transport};

/// What a process counts.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// By direction, then by carrier: bytes.
    pub(super) bytes: [[AtomicU64; 2]; 2],
    pub joined: AtomicU64,
    pub stayed: AtomicU64,
    /// By number: connections that stayed on TCP, those included that ended while the other end was looked for.
    pub(super) reasons: [AtomicU64; Reason::COUNT],
    pub(super) told: AtomicU64,
}

impl Counters {
    pub fn move_bytes(&self, direction: Direction, carrier: Transport, n: usize) {
        self.bytes[direction as usize][carrier as usize].fetch_add(n as u64, Ordering::Relaxed);
    }

    /// A connection stays on TCP for good.
    pub fn stay(&self, reason: Reason) {
        self.stayed.fetch_add(1, Ordering::Relaxed);
        self.reasons[reason as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// What was said already.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    pub(super) trouble: Mutex<Option<String>>,
}
