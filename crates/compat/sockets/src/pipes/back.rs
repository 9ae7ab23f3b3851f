// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves a connection back to TCP, with what is in the pipe, where one endpoint wants that, the session is gone (S-2,
//! S-10), or the pipe stays full (S-16).

use std::{os::fd::RawFd, sync::atomic::Ordering, time::Instant};

use tombolo_mem::{OwnWord, PeerWord};
use tombolo_os::clock::coarse_time;

use super::{Pipes, Read, full_pipe::FullPipe};
use crate::{
    connection::Connection,
    direction::Direction,
    kernel::Kernel,
    stage::ReturnStage,
    switch::{LeftTcp, Transport},
};

/// How far the direction that this endpoint sends has come on its way to TCP.
pub(super) struct Turned {
    /// Whether it moved just now.
    has_moved: bool,
    /// Whether TCP had no room yet for something that was recalled.
    owes: bool,
    /// Whether the next bytes go over TCP, or none are sent any more.
    is_done: bool,
}

impl Pipes {
    /// Moves what this endpoint sends to TCP if that is possible now, and asks the peer to do the same for the other
    /// direction.
    pub fn retreat(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> ReturnStage {
        let has_leftover = || self.hints().has_leftover() && self.unread(connection) > 0;
        if self.hints().is_detached() {
            return if has_leftover() { ReturnStage::Lost } else { ReturnStage::Done };
        }
        let owes = self.turn_to_tcp(connection, kernel, fd, false).is_some_and(|turned| turned.owes);
        let _ = self.halves.with_rx(&connection.members, |rx| {
            rx.reader.hand_back();
            let left = LeftTcp {
                moves: rx.moves.load_acquire().hint(),
                boundary: rx.boundary.load_acquire().hint(),
                received: connection.members.counted(Direction::In),
            };
            if let Some(word) = rx.receiver.recall(left) {
                // ORDER S-2: Release; pairs with the Acquire in Sending::followed. The head is published.
                rx.followed.store_release(word);
            }
        });
        // In this order: a peer that has ended its sending moves no more.
        let ended = connection.ending.has_peer_ended(kernel, fd);
        let _ = self.recv(connection, kernel, fd, &mut [], Read::Look);
        let way = match self.transports(connection) {
            [_, Transport::Pipe] if ended && self.unread(connection) > 0 => ReturnStage::Lost,
            [_, Transport::Pipe] if !ended => ReturnStage::Long,
            [Transport::Tcp, Transport::Tcp] if !owes && has_leftover() => ReturnStage::Lost,
            [Transport::Tcp, _] if !owes => ReturnStage::Done,
            _ => ReturnStage::Long,
        };
        if way == ReturnStage::Done {
            // What is left in the pipe was recalled, and needs no further look.
            self.hints().forget_unread();
        }
        // The peer may sleep, and what is asked of it is not a position that wakes it.
        self.halves.notify_if(way != ReturnStage::Done);
        way
    }

    /// Sends over TCP what the peer recalled from the pipe, as far as there is room. Returns whether some of it is left
    /// (S-2).
    pub fn send_recalled(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        if self.hints().is_detached() {
            return false;
        }
        if self.session.is_gone() {
            // No notification comes when the peer follows. So a move that waits for that counts as something left.
            let left = !self.turn_back(connection, kernel, fd);
            let detached = self.session.is_revocable() && self.detach(connection, kernel, fd);
            return left && !detached;
        }
        if self.hints().is_left() {
            // The peer may wait for this endpoint to follow, and send nothing before (S-19).
            let _ = self.recv(connection, kernel, fd, &mut [], Read::Look);
        }
        self.hints().is_asked() && self.turn_to_tcp(connection, kernel, fd, false).is_some_and(|turned| turned.owes)
    }

    /// Moves what this endpoint sends to TCP if that is possible now. Returns whether what it sends next goes there,
    /// with nothing left to be sent before (S-2, S-10).
    pub fn turn_back(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        let is_over = self.is_over(connection, kernel, fd);
        self.turn_to_tcp(connection, kernel, fd, is_over).is_none_or(|turned| !turned.owes && turned.is_done)
    }

    /// Moves what this endpoint sends to TCP if that is possible now, and sends there what was recalled, as far as
    /// there is room. Notifies the peer of the move, as neither endpoint lets go of the memory before it was followed
    /// (S-19).
    pub(super) fn turn_to_tcp(
        &self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        is_over: bool,
    ) -> Option<Turned> {
        let turned = self.halves.with_tx(&connection.members, |tx| {
            tx.ended |= is_over;
            let before = tx.sender.transport();
            // A failure here occurs again in a call that reports it to the program.
            let _ = tx.steer(connection, kernel, fd, Transport::Tcp);
            let owes = tx.send_recalled_now(connection, kernel, fd).unwrap_or(false);
            let now = tx.sender.transport();
            Turned { has_moved: now != before, owes, is_done: tx.ended || now == Transport::Tcp }
        });
        let turned = turned.ok()?;
        self.halves.notify_if(turned.has_moved);
        Some(turned)
    }

    /// Moves what this endpoint sends to TCP where the peer reads nothing for long, until the peer has read what is in
    /// the pipe. A thread that waits for room calls this now and then. Returns whether it moved. A ring holds less than
    /// the buffers of TCP do, and programs that send much before they read count on those (S-16).
    pub fn leave_if_full(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        // A program that tries again and again looks once a tick.
        let tick = coarse_time().as_millis() as u64;
        if self.full_looked_at.swap(tick, Ordering::Relaxed) == tick {
            return false;
        }
        // Follows the peer's move, without which the peer could not move either.
        let _ = self.recv(connection, kernel, fd, &mut [], Read::Look);
        let read_to = self.hints().read_to();
        let both_ways = self.hints().arrived() != read_to;
        let left = self.halves.with_tx(&connection.members, |tx| {
            let is_full = !tx.ended && tx.sender.transport() == Transport::Pipe && !tx.has_room(connection, 1);
            if !is_full {
                tx.full = None;
                return false;
            }
            let head = tx.writer.position().wrapping_sub(tx.writer.in_flight());
            let now = Instant::now();
            match &mut tx.full {
                Some(full) if full.is_as_it_was(head, read_to) => {
                    if !full.look_again(now, both_ways.then_some(tx.left)) {
                        return false;
                    }
                }
                _ => {
                    tx.full = Some(FullPipe::new(now, head, read_to));
                    return false;
                }
            }
            let left = tx.steer(connection, kernel, fd, Transport::Tcp).is_ok_and(|now| now == Transport::Tcp);
            if left {
                tx.full = None;
                tx.left += u32::from(both_ways);
            }
            left
        });
        left.unwrap_or(false)
    }
}
