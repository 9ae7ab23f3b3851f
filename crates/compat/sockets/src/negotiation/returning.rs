// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections that have left their memory are joined anew (S-22).

use std::time::Duration;

use tombolo_os::clock::coarse_time;

use crate::{Reason, connection::Connection, process::Process, stage::Stage};

/// How long who found another in a call leaves it.
const MOMENT: Duration = Duration::from_millis(20);
/// The same where there is nobody to try it with.
const WHILE: Duration = Duration::from_secs(1);

impl Process {
    /// Whether `connection` was joined and may be joined anew after a while (S-22). It costs next to nothing, and is asked with each
    /// call.
    #[inline]
    #[must_use]
    pub fn may_return(&self, connection: &Connection) -> bool {
        connection.stage() == Stage::Joined && connection.pipes.are_revocable() && connection.leaves()
    }

    /// Somebody else was in a call on `connection`: that is looked at again in a moment.
    pub fn return_later(&self, connection: &Connection) {
        connection.returns.look_later(coarse_time(), MOMENT);
    }

    /// Of one that [may return](Self::may_return): whether another may take its place now ([`Connection::begin_anew`]), where
    /// nobody else is in a call on it. Never waits.
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
        // Else where there is no link: the peer is in another kernel.
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

/// Whether a try has failed of late, for one that was joined before. It costs a look at the clock in a few of the calls.
pub(super) fn is_paused(connection: &Connection, call: u64) -> bool {
    let paused = connection.returns.was_joined() && !connection.returns.is_due(coarse_time());
    if paused {
        connection.search.try_next_at(call + 16);
    }
    paused
}
