// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decides whether to look at shared memory for a moment before a sleep: the policy of channels, one for each thread of
//! the program. With one CPU it never looks.
//!
//! At most one thread for every two CPUs looks at a time, as the peer needs the other CPU. If more wait, there is other
//! work for the CPUs, or no peer answers: they sleep.

use std::{
    cell::Cell,
    convert::Infallible,
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use tombolo_mem::Mapped;
use tombolo_ring::Spin;

thread_local! {
    /// Policy of this thread. Copied out while it is in use, as a signal handler may wait too.
    static POLICY: Cell<Spin> = const { Cell::new(Spin::DEFAULT) };
}

thread_local! {
    /// Whether this thread is counted in [`LOOKING`]. One that left a look by a jump from a signal handler is still
    /// counted when it looks again.
    static LOOKS: Cell<bool> = const { Cell::new(false) };
}

/// Number of threads that look now.
static LOOKING: AtomicUsize = AtomicUsize::new(0);

static CPUS: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, usize::from));

/// Finds out in advance what the first wait would, so that a child made by fork finds it complete.
pub(crate) fn prepare() {
    LazyLock::force(&CPUS);
    Spin::prepare();
    let _ = with_policy(|policy| policy.spin_for::<Mapped, Infallible>(|| Ok(true)));
}

fn with_policy<T>(f: impl FnOnce(&mut Spin) -> T) -> T {
    let mut policy = POLICY.get();
    let result = f(&mut policy);
    POLICY.set(policy);
    result
}

/// Begins anew in a child made by fork: its parent's other threads are not here.
pub(crate) fn begin_anew() {
    LOOKS.set(false);
    LOOKING.store(0, Ordering::Relaxed);
    Spin::begin_anew();
}

/// Counts this thread out. In a child made by a signal handler amid a look, it was counted out at the child's beginning
/// already.
fn stop_looking() {
    let _ = LOOKING.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |all| all.checked_sub(1));
}

/// Looks until `found` returns `true`, or until that does not pay any more. Returns whether it did.
pub fn until(mut found: impl FnMut() -> bool) -> bool {
    if !LOOKS.get() {
        if LOOKING.fetch_add(1, Ordering::Relaxed) >= *CPUS / 2 {
            stop_looking();
            return false;
        }
        LOOKS.set(true);
    }
    let found = with_policy(|policy| policy.spin_for::<Mapped, Infallible>(|| Ok(found())));
    // A signal handler that looked meanwhile has counted this thread out already.
    if LOOKS.replace(false) {
        stop_looking();
    }
    matches!(found, Ok(true))
}

/// Notes the beginning of a sleep. Returns the time, if the policy measures it.
#[must_use]
pub fn asleep() -> Option<Instant> {
    with_policy(Spin::now)
}

/// Notes the end of a sleep.
pub fn learn(since: Option<Instant>) {
    with_policy(|policy| policy.learn(since));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_for_two_cpus_looks_and_one_more_sleeps() {
        let looking = |n: usize| LOOKING.store(n, Ordering::Relaxed);
        let looks = || {
            let mut looks = false;
            until(|| {
                looks = true;
                true
            });
            looks
        };
        looking(0);
        assert_eq!(looks(), *CPUS > 1);
        looking(*CPUS / 2);
        assert!(!looks(), "one more than there are CPUs for");
        assert_eq!(LOOKING.load(Ordering::Relaxed), *CPUS / 2);
        // In a child made by fork while all of them looked.
        begin_anew();
        assert_eq!(looks(), *CPUS > 1);
        assert_eq!(LOOKING.load(Ordering::Relaxed), 0);
        // In a child made by a handler that interrupts the look: the look continues in both processes.
        until(|| {
            begin_anew();
            true
        });
        stop_looking();
        assert_eq!(LOOKING.load(Ordering::Relaxed), 0);
    }
}
