// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Splices bytes from a program's pipe into a connection. Bytes taken from a pipe cannot be put back.

use std::{io::IoSlice, os::fd::RawFd};

use rustix::io::Errno;
use tombolo_ring::{Error, Side};

use super::{Failed, Pipes, Source};
use crate::{connection::Connection, direction::Direction, kernel::Kernel, switch::Transport};

/// Number of bytes moved from a pipe into a ring at once: the capacity of a pipe.
const SPLICED: u64 = 64 << 10;

impl Pipes {
    /// Sends up to `most` bytes from the program's pipe, and no more than the ring has room for, because bytes taken
    /// from a pipe cannot be put back. Returns the bytes sent, the transport, and whether the ring had no room for
    /// more.
    pub fn send_from(
        &self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        source: &mut dyn Source,
        most: usize,
        wanted: Transport,
    ) -> Result<(usize, Transport, bool), Failed> {
        self.halves.with_tx(&connection.members, |tx| -> Result<_, Failed> {
            connection.members.recount(Direction::Out, || kernel.counts(fd, connection.dialled));
            if self.hints().is_detached() {
                let n = source.pass_on(most).map_err(Failed::Os)?;
                count_unseen(connection, n);
                return Ok((n, Transport::Tcp, n < most));
            }
            let transport = tx.steer(connection, kernel, fd, wanted)?;
            if tx.send_recalled_now(connection, kernel, fd)? {
                return Err(Failed::Os(Errno::AGAIN));
            }
            tx.ended |= connection.ending.is_over();
            if !tx.ended && transport == Transport::Pipe {
                tx.advance_ring(connection)?;
                // This finds a peer that reads no more, before anything is taken.
                let most_there = (most as u64).min(tx.writer.capacity());
                match tx.writer.write(&[]).and_then(|_| tx.writer.ready(most_there)) {
                    Ok(_) if tx.writer.room() > 0 => {
                        let room = tx.writer.room().min(most as u64).min(SPLICED) as usize;
                        let mut bytes = vec![0; room];
                        let n = source.take_bytes(&mut bytes).map_err(Failed::Os)?;
                        match tx.writer.write_vectored(&[IoSlice::new(&bytes[..n])]) {
                            Ok(_) => return Ok((n, Transport::Pipe, n == room && room < most)),
                            // The peer has closed the pipe meanwhile. The bytes already taken go over TCP, whose next
                            // call reports the outcome.
                            Err(Error::Closed) => {
                                tx.ended = true;
                                let sent = kernel.send(fd, &[IoSlice::new(&bytes[..n])]).unwrap_or_default();
                                connection.count_parts(Direction::Out, sent, [&bytes[..n]].into_iter());
                                return Ok((n, Transport::Tcp, false));
                            }
                            Err(error) => return Err(error.into()),
                        }
                    }
                    Ok(_) if !self.is_over(connection, kernel, fd) => return Err(Failed::Os(Errno::AGAIN)),
                    Ok(_) | Err(Error::Closed) => tx.ended = true,
                    Err(error) => return Err(error.into()),
                }
            }
            let n = source.pass_on(most).map_err(Failed::Os)?;
            count_unseen(connection, n);
            Ok((n, Transport::Tcp, n < most))
        })?
    }
}

/// Counts bytes that went over TCP and that this library did not see.
fn count_unseen(connection: &Connection, n: usize) {
    connection.plain_calls.stop_wanting(Direction::Out);
    connection.count(Direction::Out, n);
}
