// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A call that reads: what it does in its turn, and the notifications that it owes afterwards.

use std::{io::IoSliceMut, os::fd::RawFd};

use rustix::io::Errno;
use tombolo_mem::PeerWord;

use super::{
    Failed, Pipes, Read, Rx,
    hints::Hints,
    io::{Reading, peek_kernel},
    leftover::Leftover,
};
use crate::{
    connection::Connection,
    direction::Direction,
    kernel::Kernel,
    switch::{Found, Receiver, Transport},
};

/// A call that reads by the descriptor `fd`.
#[derive(Clone, Copy)]
pub(crate) struct ReadCall<'a> {
    pub pipes: &'a Pipes,
    pub connection: &'a Connection,
    pub kernel: &'a dyn Kernel,
    pub fd: RawFd,
}

/// Notifications that a turn that receives owes: to sleepers of this endpoint, as it took the bytes that were to wake
/// them, and to the peer, which it asked for TCP.
#[derive(Debug, Default)]
struct Owed {
    missed: bool,
    asks: bool,
}

impl ReadCall<'_> {
    /// Reads what is there; returns 0 at the end of the stream.
    pub fn recv(&self, to: &mut [IoSliceMut<'_>], read: Read) -> Result<(usize, Transport), Failed> {
        self.in_turn(|rx, owed| self.recv_in_turn(rx, to, read, owed))
    }

    /// Shows what is there to `give`, as far as there is `room`, and takes as many bytes as `give` returns that it has
    /// handed on. Does so in one turn, within which nothing that was shown can be recalled. Returns the bytes for each
    /// transport; none is the end of the stream. `room` holds nothing useful afterwards.
    pub fn recv_through(
        &self,
        room: &mut [u8],
        give: &mut dyn FnMut(&[u8]) -> Result<usize, Errno>,
    ) -> Result<[(usize, Transport); 2], Failed> {
        self.in_turn(|rx, owed| {
            let mut read =
                |rx: &mut Rx, room: &mut [u8], read| self.recv_in_turn(rx, &mut [IoSliceMut::new(room)], read, owed);
            let (shown, transport) = read(rx, room, Read::Peek)?;
            let given = if shown == 0 { 0 } else { give(&room[..shown]).map_err(Failed::Os)? };
            let (mut taken, mut other) = ((0, transport), (0, Transport::Tcp));
            while taken.0 + other.0 < given {
                let left = given - taken.0 - other.0;
                match read(rx, &mut room[..left], Read::Take) {
                    Ok((n @ 1.., by)) if by == transport => taken.0 += n,
                    Ok((n @ 1.., by)) => other = (other.0 + n, by),
                    // These bytes were handed on already. The next call reports the error.
                    failed => {
                        taken.0 += left;
                        if let Err(Failed::Os(error)) = failed
                            && error != Errno::AGAIN
                        {
                            rx.error = Some(error);
                        }
                    }
                }
            }
            Ok([taken, other])
        })
    }

    /// Takes unread bytes out of the pipe, whose memory is about to be taken away, and keeps them for the program, if
    /// they can come no other way (S-19). That is so where the sender `has_ended`, or moved to TCP before it saw the
    /// recall. Returns whether no such bytes are left in the pipe. An endpoint that is several processes takes nothing.
    pub fn keep_unread(&self, has_ended: bool) -> bool {
        let Self { pipes, connection, .. } = *self;
        let kept = self.in_turn(|rx, owed| {
            let mut left = match self.is_last(rx, has_ended) {
                true => usize::try_from(rx.find_unread()).unwrap_or(usize::MAX),
                false => 0,
            };
            if left == 0 {
                return Ok(true);
            }
            if !connection.members.is_alone() || rx.leftover.is_some() {
                return Ok(false);
            }
            left = left.saturating_add(self.count_before_pipe(rx));
            let Ok(mut leftover) = Leftover::with_room(left) else { return Ok(false) };
            let mut room = [0; 8 << 10];
            while left > 0 {
                let most = left.min(room.len());
                match self.recv_in_turn(rx, &mut [IoSliceMut::new(&mut room[..most])], Read::Take, owed) {
                    Ok((n @ 1.., _)) => {
                        leftover.push(&room[..n]);
                        left -= n;
                        continue;
                    }
                    // The program was not told of the error.
                    Err(Failed::Os(error)) if error != Errno::AGAIN => rx.error = Some(error),
                    _ => {}
                }
                break;
            }
            pipes.hints().set_leftover(leftover.unread() > 0);
            rx.leftover = Some(leftover);
            Ok(true)
        });
        kept.unwrap_or(false)
    }

    /// Returns whether what is in the pipe can come no other way.
    fn is_last(&self, rx: &Rx, has_ended: bool) -> bool {
        let is_there = !self.pipes.hints().is_detached() && rx.receiver.transport() == Transport::Pipe && !rx.is_paid();
        is_there && (has_ended || rx.is_left_unread())
    }

    /// Returns the number of unread bytes that TCP has from before the sender went to the pipe, where this endpoint
    /// followed ahead of them (S-3).
    fn count_before_pipe(&self, rx: &Rx) -> usize {
        let Self { connection, kernel, fd, .. } = *self;
        if rx.receiver.is_behind(rx.moves.load_acquire().hint()) {
            return 0;
        }
        let boundary = rx.boundary.load_acquire().hint();
        let before = boundary.saturating_sub(connection.members.counted(Direction::In));
        let there = kernel.counts(fd, connection.dialled).map_or(0, |sample| sample.unread);
        usize::try_from(before.min(there)).unwrap_or(0)
    }

    /// Takes one turn that receives, and then gives the notifications that it owes.
    fn in_turn<T>(&self, f: impl FnOnce(&mut Rx, &mut Owed) -> Result<T, Failed>) -> Result<T, Failed> {
        let Self { pipes, connection, kernel, fd } = *self;
        let mut owed = Owed::default();
        let received = pipes.halves.with_rx(&connection.members, |rx| f(rx, &mut owed))?;
        if owed.missed {
            pipes.doorbell.notify();
        }
        // The sender may sleep, and a request for TCP is not a position that wakes it (S-13).
        pipes.halves.notify_if(owed.asks);
        if matches!(received, Err(Failed::Os(Errno::AGAIN))) {
            pipes.comply(connection, kernel, fd);
        }
        received
    }

    fn recv_in_turn(
        &self,
        rx: &mut Rx,
        to: &mut [IoSliceMut<'_>],
        read: Read,
        owed: &mut Owed,
    ) -> Result<(usize, Transport), Failed> {
        let Self { pipes, connection, kernel, fd } = *self;
        let has_leftover = rx.leftover.as_ref().is_some_and(|leftover| leftover.unread() > 0);
        if (has_leftover || rx.over) && read == Read::Look && connection.leaves() && !pipes.hints().is_detached() {
            // The peer waits for this endpoint to follow, before it lets go of the memory (S-19).
            let (receiver, mut io) = rx.reading((connection, kernel, fd), to, read);
            let _ = receiver.receive(&mut io);
        }
        if has_leftover {
            return Ok((rx.read_leftover(pipes.hints(), (kernel, fd), to, read), Transport::Pipe));
        }
        if pipes.hints().has_leftover() {
            pipes.hints().set_leftover(false); // Another process of this endpoint has read it.
        }
        if let Some(broken) = rx.broken {
            return Err(Failed::Broken(broken));
        }
        if rx.over {
            if let Some(error) = rx.error.take_if(|_| read != Read::Look) {
                return Err(Failed::Os(error));
            }
            let n = if read == Read::Look { 0 } else { kernel.recv(fd, to, false).map_err(Failed::Os)? };
            return Ok((n, Transport::Tcp));
        }
        connection.members.recount(Direction::In, || kernel.counts(fd, connection.dialled));
        if pipes.hints().is_detached() {
            return rx.recv_detached(connection, (kernel, fd), to, read);
        }
        let (receiver, mut io) = rx.reading((connection, kernel, fd), to, read);
        // If the memory will be taken away, the request for TCP goes together with the recall of what is in the pipe
        // (S-19).
        if !(connection.pipes.are_to_leave() && receiver.reads_pipe()) {
            owed.asks |= receiver.set_leave(&mut io, connection.leaves());
        }
        let mut found = receiver.receive(&mut io);
        if let (Read::Peek, Ok(Found::Bytes(shown))) = (read, &mut found) {
            match io.peek_across(receiver, *shown) {
                Ok(more) => *shown += more,
                Err(failed) => found = Err(failed),
            }
        }
        let transport = rx.receiver.transport();
        pipes.hints().set_read_to(rx.reader.position());
        let settled = matches!(found, Ok(Found::Bytes(_) | Found::Nothing)) && rx.error.is_none();
        let moves = rx.receiver.moves_within_pipe().filter(|_| settled);
        pipes.hints().set_settled(moves);
        if read == Read::Take {
            owed.missed |= rx.armed_full && rx.arm_anew(connection);
            let behind = rx.receiver.is_behind(rx.moves.load_acquire().hint());
            pipes.hints().set_crossing(behind && matches!(found, Ok(Found::Bytes(_))));
        }
        if read != Read::Look && matches!(found, Ok(Found::End) | Err(Failed::Os(_))) {
            rx.end_reading(pipes.hints(), connection, kernel, fd);
        }
        let lacks = matches!((read, &found), (Read::Take, Ok(Found::Nothing)) | (Read::Peek, _));
        if lacks && rx.look_for_ring() {
            pipes.offered.set_announced(true);
        }
        match found {
            Ok(Found::Bytes(n)) => Ok((n, transport)),
            Ok(Found::End) => Ok((0, transport)),
            Ok(Found::Nothing) => Err(Failed::Os(Errno::AGAIN)),
            Err(Failed::Broken(broken)) => {
                rx.broken = Some(broken);
                pipes.hints().mark_broken();
                Err(Failed::Broken(broken))
            }
            Err(failed) => {
                rx.error = None; // The program is told now.
                Err(failed)
            }
        }
    }
}

impl Rx {
    /// Returns the receiver, and the state that a call reads with.
    pub(super) fn reading<'a, 'b>(
        &'a mut self,
        (connection, kernel, fd): (&'a Connection, &'a dyn Kernel, RawFd),
        to: &'a mut [IoSliceMut<'b>],
        read: Read,
    ) -> (&'a mut Receiver, Reading<'a, 'b>) {
        let Self { receiver, reader, moves, boundary, followed, error, .. } = self;
        (receiver, Reading { connection, kernel, fd, to, read, reader, moves, boundary, followed, error })
    }

    /// Returns whether the sender has left the pipe beyond what this endpoint has read. The bytes between cannot be
    /// recalled any more (S-2).
    fn is_left_unread(&self) -> bool {
        self.receiver.is_behind(self.moves.load_acquire().hint())
            && self.boundary.load_acquire().hint() != self.reader.position()
    }

    /// Reads bytes that were taken out of the pipe. A peek goes on with what TCP has; a read is to go on there too
    /// (S-15).
    fn read_leftover(
        &mut self,
        hints: &Hints,
        (kernel, fd): (&dyn Kernel, RawFd),
        to: &mut [IoSliceMut<'_>],
        read: Read,
    ) -> usize {
        let Some(leftover) = &self.leftover else { return 0 };
        let n = leftover.read(to, read);
        let is_all = leftover.unread() == if read == Read::Take { 0 } else { n };
        hints.set_leftover(leftover.unread() > 0);
        hints.set_crossing(read == Read::Take && is_all);
        if read == Read::Peek && is_all && self.receiver.transport() == Transport::Tcp {
            n + peek_kernel((kernel, fd), to, n, &mut self.error)
        } else {
            n
        }
    }

    /// Ends reading, once the program has been told of the end, if TCP is over and the pipe is empty. TCP refuses what
    /// the peer sends from now on (S-12).
    fn end_reading(&mut self, hints: &Hints, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) {
        self.over = connection.members.is_alone() && connection.ending.ask_whether_over(kernel, fd);
        if self.over {
            self.reader.close();
            hints.forget_unread();
        }
    }
}
