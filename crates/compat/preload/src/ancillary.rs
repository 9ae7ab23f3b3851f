// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes the ancillary data (`cmsg(3)`) that `recvmsg` reports beside bytes that came through shared memory.
//!
//! The number of bytes left (`TCP_INQ`) is reported as the kernel reports it, for both transports together. Only the
//! kernel knows when bytes came: a program that asks for that (`SO_TIMESTAMP`) gets its bytes over TCP from the peer's
//! next call on.
//!
//! `unsafe` is needed because the program passes the room for such messages as a pointer.
#![allow(unsafe_code)]

use std::{ffi::c_int, ptr, sync::Arc};

use libc::{cmsghdr, msghdr};
use tombolo_sockets::{
    Process, Reason,
    connection::{Connection, Set, Stage},
};

use crate::{errno, handback, kernel};

/// Asks for TCP before a call that has room for ancillary data, if the program wants to know when bytes came.
pub(crate) fn leave_for_arrivals(process: &Process, connection: &Arc<Connection>, fd: c_int, header: &msghdr) {
    let asks = !header.msg_control.is_null() && header.msg_controllen > 0;
    if asks && connection.has_set(Set::Arrival, || kernel::says_arrival(fd)) {
        errno::kept(|| handback::ask_for_tcp(process, fd, connection, Reason::Usage));
    }
}

/// Writes what a call reports that the kernel did not carry out, and cuts the header's length of that room to what is
/// used.
///
/// # Safety
/// The room for such messages that `header` names is the caller's to be written.
pub(crate) unsafe fn write_ancillary(process: &Process, connection: &Connection, fd: c_int, header: &mut msghdr) {
    let mut rest = None;
    if connection.stage() == Stage::Joined && connection.has_set(Set::Rest, || kernel::says_rest(fd)) {
        rest = Some(count_bytes_left(process, connection, fd));
    }
    // SAFETY: (contract) the caller's promise.
    header.msg_controllen = rest.map_or(0, |rest| unsafe { write_bytes_left(header, rest) });
}

/// Counts bytes as the kernel does: the end of the stream adds one.
fn count_bytes_left(process: &Process, connection: &Connection, fd: c_int) -> c_int {
    let bytes = errno::kept(|| connection.unread()) + kernel::unread(fd);
    let has_ended = process.kernel().poll(fd, libc::POLLRDHUP) & libc::POLLRDHUP != 0;
    c_int::try_from(bytes + u64::from(has_ended)).unwrap_or(c_int::MAX)
}

/// Writes one message with `rest`, cut as the kernel cuts it where there is not enough room. Returns how much room it
/// took.
///
/// # Safety
/// As for [`write_ancillary`].
unsafe fn write_bytes_left(header: &mut msghdr, rest: c_int) -> usize {
    const WORD: usize = size_of::<usize>();
    const LEN: usize = size_of::<cmsghdr>() + size_of::<c_int>();
    let room = header.msg_controllen;
    if header.msg_control.is_null() || room < LEN {
        header.msg_flags |= libc::MSG_CTRUNC;
    }
    if header.msg_control.is_null() || room < size_of::<cmsghdr>() {
        return 0;
    }
    let len = LEN.min(room);
    // The fields of `cmsghdr`, in its order, then the number.
    let mut message = [0; LEN];
    message[..WORD].copy_from_slice(&len.to_ne_bytes());
    for (at, field) in [libc::IPPROTO_TCP, libc::TCP_INQ, rest].into_iter().enumerate() {
        message[WORD + 4 * at..][..4].copy_from_slice(&field.to_ne_bytes());
    }
    // SAFETY: (valid) no more than there is room for.
    unsafe { ptr::copy_nonoverlapping(message.as_ptr(), header.msg_control.cast::<u8>(), len) };
    LEN.next_multiple_of(WORD).min(room)
}
