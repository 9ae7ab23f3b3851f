// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries out the program's calls on a connection that has pipes.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::RawFd,
    sync::atomic::Ordering,
};

use rustix::io::Errno;

use crate::{
    Reason,
    connection::Connection,
    direction::Direction,
    negotiation::PAUSE,
    pipes::{Failed, Pipes, Read, Source, read_call::ReadCall},
    process::Process,
    stage::ReturnStage,
    switch::Transport,
};

/// A call of the program on a connection that has pipes, by one of its descriptors. Never blocks. On a connection
/// without pipes it finds nothing and moves nothing.
#[derive(Clone, Copy, Debug)]
pub struct ProgramCall<'a> {
    connection: &'a Connection,
    process: &'a Process,
    fd: RawFd,
}

impl Connection {
    /// Returns a call of the program by the descriptor `fd`, which moves bytes by the pipes or waits for them, if this
    /// endpoint has any.
    #[inline]
    #[must_use]
    pub fn for_call<'a>(&'a self, process: &'a Process, fd: RawFd) -> ProgramCall<'a> {
        ProgramCall { connection: self, process, fd }
    }
}

impl ProgramCall<'_> {
    // ---- sending

    /// Sends as many bytes as there is room for, by pipe or by TCP.
    ///
    /// # Errors
    /// Returns the error that TCP would report; `AGAIN` where there is no room.
    pub fn send(&self, from: &[IoSlice<'_>]) -> Result<usize, Errno> {
        let Self { connection, process, fd } = *self;
        let Some(pipes) = connection.pipes.get() else { return Err(Errno::NOTCONN) };
        match pipes.send(connection, process.kernel(), fd, from, process.wanted(connection)) {
            Ok((n, transport)) => {
                self.count_moved(Direction::Out, transport, n);
                if n < from.iter().map(|part| part.len()).sum() {
                    self.meet_full_ring();
                }
                Ok(n)
            }
            Err(failed) => Err(self.refuse_send(failed)),
        }
    }

    /// Sends up to `most` bytes of a pipe of the program's, and takes from that pipe what it sends. Returns 0 at the
    /// end of that pipe.
    ///
    /// # Errors
    /// Returns the error that TCP would report; `AGAIN` where there is no room, or nothing in the pipe.
    pub fn send_from(&self, source: &mut dyn Source, most: usize) -> Result<usize, Errno> {
        let Self { connection, process, fd } = *self;
        let Some(pipes) = connection.pipes.get() else { return Err(Errno::NOTCONN) };
        match pipes.send_from(connection, process.kernel(), fd, source, most, process.wanted(connection)) {
            Ok((n, transport, full)) => {
                self.count_moved(Direction::Out, transport, n);
                if full {
                    self.meet_full_ring();
                }
                Ok(n)
            }
            Err(failed) => Err(self.refuse_send(failed)),
        }
    }

    /// Returns the error that the program gets for a send that moved nothing.
    fn refuse_send(&self, failed: Failed) -> Errno {
        match failed {
            Failed::Os(errno) => {
                if errno == Errno::AGAIN {
                    self.meet_full_ring();
                    // A program that tries again and again waits as well.
                    self.leave_full_pipe();
                }
                errno
            }
            Failed::Broken(broken) => self.process.broken(self.connection, broken),
        }
    }

    /// Looks whether the connection has ended. A sender calls this now and then (`Ending::is_due`), as one that never
    /// waits learns of the end only here. Where both the peer's process and its socket are gone, nobody reads the pipe,
    /// and TCP refuses what is sent next (S-12). Once this program has shut its receiving, the kernel does not report
    /// that the peer has ended.
    #[cold]
    pub fn look_for_end(&self) {
        let Self { connection, process, fd } = *self;
        let (ending, kernel) = (&connection.ending, process.kernel());
        if ending.ask_whether_over(kernel, fd) || !ending.has_ended_receiving() && !ending.has_peer_ended(kernel, fd) {
            return;
        }
        // One look serves all connections.
        if process.exchange.has_not_heard_for(PAUSE) {
            process.receive_or_leave();
        }
        if connection.pipes.are_cut_off() {
            let _ = self.turn_back();
        }
    }

    /// Handles a send that found too little room: counts it, and lets the ring grow.
    fn meet_full_ring(&self) {
        self.count_stall();
        self.process.rings.grow_ring(&self.process.exchange, self.connection);
    }

    /// Counts the stall, so that edge-triggered epoll sets report room once there is some.
    fn count_stall(&self) {
        self.connection.wiring.count_stall();
        self.process.stalls.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns whether a send would find room, for a call that reports this to the program; `None` where TCP decides.
    /// If there is no room, that counts as a send that found none, as it does in the kernel.
    #[must_use]
    pub fn tell_room(&self) -> Option<bool> {
        let room = self.connection.is_writable();
        if room == Some(false) {
            self.count_stall();
        }
        room
    }

    /// Counts bytes that one of the two transports moved. Those over TCP were counted for the connection when they were
    /// moved.
    #[inline]
    fn count_moved(&self, direction: Direction, transport: Transport, bytes: usize) {
        self.process.journal.count_bytes(direction, transport, bytes);
        if transport == Transport::Pipe {
            let all = self.connection.piped.count(direction, bytes);
            self.connection.row.count(direction, transport, all);
            if !self.connection.worth.has_paid() {
                self.count_towards_join(direction);
            }
        }
    }

    /// Notes bytes of a connection that has not yet moved enough to pay for its join.
    #[cold]
    fn count_towards_join(&self, direction: Direction) {
        let Self { connection, process, .. } = *self;
        connection.worth.count_turn(direction);
        let over_tcp = connection.members.counted_both();
        let counted = Direction::BOTH.map(|way| over_tcp[way as usize] + connection.piped.counted(way));
        process.credits.reward_once_paid(process.kernel(), connection, counted);
    }

    /// Sends what comes next over TCP where nobody reads what is in the pipe. A thread that waits for room calls this
    /// now and then. Returns whether the direction has moved to TCP just now (S-16).
    pub fn leave_full_pipe(&self) -> bool {
        let Self { connection, process, fd } = *self;
        connection.pipes.get().is_some_and(|pipes| pipes.leave_if_full(connection, process.kernel(), fd))
    }

    // ---- receiving

    /// Receives what is there, by pipe or by TCP; returns 0 at the end of the stream.
    ///
    /// # Errors
    /// Returns the error that TCP would report; `AGAIN` where there is nothing.
    pub fn recv(&self, to: &mut [IoSliceMut<'_>], read: Read) -> Result<usize, Errno> {
        let Self { connection, process, fd } = *self;
        let Some(pipes) = connection.pipes.get() else { return Err(Errno::NOTCONN) };
        match pipes.recv(connection, process.kernel(), fd, to, read) {
            Ok((n, transport)) => {
                match read {
                    Read::Take => {
                        self.count_moved(Direction::In, transport, n);
                        if n > 0 {
                            self.tell_of_end();
                        } else {
                            connection.ending.make_due();
                        }
                    }
                    // A program that looks for more bytes than the ring holds, and takes none, needs a larger ring.
                    Read::Peek => process.follow_ring(connection),
                    Read::Look => {}
                }
                Ok(n)
            }
            Err(failed) => Err(self.refuse_recv(failed)),
        }
    }

    /// Shows up to `room.len()` bytes to `give`, and takes as many as `give` returns that it has handed on (`splice`).
    /// Returns 0 at the end of the stream.
    ///
    /// # Errors
    /// Returns the error that TCP would report, `AGAIN` where there is nothing, or the error of `give`.
    pub fn recv_through(
        &self,
        room: &mut [u8],
        give: &mut dyn FnMut(&[u8]) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        let Self { connection, process, fd } = *self;
        let Some(pipes) = connection.pipes.get() else { return Err(Errno::NOTCONN) };
        match (ReadCall { pipes, connection, kernel: process.kernel(), fd }).recv_through(room, give) {
            Ok(taken) => {
                taken.iter().for_each(|(n, transport)| self.count_moved(Direction::In, *transport, *n));
                let n = taken.iter().map(|(n, _)| n).sum();
                if n > 0 {
                    self.tell_of_end();
                } else {
                    connection.ending.make_due();
                }
                Ok(n)
            }
            Err(failed) => Err(self.refuse_recv(failed)),
        }
    }

    /// Returns the error that the program gets for a read that found nothing.
    fn refuse_recv(&self, failed: Failed) -> Errno {
        match failed {
            Failed::Os(errno) => {
                if errno == Errno::AGAIN {
                    self.process.follow_ring(self.connection);
                }
                errno
            }
            Failed::Broken(broken) => self.process.broken(self.connection, broken),
        }
    }

    /// Notifies the waiters after a read, where they were told only of bytes because some were unread: they look
    /// whether this is the end.
    fn tell_of_end(&self) {
        let connection = self.connection;
        // ORDER Relaxed: a thread that learns of the end stores that and then looks for bytes under the lock of this
        // direction. If that look found what was read here, it had the lock before this read.
        if connection.wiring.is_wired() && connection.ending.is_end_reported() && !connection.pipes.has_unread() {
            connection.pipes.doorbell().inspect(|doorbell| doorbell.notify());
        }
    }

    /// Returns whether all bytes are expected in the pipe and none are there. A read would find nothing there, and a
    /// waiter learns from the kernel what TCP reports.
    #[inline]
    #[must_use]
    pub fn finds_nothing(&self) -> bool {
        let connection = self.connection;
        connection.members.is_alone()
            && !connection.leaves()
            && connection.pipes.get().is_some_and(|pipes| pipes.hints().rests())
    }

    /// Returns whether a read would not block, because of bytes, the end of the stream, or an error.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        self.connection.pipes.get().is_some() && !matches!(self.recv(&mut [], Read::Look), Err(Errno::AGAIN))
    }

    // ---- before a sleep

    /// Asks the peer to notify for `data`, for `space`, or for both. The caller looks again before it sleeps.
    pub fn arm(&self, data: bool, space: bool) {
        if let Some(pipes) = self.connection.pipes.get() {
            pipes.arm(self.connection, data, space);
            self.process.follow_ring(self.connection);
        }
    }

    /// Sends over TCP, as far as there is room, what the peer has recalled from the pipe. Returns whether some of it is
    /// still to be sent (S-2).
    pub fn send_recalled(&self) -> bool {
        let Self { connection, process, fd } = *self;
        connection.pipes.get().is_some_and(|pipes| pipes.send_recalled(connection, process.kernel(), fd))
    }

    // ---- back to TCP, and the end

    /// Moves what this endpoint sends to TCP if that is possible now, and does nothing else. Returns whether what it
    /// sends next goes there.
    #[must_use]
    pub fn turn_back(&self) -> bool {
        let Self { connection, process, fd } = *self;
        let has_turned =
            |pipes: &Pipes| pipes.hints().is_detached() || pipes.turn_back(connection, process.kernel(), fd);
        connection.pipes.get().is_none_or(has_turned)
    }

    /// Moves what this endpoint sends from the pipe to TCP if that is possible now. Returns whether the peer has
    /// followed such a move, which shows that it makes calls.
    #[must_use]
    pub fn turn_back_and_see(&self) -> bool {
        let turned = self.turn_back();
        turned && self.connection.pipes.get().is_some_and(|pipes| pipes.are_followed_to_tcp(self.connection))
    }

    /// Moves both directions towards TCP, including what is in the pipe. Returns how far the return is.
    pub fn retreat(&self, reason: Reason) -> ReturnStage {
        let Self { connection, process, fd } = *self;
        connection.leave(reason);
        connection.pipes.get().map_or(ReturnStage::Done, |pipes| pipes.retreat(connection, process.kernel(), fd))
    }

    /// Takes unread bytes out of the pipe, whose memory is taken away, where they cannot come over TCP, after a retreat
    /// that reached `stage`. The program reads them as if they were still in the pipe. Returns whether no such bytes
    /// are left there.
    pub fn keep_unread(&self, stage: ReturnStage) -> bool {
        let Self { connection, process, fd } = *self;
        let call = |pipes| ReadCall { pipes, connection, kernel: process.kernel(), fd };
        connection.pipes.get().is_some_and(|pipes| call(pipes).keep_unread(stage == ReturnStage::Lost))
    }

    /// Notes that the program has shut the socket down, and also its receiving if `receives` is set. If both directions
    /// are shut and nothing is left to read, TCP refuses what arrives (S-12).
    pub fn finish_shutdown(&self, receives: bool) {
        let Self { connection, process, fd } = *self;
        connection.ending.end_receiving_if(receives);
        if let Some(pipes) = connection.pipes.get()
            && connection.ending.ask_whether_over(process.kernel(), fd)
        {
            pipes.end_reading_if_empty(connection, process.kernel(), fd);
        }
    }
}
