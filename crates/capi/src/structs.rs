// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a handle tells of itself and of its peer.

use libc::{c_char, c_int};
use tombolo::{Ending, Liveness, PipeStatistics, RingReason};

/// The peer runs, as far as can be known.
pub const TOMBOLO_LIFE_RUNNING: c_int = 0;
/// The peer exists and does not run: stopped, frozen, suspended. It may go on at any time.
pub const TOMBOLO_LIFE_PAUSED: c_int = 1;
/// The peer's process is gone, or has closed its side.
pub const TOMBOLO_LIFE_PROCESS_GONE: c_int = 2;
/// The peer's whole domain is gone.
pub const TOMBOLO_LIFE_DOMAIN_GONE: c_int = 3;
/// The peer may well run, but the memory it shared was taken back.
pub const TOMBOLO_LIFE_REVOKED: c_int = 4;
/// Nobody here can tell.
pub const TOMBOLO_LIFE_UNKNOWN: c_int = 5;

/// The end was not read yet.
pub const TOMBOLO_ENDING_NONE: c_int = 0;
/// The peer closed in order: everything was written.
pub const TOMBOLO_ENDING_CLOSED: c_int = 1;
/// The peer gave up in the middle.
pub const TOMBOLO_ENDING_ABORTED: c_int = 2;
/// The peer's process died, or went without closing.
pub const TOMBOLO_ENDING_PROCESS_GONE: c_int = 3;
/// The peer's whole domain died.
pub const TOMBOLO_ENDING_DOMAIN_GONE: c_int = 4;
/// The memory over which it came was taken back.
pub const TOMBOLO_ENDING_REVOKED: c_int = 5;

pub fn life(life: Liveness) -> c_int {
    match life {
        Liveness::Running => TOMBOLO_LIFE_RUNNING,
        Liveness::Paused => TOMBOLO_LIFE_PAUSED,
        Liveness::ProcessGone => TOMBOLO_LIFE_PROCESS_GONE,
        Liveness::DomainGone => TOMBOLO_LIFE_DOMAIN_GONE,
        Liveness::Revoked => TOMBOLO_LIFE_REVOKED,
        // A life that this interface has no name for is none it can tell.
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
        // An ending that this interface has no name for was no orderly one.
        Some(Ending::Aborted | _) => TOMBOLO_ENDING_ABORTED,
    }
}

/// One direction of a channel, as this endpoint counts it; nothing of it lies in shared memory.
#[repr(C)]
#[derive(Clone, Default, Debug)]
pub struct Statistics {
    /// sizeof(struct tombolo_statistics), set by the caller; it is filled in that far.
    pub size: u32,
    /// 0.
    pub reserved: u32,
    /// Bytes moved through the ring, headers and padding included.
    pub bytes: u64,
    /// Calls that moved something (streams), or messages.
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
    /// Times there was nothing to read or no room to write.
    pub stalls: u64,
    /// Bytes of the ring now.
    pub ring_size: u64,
    /// Bytes written and not yet read, as last seen.
    pub in_flight: u64,
    /// Bytes of the ring that bulk grows to; 0 where the ring does not follow its load.
    pub ring_target: u64,
    /// Why the ring is as large as it is: TOMBOLO_RING_FIRST and so on, 0 where it does not follow its load.
    pub ring_reason: u64,
}

/// Why a ring is as large as it is: the stream was never busy.
pub const TOMBOLO_RING_FIRST: u64 = 1;
/// Another ring was offered to the peer, who has not gone to it yet.
pub const TOMBOLO_RING_OFFERED: u64 = 2;
/// The stream is busy.
pub const TOMBOLO_RING_BULK: u64 = 3;
/// The stream was busy and became idle.
pub const TOMBOLO_RING_IDLE: u64 = 4;
/// The budget has no room for a larger ring.
pub const TOMBOLO_RING_BUDGET: u64 = 5;
/// There was no memory for a larger ring, or no way to offer it.
pub const TOMBOLO_RING_MEMORY: u64 = 6;
/// The peer follows to no other ring, or maps none that is larger.
pub const TOMBOLO_RING_PEER: u64 = 7;
/// Memory is short in the control group or the machine.
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
        // One of a later version.
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

/// Who the peer is, said by the backend and not by the peer.
#[repr(C)]
#[derive(Clone, Debug)]
pub struct Peer {
    /// sizeof(struct tombolo_peer), set by the caller; it is filled in that far.
    pub size: u32,
    /// 0.
    pub reserved: u32,
    /// Its process, where the two endpoints share a kernel; else -1.
    pub pid: i64,
    /// Its user, likewise.
    pub uid: i64,
    /// The domain's name or number, ended by NUL, cut where it is longer.
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
