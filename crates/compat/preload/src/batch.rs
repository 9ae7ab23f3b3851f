// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exported calls that are several calls in one, and calls with flags: `recvmmsg`, `sendmmsg`, `preadv2`, `pwritev2`.
//!
//! `unsafe` is needed because the program passes its arrays as pointers.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_uint},
    ptr, slice,
    time::Instant,
};

use libc::{iovec, mmsghdr, msghdr, off_t, ssize_t, timespec};
use rustix::io::Errno;
use tombolo_sockets::connection::Stage;

use crate::{data, errno, handback, poll, real, state};

/// Returns whether `fd` is a connection whose bytes are counted or go another way.
fn is_watched(fd: c_int) -> bool {
    state::busy().is_some() && state::connection(fd).is_some_and(|connection| connection.stage() != Stage::Plain)
}

/// Calls `one` for each message until it fails or ends the call. `one` returns what it moved, and whether another
/// message may follow.
///
/// # Safety
/// `count` messages at `messages`, the caller's for the call, or null.
unsafe fn each(
    messages: *mut mmsghdr,
    count: c_uint,
    mut one: impl FnMut(usize, &mut msghdr) -> (ssize_t, bool),
) -> c_int {
    if messages.is_null() || count == 0 {
        return 0;
    }
    // SAFETY: (valid) the caller's promise; the kernel as well looks at no more than 1024.
    let messages = unsafe { slice::from_raw_parts_mut(messages, count.min(1024) as usize) };
    for (at, message) in messages.iter_mut().enumerate() {
        let (done, goes_on) = one(at, &mut message.msg_hdr);
        if done < 0 {
            return if at == 0 { -1 } else { at as c_int };
        }
        message.msg_len = done as c_uint;
        if !goes_on {
            return at as c_int + 1;
        }
    }
    messages.len() as c_int
}

/// # Safety
/// As `recvmmsg(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    // SAFETY: (contract) null or a time.
    let limit = poll::duration(unsafe { timeout.as_ref() });
    let (true, Ok(limit)) = (is_watched(fd), limit) else {
        // SAFETY: (contract) the caller's promise.
        return unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
    };
    // An error comes before all that is there: the kernel looks for one before the first message.
    // SAFETY: (valid) no message, and no time.
    if unsafe { real::recvmmsg(fd, messages, 0, flags, ptr::null_mut()) } < 0 {
        return -1;
    }
    let begun = Instant::now();
    let receive = |at: usize, message: &mut msghdr| {
        let wait = if at > 0 && flags & libc::MSG_WAITFORONE != 0 { libc::MSG_DONTWAIT } else { 0 };
        // SAFETY: (contract) the caller's promise, for each message.
        let got = unsafe { data::recvmsg(fd, message, flags & !libc::MSG_WAITFORONE | wait) };
        if got < 0 && at > 0 {
            store_error(fd);
        }
        // As in the kernel, the time is checked after each message, and what is left of it is reported.
        let Some(limit) = limit.filter(|_| got >= 0) else { return (got, true) };
        let left = limit.saturating_sub(begun.elapsed());
        let said = timespec { tv_sec: left.as_secs() as libc::time_t, tv_nsec: left.subsec_nanos().into() };
        // SAFETY: (valid) there is a limit, so the caller gave a time of its own.
        unsafe { timeout.write(said) };
        (got, !left.is_zero())
    };
    // SAFETY: (valid) the caller's promise.
    unsafe { each(messages, count, receive) }
}

/// Stores the error of a message after the first, for the next call to report.
fn store_error(fd: c_int) {
    let error = Errno::from_raw_os_error(errno::get());
    if error != Errno::AGAIN
        && let Some(connection) = state::connection(fd)
    {
        errno::kept(|| connection.pipes.store_error(error));
    }
}

/// Returns the number of bytes in a message that the kernel, or this library, has taken.
///
/// # Safety
/// As `sendmsg(2)`.
unsafe fn len_of(message: &msghdr) -> usize {
    let parts = match message.msg_iovlen {
        0 => &[],
        // SAFETY: (valid) the caller's promise.
        count => unsafe { slice::from_raw_parts(message.msg_iov, count) },
    };
    parts.iter().map(|part| part.iov_len).sum()
}

/// # Safety
/// As `sendmmsg(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    if !is_watched(fd) {
        // SAFETY: (contract) the caller's promise.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    let send = |_, message: &mut msghdr| {
        // SAFETY: (contract) the caller's promise, for each message.
        let sent = unsafe { data::sendmsg(fd, message, flags) };
        // Whatever follows a message that was sent in part would take the place of its rest.
        // SAFETY: (valid) the message was good enough to be sent.
        (sent, sent >= 0 && sent as usize == unsafe { len_of(message) })
    };
    // SAFETY: (valid) the caller's promise.
    unsafe { each(messages, count, send) }
}

/// Flags of `preadv2` that mean nothing to a socket, which accepts them nevertheless.
const MEANINGLESS: c_int = libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_APPEND;

/// Returns what flags of `preadv2` mean for a socket, if it accepts them and `fd` is one. Any other flags are left to
/// the kernel.
fn socket_flags(fd: c_int, count: c_int, offset: off_t, flags: c_int) -> Option<c_int> {
    if offset != -1 || !(1..=1024).contains(&count) || !is_watched(fd) {
        return None;
    }
    if flags & !(libc::RWF_NOWAIT | MEANINGLESS) != 0 {
        handback::bypassed(fd);
        return None;
    }
    Some(if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 })
}

fn header(parts: *const iovec, count: c_int) -> msghdr {
    // SAFETY: (valid) all zeros is an empty message header.
    let mut header: msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = parts.cast_mut();
    header.msg_iovlen = count as usize;
    header
}

/// # Safety
/// As `preadv2(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    match socket_flags(fd, count, offset, flags) {
        // SAFETY: (contract) the caller's promise, by a header of our own.
        Some(flags) => unsafe { data::recvmsg(fd, &mut header(parts, count), flags) },
        // SAFETY: (contract) the caller's promise.
        None => unsafe { real::preadv2(fd, parts, count, offset, flags) },
    }
}

/// # Safety
/// As `pwritev2(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    match socket_flags(fd, count, offset, flags) {
        // SAFETY: (contract) the caller's promise, by a header of our own.
        Some(flags) => unsafe { data::sendmsg(fd, &header(parts, count), flags) },
        // SAFETY: (contract) the caller's promise.
        None => unsafe { real::pwritev2(fd, parts, count, offset, flags) },
    }
}

/// # Safety
/// As `preadv2(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv64v2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    unsafe { preadv2(fd, parts, count, offset, flags) }
}

/// # Safety
/// As `pwritev2(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev64v2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    unsafe { pwritev2(fd, parts, count, offset, flags) }
}
