// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Gives everything back to the kernel before a program confines itself (`seccomp`). Such a program declares which
//! calls it will make, and may be killed for any other. So everything stays with the kernel from then on.
//!
//! `unsafe` is needed because the arguments come as the program passed them, and go on to the real call.
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

/// Carries out `seccomp`, which has no function in libc.
pub(crate) fn seccomp(operation: c_long, real: impl FnOnce() -> c_long) -> c_long {
    if matches!(operation as u32, libc::SECCOMP_SET_MODE_STRICT | libc::SECCOMP_SET_MODE_FILTER) {
        errno::kept(shut_in);
    }
    real()
}

/// Gives everything back to the kernel, because the program has made something that reads and writes sockets past this
/// library.
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
