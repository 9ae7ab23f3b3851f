// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a call that moves bytes does, whatever it is called and however its arguments look.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::RawFd,
    sync::Arc,
    time::Instant,
};

use rustix::io::Errno;
use tombolo::sockets::{
    Process, Read, Reason,
    connection::{Connection, Direction, Stage},
};

use crate::{
    control, epoll, errno, kernel,
    wait::{self, Wanted},
};

/// Flags of calls that only the kernel can carry out.
const KERNEL_ONLY: i32 = libc::MSG_OOB | libc::MSG_ERRQUEUE;
/// Flags that make a call leave the bytes where they are.
const LOOKS: i32 = libc::MSG_PEEK;

/// Bytes that are thrown away at once.
const DISCARD: usize = 1 << 20;

/// What every call on a watched connection begins with: gets on with finding the other end.
pub(crate) fn begin(process: &Process, connection: &Arc<Connection>) {
    match connection.stage() {
        Stage::Candidate => errno::kept(|| process.advance(connection)),
        Stage::Joined if !connection.is_wired() => errno::kept(|| epoll::wire(process, connection)),
        Stage::Joined | Stage::Plain => {}
    }
}

/// A call that receives. `real` is the call itself.
pub(crate) fn receive(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    to: &mut [IoSliceMut<'_>],
    flags: i32,
    real: impl FnOnce() -> isize,
) -> isize {
    begin(process, connection);
    if let Some(plain) = connection.plain(Direction::In) {
        let n = real();
        if n > 0 && flags & (LOOKS | KERNEL_ONLY) == 0 {
            plain.moved(n as usize, to.iter().map(|part| &**part));
            process.moved_plain(Direction::In, n as usize);
        }
        return n;
    }
    if flags & KERNEL_ONLY != 0 {
        errno::kept(|| process.leaves(connection, Reason::Usage));
        return real();
    }
    let before = errno::get();
    let answer = errno::answer(joined_receive(process, connection, fd, to, flags));
    if answer >= 0 {
        errno::set(before);
    }
    answer
}

/// A call that throws away what it receives (`MSG_TRUNC`), up to `len` bytes. `real` is the call itself.
pub(crate) fn discard(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    len: usize,
    flags: i32,
    real: impl FnOnce() -> isize,
) -> isize {
    begin(process, connection);
    if let Some(plain) = connection.plain(Direction::In) {
        let n = real();
        if n > 0 && flags & LOOKS == 0 {
            plain.moved_unseen(n as usize);
            process.moved_plain(Direction::In, n as usize);
        }
        return n;
    }
    let before = errno::get();
    let mut room = vec![0; len.min(DISCARD)];
    let mut done = 0;
    let answer = loop {
        let part = room.len().min(len - done);
        match joined_receive(process, connection, fd, &mut [IoSliceMut::new(&mut room[..part])], flags) {
            Ok(n) => done += n,
            Err(errno) if done == 0 => break Err(errno),
            Err(_) => break Ok(done),
        }
        let all = flags & libc::MSG_WAITALL != 0 && flags & LOOKS == 0;
        if !all || done % DISCARD != 0 || done == len || part == 0 {
            break Ok(done);
        }
    };
    let answer = errno::answer(answer);
    if answer >= 0 {
        errno::set(before);
    }
    answer
}

fn joined_receive(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    to: &mut [IoSliceMut<'_>],
    flags: i32,
) -> Result<usize, Errno> {
    let total: usize = to.iter().map(|part| part.len()).sum();
    if total == 0 {
        return Ok(0);
    }
    let read = if flags & LOOKS == 0 { Read::Take } else { Read::Peek };
    let all = flags & libc::MSG_WAITALL != 0 && read == Read::Take;
    let mut patience = Patience::default();
    let mut done = 0;
    let mut parts = to;
    loop {
        match connection.recv(process, fd, parts, read) {
            Ok(n) => {
                done += n;
                if !all || n == 0 || done == total {
                    return Ok(done);
                }
                IoSliceMut::advance_slices(&mut parts, n);
            }
            Err(Errno::AGAIN) => {
                let waited = patience.wait(process, connection, fd, flags, Wanted::READ);
                if let Err(errno) = waited {
                    return if done > 0 { Ok(done) } else { Err(errno) };
                }
            }
            Err(_) if done > 0 => return Ok(done),
            Err(errno) => return Err(errno),
        }
    }
}

/// A call that sends. `real` is the call itself.
pub(crate) fn send(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    from: &mut [IoSlice<'_>],
    flags: i32,
    real: impl FnOnce() -> isize,
) -> isize {
    begin(process, connection);
    if let Some(plain) = connection.plain(Direction::Out) {
        let n = real();
        if n > 0 && flags & KERNEL_ONLY == 0 {
            plain.moved(n as usize, from.iter().map(|part| &**part));
            process.moved_plain(Direction::Out, n as usize);
        }
        return n;
    }
    if flags & libc::MSG_OOB != 0 {
        // Among the bytes of a pipe it would be one of them.
        errno::kept(|| control::hand_over(process, fd, connection, Reason::Usage));
        return real();
    }
    if flags & (KERNEL_ONLY | libc::MSG_ZEROCOPY) != 0 {
        errno::kept(|| process.leaves(connection, Reason::Usage));
    }
    let before = errno::get();
    let sent = joined_send(process, connection, fd, from, flags);
    if sent == Err(Errno::PIPE) && flags & libc::MSG_NOSIGNAL == 0 {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::PIPE);
    }
    let answer = errno::answer(sent);
    if answer >= 0 {
        errno::set(before);
    }
    answer
}

fn joined_send(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    from: &mut [IoSlice<'_>],
    flags: i32,
) -> Result<usize, Errno> {
    let total: usize = from.iter().map(|part| part.len()).sum();
    if total == 0 {
        return Ok(0);
    }
    let mut parts = from;
    let mut patience = Patience::default();
    let mut done = 0;
    loop {
        match connection.send(process, fd, parts) {
            Ok(n) => {
                done += n;
                // A blocking send returns when all is sent, and so does no other.
                if done == total || patience.is_nonblocking(fd, flags) {
                    return Ok(done);
                }
                IoSlice::advance_slices(&mut parts, n);
            }
            Err(Errno::AGAIN) => {
                let waited = patience.wait(process, connection, fd, flags, Wanted::WRITE);
                if let Err(errno) = waited {
                    return if done > 0 { Ok(done) } else { Err(errno) };
                }
            }
            Err(_) if done > 0 => return Ok(done),
            Err(errno) => return Err(errno),
        }
    }
}

/// How long a call may wait, found out when it must.
#[derive(Default)]
struct Patience {
    nonblocking: Option<bool>,
    deadline: Option<Option<Instant>>,
}

impl Patience {
    fn is_nonblocking(&mut self, fd: RawFd, flags: i32) -> bool {
        flags & libc::MSG_DONTWAIT != 0 || *self.nonblocking.get_or_insert_with(|| kernel::is_nonblocking(fd))
    }

    fn wait(
        &mut self,
        process: &Process,
        connection: &Arc<Connection>,
        fd: RawFd,
        flags: i32,
        wanted: Wanted,
    ) -> Result<(), Errno> {
        if self.is_nonblocking(fd, flags) {
            return Err(Errno::AGAIN);
        }
        let send = wanted == Wanted::WRITE;
        let deadline = || {
            *self
                .deadline
                .get_or_insert_with(|| kernel::patience(fd, send).and_then(|left| Instant::now().checked_add(left)))
        };
        match wait::one(process, connection, fd, wanted, deadline) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Errno::AGAIN),
            // A call that has a time limit does not go on.
            Err(Errno::INTR) if matches!(self.deadline, None | Some(None)) && kernel::handlers_restart() => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}
