// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Receives from a broker's socket: messages, their descriptors and the errors that refusals mean (B-1, B-15).

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use rustix::{io::Errno, net::RecvFlags};
use tombolo_control::{Envelope, MESSAGE_MAX, Path as Way, code};
use tombolo_domain::{Error, Result};
use tombolo_os::{
    passing::{self, SCM_MAX_FD},
    reserved::lifted,
};

use crate::mailbox::malformed;

/// Receives the next message and its descriptors, or none if no message is waiting.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> Result<Option<(Envelope, Vec<OwnedFd>)>> {
    let mut buffer = [0; MESSAGE_MAX];
    let received = match lifted(|| passing::receive(socket, &mut buffer, SCM_MAX_FD, RecvFlags::DONTWAIT)) {
        Ok(received) => received,
        Err(error) => {
            return match Errno::from_io_error(&error) {
                Some(Errno::AGAIN) => Ok(None),
                Some(Errno::CONNRESET | Errno::NOTCONN) => Err(Error::PeerGone),
                _ => Err(Error::os("recvmsg", error)),
            };
        }
    };
    if received.more_came {
        return Err(Error::os("recvmsg", Errno::MFILE));
    }
    match (received.len, received.is_longer) {
        (0, _) => Err(Error::PeerGone),
        (_, true) => Err(malformed("B-1", "message is too long")),
        (len, false) => {
            let said =
                Envelope::decode(Way::Socket, &buffer[..len]).map_err(|fault| malformed(fault.clause, fault.what))?;
            Ok(Some((said, received.descriptors)))
        }
    }
}

/// Returns the error that a refusal means (B-15).
pub(crate) fn refused(code: u16, reason: &str, address: &str) -> Error {
    match code {
        // The error itself states that nobody listens; any other cause is in the broker's text.
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
