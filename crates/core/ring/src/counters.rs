// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counts the work of a half of a pipe. The counters are private, so the peer can neither see nor spoil them. Each
//! costs one addition, so they are always on.

use tombolo_layout::private::COUNTERS;

/// Counters of one half of a channel since it was made.
///
/// # Example
/// ```
/// # extern crate tombolo_ring as tombolo;
/// use tombolo::Counters;
///
/// /// How much of its waiting a half did awake.
/// fn spun(counters: &Counters) -> f64 {
///     counters.spins_paid as f64 / (counters.spins_paid + counters.sleeps).max(1) as f64
/// }
/// assert_eq!(spun(&Counters::default()), 0.0);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Counters {
    /// Number of bytes moved through the ring, record headers and padding included.
    pub bytes: u64,
    /// Number of calls that moved something (stream mode), or of records (message mode).
    pub messages: u64,
    /// Number of times that the peer's waiter was notified.
    pub notifications_sent: u64,
    /// Number of checks that found the peer awake, or its target not reached.
    pub notifications_suppressed: u64,
    /// Number of times that a notification woke this half.
    pub notifications_received: u64,
    /// Number of wake-ups that found nothing to do.
    pub wakeups_spurious: u64,
    /// Number of waits that ended while spinning.
    pub spins_paid: u64,
    /// Number of spins that ended in a sleep.
    pub spins_wasted: u64,
    /// Number of times that this half went to sleep.
    pub sleeps: u64,
    /// Number of times that there was nothing to read (reader) or no room (writer), and the caller had to wait or was
    /// refused.
    pub stalls: u64,
}

impl Counters {
    /// Lists all counters but the bytes, which follow from the positions, in the order of R-26.
    #[doc(hidden)]
    #[must_use]
    pub const fn listed(&self) -> [u64; COUNTERS] {
        [
            self.messages,
            self.notifications_sent,
            self.notifications_suppressed,
            self.notifications_received,
            self.wakeups_spurious,
            self.spins_paid,
            self.spins_wasted,
            self.sleeps,
            self.stalls,
        ]
    }

    /// Returns the counters that [`listed`](Self::listed) returned, together with the bytes.
    #[doc(hidden)]
    #[must_use]
    pub const fn from_listed(bytes: u64, listed: [u64; COUNTERS]) -> Self {
        let [messages, notifications_sent, notifications_suppressed, notifications_received, rest @ ..] = listed;
        let [wakeups_spurious, spins_paid, spins_wasted, sleeps, stalls] = rest;
        Self {
            bytes,
            messages,
            notifications_sent,
            notifications_suppressed,
            notifications_received,
            wakeups_spurious,
            spins_paid,
            spins_wasted,
            sleeps,
            stalls,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c12_counters_come_back_in_the_order_of_r26() {
        let listed = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        let counters = Counters::from_listed(10, listed);
        assert_eq!(counters.listed(), listed);
        assert_eq!((counters.bytes, counters.messages, counters.sleeps, counters.stalls), (10, 1, 8, 9));
    }
}
