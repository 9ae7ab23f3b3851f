// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a pipe of the program's has, sent by this end: nothing can be put back there.

use std::{io::IoSlice, os::fd::RawFd};

use rustix::io::Errno;
use tombolo_ring::{Error, Side};

use super::{Failed, Pipes, Source};
use crate::{connection::Connection, direction::Direction, kernel::Kernel, switch::Transport};

/// Bytes that go from a pipe into a ring at once: what a pipe holds.
const SPLICED: u64 = 64 << 10;

impl Pipes {
    /// Sends what a pipe of the program's has, up to `most` bytes: no more than there is room for, as nothing can be put back
    /// there. Says too whether more would not have fitted.
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
                // A peer that reads no more shows before anything is taken.
                let most_there = (most as u64).min(tx.writer.capacity());
                match tx.writer.write(&[]).and_then(|_| tx.writer.ready(most_there)) {
                    Ok(_) if tx.writer.room() > 0 => {
                        let room = tx.writer.room().min(most as u64).min(SPLICED) as usize;
                        let mut bytes = vec![0; room];
                        let n = source.take_bytes(&mut bytes).map_err(Failed::Os)?;
                        match tx.writer.write_vectored(&[IoSlice::new(&bytes[..n])]) {
                            Ok(_) => return Ok((n, Transport::Pipe, n == room && room < most)),
                            // The peer has closed it since. TCP gets what was taken, and says to the next call what became of it.
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

/// Bytes went over TCP that nobody here saw.
fn count_unseen(connection: &Connection, n: usize) {
    connection.plain_calls.stop_wanting(Direction::Out);
    connection.count(Direction::Out, n);
}
