// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a half of a channel sleeps on: the doorbell, seen through the ring's [`WaitContext`].

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

/// Notifications in a row that brought nothing, after which the doorbell is believed no more and naps take its place.
const STORM: u32 = 64;
/// First nap, and the longest.
const NAP: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(16));
/// Longest sleep without another look where a barrier came before it: once where it was issued, always where it was
/// refused. By then a store that it missed is visible.
const LATE: Duration = Duration::from_millis(2);
/// Non-blocking calls between two looks whether the peer lives, where nobody ever waits.
const CALLS_PER_LOOK: u32 = 1024;
/// Time between two such looks of one who notifies.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// One half's side of the doorbell.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) doorbell: Arc<dyn Doorbell>,
    slot: Slot,
    end: Arc<End>,
    spin: Spin,
    /// The doorbell may hold a notification that nobody drained.
    maybe_rung: bool,
    fruitless: Fruitless,
    /// Notifications that ended a sleep.
    notifications: u32,
    calls: u32,
    /// When the peer's life was looked at last, by the coarse clock.
    looked: Duration,
    /// Set up once somebody asks for a descriptor to poll.
    pollable: OnceLock<Pollable>,
    asked: Asked,
    /// The late look of this wait is over.
    looked_late: bool,
    /// If something is there now or comes later, the doorbell holds a notification or will: true after an arming that found
    /// nothing, false once the doorbell was drained.
    promised: bool,
    /// A look at the peer's life took a notification, which counts as one at the next arming for who polls.
    rung_unnoticed: bool,
    polling: Polling,
    /// One sleep was ended because the link is taken away (V-9).
    told_to_leave: bool,
    /// Where this half says what it counted (C-12).
    board: Option<Box<StatsPage>>,
}

impl Waiter {
    pub(crate) fn new(
        doorbell: Arc<dyn Doorbell>,
        slot: Slot,
        end: Arc<End>,
        spin: Duration,
        board: Option<StatsPage>,
    ) -> Self {
        let (spin, pollable) = (Spin::new(spin), OnceLock::new());
        Self {
            doorbell,
            slot,
            end,
            spin,
            maybe_rung: false,
            fruitless: Fruitless::default(),
            notifications: 0,
            calls: 0,
            looked: coarse_time(),
            pollable,
            asked: Asked::Fenced,
            looked_late: false,
            promised: false,
            rung_unnoticed: false,
            polling: Polling::default(),
            told_to_leave: false,
            board: board.map(Box::new),
        }
    }

    pub(crate) fn end(&self) -> &Arc<End> {
        &self.end
    }

    /// Remembers what the peer was caught at, and ends the wait of the other half.
    #[cold]
    pub(crate) fn report_lie(&self, error: &Error) {
        if self.end.report_lie(error) {
            self.doorbell.end_waits();
        }
    }

    pub(crate) fn set_spin(&mut self, most: Duration) {
        self.spin = Spin::new(most);
    }

    /// Waits until `side` has `need` bytes or something else to look at.
    pub(crate) fn wait(&mut self, side: &mut impl Side, need: u64, deadline: Deadline) -> Result<Waited> {
        lend_spin(self, |waiter, spin| wait(side, waiter, spin, need, deadline))
    }

    /// Notifies the peer's waiter of the other kind.
    #[inline(never)]
    pub(crate) fn notify_peer(&self) {
        self.doorbell.notify(match self.slot {
            Slot::Data => Slot::Space,
            Slot::Space => Slot::Data,
        });
    }

    /// Whether one who does not wait should look now whether the peer is gone.
    #[inline]
    pub(crate) fn is_time_to_look(&mut self) -> bool {
        self.calls += 1;
        self.calls >= CALLS_PER_LOOK
    }

    /// Brings this half's board up to date (C-12).
    pub(crate) fn publish(&self, counters: &Counters) {
        if let Some(board) = &self.board {
            board.publish(counters);
        }
    }

    /// Whether the peer is gone, asked by one who just notified: looked at if the last look was a while ago.
    #[cold]
    pub(crate) fn gone_since_last_ring(&mut self) -> bool {
        self.look_is_due() && self.gone_now()
    }

    /// Whether a wait that ended as if the peer were gone ended because the link is taken away, and the peer is there still.
    #[cold]
    pub(crate) fn has_news_only(&mut self) -> bool {
        self.told_to_leave && !self.gone_now()
    }

    /// Whether the last look at the peer's life was a while ago.
    pub(crate) fn look_is_due(&self) -> bool {
        coarse_time().saturating_sub(self.looked) >= LOOK_EVERY
    }

    /// Whether the peer is gone, looked at now.
    #[cold]
    pub(crate) fn gone_now(&mut self) -> bool {
        self.calls = 0;
        self.looked = coarse_time();
        if self.end.gone() {
            return true;
        }
        let woken = match self.doorbell.wait(self.slot, Deadline::NOW) {
            // A notification goes before a hang-up, so it must not stay in the way.
            Ok(DoorbellWoken::Notified) => {
                (self.maybe_rung, self.rung_unnoticed) = (true, true);
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

    /// One who is notified again and again for nothing naps instead of listening.
    fn nap(&self, deadline: Deadline) -> Woken {
        let nap = nap_after(self.fruitless.count);
        let until = Instant::now() + deadline.remaining().map_or(nap, |left| left.min(nap));
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            thread::park_timeout(left);
        }
        if deadline.expired() { Woken::TimedOut } else { Woken::Rung }
    }
}

/// How sure it is that a peer who publishes something now sees that it was asked to notify.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asked {
    /// Both ends fence.
    Fenced,
    /// The kernel's barrier, which can leave a CPU out (ADR 0086): what was published just before may be seen late.
    ByBarrier,
    /// The barrier was refused.
    Unheard,
}

/// Has a half wait by `wait`, and counts what brought something. The spin is lent out so that the rest of the waiter can be the
/// waiter.
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

/// Notifications in a row that brought nothing, to anybody. Where one event stands for both halves of an end, each
/// wakes the half that it is not for as well: what brought the other half something is no storm.
#[derive(Clone, Copy, Debug, Default)]
struct Fruitless {
    count: u32,
    /// Notifications that had brought the other half something by then.
    beside: u32,
}

impl Fruitless {
    /// Something was found, or it is looked for anew.
    fn begin(&mut self, beside: u32) {
        *self = Self { count: 0, beside };
    }

    /// A notification brought nothing. The other half may count what it brought there before this one counts, or after.
    fn count_one(&mut self, beside: u32) {
        let served = beside.wrapping_sub(self.beside);
        self.count = self.count.saturating_add(1).saturating_sub(served);
        self.beside = beside;
    }
}

/// How long one naps who was notified so often for nothing.
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
        if self.maybe_rung {
            self.doorbell.drain(self.slot);
            self.maybe_rung = false;
        }
        self.promised = false;
        self.forget_armed();
    }

    fn barrier(&mut self) {
        self.asked = if os::barrier() { Asked::ByBarrier } else { Asked::Unheard };
    }

    #[cold]
    fn publish_counters(&mut self, counters: &Counters) {
        self.publish(counters);
    }

    fn sleep(&mut self, deadline: Deadline) -> Result<Woken> {
        // Once: the half does what it has to, and waits on.
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
            Asked::Unheard => true,
        };
        let until = if looks_late { deadline.min(Deadline::after(LATE)) } else { deadline };
        Ok(match self.doorbell.wait(self.slot, until)? {
            DoorbellWoken::Notified => {
                self.maybe_rung = true;
                self.notifications = self.notifications.wrapping_add(1);
                self.count_fruitless();
                Woken::Rung
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

/// A waiter that sleeps for the `longest` time at most, from when it begins to.
pub(crate) struct LimitedWaiter<'a> {
    waiter: &'a mut Waiter,
    longest: Duration,
    until: Option<Deadline>,
}

impl<'a> LimitedWaiter<'a> {
    pub(crate) fn new(waiter: &'a mut Waiter, longest: Duration) -> Self {
        Self { waiter, longest, until: None }
    }

    /// Waits as [`Waiter::wait`], as if `deadline` had passed once it has slept for that time. Who does not sleep looks at no
    /// clock for that.
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
        // What is more than that is one.
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
