// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Talks to the programs of this kernel over a UNIX socket, one message per datagram (B-15, V-1, V-2). Nothing here
//! blocks.

use std::{
    io::{self, IoSlice},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::PollFlags,
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType},
};
use tombolo_control::{Envelope, Fault, MESSAGE_MAX, Message, Name, Path};
use tombolo_os::{passing, poll};

use crate::{
    discard::{self, Look},
    endpoint::connections::{Agreement, Range, Refusal},
    fd_passing,
};

/// Socket from which connected programs are obtained.
#[derive(Debug)]
pub enum ProgramSocket {
    /// A listening `SOCK_SEQPACKET` that does not block.
    Listening(OwnedFd),
    /// A non-blocking `SOCK_SEQPACKET` on which the process that accepted the programs passes their sockets one by one.
    Passed(OwnedFd),
}

impl From<OwnedFd> for ProgramSocket {
    fn from(listening: OwnedFd) -> Self {
        Self::Listening(listening)
    }
}

impl ProgramSocket {
    /// Returns a descriptor that polls readable when a program waits.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Listening(socket) | Self::Passed(socket) => socket.as_fd(),
        }
    }

    /// Returns the socket of the next program that waits.
    ///
    /// # Errors
    /// No program waits, or the process has no descriptor left.
    pub fn next(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Listening(socket) => {
                Ok(rustix::net::accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
            }
            Self::Passed(socket) => {
                let passed = passing::receive(socket, &mut [0], 1, RecvFlags::DONTWAIT)?.descriptors;
                passed.into_iter().next().ok_or_else(|| io::ErrorKind::NotFound.into())
            }
        }
    }
}

/// Time that a program may take to send a request.
const PATIENCE: Duration = Duration::from_secs(5);

/// Returns whether a user who has `own` seats of `all` may have one more while others have `theirs`: up to half of what
/// they leave (B-15). So one or two malicious users alone cannot lock others out.
#[must_use]
pub fn may_be_admitted(own: usize, theirs: usize, all: usize) -> bool {
    2 * own < all.saturating_sub(theirs)
}

/// State of a program's conversation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ProgramState {
    /// It has sent nothing yet.
    New,
    /// It has sent Hello.
    Greeted,
    /// Its request was answered. It may send another, for a while and as long as there is room.
    Idle,
    /// It asked for a listing, and waits for its turn.
    Looking,
    /// It waits for connections to a service.
    Listening(Name),
    /// It asked to connect, and waits for the answer.
    Connecting,
}

/// A connected program.
#[derive(Debug)]
pub struct Program {
    socket: OwnedFd,
    /// User of the program, as the kernel reports it.
    pub user: u32,
    /// Process of the program, as the kernel reports it; 0 if it has no number in this PID namespace.
    pub process: u32,
    /// Network namespace in which the program was seen last, if that is not the broker's (B-22).
    pub namespace: Option<u64>,
    /// State of its conversation.
    pub doing: ProgramState,
    /// Serial of its request.
    pub asked: u32,
    /// Whether the program understands Leave, so that it is told when a link is taken away (B-21).
    pub hears_leave: bool,
    /// Time by which it must have sent its first or next request.
    deadline: Instant,
}

impl Drop for Program {
    fn drop(&mut self) {
        discard::end(self.socket.as_fd());
    }
}

impl Program {
    /// Makes a program of a socket that has just connected.
    ///
    /// # Errors
    /// The kernel does not report who the program is.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        let (user, process) = (fd_passing::user_of(&socket)?, fd_passing::process_of(&socket).unwrap_or_default());
        let (doing, deadline) = (ProgramState::New, Instant::now() + PATIENCE);
        Ok(Self { socket, user, process, namespace: None, doing, asked: 0, hears_leave: false, deadline })
    }

    /// Returns the program's socket.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns the time by which the program must have sent a request, if it must.
    #[must_use]
    pub fn late_at(&self) -> Option<Instant> {
        matches!(self.doing, ProgramState::New | ProgramState::Greeted | ProgramState::Idle).then_some(self.deadline)
    }

    /// Records that the program's request was answered.
    pub fn rest(&mut self) {
        (self.doing, self.deadline) = (ProgramState::Idle, Instant::now() + PATIENCE);
    }

    /// Returns the program's next message, or `None` if there is none yet.
    ///
    /// # Errors
    /// The program is gone, or sent what it may not.
    pub fn receive(&self) -> io::Result<Option<Result<Envelope, Fault>>> {
        receive(self.socket.as_fd())
    }

    /// Answers the program's request.
    ///
    /// # Errors
    /// The program is gone, or does not read.
    pub fn answer(&self, message: Message) -> io::Result<()> {
        send(self.socket.as_fd(), self.asked, message, &[])
    }

    /// Returns whether the program has closed its socket: its requests are over, though the broker has not handled that
    /// yet.
    pub fn has_left(&self) -> bool {
        poll::polls_as(&self.socket, PollFlags::HUP)
    }

    /// Answers the program's request with a refusal. A program that does not read the answer is gone, or will be
    /// dropped.
    pub fn refuse(&mut self, Refusal(code, why): Refusal) {
        self.rest();
        let _ = self.answer(Message::Refuse { code, reason: why.into() });
    }

    /// Sends a connection to the program that asked for it, or to the one that listens (V-2).
    ///
    /// # Errors
    /// The program is gone, or does not read.
    pub fn state(
        &self,
        serial: u32,
        (peer, service): (Name, Name),
        made: &Agreement,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let ((offset, len), channel) = (made.own, made.channel);
        send(self.socket.as_fd(), serial, Message::Connect { peer, service, offset, len, channel }, descriptors)
    }
}

/// Tells a program, on its connection's socket, that the peer agreed, and passes the peer's window (V-2).
///
/// # Errors
/// The program is gone, or does not read.
pub fn accept(socket: &OwnedFd, (offset, len): Range, theirs: &OwnedFd) -> io::Result<()> {
    send(socket.as_fd(), 0, Message::Accept { offset, len }, &[theirs.as_fd()])
}

/// Makes the socket pair of one connection. Returns the broker's side, and the program's.
///
/// # Errors
/// The process has no descriptors left.
pub fn connection_socket() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Returns the next message on a socket, or `None` if there is none yet. A message with descriptors stays in the queue,
/// because closing one may take as long as its file system likes. Pass such a socket to [`discard::end`].
///
/// # Errors
/// The program is gone, or sent what it may not.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Result<Envelope, Fault>>> {
    let unwanted = || io::Error::other("descriptors that nobody asked for, or a message too long (B-15)");
    let mut buffer = [0; MESSAGE_MAX];
    match discard::peek_message(socket, &mut buffer) {
        Ok(Look::Bytes(_)) => {}
        Ok(Look::Descriptors) => return Err(unwanted()),
        Err(Errno::AGAIN) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    // No room is offered for descriptors, so the kernel closes any that arrived meanwhile.
    let received = match passing::receive(socket, &mut buffer, 0, RecvFlags::DONTWAIT) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        received => received?,
    };
    if received.more_came || received.is_longer {
        return Err(unwanted());
    }
    match received.len {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        len => Ok(Some(Envelope::decode(Path::Socket, &buffer[..len]))),
    }
}

/// Sends a message in one datagram.
///
/// # Errors
/// The program is gone, or does not read.
pub fn send(socket: BorrowedFd<'_>, serial: u32, message: Message, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = Envelope { serial, message }.encode();
    passing::send(socket, &[IoSlice::new(&bytes)], descriptors, SendFlags::DONTWAIT).map(drop)
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, Timespec};

    use super::*;

    #[test]
    fn b15_descriptors_that_nobody_asked_for_are_never_had() {
        for _ in 0..200 {
            let (ours, theirs) = connection_socket().unwrap();
            let (reads, writes) = rustix::pipe::pipe().unwrap();
            send(theirs.as_fd(), 0, Message::Close {}, &[writes.as_fd()]).unwrap();
            drop(writes);
            assert!(receive(ours.as_fd()).is_err());
            discard::end(ours.as_fd());
            drop(ours);
            // The descriptor is closed soon, and nobody else holds it.
            let mut polled = [PollFd::new(&reads, PollFlags::empty())];
            rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })).unwrap();
            assert!(polled[0].revents().contains(PollFlags::HUP), "somebody has it still");
        }
    }

    #[test]
    fn b15_users_who_take_all_they_get_leave_seats_to_others() {
        const SEATS: usize = 256;
        let mut had: Vec<usize> = Vec::new();
        while had.iter().sum::<usize>() < SEATS {
            let theirs = had.iter().sum();
            had.push((0..).find(|own| !may_be_admitted(*own, theirs, SEATS)).unwrap());
        }
        assert_eq!(had, [128, 64, 32, 16, 8, 4, 2, 1, 1]);
        assert!(!may_be_admitted(0, SEATS, SEATS) && !may_be_admitted(0, 2 * SEATS, SEATS));
    }
}
