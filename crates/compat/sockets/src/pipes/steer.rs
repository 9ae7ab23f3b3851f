// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves the direction that this endpoint sends between TCP and its pipe; what was recalled from the pipe is sent first
//! (S-2).

use std::{io::IoSlice, os::fd::RawFd};

use rustix::{event::PollFlags, io::Errno};
use tombolo_layout::sockets::Followed;
use tombolo_mem::PeerWord;

use super::{Failed, Pipes, Tx, io::Sending};
use crate::{
    connection::Connection,
    direction::Direction,
    fork_group::ForkGroup,
    kernel::Kernel,
    switch::{Fault, Transport},
};

impl Pipes {
    /// Moves to TCP now if the peer asks for it, and not at the next send: this endpoint's program may be about to wait
    /// for the peer.
    pub(super) fn comply(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) {
        if self.hints().is_asked() {
            let _ = self.turn_to_tcp(connection, kernel, fd, false);
        }
    }
}

impl Tx {
    /// Returns whether to stay in the pipe because of the unread bytes there. Bytes recalled from an endpoint that
    /// sends no more can only be read there. Where the memory will be taken away, the peer is about to recall them;
    /// after a move it would have to read them there (S-19).
    #[cold]
    fn stays_for_unread(&mut self, is_leaving: bool) -> bool {
        let is_recalled = Followed::decode(self.followed.load_acquire().hint()).recalls();
        let stays = if is_recalled { self.ended } else { is_leaving };
        stays && self.sender.transport() == Transport::Pipe && !self.writer.reader().is_drained().unwrap_or(true)
    }

    /// Returns where the bytes begin that were recalled from the pipe and not sent yet; `None` if there are none.
    pub(super) fn owes_from(&self, connection: &Connection) -> Option<u64> {
        let from = connection.members.counted(Direction::Out).wrapping_sub(self.recalled?);
        (self.writer.position().wrapping_sub(from) as i64 > 0).then_some(from)
    }

    /// Sends over TCP what was recalled from the pipe, before anything else. Returns whether some of it is left.
    pub(super) fn send_recalled_now(
        &mut self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
    ) -> Result<bool, Failed> {
        if self.sender.transport() != Transport::Tcp {
            return Ok(false);
        }
        loop {
            let Some(from) = self.owes_from(connection) else { return Ok(false) };
            if kernel.poll(fd, 0) & PollFlags::ERR.bits() as i16 != 0 {
                return Err(Failed::Os(Errno::CONNRESET)); // The kernel reports it once, to the program's next call.
            }
            let mut bytes = Vec::new();
            self.writer.handover().unread_from(from, &mut bytes)?;
            if self.moves.is_lost() {
                return Err(tombolo_ring::Error::Revoked.into()); // Lost memory reads as zeros, which nobody sent (D-3).
            }
            match kernel.send(fd, &[IoSlice::new(&bytes)]) {
                Ok(n) => connection.count_parts(Direction::Out, n, [bytes.as_slice()].into_iter()),
                Err(Errno::AGAIN) => return Ok(true),
                Err(errno) => return Err(Failed::Os(errno)),
            };
        }
    }

    /// Moves what this endpoint sends towards `wanted`, as far as possible. It is impossible where the peer recalls
    /// what TCP does not carry any more (S-2).
    #[inline]
    pub(super) fn steer(
        &mut self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        wanted: Transport,
    ) -> Result<Transport, Fault> {
        self.ended |= connection.members.group().is_some_and(ForkGroup::has_ended_sending);
        let is_leaving = connection.pipes.are_to_leave();
        if (self.ended || is_leaving) && self.stays_for_unread(is_leaving) {
            return Ok(Transport::Pipe);
        }
        // A peer that keeps to the protocol never becomes ready again after a recall.
        let wanted = if self.recalled.is_some() { Transport::Tcp } else { wanted };
        let Self { sender, writer, followed, moves, boundary, recalled, .. } = self;
        sender.steer(&mut Sending { connection, kernel, fd, writer, recalled, followed, moves, boundary }, wanted)
    }
}
