// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exported calls that read and write later (`io_submit`, POSIX `aio`). The kernel or libc's own threads carry them
//! out, past this library. The sockets that they use go back to TCP first, permanently.
//!
//! `unsafe` is needed because requests come as pointers.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_long, c_void};

use crate::{errno, handback::bypassed, real, state};

/// Offset of the descriptor in a `struct iocb` (`linux/aio_abi.h`).
const FILDES: usize = 20;

/// Moves the sockets of `count` requests to TCP, before the kernel is given the requests.
///
/// # Safety
/// As `io_submit(2)`.
pub(crate) unsafe fn submitting(count: c_long, requests: *const *const c_void) {
    if state::busy().is_none() || requests.is_null() {
        return;
    }
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: (in bounds) the caller promises so many.
        let place = unsafe { requests.add(at) };
        // SAFETY: (valid) as above.
        let request = unsafe { place.read() };
        if !request.is_null() {
            // SAFETY: (in bounds) a request is longer.
            let fd = unsafe { request.cast::<u8>().add(FILDES) };
            // SAFETY: (valid) its descriptor stands there.
            bypassed(unsafe { fd.cast::<c_int>().read_unaligned() });
        }
    }
}

/// Submits requests as libaio does: an error is in the result, and not in `errno`.
///
/// # Safety
/// As `io_submit(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_submit(context: *mut c_void, count: c_long, requests: *mut *mut c_void) -> c_int {
    // SAFETY: (contract) the caller's promise.
    unsafe { submitting(count, requests.cast_const().cast()) };
    let before = errno::get();
    // SAFETY: (contract) the caller's promise.
    let answer = unsafe { real::syscall(libc::SYS_io_submit, context as c_long, count, requests as c_long, 0, 0, 0) };
    if answer >= 0 {
        return answer as c_int;
    }
    let errno = errno::get();
    errno::set(before);
    -errno
}

macro_rules! one {
    ($($name:ident)*) => {$(
        /// # Safety
        /// As `aio_read(3)`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(request: *mut libc::aiocb) -> c_int {
            // SAFETY: (valid) null, or the caller's request.
            if let Some(request) = unsafe { request.as_ref() } {
                bypassed(request.aio_fildes);
            }
            // SAFETY: (contract) the caller's promise.
            unsafe { real::$name(request) }
        }
    )*};
}

one! { aio_read aio_read64 aio_write aio_write64 }

macro_rules! list {
    ($($name:ident)*) => {$(
        /// # Safety
        /// As `lio_listio(3)`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            mode: c_int,
            requests: *const *mut libc::aiocb,
            count: c_int,
            event: *mut c_void,
        ) -> c_int {
            for at in 0..usize::try_from(count).unwrap_or(0) {
                // SAFETY: (in bounds) the caller promises so many.
                let place = unsafe { requests.add(at) };
                // SAFETY: (valid) as above.
                let request = unsafe { place.read() };
                // SAFETY: (valid) null, or the caller's request.
                if let Some(request) = unsafe { request.as_ref() } {
                    bypassed(request.aio_fildes);
                }
            }
            // SAFETY: (contract) the caller's promise.
            unsafe { real::$name(mode, requests, count, event) }
        }
    )*};
}

list! { lio_listio lio_listio64 }
