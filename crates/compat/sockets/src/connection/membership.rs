// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The processes that an end of a connection is.

use std::{
    io,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use crate::{direction::Direction, fork_group::ForkGroup, kernel::Sample};

/// Which processes an end is, whether this is one of them, and what they count together: bytes over TCP.
#[derive(Debug, Default)]
pub struct Membership {
    /// None as long as there was no more than this process.
    group: OnceLock<ForkGroup>,
    /// This process is none of them any more.
    departed: AtomicBool,
    /// Another program has the socket as well, and is none of them.
    lent: AtomicBool,
    /// Bytes that went over TCP through this library, while there is no group. From then on they are counted there.
    counted: [AtomicU64; 2],
}

impl Membership {
    /// One process, of an end that takes the place of this one.
    pub(super) fn begin_anew(&self) -> Self {
        Self { counted: self.counted_both().map(AtomicU64::new), ..Self::default() }
    }

    pub(crate) fn group(&self) -> Option<&ForkGroup> {
        self.group.get()
    }

    /// Whether no other process has this socket, as far as is known.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.group().is_none_or(ForkGroup::is_alone)
    }

    /// The group of this end, which begins with this process: it `leaves` shared memory if the process does.
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

    // ---- whether this process is one of them

    /// This process gives the socket up, and nobody of it is at the pipes. Says whether there is no other process of this end.
    pub(super) fn depart(&self) -> bool {
        let Some(group) = self.group() else { return true };
        let last = group.depart();
        self.departed.store(!last, Ordering::SeqCst);
        last
    }

    /// It did not give it up after all.
    pub fn come_back(&self) {
        if let Some(group) = self.group().filter(|_| self.departed.swap(false, Ordering::SeqCst)) {
            group.stay();
        }
    }

    pub(crate) fn has_departed(&self) -> bool {
        self.departed.load(Ordering::Relaxed)
    }

    /// Another program gets the socket, which knows nothing of what is in shared memory: one of these processes goes on and reads
    /// it.
    pub fn lend(&self) {
        self.lent.store(true, Ordering::SeqCst);
        self.group().inspect(|group| group.lend());
    }

    /// Whether another program has got the socket so.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.lent.load(Ordering::SeqCst) || self.group().is_some_and(ForkGroup::is_lent)
    }

    // ---- what they count

    fn counter(&self, direction: Direction) -> &AtomicU64 {
        self.group().map_or(&self.counted[direction as usize], |group| group.counted(direction))
    }

    /// Bytes that went over TCP, of all processes of this end.
    pub(crate) fn counted(&self, direction: Direction) -> u64 {
        self.counter(direction).load(Ordering::SeqCst)
    }

    /// The same of both directions: sending, receiving.
    pub(crate) fn counted_both(&self) -> [u64; 2] {
        Direction::BOTH.map(|direction| self.counted(direction))
    }

    /// So many bytes went over TCP. Says how many there were before.
    pub(super) fn count(&self, direction: Direction, bytes: usize) -> u64 {
        self.counter(direction).fetch_add(bytes as u64, Ordering::Relaxed)
    }

    /// Where a process died while it counted, the count is from now on the kernel's, which `ask` gives. Within a turn.
    pub(crate) fn recount(&self, direction: Direction, ask: impl FnOnce() -> Option<Sample>) {
        let Some(group) = self.group().filter(|group| group.is_unsure(direction)) else { return };
        if let Some(sample) = ask() {
            let counted = if direction == Direction::Out { sample.counts.written } else { sample.read() };
            group.counted(direction).store(counted, Ordering::SeqCst);
        }
    }
}
