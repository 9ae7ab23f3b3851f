// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What this end sends moves to and fro between TCP and its pipe, and what was recalled from the pipe goes first (S-2).

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
    /// The peer may need TCP, and this end's program may be about to wait for it: moves now, not at its next send.
    pub(super) fn comply(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) {
        if self.hints().is_asked() {
            let _ = self.turn_to_tcp(connection, kernel, fd, false);
        }
    }
}

impl Tx {
    /// Whether to stay in the pipe for what lies there. What is recalled from an end that sends no more can only be read there. Where
    /// the memory will be taken away, the peer is about to recall it, and would have to read it there after a move (S-19).
    #[cold]
    fn stays_for_unread(&mut self, is_leaving: bool) -> bool {
        let is_recalled = Followed::decode(self.followed.load_acquire().hint()).recalls();
        let stays = if is_recalled { self.ended } else { is_leaving };
        stays && self.sender.transport() == Transport::Pipe && !self.writer.reader().is_drained().unwrap_or(true)
    }

    /// Where that begins which was recalled from the pipe and not sent yet, if there is such.
    pub(super) fn owes_from(&self, connection: &Connection) -> Option<u64> {
        let from = connection.members.counted(Direction::Out).wrapping_sub(self.recalled?);
        (self.writer.position().wrapping_sub(from) as i64 > 0).then_some(from)
    }

    /// Sends over TCP what was recalled from the pipe, before anything else. Says whether something is left.
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
                return Err(Failed::Os(Errno::CONNRESET)); // Said once by the kernel, and that is for the program's next call.
            }
            let mut bytes = Vec::new();
            self.writer.handover().unread_from(from, &mut bytes)?;
            if self.moves.is_lost() {
                return Err(tombolo_ring::Error::Revoked.into()); // These are zeros, and nobody's bytes (D-3).
            }
            match kernel.send(fd, &[IoSlice::new(&bytes)]) {
                Ok(n) => connection.count_parts(Direction::Out, n, [bytes.as_slice()].into_iter()),
                Err(Errno::AGAIN) => return Ok(true),
                Err(errno) => return Err(Failed::Os(errno)),
            };
        }
    }

    /// Moves what this end sends towards `wanted`, as far as it can. It cannot where the peer recalls what TCP does not carry any
    /// more (S-2).
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
        // An honest peer that recalled something never says that it is ready again.
        let wanted = if self.recalled.is_some() { Transport::Tcp } else { wanted };
        let Self { sender, writer, followed, moves, boundary, recalled, .. } = self;
        sender.steer(&mut Sending { connection, kernel, fd, writer, recalled, followed, moves, boundary }, wanted)
    }
}
