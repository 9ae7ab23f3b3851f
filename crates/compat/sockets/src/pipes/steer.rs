// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S-2. What this end sends moves to and fro between TCP and its pipe, and what was recalled from the pipe goes first.

use std::{io::IoSlice, os::fd::RawFd};

use rustix::{event::PollFlags, io::Errno};
use tombolo_layout::sockets::Followed;
use tombolo_mem::PeerWord;

use super::{Failed, Pipes, Tx, io::Sending};
use crate::{
    connection::Connection,
    direction::Direction,
    family::ForkGroup,
    kernel::Kernel,
    switch::{Fault, Transport},
};

impl Pipes {
    /// The peer may need TCP, and this end's program may be about to wait for it: moves now, not at its next send.
    pub(super) fn comply(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) {
        if !self.is_asked() {
            return;
        }
        let moved = self.turn(connection, &self.tx, |tx| {
            let before = tx.sender.carrier();
            let now = self.steer(tx, connection, kernel, fd, Transport::Tcp);
            // What fails here fails again where the program hears of it.
            let _ = tx.pay(connection, kernel, fd);
            now.is_ok_and(|now| now != before)
        });
        self.notify_if(matches!(moved, Ok(true)));
    }

    /// Moves what this end sends towards `wanted`, as far as it can. S-2: it cannot where the peer recalls what TCP does not
    /// carry any more.
    #[inline]
    pub(super) fn steer(
        &self,
        tx: &mut Tx,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        wanted: Transport,
    ) -> Result<Transport, Fault> {
        tx.ended |= connection.members.group().is_some_and(ForkGroup::has_ended_sending);
        if tx.ended && tx.is_recalled_in_vain() {
            return Ok(Transport::Pipe);
        }
        tx.steer(connection, kernel, fd, wanted)
    }
}

impl Tx {
    /// S-2. Whether the peer wants from TCP what it has not read from the pipe.
    fn is_recalled_in_vain(&mut self) -> bool {
        self.sender.carrier() == Transport::Pipe
            && Followed::decode(self.followed.load_acquire().hint()).recalls()
            && !self.writer.is_drained().unwrap_or(true)
    }

    /// Sends over TCP what was recalled from the pipe, before anything else. Says whether something is left.
    pub(super) fn pay(&mut self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> Result<bool, Failed> {
        let Some(base) = self.recalled.filter(|_| self.sender.carrier() == Transport::Tcp) else { return Ok(false) };
        loop {
            let from = connection.members.counted(Direction::Out).wrapping_sub(base);
            if self.writer.position().wrapping_sub(from) as i64 <= 0 {
                return Ok(false);
            }
            if kernel.poll(fd, 0) & PollFlags::ERR.bits() as i16 != 0 {
                return Err(Failed::Os(Errno::CONNRESET)); // Said once by the kernel, and that is for the program's next call.
            }
            let mut bytes = Vec::new();
            self.writer.handover().unread_from(from, &mut bytes)?;
            if self.moves.is_lost() {
                return Err(tombolo_ring::Error::Revoked.into()); // D-3. These are zeros, and nobody's bytes.
            }
            match kernel.send(fd, &[IoSlice::new(&bytes)]) {
                Ok(n) => connection.count(Direction::Out, n),
                Err(Errno::AGAIN) => return Ok(true),
                Err(errno) => return Err(Failed::Os(errno)),
            };
        }
    }

    #[inline]
    fn steer(
        &mut self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        wanted: Transport,
    ) -> Result<Transport, Fault> {
        let Self { sender, writer, followed, moves, boundary, recalled, .. } = self;
        sender.steer(&mut Sending { connection, kernel, fd, writer, recalled, followed, moves, boundary }, wanted)
    }
}
