// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds TCP connections of programs under `tombolo run` in the connection tables of their processes (S-11).

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::AsFd,
};

use serde::Serialize;
use tombolo_layout::{
    connection_table::{self, HIDDEN, LEN, MAGIC, ROWS, Row, Stage, WORDS},
    sockets::Address,
};
use tombolo_mem::{PeerSegment, PeerWord};
use tombolo_sockets::Reason;

use crate::{
    error::Result,
    process::Scan,
    segment::{Opener, identity},
};

/// One side of a TCP connection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Socket {
    /// Process that has the connection.
    pub pid: u32,
    /// Name of that process, safe for a terminal.
    pub command: String,
    /// Name of its user.
    pub user: Option<String>,
    /// Address on this side.
    pub own: SocketAddr,
    /// Address on the other side.
    pub peer: SocketAddr,
    /// Transport that carries it.
    pub state: Transport,
    /// Reason for which it is on TCP, or returns to TCP.
    pub reason: Option<&'static str>,
    /// Bytes sent.
    pub sent: Bytes,
    /// Bytes received.
    pub received: Bytes,
}

/// Transport of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// TCP, while the other side is being searched.
    Candidate,
    /// Shared memory.
    Shared,
    /// Shared memory that is being left for TCP.
    Leaving,
    /// TCP permanently.
    Tcp,
}

/// Bytes of one direction by transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Bytes {
    /// By TCP.
    pub tcp: u64,
    /// By shared memory.
    pub shared: u64,
}

/// Returns all listed connections, and the number of those for which the tables had no room.
pub fn find(scan: &Scan) -> Result<(Vec<Socket>, u64)> {
    let opener = Opener::new()?;
    let mut seen = HashSet::new();
    let (mut all, mut hidden) = (Vec::new(), 0_u64);
    for process in &scan.listing {
        // The process ended meanwhile, or the memory only has the name of a table.
        let Ok(fd) = opener.open(&format!("/proc/{}/fd/{}", process.pid, process.fd)) else { continue };
        if tombolo_mem::check_sealed(fd.as_fd(), LEN as u64) != Ok(LEN)
            || !identity(&fd).is_ok_and(|id| seen.insert(id))
        {
            continue;
        }
        let Ok(list) = PeerSegment::map(fd.as_fd(), LEN) else { continue };
        let word = |at| list.word(at).load_acquire().hint();
        if word(0) != MAGIC {
            continue;
        }
        hidden = hidden.saturating_add(word(HIDDEN));
        all.extend((0..ROWS).filter_map(|at| {
            let row = row(|place| word(connection_table::place(at, place)))?;
            let [own, peer] = row.addresses.map(socket_address);
            let [sent, received] = [0, 2].map(|at| Bytes { tcp: row.counts[at], shared: row.counts[at + 1] });
            let (command, user) = (process.command.clone(), process.user.clone());
            let reason = row.reason.map(|reason| Reason::from_number(reason).words());
            Some(Socket { pid: process.pid, command, user, own, peer, state: state(&row), reason, sent, received })
        }));
    }
    all.sort_by_key(|socket| (socket.pid, socket.own, socket.peer));
    Ok((all, hidden))
}

/// Returns a row, unless it was reused for another connection while it was read.
fn row(word: impl Fn(usize) -> u64) -> Option<Row> {
    let serial = word(0);
    let row = Row::decode(std::array::from_fn::<_, { WORDS - 1 }, _>(|at| word(at + 1)))?;
    (serial != 0 && word(0) == serial).then_some(row)
}

fn state(row: &Row) -> Transport {
    match (row.stage, row.reason) {
        (Stage::Candidate, _) => Transport::Candidate,
        (Stage::Joined, None) => Transport::Shared,
        (Stage::Joined, Some(_)) => Transport::Leaving,
        (Stage::Plain, _) => Transport::Tcp,
    }
}

fn socket_address(address: Address) -> SocketAddr {
    SocketAddr::new(IpAddr::V6(Ipv6Addr::from(address.host)).to_canonical(), address.port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s11_row_that_became_another_one_is_not_shown() {
        let words = [7, 80 << 16 | 4000, 0, 0, 0, 0, 0, 1, 2, 3, 4];
        assert_eq!(row(|at| words[at]).unwrap().counts, [1, 2, 3, 4]);
        let asked = std::cell::Cell::new(0);
        let changes = |at: usize| {
            asked.set(asked.get() + 1);
            words[at] + u64::from(at == 0 && asked.get() > 1)
        };
        assert_eq!(row(changes), None);
        assert_eq!(row(|at| if at == 0 { 0 } else { words[at] }), None, "no connection");
    }
}
