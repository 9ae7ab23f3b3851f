// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who connected, asked of the kernel.
//!
//! # Safety
//! This is the one call that the safe wrappers around it cannot make: the kernel says pid 0 of a peer in a pid namespace
//! that is not visible from here (the other container), and `rustix::net::UCred` holds a pid that may not be 0, so that
//! reading it there is undefined behaviour.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

const SOL_SOCKET: c_int =
    if cfg!(any(target_arch = "mips", target_arch = "mips64", target_arch = "sparc64")) { 0xffff } else { 1 };
const SO_PEERCRED: c_int = match () {
    () if cfg!(any(target_arch = "mips", target_arch = "mips64")) => 18,
    () if cfg!(any(target_arch = "powerpc", target_arch = "powerpc64")) => 21,
    () if cfg!(target_arch = "sparc64") => 0x40,
    () => 17,
};

/// `struct ucred`.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub(crate) struct Credentials {
    /// 0 where it cannot be seen from here.
    pub pid: u32,
    /// The overflow uid (65534) where it has no number here.
    pub uid: u32,
    pub gid: u32,
}

unsafe extern "C" {
    fn getsockopt(socket: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut u32) -> c_int;
}

/// Who called `connect` at, or `listen` behind, the other end of a connected `AF_UNIX` socket.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut credentials = Credentials::default();
    let mut len = size_of::<Credentials>() as u32;
    // SAFETY: (signature) as in POSIX, `socklen_t` being u32 on Linux; (value) `credentials` has `len` bytes, and any
    // bits are valid in it; (descriptor) borrowed, so open.
    let done =
        unsafe { getsockopt(socket.as_raw_fd(), SOL_SOCKET, SO_PEERCRED, (&raw mut credentials).cast(), &raw mut len) };
    if done == 0 { Ok(credentials) } else { Err(io::Error::last_os_error()) }
}
