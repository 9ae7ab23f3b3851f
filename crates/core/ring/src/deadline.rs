// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Deadlines of calls that wait.

use std::time::{Duration, Instant};

/// Point in time at which a call gives up, or never.
///
/// # Example
/// ```
/// # extern crate tombolo_ring as tombolo;
/// use std::time::Duration;
/// use tombolo::Deadline;
///
/// let deadline = Deadline::after(Duration::from_secs(5)); // for several calls together
/// assert!(!deadline.expired());
/// assert!(deadline.remaining() <= Some(Duration::from_secs(5)));
/// assert_eq!(Deadline::NEVER.remaining(), None);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Deadline(When);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum When {
    Over,
    At(Instant),
    #[default]
    Never,
}

impl Deadline {
    /// Waits for ever.
    pub const NEVER: Self = Self(When::Never);
    /// Does not wait at all.
    pub const NOW: Self = Self(When::Over);

    /// Gives up once `timeout` has passed. A timeout beyond what the clock can hold means never.
    #[must_use]
    pub fn after(timeout: Duration) -> Self {
        Self(Instant::now().checked_add(timeout).map_or(When::Never, When::At))
    }

    /// Gives up at `instant`.
    #[must_use]
    pub const fn at(instant: Instant) -> Self {
        Self(When::At(instant))
    }

    /// Returns the time left: `None` means for ever, zero that the deadline has passed.
    #[must_use]
    pub fn remaining(self) -> Option<Duration> {
        match self.0 {
            When::Over => Some(Duration::ZERO),
            When::At(instant) => Some(instant.saturating_duration_since(Instant::now())),
            When::Never => None,
        }
    }

    /// Returns whether the deadline has passed.
    #[must_use]
    pub fn expired(self) -> bool {
        match self.0 {
            When::Over => true,
            When::At(instant) => Instant::now() >= instant,
            When::Never => false,
        }
    }

    /// Returns the earlier of the two.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        match (self.0, other.0) {
            (When::Over, _) | (_, When::Over) => Self::NOW,
            (When::At(a), When::At(b)) => Self::at(a.min(b)),
            (When::Never, _) => other,
            (_, When::Never) => self,
        }
    }
}

impl From<Option<Duration>> for Deadline {
    fn from(timeout: Option<Duration>) -> Self {
        timeout.map_or(Self::NEVER, Self::after)
    }
}
