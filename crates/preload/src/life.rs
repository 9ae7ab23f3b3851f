// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `fork`, `exec`, and the end of the process.
//!
//! Why there is `unsafe`: these are libc's functions, with a program's pointers.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};

use libc::pid_t;
use tombolo::sockets::{Reason, connection::Stage};

use crate::{control, errno, real, state};

/// # Safety
/// As `fork(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> pid_t {
    let Some(process) = state::busy().filter(|_| state::is_owner()) else {
        // SAFETY: (contract) the caller's promise.
        return unsafe { real::fork() };
    };
    // Two processes will use what is open now.
    let all = errno::kept(state::connections);
    errno::kept(|| all.iter().for_each(|(_, connection)| connection.share(process.kernel())));
    let locks = (process.pause(), all.iter().map(|(_, connection)| connection.hold()).collect::<Vec<_>>());
    // SAFETY: (contract) the caller's promise.
    let child = unsafe { real::fork() };
    drop(locks);
    if child > 0 {
        errno::kept(|| {
            // What has moved bytes may go on in either process; what has not is the child's, as servers have it that
            // fork for each caller.
            all.iter().for_each(|(_, connection)| process.stays(connection, Reason::Shared));
            state::forget_fresh();
        });
    }
    if child == 0 {
        errno::kept(|| {
            state::set_owner();
            process.forked();
            all.iter().for_each(|(_, connection)| connection.inherit());
        });
    }
    child
}

/// This program's image goes: what it inherited to the next must be on TCP.
fn leaving() {
    let Some(process) = state::busy().filter(|_| state::is_owner()) else { return };
    errno::kept(|| {
        for (fd, connection) in state::connections() {
            let stays = rustix::io::fcntl_getfd(crate::kernel::borrow(fd))
                .is_ok_and(|flags| !flags.contains(rustix::io::FdFlags::CLOEXEC));
            if stays && connection.stage() == Stage::Joined {
                control::take_back(process, fd, &connection, Reason::Shared);
            }
        }
        process.end();
    });
}

/// # Safety
/// As `execve(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    leaving();
    // SAFETY: (contract) the caller's promise.
    unsafe { real::execve(path, arguments, environment) }
}

/// # Safety
/// As `execv(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, arguments: *const *const c_char) -> c_int {
    leaving();
    // SAFETY: (contract) the caller's promise.
    unsafe { real::execv(path, arguments) }
}

/// # Safety
/// As `execvp(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(file: *const c_char, arguments: *const *const c_char) -> c_int {
    leaving();
    // SAFETY: (contract) the caller's promise.
    unsafe { real::execvp(file, arguments) }
}

/// # Safety
/// As `_exit(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    end();
    // SAFETY: (contract) the caller's promise.
    unsafe { real::_exit(status) }
}

/// The process ends in order.
extern "C" fn end() {
    if let Some(process) = state::busy().filter(|_| state::is_owner()) {
        process.end();
    }
}

// SAFETY: (type) the loader calls what stands in this section without arguments when the process exits.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;
