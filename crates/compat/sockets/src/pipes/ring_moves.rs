// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A move of the ring that this endpoint sends by, and the policy that begins such moves (S-20).

use tombolo_growth::Growth;
use tombolo_mem::Mapped;
use tombolo_os::clock::coarse_time;
use tombolo_ring::{Error, OwnRing, Writer};

use crate::quota::Lease;

/// State by which the ring that this endpoint sends by follows its load.
#[derive(Debug)]
pub(super) struct RingMoves {
    pub policy: Growth,
    pub stage: MoveStage,
    /// Lease of the present ring, if it is not the first.
    held: Option<Lease>,
}

/// How far a move is.
#[derive(Debug)]
pub(super) enum MoveStage {
    None,
    /// A ring was offered, and the peer is not ready for it yet.
    Offered(OwnRing<Mapped>, Lease),
    /// This endpoint has moved, and the peer may still read in the ring before, whose lease this is.
    Moved {
        _costs: Option<Lease>,
    },
}

impl RingMoves {
    pub fn new(policy: Growth) -> Self {
        Self { policy, stage: MoveStage::None, held: None }
    }

    #[inline]
    pub fn is_under_way(&self) -> bool {
        !matches!(self.stage, MoveStage::None)
    }

    /// Goes on by one step, if the peer has. Returns whether this endpoint writes into another ring now.
    #[cold]
    pub fn advance(&mut self, writer: &mut Writer<Mapped>) -> Result<bool, Error> {
        match std::mem::replace(&mut self.stage, MoveStage::None) {
            MoveStage::Offered(next, lease) if writer.handover().reader_ready()? => {
                writer.handover().switch_to(next);
                self.stage = MoveStage::Moved { _costs: self.held.replace(lease) };
                return Ok(true);
            }
            MoveStage::Moved { .. } if writer.handover().can_offer()? => {
                self.policy.settle_move(writer.position(), coarse_time())
            }
            other => self.stage = other,
        }
        Ok(false)
    }
}
