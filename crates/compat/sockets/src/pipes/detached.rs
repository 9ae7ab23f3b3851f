// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A connection that has left its memory: both directions are on TCP, each endpoint has followed the other, and from
//! then on nobody looks at what is in the segments, which are taken away (V-9).

use std::{io::IoSliceMut, os::fd::RawFd};

use rustix::io::Errno;
use tombolo_mem::PeerWord;

use super::{Failed, Pipes, Read, Rx, Tx};
use crate::{
    connection::Connection,
    fork_group::ForkGroup,
    kernel::Kernel,
    switch::{Found, Incoming, Transport},
};

impl Pipes {
    /// Lets go of the memory if both directions are on TCP and the peer needs nothing of it either. A peer that has
    /// closed its socket, or is gone, needs nothing. Returns whether the memory was let go of.
    pub fn detach(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        if self.hints().is_detached() {
            return true;
        }
        let group = connection.members.group();
        if group.is_some_and(ForkGroup::is_detached) {
            self.hints().detach();
            return true;
        }
        // The peer's process is gone, or has left before, and sends no more.
        let is_peer_gone = self.session.is_gone() && connection.ending.has_peer_ended(kernel, fd);
        let is_over = connection.ending.ask_whether_over(kernel, fd);
        let sends_over_tcp = self.halves.with_tx(&connection.members, |tx| {
            // A peer that has left still reads what was recalled.
            let owes = !is_over && tx.owes_from(connection).is_some();
            !owes && (tx.is_followed_to_tcp() || is_peer_gone || matches!(tx.writer.reader().is_closed(), Ok(true)))
        });
        let reads_tcp = self.halves.with_rx(&connection.members, |rx| {
            let is_done = rx.receiver.transport() == Transport::Tcp
                || matches!(rx.reader.finished(), Ok(Some(_)))
                || is_peer_gone && rx.find_unread() == 0;
            is_done && !rx.receiver.is_behind(rx.moves.load_acquire().hint()) && rx.broken.is_none()
        });
        let done = matches!((sends_over_tcp, reads_tcp), (Ok(true), Ok(true)));
        if done {
            self.hints().detach();
            group.inspect(|group| group.detach());
        }
        done
    }
}

impl Pipes {
    /// Returns whether the peer has followed this endpoint's sending direction to TCP.
    pub fn are_followed_to_tcp(&self, connection: &Connection) -> bool {
        self.halves.with_tx(&connection.members, |tx| tx.is_followed_to_tcp()).unwrap_or(false)
    }

    /// Returns whether there is no error of which the program must still be told.
    pub fn owes_nothing(&self) -> bool {
        let rx = self.halves.lock_rx();
        rx.error.is_none() && rx.broken.is_none()
    }
}

impl Tx {
    /// Memory that was taken away reads as zeros, which do not show that anything was followed. It was not left in
    /// order.
    fn is_followed_to_tcp(&self) -> bool {
        let followed = self.followed.load_acquire().hint();
        self.sender.transport() == Transport::Tcp && self.sender.may_move(followed) && !self.followed.is_lost()
    }
}

impl Rx {
    /// Reads over TCP, from a connection that has left its memory.
    pub(super) fn recv_detached(
        &mut self,
        connection: &Connection,
        (kernel, fd): (&dyn Kernel, RawFd),
        to: &mut [IoSliceMut<'_>],
        read: Read,
    ) -> Result<(usize, Transport), Failed> {
        let (_, mut io) = self.reading((connection, kernel, fd), to, read);
        match io.read_tcp() {
            Ok(Found::Bytes(n)) => Ok((n, Transport::Tcp)),
            Ok(Found::End) => Ok((0, Transport::Tcp)),
            Ok(Found::Nothing) => Err(Failed::Os(Errno::AGAIN)),
            Err(failed) => {
                self.error = None; // The program is told now.
                Err(failed)
            }
        }
    }
}
