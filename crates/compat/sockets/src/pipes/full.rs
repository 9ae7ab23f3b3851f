// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A pipe that stays full. A ring holds less than the buffers of TCP do, and programs that send much before they read count
//! on those: what such a program sends goes over TCP until its peer has read what is in the pipe (S-16).

use std::{os::fd::RawFd, sync::atomic::Ordering, time::Instant};

use tombolo_os::clock::coarse_time;

use super::{Pipes, Read, full_pipe::FullPipe};
use crate::{connection::Connection, kernel::Kernel, switch::Transport};

impl Pipes {
    /// One who waits for room looks now and then: where nobody reads for long, what this end sends moves to TCP. Says whether it
    /// did. S-16
    pub fn leave_if_full(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        // Who tries again and again looks once a tick.
        let tick = coarse_time().as_millis() as u64;
        if self.full_looked_at.swap(tick, Ordering::Relaxed) == tick {
            return false;
        }
        // Follows the peer's move, without which the peer could not move either.
        let _ = self.recv(connection, kernel, fd, &mut [], Read::Look);
        let read_to = self.read_to.load(Ordering::Relaxed);
        let both_ways = self.arrived() != read_to;
        let left = self.turn(connection, &self.tx, |tx| {
            let is_full = !tx.ended && tx.sender.carrier() == Transport::Pipe && !tx.has_room(connection, 1);
            if !is_full {
                tx.full = None;
                return false;
            }
            let head = tx.writer.position().wrapping_sub(tx.writer.in_flight());
            let now = Instant::now();
            match &mut tx.full {
                Some(full) if full.is_as_it_was(head, read_to) => {
                    if !full.look_again(now, both_ways.then_some(tx.left)) {
                        return false;
                    }
                }
                _ => {
                    tx.full = Some(FullPipe::new(now, head, read_to));
                    return false;
                }
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
