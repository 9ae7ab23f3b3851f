// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decides when the ring of a stream grows and shrinks (ADR 0055). Only decides: the owner of the ring moves it.

use std::time::Duration;

use tombolo_layout::limits::{self, CONTROL_LEN};

use crate::{
    budget::{Lacking, RingBudget, Share},
    trial::{Trial, Verdict},
};

/// Longest time over which the signs of bulk, or of a busy writer, are counted.
const WINDOW: Duration = Duration::from_millis(100);
/// Divisor of the idle time while another ring could not grow, so that idle rings make room first.
const SOONER: u32 = 4;
/// Time after a failed attempt in which no other attempt is made.
const HOLD: Duration = Duration::from_secs(1);

/// Ring sizes of one kind of direction, and the thresholds at which its ring counts as busy or idle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrowthRule {
    /// Size of the first ring in bytes.
    pub first: u64,
    /// Size in bytes to which an idle ring shrinks. It adds to the first ring, whose segment stays mapped for its words
    /// (H-7).
    pub least: u64,
    /// Bulk: number of times that the writer must find the ring full within 100 ms.
    pub full: u32,
    /// Bulk: multiple of the ring's size that the writer must move in that time.
    pub rounds: u64,
    /// Also bulk: time over which the ring was found full that often, whether bytes moved or not. A program that knows
    /// nothing of rings counts on the room that TCP has.
    pub stuck: Option<Duration>,
    /// Busy although the ring is never full: number of bytes that the writer must move within 100 ms. A writer that
    /// wraps around in a small ring stores to lines that the reader's cache still holds.
    pub lively: Option<u64>,
    /// Time after which a ring is idle if the writer moved fewer bytes than the first ring holds.
    pub idle: Duration,
}

impl GrowthRule {
    /// Rule for a stream of a channel. An idle channel has at most 48 KiB: both directions, each with the ring that is
    /// added to the first one once the direction was busy.
    pub const STREAM: Self = Self {
        first: 8 << 10,
        least: limits::CAPACITY_MIN,
        full: 8,
        rounds: 8,
        stuck: None,
        lively: Some(512 << 10),
        idle: Duration::from_secs(1),
    };
    /// Returns the rule for a stream that begins with the ring that programs count on, of `first` bytes, and only
    /// [tries](Growth::trying) a larger one.
    #[must_use]
    pub const fn fixed(first: u64) -> Self {
        Self { first, least: first, lively: None, ..Self::STREAM }
    }

    /// Returns the rule for a connection beside TCP. Its programs know nothing of rings and count on room, so the ring
    /// grows sooner, and an idle ring keeps as much room as it began with.
    #[must_use]
    pub const fn connection(first: u64) -> Self {
        let (stuck, idle) = (Some(Duration::from_millis(8)), Duration::from_secs(2));
        Self { first, least: first, full: 3, rounds: 2, stuck, lively: None, idle }
    }
}

/// Reason why a ring has its size.
///
/// # Example
/// See [`RingGrowth`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RingReason {
    /// The stream is new and was never busy.
    First = 1,
    /// Another ring was offered to the peer, which has not moved to it yet.
    Offered,
    /// The stream is busy.
    Bulk,
    /// The stream was busy and became idle.
    Idle,
    /// The budget has no room for a larger ring.
    Budget,
    /// There was no memory for a larger ring, or no way to offer it.
    Memory,
    /// The peer does not follow to another ring, or maps none that is larger.
    Peer,
    /// Memory is short in this process's control group or in the machine: the ring did not grow, or was given up.
    Pressure,
}

/// Target size of a growing stream's ring, and the reason for its present size.
///
/// # Example
/// ```
/// use tombolo::{Options, RingBudget, RingReason, Stream};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let address = format!("local:{}/growing", folder.path().display());
/// # let mut listener = tombolo::listen(&address)?;
/// let options = Options::new().ring_growth(RingBudget::of_process());
/// # let client = std::thread::spawn(move || tombolo::connect_with::<Stream>(&address, &options));
/// # let _peer = listener.accept()?;
/// # let stream = client.join().unwrap()?;
/// let sent = stream.statistics().sent;
/// let growth = sent.ring_growth.expect("it was asked for");
/// assert_eq!((sent.ring_size, growth.reason), (8 << 10, RingReason::First));
/// assert!(growth.target >= 1 << 20);
/// # Ok::<(), tombolo::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RingGrowth {
    /// Size in bytes of the ring to which a stream in bulk use grows.
    pub target: u64,
    /// Reason why the ring has its size.
    pub reason: RingReason,
}

/// Policy of one direction, and its share of the budget.
#[derive(Debug)]
pub struct Growth {
    rule: GrowthRule,
    most: u64,
    /// Size of the largest ring that the peer maps.
    mapped: u64,
    budget: RingBudget,
    reason: RingReason,
    /// Observation for bulk: its start time, its first byte, and how often the ring was full since.
    busy: (Duration, u64, u32),
    /// Observation for much traffic that never fills the ring: its start time and its first byte.
    lively: (Duration, u64),
    /// Observation for idleness: its start time and its first byte.
    quiet: (Duration, u64),
    /// Time before which the ring does not grow.
    hold: Duration,
    /// Share that pays for the present ring, and for the previous one as long as that is drained.
    held: Option<Share>,
    offered: Option<Offered>,
    larger: Option<Larger>,
}

/// A ring that was offered to the peer.
#[derive(Debug)]
struct Offered {
    /// Share that pays for the ring, if it costs more than the first.
    share: Option<Share>,
    reason: RingReason,
    is_tried: bool,
}

/// A ring larger than the bulk target, which has to prove that it is faster.
#[derive(Debug)]
struct Larger {
    size: u64,
    budget: RingBudget,
    trial: Trial,
}

impl Growth {
    /// Makes a policy for a direction whose ring may have up to `most` bytes and whose peer maps segments of up to
    /// `peer_maps`.
    #[must_use]
    pub fn new(rule: GrowthRule, budget: RingBudget, most: u64, peer_maps: u64, now: Duration) -> Self {
        let mapped = peer_maps.saturating_sub(CONTROL_LEN).checked_ilog2().map_or(0, |bits| 1 << bits);
        let reason = if most > rule.first && mapped <= rule.first { RingReason::Peer } else { RingReason::First };
        let most = most.min(mapped).max(rule.least);
        let (busy, lively, quiet) = ((now, 0, 0), (now, 0), (now, 0));
        Self {
            rule,
            most,
            mapped,
            budget,
            reason,
            busy,
            lively,
            quiet,
            hold: now,
            held: None,
            offered: None,
            larger: None,
        }
    }

    /// Returns this policy with trials: in the largest of its rings it tries whether a ring of `size` bytes is faster.
    /// That ring is paid for from `budget`, and the peer must map it.
    #[must_use]
    pub fn trying(self, size: u64, budget: RingBudget) -> Self {
        if size <= self.most {
            return self;
        }
        let size = size.min(self.mapped);
        let larger = (size > self.most).then(|| Larger { size, budget, trial: Trial::new() });
        let reason = if larger.is_none() && self.most == self.rule.first { RingReason::Peer } else { self.reason };
        Self { larger, reason, ..self }
    }

    /// Returns whether it may be time to [weigh](Self::weigh) a larger ring, because the writer, at byte `moved`, has
    /// moved much.
    #[inline]
    #[must_use]
    pub fn is_trial_due(&self, moved: u64) -> bool {
        self.larger.as_ref().is_some_and(|larger| larger.trial.is_due(moved))
    }

    /// Returns whether a trial is due, so that it is worth asking an exact clock. A ring of `capacity` bytes that may
    /// still grow is not weighed. Nor is one while the grown rings of its budget together are as large as the ring to
    /// be tried: their streams take turns in the caches, and a larger ring would take from the others.
    pub fn may_weigh(&mut self, capacity: u64, moved: u64, about_now: Duration) -> bool {
        let (is_under_way, used) = (self.offered.is_some(), self.budget.used());
        self.larger.as_mut().is_some_and(|larger| {
            let is_alone = capacity > self.most || used < larger.size;
            !is_under_way && capacity >= self.most && is_alone && larger.trial.may_weigh(moved, about_now)
        })
    }

    /// Returns the size of the ring to move to from one of `capacity` bytes: a larger one of at most `room` bytes to
    /// try, or the previous size if the trial was in vain. `moved` is the byte that the writer of a busy stream has
    /// reached at the exact time `now`.
    pub fn weigh(&mut self, capacity: u64, room: u64, moved: u64, now: Duration) -> Option<u64> {
        let larger = self.larger.as_mut()?;
        match larger.trial.weigh(moved, now)? {
            Verdict::Try if capacity <= self.most => {
                let (size, budget) = (larger.size.min(room), larger.budget.clone());
                self.take_ring(size, capacity, &budget, true, now)
            }
            // An earlier way back may have failed.
            _ if self.most > self.rule.first => {
                self.take_ring(self.most, self.rule.first, &self.budget.clone(), false, now)
            }
            _ => Some(self.offer_first(self.rule.first, RingReason::Bulk)),
        }
    }

    /// Returns the target size of the ring and the reason for its present size.
    #[must_use]
    pub fn state(&self) -> RingGrowth {
        let target = self.larger.as_ref().map_or(self.most, |larger| larger.size);
        RingGrowth { target, reason: self.reason }
    }

    /// Notes that the writer, at byte `moved`, found its ring of `capacity` bytes full. Returns whether this is bulk
    /// and the ring too small.
    pub fn is_bulk(&mut self, capacity: u64, moved: u64, now: Duration) -> bool {
        if !self.may_grow(capacity, now) {
            return false;
        }
        let (since, from, full) = self.busy;
        if full == 0 || now.saturating_sub(since) > WINDOW {
            self.busy = (now, moved, 1);
            return false;
        }
        self.busy.2 = full + 1;
        let is_stuck = self.rule.stuck.is_some_and(|time| now.saturating_sub(since) >= time);
        full + 1 >= self.rule.full && (moved.wrapping_sub(from) >= self.rule.rounds * capacity || is_stuck)
    }

    /// Returns whether to check if the writer, at byte `moved`, is busy with a small ring of `capacity` bytes that is
    /// never full.
    #[must_use]
    pub fn may_be_lively(&self, capacity: u64, moved: u64) -> bool {
        capacity < self.most && self.rule.lively.is_some_and(|much| moved.wrapping_sub(self.lively.1) >= much)
    }

    /// Returns whether the writer is busy in this way, so that the ring is too small.
    pub fn is_lively(&mut self, capacity: u64, moved: u64, now: Duration) -> bool {
        if !self.may_be_lively(capacity, moved) {
            return false;
        }
        let (since, _) = std::mem::replace(&mut self.lively, (now, moved));
        now.saturating_sub(since) <= WINDOW && self.may_grow(capacity, now)
    }

    /// Returns whether a ring of `capacity` bytes may grow now, for bulk or another reason.
    #[must_use]
    pub fn may_grow(&self, capacity: u64, now: Duration) -> bool {
        capacity < self.most && now >= self.hold && self.offered.is_none()
    }

    /// Returns the size of the ring to grow to from `capacity`: the target, but at most `most`, or as much as budget
    /// and memory allow. Takes that ring's bytes from the budget.
    pub fn choose_ring(&mut self, capacity: u64, most: u64, now: Duration) -> Option<u64> {
        self.take_ring(self.most.min(most), capacity, &self.budget.clone(), false, now)
    }

    /// Returns the largest ring size of at most `size` and more than `least` bytes that `budget` has room for, and
    /// takes its bytes there.
    fn take_ring(
        &mut self,
        mut size: u64,
        least: u64,
        budget: &RingBudget,
        is_tried: bool,
        now: Duration,
    ) -> Option<u64> {
        let mut why = RingReason::Budget;
        while size > least {
            match budget.take_share(CONTROL_LEN + size, now) {
                Ok(share) => {
                    self.offered = Some(Offered { share: Some(share), reason: RingReason::Bulk, is_tried });
                    self.reason = RingReason::Offered;
                    return Some(size);
                }
                Err(Lacking::Budget) => why = RingReason::Budget,
                Err(Lacking::Memory) => why = RingReason::Pressure,
            }
            size /= 2;
        }
        self.fail(why, now);
        None
    }

    /// Records the offer of a ring of `size` bytes that costs no more than the first. Returns `size`.
    fn offer_first(&mut self, size: u64, reason: RingReason) -> u64 {
        self.offered = Some(Offered { share: None, reason, is_tried: false });
        self.reason = RingReason::Offered;
        size
    }

    /// Returns the size to shrink to if memory is so scarce that a ring of `capacity` bytes shrinks although it is
    /// busy.
    pub fn yields_to(&mut self, capacity: u64, now: Duration) -> Option<u64> {
        if capacity <= self.rule.first || self.offered.is_some() || now < self.hold || !self.budget.is_scarce(now) {
            return None;
        }
        Some(self.offer_first(self.rule.first, RingReason::Pressure))
    }

    /// Returns the size to shrink to if the writer, at byte `moved`, has been idle with a ring of `capacity` bytes.
    pub fn shrinks_to(&mut self, capacity: u64, moved: u64, now: Duration) -> Option<u64> {
        if capacity <= self.rule.first || self.offered.is_some() {
            return None;
        }
        self.budget.check_memory(now);
        let (since, from) = self.quiet;
        if now.saturating_sub(since) < self.look_time() {
            return None;
        }
        self.quiet = (now, moved);
        if moved.wrapping_sub(from) >= self.rule.first {
            return None;
        }
        Some(self.offer_first(self.rule.least, RingReason::Idle))
    }

    /// Returns the time without data after which a large ring shrinks: shorter where memory or budget is wanted
    /// elsewhere.
    #[must_use]
    pub fn look_time(&self) -> Duration {
        let is_wanted = self.budget.is_wanted() || self.larger.as_ref().is_some_and(|larger| larger.budget.is_wanted());
        if is_wanted { self.rule.idle / SOONER } else { self.rule.idle }
    }

    /// Returns whether a ring of `capacity` bytes shrinks once it is idle.
    #[must_use]
    pub fn is_large(&self, capacity: u64) -> bool {
        capacity > self.rule.first
    }

    /// Notes that the ring could not be offered.
    pub fn fail(&mut self, reason: RingReason, now: Duration) {
        self.offered = None;
        self.busy = (now, 0, 0);
        self.hold = now + HOLD;
        self.reason = reason;
        self.budget.note_want();
        if let Some(larger) = &mut self.larger {
            larger.budget.note_want();
            larger.trial.put_off(now);
        }
    }

    /// Notes that the move is over: the old ring is free, and only the share of the new one is held.
    pub fn settle_move(&mut self, moved: u64, now: Duration) {
        if let Some(Offered { share, reason, is_tried }) = self.offered.take() {
            (self.held, self.reason) = (share, reason);
            (self.busy, self.lively, self.quiet) = ((now, moved, 0), (now, moved), (now, moved));
            if let Some(larger) = &mut self.larger {
                larger.trial.enter(moved, is_tried);
            }
            if reason == RingReason::Pressure {
                self.hold = now + HOLD;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use super::*;
    use crate::pressure::{MemoryWatch, tests::Tree};

    const STREAM: GrowthRule = GrowthRule::STREAM;
    const MS: Duration = Duration::from_millis(1);

    /// Returns a policy whose machine reports nothing of its memory.
    fn growth(budget: u64, most: u64) -> Growth {
        growth_in("/nowhere", budget, most)
    }

    fn growth_in(root: impl AsRef<Path>, budget: u64, most: u64) -> Growth {
        let budget = RingBudget::watching(budget, Some(Arc::new(MemoryWatch::new(root.as_ref()))));
        Growth::new(STREAM, budget, most, 1 << 31, Duration::ZERO)
    }

    #[test]
    fn ring_grows_for_bulk_alone() {
        let mut policy = growth(1 << 30, 1 << 20);
        // Full and moving: the eighth look within the window reports bulk.
        let looks: Vec<bool> = (0..8).map(|at| policy.is_bulk(STREAM.first, at * 2 * STREAM.first, MS)).collect();
        assert_eq!(looks, [[false; 7].as_slice(), &[true]].concat());
        // Full, and hardly moving.
        let mut policy = growth(1 << 30, 1 << 20);
        assert!(!(0..100).any(|at| policy.is_bulk(STREAM.first, at, MS)));
        // Moving, and full seldom.
        let mut policy = growth(1 << 30, 1 << 20);
        assert!(!(0..100u32).any(|at| policy.is_bulk(STREAM.first, u64::from(at) << 20, MS * 60 * at)));
        // Full, and hardly moving, where a program relies on room.
        let budget = RingBudget::unwatched(1 << 30);
        let mut policy = Growth::new(GrowthRule::connection(16 << 10), budget, 1 << 20, 1 << 31, Duration::ZERO);
        assert!(!(0..100).any(|_| policy.is_bulk(16 << 10, 5, MS)) && policy.is_bulk(16 << 10, 5, 9 * MS));
        // As large as it may be.
        let mut policy = growth(1 << 30, 1 << 20);
        assert!(!(0..100).any(|at| policy.is_bulk(1 << 20, at << 22, MS)));
    }

    #[test]
    fn ring_grows_for_much_that_never_fills_it_within_the_window() {
        let much = STREAM.lively.unwrap();
        let mut policy = growth(1 << 30, 1 << 20);
        assert!(!policy.is_lively(STREAM.first, much - 1, MS) && policy.is_lively(STREAM.first, much, 100 * MS));
        // Much in a long time, again and again.
        let mut policy = growth(1 << 30, 1 << 20);
        assert!(!(1..100u32).any(|at| policy.is_lively(STREAM.first, u64::from(at) * much, MS * 101 * at)));
        assert!(policy.is_lively(STREAM.first, 100 * much, MS * 101 * 99 + MS), "and then in a short one");
        // As large as it may be; tried in vain a moment ago; and a stream whose programs rely on a large first ring.
        let mut policy = growth(0, 1 << 20);
        assert!(!policy.is_lively(1 << 20, much, MS));
        assert_eq!(policy.choose_ring(STREAM.first, u64::MAX, MS), None);
        assert!(!policy.is_lively(STREAM.first, 9 * much, 2 * MS));
        let budget = RingBudget::unwatched(1 << 30);
        let mut policy = Growth::new(GrowthRule::connection(16 << 10), budget, 1 << 20, 1 << 31, Duration::ZERO);
        assert!(!policy.is_lively(16 << 10, 1 << 30, MS));
    }

    #[test]
    fn budget_below_one_ring_gives_the_largest_that_it_has_room_for_or_none_for_a_while() {
        let mut policy = growth((64 << 10) + CONTROL_LEN, 1 << 20);
        assert_eq!(policy.choose_ring(STREAM.first, u64::MAX, MS), Some(64 << 10));
        policy.settle_move(0, MS);
        assert_eq!((policy.state().reason, policy.budget.used()), (RingReason::Bulk, policy.budget.limit()));
        let mut policy = growth(STREAM.first, 1 << 20);
        assert_eq!((policy.choose_ring(STREAM.first, u64::MAX, MS), policy.state().reason), (None, RingReason::Budget));
        assert!(!(0..100).any(|at| policy.is_bulk(STREAM.first, at << 20, 500 * MS)), "not so soon");
        assert!((0..100).any(|at| policy.is_bulk(STREAM.first, at << 20, 1500 * MS)), "but later");
        assert_eq!(policy.budget.used(), 0);
    }

    #[test]
    fn ring_shrinks_once_idle_for_its_time_and_returns_its_share() {
        let mut policy = growth(1 << 30, 1 << 20);
        assert_eq!(policy.choose_ring(STREAM.first, u64::MAX, MS), Some(1 << 20));
        policy.settle_move(0, MS);
        assert!(policy.budget.used() > 1 << 20);
        assert_eq!(policy.shrinks_to(1 << 20, 10, 500 * MS), None, "not yet");
        assert_eq!(policy.shrinks_to(1 << 20, STREAM.first, 1100 * MS), None, "it was not idle");
        assert_eq!(policy.shrinks_to(1 << 20, STREAM.first + 10, 2200 * MS), Some(STREAM.least));
        assert!(policy.budget.used() > 1 << 20, "the peer may still read there");
        policy.settle_move(STREAM.first + 10, 2200 * MS);
        assert_eq!((policy.state().reason, policy.budget.used()), (RingReason::Idle, 0));
        assert_eq!(policy.shrinks_to(STREAM.least, STREAM.first + 10, 9000 * MS), None, "it is small");
    }

    #[test]
    fn idle_ring_goes_sooner_where_another_could_not_grow() {
        let mut policy = growth((1 << 20) + CONTROL_LEN, 1 << 20);
        assert_eq!(policy.choose_ring(STREAM.first, u64::MAX, MS), Some(1 << 20));
        policy.settle_move(0, MS);
        let mut other = Growth::new(STREAM, policy.budget.clone(), 1 << 20, 1 << 31, MS);
        assert_eq!((policy.look_time(), policy.shrinks_to(1 << 20, 0, 300 * MS)), (STREAM.idle, None));
        assert_eq!((other.choose_ring(STREAM.first, u64::MAX, MS), other.state().reason), (None, RingReason::Budget));
        assert_eq!(
            (policy.look_time(), policy.shrinks_to(1 << 20, 0, 300 * MS)),
            (STREAM.idle / 4, Some(STREAM.least))
        );
        policy.settle_move(0, 300 * MS);
        assert_eq!(other.choose_ring(STREAM.first, u64::MAX, 2000 * MS), Some(1 << 20), "what the idle one left");
    }

    #[test]
    fn pressure_stops_growth_takes_from_the_idle_and_once_it_lasts_from_the_busy() {
        let tree = Tree::new("policy");
        let mut policy = growth_in(&tree.machine(66).0, 1 << 30, 1 << 20);
        assert_eq!(policy.choose_ring(STREAM.first, u64::MAX, MS), Some(1 << 20));
        policy.settle_move(0, MS);
        let mut other = Growth::new(STREAM, policy.budget.clone(), 1 << 20, 1 << 31, MS);
        assert_eq!(other.choose_ring(STREAM.first, u64::MAX, MS), Some(512 << 10), "half of it has room");
        tree.machine(2);
        let mut third = Growth::new(STREAM, policy.budget.clone(), 1 << 20, 1 << 31, MS);
        assert_eq!(
            (third.choose_ring(STREAM.first, u64::MAX, 400 * MS), third.state().reason),
            (None, RingReason::Pressure)
        );
        assert_eq!(policy.yields_to(1 << 20, 800 * MS), None, "the idle come first");
        assert_eq!(policy.yields_to(STREAM.first, 2400 * MS), None, "it is small");
        assert_eq!(policy.yields_to(1 << 20, 2400 * MS), Some(STREAM.first));
        policy.settle_move(9, 2500 * MS);
        assert_eq!(policy.state().reason, RingReason::Pressure);
        let bulk = |policy: &mut Growth, now| (0..100).any(|at| policy.is_bulk(STREAM.first, at << 20, now));
        assert!(!bulk(&mut policy, 3000 * MS), "it does not grow at once again");
        tree.machine(512);
        assert!(bulk(&mut policy, 4000 * MS));
        assert_eq!(policy.choose_ring(STREAM.first, u64::MAX, 4000 * MS), Some(1 << 20));
    }

    #[test]
    fn ring_never_grows_beyond_what_the_peer_maps() {
        let budget = RingBudget::new(1 << 30);
        let of = |maps| Growth::new(STREAM, budget.clone(), 1 << 20, maps, MS).state();
        assert_eq!(of(CONTROL_LEN + (64 << 10) + 1).target, 64 << 10);
        assert_eq!((of(CONTROL_LEN + STREAM.first).reason, of(0).reason), (RingReason::Peer, RingReason::Peer));
        assert_eq!(of(u64::MAX), RingGrowth { target: 1 << 20, reason: RingReason::First });
    }

    /// Weighs a stream of `mib` MiB a millisecond, until something is to be done.
    fn weigh(policy: &mut Growth, at: &mut (u64, Duration), capacity: u64, mib: u64) -> Option<u64> {
        (0..200).find_map(|_| {
            *at = (at.0 + (mib << 20), at.1 + MS);
            if policy.may_weigh(capacity, at.0, at.1) { policy.weigh(capacity, u64::MAX, at.0, at.1) } else { None }
        })
    }

    #[test]
    fn busy_stream_tries_a_larger_ring_within_the_budget_and_returns_what_is_slower() {
        let (base, most) = (1 << 20, 4 << 20);
        let budget = RingBudget::unwatched(most + CONTROL_LEN);
        let maps = |maps| {
            Growth::new(GrowthRule::fixed(base), RingBudget::unwatched(0), base, maps, MS).trying(most, budget.clone())
        };
        let of = || maps(1 << 31);
        let (mut kept, mut at) = (of(), (0, MS));
        assert!(!(0..100).any(|nth| kept.is_bulk(base, nth << 24, MS)), "bulk alone is no reason");
        assert_eq!(weigh(&mut kept, &mut at, base, 10), Some(most));
        assert_eq!((kept.state().reason, weigh(&mut kept, &mut at, base, 10)), (RingReason::Offered, None));
        kept.settle_move(at.0, at.1);
        assert_eq!((weigh(&mut kept, &mut at, most, 10), kept.state().reason), (None, RingReason::Bulk));
        // Another stream finds the budget used up, tries again after a pause, and finds the ring slower.
        let (mut other, mut then) = (of(), (0, MS));
        assert_eq!(
            (weigh(&mut other, &mut then, base, 10), other.state().reason),
            (None, RingReason::Budget),
            "there is room for one"
        );
        drop(kept);
        while budget.used() == 0 {
            assert!(then.1 < 10_000 * MS, "it tries no more");
            let _ = weigh(&mut other, &mut then, base, 10);
        }
        other.settle_move(then.0, then.1);
        assert_eq!(weigh(&mut other, &mut then, most, 9), Some(base));
        assert!(budget.used() > most, "the peer may still read there");
        other.settle_move(then.0, then.1);
        assert_eq!((budget.used(), other.state().reason), (0, RingReason::Bulk));
        // A peer that maps no larger one is offered none.
        let mut small = maps(base + CONTROL_LEN);
        assert_eq!((weigh(&mut small, &mut (0, MS), base, 10), small.state().reason), (None, RingReason::Peer));
        // A stream that is idle in a ring that it kept goes back as well.
        let (mut idle, mut at) = (of(), (0, MS));
        weigh(&mut idle, &mut at, base, 10);
        idle.settle_move(at.0, at.1);
        assert_eq!(idle.shrinks_to(most, at.0 + 5, at.1 + 1100 * MS), Some(base));
    }

    #[test]
    fn connection_tries_a_larger_ring_once_it_has_grown_and_goes_back_within_its_own_budget() {
        let (first, base, most) = (16 << 10, 1 << 20, 4 << 20);
        let [own, trials] = [2 * most, most + CONTROL_LEN].map(RingBudget::unwatched);
        let policy = Growth::new(GrowthRule::connection(first), own.clone(), base, 1 << 31, MS);
        let mut policy = policy.trying(most, trials.clone());
        assert_eq!(policy.state(), RingGrowth { target: most, reason: RingReason::First });
        let mut at = (0, MS);
        assert_eq!(weigh(&mut policy, &mut at, first, 10), None, "bulk comes first");
        assert_eq!(policy.choose_ring(first, u64::MAX, at.1), Some(base));
        policy.settle_move(at.0, at.1);
        assert_eq!(weigh(&mut policy, &mut at, base, 10), Some(most));
        policy.settle_move(at.0, at.1);
        assert_eq!((own.used(), trials.used()), (0, most + CONTROL_LEN), "one ring is held");
        assert!(!policy.may_grow(most, at.1));
        assert_eq!(weigh(&mut policy, &mut at, most, 9), Some(base));
        policy.settle_move(at.0, at.1);
        assert_eq!((own.used(), trials.used()), (base + CONTROL_LEN, 0));
        // A ring that cannot be offered is tried again later, and so is the way back.
        while weigh(&mut policy, &mut at, base, 10).is_none() {}
        policy.settle_move(at.0, at.1);
        assert_eq!(weigh(&mut policy, &mut at, most, 9), Some(base));
        policy.fail(RingReason::Memory, at.1);
        assert_eq!((own.used(), policy.state().reason), (0, RingReason::Memory));
        while at.1 < 10_000 * MS {
            if let Some(size) = weigh(&mut policy, &mut at, most, 9) {
                assert_eq!(size, base);
                return;
            }
        }
        panic!("it stays where it is slower");
    }

    #[test]
    fn no_larger_ring_is_tried_beside_others_that_have_as_much_together() {
        let (first, base, most) = (16 << 10, 1 << 20, 4 << 20);
        let budget = RingBudget::unwatched(1 << 30);
        let of = || {
            let policy = Growth::new(GrowthRule::connection(first), budget.clone(), base, 1 << 31, MS);
            let mut policy = policy.trying(most, budget.clone());
            assert_eq!(policy.choose_ring(first, u64::MAX, MS), Some(base));
            policy.settle_move(0, MS);
            policy
        };
        let mut all = Vec::from([(); 4].map(|()| (of(), (0, MS))));
        for (policy, at) in &mut all {
            assert_eq!(weigh(policy, at, base, 10), None);
        }
        all.truncate(1);
        let (mut last, mut at) = all.remove(0);
        assert_eq!(weigh(&mut last, &mut at, base, 10), Some(most), "the others are gone");
    }

    #[test]
    fn nothing_larger_is_tried_beyond_the_room_that_there_is_or_the_peer_maps() {
        let (base, most) = (1 << 20, 4 << 20);
        let budget = RingBudget::unwatched(1 << 30);
        let of = |maps| {
            Growth::new(GrowthRule::fixed(base), RingBudget::unwatched(0), base, maps, MS).trying(most, budget.clone())
        };
        assert_eq!(of(CONTROL_LEN + (2 << 20)).state().target, 2 << 20);
        let mut policy = of(1 << 31);
        let mut at = (0, MS);
        let size = (0..200).find_map(|_| {
            at = (at.0 + (10 << 20), at.1 + MS);
            let weighs = policy.may_weigh(base, at.0, at.1);
            weighs.then(|| policy.weigh(base, 2 << 20, at.0, at.1)).flatten()
        });
        assert_eq!(size, Some(2 << 20));
        let mut narrow = of(1 << 31);
        let none = (0..200u32).find_map(|nth| {
            let (moved, now) = (u64::from(nth) * (10 << 20), MS * nth);
            narrow.may_weigh(base, moved, now).then(|| narrow.weigh(base, base, moved, now)).flatten()
        });
        assert_eq!((none, budget.used()), (None, CONTROL_LEN + (2 << 20)));
    }
}
