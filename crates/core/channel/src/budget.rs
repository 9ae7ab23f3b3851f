// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How much memory rings may grow by, all channels together.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// What the budget of a process allows, unless told otherwise.
const OF_PROCESS: u64 = 64 << 20;

/// A limit for the memory of rings that [grew](crate::Options::ring_growth), which channels share.
///
/// A channel takes from it what its grown ring costs, and returns that when the ring shrinks or the channel is dropped. Its
/// first, small ring is not counted. Make one budget for each group of channels that is to be bounded: a link, a customer.
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
}

/// Bytes taken from a budget, until dropped.
#[derive(Debug)]
pub(crate) struct Share {
    budget: RingBudget,
    bytes: u64,
}

impl RingBudget {
    /// Makes a budget of `bytes` bytes.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self(Arc::new(Account { limit: bytes, used: AtomicU64::new(0) }))
    }

    /// Returns the budget of this process: 64 MiB for all channels that use it.
    #[must_use]
    pub fn of_process() -> &'static Self {
        static BUDGET: OnceLock<RingBudget> = OnceLock::new();
        BUDGET.get_or_init(|| Self::new(OF_PROCESS))
    }

    /// Returns the bytes that there are in all.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Returns the bytes that grown rings hold now.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Takes `bytes`, if they are there.
    pub(crate) fn take_share(&self, bytes: u64) -> Option<Share> {
        let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.0.limit);
        // ORDER: Relaxed; the number stands for itself.
        self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Share { budget: self.clone(), bytes })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // ORDER: Relaxed; the number stands for itself.
        self.budget.0.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for RingBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingBudget").field("limit", &self.limit()).field("used", &self.used()).finish()
    }
}

/// Two handles are equal where they are of one budget.
impl PartialEq for RingBudget {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for RingBudget {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_gives_no_more_than_it_has_and_takes_back_all() {
        let budget = RingBudget::new(100);
        let first = budget.take_share(60).unwrap();
        assert!(budget.take_share(41).is_none() && budget.take_share(u64::MAX).is_none());
        let second = budget.take_share(40).unwrap();
        assert_eq!(budget.used(), 100);
        drop(first);
        assert_eq!(budget.used(), 40);
        drop(second);
        assert_eq!(budget.used(), 0);
    }
}
