// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads and sets `errno`, which some calls must leave behind and others must not change.
#![allow(unsafe_code)]

use rustix::io::Errno;

use crate::inside;

fn place() -> *mut i32 {
    // SAFETY: (contract) the function has none: every thread has an errno.
    unsafe { libc::__errno_location() }
}

/// Returns the thread's `errno`.
pub(crate) fn get() -> i32 {
    // SAFETY: (valid) it is this thread's own, and lives as long as the thread.
    unsafe { place().read() }
}

/// Sets the thread's `errno`.
pub(crate) fn set(errno: i32) {
    // SAFETY: (valid) as above.
    unsafe { place().write(errno) }
}

/// Calls `f`, which may take locks, and leaves `errno` as it was.
pub(crate) fn kept<T>(f: impl FnOnce() -> T) -> T {
    let errno = get();
    let result = {
        let _inside = inside::enter();
        f()
    };
    set(errno);
    result
}

/// Converts a result to what a call returns, and sets `errno` if it is an error.
pub(crate) fn answer(result: Result<usize, Errno>) -> isize {
    match result {
        Ok(n) => n as isize,
        Err(errno) => {
            set(errno.raw_os_error());
            -1
        }
    }
}

/// Converts what a call returned to a result.
pub(crate) fn result(answer: isize) -> Result<usize, Errno> {
    usize::try_from(answer).map_err(|_| Errno::from_raw_os_error(get()))
}
