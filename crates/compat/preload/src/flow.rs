// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries out calls that move bytes, whatever their names and arguments.

use std::{
    cell::RefCell,
    io::{IoSlice, IoSliceMut},
    ops::Deref,
    os::fd::RawFd,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::io::Errno;
use tombolo_sockets::{
    Process, Read, Reason, Source,
    connection::{Connection, Direction, Plain, Set, Stage},
    switch::Transport,
};

use crate::{
    closing, epoll, errno, handback, inside, kernel,
    plain::{self, Progress, plainly},
    wait::{self, Looks, Wanted},
};

/// Flags of calls that only the kernel can carry out.
pub(crate) const KERNEL_ONLY: i32 = libc::MSG_OOB | libc::MSG_ERRQUEUE;
/// Flags that make a call leave the bytes where they are.
const PEEK: i32 = libc::MSG_PEEK;

/// Number of bytes that are discarded at once.
const DISCARD: usize = 1 << 20;

/// Longest wait of a call that does not block, for a peer that has not yet followed into the pipe that is to be left.
const LEAVING: Duration = Duration::from_millis(100);

/// Receives into `to`, or fails with the error that the arguments have. `real` is the program's call itself.
pub(crate) fn receive<'p>(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    mut to: Result<impl AsMut<[IoSliceMut<'p>]> + AsRef<[IoSliceMut<'p>]>, Errno>,
    flags: i32,
    mut real: impl FnMut() -> isize,
) -> isize {
    let counts = flags & (PEEK | KERNEL_ONLY) == 0;
    let mut done = 0;
    if let Ok(to) = &mut to
        && flags == libc::MSG_WAITALL
        && plain::is_long(connection, fd, Direction::In, total(to.as_ref()))
    {
        match receive_long(process, connection, fd, to.as_mut(), flags) {
            Progress::Over(n) => return n,
            Progress::Joined(n) => done = n,
        }
    } else {
        let moved = |plain: &Plain<'_>, n| plain.moved(n, to.iter().flat_map(AsRef::as_ref).map(|part| &**part));
        if let Some(n) = plainly(process, connection, Direction::In, counts, &mut real, moved) {
            return n;
        }
    }
    if flags & KERNEL_ONLY != 0 {
        errno::kept(|| process.leaves(connection, Reason::Usage));
        return real();
    }
    let got = answer(|| {
        let mut rest = to.as_mut().map_err(|error| *error)?.as_mut();
        IoSliceMut::advance_slices(&mut rest, done);
        joined_receive(process, connection, fd, rest, flags, done)
    });
    if is_of_another(got, fd) { real() } else { got }
}

/// Carries out the beginning of a long call that receives.
fn receive_long(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    to: &mut [IoSliceMut<'_>],
    flags: i32,
) -> Progress {
    let total = total(to);
    let to = RefCell::new(to);
    let piece = |at, len| kernel::recvmsg(fd, &mut plain::range_mut(&mut to.borrow_mut(), at, len), flags);
    let moved = |plain: &Plain<'_>, at, n| {
        plain.moved(n, plain::range_mut(&mut to.borrow_mut(), at, n).iter().map(|part| &**part));
    };
    plain::carry(process, connection, fd, Direction::In, total, piece, moved)
}

/// Returns the number of bytes in all parts.
fn total(parts: &[impl Deref<Target = [u8]>]) -> usize {
    parts.iter().map(|part| part.len()).sum()
}

/// Lets the kernel carry out a call that receives, and returns its result, if the connection was joined and is back on
/// TCP permanently.
pub(crate) fn receive_back_on_tcp(
    process: &Process,
    connection: &Arc<Connection>,
    real: impl FnOnce() -> isize,
) -> Option<isize> {
    if connection.stage() != Stage::Joined || !errno::kept(|| connection.is_back_on_tcp()) {
        return None;
    }
    let n = real();
    if let Ok(bytes @ 1..) = usize::try_from(n) {
        errno::kept(|| {
            connection.count(Direction::In, bytes);
            process.journal.count_bytes(Direction::In, Transport::Tcp, bytes);
        });
    }
    Some(n)
}

/// Returns whether a call failed because the number is another file's by now.
fn is_of_another(answer: isize, fd: RawFd) -> bool {
    answer < 0 && errno::get() == libc::ENOTSOCK && errno::kept(|| closing::is_another(fd))
}

/// Returns the result of a call that this library carries out. Changes `errno` only if the call failed.
fn answer(call: impl FnOnce() -> Result<usize, Errno>) -> isize {
    let before = errno::get();
    let _inside = inside::enter();
    let answer = errno::answer(call());
    if answer >= 0 {
        errno::set(before);
    }
    answer
}

/// Receives on a joined connection and hands on what is there by `give`. No byte is taken that is not handed on, and
/// none twice.
pub(crate) fn receive_through(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    room: &mut [u8],
    mut give: impl FnMut(&[u8]) -> Result<usize, Errno>,
) -> isize {
    answer(|| connection.for_call(process, fd).recv_through(room, &mut give))
}

/// Receives up to `len` bytes and discards them (`MSG_TRUNC`). `real` is the program's call itself.
pub(crate) fn discard(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    len: usize,
    flags: i32,
    mut real: impl FnMut() -> isize,
) -> isize {
    let counts = flags & (PEEK | KERNEL_ONLY) == 0;
    if let Some(n) = plainly(process, connection, Direction::In, counts, &mut real, |plain, n| plain.moved_unseen(n)) {
        return n;
    }
    if flags & KERNEL_ONLY != 0 {
        errno::kept(|| process.leaves(connection, Reason::Usage));
        return real();
    }
    answer(|| {
        let mut room = vec![0; len.min(DISCARD)];
        let mut done = 0;
        loop {
            let part = room.len().min(len - done);
            match joined_receive(process, connection, fd, &mut [IoSliceMut::new(&mut room[..part])], flags, 0) {
                Ok(n) => done += n,
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => return Ok(done),
            }
            let all = flags & libc::MSG_WAITALL != 0 && flags & PEEK == 0;
            if !all || done % DISCARD != 0 || done == len || part == 0 {
                return Ok(done);
            }
        }
    })
}

/// Receives on a joined connection in a call that has received `done` bytes over TCP before the join. Returns the
/// number of bytes with those included.
fn joined_receive(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    to: &mut [IoSliceMut<'_>],
    flags: i32,
    mut done: usize,
) -> Result<usize, Errno> {
    let total = done + total(to);
    if total == 0 {
        // In the kernel such a call waits for something to come, and leaves it there.
        let (mut one, flags) = ([0], flags & !libc::MSG_WAITALL | PEEK);
        return joined_receive(process, connection, fd, &mut [IoSliceMut::new(&mut one)], flags, 0).map(|_| 0);
    }
    let read = if flags & PEEK == 0 { Read::Take } else { Read::Peek };
    let all = flags & libc::MSG_WAITALL != 0;
    let mut patience = Patience::default();
    patience.note_wait(connection, fd, flags, Direction::In);
    let mut parts = to;
    // Whether to wait at once: if nothing is there, and a waiter is told of whatever comes.
    let mut rests = true;
    loop {
        let rested = std::mem::take(&mut rests) && connection.for_call(process, fd).finds_nothing();
        let rested = rested && !patience.is_nonblocking(connection, fd, flags);
        if done > 0 && !rested && has_failed(process, connection, fd) {
            return Ok(done); // The kernel keeps an error for the next call of whatever kind.
        }
        let received = if rested { Err(Errno::AGAIN) } else { connection.for_call(process, fd).recv(parts, read) };
        match received {
            Ok(n) if read == Read::Peek => {
                if !all || n == 0 || n == total || !patience.is_for_more(process, connection, fd, flags, n) {
                    return Ok(n);
                }
            }
            Ok(n) => {
                done += n;
                // A result smaller than the room is the sign that nothing is left, after which programs wait for an
                // edge (S-15). No read goes on past urgent data.
                let is_crossing = connection.pipes.is_crossing();
                if n == 0 || done == total || !all && !is_crossing || is_crossing && kernel::is_at_mark(fd) {
                    return Ok(done);
                }
                IoSliceMut::advance_slices(&mut parts, n);
                rests = all;
            }
            Err(Errno::AGAIN) if done > 0 && !all => return Ok(done),
            Err(Errno::AGAIN) => {
                let waited = patience.wait(process, connection, fd, flags, (Wanted::READ, done));
                if let Err(errno) = waited {
                    return if done > 0 { Ok(done) } else { Err(errno) };
                }
            }
            Err(errno) if done > 0 => {
                connection.pipes.store_error(errno);
                return Ok(done);
            }
            Err(errno) => return Err(errno),
        }
    }
}

/// Returns whether TCP has an error to report, and nothing before it.
fn has_failed(process: &Process, connection: &Connection, fd: RawFd) -> bool {
    !connection.pipes.has_unread() && process.kernel().poll(fd, 0) & libc::POLLERR != 0 && kernel::unread(fd) == 0
}

/// Sends `from`, or fails with the error that the arguments have. `real` is the program's call itself.
pub(crate) fn send<'p>(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    mut from: Result<impl AsMut<[IoSlice<'p>]> + AsRef<[IoSlice<'p>]>, Errno>,
    flags: i32,
    mut real: impl FnMut() -> isize,
) -> isize {
    let mut done = 0;
    if let Ok(from) = &from
        && flags & !libc::MSG_NOSIGNAL == 0
        && plain::is_long(connection, fd, Direction::Out, total(from.as_ref()))
    {
        let from = from.as_ref();
        // A call that has sent something raises no signal.
        let quiet = |at| if at > 0 { libc::MSG_NOSIGNAL } else { 0 };
        let piece = |at, len| kernel::sendmsg(fd, &plain::range(from, at, len), flags | quiet(at));
        let moved = |plain: &Plain<'_>, at, n| plain.moved(n, plain::range(from, at, n).iter().map(|part| &**part));
        match plain::carry(process, connection, fd, Direction::Out, total(from), piece, moved) {
            Progress::Over(n) => return n,
            Progress::Joined(n) => done = n,
        }
    } else {
        let moved = |plain: &Plain<'_>, n| plain.moved(n, from.iter().flat_map(AsRef::as_ref).map(|part| &**part));
        if let Some(n) = plainly(process, connection, Direction::Out, flags & KERNEL_ONLY == 0, &mut real, moved) {
            return n;
        }
    }
    if flags & (libc::MSG_OOB | libc::MSG_ZEROCOPY) != 0 {
        // In a pipe an urgent byte would be one of the ordinary bytes. A program that lends pages waits for the report
        // that they are free.
        errno::kept(|| handback::send_by_kernel(process, fd, connection));
        return real();
    }
    if from.iter().flat_map(AsRef::as_ref).all(|part| part.is_empty()) && from.is_ok()
        || flags & libc::MSG_FASTOPEN != 0
    {
        return real(); // Moves nothing, but the kernel reports whether the end is reached, or that it is connected.
    }
    let sent = answer(|| {
        let mut rest = from.as_mut().map_err(|error| *error)?.as_mut();
        let total = total(rest);
        IoSlice::advance_slices(&mut rest, done);
        let sent = joined_send(process, connection, fd, rest, flags, done);
        match sent {
            Err(Errno::PIPE) if flags & libc::MSG_NOSIGNAL == 0 => kernel::signal_broken_pipe(),
            _ if is_short(sent, total) => errno::kept(|| epoll::found_no_room(connection)),
            _ => {}
        }
        sent
    });
    if is_of_another(sent, fd) { real() } else { sent }
}

/// Returns whether a call that sends may have found too little room.
fn is_short(sent: Result<usize, Errno>, total: usize) -> bool {
    sent.map_or_else(|errno| errno == Errno::AGAIN, |n| n < total)
}

/// Looks now and then, at the beginning of a call that sends, whether anybody is left who reads.
#[inline]
fn look_now_and_then(process: &Process, connection: &Connection, fd: RawFd) {
    if connection.ending.is_due() {
        errno::kept(|| connection.for_call(process, fd).look_for_end());
    }
}

/// Sends on a joined connection in a call that has sent `done` bytes over TCP before the join. Returns the number of
/// bytes with those included.
fn joined_send(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    from: &mut [IoSlice<'_>],
    flags: i32,
    mut done: usize,
) -> Result<usize, Errno> {
    let total = done + total(from);
    let mut parts = from;
    let mut patience = Patience::default();
    patience.note_send(process, connection, fd, flags);
    look_now_and_then(process, connection, fd);
    loop {
        if done > 0 && connection.ending.is_over() {
            return Ok(done); // The kernel's answer to more bytes is for the next call.
        }
        match connection.for_call(process, fd).send(parts) {
            Ok(n) => {
                done += n;
                // A blocking send returns only when all is sent; any other returns now.
                if done == total || patience.is_nonblocking(connection, fd, flags) {
                    return Ok(done);
                }
                IoSlice::advance_slices(&mut parts, n);
            }
            Err(Errno::AGAIN) => {
                let waited = patience.wait(process, connection, fd, flags, (Wanted::WRITE, done));
                if let Err(errno) = waited {
                    return if done > 0 { Ok(done) } else { Err(errno) };
                }
            }
            Err(errno) if done > 0 => return Ok(done_before(connection, errno, done)),
            Err(errno) => return Err(errno),
        }
    }
}

/// Returns the result of a call that has sent `done` bytes and then failed. The next call fails, as in the kernel.
fn done_before(connection: &Connection, errno: Errno, done: usize) -> usize {
    if !matches!(errno, Errno::PIPE | Errno::AGAIN | Errno::INTR) {
        connection.pipes.store_error(errno);
    }
    done
}

/// Sends up to `most` bytes from a pipe of the program's on a joined connection. The call waits for room as the socket
/// is set to, and for nothing else: `AGAIN` of the `source` ends it.
pub(crate) fn send_from(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    source: &mut impl Supply,
    most: usize,
) -> isize {
    answer(|| {
        let sent = joined_send_from(process, connection, fd, source, most);
        if is_short(sent, most) && !source.is_empty() {
            errno::kept(|| epoll::found_no_room(connection));
        }
        sent
    })
}

fn joined_send_from(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    source: &mut impl Supply,
    most: usize,
) -> Result<usize, Errno> {
    let mut patience = Patience::default();
    let mut done = 0;
    look_now_and_then(process, connection, fd);
    patience.note_send(process, connection, fd, 0);
    source.be_patient(!patience.is_nonblocking(connection, fd, 0));
    loop {
        let failed = match connection.for_call(process, fd).send_from(source, most - done) {
            Ok(0) => return Ok(done),
            Ok(n) if done + n == most || patience.is_nonblocking(connection, fd, 0) => return Ok(done + n),
            Ok(n) => {
                done += n;
                continue;
            }
            Err(Errno::AGAIN) if !source.is_empty() => {
                patience.wait(process, connection, fd, 0, (Wanted::WRITE, done)).err()
            }
            Err(errno) => Some(errno),
        };
        match failed {
            Some(errno) if done > 0 => return Ok(done_before(connection, errno, done)),
            Some(errno) => return Err(errno),
            None => {}
        }
    }
}

/// Source of the bytes that [`send_from`] sends.
pub(crate) trait Supply: Source {
    /// Sets whether the call waits for room. If not, the kernel does not wait for it either.
    fn be_patient(&mut self, patient: bool);

    /// Returns whether the source had nothing at the last look.
    fn is_empty(&self) -> bool;
}

/// How long a call may wait, determined only when it must.
#[derive(Default)]
struct Patience {
    nonblocking: Option<bool>,
    deadline: Option<Option<Instant>>,
    /// When the wait for a pipe to be left ends.
    leaving: Option<Instant>,
    /// Number of bytes seen at the last look.
    seen: Option<usize>,
    looks: Looks,
}

impl Patience {
    fn is_nonblocking(&mut self, connection: &Connection, fd: RawFd, flags: i32) -> bool {
        let ask = || kernel::is_nonblocking(fd);
        flags & libc::MSG_DONTWAIT != 0
            || *self.nonblocking.get_or_insert_with(|| connection.has_set(Set::Nonblocking, ask))
    }

    /// Records at the beginning of a call how the program waits: a call that waits itself shows it, if nothing else
    /// has.
    fn note_wait(&mut self, connection: &Connection, fd: RawFd, flags: i32, direction: Direction) {
        let waits = connection.wiring.waits();
        if !waits.is_seen(direction) && !self.is_nonblocking(connection, fd, flags) {
            waits.note_blocked(direction);
        }
    }

    /// Does the same for a call that sends. After it the program may wait, for an answer or for room, before it calls
    /// again.
    fn note_send(&mut self, process: &Process, connection: &Arc<Connection>, fd: RawFd, flags: i32) {
        self.note_wait(connection, fd, flags, Direction::Out);
        let waits = connection.wiring.waits();
        if Direction::BOTH.iter().any(|direction| !waits.is_asked(*direction))
            && self.is_nonblocking(connection, fd, flags)
        {
            for direction in Direction::BOTH {
                self.note_refused(process, connection, fd, flags, direction);
            }
        }
    }

    /// Records that a call does not wait. If only calls that wait were seen so far, the program waits past this library
    /// from now on, and what comes next must be visible there. Returns whether that is news.
    fn note_refused(
        &self,
        process: &Process,
        connection: &Arc<Connection>,
        fd: RawFd,
        flags: i32,
        direction: Direction,
    ) -> bool {
        let is_news = flags & libc::MSG_DONTWAIT == 0 && connection.wiring.waits().note_refused(direction);
        if is_news && direction == Direction::In {
            errno::kept(|| handback::ask_for_tcp(process, fd, connection, Reason::Usage));
        }
        is_news
    }

    /// Waits, no longer than [`LEAVING`] in one call, while a direction that is to go over TCP is still in a full pipe,
    /// because the peer has not followed there yet. The program may wait for room past this library, and would never be
    /// notified of it. Returns whether to try again.
    fn leaves_pipe(&mut self, process: &Process, connection: &Arc<Connection>, fd: RawFd) -> Result<bool, Errno> {
        if connection.wiring.waits().is_seen(Direction::Out) || connection.is_writable() != Some(false) {
            return Ok(false);
        }
        let deadline = *self.leaving.get_or_insert_with(|| Instant::now() + LEAVING);
        inside::leave(|| wait::one(process, connection, fd, Wanted::WRITE, || Some(deadline)))
    }

    fn deadline(&mut self, connection: &Connection, fd: RawFd, wanted: Wanted) -> Option<Instant> {
        let send = wanted == Wanted::WRITE;
        let what = if send { Set::SendLimit } else { Set::ReceiveLimit };
        let known = || {
            let mut limit = None;
            let is_set = connection.has_set(what, || {
                limit = kernel::patience(fd, send);
                limit.is_some()
            });
            // The length of the limit is asked for each time.
            limit = limit.or_else(|| if is_set { kernel::patience(fd, send) } else { None });
            limit.and_then(|left| Instant::now().checked_add(left))
        };
        *self.deadline.get_or_insert_with(known)
    }

    /// Returns whether a call that looks for all bytes (`MSG_PEEK` with `MSG_WAITALL`), and has seen `seen` of them,
    /// looks again a moment later.
    fn is_for_more(&mut self, process: &Process, connection: &Connection, fd: RawFd, flags: i32, seen: usize) -> bool {
        let over = |deadline| Instant::now() >= deadline;
        if self.is_nonblocking(connection, fd, flags) || self.deadline(connection, fd, Wanted::READ).is_some_and(over) {
            return false;
        }
        let before = self.seen.replace(seen);
        if process.kernel().poll(fd, libc::POLLRDHUP) != 0 {
            return before != Some(seen); // Some may have come between the two looks.
        }
        connection.for_call(process, fd).send_recalled();
        wait::a_moment(fd)
    }

    /// Waits in a call that has moved `done` bytes, until it can try again.
    fn wait(
        &mut self,
        process: &Process,
        connection: &Arc<Connection>,
        fd: RawFd,
        flags: i32,
        (wanted, done): (Wanted, usize),
    ) -> Result<(), Errno> {
        if self.is_nonblocking(connection, fd, flags) {
            let direction = if wanted == Wanted::READ { Direction::In } else { Direction::Out };
            let tries_again = self.note_refused(process, connection, fd, flags, direction)
                || wanted == Wanted::WRITE && self.leaves_pipe(process, connection, fd)?;
            return if tries_again { Ok(()) } else { Err(Errno::AGAIN) };
        }
        let look = (wanted == Wanted::WRITE).then(|| Instant::now() + self.looks.next_pause());
        let limit = || {
            let deadline = self.deadline(connection, fd, wanted);
            deadline.into_iter().chain(look).min()
        };
        let waited = inside::leave(|| wait::one(process, connection, fd, wanted, limit));
        if connection.descriptors.are_closed() {
            return Err(Errno::BADF);
        }
        match waited {
            Ok(true) => Ok(()),
            Ok(false) if look.is_some_and(|look| self.deadline.flatten().is_none_or(|deadline| look < deadline)) => {
                errno::kept(|| connection.for_call(process, fd).leave_full_pipe());
                Ok(())
            }
            Ok(false) => Err(Errno::AGAIN),
            // A call that has a time limit, or has moved something, does not go on after a signal.
            Err(Errno::INTR)
                if done == 0 && matches!(self.deadline, None | Some(None)) && kernel::handlers_restart() =>
            {
                Ok(())
            }
            Err(errno) => Err(errno),
        }
    }
}
