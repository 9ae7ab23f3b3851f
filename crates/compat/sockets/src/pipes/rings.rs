// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves a direction to a ring that fits its load: the sender offers another ring and moves there, the receiver follows
//! (S-20).
//!
//! While an endpoint is several processes it neither offers a ring nor takes one, as the other processes could not map
//! it.

use tombolo_growth::RingReason;
use tombolo_layout::{Features, SegmentHeader, words};
use tombolo_mem::{Mapped, MappedPeerWord, PeerSegment};
use tombolo_os::clock::{coarse_time, exact_time};
use tombolo_ring::{Error, OwnRing, PeerRing, follow};

use super::{Pipes, Rx, Tx, ring_moves::MoveStage};
use crate::{connection::Connection, quota::Lease};

/// Makes a segment with this header and sends it with its number, if there is room for that now.
pub(crate) type RingOffer<'a> = &'a mut dyn FnMut(&SegmentHeader) -> Option<(OwnRing<Mapped>, Lease)>;

impl Tx {
    /// Goes on with a move to another ring, if one is under way.
    #[inline]
    pub(super) fn advance_ring(&mut self, connection: &Connection) -> Result<(), Error> {
        if let Some(rings) = self.rings.as_mut().filter(|rings| rings.is_under_way())
            && connection.members.is_alone()
            && rings.advance(&mut self.writer)?
        {
            // There is room at another position.
            self.armed = None;
        }
        Ok(())
    }

    /// Offers a ring of `size` bytes. Where that is impossible, the direction keeps its ring for now.
    fn offer_ring(&mut self, size: u64, epoch: u64, offer: RingOffer<'_>) {
        let Some(rings) = &mut self.rings else { return };
        let header = SegmentHeader::new(size, self.writer.handover().next_generation(), 0, Features::HANDOVER, epoch);
        match offer(&header) {
            Some((next, lease)) => {
                self.writer.handover().announce();
                rings.stage = MoveStage::Offered(next, lease);
            }
            None => rings.policy.fail(RingReason::Memory, coarse_time()),
        }
    }

    /// Goes on with the last move, and returns whether a ring may be offered now.
    fn may_offer(&mut self, connection: &Connection) -> bool {
        let settled = self.advance_ring(connection).is_ok() && self.rings.as_ref().is_some_and(|it| !it.is_under_way());
        settled && !self.ended && connection.members.is_alone() && self.writer.handover().can_offer().unwrap_or(false)
    }

    /// Returns whether to look for another ring, after this one was found full.
    pub fn may_change_ring(&mut self) -> bool {
        let (capacity, moved, now) = (self.writer.capacity(), self.writer.position(), coarse_time());
        let Some(rings) = self.rings.as_mut().filter(|rings| !rings.is_under_way()) else { return false };
        rings.policy.is_bulk(capacity, moved, now) || rings.policy.may_weigh(capacity, moved, now)
    }

    /// Offers the ring that bulk transfers need, or that the policy tries out, of at most `room` bytes, with the number
    /// of this endpoint.
    pub fn change_ring(&mut self, connection: &Connection, room: u64, epoch: u64, offer: RingOffer<'_>) {
        if !self.may_offer(connection) {
            return;
        }
        let (capacity, moved, now) = (self.writer.capacity(), self.writer.position(), coarse_time());
        let Some(rings) = &mut self.rings else { return };
        let size = match rings.policy.may_weigh(capacity, moved, now) {
            true => rings.policy.weigh(capacity, room, moved, exact_time()),
            false => rings.policy.choose_ring(capacity, room, now),
        };
        if let Some(size) = size {
            self.offer_ring(size, epoch, offer);
        }
    }

    /// Offers a small ring, if this one is large and idle, or memory is scarce. Returns whether the ring needs no
    /// further looks.
    pub fn shrink_idle_ring(&mut self, connection: &Connection, epoch: u64, offer: RingOffer<'_>) -> bool {
        let drained = self.writer.reader().is_drained().unwrap_or(false);
        if !self.may_offer(connection) {
            return self.ended;
        }
        let (capacity, moved, now) = (self.writer.capacity(), self.writer.position(), coarse_time());
        let Some(rings) = &mut self.rings else { return true };
        let idle = if drained { rings.policy.shrinks_to(capacity, moved, now) } else { None };
        match idle.or_else(|| rings.policy.yields_to(capacity, now)) {
            Some(size) => self.offer_ring(size, epoch, offer),
            None => return !rings.policy.is_large(capacity),
        }
        false
    }
}

impl Rx {
    /// Returns whether the peer has offered a ring that was not asked for yet, and notes it as asked for.
    pub(super) fn look_for_ring(&mut self) -> bool {
        match self.reader.handover().announced() {
            Ok(Some(generation)) if self.asked_ring != Some(generation) => {
                self.asked_ring = Some(generation);
                true
            }
            // Also on a protocol violation, which the next read finds.
            _ => false,
        }
    }
}

impl Pipes {
    /// Takes the ring that came, once the peer's word announces it too, and is ready for it (H-2). A segment that is no
    /// ring is dropped. A ring out of turn makes the pipe corrupt.
    pub fn take_offered_ring(&self, connection: &Connection) {
        self.offered.set_announced(false);
        let _ = self.halves.with_rx(&connection.members, |rx| {
            if self.hints().is_detached() {
                return;
            }
            // The message may arrive a little earlier than the word.
            if matches!(rx.reader.handover().announced(), Ok(None)) {
                return;
            }
            // The sender may move there as soon as this endpoint is ready. Those who look without a turn must know of
            // the ring before that.
            let Some(mut tails) = self.hints().hold_tails() else {
                self.offered.set_announced(true);
                return;
            };
            let Some((generation, segment)) = self.offered.take_ring() else { return };
            if !connection.members.is_alone() || self.session.is_leaving() || rx.over || rx.broken.is_some() {
                return;
            }
            let Some((next, tail)) = check_ring(generation, &segment, self.epochs.peer) else { return };
            // The ring must be the announced one. A ring out of turn is a protocol violation, which the next read
            // finds.
            if rx.reader.handover().prepare(generation, next).is_ok() {
                self.hints().expect_ring(&mut tails, tail);
                rx.ring = generation.wrapping_sub(1);
            }
        });
    }
}

/// Returns the ring as it was offered, if it is one of the peer endpoint with number `epoch`.
fn check_ring(generation: u16, segment: &PeerSegment, epoch: u64) -> Option<(PeerRing<Mapped>, MappedPeerWord)> {
    let (next, header) = follow(segment, generation).ok()?;
    (header.epoch == epoch).then(|| (next, segment.word(words::TAIL)))
}
