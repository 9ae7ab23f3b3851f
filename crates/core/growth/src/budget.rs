// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bounds the memory by which the rings of all channels together may grow.

use std::{
    fmt,
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::pressure::{MemoryWatch, find_limit};

/// Divisor of the memory that a process may have: the quotient is its budget.
const SHARE_OF_MEMORY: u64 = 8;
/// Memory in bytes that is assumed where no limit can be read.
const UNKNOWN_MEMORY: u64 = 512 << 20;

/// Limit for the memory of grown rings (`Options::ring_growth`), shared by channels.
///
/// A channel takes the cost of its grown ring from the budget, and returns it when the ring shrinks or the channel is
/// dropped. Its first, small ring is not counted. Make one budget for each group of channels that is to be bounded: a
/// link, a customer.
///
/// No ring grows while memory is short, whatever the budget has left: for the process's control groups, for the
/// machine, or for tasks that wait for memory. Idle rings then shrink sooner. Where memory becomes scarce, busy rings
/// shrink as well.
///
/// # Example
/// ```
/// use tombolo::{Options, RingBudget};
///
/// let budget = RingBudget::new(16 << 20); // for all channels of one tenant
/// let options = Options::new().ring_growth(&budget);
/// assert_eq!((budget.limit(), budget.used()), (16 << 20, 0));
/// assert_ne!(options, Options::new());
/// ```
#[derive(Clone)]
pub struct RingBudget(Arc<Account>);

struct Account {
    limit: u64,
    used: AtomicU64,
    /// Watch that tells whether memory is short.
    memory: Option<Arc<MemoryWatch>>,
    /// Whether the last ring that wanted to grow could not: idle ones then shrink sooner.
    wanted: AtomicBool,
}

/// Bytes taken from a budget until this is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    budget: RingBudget,
    bytes: u64,
}

/// Resource that is insufficient.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lacking {
    /// Bytes of the budget itself.
    Budget,
    /// Memory of the control group or the machine.
    Memory,
}

impl RingBudget {
    /// Makes a budget of `bytes` bytes.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self::watching(bytes, Some(MemoryWatch::of_process()))
    }

    /// Makes a budget of `bytes` bytes whose rings grow however short the machine's memory is.
    ///
    /// For a program that manages its memory by itself.
    #[must_use]
    pub fn unwatched(bytes: u64) -> Self {
        Self::watching(bytes, None)
    }

    pub(crate) fn watching(bytes: u64, memory: Option<Arc<MemoryWatch>>) -> Self {
        let (used, wanted) = Default::default();
        Self(Arc::new(Account { limit: bytes, used, memory, wanted }))
    }

    /// Returns the budget of this process: an eighth of the machine's memory, or of what its control groups allow at
    /// the first call.
    #[must_use]
    pub fn of_process() -> &'static Self {
        static BUDGET: OnceLock<RingBudget> = OnceLock::new();
        BUDGET.get_or_init(|| Self::new(share_of_memory(Path::new("/"))))
    }

    /// Returns the size of the whole budget in bytes.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Returns the bytes that grown rings hold now.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Takes `bytes` from the budget if they are free. Otherwise returns the resource that is insufficient.
    pub(crate) fn take_share(&self, bytes: u64, now: Duration) -> Result<Share, Lacking> {
        let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.0.limit);
        // ORDER: Relaxed, here and below; each number stands for itself.
        if self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_err() {
            return Err(Lacking::Budget);
        }
        let share = Share { budget: self.clone(), bytes };
        if self.0.memory.as_ref().is_some_and(|memory| !memory.take_room(bytes, now)) {
            return Err(Lacking::Memory);
        }
        self.0.wanted.store(false, Ordering::Relaxed);
        Ok(share)
    }

    /// Notes that a ring could not grow, so that idle ones make room.
    pub(crate) fn note_want(&self) {
        self.0.wanted.store(true, Ordering::Relaxed);
    }

    /// Returns whether idle rings shrink sooner.
    pub(crate) fn is_wanted(&self) -> bool {
        self.0.wanted.load(Ordering::Relaxed)
    }

    /// Checks now and then whether memory is short, and lets idle rings shrink sooner if so.
    pub(crate) fn check_memory(&self, now: Duration) {
        if self.0.memory.as_ref().is_some_and(|memory| memory.is_short(now)) {
            self.note_want();
        }
    }

    /// Returns whether memory is so scarce that busy rings shrink as well.
    pub(crate) fn is_scarce(&self, now: Duration) -> bool {
        self.0.memory.as_ref().is_some_and(|memory| memory.is_scarce(now))
    }
}

/// Returns the bytes that a process may spend on rings, with the file system rooted at `root`.
fn share_of_memory(root: &Path) -> u64 {
    find_limit(root).unwrap_or(UNKNOWN_MEMORY) / SHARE_OF_MEMORY
}

impl Drop for Share {
    fn drop(&mut self) {
        let account = &self.budget.0;
        // ORDER: Relaxed; the number stands for itself.
        account.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for RingBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingBudget").field("limit", &self.limit()).field("used", &self.used()).finish()
    }
}

/// Two handles are equal if they refer to the same budget.
impl PartialEq for RingBudget {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for RingBudget {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pressure::tests::Tree;

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn budget_gives_no_more_than_it_has_and_takes_back_all() {
        let budget = RingBudget::unwatched(100);
        let first = budget.take_share(60, NOW).unwrap();
        for more in [41, u64::MAX] {
            assert_eq!(budget.take_share(more, NOW).unwrap_err(), Lacking::Budget);
        }
        let second = budget.take_share(40, NOW).unwrap();
        budget.note_want();
        assert_eq!(budget.used(), 100);
        drop(first);
        assert_eq!((budget.used(), budget.is_wanted()), (40, true));
        drop(second);
        assert_eq!(budget.used(), 0);
        drop(budget.take_share(1, NOW));
        assert!(!budget.is_wanted(), "one could grow");
    }

    #[test]
    fn budget_of_a_process_is_an_eighth_of_what_it_may_have() {
        let tree = Tree::new("eighth");
        assert_eq!(share_of_memory(&tree.0), 64 << 20, "nothing says how much there is");
        assert_eq!(share_of_memory(&tree.machine(500).0), 128 << 20);
        tree.write("proc/self/cgroup", "0::/a\n").write("sys/fs/cgroup/a/memory.max", "16777216\n");
        tree.write("sys/fs/cgroup/a/memory.current", "5\n");
        assert_eq!(share_of_memory(&tree.0), 2 << 20, "its group allows less");
    }

    #[test]
    fn budget_gives_nothing_where_memory_is_short() {
        let tree = Tree::new("short");
        let budget = RingBudget::watching(u64::MAX, Some(Arc::new(MemoryWatch::new(&tree.machine(65).0))));
        let first = budget.take_share(1 << 20, NOW).unwrap();
        assert_eq!(budget.take_share(1, NOW).unwrap_err(), Lacking::Memory);
        assert_eq!(budget.used(), 1 << 20, "what was not given is not counted");
        assert!(!budget.is_wanted());
        budget.check_memory(NOW);
        assert!(budget.is_wanted(), "nothing is left");
        drop(first);
    }
}
