// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds out for a call that waits whether there are bytes and room, and asks the peer to notify when there are.

use std::{os::fd::RawFd, sync::atomic::Ordering};

use tombolo_mem::PeerWord;
use tombolo_ring::{Error, Side};

use super::{Pipes, Rx, Tx, leftover::Leftover};
use crate::{connection::Connection, direction::Direction, kernel::Kernel, switch::Transport};

impl Pipes {
    /// Returns the number of bytes in the pipe that were not read, for `FIONREAD`.
    pub fn unread(&self, connection: &Connection) -> u64 {
        let has_left = self.hints().is_detached();
        if has_left && !self.hints().has_leftover() {
            return 0;
        }
        let unread = self.halves.with_rx(&connection.members, |rx| {
            let leftover = rx.leftover.as_ref().map_or(0, Leftover::unread) as u64;
            // What was recalled comes over TCP, and is counted there.
            if has_left || rx.is_paid() { leftover } else { leftover + rx.find_unread() }
        });
        unread.unwrap_or(0)
    }

    /// Returns whether a send would find room; `None` where TCP decides.
    pub fn has_room(&self, connection: &Connection) -> Option<bool> {
        let room = self.halves.with_tx(&connection.members, |tx| {
            if tx.ended || connection.ending.is_over() || tx.sender.transport() == Transport::Tcp {
                return None;
            }
            // As with TCP, a little room is not yet worth a wake-up.
            let need = tx.writer.capacity() / 4;
            // Where the session is gone, the next send goes over TCP, as soon as that is possible.
            let moves = self.session.is_gone() && tx.sender.may_move(tx.followed.load_acquire().hint());
            Some(moves || tx.has_room(connection, need))
        });
        room.unwrap_or(Some(true))
    }

    /// Returns whether nobody will ever read what is in the pipe: TCP is over, or TCP reports that the peer is gone,
    /// and the session is gone too.
    pub(super) fn is_over(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        connection.ending.is_over() || self.session.is_gone() && connection.ending.has_peer_ended(kernel, fd)
    }

    /// Asks the peer to notify for bytes, for room, or both. The caller must look again before it sleeps (R-12, A1 to
    /// A3).
    pub fn arm(&self, connection: &Connection, data: bool, space: bool) {
        if self.hints().is_detached() {
            return;
        }
        let mut others = false;
        if data {
            others |= self.halves.with_rx(&connection.members, |rx| rx.arm(connection)).unwrap_or(false);
        }
        if space {
            others |= self.halves.with_tx(&connection.members, |tx| tx.arm(connection)).unwrap_or(false);
        }
        if others {
            self.doorbell.notify();
        }
        // The caller may be waiting for something else than bytes.
        if self.halves.with_rx(&connection.members, Rx::look_for_ring).unwrap_or(false) {
            self.offered.set_announced(true);
        }
    }

    /// Returns the sizes in bytes of the rings of the two directions: sending, receiving.
    pub fn ring_sizes(&self, connection: &Connection) -> [u64; 2] {
        let tx = self.halves.with_tx(&connection.members, |tx| tx.writer.capacity());
        let rx = self.halves.with_rx(&connection.members, |rx| rx.reader.capacity());
        [tx, rx].map(|size| size.unwrap_or(0))
    }

    /// Returns the transports of the two directions: sending, receiving.
    pub fn transports(&self, connection: &Connection) -> [Transport; 2] {
        let tx = self.halves.with_tx(&connection.members, |tx| tx.sender.transport());
        let rx = self.halves.with_rx(&connection.members, |rx| rx.receiver.transport());
        [tx, rx].map(|transport| transport.unwrap_or(Transport::Tcp))
    }
}

impl Rx {
    /// Returns whether what is left in the pipe comes over TCP.
    pub(super) fn is_paid(&self) -> bool {
        let moves = self.moves.load_acquire().hint();
        self.receiver.is_paid(moves, self.boundary.load_acquire().hint(), self.reader.position())
    }

    /// Returns how many bytes are unread; looks anew, whatever was there already. Returns 0 on a protocol violation,
    /// which the next read finds.
    pub(super) fn find_unread(&mut self) -> u64 {
        self.reader.handover().find_unread().unwrap_or(0)
    }

    /// Asks the peer to notify for bytes. Returns whether others of this endpoint sleep on another target.
    fn arm(&mut self, connection: &Connection) -> bool {
        // Asks for more than is there, as the caller has seen that much and left it.
        let (unread, reach) = (self.find_unread(), self.reader.handover().reach());
        self.armed_full = unread >= reach;
        let need = (unread + 1).min(reach);
        let target = self.reader.position().wrapping_add(need);
        let asked = Some((self.reader.position(), need));
        if connection.members.group().is_none() && self.armed == asked {
            return false;
        }
        self.armed = asked;
        self.reader.arm(need);
        std::sync::atomic::fence(Ordering::SeqCst);
        self.reader.before_sleep();
        connection.members.group().is_some_and(|group| group.arm(Direction::In, target))
    }

    /// Asks again after a read, for a thread that slept before it and could ask for no more than a full ring. The ring
    /// was full already: the peer has notified for that, and would not notify for what it writes now. Returns whether
    /// something has come for which no notification comes.
    pub(super) fn arm_anew(&mut self, connection: &Connection) -> bool {
        self.arm(connection) || self.find_unread() > 0
    }
}

impl Tx {
    /// Returns whether there is room for `need` bytes, or a send would learn why not.
    pub(super) fn has_room(&mut self, connection: &Connection, need: u64) -> bool {
        let room = (|| {
            self.advance_ring(connection)?;
            // A peer that is ready for another ring gives no room, where this endpoint may not move there.
            Ok::<_, Error>(
                self.writer.ready(need)? && (self.writer.room() >= need || self.writer.reader().is_closed()?),
            )
        })();
        room.unwrap_or(true)
    }

    /// Asks the peer to notify for room. Returns whether others of this endpoint sleep on another target.
    fn arm(&mut self, connection: &Connection) -> bool {
        let need = self.writer.capacity() / 4;
        let target = self.writer.position().wrapping_add(need);
        let asked = Some(self.writer.position());
        if connection.members.group().is_none() && self.armed == asked {
            return false;
        }
        self.armed = asked;
        self.writer.arm(need);
        std::sync::atomic::fence(Ordering::SeqCst);
        self.writer.before_sleep();
        connection.members.group().is_some_and(|group| group.arm(Direction::Out, target))
    }
}
