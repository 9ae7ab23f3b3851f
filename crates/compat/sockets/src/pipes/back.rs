// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S-2, S-10. Back to TCP, with what is in the pipe: where one end wants it, or the link has gone.

use std::{os::fd::RawFd, sync::atomic::Ordering};

use tombolo_mem::OwnWord;

use super::{Pipes, Read};
use crate::{connection::Connection, kernel::Kernel, stage::ReturnStage, switch::Transport};

impl Pipes {
    /// Moves what this end sends to TCP if that can be done now, and asks for the same the other way.
    pub fn retreat(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> ReturnStage {
        if self.is_detached() {
            return ReturnStage::Done;
        }
        let owes = self.turn(connection, &self.tx, |tx| {
            let _ = self.steer(tx, connection, kernel, fd, Transport::Tcp);
            tx.pay(connection, kernel, fd).unwrap_or(false)
        });
        let _ = self.turn(connection, &self.rx, |rx| {
            rx.reader.hand_back();
            if let Some(word) = rx.receiver.recall() {
                // ORDER S-2: Release; pairs with the Acquire in Sending::followed. The head is published.
                rx.followed.store_release(word);
            }
        });
        // In this order: who has ended its sending moves no more.
        let ended = connection.ending.has_peer_ended(kernel, fd);
        let _ = self.recv(connection, kernel, fd, &mut [], Read::Look);
        let way = match self.carriers(connection) {
            [_, Transport::Pipe] if ended && self.unread(connection) > 0 => ReturnStage::Lost,
            [_, Transport::Pipe] if !ended => ReturnStage::Long,
            [Transport::Tcp, _] if !matches!(owes, Ok(true)) => ReturnStage::Done,
            _ => ReturnStage::Long,
        };
        if way == ReturnStage::Done {
            // What is left in the pipe was recalled, and is nothing to look for.
            self.read_to.store(self.arrived(), Ordering::Relaxed);
        }
        // The peer may sleep: what is asked of it is no position that it waits for.
        self.notify_if(way != ReturnStage::Done);
        way
    }

    /// S-2. Sends over TCP what the peer recalled from the pipe, as far as there is room. Says whether something is left.
    pub fn owes(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        if self.is_detached() {
            return false;
        }
        if self.line.is_gone() {
            // Nobody will ring once the peer has followed: that it has to is something left.
            let left = !self.turn_back(connection, kernel, fd);
            let detached = self.line.is_revocable() && self.detach(connection);
            return left && !detached;
        }
        if !self.is_asked() {
            return false;
        }
        let left = self.turn(connection, &self.tx, |tx| {
            let _ = self.steer(tx, connection, kernel, fd, Transport::Tcp);
            tx.pay(connection, kernel, fd).unwrap_or(false)
        });
        left.unwrap_or(false)
    }

    /// Moves what this end sends to TCP, if that can be done now. Says whether what it sends next goes there, with nothing left to
    /// go before (S-2, S-10).
    pub fn turn_back(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        let left = self.turn(connection, &self.tx, |tx| {
            tx.ended |= self.is_over(connection, kernel, fd);
            let _ = self.steer(tx, connection, kernel, fd, Transport::Tcp);
            tx.pay(connection, kernel, fd).unwrap_or(false) || !tx.ended && tx.sender.carrier() == Transport::Pipe
        });
        !left.unwrap_or(false)
    }
}
