// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sends and receives bytes with descriptors, over UNIX sockets.
//!
//! Any sender can send descriptors as well, up to [`SCM_MAX_FD`] with each message. So each message is received here
//! with room for as many as its receiver asks for. All of them are owned at once, and it is reported and not ignored
//! that more came.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
};

use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags,
    },
};

/// Largest number of descriptors that the kernel allows in one message.
pub const SCM_MAX_FD: usize = 253;

/// Size in bytes of the head of a control message; below, of one descriptor in it.
const RIGHTS_HEAD: usize = rustix::cmsg_aligned_space!(ScmRights(0));
const RIGHT: usize = size_of::<RawFd>();

/// Room for control messages, aligned as the kernel requires.
#[repr(C, align(8))]
struct Space([MaybeUninit<u8>; rustix::cmsg_space!(ScmRights(SCM_MAX_FD))]);

/// A message that was received.
#[derive(Debug)]
pub struct Received {
    /// Number of bytes of the message, as far as there was room.
    pub len: usize,
    /// Whether the message was longer than the room for it.
    pub is_longer: bool,
    /// Whether more descriptors came with it than there was room for, or than this process may open.
    pub more_came: bool,
    /// Descriptors that came with it.
    pub descriptors: Vec<OwnedFd>,
}

/// Sends what `parts` hold as one message, with `descriptors`. Never raises a signal.
///
/// # Blocking
/// Until there is room, unless `flags` or the socket's mode prevent it.
///
/// # Errors
/// There are more than [`SCM_MAX_FD`] descriptors, or `sendmsg` fails. An interrupted call is repeated.
pub fn send(
    socket: impl AsFd,
    parts: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<usize> {
    let mut space = Space([MaybeUninit::uninit(); _]);
    let mut control = SendAncillaryBuffer::new(&mut space.0);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other(format!("{} descriptors in one message", descriptors.len())));
    }
    loop {
        match rustix::net::sendmsg(&socket, parts, &mut control, flags | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent?),
        }
    }
}

/// Receives a message into `buffer`, with room for so many descriptors and not one more. They are closed when this
/// process executes another program.
///
/// # Blocking
/// Until a message comes, unless `flags` or the socket's mode prevent it.
///
/// # Errors
/// `recvmsg` fails. An interrupted call is repeated.
///
/// # Panics
/// If `room` is more than [`SCM_MAX_FD`].
pub fn receive(socket: impl AsFd, buffer: &mut [u8], room: usize, flags: RecvFlags) -> io::Result<Received> {
    let mut space = Space([MaybeUninit::uninit(); _]);
    // The kernel fills whatever space it is given, so there is neither padding behind the last descriptor nor bytes to
    // align it.
    let space = if room > 0 { &mut space.0[..RIGHTS_HEAD + room * RIGHT] } else { &mut [] };
    let mut control = RecvAncillaryBuffer::new(space);
    let received = loop {
        let mut parts = [IoSliceMut::new(buffer)];
        match rustix::net::recvmsg(&socket, &mut parts, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let came = |flag| received.flags.contains(flag);
    Ok(Received {
        len: received.bytes,
        is_longer: came(ReturnFlags::TRUNC),
        more_came: came(ReturnFlags::CTRUNC),
        descriptors,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn room_is_for_so_many_descriptors_and_no_other() {
        let file = File::open("/dev/null").unwrap();
        for (came, room) in [(1, 1), (2, 3), (3, 3), (4, 3), (5, 3), (253, 4), (1, 0), (253, 253), (0, 0)] {
            let (ours, theirs) = pair();
            send(&theirs, &[IoSlice::new(b"x")], &vec![file.as_fd(); came], SendFlags::empty()).unwrap();
            let received = receive(&ours, &mut [0; 8], room, RecvFlags::empty()).unwrap();
            assert_eq!((received.len, received.is_longer), (1, false));
            assert_eq!((received.descriptors.len(), received.more_came), (came.min(room), came > room), "{came}");
            let closes = |fd: &OwnedFd| rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC);
            assert!(received.descriptors.iter().all(closes));
        }
    }

    #[test]
    fn message_that_is_too_long_is_said_to_be() {
        let (ours, theirs) = pair();
        send(&theirs, &[IoSlice::new(b"ab"), IoSlice::new(b"cd")], &[], SendFlags::empty()).unwrap();
        let mut buffer = [0; 3];
        let received = receive(&ours, &mut buffer, 0, RecvFlags::empty()).unwrap();
        assert_eq!((&buffer, received.len, received.is_longer), (b"abc", 3, true));
        let nothing = receive(&ours, &mut buffer, 0, RecvFlags::DONTWAIT).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn peer_that_is_gone_is_an_error_and_no_signal() {
        let (ours, theirs) = pair();
        // Shut down rather than closed: a process forked by another test may hold it for a moment.
        rustix::net::shutdown(&theirs, rustix::net::Shutdown::Both).unwrap();
        let gone = send(&ours, &[IoSlice::new(b"x")], &[], SendFlags::empty()).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
        assert!(send(&ours, &[], &vec![ours.as_fd(); SCM_MAX_FD + 1], SendFlags::empty()).is_err());
    }
}
