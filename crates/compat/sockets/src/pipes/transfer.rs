// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bytes of the program, sent and received by whichever of the two carries a direction now.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::RawFd,
    sync::atomic::Ordering,
};

use rustix::io::Errno;
use tombolo_mem::PeerWord;
use tombolo_ring::{Error, Side};

use super::{ASTIR, BROKEN, Failed, Pipes, Read, Rx, io::Reading};
use crate::{
    connection::Connection,
    direction::Direction,
    kernel::Kernel,
    switch::{Found, Transport},
};

impl Pipes {
    /// Sends what there is room for. `wanted` is where the program's user would have the direction.
    pub fn send(
        &self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        from: &[IoSlice<'_>],
        wanted: Transport,
    ) -> Result<(usize, Transport), Failed> {
        self.turn(connection, &self.tx, |tx| -> Result<_, Failed> {
            connection.members.recount(Direction::Out, || kernel.counts(fd, connection.dialled));
            if self.is_detached() {
                return self.send_detached(connection, kernel, fd, from);
            }
            let carrier = self.steer(tx, connection, kernel, fd, wanted)?;
            if tx.pay(connection, kernel, fd)? {
                return Err(Failed::Os(Errno::AGAIN));
            }
            tx.ended |= connection.ending.is_over();
            if !tx.ended && carrier == Transport::Pipe {
                tx.advance_ring(connection)?;
                match tx.writer.write_vectored(from) {
                    Ok(Some(n)) => return Ok((n, Transport::Pipe)),
                    Ok(None) if !self.is_over(connection, kernel, fd) => return Err(Failed::Os(Errno::AGAIN)),
                    // Nobody will read it, from here or from there: the kernel's answer is the right one.
                    Ok(None) | Err(Error::Closed) => tx.ended = true,
                    Err(error) => return Err(error.into()),
                }
            }
            let n = kernel.send(fd, from).map_err(Failed::Os)?;
            connection.count(Direction::Out, n);
            Ok((n, Transport::Tcp))
        })?
    }

    /// Reads what is there; 0 is the end.
    pub fn recv(
        &self,
        connection: &Connection,
        kernel: &dyn Kernel,
        fd: RawFd,
        to: &mut [IoSliceMut<'_>],
        read: Read,
    ) -> Result<(usize, Transport), Failed> {
        let mut missed = false;
        let received = self.turn(connection, &self.rx, |rx| -> Result<_, Failed> {
            if let Some(broken) = rx.broken {
                return Err(Failed::Broken(broken));
            }
            if rx.over {
                if let Some(error) = rx.error.take_if(|_| read != Read::Look) {
                    return Err(Failed::Os(error));
                }
                let n = if read == Read::Look { 0 } else { kernel.recv(fd, to, false).map_err(Failed::Os)? };
                return Ok((n, Transport::Tcp));
            }
            connection.members.recount(Direction::In, || kernel.counts(fd, connection.dialled));
            if self.is_detached() {
                return self.recv_detached(rx, connection, (kernel, fd), to, read);
            }
            let mut io = Reading {
                connection,
                kernel,
                fd,
                to,
                read,
                reader: &mut rx.reader,
                moves: &rx.moves,
                boundary: &rx.boundary,
                followed: &rx.followed,
                error: &mut rx.error,
            };
            rx.receiver.set_leave(&mut io, connection.leaves());
            let mut found = rx.receiver.receive(&mut io);
            if let (Read::Peek, Ok(Found::Bytes(shown))) = (read, &mut found) {
                match io.peek_across(&rx.receiver, *shown) {
                    Ok(more) => *shown += more,
                    Err(failed) => found = Err(failed),
                }
            }
            let carrier = rx.receiver.carrier();
            self.read_to.store(rx.reader.position(), Ordering::Relaxed);
            let settled = matches!(found, Ok(Found::Bytes(_) | Found::Nothing)) && rx.error.is_none();
            let moves = rx.receiver.moves_within_pipe().filter(|_| settled);
            self.settled.store(moves.unwrap_or(ASTIR), Ordering::Relaxed);
            if read == Read::Take {
                missed = rx.armed_full && rx.arm_anew(connection);
                let behind = rx.receiver.is_behind(rx.moves.load_acquire().hint());
                self.crossing.store(behind && matches!(found, Ok(Found::Bytes(_))), Ordering::Relaxed);
            }
            if read != Read::Look && matches!(found, Ok(Found::End) | Err(Failed::Os(_))) {
                self.end_reading(rx, connection, kernel, fd);
            }
            let lacks = matches!((read, &found), (Read::Take, Ok(Found::Nothing)) | (Read::Peek, _));
            if lacks && rx.look_for_ring() {
                self.ring_announced.store(true, Ordering::Relaxed);
            }
            match found {
                Ok(Found::Bytes(n)) => Ok((n, carrier)),
                Ok(Found::End) => Ok((0, carrier)),
                Ok(Found::Nothing) => Err(Failed::Os(Errno::AGAIN)),
                Err(Failed::Broken(broken)) => {
                    rx.broken = Some(broken);
                    self.read_to.store(BROKEN, Ordering::Relaxed);
                    Err(Failed::Broken(broken))
                }
                Err(failed) => {
                    rx.error = None; // The program hears it.
                    Err(failed)
                }
            }
        })?;
        if missed {
            self.bell.notify();
        }
        if matches!(received, Err(Failed::Os(Errno::AGAIN))) {
            self.comply(connection, kernel, fd);
        }
        received
    }

    /// S-12. The program hears that there is no more, and that is so: TCP is over and the pipe is empty. What the peer sends
    /// from now on is for TCP to refuse.
    fn end_reading(&self, rx: &mut Rx, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) {
        rx.over = connection.members.is_alone() && connection.ending.ask_whether_over(kernel, fd);
        if rx.over {
            rx.reader.close();
            self.read_to.store(self.arrived(), Ordering::Relaxed);
        }
    }

    /// The same where the program asks for nothing: if nothing is left to read.
    pub fn end_reading_if_empty(&self, connection: &Connection, kernel: &dyn Kernel, fd: RawFd) {
        let found = self.recv(connection, kernel, fd, &mut [IoSliceMut::new(&mut [0])], Read::Peek);
        if let Err(Failed::Os(error)) = found
            && error != Errno::AGAIN
        {
            self.store_error(error); // The program was not told of it.
        }
    }

    /// The last descriptor of this end is about to be closed. Says whether bytes are left unread: then TCP would reset.
    pub fn close(&self, connection: &Connection) -> bool {
        let _ = self.turn(connection, &self.tx, |tx| tx.writer.close());
        let unread = self.turn(connection, &self.rx, |rx| {
            // What was recalled comes over TCP, to whoever has the socket then.
            let reads = rx.receiver.reads_pipe();
            let unread = reads && matches!(rx.reader.ready(1), Ok(true)) && rx.reader.available() > 0;
            rx.reader.close();
            unread
        });
        unread.unwrap_or(false)
    }
}
