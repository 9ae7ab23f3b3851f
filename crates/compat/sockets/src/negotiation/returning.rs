// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Joins connections anew that have left their memory (S-22).

use std::time::Duration;

use tombolo_os::clock::coarse_time;

use crate::{Reason, connection::Connection, process::Process, stage::Stage};

/// Time until the next look after another thread was found in a call.
const MOMENT: Duration = Duration::from_millis(20);
/// Time until the next look where no peer is near to try it with.
const WHILE: Duration = Duration::from_secs(1);

impl Process {
    /// Returns whether `connection` was joined and may be joined anew after a while (S-22). Costs next to nothing, as
    /// each call of the program asks.
    #[inline]
    #[must_use]
    pub fn may_return(&self, connection: &Connection) -> bool {
        connection.stage() == Stage::Joined && connection.pipes.are_revocable() && connection.leaves()
    }

    /// Postpones the next look a little, as another thread was in a call on `connection`.
    pub fn return_later(&self, connection: &Connection) {
        connection.returns.look_later(coarse_time(), MOMENT);
    }

    /// Returns whether another connection may take the place of one that [may return](Self::may_return) now
    /// ([`Connection::begin_anew`]), if no other thread is in a call on it. Never waits.
    pub fn may_return_now(&self, connection: &Connection) -> bool {
        let now = coarse_time();
        if connection.returns.is_waiting(now) {
            return false;
        }
        let has_left = connection.reason().is_some_and(Reason::may_pass)
            && connection.is_back_on_tcp()
            && connection.members.is_alone()
            && connection.ending.is_far();
        if !has_left || !connection.returns.is_due(now) {
            return false;
        }
        let is_empty = connection.pipes.get().is_some_and(|pipes| pipes.owes_nothing());
        // `false` where there is no link to the peer's kernel.
        let is_near = || {
            let peer = connection.identity.addresses()?.peer.host;
            self.exchange.try_lock_all()?.machines.finder(self.machines.as_deref())?.is_near(peer)
        };
        match is_empty.then(is_near).flatten() {
            Some(true) => return true,
            Some(false) => connection.returns.look_later(now, WHILE),
            None => connection.returns.look_later(now, MOMENT),
        }
        false
    }
}

/// Returns whether a try failed recently, for a connection that was joined before. Reads the clock in only a few of the
/// calls.
pub(super) fn is_paused(connection: &Connection, call: u64) -> bool {
    let paused = connection.returns.was_joined() && !connection.returns.is_due(coarse_time());
    if paused {
        connection.search.try_next_at(call + 16);
    }
    paused
}
