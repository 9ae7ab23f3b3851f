// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shares the memory of a session between two kernels among its connections: how many they are, and what each may have
//! (S-18, S-20).

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use tombolo_layout::limits;

use crate::connection::Connection;

/// Time for which a session without room gets no further connection.
const FULL: Duration = Duration::from_secs(1);
/// Largest number of connections that share the memory, where it has room for rings that grow. The other handles (V-6)
/// are for those.
const MOST_SHARERS: usize = 48;
/// Size in bytes of a first ring. It has no more than one of `PARTS` equal parts of the memory.
const FIRST_RING: u64 = 16 << 10;
const PARTS: u64 = 64;
/// Number of further connections for whose first rings the rings that grow leave room.
const KEPT_FOR_SHARERS: u64 = 8;

/// Connections that share the memory of a session, and its size.
#[derive(Debug)]
pub(super) struct SessionMemory {
    bytes: u64,
    /// Connections that have memory of the session, or are to have it.
    sharing: Vec<Weak<Connection>>,
    /// Number of these when there was no room for another, and the time of that.
    full: Option<(usize, Instant)>,
}

impl SessionMemory {
    /// Makes the state for a memory of this size.
    pub fn new(bytes: u64) -> Self {
        Self { bytes, sharing: Vec::new(), full: None }
    }

    /// Returns the number of connections that share it.
    pub fn sharers(&self) -> usize {
        self.sharing.iter().filter(|connection| connection.strong_count() > 0).count()
    }

    pub fn add_sharer(&mut self, connection: &Arc<Connection>) {
        let is_other = |other: &Weak<Connection>| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(connection));
        self.sharing.retain(|other| other.strong_count() > 0 && is_other(other));
        self.sharing.push(Arc::downgrade(connection));
    }

    /// Notes that there is no room for this connection.
    pub fn mark_full(&mut self, connection: &Arc<Connection>) {
        self.sharing.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(connection)));
        self.full = Some((self.sharers(), Instant::now()));
    }

    /// Returns whether there was no room recently, and no connection has ended since. The peer may let go later of one
    /// that has ended.
    pub fn is_full(&self) -> bool {
        let was_full = |(sharers, since): (usize, Instant)| self.sharers() >= sharers && since.elapsed() < FULL;
        self.has_all_sharers() || self.full.is_some_and(was_full)
    }

    /// Returns whether it has as many connections as it may.
    fn has_all_sharers(&self) -> bool {
        self.sharers() >= if self.has_room_to_grow() { MOST_SHARERS } else { PARTS as usize }
    }

    /// Returns whether it is larger than what first rings take.
    fn has_room_to_grow(&self) -> bool {
        self.first_ring() == FIRST_RING
    }

    /// Returns the size of each first ring, such that all connections that may come have room, where the memory is
    /// small (S-18).
    pub fn first_ring(&self) -> u64 {
        let each = (self.bytes / PARTS).saturating_sub(limits::CONTROL_LEN);
        each.checked_ilog2().map_or(0, |bits| 1 << bits).min(FIRST_RING)
    }

    /// Returns whether another connection may share it, where it has a `gap` of so many bytes. A ring is replaced by a
    /// smaller one only after that one has memory, so there is always room for one (S-20).
    pub fn may_be_shared(&self, gap: u64) -> bool {
        let kept = if self.has_room_to_grow() { limits::CONTROL_LEN + FIRST_RING } else { 0 };
        !self.has_all_sharers() && gap >= kept + limits::CONTROL_LEN + limits::CAPACITY_MIN
    }

    /// Returns the bytes that rings that grow must leave free (S-20).
    pub fn kept_for_sharers(&self) -> u64 {
        KEPT_FOR_SHARERS * (limits::CONTROL_LEN + self.first_ring())
    }
}
