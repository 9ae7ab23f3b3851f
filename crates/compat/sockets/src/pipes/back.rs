// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S-2, S-10. Back to TCP, with what is in the pipe: where one end wants it, or the link has gone.

use std::{io::IoSlice, os::fd::RawFd, sync::atomic::Ordering};

use rustix::{event::PollFlags, io::Errno};
use tombolo_layout::sockets::Followed;
use tombolo_mem::{OwnWord, PeerWord};

use super::{ENDED, Failed, Pipes, Read, Tx};
use crate::{
    connection::{Connection, Direction},
    kernel::Kernel,
    switch::{Fault, Transport},
};

/// How far a connection is on its way back to TCP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReturnStage {
    /// It is there.
    Done,
    /// The peer has to do something first.
    Long,
    /// Bytes are in shared memory that TCP will not carry, as the peer has ended its sending: only this library can read them.
    Lost,
}

impl Pipes {
    /// Moves what this end sends to TCP if that can be done now, and asks for the same the other way.
    pub fn retreat(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> ReturnStage {
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
        let ended = kernel.poll(fd, ENDED) & ENDED != 0;
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
        if self.line.is_gone() {
            return self.turn_back(connection, kernel, fd);
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

    /// S-10. The path to the peer is gone: back to TCP. Says whether the peer has to follow before that can be done, which nobody
    /// will ring for.
    fn turn_back(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        let left = self.turn(connection, &self.tx, |tx| {
            tx.ended |= self.is_over(connection, kernel, fd);
            let _ = self.steer(tx, connection, kernel, fd, Transport::Tcp);
            tx.pay(connection, kernel, fd).unwrap_or(false) || !tx.ended && tx.sender.carrier() == Transport::Pipe
        });
        left.unwrap_or(false)
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
        tx.ended |= connection.has_ended_sending();
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
            let from = connection.counted(Direction::Out).wrapping_sub(base);
            if self.writer.position().wrapping_sub(from) as i64 <= 0 {
                return Ok(false);
            }
            if kernel.poll(fd, 0) & PollFlags::ERR.bits() as i16 != 0 {
                return Err(Failed::Os(Errno::CONNRESET)); // Said once by the kernel, and that is for the program's next call.
            }
            let mut bytes = Vec::new();
            self.writer.unread_from(from, &mut bytes)?;
            match kernel.send(fd, &[IoSlice::new(&bytes)]) {
                Ok(n) => connection.count(Direction::Out, n),
                Err(Errno::AGAIN) => return Ok(true),
                Err(errno) => return Err(Failed::Os(errno)),
            };
        }
    }
}
