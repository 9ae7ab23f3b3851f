// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who is at the other end of a UNIX socket, as the kernel says.

use std::{io, os::fd::AsFd};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// The process that connected, or that listened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Credentials {
    /// Its number, if it is visible from here.
    pub pid: Option<u32>,
    /// Its user.
    pub uid: u32,
}

/// Asks the kernel who is at the other end of `socket`.
///
/// # Errors
/// `socket` is no connected UNIX socket.
pub fn peer_of(socket: impl AsFd) -> io::Result<Credentials> {
    // Not rustix, whose pid cannot be 0: the kernel says 0 of a process that is not visible from here.
    let credentials = getsockopt(&socket.as_fd(), PeerCredentials)?;
    let pid = u32::try_from(credentials.pid()).ok().filter(|pid| *pid != 0);
    Ok(Credentials { pid, uid: credentials.uid() })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn peer_of_an_own_pair_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(peer_of(&a).unwrap(), Credentials { pid: Some(std::process::id()), uid });
        assert!(peer_of(std::fs::File::open("/dev/null").unwrap()).is_err(), "canary: no socket");
    }
}
