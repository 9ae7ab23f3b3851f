// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handles `TCP_ZEROCOPY_RECEIVE`, by which the kernel maps what it has received into the program's memory, past this
//! library.
//!
//! For a connection that has shared memory, or may get some, nothing is mapped. The program is told how much it is to
//! read instead, as the kernel tells it of what fills no page.
//!
//! `unsafe` is needed because the program's request and the answer are in memory that a pointer names.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use libc::socklen_t;
use tombolo_sockets::connection::Stage;

use crate::{errno, inside, kernel, real, state};

/// Option of `linux/tcp.h`, which also has what follows.
const ZEROCOPY_RECEIVE: c_int = 35;
/// Words of `struct tcp_zerocopy_receive`, in its order: how much is to be mapped, or was; how much is to be read; how
/// much there is; an error; and, after an address, how much may be copied.
const LENGTH: usize = 2;
const TO_READ: usize = 3;
const THERE: usize = 4;
const ERROR: usize = 5;
const COPIED: usize = 8;

/// # Safety
/// As `getsockopt(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::getsockopt(fd, level, name, value, len) };
    let asks = (level, name) == (libc::IPPROTO_TCP, ZEROCOPY_RECEIVE) && !value.is_null() && !len.is_null();
    if !asks || state::busy().is_none() || inside::has_interrupted() {
        return real();
    }
    let Some(connection) = state::connection(fd).filter(|connection| connection.stage() != Stage::Plain) else {
        return real();
    };
    // SAFETY: (valid) the caller says there how much room there is, aligned or not.
    let words = unsafe { len.read_unaligned() } as usize / size_of::<u32>();
    if words <= TO_READ {
        return real(); // The kernel refuses this.
    }
    let store = |word: usize, number: u32| {
        if word < words {
            // SAFETY: (in bounds) the caller says that there is room for so many words.
            let place = unsafe { value.cast::<u32>().add(word) };
            // SAFETY: (valid) as above, aligned or not.
            unsafe { place.write_unaligned(number) };
        }
    };
    store(LENGTH, 0);
    store(COPIED, 0);
    let there = errno::kept(|| connection.unread()) + kernel::unread(fd);
    if there == 0 {
        return real(); // The kernel reports whether that is the end.
    }
    let there = u32::try_from(there).unwrap_or(u32::MAX);
    store(TO_READ, there);
    store(THERE, there);
    store(ERROR, 0);
    0
}
