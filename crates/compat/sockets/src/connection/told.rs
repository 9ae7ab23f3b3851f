// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is told of a connection: what is shown of it from outside, and what is said when it ends.

use std::sync::atomic::Ordering;

use super::{Connection, Direction, Stage};
use crate::Reason;

impl Connection {
    /// Why it is on TCP at this moment, where enough is `after` bytes: also one for which the other end is still looked for. None
    /// where it is carried by shared memory.
    pub(crate) fn reason_so_far(&self, after: u64) -> Option<Reason> {
        match self.stage() {
            Stage::Plain => Some(self.stage.reason()),
            Stage::Joined => self.stage.is_leaving().then(|| self.stage.reason()),
            Stage::Candidate if !self.is_due(after) => Some(Reason::Brief),
            Stage::Candidate if !self.members.is_alone() => Some(Reason::Shared),
            Stage::Candidate => Some(Reason::NoPeer),
        }
    }

    /// Bytes of one direction by each path: over TCP, through shared memory.
    pub(crate) fn bytes(&self, direction: Direction) -> [u64; 2] {
        [self.members.counted(direction), self.piped[direction as usize].load(Ordering::Relaxed)]
    }
}
