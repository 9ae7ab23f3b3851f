// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S-16. A pipe that stays full. A ring holds less than the buffers of TCP do, and programs that send much before they read count
//! on those: what such a program sends goes over TCP until its peer has read what is in the pipe.

use std::{
    os::fd::RawFd,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use tombolo_ring::Side;

use super::{Pipes, Read};
use crate::{connection::Connection, kernel::Kernel, switch::Transport};

/// How long a peer may leave a pipe full while this end reads what the peer sends, or there is nothing to read.
const ONE_WAY: Duration = Duration::from_millis(500);
/// The same while this end leaves unread what the peer sends: each may wait for the other.
const BOTH_WAYS: Duration = Duration::from_millis(100);
/// Halvings of that, one each time that it came true.
const HALVINGS: u32 = 5;
/// Looks that must find the same, so that a machine that stood still between two of them is no reason.
const LOOKS: u32 = 3;

/// A pipe that was found full, and what has to change.
#[derive(Debug)]
pub(super) struct FullPipe {
    since: Instant,
    looks: u32,
    /// How far the peer has read, and this end.
    head: u64,
    read_to: u64,
}

impl Pipes {
    /// One who waits for room looks now and then: where nobody reads for long, what this end sends moves to TCP. Says whether it
    /// did. S-16
    pub fn leave_if_full(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        // Follows the peer's move, without which the peer could not move either.
        let _ = self.recv(connection, kernel, fd, &mut [], Read::Look);
        let read_to = self.read_to.load(Ordering::Relaxed);
        let both_ways = self.arrived() != read_to;
        let left = self.turn(connection, &self.tx, |tx| {
            let is_full = !tx.ended && tx.sender.carrier() == Transport::Pipe && !tx.writer.ready(1).unwrap_or(true);
            if !is_full {
                tx.full = None;
                return false;
            }
            let head = tx.writer.position().wrapping_sub(tx.writer.in_flight());
            let now = Instant::now();
            let full = match &mut tx.full {
                Some(full) if (full.head, full.read_to) == (head, read_to) => full,
                _ => {
                    tx.full = Some(FullPipe { since: now, looks: 1, head, read_to });
                    return false;
                }
            };
            full.looks += 1;
            let patience = if both_ways { BOTH_WAYS / 2_u32.pow(tx.left.min(HALVINGS)) } else { ONE_WAY };
            if full.looks < LOOKS || now.duration_since(full.since) < patience {
                return false;
            }
            let left = self.steer(tx, connection, kernel, fd, Transport::Tcp).is_ok_and(|now| now == Transport::Tcp);
            if left {
                tx.full = None;
                tx.left += u32::from(both_ways);
            }
            left
        });
        left.unwrap_or(false)
    }
}
