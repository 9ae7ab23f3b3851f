// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A program that shuts itself in (`seccomp`) says which calls it will make, and may be killed for any other. So before that all
//! goes back to the kernel, and stays there.
//!
//! Why there is `unsafe`: the arguments come as the program gave them, and go on to the real call.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_long, c_ulong};

use tombolo_sockets::{Reason, connection::Stage};

use crate::{epoll::wiring, errno, handback, inside, real, state};

/// # Safety
/// As `prctl(2)`; no option has more than four arguments.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    if option == libc::PR_SET_SECCOMP {
        errno::kept(shut_in);
    }
    // SAFETY: (contract) the caller's promise.
    unsafe { real::prctl(option, a, b, c, d) }
}

/// `seccomp`, which has no function.
pub(crate) fn seccomp(operation: c_long, real: impl FnOnce() -> c_long) -> c_long {
    if matches!(operation as u32, libc::SECCOMP_SET_MODE_STRICT | libc::SECCOMP_SET_MODE_FILTER) {
        errno::kept(shut_in);
    }
    real()
}

/// The program has made something that reads and writes sockets past this library.
pub(crate) fn shut_in_if_made_here() {
    if !inside::has_interrupted() {
        errno::kept(shut_in);
    }
}

fn shut_in() {
    if !state::is_owner() {
        return; // A child of vfork, whose descriptors are not those of the table.
    }
    if let Some(process) = state::busy() {
        let all = state::connections().into_iter().filter(|(_, one)| one.stage() != Stage::Plain).collect::<Vec<_>>();
        handback::hand_over_all(process, &all, Reason::Usage);
        wiring::give_back();
        process.end();
    }
    state::shut();
}
