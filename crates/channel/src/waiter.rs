// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a half of a channel sleeps on: the doorbell, seen through the ring's [`Sleeper`].

mod poll;

use std::{
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use tombolo_domain::{Doorbell, Slot, Woken as Bell};
use tombolo_layout::words;
use tombolo_mem::{OwnWord, PeerWord};
use tombolo_ring::{Board, Counters, Deadline, Side, Sleeper, Spin, Waited, Woken, wait};

pub(crate) use self::poll::Armed;
use self::poll::Polling;
use crate::{Error, Result, end::End, os, pollable::Pollable};

/// Rings in a row that brought nothing, after which the bell is believed no more and naps take its place.
const STORM: u32 = 64;
/// First nap, and the longest.
const NAP: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(16));
/// Longest sleep without another look where the barrier before it was refused.
const UNSURE: Duration = Duration::from_millis(2);
/// Non-blocking calls between two looks whether the peer lives, where nobody ever waits.
const CALLS_PER_LOOK: u32 = 1024;
/// Time between two such looks of one who rings.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// One half's side of the doorbell.
#[derive(Debug)]
pub(crate) struct Waiter {
    bell: Arc<dyn Doorbell>,
    slot: Slot,
    end: Arc<End>,
    spin: Spin,
    /// The bell may hold a ring that nobody drained.
    maybe_rung: bool,
    /// Rings in a row that brought nothing.
    fruitless: u32,
    calls: u32,
    /// When the peer's life was looked at last, by the coarse clock.
    looked: Duration,
    /// Set up once somebody asks for a descriptor to poll.
    pollable: OnceLock<Pollable>,
    /// There was no barrier before this sleep: the peer may have missed that it was asked to ring.
    unsure: bool,
    /// If something is there now or comes later, the bell holds a ring or will: true after an arming that found
    /// nothing, false once the bell was drained.
    promised: bool,
    /// A look at the peer's life took a ring, which counts as one at the next arming for who polls.
    rung_unnoticed: bool,
    polling: Polling,
    /// C-12. Where this half says what it counted.
    board: Option<Box<Board>>,
}

impl Waiter {
    pub(crate) fn new(
        bell: Arc<dyn Doorbell>,
        slot: Slot,
        end: Arc<End>,
        spin: Duration,
        board: Option<Board>,
    ) -> Self {
        let (spin, pollable) = (Spin::new(spin), OnceLock::new());
        Self {
            bell,
            slot,
            end,
            spin,
            maybe_rung: false,
            fruitless: 0,
            calls: 0,
            looked: os::coarse_time(),
            pollable,
            unsure: false,
            promised: false,
            rung_unnoticed: false,
            polling: Polling::default(),
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
            self.bell.end_waits();
        }
    }

    pub(crate) fn set_spin(&mut self, most: Duration) {
        self.spin = Spin::new(most);
    }

    /// Waits until `side` has `need` bytes or something else to look at.
    pub(crate) fn wait(&mut self, side: &mut impl Side, need: u64, deadline: Deadline) -> Result<Waited> {
        self.fruitless = 0;
        // The spin is lent out so that the rest of the waiter can be the sleeper.
        let mut spin = std::mem::replace(&mut self.spin, Spin::new(Duration::ZERO));
        let waited = wait(side, self, &mut spin, need, deadline);
        self.spin = spin;
        waited
    }

    /// Rings the peer's sleeper of the other kind.
    #[inline(never)]
    pub(crate) fn ring_peer(&self) {
        self.bell.ring(match self.slot {
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

    /// C-12. Brings this half's board up to date.
    pub(crate) fn publish(&self, counters: &Counters) {
        if let Some(board) = &self.board {
            board.publish(counters);
        }
    }

    /// Whether the peer is gone, asked by one who just rang: looked at if the last look was a while ago.
    #[cold]
    pub(crate) fn gone_since_last_ring(&mut self) -> bool {
        self.look_is_due() && self.gone_now()
    }

    /// Whether the last look at the peer's life was a while ago.
    pub(crate) fn look_is_due(&self) -> bool {
        os::coarse_time().saturating_sub(self.looked) >= LOOK_EVERY
    }

    /// Whether the peer is gone, looked at now.
    #[cold]
    pub(crate) fn gone_now(&mut self) -> bool {
        self.calls = 0;
        self.looked = os::coarse_time();
        if self.end.gone() {
            return true;
        }
        let woken = match self.bell.wait(self.slot, Deadline::NOW) {
            // A ring goes before a hang-up, so it must not stay in the way.
            Ok(Bell::Rung) => {
                (self.maybe_rung, self.rung_unnoticed) = (true, true);
                self.drain();
                self.bell.wait(self.slot, Deadline::NOW)
            }
            other => other,
        };
        matches!(woken, Ok(Bell::PeerGone))
    }

    /// One who is rung again and again for nothing naps instead of listening.
    fn nap(&self, deadline: Deadline) -> Woken {
        let nap = nap_after(self.fruitless);
        let until = Instant::now() + deadline.remaining().map_or(nap, |left| left.min(nap));
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            thread::park_timeout(left);
        }
        if deadline.expired() { Woken::TimedOut } else { Woken::Rung }
    }
}

/// How long one naps who was rung so often for nothing.
fn nap_after(fruitless: u32) -> Duration {
    let doublings = fruitless.saturating_sub(STORM).min(4);
    (NAP.0 * (1 << doublings)).min(NAP.1)
}

impl Sleeper for Waiter {
    type Error = Error;

    fn ring(&mut self) {
        self.ring_peer();
    }

    fn drain(&mut self) {
        if self.maybe_rung {
            self.bell.drain(self.slot);
            self.maybe_rung = false;
        }
        self.promised = false;
        self.forget_armed();
    }

    fn barrier(&mut self) {
        self.unsure = !os::barrier();
    }

    #[cold]
    fn tell(&mut self, counters: &Counters) {
        self.publish(counters);
    }

    fn sleep(&mut self, deadline: Deadline) -> Result<Woken> {
        if self.fruitless >= STORM {
            let napped = self.nap(deadline);
            self.fruitless += 1;
            return Ok(if self.gone_now() { Woken::PeerGone } else { napped });
        }
        let until = if self.unsure { deadline.min(Deadline::after(UNSURE)) } else { deadline };
        Ok(match self.bell.wait(self.slot, until)? {
            Bell::Rung => {
                self.maybe_rung = true;
                self.fruitless += 1;
                Woken::Rung
            }
            Bell::TimedOut if self.unsure && !deadline.expired() => Woken::Rung,
            Bell::TimedOut => Woken::TimedOut,
            Bell::PeerGone => Woken::PeerGone,
        })
    }

    fn may_offer(&mut self) -> bool {
        true
    }

    fn may_spin(&mut self) -> bool {
        if !self.end.same_cpus {
            return true;
        }
        let cpu = words::encode_cpu(os::current_cpu());
        if self.end.own_cpu.load() != cpu {
            // ORDER R-14: Relaxed; a hint.
            self.end.own_cpu.store_relaxed(cpu);
        }
        self.end.peer_cpu.load_relaxed().hint() != cpu
    }
}
