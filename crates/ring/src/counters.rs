// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a half of a pipe counts. Private, so the peer can neither see nor spoil it; one add each, so it is always on.

/// Counters of one half of a pipe since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Counters {
    /// Bytes moved through the ring, record headers and padding included.
    pub bytes: u64,
    /// Calls that moved something (stream mode), or records (message mode).
    pub messages: u64,
    /// Times the peer's sleeper was rung.
    pub notifications_sent: u64,
    /// Times the peer was found awake, or its target not reached, when it was time to look.
    pub notifications_suppressed: u64,
    /// Times this half was woken by a ring.
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
