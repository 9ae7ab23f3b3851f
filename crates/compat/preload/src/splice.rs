// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `splice` from and to connections: where they have shared memory, by way of a buffer. What the kernel moves before is counted.
//!
//! Why there is `unsafe`: the program's offsets come as pointers.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_uint, c_void},
    io::{IoSlice, IoSliceMut},
    sync::Arc,
    time::Duration,
};

use libc::{off_t, size_t, ssize_t};
use rustix::io::Errno;
use tombolo_sockets::{
    Process,
    connection::{Connection, Direction, Stage},
    proof::HISTORY,
};

use crate::{
    errno, flow, inside, kernel, poll, real, state,
    wait::{self, Wanted},
};

/// Bytes at once: what a pipe holds; and what has room in one that says that there is some (`PIPE_BUF`).
const MOST: usize = 64 << 10;
const PAGE: usize = 4096;

/// How the bytes of a call come to be moved.
enum How {
    /// By a buffer, so many at most: through shared memory, or as a proof wants the first ones (S-6).
    Copied(usize),
    /// By the kernel.
    Spliced,
}

fn how(process: &Process, connection: &Arc<Connection>, direction: Direction) -> How {
    flow::begin(process, connection);
    match connection.plain(direction) {
        None => How::Copied(MOST),
        Some(plain) if plain.remembers() => How::Copied(HISTORY),
        Some(_) => How::Spliced,
    }
}

/// The kernel moves the bytes, which are counted; none where the connection has come to be joined meanwhile.
fn spliced(
    process: &Process,
    connection: &Arc<Connection>,
    direction: Direction,
    real: impl FnOnce() -> ssize_t,
) -> Option<ssize_t> {
    flow::plainly(process, connection, direction, true, real, |plain, n| plain.moved_unseen(n))
}

/// Shows what has come, hands it on, and takes what was taken.
fn from_connection(
    process: &Process,
    connection: &Arc<Connection>,
    from: c_int,
    to: c_int,
    len: usize,
    flags: c_int,
) -> ssize_t {
    // Not on the stack, which may be a small one.
    let mut buffer = vec![0; len];
    let there = receive(process, connection, from, &mut buffer, flags | libc::MSG_PEEK);
    if there <= 0 {
        return there;
    }
    let written = write(to, &buffer[..there as usize], flags & libc::MSG_DONTWAIT != 0);
    if written > 0 {
        receive(process, connection, from, &mut buffer[..written as usize], libc::MSG_DONTWAIT | libc::MSG_WAITALL);
    }
    written
}

fn receive(process: &Process, connection: &Arc<Connection>, from: c_int, to: &mut [u8], flags: c_int) -> ssize_t {
    let (at, len) = (to.as_mut_ptr().cast::<c_void>(), to.len());
    // SAFETY: (valid) `to` is a slice, which the call of this library does not touch while the kernel's lasts.
    let real = || unsafe { real::recv(from, at, len, flags) };
    flow::receive(process, connection, from, Ok([IoSliceMut::new(to)]), flags, real)
}

/// Writes to a pipe what has room in it, by pages, each of which has room where the pipe says that it has some. Who would wait
/// does so for the first.
fn write(to: c_int, bytes: &[u8], at_once: bool) -> ssize_t {
    let mut done = 0;
    for part in bytes.chunks(PAGE) {
        if (at_once || done > 0) && !is_ready(to, libc::POLLOUT) {
            errno::set(libc::EAGAIN);
            return if done == 0 { -1 } else { done };
        }
        // SAFETY: (valid) the part is there for the call.
        let written = unsafe { real::write(to, part.as_ptr().cast::<c_void>(), part.len()) };
        if written < 0 {
            return if done == 0 { -1 } else { done };
        }
        done += written;
    }
    done
}

/// Whether a call on it would not wait: it can be done, or fails.
fn is_ready(fd: c_int, events: i16) -> bool {
    let mut one = [libc::pollfd { fd, events, revents: 0 }];
    !matches!(poll::kernel(&mut one, Some(Duration::ZERO), None), Ok(0))
}

/// Takes no more than there is room for, so that nothing is left over that could not be put back.
fn to_connection(
    process: &Process,
    connection: &Arc<Connection>,
    to: c_int,
    flags: c_int,
    most: usize,
    read: impl FnOnce(&mut [u8]) -> ssize_t,
) -> ssize_t {
    let mut buffer = vec![0; most];
    let patient = flags & libc::MSG_DONTWAIT == 0 && !kernel::is_nonblocking(to);
    while !has_room(process, connection, to) {
        if !patient {
            errno::set(libc::EAGAIN);
            return -1;
        }
        if let Err(errno) = wait_for_room(process, connection, to) {
            errno::set(errno.raw_os_error());
            return -1;
        }
    }
    let there = read(&mut buffer);
    if there <= 0 {
        return there;
    }
    let mut left = &buffer[..there as usize];
    while !left.is_empty() {
        // SAFETY: (valid) `left` is a slice.
        let real = || unsafe { real::send(to, left.as_ptr().cast::<c_void>(), left.len(), 0) };
        let sent = flow::send(process, connection, to, Ok([IoSlice::new(left)]), 0, real);
        if sent > 0 {
            left = &left[sent as usize..];
        } else if ![libc::EAGAIN, libc::EINTR].contains(&errno::get()) {
            return -1;
        } else {
            // What was taken from the pipe cannot be put back. A signal does not end this wait, which is short.
            let _ = wait_for_room(process, connection, to);
        }
    }
    there
}

fn wait_for_room(process: &Process, connection: &Arc<Connection>, fd: c_int) -> Result<(), Errno> {
    if connection.stage() == Stage::Joined {
        return wait::one(process, connection, fd, Wanted::WRITE, || None).map(drop);
    }
    let mut one = [libc::pollfd { fd, events: libc::POLLOUT, revents: 0 }];
    poll::kernel(&mut one, None, None).map(drop)
}

fn has_room(process: &Process, connection: &Connection, fd: c_int) -> bool {
    connection.is_writable().unwrap_or_else(|| process.kernel().poll(fd, libc::POLLOUT) & libc::POLLOUT != 0)
}

/// # Safety
/// As `splice(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_at: *mut off_t,
    to: c_int,
    to_at: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    let wait = if flags & libc::SPLICE_F_NONBLOCK != 0 { libc::MSG_DONTWAIT } else { 0 };
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::splice(from, from_at, to, to_at, len, flags) };
    let Some(process) = state::busy().filter(|_| !inside::has_interrupted()) else { return real() };
    // A connection has no offset, and the pipe at the other end has none.
    if !from_at.is_null() || !to_at.is_null() || len == 0 {
        return real();
    }
    if let Some(connection) = state::connection(from) {
        if !is_pipe(to) {
            return real(); // Which the kernel refuses.
        }
        return match how(process, &connection, Direction::In) {
            How::Copied(most) => from_connection(process, &connection, from, to, len.min(most), wait),
            How::Spliced => spliced(process, &connection, Direction::In, real)
                .unwrap_or_else(|| from_connection(process, &connection, from, to, len.min(MOST), wait)),
        };
    }
    if let Some(connection) = state::connection(to) {
        if !is_pipe(from) {
            return real();
        }
        let copied = |most: usize| {
            to_connection(process, &connection, to, wait, len.min(most), |buffer| {
                if wait != 0 && !is_ready(from, libc::POLLIN) {
                    errno::set(libc::EAGAIN);
                    return -1;
                }
                // SAFETY: (valid) the buffer is a slice.
                unsafe { real::read(from, buffer.as_mut_ptr().cast::<c_void>(), buffer.len()) }
            })
        };
        return match how(process, &connection, Direction::Out) {
            How::Copied(most) => copied(most),
            How::Spliced => spliced(process, &connection, Direction::Out, real).unwrap_or_else(|| copied(MOST)),
        };
    }
    real()
}

fn is_pipe(fd: c_int) -> bool {
    let found = errno::kept(|| rustix::fs::fstat(kernel::borrow(fd)));
    found.is_ok_and(|found| rustix::fs::FileType::from_raw_mode(found.st_mode) == rustix::fs::FileType::Fifo)
}
