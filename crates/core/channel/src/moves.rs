// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves of the ring that this endpoint writes: those that its program requests, and those that follow its load (ADR
//! 0055).

use std::time::Duration;

use tombolo_domain::Error as DomainError;
use tombolo_growth::{Growth, RingGrowth, RingReason};
use tombolo_layout::words;
use tombolo_mem::{Mapped, MappedOwnWord, OwnWord};
use tombolo_os::clock::{coarse_time, exact_time};
use tombolo_ring::Writer;

use crate::{Error, Result, handover::Outgoing, signalled::SignalledRing, stats::PipeStatistics};

/// First interval at which an endpoint checks whether its peer follows a move.
const LOOK: Duration = Duration::from_millis(1);
/// Number of checks by an idle endpoint whether its peer follows a move. Each comes after twice the time of the one
/// before.
const LOOKS_MOST: u32 = 10;

/// Time for which a reader returns no room after which a writer that may move to a larger ring no longer waits for it.
const STUCK: Duration = Duration::from_millis(1);
/// Interval at which a waiting writer checks whether there is memory for a larger ring by now.
const STARVED: Duration = Duration::from_secs(1);

type Ring = SignalledRing<Writer<Mapped>>;

/// The move that is under way, and the policy that begins moves.
#[derive(Debug)]
pub(crate) struct RingMoves {
    outgoing: Outgoing,
    /// Policy, if the ring follows its load.
    growth: Option<Box<Growth>>,
    /// Whether the writer moves to a larger ring at once (H-9).
    goes_ahead: bool,
    /// Word that publishes how the ring follows its load (C-12).
    growth_word: Option<MappedOwnWord>,
    /// Number of checks since the last write whether an idle peer has done its part of a move.
    looks: u32,
    /// Whether it is time to check the size of the ring. It may be too large for a writer that is nearly idle, or too
    /// small without ever being full.
    look_due: bool,
}

/// Result of an offer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempt {
    Offered,
    /// There was no memory. A smaller ring may succeed.
    NoMemory,
    Impossible,
}

impl RingMoves {
    pub(crate) fn new(growth: Option<Growth>, goes_ahead: bool, growth_word: Option<MappedOwnWord>) -> Self {
        let growth = growth.map(Box::new);
        let moves = Self { outgoing: Outgoing::default(), growth, goes_ahead, growth_word, looks: 0, look_due: false };
        moves.publish_growth();
        moves
    }

    /// Publishes for tools how the ring follows its load (C-12).
    fn publish_growth(&self) {
        if let Some(published) = &self.growth_word {
            let word = self.growth.as_ref().map_or(0, |growth| {
                let RingGrowth { target, reason, .. } = growth.state();
                words::encode_growth(target, reason as u8)
            });
            // ORDER C-12: Relaxed; the word stands for itself.
            published.store_relaxed(word);
        }
    }

    #[inline]
    pub(crate) fn is_under_way(&self) -> bool {
        self.outgoing.is_under_way()
    }

    /// Returns whether there is surely nothing to do.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        !self.look_due && !self.is_under_way()
    }

    /// Returns whether there may be something to do.
    #[inline]
    pub(crate) fn is_due(&self, ring: &mut Ring) -> Result<bool> {
        Ok(self.look_due || self.is_step_due(ring)?)
    }

    #[inline]
    fn is_step_due(&self, ring: &mut Ring) -> Result<bool> {
        Ok(self.outgoing.is_under_way() && self.outgoing.is_due(&mut ring.half)?)
    }

    /// Continues a move, shrinks a ring that is found idle, and grows a ring that is found busy.
    pub(crate) fn advance(&mut self, ring: &mut Ring) -> Result<()> {
        if self.is_step_due(ring)? {
            // In another ring the room comes at another position.
            ring.waiter.forget_armed();
            self.outgoing.go_on(&mut ring.half, ring.waiter.end())?;
            if let (Some(growth), false) = (&mut self.growth, self.outgoing.is_under_way()) {
                growth.settle_move(ring.half.position(), coarse_time());
                self.publish_growth();
            }
            self.looks = 0;
        }
        if std::mem::take(&mut self.look_due) {
            self.fit_to_load(ring)?;
        }
        Ok(())
    }

    /// Decides, after a notification or a check whether the peer lives, whether to check the size of the ring. A writer
    /// of small amounts may be idle while memory is scarce. A small ring that is never full may have moved much.
    #[inline]
    pub(crate) fn note_look(&mut self, ring: &Ring) {
        let (capacity, moved) = (ring.half.capacity(), ring.half.position());
        let is_due = |growth: &Growth| {
            growth.is_large(capacity) || growth.may_be_lively(capacity, moved) || growth.is_trial_due(moved)
        };
        self.look_due = self.growth.as_deref().is_some_and(is_due);
    }

    fn fit_to_load(&mut self, ring: &mut Ring) -> Result<()> {
        let Some(growth) = &mut self.growth else { return Ok(()) };
        if self.outgoing.is_under_way() {
            return Ok(());
        }
        let (capacity, moved, now) = (ring.half.capacity(), ring.half.position(), coarse_time());
        if let Some(size) = weigh(growth, ring, now) {
            return self.offer(size, ring).map(drop);
        }
        if !growth.is_large(capacity) {
            return if growth.is_lively(capacity, moved, now) { self.grow(ring, now).map(drop) } else { Ok(()) };
        }
        let drained = ring.half.reader().has_read_all()?;
        let idle = if drained { growth.shrinks_to(capacity, moved, now) } else { None };
        match idle.or_else(|| growth.yields_to(capacity, now)) {
            Some(size) => self.offer(size, ring).map(drop),
            None => Ok(()),
        }
    }

    /// Returns whether a writer that finds no room may move to a larger ring instead of waiting for its reader.
    #[inline]
    pub(crate) fn may_make_room(&self, ring: &Ring) -> bool {
        self.goes_ahead
            && !self.is_under_way()
            && self.growth.as_ref().is_some_and(|growth| growth.may_grow(ring.half.capacity(), coarse_time()))
    }

    /// Returns the time after which a writer that waits for room makes some itself, if it may.
    pub(crate) fn room_look(&self, ring: &Ring) -> Option<Duration> {
        let growth = self.growth.as_ref().filter(|_| self.goes_ahead && !self.is_under_way())?;
        let wants = growth.state().target > ring.half.capacity();
        wants.then(|| if growth.may_grow(ring.half.capacity(), coarse_time()) { STUCK } else { STARVED })
    }

    /// Moves to a larger ring, if allowed and possible, because there is less room than the program counts on. Returns
    /// whether it did.
    #[cold]
    #[inline(never)]
    pub(crate) fn make_room(&mut self, ring: &mut Ring) -> Result<bool> {
        Ok(self.may_make_room(ring) && self.grow(ring, coarse_time())?)
    }

    /// Reacts to a full ring: offers a larger ring if bulk data fills this one, or a small one where memory is scarce.
    /// Returns whether it offered one.
    #[cold]
    #[inline(never)]
    pub(crate) fn grow_for_bulk(&mut self, ring: &mut Ring) -> Result<bool> {
        let Some(growth) = &mut self.growth else { return Ok(false) };
        let (capacity, now) = (ring.half.capacity(), coarse_time());
        if self.outgoing.is_under_way() {
            return Ok(false);
        }
        if let Some(size) = growth.yields_to(capacity, now).or_else(|| weigh(growth, ring, now)) {
            return Ok(self.offer(size, ring)? == Attempt::Offered);
        }
        if !growth.is_bulk(capacity, ring.half.position(), now) {
            return Ok(false);
        }
        self.grow(ring, now)
    }

    /// Offers the largest ring for which there is memory. Returns whether there is one.
    fn grow(&mut self, ring: &mut Ring, now: Duration) -> Result<bool> {
        let (capacity, mut most) = (ring.half.capacity(), u64::MAX);
        while let Some(size) = self.growth.as_mut().and_then(|growth| growth.choose_ring(capacity, most, now)) {
            match self.offer(size, ring)? {
                Attempt::NoMemory if size / 2 > capacity => most = size / 2,
                attempt => return Ok(attempt == Attempt::Offered),
            }
        }
        self.publish_growth();
        Ok(false)
    }

    /// Offers a ring of `size` bytes. If this fails, the pipe stays in its ring for now.
    fn offer(&mut self, size: u64, ring: &mut Ring) -> Result<Attempt> {
        // The writer enters a smaller ring only once the reader is ready. Until then there is room in the current one.
        let ahead = self.goes_ahead && size > ring.half.capacity();
        let begun = self.outgoing.begin(size, ahead, &mut ring.half, ring.waiter.end());
        if ahead && begun.is_ok() {
            ring.waiter.forget_armed();
        }
        let attempt = match begun {
            Ok(()) => {
                self.looks = 0;
                Attempt::Offered
            }
            Err(error) if error.is_protocol_violation() => return Err(error),
            Err(error) => {
                let growth = self.growth.as_mut().expect("whose ring follows its load");
                growth.fail(RingReason::Memory, coarse_time());
                let full = matches!(error, Error::Domain(DomainError::Limit { .. } | DomainError::Os { .. }));
                if full { Attempt::NoMemory } else { Attempt::Impossible }
            }
        };
        self.publish_growth();
        Ok(attempt)
    }

    /// Offers a ring of `capacity` bytes because the program requested it. From now on the program decides the size.
    pub(crate) fn resize(&mut self, capacity: u64, ring: &mut Ring) -> Result<()> {
        self.outgoing.begin(capacity, false, &mut ring.half, ring.waiter.end())?;
        ring.half.handover().keep_message_max(false);
        Ok(())
    }

    /// Ends the policy: the ring no longer follows its load.
    pub(crate) fn end_growth(&mut self) {
        self.growth = None;
        self.publish_growth();
    }

    /// Requests a check whether the ring is too large.
    pub(crate) fn require_look(&mut self) {
        self.look_due = true;
    }

    /// Returns the time after which an endpoint that was idle at the last checks has to check again.
    pub(crate) fn look_again(&mut self, ring: &Ring) -> Option<Duration> {
        if self.is_under_way() {
            self.looks += 1;
            return (self.looks <= LOOKS_MOST).then(|| LOOK * (1 << self.looks));
        }
        self.next_look(ring)
    }

    /// Returns the time after which there may be something to do if the stream is idle.
    #[inline]
    pub(crate) fn next_look(&self, ring: &Ring) -> Option<Duration> {
        let growth = self.growth.as_ref()?;
        if self.is_under_way() {
            return Some(LOOK);
        }
        growth.is_large(ring.half.capacity()).then(|| growth.look_time())
    }

    /// Returns the counters, and how the ring follows its load.
    pub(crate) fn statistics(&self, ring: &Ring) -> PipeStatistics {
        let ring_growth = self.growth.as_ref().map(|growth| growth.state());
        PipeStatistics { ring_growth, ..ring.statistics() }
    }
}

/// Returns the ring size that a busy stream moves to, to try it or as the result of a trial.
fn weigh(growth: &mut Growth, ring: &Ring, about_now: Duration) -> Option<u64> {
    let (capacity, moved) = (ring.half.capacity(), ring.half.position());
    // Endpoints that share a CPU share its caches and do not wait for cache lines.
    let is_due = growth.may_weigh(capacity, moved, about_now) && !ring.waiter.end().shares_cpu();
    is_due.then(|| growth.weigh(capacity, u64::MAX, moved, exact_time())).flatten()
}
