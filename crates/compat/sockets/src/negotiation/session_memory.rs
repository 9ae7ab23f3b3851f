// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The memory that all connections of a session between two kernels share: how many they are, and what each may have (S-18, S-20).

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use tombolo_layout::limits;

use crate::connection::Connection;

/// How long a session without room is left alone.
const FULL: Duration = Duration::from_secs(1);
/// How many connections share the memory at most where there is room for rings that grow. The other handles (V-6) are for those.
const MOST_SHARERS: usize = 48;
/// Bytes of a first ring, which has no more than one of so many parts of the memory.
const FIRST_RING: u64 = 16 << 10;
const PARTS: u64 = 64;
/// Rings that grow leave room for the first ones of so many connections more.
const KEPT_FOR_SHARERS: u64 = 8;

/// Who shares the memory of a session, and how much that is.
#[derive(Debug)]
pub(super) struct SessionMemory {
    bytes: u64,
    /// What has memory of its call, or is to have it.
    sharing: Vec<Weak<Connection>>,
    /// How many of these there were when there was no room for another, and when that was.
    full: Option<(usize, Instant)>,
}

impl SessionMemory {
    /// Of so many bytes.
    pub fn new(bytes: u64) -> Self {
        Self { bytes, sharing: Vec::new(), full: None }
    }

    /// How many connections share it.
    pub fn sharers(&self) -> usize {
        self.sharing.iter().filter(|connection| connection.strong_count() > 0).count()
    }

    pub fn add_sharer(&mut self, connection: &Arc<Connection>) {
        let is_other = |other: &Weak<Connection>| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(connection));
        self.sharing.retain(|other| other.strong_count() > 0 && is_other(other));
        self.sharing.push(Arc::downgrade(connection));
    }

    /// There is no room for this connection.
    pub fn mark_full(&mut self, connection: &Arc<Connection>) {
        self.sharing.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(connection)));
        self.full = Some((self.sharers(), Instant::now()));
    }

    /// Whether there was no room of late, and no connection has ended since. The peer may let go later of what has.
    pub fn is_full(&self) -> bool {
        let was_full = |(sharers, since): (usize, Instant)| self.sharers() >= sharers && since.elapsed() < FULL;
        self.has_all_sharers() || self.full.is_some_and(was_full)
    }

    /// Whether it has as many as it may.
    fn has_all_sharers(&self) -> bool {
        self.sharers() >= if self.has_room_to_grow() { MOST_SHARERS } else { PARTS as usize }
    }

    /// Whether it is more than what first rings take.
    fn has_room_to_grow(&self) -> bool {
        self.first_ring() == FIRST_RING
    }

    /// How large the first ring of each is: so that all that may come have room, where the memory is little (S-18).
    pub fn first_ring(&self) -> u64 {
        let each = (self.bytes / PARTS).saturating_sub(limits::CONTROL_LEN);
        each.checked_ilog2().map_or(0, |bits| 1 << bits).min(FIRST_RING)
    }

    /// Whether another connection may share it, where there is a `gap` of so many bytes. A ring that gives way to a smaller one
    /// needs that first, so there is room for one always (S-20).
    pub fn may_be_shared(&self, gap: u64) -> bool {
        let kept = if self.has_room_to_grow() { limits::CONTROL_LEN + FIRST_RING } else { 0 };
        !self.has_all_sharers() && gap >= kept + limits::CONTROL_LEN + limits::CAPACITY_MIN
    }

    /// What rings that grow leave of it (S-20).
    pub fn kept_for_sharers(&self) -> u64 {
        KEPT_FOR_SHARERS * (limits::CONTROL_LEN + self.first_ring())
    }
}
