// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A move of the ring that this end sends by, and the policy that begins moves (S-20).

use tombolo_growth::Growth;
use tombolo_mem::Mapped;
use tombolo_os::clock::coarse_time;
use tombolo_ring::{Error, OwnRing, Writer};

use crate::quota::Lease;

/// How the ring that this end sends by follows its load.
#[derive(Debug)]
pub(super) struct RingMoves {
    pub policy: Growth,
    pub stage: MoveStage,
    /// What the present ring costs, if it is not the first.
    held: Option<Lease>,
}

/// How far a move is.
#[derive(Debug)]
pub(super) enum MoveStage {
    None,
    /// It was offered, and the peer is not ready.
    Offered(OwnRing<Mapped>, Lease),
    /// This end has moved, and the peer may still read in the ring before, which costs this.
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

    /// Goes one step on, if the peer has. Says whether this end writes into another ring now.
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
