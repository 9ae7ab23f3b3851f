// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether to look at shared memory for a moment before sleeping: the policy of channels, one for each thread of the
//! program, and never where there is one CPU.

use std::{cell::Cell, convert::Infallible, sync::LazyLock, thread, time::Instant};

use tombolo_mem::Mapped;
use tombolo_ring::Spin;

thread_local! {
    /// Taken out while it is in use, as a signal's handler may wait too.
    static POLICY: Cell<Spin> = const { Cell::new(Spin::DEFAULT) };
}

static CPUS: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, usize::from));

/// Finds out now what the first wait would: a child made by fork finds it whole.
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

/// Looks until `found`, or until that does not pay any more.
pub fn until(mut found: impl FnMut() -> bool) -> bool {
    *CPUS > 1 && matches!(with_policy(|policy| policy.spin_for::<Mapped, Infallible>(|| Ok(found()))), Ok(true))
}

/// A sleep begins.
#[must_use]
pub fn asleep() -> Option<Instant> {
    with_policy(Spin::now)
}

/// A sleep ended.
pub fn learn(since: Option<Instant>) {
    with_policy(|policy| policy.learn(since));
}
