// SPDX-License-Identifier: Apache-2.0 OR MIT
//! When a caller stops waiting.

use std::time::{Duration, Instant};

/// A point in time after which a call gives up, or never.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// Wait for ever.
    pub const NEVER: Self = Self(None);

    /// Gives up when `timeout` has passed from now on. A timeout beyond what the clock can hold is never.
    #[must_use]
    pub fn after(timeout: Duration) -> Self {
        Self(Instant::now().checked_add(timeout))
    }

    /// Gives up at `instant`.
    #[must_use]
    pub const fn at(instant: Instant) -> Self {
        Self(Some(instant))
    }

    /// Time left; `None` is for ever, zero is over.
    #[must_use]
    pub fn remaining(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether the time is over.
    #[must_use]
    pub fn expired(self) -> bool {
        self.0.is_some_and(|at| Instant::now() >= at)
    }

    /// The earlier of the two.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        match (self.0, other.0) {
            (Some(a), Some(b)) => Self(Some(a.min(b))),
            (a, b) => Self(a.or(b)),
        }
    }
}

impl From<Option<Duration>> for Deadline {
    fn from(timeout: Option<Duration>) -> Self {
        timeout.map_or(Self::NEVER, Self::after)
    }
}
