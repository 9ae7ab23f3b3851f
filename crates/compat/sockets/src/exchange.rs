// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decides which of the program's calls look at what is negotiated with other processes, and lets one thread at a time
//! do so.

use std::{
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tombolo_os::lock::lock;

use crate::negotiation::Negotiations;

/// Threads crowd after they found the sessions locked `CROWD` times within `CROWD_WITHIN`, and for `CROWD_LASTS` from
/// then on.
const CROWD: u64 = 2048;
const CROWD_WITHIN: Duration = Duration::from_millis(100);
const CROWD_LASTS: Duration = Duration::from_secs(1);

/// Negotiations of one process with others, and the hints that tell its calls whether to look at them.
#[derive(Debug)]
pub struct Exchange {
    negotiations: Mutex<Negotiations>,
    /// Whether a thread found that a path has ended, or that messages are left.
    notified: AtomicBool,
    begun: Instant,
    /// Whether there are sessions over which no peer has proved anything.
    unproven: AtomicBool,
    /// Time at which messages were last received, in microseconds since `begun`.
    heard: AtomicU64,
    /// Since when calls are counted that found the sessions locked, likewise; their number; the time until which
    /// threads crowd.
    crowd_since: AtomicU64,
    crowd_met: AtomicU64,
    crowded_until: AtomicU64,
}

impl Exchange {
    pub(crate) fn new() -> Self {
        Self {
            negotiations: Mutex::default(),
            notified: AtomicBool::new(false),
            unproven: AtomicBool::new(false),
            begun: Instant::now(),
            heard: AtomicU64::new(0),
            crowd_since: AtomicU64::new(0),
            crowd_met: AtomicU64::new(0),
            crowded_until: AtomicU64::new(0),
        }
    }

    /// Locks everything that is negotiated, for a caller that has a reason to wait for the lock.
    pub(crate) fn lock_all(&self) -> MutexGuard<'_, Negotiations> {
        lock(&self.negotiations)
    }

    /// Does the same, if nobody holds the lock.
    pub(crate) fn try_lock_all(&self) -> Option<MutexGuard<'_, Negotiations>> {
        self.negotiations.try_lock().ok()
    }

    /// Notes that a path may have ended, or messages are left. The next thread that is about to sleep looks first.
    pub fn mark_notified(&self) {
        self.notified.store(true, Ordering::SeqCst);
    }

    /// Returns whether that was noted since the last call. If so, the caller must look.
    #[inline]
    pub(crate) fn was_notified(&self) -> bool {
        self.notified.load(Ordering::SeqCst) && self.notified.swap(false, Ordering::SeqCst)
    }

    /// Notes whether there are sessions over which no peer has proved anything. Calls of a joined connection learn
    /// nothing of these.
    pub(crate) fn note_unproven(&self, there_are: bool) {
        self.unproven.store(there_are, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn has_unproven(&self) -> bool {
        self.unproven.load(Ordering::Relaxed)
    }

    /// Returns whether nobody has received messages for `pause`. If so, the caller must receive them.
    pub(crate) fn has_not_heard_for(&self, pause: Duration) -> bool {
        let now = self.begun.elapsed().as_micros() as u64;
        let due = now.wrapping_sub(self.heard.load(Ordering::Relaxed)) >= pause.as_micros() as u64;
        if due {
            self.heard.store(now, Ordering::Relaxed);
        }
        due
    }

    /// Counts a call that found the sessions locked.
    pub(crate) fn count_contended(&self) {
        let now = self.begun.elapsed().as_micros() as u64;
        // ORDER: Relaxed, here and below; a count that is off by some decides the same a moment later.
        if now.saturating_sub(self.crowd_since.load(Ordering::Relaxed)) > CROWD_WITHIN.as_micros() as u64 {
            self.crowd_since.store(now, Ordering::Relaxed);
            self.crowd_met.store(0, Ordering::Relaxed);
        }
        if self.crowd_met.fetch_add(1, Ordering::Relaxed) >= CROWD {
            self.crowded_until.store(now + CROWD_LASTS.as_micros() as u64, Ordering::Relaxed);
        }
    }

    /// Returns whether so many threads want the lock that none should hold it for long.
    pub(crate) fn is_crowded(&self) -> bool {
        (self.begun.elapsed().as_micros() as u64) < self.crowded_until.load(Ordering::Relaxed)
    }
}
