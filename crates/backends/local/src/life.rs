// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads the peer's identity and liveness from the kernel (L-8 to L-10).

use std::{io, os::fd::BorrowedFd};

use rustix::time::ClockId;
use tombolo_domain::{Liveness, Peer};
use tombolo_os::{
    credentials::{self, Credentials},
    poll::is_hung_up,
    process::{Stat, is_frozen},
};

use crate::discard::{Kind, Source};

/// Identity of the process that connected, or that listened.
#[derive(Debug)]
pub(crate) struct Identity {
    pid: Option<u32>,
    uid: Option<u32>,
    /// Time at which this was recorded, in clock ticks since boot. A process with the same number that began later is
    /// another one.
    noted: u64,
}

impl Identity {
    /// Asks the kernel for the process at the other endpoint of `socket`.
    pub(crate) fn of_peer(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let Credentials { pid, uid } = credentials::peer_of(socket)?;
        let now = rustix::time::clock_gettime(ClockId::Boottime);
        let per_second = rustix::param::clock_ticks_per_second();
        let noted = now.tv_sec as u64 * per_second + now.tv_nsec as u64 * per_second / 1_000_000_000;
        Ok(Self { pid, uid, noted })
    }

    /// Returns the source that descriptors of this peer are charged to until they are closed (L-5).
    pub(crate) fn source(&self, kind: Kind) -> Source {
        // Processes without a number in this namespace share one allowance.
        Source { pid: self.pid, uid: self.uid.unwrap_or(u32::MAX), kind }
    }

    pub(crate) fn peer(&self) -> Peer {
        Peer { domain: crate::SCHEME.into(), pid: self.pid, uid: self.uid }
    }

    /// Determines the peer's liveness (L-8, L-10). The peer is gone only if its socket was hung up, because the
    /// endpoint may live on in another process than the one that connected. Otherwise `/proc` tells a stopped process
    /// from a running one, if the process is visible from here.
    pub(crate) fn liveness(&self, socket: BorrowedFd<'_>) -> Liveness {
        if is_hung_up(socket) {
            return Liveness::ProcessGone;
        }
        let Some(pid) = self.pid else { return Liveness::Unknown };
        let Some(stat) = Stat::of(pid) else { return Liveness::Unknown };
        match stat.state {
            _ if stat.began > self.noted => Liveness::Unknown,
            'T' | 't' => Liveness::Paused,
            'Z' | 'X' => Liveness::Unknown,
            _ if is_frozen(pid) => Liveness::Paused,
            _ => Liveness::Running,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l10_own_process_is_running_and_began_in_the_past() {
        let stat = Stat::of(std::process::id()).unwrap();
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        let identity = Identity::of_peer(std::os::fd::AsFd::as_fd(&a)).unwrap();
        assert!(stat.began <= identity.noted);
        assert_eq!(identity.pid, Some(std::process::id()));
        assert_eq!(identity.liveness(std::os::fd::AsFd::as_fd(&a)), Liveness::Running);
        let later = Identity { noted: stat.began - 1, ..identity };
        assert_eq!(later.liveness(std::os::fd::AsFd::as_fd(&a)), Liveness::Unknown, "a reused pid is not the peer");
    }
}
