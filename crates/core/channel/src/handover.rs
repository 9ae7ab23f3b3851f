// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves a pipe to a larger or smaller ring under load (H-1 to H-7).

use tombolo_domain::{Error as DomainError, Offer};
use tombolo_layout::{Features, SegmentHeader, handshake::Message};
use tombolo_mem::Mapped;
use tombolo_ring::{Fresh, OwnRing, Reader, Writer, follow as follow_to};

use crate::{Error, Result, end::End};

/// State of the writer's side of a move.
#[derive(Debug, Default)]
pub(crate) enum Outgoing {
    /// No move is under way.
    #[default]
    Settled,
    /// The new ring was offered; the reader has not declared itself ready.
    Offered(OwnRing<Mapped>, Offer),
    /// The writer has moved; the reader may still be draining the ring before.
    Moved,
}

impl Outgoing {
    #[inline]
    pub(crate) fn is_under_way(&self) -> bool {
        !matches!(self, Self::Settled)
    }

    /// Makes a ring of `capacity` bytes and offers it (H-1). With `ahead` the writer moves there at once (H-9).
    pub(crate) fn begin(&mut self, capacity: u64, ahead: bool, writer: &mut Writer<Mapped>, end: &End) -> Result<()> {
        if !end.features.has(Features::HANDOVER) {
            return Err(Error::Handover("the peer does not follow hand-overs"));
        }
        if self.is_under_way() || !writer.handover().can_offer()? {
            return Err(Error::Handover("the last change is not finished yet; try again later"));
        }
        let mut shared = end.link();
        let generation = writer.handover().next_generation();
        let header = SegmentHeader::new(capacity, generation, 0, end.features, end.own_epoch);
        if header.segment_len > end.peer_map_limit {
            return Err(Error::TooLarge { len: header.segment_len, max: end.peer_map_limit });
        }
        let (segment, offer) = shared.link.allocate(header.segment_len as usize)?;
        // The header is written first, because the reader may look at any time from now on.
        let ring = Fresh::new(segment, &header).into_ring();
        let message = Message::Ring { generation, epoch: end.own_epoch };
        if let Err(error) = shared.link.send(&message.encode(), Some(&offer)) {
            drop(ring);
            shared.link.retire(None, offer);
            return Err(error.into());
        }
        *self = if ahead {
            writer.handover().go_ahead(ring);
            shared.offers.push(offer);
            Self::Moved
        } else {
            writer.handover().announce();
            Self::Offered(ring, offer)
        };
        Ok(())
    }

    /// Returns whether the reader has gone one step further, so that this side can follow (H-3, H-7).
    pub(crate) fn is_due(&self, writer: &mut Writer<Mapped>) -> Result<bool> {
        Ok(match self {
            Self::Settled => false,
            Self::Offered(..) => writer.handover().reader_ready()?,
            Self::Moved => writer.handover().can_offer()?,
        })
    }

    /// Goes one step further if the reader has (H-3, H-7).
    pub(crate) fn go_on(&mut self, writer: &mut Writer<Mapped>, end: &End) -> Result<()> {
        match std::mem::take(self) {
            Self::Settled => {}
            Self::Offered(ring, offer) => {
                if writer.handover().reader_ready()? {
                    writer.handover().switch_to(ring);
                    end.link().offers.push(offer);
                    *self = Self::Moved;
                } else {
                    *self = Self::Offered(ring, offer);
                }
            }
            Self::Moved => {
                if writer.handover().can_offer()? {
                    retire_before_last(end);
                } else {
                    *self = Self::Moved;
                }
            }
        }
        Ok(())
    }
}

/// Retires the ring before the last, unless that is the first ring, whose control page is in use (H-7).
fn retire_before_last(end: &End) {
    let mut shared = end.link();
    if shared.offers.len() > 2 {
        let offer = shared.offers.remove(1);
        shared.link.retire(None, offer);
    }
}

/// Takes the ring that the peer's writer announced off the control path and declares the reader ready for it (H-2).
/// Returns whether it did. A writer that closed or ended may withdraw an offer before it is taken, or the ring may be
/// too much for this process; then the writer never switches. If the writer went ahead, a ring that is too much now is
/// an error, and the call may be repeated (H-9).
pub(crate) fn follow(reader: &mut Reader<Mapped>, end: &End, announced: u16) -> Result<bool> {
    let malformed = |what: &str| Error::Malformed { clause: "H-1", what: what.into() };
    if !end.features.has(Features::HANDOVER) {
        return Err(malformed("a ring was announced where HANDOVER is not in force"));
    }
    let mut shared = end.link();
    let received = shared.receive(end.own_map_limit);
    drop(shared);
    let is_behind = reader.handover().is_behind();
    let received = match received {
        Ok(Some(received)) => received,
        Ok(None) => return Err(malformed("a ring was announced that was not offered")),
        Err(DomainError::Revoked | DomainError::PeerGone) => return Ok(false),
        // There is no room to map the ring, so the pipe stays where it is (H-2).
        Err(DomainError::Limit { .. } | DomainError::Quota(_) | DomainError::Os { .. }) if !is_behind => {
            return Ok(false);
        }
        Err(error) => return Err(error.into()),
    };
    let Message::Ring { generation, epoch } = Message::decode(&received.message)? else {
        return Err(malformed("a control message out of place"));
    };
    let segment = received.segment.ok_or_else(|| malformed("a ring was offered without its segment"))?;
    let (ring, header) = follow_to(&segment, generation).map_err(|corrupt| Error::in_segment(corrupt, &segment))?;
    if generation != announced || epoch != end.peer_epoch || header.epoch != epoch {
        return Err(malformed("the ring offered is not the one announced"));
    }
    reader.handover().prepare(generation, ring)?;
    Ok(true)
}
