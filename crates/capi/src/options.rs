// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Options for setting up a channel.

use std::time::Duration;

use tombolo::{FlushPolicy, Options as Knobs, RingBudget};

use crate::border::{Fault, Outcome};

/// A flag of tombolo_options: never spin before a sleep.
pub const TOMBOLO_NO_SPIN: u32 = 1;
/// A flag of tombolo_options: both endpoints issue a fence at each write. Sleeping costs less then, small writes cost
/// more.
pub const TOMBOLO_NO_MEMBARRIER: u32 = 2;
/// A flag of tombolo_options: the ring of a stream begins with 8 KiB and follows its load. It grows up to ring_size or,
/// if that is 0, to the size that suits the caches of this machine. All rings of a process together grow by at most
/// an eighth of the memory that the process may have, and do not grow where memory is short.
pub const TOMBOLO_RING_GROWTH: u32 = 4;

/// Options for setting up a channel and for the behaviour of this endpoint. Each endpoint chooses its own.
///
/// Zero means the default in every field but the first. A null pointer in place of the struct means all defaults.
///
///     struct tombolo_options options = { .size = sizeof options, .ring_size = 4 << 20 };
#[repr(C)]
#[derive(Clone, Default, Debug)]
pub struct Options {
    /// sizeof(struct tombolo_options), which lets the struct grow in later versions.
    pub size: u32,
    /// TOMBOLO_NO_SPIN, TOMBOLO_NO_MEMBARRIER, TOMBOLO_RING_GROWTH.
    pub flags: u32,
    /// Size in bytes of the ring that this endpoint writes into, rounded up to a power of two, 4 KiB to 1 GiB. Default
    /// 1 MiB; a busy channel of one kernel then tries up to 4 MiB, and keeps them unless they are slower.
    pub ring_size: u64,
    /// Largest ring of the peer that this endpoint maps, in bytes. Default 16 MiB for a caller, else 1 GiB.
    pub largest_peer_ring: u64,
    /// Longest spin before a sleep; less where spinning does not pay. Default 50 us, 200 us between emulated machines.
    /// With TOMBOLO_FOREVER the endpoint never sleeps.
    pub spin_ns: i64,
    /// If not 0, a write checks for a sleeping reader only when so many bytes wait, or at the first write after
    /// flush_ns. Call flush when you stop writing. Default 0: check at every write.
    pub flush_bytes: u64,
    /// See flush_bytes. Default 0.
    pub flush_ns: u64,
    /// Longest time that a peer that connects, or the listener, may take for its part of the handshake. Default 5 s.
    pub handshake_timeout_ns: i64,
    /// Longest time that connect waits for a listener. Default 0: it fails with -ENOENT at once if nobody listens.
    pub wait_for_listener_ns: i64,
    /// Time after which an idle stream's grown ring shrinks. Default 1 s. Only calls on the channel shrink it; a read
    /// that waits is such a call.
    pub ring_idle_ns: i64,
}

/// Converts nanoseconds to a time. A negative number means without end, and gives the longest time.
pub fn duration(ns: i64) -> Duration {
    u64::try_from(ns).map_or(Duration::MAX, Duration::from_nanos)
}

/// Returns the policy for checks for a sleeping reader.
pub fn flush_policy(bytes: u64, ns: u64) -> FlushPolicy {
    match bytes {
        0 => FlushPolicy::Immediate,
        bytes => FlushPolicy::Batch { bytes, time: Duration::from_nanos(ns) },
    }
}

impl Options {
    pub fn knobs(&self) -> Outcome<Knobs> {
        if self.flags & !(TOMBOLO_NO_SPIN | TOMBOLO_NO_MEMBARRIER | TOMBOLO_RING_GROWTH) != 0 {
            return Err(Fault::with(libc::EINVAL, &format!("flags {:#x}: there are 0x1, 0x2 and 0x4", self.flags)));
        }
        let mut knobs = Knobs::new().membarrier(self.flags & TOMBOLO_NO_MEMBARRIER == 0);
        if self.ring_size != 0 {
            knobs = knobs.ring_size(self.ring_size);
        }
        if self.flags & TOMBOLO_RING_GROWTH != 0 {
            knobs = knobs.ring_growth(RingBudget::of_process());
        }
        if self.ring_idle_ns != 0 {
            knobs = knobs.ring_idle_time(duration(self.ring_idle_ns));
        }
        if self.largest_peer_ring != 0 {
            knobs = knobs.largest_peer_ring(self.largest_peer_ring);
        }
        if self.flags & TOMBOLO_NO_SPIN != 0 {
            knobs = knobs.spin(Duration::ZERO);
        } else if self.spin_ns != 0 {
            knobs = knobs.spin(duration(self.spin_ns));
        }
        knobs = knobs.flush_policy(flush_policy(self.flush_bytes, self.flush_ns));
        if self.handshake_timeout_ns != 0 {
            knobs = knobs.handshake_timeout(duration(self.handshake_timeout_ns));
        }
        if self.wait_for_listener_ns != 0 {
            knobs = knobs.wait_for_listener(duration(self.wait_for_listener_ns));
        }
        Ok(knobs)
    }
}
