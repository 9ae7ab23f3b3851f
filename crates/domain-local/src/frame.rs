// SPDX-License-Identifier: Apache-2.0 OR MIT
//! L-4, L-5. One datagram: a head, a message, descriptors.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags,
    },
};
use tombolo_domain::{Error, Result};
use tombolo_layout::{
    limits::CONTROL_MESSAGE_MAX,
    local::{DATAGRAM_MAX, DESCRIPTORS_MAX, Head},
};

/// Most descriptors that the kernel lets anyone put into one datagram (`SCM_MAX_FD`). There is room for all of them: that
/// the kernel cuts the list short then means one thing only, that this process may open no more files.
const SCM_MAX_FD: usize = 253;

/// What came in, its head not yet believed.
#[derive(Debug)]
pub(crate) struct Datagram {
    buffer: [u8; DATAGRAM_MAX],
    len: usize,
    /// All descriptors that came with it.
    pub descriptors: Vec<OwnedFd>,
}

impl Datagram {
    /// Its head and its message.
    pub(crate) fn parts(&self) -> Result<(Head, &[u8])> {
        let (head, message) = Head::decode(&self.buffer[..self.len]).map_err(|what| malformed("L-4", what))?;
        let (said, came) = (head.descriptors(), self.descriptors.len());
        if said != came {
            return Err(malformed("L-5", format!("datagram says {said} descriptors and carries {came}")));
        }
        Ok((head, message))
    }
}

/// What breaks `clause`.
pub(crate) fn malformed(clause: &'static str, what: impl Into<String>) -> Error {
    Error::Malformed { clause, what: what.into() }
}

/// Sends `message` with `descriptors`. Never blocks.
pub(crate) fn send(socket: BorrowedFd<'_>, head: Head, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    debug_assert!(head.descriptors() == descriptors.len() && usize::from(head.len) == message.len());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
        debug_assert!(fits, "there is room for all that a datagram may carry");
    }
    let head = head.encode();
    let parts = [IoSlice::new(&head), IoSlice::new(message)];
    loop {
        return match rustix::net::sendmsg(socket, &parts, &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(_) => Ok(()),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Err(Error::Limit {
                what: "the queue of control messages",
                remedy: "the peer does not read them: close the link or wait for it",
            }),
            Err(Errno::TOOMANYREFS) => Err(Error::Limit {
                what: "this user's number of descriptors in flight",
                remedy: "peers do not fetch what they were sent; raise the limit with `ulimit -n`",
            }),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Err(Error::PeerGone),
            Err(error) => Err(Error::os("sendmsg", error)),
        };
    }
}

/// Whether no datagram has come.
pub(crate) fn is_empty(socket: BorrowedFd<'_>) -> bool {
    rustix::net::recv(socket, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK) == Err(Errno::AGAIN)
}

/// Takes the next datagram, or `None` while there is none. Never blocks.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> Result<Option<Datagram>> {
    let mut buffer = [0; DATAGRAM_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut resets = 0;
    let received = loop {
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags) {
            Ok(received) => break received,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            // The peer closed with messages of ours unread. The kernel says so once; its own last messages come behind.
            Err(Errno::CONNRESET) if resets == 0 => resets = 1,
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
    let refusal = if received.flags.contains(ReturnFlags::TRUNC) {
        malformed("L-4", format!("datagram of more than {CONTROL_MESSAGE_MAX} bytes"))
    } else if received.flags.contains(ReturnFlags::CTRUNC) && descriptors.len() <= DESCRIPTORS_MAX {
        Error::os("recvmsg", Errno::MFILE)
    } else if descriptors.len() > DESCRIPTORS_MAX {
        malformed("L-5", format!("datagram with {} descriptors", descriptors.len()))
    } else if received.bytes == 0 {
        Error::PeerGone
    } else {
        return Ok(Some(Datagram { buffer, len: received.bytes, descriptors }));
    };
    discard(descriptors);
    Err(refusal)
}

/// L-5. Closes descriptors that nobody asked for. Closing may wait for the file's own file system (FUSE, a dead NFS
/// server) or for a lingering socket, whichever a hostile peer chose, so it is left to a thread that nobody waits for.
pub(crate) fn discard(descriptors: Vec<OwnedFd>) {
    if !descriptors.is_empty() {
        // Where no thread can be had the closure is dropped, and the descriptors with it.
        let _ = std::thread::Builder::new().name("tombolo-discard".into()).spawn(move || drop(descriptors));
    }
}
