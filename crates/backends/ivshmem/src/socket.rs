// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What comes over a broker's socket: its messages, their descriptors and what its refusals mean (B-1, B-15).

use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags},
};
use tombolo_control::{Envelope, MESSAGE_MAX, Path as Way, code};
use tombolo_domain::{Error, Result};

use crate::mailbox::malformed;

/// Most descriptors that the kernel lets anyone put into one datagram.
const SCM_MAX_FD: usize = 253;

/// The next message and what came with it; none while there is none.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> Result<Option<(Envelope, Vec<OwnedFd>)>> {
    let mut buffer = [0; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags) {
            Ok(received) => break received,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::CONNRESET | Errno::NOTCONN) => return Err(Error::PeerGone),
            Err(error) => return Err(Error::os("recvmsg", error)),
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Error::os("recvmsg", Errno::MFILE));
    }
    match (received.bytes, received.flags.contains(ReturnFlags::TRUNC)) {
        (0, _) => Err(Error::PeerGone),
        (_, true) => Err(malformed("B-1", "message is too long")),
        (len, false) => {
            let said =
                Envelope::decode(Way::Socket, &buffer[..len]).map_err(|fault| malformed(fault.clause, fault.what))?;
            Ok(Some((said, descriptors)))
        }
    }
}

/// Whether `fd` polls as hung up.
pub(crate) fn hung_up(fd: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(1)) && polled[0].revents().contains(PollFlags::HUP)
}

/// B-15. What a refusal means.
pub(crate) fn refused(code: u16, reason: &str, address: &str) -> Error {
    match code {
        // That nobody listens the error says itself; any other cause is the broker's to name.
        code::NOT_FOUND if reason.starts_with("nobody") => Error::NotFound(address.into()),
        code::NOT_FOUND => Error::NotFound(format!("{address}, as {}", reason.escape_debug())),
        code::EXISTS => Error::InUse(address.into()),
        code::DENIED => Error::Denied(format!("{address}: {}", reason.escape_debug())),
        code::QUOTA => Error::Quota(format!("{address} is not to be had: {}", reason.escape_debug())),
        _ => Error::Os {
            call: "the broker",
            path: Some(address.into()),
            source: io::Error::other(reason.escape_debug().to_string()),
        },
    }
}
