// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Calls that are several calls in one, and calls with flags: `recvmmsg`, `sendmmsg`, `preadv2`, `pwritev2`.
//!
//! Why there is `unsafe`: the program's arrays come as pointers.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_uint},
    slice,
    time::Instant,
};

use libc::{iovec, mmsghdr, msghdr, off_t, ssize_t, timespec};
use tombolo_sockets::connection::Stage;

use crate::{data, poll, real, state};

/// Whether `fd` is a connection whose bytes are counted or go another way.
fn is_watched(fd: c_int) -> bool {
    state::busy().is_some() && state::connection(fd).is_some_and(|connection| connection.stage() != Stage::Plain)
}

/// Does `one` for each message, as far as it goes; what fails after the first is said by the next call.
///
/// # Safety
/// `count` messages at `messages`, the caller's for the call, or null.
unsafe fn each(messages: *mut mmsghdr, count: c_uint, mut one: impl FnMut(usize, &mut msghdr) -> ssize_t) -> c_int {
    if messages.is_null() || count == 0 {
        return 0;
    }
    // SAFETY: (valid) the caller's promise; the kernel as well looks at no more than 1024.
    let messages = unsafe { slice::from_raw_parts_mut(messages, count.min(1024) as usize) };
    for (at, message) in messages.iter_mut().enumerate() {
        let done = one(at, &mut message.msg_hdr);
        if done < 0 {
            return if at == 0 { -1 } else { at as c_int };
        }
        message.msg_len = done as c_uint;
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
    let begun = Instant::now();
    let receive = |at: usize, message: &mut msghdr| {
        // As the kernel does, the time is looked at after each message.
        if at > 0 && limit.is_some_and(|limit| begun.elapsed() >= limit) {
            return -1;
        }
        let wait = if at > 0 && flags & libc::MSG_WAITFORONE != 0 { libc::MSG_DONTWAIT } else { 0 };
        // SAFETY: (contract) the caller's promise, for each message.
        unsafe { data::recvmsg(fd, message, flags & !libc::MSG_WAITFORONE | wait) }
    };
    // SAFETY: (valid) the caller's promise.
    unsafe { each(messages, count, receive) }
}

/// # Safety
/// As `sendmmsg(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    if !is_watched(fd) {
        // SAFETY: (contract) the caller's promise.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    // SAFETY: (contract) the caller's promise, for each message.
    let send = |_, message: &mut msghdr| unsafe { data::sendmsg(fd, message, flags) };
    // SAFETY: (valid) the caller's promise.
    unsafe { each(messages, count, send) }
}

/// What flags of `preadv2` mean for a socket, if it can have them and is one.
fn socket_flags(fd: c_int, count: c_int, offset: off_t, flags: c_int) -> Option<c_int> {
    let known = flags & !(libc::RWF_NOWAIT | libc::RWF_HIPRI) == 0;
    let wait = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
    (offset == -1 && (1..=1024).contains(&count) && known && is_watched(fd)).then_some(wait)
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
