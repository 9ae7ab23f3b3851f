// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs of this kernel, over a UNIX socket: one datagram a message (B-15, V-1, V-2). Nothing here blocks.

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

/// Where programs come in.
#[derive(Debug)]
pub enum ProgramSocket {
    /// A listening `SOCK_SEQPACKET` that does not block.
    Listening(OwnedFd),
    /// A `SOCK_SEQPACKET` that does not block, on which they are passed one by one by who let them in.
    Passed(OwnedFd),
}

impl From<OwnedFd> for ProgramSocket {
    fn from(listening: OwnedFd) -> Self {
        Self::Listening(listening)
    }
}

impl ProgramSocket {
    /// Polls readable when somebody waits.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Listening(socket) | Self::Passed(socket) => socket.as_fd(),
        }
    }

    /// Who waits.
    ///
    /// # Errors
    /// Nobody does, or no descriptor is to be had.
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

/// How long a program may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether a user who has `own` seats of `all` may have one more while others have `theirs`: up to half of what they
/// leave (B-15). So one or two malicious users alone cannot lock others out.
#[must_use]
pub fn may_sit(own: usize, theirs: usize, all: usize) -> bool {
    2 * own < all.saturating_sub(theirs)
}

/// What a program does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ProgramState {
    /// It said nothing yet.
    New,
    /// It said Hello.
    Greeted,
    /// Its question was answered. It may ask another, for a while and as long as there is room.
    Idle,
    /// It wants to see something, and its turn will come.
    Looking,
    /// It waits for connections to a service.
    Listening(Name),
    /// It asked to connect, and is about to be answered.
    Connecting,
}

/// A connected program.
#[derive(Debug)]
pub struct Program {
    socket: OwnedFd,
    /// Who it is, as the kernel says.
    pub user: u32,
    /// Its process, likewise; 0: not one that is seen from here.
    pub process: u32,
    /// In which network namespace it was seen last, if that is not the broker's (B-22).
    pub namespace: Option<u64>,
    /// What it does.
    pub doing: ProgramState,
    /// The serial of its question.
    pub asked: u32,
    /// The program understands Leave, so it is told when a link is taken away (B-21).
    pub hears_leave: bool,
    /// Until when it has to have said what it wants, or wants besides.
    deadline: Instant,
}

impl Drop for Program {
    fn drop(&mut self) {
        discard::end(self.socket.as_fd());
    }
}

impl Program {
    /// A program that has just connected.
    ///
    /// # Errors
    /// The kernel does not say who it is.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        let (user, process) = (fd_passing::user_of(&socket)?, fd_passing::process_of(&socket).unwrap_or_default());
        let (doing, deadline) = (ProgramState::New, Instant::now() + PATIENCE);
        Ok(Self { socket, user, process, namespace: None, doing, asked: 0, hears_leave: false, deadline })
    }

    /// Its socket.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Until when it has to say something, if it has to.
    #[must_use]
    pub fn late_at(&self) -> Option<Instant> {
        matches!(self.doing, ProgramState::New | ProgramState::Greeted | ProgramState::Idle).then_some(self.deadline)
    }

    /// Its question was answered.
    pub fn rest(&mut self) {
        (self.doing, self.deadline) = (ProgramState::Idle, Instant::now() + PATIENCE);
    }

    /// Its next message, none while there is none.
    ///
    /// # Errors
    /// It is gone, or sent what it may not.
    pub fn receive(&self) -> io::Result<Option<Result<Envelope, Fault>>> {
        receive(self.socket.as_fd())
    }

    /// Answers its question.
    ///
    /// # Errors
    /// It is gone, or does not read.
    pub fn answer(&self, message: Message) -> io::Result<()> {
        send(self.socket.as_fd(), self.asked, message, &[])
    }

    /// Whether it has closed its end: what it does is over, though the broker has not come to it yet.
    pub fn has_left(&self) -> bool {
        poll::polls_as(&self.socket, PollFlags::HUP)
    }

    /// Answers its question by why not. One that does not read it is gone, or will be sent away.
    pub fn refuse(&mut self, Refusal(code, why): Refusal) {
        self.rest();
        let _ = self.answer(Message::Refuse { code, reason: why.into() });
    }

    /// States a connection: to the program that asked for it, or to the one that listens (V-2).
    ///
    /// # Errors
    /// It is gone, or does not read.
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

/// Says on a connection's socket that the peer agreed, and gives its window (V-2).
///
/// # Errors
/// Nobody is there, or does not read.
pub fn accept(socket: &OwnedFd, (offset, len): Range, theirs: &OwnedFd) -> io::Result<()> {
    send(socket.as_fd(), 0, Message::Accept { offset, len }, &[theirs.as_fd()])
}

/// A socket for one connection: the broker's side, and the program's.
///
/// # Errors
/// No descriptors are to be had.
pub fn connection_socket() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// The next message on a socket, none while there is none. One with descriptors stays where it is: to close one may take as long as
/// its file system likes. Such a socket is for [`discard::end`].
///
/// # Errors
/// Nobody is there any more, or sent what it may not.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Result<Envelope, Fault>>> {
    let unwanted = || io::Error::other("descriptors that nobody asked for, or a message too long (B-15)");
    let mut buffer = [0; MESSAGE_MAX];
    match discard::peek_message(socket, &mut buffer) {
        Ok(Look::Bytes(_)) => {}
        Ok(Look::Descriptors) => return Err(unwanted()),
        Err(Errno::AGAIN) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    // Without room for descriptors the kernel closes them here.
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

/// Sends a message in one piece.
///
/// # Errors
/// Nobody is there, or does not read.
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
            // Soon, and by nobody else.
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
            had.push((0..).find(|own| !may_sit(*own, theirs, SEATS)).unwrap());
        }
        assert_eq!(had, [128, 64, 32, 16, 8, 4, 2, 1, 1]);
        assert!(!may_sit(0, SEATS, SEATS) && !may_sit(0, 2 * SEATS, SEATS));
    }
}
