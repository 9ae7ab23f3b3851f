// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a half of a channel does for one who polls: it arms before a call says would-block, and listens less to a
//! doorbell that rings for nothing.

use std::{
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use tombolo_domain::Woken as DoorbellWoken;
use tombolo_os::clock::coarse_time;
use tombolo_ring::{Deadline, Side, arm};

use super::{Asked, LATE, STORM, Waiter, nap_after};
use crate::{Result, pollable::Pollable};

/// What arming for one who polls came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Armed {
    /// There is something after all.
    Ready,
    /// There is nothing, and the descriptor will tell once there is.
    Quiet,
    /// There is nothing, and nobody is left who could change that.
    PeerGone,
}

/// What is known of one who polls.
#[derive(Debug, Default)]
pub(super) struct Polling {
    /// The last arming found nothing, and was for this position.
    idle_at: Option<u64>,
    /// As [`idle_at`](Self::idle_at); it is still armed, and the descriptor was quiet then.
    armed: Option<u64>,
    /// The late look for [`idle_at`](Self::idle_at).
    late: LateLook,
    /// The doorbell is not listened to before then.
    nap_until: Option<Instant>,
    /// When the descriptor's clock runs down, or did.
    clock: Option<Instant>,
}

/// The look after a barrier that may have missed the peer. Nobody is there to look but who polls: the descriptor
/// polls readable for it once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum LateLook {
    #[default]
    NotAsked,
    /// The descriptor's clock runs down then, or sooner for an earlier arming.
    DueAt(Instant),
    /// What the barrier missed would have been seen.
    Over,
}

impl LateLook {
    fn is_due(self) -> bool {
        matches!(self, Self::DueAt(then) if Instant::now() >= then)
    }
}

impl Polling {
    /// Whether the descriptor polls readable for its clock.
    fn has_run_down(&self) -> bool {
        self.clock.is_some_and(|then| Instant::now() >= then)
    }

    /// Has `pollable` poll readable once the late look is due; says whether that could be done. A clock that runs already runs
    /// on, and is set for the rest when it has run down: to set it at every arming costs each round trip a microsecond.
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
    /// The descriptor to poll; from its first use on, [`rearm_poll_fd`](Self::rearm_poll_fd) keeps its promise.
    pub(crate) fn pollable(&self) -> Result<BorrowedFd<'_>> {
        if self.pollable.get().is_none() {
            let made = Pollable::new(self.doorbell.fd(self.slot))?;
            // Nobody knows yet what is there: whoever polls is sent to look once.
            made.raise();
            let _ = self.pollable.set(made);
        }
        Ok(self.pollable.get().expect("set just now").fd())
    }

    #[inline]
    pub(crate) fn is_polled(&self) -> bool {
        self.pollable.get().is_some()
    }

    /// At the end of a call: whoever polls must not miss what is left, nor what came meanwhile.
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

    /// Whether it was armed for `position`, and is.
    pub(crate) fn is_armed(&self, position: u64) -> bool {
        self.polling.armed == Some(position)
    }

    /// What it was armed for is to be armed for again.
    #[inline]
    pub(crate) fn forget_armed(&mut self) {
        self.polling.armed = None;
    }

    /// After a call that did something: there was no storm, or it is not all that comes.
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
        // Whether anybody rang meanwhile, nobody knows.
        self.promised = false;
        if let Some(pollable) = self.pollable.get() {
            pollable.stop_clock();
            pollable.listen(self.doorbell.fd(self.slot));
        }
    }

    /// Before a call says would-block to one who polls, for want of what comes with `position`: arms, so that the
    /// descriptor stays quiet until there is something. Where it is armed for that already and nobody has rung, that is all.
    pub(crate) fn arm_for_poll(&mut self, side: &mut impl Side, need: u64, position: u64) -> Result<Armed> {
        if !self.is_polled() {
            return Ok(Armed::Quiet);
        }
        let again = self.polling.idle_at == Some(position);
        let napped = match self.polling.nap_until {
            Some(until) if again && Instant::now() < until => {
                // The clock tells, whatever was drained meanwhile.
                self.pollable.get().expect("looked at above").lower();
                self.promised = true;
                return Ok(Armed::Quiet);
            }
            nap => nap.is_some(),
        };
        let rung = match self.take_rings()? {
            DoorbellWoken::PeerGone => return Ok(Armed::PeerGone),
            woken => woken == DoorbellWoken::Notified,
        };
        match self.polling.late {
            _ if !again => self.polling.late = LateLook::NotAsked,
            late if late.is_due() => self.polling.late = LateLook::Over,
            _ if !rung && self.is_armed(position) && !napped && !self.polling.has_run_down() => {
                return Ok(Armed::Quiet);
            }
            _ => {}
        }
        match (again, rung) {
            (true, true) => self.count_fruitless(),
            // Nobody rang during a whole nap: the storm is over.
            (true, false) if !napped => {}
            _ => self.fruitless.begin(self.end.served_beside(self.slot)),
        }
        if rung && !again {
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

    /// After an arming that found nothing: the doorbell tells what comes, or a clock where the doorbell tells too much
    /// or too little.
    fn promise_quietly(&mut self) {
        let Some(pollable) = self.pollable.get() else { return };
        // Without the barrier nobody can promise that the peer notifies.
        let heard = self.asked != Asked::Unheard && pollable.is_listening();
        let storm = self.fruitless.count >= STORM;
        self.promised = heard;
        self.polling.nap_until = None;
        if storm || !heard {
            self.polling.late = LateLook::NotAsked;
            let nap = if storm { nap_after(self.fruitless.count) } else { LATE };
            // Taken before the clock is set: what is asked after it has run down finds the nap over.
            let until = Instant::now() + nap;
            // Where there is no clock to be had, a doorbell that rings for nothing is listened to, and for want of both
            // the descriptor stays readable.
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

    /// Empties the doorbell, and says whether it was rung; or that the peer is gone.
    fn take_rings(&mut self) -> Result<DoorbellWoken> {
        self.calls = 0;
        self.looked = coarse_time();
        if self.end.gone() {
            return Ok(DoorbellWoken::PeerGone);
        }
        let mut woken = self.doorbell.wait(self.slot, Deadline::NOW)?;
        let rung = woken == DoorbellWoken::Notified || self.rung_unnoticed;
        if woken == DoorbellWoken::Notified {
            // A ring goes before a hang-up, so it must not stay in the way.
            self.doorbell.drain(self.slot);
            woken = self.doorbell.wait(self.slot, Deadline::NOW)?;
        }
        (self.maybe_rung, self.rung_unnoticed) = (woken == DoorbellWoken::Notified, false);
        Ok(if rung && woken != DoorbellWoken::PeerGone { DoorbellWoken::Notified } else { woken })
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
