// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sends and receives bytes of the program by whichever transport carries a direction now.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::RawFd,
};

use rustix::io::Errno;
use tombolo_ring::{Error, Side};

use super::{Failed, Pipes, Read, read_call::ReadCall};
use crate::{connection::Connection, direction::Direction, kernel::Kernel, switch::Transport};

impl Pipes {
    /// Sends what there is room for. `wanted` is the transport that the direction should use.
    pub fn send(
        &self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        from: &[IoSlice<'_>],
        wanted: Transport,
    ) -> Result<(usize, Transport), Failed> {
        let sent = self.halves.with_tx(&connection.members, |tx| -> Result<_, Failed> {
            connection.members.recount(Direction::Out, || kernel.counts(fd, connection.dialled));
            if self.hints().is_detached() {
                return send_over_tcp(connection, kernel, fd, from);
            }
            let transport = tx.steer(connection, kernel, fd, wanted)?;
            if tx.send_recalled_now(connection, kernel, fd)? {
                return Err(Failed::Os(Errno::AGAIN));
            }
            tx.ended |= connection.ending.is_over();
            if !tx.ended && transport == Transport::Pipe {
                tx.advance_ring(connection)?;
                match tx.writer.write_vectored(from) {
                    Ok(Some(n)) => return Ok((n, Transport::Pipe)),
                    Ok(None) if !self.is_over(connection, kernel, fd) => return Err(Failed::Os(Errno::AGAIN)),
                    // Nobody will read the bytes, from the pipe or from TCP. The kernel's answer is the right one.
                    Ok(None) | Err(Error::Closed) => tx.ended = true,
                    Err(error) => return Err(error.into()),
                }
            }
            send_over_tcp(connection, kernel, fd, from)
        })?;
        // The kernel reports an error once, and the program gets that one before it is told that it can send no more.
        sent.map_err(|failed| match failed {
            Failed::Os(Errno::PIPE) => self.halves.lock_rx().error.take().map_or(failed, Failed::Os),
            _ => failed,
        })
    }

    /// Reads what is there; returns 0 at the end of the stream.
    pub fn recv(
        &self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        to: &mut [IoSliceMut<'_>],
        read: Read,
    ) -> Result<(usize, Transport), Failed> {
        ReadCall { pipes: self, connection, kernel, fd }.recv(to, read)
    }

    /// Ends reading if nothing is left to read, where the program itself asks for nothing.
    pub fn end_reading_if_empty(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) {
        let found = self.recv(connection, kernel, fd, &mut [IoSliceMut::new(&mut [0])], Read::Peek);
        if let Err(Failed::Os(error)) = found
            && error != Errno::AGAIN
        {
            self.store_error(error); // The program was not told of it.
        }
    }

    /// Closes both pipes before the last descriptor of this endpoint is closed. Returns whether bytes are left unread,
    /// for which TCP would reset.
    pub fn close(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) -> bool {
        let _ = self.halves.with_tx(&connection.members, |tx| tx.writer.close());
        let unread = self.halves.with_rx(&connection.members, |rx| {
            // If the peer still sends, what was recalled comes over TCP, to whoever has the socket then. This endpoint
            // may not have followed into the pipe yet.
            let comes = rx.receiver.recalls() && !connection.ending.has_peer_ended(kernel, fd);
            let is_here = !comes && !rx.is_paid();
            let has_leftover = rx.leftover.as_ref().is_some_and(|leftover| leftover.unread() > 0);
            let unread = has_leftover || is_here && matches!(rx.reader.ready(1), Ok(true)) && rx.reader.available() > 0;
            rx.reader.close();
            unread
        });
        unread.unwrap_or(false)
    }
}

/// Has TCP send, for a direction that it carries.
fn send_over_tcp(
    connection: &Connection,
    kernel: &dyn Kernel,
    fd: RawFd,
    from: &[IoSlice<'_>],
) -> Result<(usize, Transport), Failed> {
    let n = kernel.send(fd, from).map_err(Failed::Os)?;
    connection.count_parts(Direction::Out, n, from.iter().map(|part| &**part));
    Ok((n, Transport::Tcp))
}
