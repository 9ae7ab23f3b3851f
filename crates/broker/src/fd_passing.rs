// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bytes with descriptors, over UNIX sockets. Nothing here blocks unless the socket does.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    },
};
use tombolo_control::NOBODY;
use tombolo_os::credentials;

/// Most descriptors in one message of ours.
pub const DESCRIPTORS_MAX: usize = 64;
/// Most that the kernel lets anyone put into one.
const SCM_MAX_FD: usize = 253;

/// Sends `bytes` with `descriptors` in one piece; false if there is no room now.
///
/// # Errors
/// The other side is gone, or the system refuses.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<bool> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other(format!("{} descriptors in one message", descriptors.len())));
    }
    loop {
        return match rustix::net::sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) if sent == bytes.len() => Ok(true),
            Ok(sent) => Err(io::Error::other(format!("{sent} of {} bytes sent", bytes.len()))),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(false),
            Err(error) => Err(error.into()),
        };
    }
}

/// Receives into `buffer`: how many bytes, and the descriptors that came along. Of a message that is longer than the
/// buffer the length is `buffer.len() + 1`.
///
/// # Errors
/// The system refuses, `WouldBlock` included.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let room = buffer.len();
    let received = loop {
        let mut parts = [IoSliceMut::new(buffer)];
        match rustix::net::recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE.into());
    }
    let len = if received.flags.contains(ReturnFlags::TRUNC) { room + 1 } else { received.bytes };
    Ok((len, descriptors))
}

/// Who connected, as the kernel says; [`NOBODY`] if it is a user who has no number here.
///
/// # Errors
/// What the kernel says instead.
pub fn user_of(socket: impl AsFd) -> io::Result<u32> {
    Ok(credentials::peer_of(socket)?.uid.unwrap_or(NOBODY))
}

/// The process that connected, if this kernel knows it by a number here.
#[must_use]
pub fn process_of(socket: impl AsFd) -> Option<u32> {
    credentials::peer_of(socket).ok()?.pid
}

/// A listening socket in the file system, in place of whatever was there, with this mode from its first moment.
///
/// # Errors
/// What the system says.
pub fn listen(path: &Path, kind: SocketType, mode: u32, owner: Option<u32>, group: Option<u32>) -> io::Result<OwnedFd> {
    use std::os::unix::fs::PermissionsExt;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    // What is bound has the socket's own mode, less the umask: nobody gets in between.
    rustix::fs::fchmod(&socket, rustix::fs::Mode::from_raw_mode(0o600))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    if owner.is_some() || group.is_some() {
        std::os::unix::fs::chown(path, owner, group)?;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// Connects to a socket in the file system.
///
/// # Errors
/// What the system says.
pub fn connect(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
