// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal names of libc's functions that other libraries are bound to.
//!
//! `unsafe` is needed as in the functions that they name.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_long, c_uint, c_void};

use libc::{fd_set, nfds_t, pid_t, pollfd, size_t, sockaddr, socklen_t, ssize_t, timeval};

use crate::{control, data, life, poll};

macro_rules! aliases {
    ($($alias:ident = $function:path: ($($arg:ident: $type:ty),*) -> $result:ty;)*) => {$(
        /// # Safety
        /// As the function without underscores.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $alias($($arg: $type),*) -> $result {
            // SAFETY: (contract) the caller's promise.
            unsafe { $function($($arg),*) }
        }
    )*};
}

aliases! {
    __read = data::read: (fd: c_int, to: *mut c_void, len: size_t) -> ssize_t;
    __write = data::write: (fd: c_int, from: *const c_void, len: size_t) -> ssize_t;
    __send = data::send: (fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    __connect = control::connect: (fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    __close = control::close: (fd: c_int) -> c_int;
    __dup2 = control::dup2: (fd: c_int, to: c_int) -> c_int;
    __fcntl = control::fcntl: (fd: c_int, command: c_int, argument: c_long) -> c_int;
    __poll = poll::poll: (fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    __select = poll::select: (count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int;
    __fork = life::fork: () -> pid_t;
}

/// # Safety
/// As `closefrom(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn closefrom(first: c_int) {
    // SAFETY: (contract) the caller's promise.
    unsafe { control::close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}
