// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handles a session whose memory will be taken away, or was (S-19).

use std::sync::Weak;

use tombolo_domain::Liveness;

use super::peer_process::{InheritedSession, PeerProcess};
use crate::{Reason, connection::Connection, fork_group::ForkGroup, pipes::Pipes, process::Process};

impl PeerProcess {
    /// Moves its connections back to TCP if its memory will be taken away (V-9). Returns whether that is so and all of
    /// them have left.
    pub(super) fn leave_memory(&mut self, process: &Process) -> bool {
        if !self.is_to_leave() {
            return false;
        }
        if let Some(session) = &self.session {
            session.begin_to_leave();
        }
        self.joined.retain(|connection| connection.strong_count() > 0);
        let left = |connection: &Weak<Connection>| connection.upgrade().is_none_or(|it| leave_memory(&it, process));
        let all_left = self.joined.iter().map(left).fold(true, |all, one| all & one);
        if !all_left {
            // The next thread that is about to sleep looks first.
            process.exchange.mark_notified();
        }
        all_left
    }

    /// Returns whether its memory will be taken away.
    fn is_to_leave(&self) -> bool {
        !self.link.same_kernel() && self.link.doorbell().is_some_and(|doorbell| doorbell.is_leaving())
    }

    /// Notes that it has ended. Returns whether nothing needs its memory any more. Until then the session must be kept
    /// open.
    pub(super) fn has_left_memory(&mut self, process: &Process) -> bool {
        self.over = true;
        self.joined.retain(|connection| connection.strong_count() > 0);
        let leaves = if self.is_to_leave() { leave_memory } else { has_left_memory };
        let left = |connection: &Weak<Connection>| connection.upgrade().is_none_or(|it| leaves(&it, process));
        self.link.same_kernel() || self.joined.iter().map(left).fold(true, |all, one| all & one)
    }

    /// Resets the connections that still need the memory, where it was taken away.
    pub(super) fn lose_memory(&self, process: &Process) {
        if !self.link.same_kernel() && self.link.liveness() == Liveness::Revoked {
            self.joined.iter().filter_map(Weak::upgrade).for_each(|connection| lose_memory(&connection, process));
        }
    }
}

impl InheritedSession {
    /// Looks for news of the session, and moves its connections back to TCP if its memory will be taken away (V-9).
    /// Returns whether more news may come.
    pub(super) fn hear_news(&mut self, process: &Process) -> bool {
        let Some(session) = self.session.upgrade() else { return false };
        let is_revoked = session.hear_news();
        let all = || self.joined.iter().filter_map(Weak::upgrade);
        if is_revoked {
            all().for_each(|connection| lose_memory(&connection, process));
        }
        if session.is_leaving() {
            if all().fold(true, |all, connection| all & leave_memory(&connection, process)) {
                session.let_go();
                return false;
            }
            process.exchange.mark_notified();
        }
        !session.is_gone()
    }
}

impl Process {
    /// Lets go of the memory of a connection that went back to TCP, for a process that is about to fork. Returns
    /// whether that is done: the peer may still need the memory. With `by_force` it is done in any case, and what was
    /// in the memory is lost.
    #[must_use]
    pub fn lets_go(&self, connection: &Connection, by_force: bool) -> bool {
        let Some(pipes) = connection.pipes.get() else { return true };
        if by_force {
            pipes.hints().detach();
        }
        pipes.detach(connection, self.kernel(), connection.descriptors.fd())
    }
}

/// Moves `connection`, whose memory will be taken away, back to TCP as far as that is possible now. Returns whether it
/// no longer needs that memory (V-9).
fn leave_memory(connection: &Connection, process: &Process) -> bool {
    if connection.descriptors.are_closed() {
        return true;
    }
    let call = connection.for_call(process, connection.descriptors.fd());
    call.keep_unread(call.retreat(Reason::TakenAway));
    has_left_memory(connection, process)
}

/// Returns whether `connection` no longer needs its memory (V-9).
fn has_left_memory(connection: &Connection, process: &Process) -> bool {
    let (kernel, fd) = (process.kernel(), connection.descriptors.fd());
    let has_left = |pipes: &Pipes| pipes.detach(connection, kernel, fd);
    connection.descriptors.are_closed() || connection.pipes.get().is_none_or(has_left)
}

/// Resets `connection`, whose memory was taken away with what was in it, unless it did not need the memory any more
/// (V-9).
fn lose_memory(connection: &Connection, process: &Process) {
    let is_detached = connection.members.group().is_some_and(ForkGroup::is_detached);
    let needs_it = connection.pipes.get().is_some_and(|pipes| !pipes.hints().is_detached() && !is_detached);
    if needs_it && !connection.descriptors.are_closed() && process.gives_up(connection) {
        process.kernel().reset(connection.descriptors.fd());
    }
}
