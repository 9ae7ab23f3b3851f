// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the program's calls do to a connection that has pipes.

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

/// A call of the program on a connection that has pipes, by one of its descriptors. Never blocks. One on a connection that has none
/// finds nothing and moves nothing.
#[derive(Clone, Copy, Debug)]
pub struct ProgramCall<'a> {
    connection: &'a Connection,
    process: &'a Process,
    fd: RawFd,
}

impl Connection {
    /// A call of the program's by the descriptor `fd`, which moves bytes by the pipes or waits for them, if this end has any.
    #[inline]
    #[must_use]
    pub fn for_call<'a>(&'a self, process: &'a Process, fd: RawFd) -> ProgramCall<'a> {
        ProgramCall { connection: self, process, fd }
    }
}

impl ProgramCall<'_> {
    // ---- sending

    /// Sends what there is room for, by pipe or by TCP.
    ///
    /// # Errors
    /// What TCP would say; `AGAIN` where there is no room.
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

    /// The same for what a pipe of the program's has, up to `most` bytes; 0 is the end of that. Takes from it what it sends.
    ///
    /// # Errors
    /// What TCP would say; `AGAIN` where there is no room, or nothing in the pipe.
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

    /// What the program hears of a send that moved nothing.
    fn refuse_send(&self, failed: Failed) -> Errno {
        match failed {
            Failed::Os(errno) => {
                if errno == Errno::AGAIN {
                    self.meet_full_ring();
                    // Who tries again and again waits as well.
                    self.leave_full_pipe();
                }
                errno
            }
            Failed::Broken(broken) => self.process.broken(self.connection, broken),
        }
    }

    /// To be called now and then by one who sends (`Ending::is_due`): who never waits hears here that it is over. Where the peer's
    /// process is gone with its end, nobody is left who reads the pipe, and TCP says so to what comes next (S-12). Of the peer's end
    /// the kernel says nothing to one that receives no more by its own word.
    #[cold]
    pub fn look_for_end(&self) {
        let Self { connection, process, fd } = *self;
        let (ending, kernel) = (&connection.ending, process.kernel());
        if ending.ask_whether_over(kernel, fd) || !ending.is_deaf() && !ending.has_peer_ended(kernel, fd) {
            return;
        }
        // One look is for all connections.
        if process.exchange.has_not_heard_for(PAUSE) {
            process.receive_or_leave();
        }
        if connection.pipes.are_cut_off() {
            let _ = self.turn_back();
        }
    }

    /// A send found too little room.
    fn meet_full_ring(&self) {
        self.count_stall();
        self.process.rings.grow_ring(&self.process.exchange, self.connection);
    }

    /// Sets that tell edges tell of room when there is some.
    fn count_stall(&self) {
        self.connection.wiring.count_stall();
        self.process.stalls.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether a send would find room, for a call that tells the program so; none where TCP decides. That there is none counts as if a
    /// send had found none: so it does in the kernel.
    #[must_use]
    pub fn tell_room(&self) -> Option<bool> {
        let room = self.connection.is_writable();
        if room == Some(false) {
            self.count_stall();
        }
        room
    }

    /// So many bytes went by one of the two transports; those over TCP were counted when they went.
    #[inline]
    fn count_moved(&self, direction: Direction, transport: Transport, bytes: usize) {
        self.process.journal.count_bytes(direction, transport, bytes);
        if transport == Transport::Pipe {
            let all = self.connection.piped.count(direction, bytes);
            self.connection.row.count(direction, transport, all);
            if !self.connection.worth.has_paid() {
                self.note_worth(direction);
            }
        }
    }

    /// The connection has not moved yet what pays for its join.
    #[cold]
    fn note_worth(&self, direction: Direction) {
        let Self { connection, process, .. } = *self;
        connection.worth.count_turn(direction);
        let over_tcp = connection.members.counted_both();
        let counted = Direction::BOTH.map(|way| over_tcp[way as usize] + connection.piped.counted(way));
        process.credits.note_worth(process.kernel(), connection, counted);
    }

    /// To be called now and then by one who waits for room: where nobody reads what is in the pipe, what comes next goes over TCP.
    /// Says whether that has come about just now (S-16).
    pub fn leave_full_pipe(&self) -> bool {
        let Self { connection, process, fd } = *self;
        connection.pipes.get().is_some_and(|pipes| pipes.leave_if_full(connection, process.kernel(), fd))
    }

    // ---- receiving

    /// Receives what is there, by pipe or by TCP; 0 is the end.
    ///
    /// # Errors
    /// What TCP would say; `AGAIN` where there is nothing.
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
                    // Who looks for more than there is room for, and takes nothing, needs a larger ring.
                    Read::Peek => process.follow_ring(connection),
                    Read::Look => {}
                }
                Ok(n)
            }
            Err(failed) => Err(self.refuse_recv(failed)),
        }
    }

    /// Shows what is there to `give`, up to the length of `room`, and takes what that says it has handed on (`splice`); 0 is the end.
    ///
    /// # Errors
    /// What TCP would say; `AGAIN` where there is nothing; what `give` says.
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

    /// What the program hears of a read that found nothing.
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

    /// After a read. Whoever was told of bytes alone, as some were unread, looks whether this is the end now.
    fn tell_of_end(&self) {
        let connection = self.connection;
        // ORDER Relaxed: who hears of the end stores that and then looks for bytes under the lock of this direction. Where that look
        // found what was read here, it had the lock before this read.
        if connection.wiring.is_wired() && connection.ending.is_end_heard() && !connection.pipes.has_unread() {
            connection.pipes.doorbell().inspect(|doorbell| doorbell.notify());
        }
    }

    /// Whether all that comes is expected in the pipe, and nothing has: a read would find nothing there, and what TCP has to say
    /// whoever waits hears from the kernel.
    #[inline]
    #[must_use]
    pub fn finds_nothing(&self) -> bool {
        let connection = self.connection;
        connection.members.is_alone()
            && !connection.leaves()
            && connection.pipes.get().is_some_and(|pipes| pipes.hints().rests())
    }

    /// Whether a read would not block: bytes, the end, an error.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        self.connection.pipes.get().is_some() && !matches!(self.recv(&mut [], Read::Look), Err(Errno::AGAIN))
    }

    // ---- before a sleep

    /// Asks the peer to ring for what is waited for. Look again before you sleep.
    pub fn arm(&self, data: bool, space: bool) {
        if let Some(pipes) = self.connection.pipes.get() {
            pipes.arm(self.connection, data, space);
            self.process.follow_ring(self.connection);
        }
    }

    /// Sends over TCP what the peer's end wants from there and not from the pipe, as far as there is room. Says whether something is
    /// left of it (S-2).
    pub fn send_recalled(&self) -> bool {
        let Self { connection, process, fd } = *self;
        connection.pipes.get().is_some_and(|pipes| pipes.send_recalled(connection, process.kernel(), fd))
    }

    // ---- back to TCP, and the end

    /// Moves what this end sends to TCP, if that can be done now, and nothing else. Says whether what it sends next goes there.
    #[must_use]
    pub fn turn_back(&self) -> bool {
        let Self { connection, process, fd } = *self;
        let has_turned =
            |pipes: &Pipes| pipes.hints().is_detached() || pipes.turn_back(connection, process.kernel(), fd);
        connection.pipes.get().is_none_or(has_turned)
    }

    /// Moves what this end sends from the pipe to TCP, if that can be done now. Says whether the peer has followed such a move: it
    /// makes calls.
    #[must_use]
    pub fn turn_back_and_see(&self) -> bool {
        let turned = self.turn_back();
        turned && self.connection.pipes.get().is_some_and(|pipes| pipes.are_followed_to_tcp(self.connection))
    }

    /// Moves towards TCP, with what is in the pipe.
    pub fn retreat(&self, reason: Reason) -> ReturnStage {
        let Self { connection, process, fd } = *self;
        connection.leave(reason);
        connection.pipes.get().map_or(ReturnStage::Done, |pipes| pipes.retreat(connection, process.kernel(), fd))
    }

    /// Takes what is unread out of the pipe, whose memory goes, where it can come no other way, after a retreat that came so far: the
    /// program reads it as if it were there still. Says whether nothing such is left in the pipe.
    pub fn keep_unread(&self, stage: ReturnStage) -> bool {
        let Self { connection, process, fd } = *self;
        let call = |pipes| ReadCall { pipes, connection, kernel: process.kernel(), fd };
        connection.pipes.get().is_some_and(|pipes| call(pipes).keep_unread(stage == ReturnStage::Lost))
    }

    /// The program has shut the socket down, for what it `receives` too where that is so. Where that was both ways and nothing is
    /// left to read, TCP refuses what comes (S-12).
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
