// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Identifies the process at the other end of a UNIX socket, as the kernel reports it.

use std::{io, os::fd::AsFd, sync::OnceLock};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// Identity of the process that connected, or that listened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Credentials {
    /// Number of the process, if it is visible from here.
    pub pid: Option<u32>,
    /// Number of its user, if that has one here.
    pub uid: Option<u32>,
}

/// Asks the kernel which process is at the other end of `socket`.
///
/// # Errors
/// `socket` is no connected UNIX socket.
pub fn peer_of(socket: impl AsFd) -> io::Result<Credentials> {
    // Not rustix, whose pid cannot be 0: the kernel reports 0 for a process that is not visible from here.
    let credentials = getsockopt(&socket.as_fd(), PeerCredentials)?;
    let pid = u32::try_from(credentials.pid()).ok().filter(|pid| *pid != 0);
    let uid = Some(credentials.uid()).filter(|uid| *uid != stand_in() || are_all_named());
    Ok(Credentials { pid, uid })
}

/// Returns the number by which the kernel names every user that has none in this user namespace. Two processes of that
/// number may be of two users, and neither of these be that of this process.
fn stand_in() -> u32 {
    static FOUND: OnceLock<u32> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let number = std::fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap_or_default();
        number.trim().parse().unwrap_or(65534)
    })
}

/// Returns whether each user has a number here. A process may come into another namespace at any time.
fn are_all_named() -> bool {
    names_all(&std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default())
}

/// Returns whether a map of users has a number for each of them. Its lines hold the first numbers inside and outside,
/// and how many there are.
fn names_all(map: &str) -> bool {
    let counts = map.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok());
    counts.sum::<u64>() >= u64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn peer_of_an_own_pair_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(peer_of(&a).unwrap().pid, Some(std::process::id()));
        assert!(peer_of(&a).unwrap().uid.is_none_or(|it| it == uid));
        assert!(peer_of(std::fs::File::open("/dev/null").unwrap()).is_err(), "canary: no socket");
    }

    #[test]
    fn map_without_a_number_for_everybody_leaves_some_without_one() {
        for (map, all) in [
            ("         0          0 4294967295\n", true),
            ("0 0 4294967294\n4294967294 4294967294 1\n", true),
            ("         0       1000          1\n", false),
            ("0 100000 65536\n", false),
            ("0 0 99999999999999999999\n", false),
            ("", false),
        ] {
            assert_eq!(names_all(map), all, "{map}");
        }
    }
}
