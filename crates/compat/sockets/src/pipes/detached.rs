// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A connection that has left its memory: both directions are on TCP, each end has followed the other, and from then on nobody
//! looks at what stands in the segments, which are taken away (V-9).

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
    /// Lets go of the memory, if both directions are on TCP and the peer needs nothing of it either: neither does one that has closed
    /// its end, or is gone. Says whether that is so.
    pub fn detach(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        if self.hints().is_detached() {
            return true;
        }
        let group = connection.members.group();
        if group.is_some_and(ForkGroup::is_detached) {
            self.hints().detach();
            return true;
        }
        // Its process is, or it has left before, and sends no more.
        let is_peer_gone = self.session.is_gone() && connection.ending.has_peer_ended(kernel, fd);
        let is_over = connection.ending.ask_whether_over(kernel, fd);
        let sends_over_tcp = self.halves.with_tx(&connection.members, |tx| {
            // What was recalled a peer that has left still reads.
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
    /// Whether the peer has followed what this end sends to TCP.
    pub fn are_followed_to_tcp(&self, connection: &Connection) -> bool {
        self.halves.with_tx(&connection.members, |tx| tx.is_followed_to_tcp()).unwrap_or(false)
    }

    /// Whether the program is still to be told of nothing.
    pub fn owes_nothing(&self) -> bool {
        let rx = self.halves.lock_rx();
        rx.error.is_none() && rx.broken.is_none()
    }
}

impl Tx {
    /// Zeros say that nothing was ever followed: memory that is gone is not left in order.
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
                self.error = None; // The program hears it.
                Err(failed)
            }
        }
    }
}
