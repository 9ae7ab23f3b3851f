// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets the kernel carry out calls on a connection that has no pipes. A call that moves much goes to the kernel in
//! pieces. The search for the peer goes on with each piece, because a program may send all that it has in one call.

use std::{
    io::{IoSlice, IoSliceMut},
    ops::Range,
    os::fd::RawFd,
    sync::Arc,
};

use tombolo_sockets::{
    Process,
    connection::{Connection, Direction, Plain, Set, Stage},
    switch::Transport,
};

use crate::{epoll::wiring, errno, inside, kernel};

/// Begins every call on a watched connection, and advances the search for its peer.
pub(crate) fn begin(process: &Process, connection: &Arc<Connection>) {
    match connection.stage() {
        Stage::Candidate => errno::kept(|| process.advance(connection)),
        // A connection that cannot be wired goes back to TCP, and is not tried again.
        Stage::Joined if !connection.wiring.is_wired() && connection.reason().is_none() => {
            errno::kept(|| wiring::wire(process, connection));
        }
        Stage::Joined if connection.pipes.are_revocable() => errno::kept(|| process.advance(connection)),
        Stage::Joined | Stage::Plain => {}
    }
}

/// Lets the kernel carry out a call on a connection that has no pipes, and returns its result; returns `None` if the
/// connection has pipes. `moved` remembers what the call moved, if that `counts`.
pub(crate) fn plainly(
    process: &Process,
    connection: &Arc<Connection>,
    direction: Direction,
    counts: bool,
    real: impl FnOnce() -> isize,
    moved: impl FnOnce(&Plain<'_>, usize),
) -> Option<isize> {
    begin(process, connection);
    let plain = connection.plain(direction)?;
    let n = real();
    if n > 0 && counts {
        let _inside = inside::enter();
        moved(&plain, n as usize);
        process.journal.count_bytes(direction, Transport::Tcp, n as usize);
    }
    Some(n)
}

/// Size of the first pieces, in bytes. Later ones are a quarter of what went before, so that a connection that stays on
/// TCP pays for few.
const PIECE: usize = 256 << 10;

/// Outcome of a call that goes in pieces.
pub(crate) enum Progress {
    /// The connection was joined when the kernel had moved this number of bytes.
    Joined(usize),
    /// The call is over, with this result.
    Over(isize),
}

/// Returns whether a call of `total` bytes goes in pieces. It does if it waits until all is moved, for as long as that
/// takes.
pub(crate) fn is_long(connection: &Connection, fd: RawFd, direction: Direction, total: usize) -> bool {
    let (limit, sends) = match direction {
        Direction::Out => (Set::SendLimit, true),
        Direction::In => (Set::ReceiveLimit, false),
    };
    total > PIECE
        && connection.stage() == Stage::Candidate
        && !connection.has_set(Set::Nonblocking, || kernel::is_nonblocking(fd))
        && !connection.has_set(limit, || kernel::patience(fd, sends).is_some())
}

/// Lets the kernel carry out a long call of `total` bytes for as long as the connection is not joined. `piece` moves so
/// many bytes from an offset on, and `moved` remembers what it moved.
pub(crate) fn carry(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    direction: Direction,
    total: usize,
    mut piece: impl FnMut(usize, usize) -> isize,
    mut moved: impl FnMut(&Plain<'_>, usize, usize),
) -> Progress {
    let mut done = 0;
    while done < total {
        let may_be_joined = connection.stage() == Stage::Candidate;
        let len = if may_be_joined { PIECE.max(done / 4).min(total - done) } else { total - done };
        // The wait is within the call as the connection sees it, so whoever joins the connection meanwhile leaves this
        // direction on TCP.
        let real = || if done == 0 || is_ready(fd, direction) { piece(done, len) } else { -1 };
        let Some(n) = plainly(process, connection, direction, true, real, |plain, n| moved(plain, done, n)) else {
            begin(process, connection); // Otherwise only a later call would do this.
            return Progress::Joined(done);
        };
        match usize::try_from(n) {
            Ok(n) => done += n,
            Err(_) if done == 0 => return Progress::Over(n),
            Err(_) => break,
        }
        if n as usize != len {
            break; // After a signal, the end or an error the call ends as it would have in the kernel.
        }
    }
    Progress::Over(done as isize)
}

/// Waits until another piece can move at least a byte. Returns whether it can. An error is for the program's next call,
/// as the kernel keeps it if a call has moved something.
fn is_ready(fd: RawFd, direction: Direction) -> bool {
    let events = match direction {
        Direction::Out => libc::POLLOUT,
        Direction::In => libc::POLLIN,
    };
    let mut asked = [libc::pollfd { fd, events, revents: 0 }];
    let waited = errno::kept(|| kernel::poll(&mut asked, None, None)).is_ok();
    let said = asked[0].revents;
    waited
        && match direction {
            Direction::Out => said == libc::POLLOUT,
            Direction::In => said & libc::POLLERR == 0 || kernel::unread(fd) > 0,
        }
}

/// Returns `len` bytes of `parts` from `begin` on.
pub(crate) fn range<'a>(parts: &'a [IoSlice<'_>], begin: usize, len: usize) -> Vec<IoSlice<'a>> {
    let mut cut = Cut { begin, end: begin + len };
    parts.iter().map(|part| IoSlice::new(&part[cut.next_part(part.len())])).filter(|part| !part.is_empty()).collect()
}

/// Does the same for parts that are to be written.
pub(crate) fn range_mut<'a>(parts: &'a mut [IoSliceMut<'_>], begin: usize, len: usize) -> Vec<IoSliceMut<'a>> {
    let mut cut = Cut { begin, end: begin + len };
    let cut = parts.iter_mut().map(|part| {
        let within = cut.next_part(part.len());
        IoSliceMut::new(&mut part[within])
    });
    cut.filter(|part| !part.is_empty()).collect()
}

/// Range between two offsets, taken part by part: both are counted from the start of the next part.
struct Cut {
    begin: usize,
    end: usize,
}

impl Cut {
    /// Returns the range of the next part, of `len` bytes, that lies between the offsets.
    fn next_part(&mut self, len: usize) -> Range<usize> {
        let within = self.begin.min(len)..self.end.min(len);
        (self.begin, self.end) = (self.begin.saturating_sub(len), self.end.saturating_sub(len));
        within
    }
}
