// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Supports programs that poll the descriptor of a half: arms the half before a call reports would-block, and stops
//! polling a doorbell that is notified for nothing.

use std::{
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use tombolo_domain::Woken as DoorbellWoken;
use tombolo_os::clock::coarse_time;
use tombolo_ring::{Deadline, Side, arm};

use super::{Asked, LATE, STORM, Waiter, nap_after};
use crate::{Result, pollable::Pollable};

/// Result of arming for a program that polls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Armed {
    /// There is something to do after all.
    Ready,
    /// There is nothing, and the descriptor becomes readable once there is.
    Quiet,
    /// There is nothing, and no peer is left that could change that.
    PeerGone,
}

/// State for a program that polls.
#[derive(Debug, Default)]
pub(super) struct Polling {
    /// Position for which the last arming found nothing.
    idle_at: Option<u64>,
    /// Like [`idle_at`](Self::idle_at), if the half is still armed and the descriptor was quiet then.
    armed: Option<u64>,
    /// State of the late check for [`idle_at`](Self::idle_at).
    late: LateLook,
    /// Time before which the doorbell is not polled.
    nap_until: Option<Instant>,
    /// Time when the descriptor's clock expires or expired.
    clock: Option<Instant>,
}

/// The check after a barrier that may have missed the peer. Only the program that polls can make it, so the
/// descriptor polls readable for it once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum LateLook {
    #[default]
    NotAsked,
    /// The descriptor's clock expires then, or sooner for an earlier arming.
    DueAt(Instant),
    /// The check was made: anything that the barrier missed would have been seen.
    Over,
}

impl LateLook {
    fn is_due(self) -> bool {
        matches!(self, Self::DueAt(then) if Instant::now() >= then)
    }
}

impl Polling {
    /// Returns whether the descriptor polls readable because of its clock.
    fn is_clock_expired(&self) -> bool {
        self.clock.is_some_and(|then| Instant::now() >= then)
    }

    /// Makes `pollable` poll readable once the late check is due. Returns whether that succeeded. A running clock is
    /// kept, and set for the remaining time once it has expired: setting it at every arming would cost each round trip
    /// a microsecond.
    fn promise_late_look(&mut self, pollable: &Pollable) -> bool {
        let now = Instant::now();
        let due = match self.late {
            LateLook::DueAt(then) => then,
            LateLook::NotAsked | LateLook::Over => now + LATE,
        };
        self.late = LateLook::DueAt(due);
        if self.clock.is_none_or(|then| then <= now) {
            let left = due.saturating_duration_since(now).max(Duration::from_nanos(1));
            self.clock = pollable.wake_after(left, None).then_some(due);
        }
        self.clock.is_some()
    }
}

impl Waiter {
    /// Returns the descriptor to poll. From its first use on, [`rearm_poll_fd`](Self::rearm_poll_fd) keeps it correct.
    pub(crate) fn pollable(&self) -> Result<BorrowedFd<'_>> {
        if self.pollable.get().is_none() {
            let made = Pollable::new(self.doorbell.fd(self.slot))?;
            // What is there is not known yet, so the program that polls is made to look once.
            made.raise();
            let _ = self.pollable.set(made);
        }
        Ok(self.pollable.get().expect("set just now").fd())
    }

    #[inline]
    pub(crate) fn is_polled(&self) -> bool {
        self.pollable.get().is_some()
    }

    /// Ends a call so that a program that polls misses neither what is left nor what came meanwhile.
    #[inline]
    pub(crate) fn rearm_poll_fd(&mut self) {
        if !self.promised && self.is_polled() {
            self.promise();
        }
    }

    #[cold]
    fn promise(&mut self) {
        if let Some(pollable) = self.pollable.get() {
            pollable.raise();
            self.promised = true;
            self.polling.armed = None;
        }
    }

    /// Returns whether the half is armed for `position`.
    pub(crate) fn is_armed(&self, position: u64) -> bool {
        self.polling.armed == Some(position)
    }

    /// Forgets the arming, so that the half is armed again next time.
    #[inline]
    pub(crate) fn forget_armed(&mut self) {
        self.polling.armed = None;
    }

    /// Ends a nap after a call that did something: there is no storm, or there is also real work.
    #[inline]
    pub(crate) fn end_nap(&mut self) {
        if self.polling.nap_until.is_some() {
            self.listen_again();
        }
    }

    #[cold]
    fn listen_again(&mut self) {
        self.fruitless.begin(self.end.served_beside(self.slot));
        self.polling = Polling::default();
        // It is not known whether the peer notified meanwhile.
        self.promised = false;
        if let Some(pollable) = self.pollable.get() {
            pollable.stop_clock();
            pollable.listen(self.doorbell.fd(self.slot));
        }
    }

    /// Arms before a call reports would-block to a program that polls, for lack of what comes with `position`. The
    /// descriptor then stays quiet until there is something. Returns at once if the half is armed for that position
    /// already and no notification came.
    pub(crate) fn arm_for_poll(&mut self, side: &mut impl Side, need: u64, position: u64) -> Result<Armed> {
        if !self.is_polled() {
            return Ok(Armed::Quiet);
        }
        let again = self.polling.idle_at == Some(position);
        let napped = match self.polling.nap_until {
            Some(until) if again && Instant::now() < until => {
                // The clock makes the descriptor readable, whatever was drained meanwhile.
                self.pollable.get().expect("looked at above").lower();
                self.promised = true;
                return Ok(Armed::Quiet);
            }
            nap => nap.is_some(),
        };
        let notified = match self.take_notifications()? {
            DoorbellWoken::PeerGone => return Ok(Armed::PeerGone),
            woken => woken == DoorbellWoken::Notified,
        };
        match self.polling.late {
            _ if !again => self.polling.late = LateLook::NotAsked,
            late if late.is_due() => self.polling.late = LateLook::Over,
            _ if !notified && self.is_armed(position) && !napped && !self.polling.is_clock_expired() => {
                return Ok(Armed::Quiet);
            }
            _ => {}
        }
        match (again, notified) {
            (true, true) => self.count_fruitless(),
            // No notification came during a whole nap, so the storm is over.
            (true, false) if !napped => {}
            _ => self.fruitless.begin(self.end.served_beside(self.slot)),
        }
        if notified && !again {
            self.end.note_served(self.slot);
        }
        if napped && self.fruitless.count < STORM {
            self.listen_again();
        }
        self.pollable.get().expect("looked at above").lower();
        if arm(side, self, need)? {
            self.polling.idle_at = None;
            return Ok(Armed::Ready);
        }
        self.polling.idle_at = Some(position);
        self.promise_quietly();
        let is_quiet = self.polling.clock.is_none() || matches!(self.polling.late, LateLook::DueAt(_));
        self.polling.armed = (self.promised && is_quiet).then_some(position);
        self.publish(&side.counted());
        Ok(Armed::Quiet)
    }

    /// Keeps the promise after an arming that found nothing. The doorbell makes the descriptor readable, or a clock
    /// where the doorbell is notified too often or not reliably.
    fn promise_quietly(&mut self) {
        let Some(pollable) = self.pollable.get() else { return };
        // Without the barrier it is not certain that the peer notifies.
        let is_certain = self.asked != Asked::Unordered && pollable.is_listening();
        let storm = self.fruitless.count >= STORM;
        self.promised = is_certain;
        self.polling.nap_until = None;
        if storm || !is_certain {
            self.polling.late = LateLook::NotAsked;
            let nap = if storm { nap_after(self.fruitless.count) } else { LATE };
            // Taken before the clock is set, so that a call after the clock expired finds the nap over.
            let until = Instant::now() + nap;
            // Without a clock, the descriptor still polls a doorbell that is notified for nothing. Without both, it
            // stays readable.
            if pollable.wake_after(nap, storm.then(|| self.doorbell.fd(self.slot))) {
                (self.promised, self.polling.clock) = (true, Some(until));
                self.polling.nap_until = storm.then_some(until);
            }
        } else if self.asked == Asked::ByBarrier && self.polling.late != LateLook::Over {
            self.promised = self.polling.promise_late_look(pollable);
        } else if self.polling.clock.take().is_some() {
            pollable.stop_clock();
        }
    }

    /// Empties the doorbell. Returns whether it was notified, or that the peer is gone.
    fn take_notifications(&mut self) -> Result<DoorbellWoken> {
        self.calls = 0;
        self.looked = coarse_time();
        if self.end.gone() {
            return Ok(DoorbellWoken::PeerGone);
        }
        let mut woken = self.doorbell.wait(self.slot, Deadline::NOW)?;
        let notified = woken == DoorbellWoken::Notified || self.notified_unseen;
        if woken == DoorbellWoken::Notified {
            // The doorbell reports a notification before a hang-up, so the notification must be drained first.
            self.doorbell.drain(self.slot);
            woken = self.doorbell.wait(self.slot, Deadline::NOW)?;
        }
        (self.maybe_notified, self.notified_unseen) = (woken == DoorbellWoken::Notified, false);
        Ok(if notified && woken != DoorbellWoken::PeerGone { DoorbellWoken::Notified } else { woken })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r25_naps_double_from_one_millisecond_to_sixteen() {
        let naps: Vec<_> = (0..8).map(|more| nap_after(STORM + more).as_millis()).collect();
        assert_eq!(naps, [1, 2, 4, 8, 16, 16, 16, 16]);
        assert_eq!(nap_after(u32::MAX), Duration::from_millis(16));
    }
}
