// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ring of a direction follows its load: the sender offers another and goes there, the receiver follows (S-20).
//!
//! While an end is several processes it neither offers a ring nor takes one: the others could not map it.

use std::sync::{RwLockWriteGuard, atomic::Ordering};

use tombolo_growth::RingReason;
use tombolo_layout::{Features, SegmentHeader, words};
use tombolo_mem::{Mapped, MappedPeerWord, PeerSegment};
use tombolo_os::clock::coarse_time;
use tombolo_ring::{Error, OwnCarrier, PeerCarrier, follow};

use super::{LaterTails, Pipes, Rx, Tx, ring_moves::MoveStage};
use crate::{connection::Connection, quota::Lease};

/// A position at which no sender is.
const UNKNOWN: u64 = u64::MAX - 1;

/// Makes a segment as its header says and sends it with its number, if there is room for that now.
pub(crate) type RingOffer<'a> = &'a mut dyn FnMut(&SegmentHeader) -> Option<(OwnCarrier<Mapped>, Lease)>;

impl Tx {
    /// S-20. Goes on with a move of the ring, if one is under way.
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

    /// Offers a ring of `size` bytes. Where that cannot be, the direction stays where it is for now.
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

    /// Whether a ring may be offered now; and goes on with the last.
    fn may_offer(&mut self, connection: &Connection) -> bool {
        let settled = self.advance_ring(connection).is_ok() && self.rings.as_ref().is_some_and(|it| !it.is_under_way());
        settled && !self.ended && connection.members.is_alone() && self.writer.handover().can_offer().unwrap_or(false)
    }
}

impl Rx {
    /// Notes whether the peer has offered a ring that was not asked for yet.
    pub(super) fn look_for_ring(&mut self) -> bool {
        match self.reader.handover().announced() {
            Ok(Some(generation)) if self.asked_ring != Some(generation) => {
                self.asked_ring = Some(generation);
                true
            }
            // A lie is met by the next read.
            _ => false,
        }
    }
}

impl Pipes {
    /// The ring that this end sends by was found full. Says whether to offer a larger one.
    pub fn is_bulk(&self, connection: &Connection) -> bool {
        let bulk = self.turn(connection, &self.tx, |tx| {
            let (capacity, moved) = (tx.writer.capacity(), tx.writer.position());
            let Some(rings) = tx.rings.as_mut().filter(|rings| !rings.is_under_way()) else { return false };
            rings.policy.is_bulk(capacity, moved, coarse_time())
        });
        bulk.unwrap_or(false)
    }

    /// Offers the ring that bulk wants.
    pub fn grow(&self, connection: &Connection, offer: RingOffer<'_>) {
        let _ = self.turn(connection, &self.tx, |tx| {
            if !tx.may_offer(connection) {
                return;
            }
            let capacity = tx.writer.capacity();
            let size = tx.rings.as_mut().and_then(|it| it.policy.choose_ring(capacity, u64::MAX, coarse_time()));
            if let Some(size) = size {
                tx.offer_ring(size, self.epochs.own, offer);
            }
        });
    }

    /// Offers a small ring, if this one is large and idle, or memory scarce. Says whether there is nothing to look after any more.
    pub fn shrink_if_idle(&self, connection: &Connection, offer: RingOffer<'_>) -> bool {
        let done = self.turn(connection, &self.tx, |tx| {
            let drained = tx.writer.is_drained().unwrap_or(false);
            if !tx.may_offer(connection) {
                return tx.ended;
            }
            let (capacity, moved, now) = (tx.writer.capacity(), tx.writer.position(), coarse_time());
            let Some(rings) = &mut tx.rings else { return true };
            let idle = if drained { rings.policy.shrinks_to(capacity, moved, now) } else { None };
            match idle.or_else(|| rings.policy.yields_to(capacity, now)) {
                Some(size) => tx.offer_ring(size, self.epochs.own, offer),
                None => return !rings.policy.is_large(capacity),
            }
            false
        });
        done.unwrap_or(true)
    }

    /// Whether the peer has offered a ring: to be asked after a look in vain, and before a sleep.
    #[inline]
    pub fn has_ring_offered(&self) -> bool {
        self.ring_announced.load(Ordering::Relaxed) || self.offered.is_there()
    }

    /// Looks whether the peer has offered a ring, for one who waits for something else than bytes.
    pub(super) fn look_for_ring(&self, connection: &Connection) {
        if self.turn(connection, &self.rx, Rx::look_for_ring).unwrap_or(false) {
            self.ring_announced.store(true, Ordering::Relaxed);
        }
    }

    /// Takes the ring that came, once the peer's word says so too, and is ready for it (H-2). One that is none makes the pipe
    /// corrupt.
    pub fn take_offered_ring(&self, connection: &Connection) {
        self.ring_announced.store(false, Ordering::Relaxed);
        let _ = self.turn(connection, &self.rx, |rx| {
            // The message may be there a little earlier than the word.
            if matches!(rx.reader.handover().announced(), Ok(None)) {
                return;
            }
            // The sender may go there as soon as this end is ready: by then those know of it who look without a turn.
            let Some(mut tails) = self.hold_tails() else {
                self.ring_announced.store(true, Ordering::Relaxed);
                return;
            };
            let Some((generation, segment)) = self.offered.take_ring() else { return };
            if !connection.members.is_alone() || self.line.is_revocable() || rx.over || rx.broken.is_some() {
                return;
            }
            let Some((next, tail)) = self.checked_ring(generation, &segment) else { return };
            // It says what was announced: a ring out of turn is a lie, which the next read meets.
            if rx.reader.handover().prepare(generation, next).is_ok() {
                tails.expect(tail);
                rx.ring = generation.wrapping_sub(1);
                self.has_later.store(true, Ordering::Release);
            }
        });
    }

    /// A ring as it was offered, if it is one of this connection's.
    fn checked_ring(&self, generation: u16, segment: &PeerSegment) -> Option<(PeerCarrier<Mapped>, MappedPeerWord)> {
        let (next, header) = follow(segment, generation).ok()?;
        (header.epoch == self.epochs.peer).then(|| (next, segment.word(words::TAIL)))
    }

    /// The sender may have been found in another ring within this turn: then nobody looks at the one before any more.
    #[inline]
    pub(super) fn note_ring(&self, rx: &mut Rx) {
        let ring = rx.reader.handover().ring_written();
        if ring != rx.ring {
            self.turn_to_ring(rx, ring);
        }
    }

    /// Where somebody is at the words now, it is tried again in the next turn: until then the ring before stays mapped.
    #[cold]
    fn turn_to_ring(&self, rx: &mut Rx, ring: u16) {
        if let Ok(mut tails) = self.later_tails.try_write() {
            tails.turn();
            rx.ring = ring;
        }
    }

    /// Keeps everybody from these words, for a moment or a fork.
    pub(super) fn hold_tails(&self) -> Option<RwLockWriteGuard<'_, LaterTails>> {
        (0..1 << 12).find_map(|_| {
            std::hint::spin_loop();
            self.later_tails.try_write().ok()
        })
    }

    /// What the sender says of rings after the first. Nobody waits for who changes that: there may be something.
    #[inline(never)]
    pub(super) fn arrived_later(&self) -> u64 {
        self.later_tails.try_read().map_or(UNKNOWN, |tails| tails.find_last(&self.tail))
    }
}
