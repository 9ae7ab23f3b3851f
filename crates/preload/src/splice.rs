// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `splice` from and to connections that have shared memory: by way of a buffer.
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
use tombolo::sockets::{
    Process,
    connection::{Connection, Stage},
};

use crate::{
    errno, flow, kernel, poll, real, state,
    wait::{self, Wanted},
};

/// Bytes at once: what a pipe holds; and what has room in one that says that there is some (`PIPE_BUF`).
const MOST: usize = 64 << 10;
const PAGE: usize = 4096;

fn joined(fd: c_int) -> Option<(&'static Process, Arc<Connection>)> {
    let (process, connection) = (state::busy()?, state::connection(fd)?);
    flow::begin(process, &connection);
    (connection.stage() == Stage::Joined).then_some((process, connection))
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
    let mut buffer = vec![0; len.min(MOST)];
    let shown = Ok([IoSliceMut::new(&mut buffer)]);
    let there = flow::receive(process, connection, from, shown, flags | libc::MSG_PEEK, || -1);
    if there <= 0 {
        return there;
    }
    let written = write(to, &buffer[..there as usize], flags & libc::MSG_DONTWAIT != 0);
    if written > 0 {
        let taken = Ok([IoSliceMut::new(&mut buffer[..written as usize])]);
        flow::receive(process, connection, from, taken, libc::MSG_DONTWAIT | libc::MSG_WAITALL, || -1);
    }
    written
}

/// Writes to a pipe. Who would not wait writes by pages, each of which has room where the pipe says that it has some.
fn write(to: c_int, bytes: &[u8], at_once: bool) -> ssize_t {
    let mut done = 0;
    for part in bytes.chunks(if at_once { PAGE } else { MOST }) {
        if at_once && !is_ready(to, libc::POLLOUT) {
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
    read: impl FnOnce(&mut [u8]) -> ssize_t,
) -> ssize_t {
    let mut buffer = vec![0; MOST];
    let patient = flags & libc::MSG_DONTWAIT == 0 && !kernel::is_nonblocking(to);
    while !has_room(process, connection, to) {
        if !patient {
            errno::set(libc::EAGAIN);
            return -1;
        }
        if let Err(errno) = wait::one(process, connection, to, Wanted::WRITE, || None) {
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
        let sent = flow::send(process, connection, to, Ok([IoSlice::new(left)]), 0, || -1);
        if sent > 0 {
            left = &left[sent as usize..];
        } else if errno::get() != libc::EAGAIN {
            return -1;
        } else {
            // What was taken from the pipe cannot be put back. A signal does not end this wait, which is short.
            let _ = wait::one(process, connection, to, Wanted::WRITE, || None);
        }
    }
    there
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
    // A connection has no offset, and the pipe at the other end has none.
    if from_at.is_null() && to_at.is_null() && len > 0 {
        if let Some((process, connection)) = joined(from) {
            return from_connection(process, &connection, from, to, len, wait);
        }
        if let Some((process, connection)) = joined(to) {
            return to_connection(process, &connection, to, wait, |buffer| {
                if wait != 0 && !is_ready(from, libc::POLLIN) {
                    errno::set(libc::EAGAIN);
                    return -1;
                }
                // SAFETY: (valid) the buffer has at least so many bytes.
                unsafe { real::read(from, buffer.as_mut_ptr().cast::<c_void>(), len.min(buffer.len())) }
            });
        }
    }
    // SAFETY: (contract) the caller's promise.
    unsafe { real::splice(from, from_at, to, to_at, len, flags) }
}
