// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A session whose memory will be taken away, or was (S-19).

use std::sync::Weak;

use tombolo_domain::Liveness;

use super::peer_process::PeerProcess;
use crate::{connection::Connection, process::Process};

impl PeerProcess {
    /// Takes its connections back to TCP where its memory will be taken away (V-9). Says whether it is left, and all of them are.
    pub(super) fn leave_memory(&mut self, process: &Process) -> bool {
        if self.link.same_kernel() || !self.link.doorbell().is_some_and(|bell| bell.is_leaving()) {
            return false;
        }
        if let Some(line) = &self.line {
            line.begin_to_leave();
        }
        self.joined.retain(|connection| connection.strong_count() > 0);
        let left = |connection: &Weak<Connection>| connection.upgrade().is_none_or(|it| it.leave_memory(process));
        let all_left = self.joined.iter().map(left).fold(true, |all, one| all & one);
        if !all_left {
            // Whoever sleeps next looks first.
            process.exchange.mark_notified();
        }
        all_left
    }

    /// The memory was taken away.
    pub(super) fn lose_memory(&self, process: &Process) {
        if !self.link.same_kernel() && self.link.liveness() == Liveness::Revoked {
            self.joined.iter().filter_map(Weak::upgrade).for_each(|connection| connection.lose_memory(process));
        }
    }
}
