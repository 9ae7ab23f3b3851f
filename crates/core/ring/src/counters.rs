// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a half of a pipe counts. Private, so the peer can neither see nor spoil it; one add each, so it is always on.

use tombolo_layout::private::COUNTERS;

/// What one half of a channel counted since it was made.
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
    /// Bytes moved through the ring, record headers and padding included.
    pub bytes: u64,
    /// Calls that moved something (stream mode), or records (message mode).
    pub messages: u64,
    /// Times the peer's waiter was notified.
    pub notifications_sent: u64,
    /// Times the peer was found awake, or its target not reached, when it was time to look.
    pub notifications_suppressed: u64,
    /// Times this half was woken by a notification.
    pub notifications_received: u64,
    /// Wake-ups that found nothing to do.
    pub wakeups_spurious: u64,
    /// Waits that ended while spinning.
    pub spins_paid: u64,
    /// Spins that ended in a sleep.
    pub spins_wasted: u64,
    /// Times this half went to sleep.
    pub sleeps: u64,
    /// Times there was nothing to read (reader) or no room (writer) and the caller had to wait or be refused.
    pub stalls: u64,
}

impl Counters {
    /// Lists all but the bytes, which the positions tell, in the order of R-26.
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

    /// The counters that [`listed`](Self::listed) gave, and the bytes.
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
