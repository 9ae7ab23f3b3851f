// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which of the program's calls look at what is negotiated with other processes, and that one thread at a time does.

use std::{
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tombolo_os::lock::lock;

use crate::negotiation::Negotiations;

/// Threads crowd where they found the sessions taken so often within one such time, and for so long after.
const CROWD: u64 = 2048;
const CROWD_WITHIN: Duration = Duration::from_millis(100);
const CROWD_LASTS: Duration = Duration::from_secs(1);

/// What one process negotiates with others, and what tells its calls whether to look at it.
#[derive(Debug)]
pub struct Exchange {
    negotiations: Mutex<Negotiations>,
    /// Somebody heard that a path has ended, or that messages are left.
    notified: AtomicBool,
    begun: Instant,
    /// There are sessions over which nobody has proved anything.
    unproven: AtomicBool,
    /// When the sessions were last listened to, in microseconds since then.
    heard: AtomicU64,
    /// When calls began to be counted that found the sessions taken, likewise; how many there were; until when threads crowd.
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

    /// All that is negotiated, for one who has a reason to wait for it.
    pub(crate) fn lock_all(&self) -> MutexGuard<'_, Negotiations> {
        lock(&self.negotiations)
    }

    /// The same, if nobody has it.
    pub(crate) fn try_lock_all(&self) -> Option<MutexGuard<'_, Negotiations>> {
        self.negotiations.try_lock().ok()
    }

    /// A path has ended, perhaps, or messages are left. Whoever sleeps next looks first.
    pub fn mark_notified(&self) {
        self.notified.store(true, Ordering::SeqCst);
    }

    /// Whether that was said since somebody last asked; who is told so looks.
    #[inline]
    pub(crate) fn was_notified(&self) -> bool {
        self.notified.load(Ordering::SeqCst) && self.notified.swap(false, Ordering::SeqCst)
    }

    /// Whether there are sessions over which nobody has proved anything: of these no call of a joined connection hears.
    pub(crate) fn note_unproven(&self, there_are: bool) {
        self.unproven.store(there_are, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn has_unproven(&self) -> bool {
        self.unproven.load(Ordering::Relaxed)
    }

    /// Whether the sessions were left alone for so long; who is told so listens.
    pub(crate) fn has_not_heard_for(&self, pause: Duration) -> bool {
        let now = self.begun.elapsed().as_micros() as u64;
        let due = now.wrapping_sub(self.heard.load(Ordering::Relaxed)) >= pause.as_micros() as u64;
        if due {
            self.heard.store(now, Ordering::Relaxed);
        }
        due
    }

    /// A call found that another has it.
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

    /// Whether so many threads want it now that none should have it for long.
    pub(crate) fn is_crowded(&self) -> bool {
        (self.begun.elapsed().as_micros() as u64) < self.crowded_until.load(Ordering::Relaxed)
    }
}
