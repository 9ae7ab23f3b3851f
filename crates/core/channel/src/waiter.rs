// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Puts a half of a channel to sleep on its doorbell, behind the ring's [`WaitContext`].

mod poll;

use std::{
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use tombolo_domain::{Doorbell, Slot, Woken as DoorbellWoken};
use tombolo_os::clock::coarse_time;
use tombolo_ring::{Counters, Deadline, Side, Spin, StatsPage, WaitContext, Waited, Woken, wait};

pub(crate) use self::poll::Armed;
use self::poll::Polling;
use crate::{Error, Result, end::End, os, pollable::Pollable};

/// Number of notifications in a row without anything to do after which naps replace sleeping on the doorbell.
const STORM: u32 = 64;
/// First and longest nap.
const NAP: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(16));
/// Longest sleep without another check after a barrier. It applies once where the barrier was issued, always where it
/// was refused. By then a store that the barrier missed is visible.
const LATE: Duration = Duration::from_millis(2);
/// Number of non-blocking calls between two checks whether the peer lives, in a program that never waits.
const CALLS_PER_LOOK: u32 = 1024;
/// Time between two such checks in a half that notifies.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// One half's side of the doorbell.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) doorbell: Arc<dyn Doorbell>,
    slot: Slot,
    end: Arc<End>,
    spin: Spin,
    /// Whether the doorbell may hold a notification that was not drained.
    maybe_notified: bool,
    fruitless: Fruitless,
    /// Number of notifications that ended a sleep.
    notifications: u32,
    calls: u32,
    /// Time of the last check of the peer's liveness, by the coarse clock.
    looked: Duration,
    /// The descriptor to poll, made once a caller asks for it.
    pollable: OnceLock<Pollable>,
    asked: Asked,
    /// Whether the late check of this wait was made.
    looked_late: bool,
    /// Whether the doorbell holds a notification, or will hold one, if something is there now or comes later. True
    /// after an arming that found nothing, false once the doorbell was drained.
    promised: bool,
    /// Whether a check of the peer's liveness took a notification. It counts as one at the next arming for a program
    /// that polls.
    notified_unseen: bool,
    polling: Polling,
    /// Whether one sleep was ended because the link is taken away (V-9).
    told_to_leave: bool,
    /// Stats page in which this half publishes its counters (C-12).
    stats_page: Option<Box<StatsPage>>,
}

impl Waiter {
    pub(crate) fn new(
        doorbell: Arc<dyn Doorbell>,
        slot: Slot,
        end: Arc<End>,
        spin: Duration,
        stats_page: Option<StatsPage>,
    ) -> Self {
        let (spin, pollable) = (Spin::new(spin), OnceLock::new());
        Self {
            doorbell,
            slot,
            end,
            spin,
            maybe_notified: false,
            fruitless: Fruitless::default(),
            notifications: 0,
            calls: 0,
            looked: coarse_time(),
            pollable,
            asked: Asked::Fenced,
            looked_late: false,
            promised: false,
            notified_unseen: false,
            polling: Polling::default(),
            told_to_leave: false,
            stats_page: stats_page.map(Box::new),
        }
    }

    pub(crate) fn end(&self) -> &Arc<End> {
        &self.end
    }

    /// Records the peer's protocol violation, and ends the wait of the other half.
    #[cold]
    pub(crate) fn report_violation(&self, error: &Error) {
        if self.end.report_violation(error) {
            self.doorbell.end_waits();
        }
    }

    pub(crate) fn set_spin(&mut self, most: Duration) {
        self.spin = Spin::new(most);
    }

    /// Waits until `side` has `need` bytes, or something else that needs attention.
    pub(crate) fn wait(&mut self, side: &mut impl Side, need: u64, deadline: Deadline) -> Result<Waited> {
        lend_spin(self, |waiter, spin| wait(side, waiter, spin, need, deadline))
    }

    /// Notifies the peer's half that waits in the other slot.
    #[inline(never)]
    pub(crate) fn notify_peer(&self) {
        self.doorbell.notify(match self.slot {
            Slot::Data => Slot::Space,
            Slot::Space => Slot::Data,
        });
    }

    /// Returns whether a half that does not wait should check now whether the peer is gone.
    #[inline]
    pub(crate) fn is_time_to_look(&mut self) -> bool {
        self.calls += 1;
        self.calls >= CALLS_PER_LOOK
    }

    /// Brings this half's stats page up to date (C-12).
    pub(crate) fn publish(&self, counters: &Counters) {
        if let Some(page) = &self.stats_page {
            page.publish(counters);
        }
    }

    /// Returns whether the peer is gone, for a half that just notified it. Checks only if the last check was a while
    /// ago.
    #[cold]
    pub(crate) fn gone_since_last_check(&mut self) -> bool {
        self.look_is_due() && self.gone_now()
    }

    /// Returns whether a wait that ended as if the peer were gone ended only because the link is being taken away, with
    /// the peer still there.
    #[cold]
    pub(crate) fn has_news_only(&mut self) -> bool {
        self.told_to_leave && !self.gone_now()
    }

    /// Returns whether the last check of the peer's liveness was a while ago.
    pub(crate) fn look_is_due(&self) -> bool {
        coarse_time().saturating_sub(self.looked) >= LOOK_EVERY
    }

    /// Checks now whether the peer is gone, and returns the result.
    #[cold]
    pub(crate) fn gone_now(&mut self) -> bool {
        self.calls = 0;
        self.looked = coarse_time();
        if self.end.gone() {
            return true;
        }
        let woken = match self.doorbell.wait(self.slot, Deadline::NOW) {
            // The doorbell reports a notification before a hang-up, so the notification must be drained first.
            Ok(DoorbellWoken::Notified) => {
                (self.maybe_notified, self.notified_unseen) = (true, true);
                self.drain();
                self.doorbell.wait(self.slot, Deadline::NOW)
            }
            other => other,
        };
        matches!(woken, Ok(DoorbellWoken::PeerGone))
    }

    fn count_fruitless(&mut self) {
        self.fruitless.count_one(self.end.served_beside(self.slot));
    }

    /// Naps instead of sleeping on the doorbell, after too many notifications without anything to do.
    fn nap(&self, deadline: Deadline) -> Woken {
        let nap = nap_after(self.fruitless.count);
        let until = Instant::now() + deadline.remaining().map_or(nap, |left| left.min(nap));
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            thread::park_timeout(left);
        }
        if deadline.expired() { Woken::TimedOut } else { Woken::Notified }
    }
}

/// Certainty that a peer that publishes something now sees that it was asked to notify.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asked {
    /// Both endpoints issue a fence.
    Fenced,
    /// The kernel issued its barrier, which can leave a CPU out (ADR 0086): what was published just before may be seen
    /// late.
    ByBarrier,
    /// The kernel refused the barrier.
    Unordered,
}

/// Runs `wait` for a half, and counts a notification for which it found something. The spin state is taken out
/// meanwhile, so that the rest of the waiter can act as the [`WaitContext`].
#[inline]
fn lend_spin(waiter: &mut Waiter, wait: impl FnOnce(&mut Waiter, &mut Spin) -> Result<Waited>) -> Result<Waited> {
    waiter.fruitless.begin(waiter.end.served_beside(waiter.slot));
    waiter.looked_late = false;
    let before = waiter.notifications;
    let mut spin = std::mem::replace(&mut waiter.spin, Spin::new(Duration::ZERO));
    let waited = wait(waiter, &mut spin);
    waiter.spin = spin;
    if waiter.notifications != before && matches!(waited, Ok(Waited::Ready)) {
        waiter.end.note_served(waiter.slot);
    }
    waited
}

/// Number of notifications in a row for which neither half found anything. Where one event serves both halves of
/// an endpoint, each notification also wakes the half that it is not for. It is not part of a storm if the other
/// half found something.
#[derive(Clone, Copy, Debug, Default)]
struct Fruitless {
    count: u32,
    /// Number of notifications for which the other half had found something by then.
    beside: u32,
}

impl Fruitless {
    /// Starts counting anew, because something was found or a new wait begins.
    fn begin(&mut self, beside: u32) {
        *self = Self { count: 0, beside };
    }

    /// Counts a notification for which this half found nothing. The other half may count what it found before this
    /// call, or after it.
    fn count_one(&mut self, beside: u32) {
        let served = beside.wrapping_sub(self.beside);
        self.count = self.count.saturating_add(1).saturating_sub(served);
        self.beside = beside;
    }
}

/// Returns the length of a nap after `fruitless` notifications without anything to do.
fn nap_after(fruitless: u32) -> Duration {
    let doublings = fruitless.saturating_sub(STORM).min(4);
    (NAP.0 * (1 << doublings)).min(NAP.1)
}

impl WaitContext for Waiter {
    type Error = Error;

    fn notify(&mut self) {
        self.notify_peer();
    }

    fn drain(&mut self) {
        if self.maybe_notified {
            self.doorbell.drain(self.slot);
            self.maybe_notified = false;
        }
        self.promised = false;
        self.forget_armed();
    }

    fn barrier(&mut self) {
        self.asked = if os::barrier() { Asked::ByBarrier } else { Asked::Unordered };
    }

    #[cold]
    fn publish_counters(&mut self, counters: &Counters) {
        self.publish(counters);
    }

    fn sleep(&mut self, deadline: Deadline) -> Result<Woken> {
        // Only once: the half does its work for this, and waits on.
        if self.doorbell.is_leaving() && !std::mem::replace(&mut self.told_to_leave, true) {
            return Ok(Woken::PeerGone);
        }
        if self.fruitless.count >= STORM {
            let napped = self.nap(deadline);
            self.count_fruitless();
            return Ok(if self.gone_now() { Woken::PeerGone } else { napped });
        }
        let looks_late = match self.asked {
            Asked::Fenced => false,
            Asked::ByBarrier => !self.looked_late,
            Asked::Unordered => true,
        };
        let until = if looks_late { deadline.min(Deadline::after(LATE)) } else { deadline };
        Ok(match self.doorbell.wait(self.slot, until)? {
            DoorbellWoken::Notified => {
                self.maybe_notified = true;
                self.notifications = self.notifications.wrapping_add(1);
                self.count_fruitless();
                Woken::Notified
            }
            DoorbellWoken::TimedOut if looks_late && !deadline.expired() => {
                self.looked_late = true;
                Woken::LookDue
            }
            DoorbellWoken::TimedOut => Woken::TimedOut,
            DoorbellWoken::PeerGone => Woken::PeerGone,
        })
    }

    fn may_offer(&mut self) -> bool {
        true
    }

    fn may_spin(&mut self) -> bool {
        !self.end.shares_cpu()
    }
}

/// A waiter that sleeps for at most `longest`, counted from the beginning of its sleep.
pub(crate) struct LimitedWaiter<'a> {
    waiter: &'a mut Waiter,
    longest: Duration,
    until: Option<Deadline>,
}

impl<'a> LimitedWaiter<'a> {
    pub(crate) fn new(waiter: &'a mut Waiter, longest: Duration) -> Self {
        Self { waiter, longest, until: None }
    }

    /// Waits like [`Waiter::wait`], as if `deadline` had passed once it has slept for that time. A wait that does not
    /// sleep needs no clock for this.
    #[cold]
    #[inline(never)]
    pub(crate) fn wait(self, side: &mut impl Side, need: u64, deadline: Deadline) -> Result<Waited> {
        let longest = self.longest;
        let deadline = if self.waiter.spin.always() { deadline.min(Deadline::after(longest)) } else { deadline };
        lend_spin(self.waiter, |waiter, spin| {
            wait(side, &mut LimitedWaiter::new(waiter, longest), spin, need, deadline)
        })
    }
}

impl WaitContext for LimitedWaiter<'_> {
    type Error = Error;

    fn notify(&mut self) {
        self.waiter.notify();
    }

    fn drain(&mut self) {
        self.waiter.drain();
    }

    fn barrier(&mut self) {
        self.waiter.barrier();
    }

    fn publish_counters(&mut self, counters: &Counters) {
        self.waiter.publish_counters(counters);
    }

    fn sleep(&mut self, deadline: Deadline) -> Result<Woken> {
        let until = *self.until.get_or_insert_with(|| Deadline::after(self.longest));
        self.waiter.sleep(deadline.min(until))
    }

    fn may_offer(&mut self) -> bool {
        self.waiter.may_offer()
    }

    fn may_spin(&mut self) -> bool {
        self.waiter.may_spin()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r25_notifications_that_brought_the_other_half_something_are_no_storm() {
        let mut fruitless = Fruitless::default();
        let mut beside = u32::MAX - 500;
        fruitless.begin(beside);
        for at in 0..10_000 {
            // The other half counts before this one, or only after it.
            if at % 3 != 0 {
                beside = beside.wrapping_add(if at % 3 == 1 { 2 } else { 1 });
            }
            fruitless.count_one(beside);
            assert!(fruitless.count < 4, "{at}: {}", fruitless.count);
        }
        // More notifications than that are a storm.
        let mut count = 0;
        while fruitless.count < STORM {
            count += 1;
            beside = beside.wrapping_add(u32::from(count % 4 == 0));
            fruitless.count_one(beside);
            assert!(count < 2 * STORM, "a peer that also sends something naps nobody less");
        }
        fruitless.begin(beside);
        assert_eq!(fruitless.count, 0);
        (0..STORM).for_each(|_| fruitless.count_one(beside));
        assert_eq!(fruitless.count, STORM, "nothing beside it: each counts");
    }
}
