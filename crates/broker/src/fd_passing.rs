// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Passes bytes with descriptors over UNIX sockets. Nothing here blocks unless the socket does.

use std::{
    io::{self, IoSlice},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType},
};
use tombolo_control::NOBODY;
use tombolo_os::{
    credentials,
    passing::{self, SCM_MAX_FD},
};

/// Largest number of descriptors in one message that this process sends.
pub const DESCRIPTORS_MAX: usize = 64;

/// Sends `bytes` with `descriptors` in one piece. Returns false if there is no room now.
///
/// # Errors
/// The other side is gone, or the system refuses.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<bool> {
    if descriptors.len() > DESCRIPTORS_MAX {
        return Err(io::Error::other(format!("{} descriptors in one message", descriptors.len())));
    }
    match passing::send(socket, &[IoSlice::new(bytes)], descriptors, SendFlags::empty()) {
        Ok(sent) if sent == bytes.len() => Ok(true),
        Ok(sent) => Err(io::Error::other(format!("{sent} of {} bytes sent", bytes.len()))),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

/// Receives into `buffer`. Returns the number of bytes, and the descriptors that came along. For a message that is
/// longer than the buffer the number is `buffer.len() + 1`.
///
/// # Errors
/// Errors of the system, including `WouldBlock`.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let received = passing::receive(socket, buffer, SCM_MAX_FD, RecvFlags::empty())?;
    if received.more_came {
        return Err(Errno::MFILE.into());
    }
    let len = if received.is_longer { buffer.len() + 1 } else { received.len };
    Ok((len, received.descriptors))
}

/// Returns the user who connected, as the kernel reports it; [`NOBODY`] if the user has no number in this namespace.
///
/// # Errors
/// Errors of the kernel.
pub fn user_of(socket: impl AsFd) -> io::Result<u32> {
    Ok(credentials::peer_of(socket)?.uid.unwrap_or(NOBODY))
}

/// Returns the process that connected, if it has a number in this PID namespace.
#[must_use]
pub fn process_of(socket: impl AsFd) -> Option<u32> {
    credentials::peer_of(socket).ok()?.pid
}

/// Makes a listening socket in the file system in place of whatever was there, with this mode from its first moment.
///
/// # Errors
/// Errors of the system.
pub fn listen(path: &Path, kind: SocketType, mode: u32, owner: Option<u32>, group: Option<u32>) -> io::Result<OwnedFd> {
    use std::os::unix::fs::PermissionsExt;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    // The file gets the socket's own mode, less the umask, so nobody can connect before the final mode is set.
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
/// Errors of the system.
pub fn connect(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
