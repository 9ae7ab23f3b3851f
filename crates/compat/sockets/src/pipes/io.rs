// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accesses the words in the segments, the ring and the kernel's connection, for the two directions.

use std::{io::IoSliceMut, os::fd::RawFd};

use rustix::{event::PollFlags, io::Errno};
use tombolo_mem::{Mapped, MappedOwnWord, MappedPeerWord, OwnWord, PeerWord};
use tombolo_ring::{Reader, Side, Writer};

use super::{Failed, Read};
use crate::{
    Reason,
    connection::Connection,
    direction::Direction,
    kernel::Kernel,
    switch::{Fault, Found, Incoming, Outgoing, Receiver, Transport},
};

pub(super) struct Sending<'a> {
    pub connection: &'a Connection,
    pub kernel: &'a dyn Kernel,
    pub fd: RawFd,
    pub writer: &'a mut Writer<Mapped>,
    pub recalled: &'a mut Option<u64>,
    pub followed: &'a MappedPeerWord,
    pub moves: &'a MappedOwnWord,
    pub boundary: &'a MappedOwnWord,
}

impl Outgoing for Sending<'_> {
    #[inline]
    fn followed(&mut self) -> u64 {
        // ORDER S-2: Acquire; pairs with the Release in Reading::publish.
        self.followed.load_acquire().hint()
    }

    fn sent_over_tcp(&mut self) -> Option<u64> {
        // An epoll set that is not prepared would report room by TCP, which always has some.
        if !self.connection.wiring.is_wired() || self.connection.plain_calls.is_inside(Direction::Out) {
            return None;
        }
        let counted = self.connection.members.counted(Direction::Out);
        let written = self.kernel.counts(self.fd, self.connection.dialled)?.counts.written;
        if written != counted {
            self.connection.leave(Reason::Bypassed);
            return None;
        }
        self.kernel.push(self.fd);
        Some(counted)
    }

    fn position(&mut self) -> u64 {
        self.writer.position()
    }

    fn recalled(&mut self) -> Result<u64, Fault> {
        let Self { connection, kernel, fd, .. } = *self;
        // What lies in memory that was taken away is not sent either (D-3).
        if let Err(tombolo_ring::Error::Corrupt(corrupt)) = self.writer.reader().is_drained() {
            return Err(corrupt.into());
        }
        let counted = || connection.members.counted(Direction::Out);
        if self.writer.in_flight() > 0 {
            connection.members.recount(Direction::Out, || kernel.counts(fd, connection.dialled));
            // The peer would take bytes that bypassed the library for the first of the recalled ones.
            if kernel.counts(fd, connection.dialled).is_some_and(|sample| sample.counts.written != counted()) {
                return Err(Fault::Stray);
            }
        }
        let head = self.writer.position().wrapping_sub(self.writer.in_flight());
        let base = counted().wrapping_sub(head);
        if let Some(group) = self.connection.members.group() {
            group.set_recalled(base);
        }
        *self.recalled = Some(base);
        Ok(head)
    }

    fn publish(&mut self, boundary: u64, moves: u64) {
        self.boundary.store_relaxed(boundary);
        // ORDER S-1: Release; pairs with the Acquire in Reading::moves. Publishes the boundary and, on the way back to
        // TCP, the last bytes of the pipe.
        self.moves.store_release(moves);
    }
}

pub(super) struct Reading<'a, 'b> {
    pub connection: &'a Connection,
    pub kernel: &'a dyn Kernel,
    pub fd: RawFd,
    pub to: &'a mut [IoSliceMut<'b>],
    pub read: Read,
    pub reader: &'a mut Reader<Mapped>,
    pub moves: &'a MappedPeerWord,
    pub boundary: &'a MappedPeerWord,
    pub followed: &'a MappedOwnWord,
    pub error: &'a mut Option<Errno>,
}

/// Copies what is in the pipe without consuming it. Returns the number of bytes.
fn peek_pipe(reader: &mut Reader<Mapped>, to: &mut [IoSliceMut<'_>]) -> Result<usize, Failed> {
    let mut copied = 0;
    for part in to.iter_mut() {
        let n = reader.in_place().copy_ahead(copied as u64, part)?;
        copied += n;
        if n < part.len() {
            break; // Bytes that have come since would leave a gap.
        }
    }
    Ok(copied)
}

impl Reading<'_, '_> {
    /// Peeks across a move: once all bytes before the point where the sender left the transport were `shown`, shows
    /// those on the next transport too, as far as there is room. Returns their number. The sender moves no further
    /// before this endpoint follows (S-15).
    pub fn peek_across(&mut self, receiver: &Receiver, shown: usize) -> Result<usize, Failed> {
        let transport = receiver.transport();
        let at = if transport == Transport::Tcp { self.received() } else { self.position() };
        if receiver.left_at(self)? != Some(at.wrapping_add(shown as u64)) {
            return Ok(0);
        }
        if transport == Transport::Tcp {
            return peek_pipe(self.reader, &mut room_behind(self.to, shown));
        }
        Ok(peek_kernel((self.kernel, self.fd), self.to, shown, self.error))
    }
}

/// Returns the room after the first `skip` bytes.
fn room_behind<'a>(to: &'a mut [IoSliceMut<'_>], mut skip: usize) -> Vec<IoSliceMut<'a>> {
    let behind = |part: &'a mut IoSliceMut<'_>| {
        let begin = skip.min(part.len());
        skip -= begin;
        IoSliceMut::new(&mut part[begin..])
    };
    to.iter_mut().map(behind).filter(|part| !part.is_empty()).collect()
}

/// Shows what TCP has, after what was `shown` already. Returns the number of bytes.
pub(super) fn peek_kernel(
    (kernel, fd): (&dyn Kernel, RawFd),
    to: &mut [IoSliceMut<'_>],
    shown: usize,
    error: &mut Option<Errno>,
) -> usize {
    let mut rest = room_behind(to, shown);
    if rest.is_empty() {
        return 0;
    }
    kernel.recv(fd, &mut rest, true).unwrap_or_else(|said| {
        // The kernel reports an error once; the program gets it after the bytes that are there.
        *error = error.or((said != Errno::AGAIN).then_some(said));
        0
    })
}

impl Incoming for Reading<'_, '_> {
    type Error = Failed;

    fn moves(&mut self) -> u64 {
        // ORDER S-1: Acquire; pairs with the Release in Sending::publish.
        self.moves.load_acquire().hint()
    }

    fn boundary(&mut self) -> u64 {
        self.boundary.load_acquire().hint()
    }

    fn publish(&mut self, word: u64) {
        // ORDER S-2: Release; pairs with the Acquire in Sending::followed.
        self.followed.store_release(word);
    }

    fn may_be_ready(&mut self) -> bool {
        let wiring = &self.connection.wiring;
        if !wiring.is_wired()
            || !wiring.waits().is_seen(Direction::In)
            || self.connection.plain_calls.is_inside(Direction::In)
        {
            return false;
        }
        let Some(sample) = self.kernel.counts(self.fd, self.connection.dialled) else { return false };
        if sample.read() != self.connection.members.counted(Direction::In) {
            self.connection.leave(Reason::Bypassed);
            return false;
        }
        true
    }

    fn read_tcp(&mut self) -> Result<Found, Failed> {
        if self.read == Read::Look {
            return self.look_at_tcp();
        }
        if let Some(error) = *self.error {
            return Err(Failed::Os(error));
        }
        match self.kernel.recv(self.fd, self.to, self.read == Read::Peek) {
            Ok(0) => Ok(Found::End),
            Ok(n) => {
                if self.read == Read::Take {
                    self.connection.count_parts(Direction::In, n, self.to.iter().map(|part| &**part));
                }
                Ok(Found::Bytes(n))
            }
            Err(Errno::AGAIN) => Ok(Found::Nothing),
            Err(error) => {
                // The kernel reports an error once; there may be bytes to read before the program must get it.
                *self.error = Some(error);
                Err(Failed::Os(error))
            }
        }
    }

    fn look_at_tcp(&mut self) -> Result<Found, Failed> {
        if self.read == Read::Look {
            // A peek does not take the kernel's error, which is reported once: the program gets it.
            let said = self.kernel.poll(self.fd, (PollFlags::IN | PollFlags::RDHUP).bits() as i16);
            let said = PollFlags::from_bits_retain(said as _);
            if self.error.is_some() || said.contains(PollFlags::ERR) {
                return Ok(Found::End);
            }
            if !said.intersects(PollFlags::IN | PollFlags::RDHUP | PollFlags::HUP) {
                return Ok(Found::Nothing);
            }
        }
        if self.error.is_none() {
            match self.kernel.recv(self.fd, &mut [IoSliceMut::new(&mut [0])], true) {
                Ok(0) => return Ok(Found::End),
                Ok(n) => return Ok(Found::Bytes(n)),
                Err(Errno::AGAIN) => return Ok(Found::Nothing),
                // The program gets it, as above.
                Err(error) => *self.error = Some(error),
            }
        }
        match *self.error {
            Some(error) if self.read != Read::Look => Err(Failed::Os(error)),
            _ => Ok(Found::End),
        }
    }

    fn read_pipe(&mut self) -> Result<Option<usize>, Failed> {
        if self.read == Read::Take {
            return Ok(self.reader.read_vectored(self.to)?);
        }
        if self.read == Read::Look {
            return Ok(self.reader.ready(1)?.then(|| self.reader.available() as usize).filter(|there| *there > 0));
        }
        let copied = peek_pipe(self.reader, self.to)?;
        Ok((copied != 0).then_some(copied))
    }

    fn received(&mut self) -> u64 {
        self.connection.members.counted(Direction::In)
    }

    fn position(&mut self) -> u64 {
        self.reader.position()
    }
}
