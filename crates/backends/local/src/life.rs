// SPDX-License-Identifier: Apache-2.0 OR MIT
//! L-8 to L-10. Who the peer is and how it fares, as told by the kernel.

use std::{fs, io, os::fd::BorrowedFd, path::Path};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    time::ClockId,
};
use tombolo_domain::{Liveness, Peer};

use crate::discard::{Kind, Source};

/// Where cgroup version 2 is mounted, alone or beside version 1.
const CGROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// The process that connected, or that listened.
#[derive(Debug)]
pub(crate) struct Identity {
    pid: Option<u32>,
    uid: u32,
    /// When this was noted, in clock ticks since boot: a process that began later is another one with its number.
    noted: u64,
}

impl Identity {
    /// Asks the kernel who is at the other end of `socket`.
    pub(crate) fn of_peer(socket: BorrowedFd<'_>) -> io::Result<Self> {
        // Not rustix, whose pid cannot be 0: the kernel says 0 of a process that is not visible from here.
        let credentials = getsockopt(&socket, PeerCredentials)?;
        let pid = u32::try_from(credentials.pid()).ok().filter(|pid| *pid != 0);
        let now = rustix::time::clock_gettime(ClockId::Boottime);
        let per_second = rustix::param::clock_ticks_per_second();
        let noted = now.tv_sec as u64 * per_second + now.tv_nsec as u64 * per_second / 1_000_000_000;
        Ok(Self { pid, uid: credentials.uid(), noted })
    }

    /// Who is counted for what has to be closed of the peer's (L-5).
    pub(crate) fn source(&self, kind: Kind) -> Source {
        Source { pid: self.pid, uid: self.uid, kind }
    }

    pub(crate) fn peer(&self) -> Peer {
        Peer { domain: crate::SCHEME.into(), pid: self.pid, uid: Some(self.uid) }
    }

    /// L-8, L-10. A socket that was hung up on means gone; nothing else does, because the end may live on in another
    /// process than the one that connected. Beyond that /proc tells a stopped process from a running one, if it is
    /// visible from here.
    pub(crate) fn liveness(&self, socket: BorrowedFd<'_>) -> Liveness {
        if hung_up(socket) {
            return Liveness::ProcessGone;
        }
        let Some(pid) = self.pid else { return Liveness::Unknown };
        let Some(stat) = fs::read_to_string(format!("/proc/{pid}/stat")).ok().and_then(|line| Stat::parse(&line))
        else {
            return Liveness::Unknown;
        };
        match stat.state {
            _ if stat.began > self.noted => Liveness::Unknown,
            'T' | 't' => Liveness::Paused,
            'Z' | 'X' => Liveness::Unknown,
            _ if frozen(pid) => Liveness::Paused,
            _ => Liveness::Running,
        }
    }
}

/// Whether all holders of the other end have closed it.
pub(crate) fn hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(1))
        && polled[0].revents().intersects(PollFlags::HUP | PollFlags::RDHUP)
}

/// What is used of `/proc/PID/stat`.
#[derive(PartialEq, Eq, Debug)]
struct Stat {
    state: char,
    /// Clock ticks since boot.
    began: u64,
}

impl Stat {
    fn parse(line: &str) -> Option<Self> {
        // The second field is the program's name in parentheses, and may itself hold any of ") R".
        let (_, fields) = line.rsplit_once(") ")?;
        let mut fields = fields.split(' ');
        Some(Self { state: fields.next()?.chars().next()?, began: fields.nth(18)?.parse().ok()? })
    }
}

/// Whether the process is in a frozen cgroup (a paused container), as far as the hierarchy is visible from here.
fn frozen(pid: u32) -> bool {
    let Ok(cgroups) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else { return false };
    let Some(path) = cgroups.lines().find_map(|line| line.strip_prefix("0::/")) else { return false };
    CGROUPS.iter().any(|root| {
        fs::read_to_string(Path::new(root).join(path).join("cgroup.events"))
            .is_ok_and(|events| events.lines().any(|line| line == "frozen 1"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l10_stat_line_of_a_program_with_a_spiteful_name_is_understood() {
        let line = "42 (a) R 1 (b) T) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 12345 1 1";
        assert_eq!(Stat::parse(line), Some(Stat { state: 'S', began: 12345 }));
        assert_eq!(Stat::parse("42 (a) S 1"), None);
        assert_eq!(Stat::parse(""), None);
    }

    #[test]
    fn l10_own_process_is_running_and_began_in_the_past() {
        let stat = Stat::parse(&fs::read_to_string("/proc/self/stat").unwrap()).unwrap();
        assert!(matches!(stat.state, 'R' | 'S' | 'D'), "{stat:?}");
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        let identity = Identity::of_peer(std::os::fd::AsFd::as_fd(&a)).unwrap();
        assert!(stat.began <= identity.noted);
        assert_eq!(identity.pid, Some(std::process::id()));
        assert_eq!(identity.liveness(std::os::fd::AsFd::as_fd(&a)), Liveness::Running);
        let later = Identity { noted: stat.began - 1, ..identity };
        assert_eq!(later.liveness(std::os::fd::AsFd::as_fd(&a)), Liveness::Unknown, "a reused pid is not the peer");
    }
}
