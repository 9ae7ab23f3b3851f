// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The processes that share an endpoint of a connection.

use std::{
    io,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use crate::{direction::Direction, fork_group::ForkGroup, kernel::Sample};

/// Processes that share an endpoint, whether this is one of them, and the bytes over TCP that they count together
///
#[derive(Debug, Default)]
pub struct Membership {
    /// The fork group; unset as long as there was no more than this process.
    group: OnceLock<ForkGroup>,
    /// Whether this process is no longer one of them.
    departed: AtomicBool,
    /// Whether another program has the socket as well, and is not one of them.
    lent: AtomicBool,
    /// Bytes that went over TCP through this library, while there is no group. Afterwards the group counts them.
    counted: [AtomicU64; 2],
}

impl Membership {
    /// Returns the membership of one process, for the endpoint that takes the place of this one.
    pub(super) fn begin_anew(&self) -> Self {
        Self { counted: self.counted_both().map(AtomicU64::new), ..Self::default() }
    }

    pub(crate) fn group(&self) -> Option<&ForkGroup> {
        self.group.get()
    }

    /// Returns whether no other process has this socket, as far as is known.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.group().is_none_or(ForkGroup::is_alone)
    }

    /// Returns the group of this endpoint; makes it if needed, with this process. The group leaves shared memory if
    /// `leaves` returns `true`.
    pub(crate) fn found_group(&self, leaves: impl FnOnce() -> bool) -> io::Result<&ForkGroup> {
        if let Some(group) = self.group() {
            return Ok(group);
        }
        let group = ForkGroup::new(self.counted_both())?;
        if leaves() {
            group.leave();
        }
        if self.is_lent() {
            group.lend();
        }
        Ok(self.group.get_or_init(|| group))
    }

    // ---- membership of this process

    /// Notes that this process gives the socket up; no thread of it is at the pipes. Returns whether no other process
    /// of this endpoint has it.
    pub(super) fn depart(&self) -> bool {
        let Some(group) = self.group() else { return true };
        let last = group.depart();
        self.departed.store(!last, Ordering::SeqCst);
        last
    }

    /// Makes this process a member again, if it did not give the socket up after all.
    pub fn come_back(&self) {
        if let Some(group) = self.group().filter(|_| self.departed.swap(false, Ordering::SeqCst)) {
            group.stay();
        }
    }

    pub(crate) fn has_departed(&self) -> bool {
        self.departed.load(Ordering::Relaxed)
    }

    /// Notes that another program gets the socket, which knows nothing of what is in shared memory: one of these
    /// processes goes on and reads it.
    pub fn lend(&self) {
        self.lent.store(true, Ordering::SeqCst);
        self.group().inspect(|group| group.lend());
    }

    /// Returns whether another program has got the socket in this way.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.lent.load(Ordering::SeqCst) || self.group().is_some_and(ForkGroup::is_lent)
    }

    // ---- shared counts

    fn counter(&self, direction: Direction) -> &AtomicU64 {
        self.group().map_or(&self.counted[direction as usize], |group| group.counted(direction))
    }

    /// Returns the bytes of all processes of this endpoint that went over TCP.
    pub(crate) fn counted(&self, direction: Direction) -> u64 {
        self.counter(direction).load(Ordering::SeqCst)
    }

    /// Returns the same for both directions: sending, receiving.
    pub(crate) fn counted_both(&self) -> [u64; 2] {
        Direction::BOTH.map(|direction| self.counted(direction))
    }

    /// Counts bytes that went over TCP. Returns the number before these.
    pub(super) fn count(&self, direction: Direction, bytes: usize) -> u64 {
        self.counter(direction).fetch_add(bytes as u64, Ordering::Relaxed)
    }

    /// Takes over the kernel's count, which `ask` returns, if a process died while it counted. Called within a turn
    ///
    pub(crate) fn recount(&self, direction: Direction, ask: impl FnOnce() -> Option<Sample>) {
        let Some(group) = self.group().filter(|group| group.is_unsure(direction)) else { return };
        if let Some(sample) = ask() {
            let counted = if direction == Direction::Out { sample.counts.written } else { sample.read() };
            group.counted(direction).store(counted, Ordering::SeqCst);
        }
    }
}
