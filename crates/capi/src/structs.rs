// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Structs and values by which a handle reports on itself and on its peer.

use libc::{c_char, c_int};
use tombolo::{Ending, Liveness, PipeStatistics, RingReason};

/// The peer runs, as far as can be known.
pub const TOMBOLO_LIFE_RUNNING: c_int = 0;
/// The peer exists and does not run: stopped, frozen, suspended. It may continue at any time.
pub const TOMBOLO_LIFE_PAUSED: c_int = 1;
/// The peer's process is gone, or has closed its side.
pub const TOMBOLO_LIFE_PROCESS_GONE: c_int = 2;
/// The peer's whole domain is gone.
pub const TOMBOLO_LIFE_DOMAIN_GONE: c_int = 3;
/// The peer may still run, but the memory it shared was taken back.
pub const TOMBOLO_LIFE_REVOKED: c_int = 4;
/// The backend cannot tell.
pub const TOMBOLO_LIFE_UNKNOWN: c_int = 5;

/// The end was not read yet.
pub const TOMBOLO_ENDING_NONE: c_int = 0;
/// The peer closed in order: it wrote everything.
pub const TOMBOLO_ENDING_CLOSED: c_int = 1;
/// The peer aborted in the middle.
pub const TOMBOLO_ENDING_ABORTED: c_int = 2;
/// The peer's process died, or ended without closing.
pub const TOMBOLO_ENDING_PROCESS_GONE: c_int = 3;
/// The peer's whole domain died.
pub const TOMBOLO_ENDING_DOMAIN_GONE: c_int = 4;
/// The memory that carried the data was taken back.
pub const TOMBOLO_ENDING_REVOKED: c_int = 5;

pub fn life(life: Liveness) -> c_int {
    match life {
        Liveness::Running => TOMBOLO_LIFE_RUNNING,
        Liveness::Paused => TOMBOLO_LIFE_PAUSED,
        Liveness::ProcessGone => TOMBOLO_LIFE_PROCESS_GONE,
        Liveness::DomainGone => TOMBOLO_LIFE_DOMAIN_GONE,
        Liveness::Revoked => TOMBOLO_LIFE_REVOKED,
        // This interface has no name for a state of a later version.
        Liveness::Unknown | _ => TOMBOLO_LIFE_UNKNOWN,
    }
}

pub fn ending(ending: Option<Ending>) -> c_int {
    match ending {
        None => TOMBOLO_ENDING_NONE,
        Some(Ending::Closed) => TOMBOLO_ENDING_CLOSED,
        Some(Ending::ProcessGone) => TOMBOLO_ENDING_PROCESS_GONE,
        Some(Ending::DomainGone) => TOMBOLO_ENDING_DOMAIN_GONE,
        Some(Ending::Revoked) => TOMBOLO_ENDING_REVOKED,
        // An ending of a later version, which this interface cannot name, was not an orderly one.
        Some(Ending::Aborted | _) => TOMBOLO_ENDING_ABORTED,
    }
}

/// Counters of one direction of a channel, as this endpoint counts them. No part of this lies in shared memory.
#[repr(C)]
#[derive(Clone, Default, Debug)]
pub struct Statistics {
    /// sizeof(struct tombolo_statistics), set by the caller. The struct is filled in up to this size.
    pub size: u32,
    /// Always 0.
    pub reserved: u32,
    /// Number of bytes moved through the ring, including headers and padding.
    pub bytes: u64,
    /// Number of calls that moved something (streams), or of messages.
    pub messages: u64,
    /// Number of notifications sent to the peer's waiter.
    pub notifications_sent: u64,
    /// Number of checks that found the peer awake, or its target not reached, so that no notification was sent.
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
    /// Number of times that there was nothing to read or no room to write.
    pub stalls: u64,
    /// Size of the ring now, in bytes.
    pub ring_size: u64,
    /// Number of bytes written and not yet read, as last seen.
    pub in_flight: u64,
    /// Size in bytes to which bulk data grows the ring; 0 if the ring does not follow its load.
    pub ring_target: u64,
    /// Reason for the size of the ring: TOMBOLO_RING_FIRST and so on; 0 if the ring does not follow its load.
    pub ring_reason: u64,
}

/// Reason for the size of a ring: the stream was never busy.
pub const TOMBOLO_RING_FIRST: u64 = 1;
/// Another ring was offered to the peer, which has not moved to it yet.
pub const TOMBOLO_RING_OFFERED: u64 = 2;
/// The stream is busy.
pub const TOMBOLO_RING_BULK: u64 = 3;
/// The stream was busy and became idle.
pub const TOMBOLO_RING_IDLE: u64 = 4;
/// The budget has no room for a larger ring.
pub const TOMBOLO_RING_BUDGET: u64 = 5;
/// There was no memory for a larger ring, or no way to offer one.
pub const TOMBOLO_RING_MEMORY: u64 = 6;
/// The peer does not follow to another ring, or maps none that is larger.
pub const TOMBOLO_RING_PEER: u64 = 7;
/// Memory is short in the control group or in the machine.
pub const TOMBOLO_RING_PRESSURE: u64 = 8;

fn reason(reason: RingReason) -> u64 {
    match reason {
        RingReason::First => TOMBOLO_RING_FIRST,
        RingReason::Offered => TOMBOLO_RING_OFFERED,
        RingReason::Bulk => TOMBOLO_RING_BULK,
        RingReason::Idle => TOMBOLO_RING_IDLE,
        RingReason::Budget => TOMBOLO_RING_BUDGET,
        RingReason::Memory => TOMBOLO_RING_MEMORY,
        RingReason::Peer => TOMBOLO_RING_PEER,
        RingReason::Pressure => TOMBOLO_RING_PRESSURE,
        // A reason of a later version.
        _ => 0,
    }
}

impl From<PipeStatistics> for Statistics {
    fn from(PipeStatistics { counters, ring_size, in_flight, ring_growth, .. }: PipeStatistics) -> Self {
        Self {
            size: 0,
            reserved: 0,
            bytes: counters.bytes,
            messages: counters.messages,
            notifications_sent: counters.notifications_sent,
            notifications_suppressed: counters.notifications_suppressed,
            notifications_received: counters.notifications_received,
            wakeups_spurious: counters.wakeups_spurious,
            spins_paid: counters.spins_paid,
            spins_wasted: counters.spins_wasted,
            sleeps: counters.sleeps,
            stalls: counters.stalls,
            ring_size,
            in_flight,
            ring_target: ring_growth.map_or(0, |growth| growth.target),
            ring_reason: ring_growth.map_or(0, |growth| reason(growth.reason)),
        }
    }
}

/// Identity of the peer, as reported by the backend and not by the peer.
#[repr(C)]
#[derive(Clone, Debug)]
pub struct Peer {
    /// sizeof(struct tombolo_peer), set by the caller. The struct is filled in up to this size.
    pub size: u32,
    /// Always 0.
    pub reserved: u32,
    /// Process of the peer if the two endpoints share a kernel, else -1.
    pub pid: i64,
    /// User of the peer if the two endpoints share a kernel, else -1.
    pub uid: i64,
    /// Name or number of the peer's domain, ended by NUL, cut if it is longer.
    pub domain: [c_char; 64],
}

impl From<tombolo::Peer> for Peer {
    fn from(peer: tombolo::Peer) -> Self {
        let mut domain = [0; 64];
        let longest = domain.len() - 1;
        for (to, byte) in domain[..longest].iter_mut().zip(peer.domain.bytes()) {
            *to = c_char::from_ne_bytes([byte]);
        }
        let number = |number: Option<u32>| number.map_or(-1, i64::from);
        Self { size: 0, reserved: 0, pid: number(peer.pid), uid: number(peer.uid), domain }
    }
}
