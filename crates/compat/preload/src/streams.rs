// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handles standard I/O on a connection, which reads, writes and closes within libc, past this library.
//!
//! `unsafe` is needed because streams and names come as the program passed them, and go on to the real call.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};

use libc::FILE;

use crate::{closing, errno, handback::bypassed, real, state};

/// Moves `fd` to TCP, because standard I/O reads and writes it past this library.
///
/// # Safety
/// As `fdopen(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    bypassed(fd);
    // SAFETY: (contract) the caller's promise.
    unsafe { real::fdopen(fd, mode) }
}

/// Handles the descriptor of a stream that is about to close it.
///
/// # Safety
/// It is null or a stream that is open.
unsafe fn closing(stream: *mut FILE) {
    if stream.is_null() {
        return;
    }
    // SAFETY: (contract) the caller's promise.
    let fd = errno::kept(|| unsafe { libc::fileno(stream) });
    if state::is_known(fd) {
        // SAFETY: (contract) the caller's promise. What is left in it goes before the end.
        errno::kept(|| unsafe { libc::fflush(stream) });
        closing::close_watched(fd);
    }
}

/// # Safety
/// As `fclose(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fclose(stream: *mut FILE) -> c_int {
    // SAFETY: (contract) the caller's promise.
    unsafe { closing(stream) };
    // SAFETY: (contract) the caller's promise.
    unsafe { real::fclose(stream) }
}

/// # Safety
/// As `freopen(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
    // SAFETY: (contract) the caller's promise.
    unsafe { closing(stream) };
    // SAFETY: (contract) the caller's promise.
    unsafe { real::freopen(path, mode, stream) }
}

/// # Safety
/// As `freopen(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
    // SAFETY: (contract) the caller's promise.
    unsafe { freopen(path, mode, stream) }
}
