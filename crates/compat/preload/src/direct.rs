// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports `syscall`, by which some programs make calls that have functions of their own; libuv closes its descriptors
//! so. Such calls do here what the functions do. All other numbers go on unchanged.
//!
//! `unsafe` is needed because arguments come as words, and are what the manual page of the number's call says.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_long, c_uint, c_ulong};

use libc::{nfds_t, size_t, socklen_t};

use crate::{asynchronous, batch, confine, control, data, life, mapped, poll, real, splice};

/// # Safety
/// As `syscall(2)`. A caller that passes fewer arguments leaves whatever there is in their places, which nobody reads.
#[unsafe(no_mangle)]
#[rustfmt::skip]
pub unsafe extern "C-unwind" fn syscall(
    number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long,
) -> c_long {
    /// Calls one of this library's functions, with as many of the words as it has arguments, each as its type.
    macro_rules! call {
        ($function:path, $($word:ident: $type:ty),*) => {
            // SAFETY: (contract) the caller's promise: these are the arguments of that call.
            c_long::from(unsafe { $function($($word as $type),*) } as i64)
        };
    }
    let fd = a;
    match number {
        libc::SYS_read => call!(data::read, fd: c_int, b: *mut _, c: size_t),
        libc::SYS_write => call!(data::write, fd: c_int, b: *const _, c: size_t),
        libc::SYS_readv => call!(data::readv, fd: c_int, b: *const _, c: c_int),
        libc::SYS_writev => call!(data::writev, fd: c_int, b: *const _, c: c_int),
        libc::SYS_recvfrom => call!(data::recvfrom, fd: c_int, b: *mut _, c: size_t, d: c_int, e: *mut _, f: *mut _),
        libc::SYS_sendto => call!(data::sendto, fd: c_int, b: *const _, c: size_t, d: c_int, e: *const _, f: socklen_t),
        libc::SYS_recvmsg => call!(data::recvmsg, fd: c_int, b: *mut _, c: c_int),
        libc::SYS_sendmsg => call!(data::sendmsg, fd: c_int, b: *const _, c: c_int),
        libc::SYS_recvmmsg => call!(batch::recvmmsg, fd: c_int, b: *mut _, c: c_uint, d: c_int, e: *mut _),
        libc::SYS_sendmmsg => call!(batch::sendmmsg, fd: c_int, b: *mut _, c: c_uint, d: c_int),
        // The offset is two words, of which the second is empty where one word can hold it.
        libc::SYS_preadv2 => call!(batch::preadv2, fd: c_int, b: *const _, c: c_int, d: libc::off_t, f: c_int),
        libc::SYS_pwritev2 => call!(batch::pwritev2, fd: c_int, b: *const _, c: c_int, d: libc::off_t, f: c_int),
        libc::SYS_sendfile => call!(data::sendfile, fd: c_int, b: c_int, c: *mut _, d: size_t),
        libc::SYS_splice => call!(splice::splice, fd: c_int, b: *mut _, c: c_int, d: *mut _, e: size_t, f: c_uint),
        libc::SYS_socket => call!(control::socket, a: c_int, b: c_int, c: c_int),
        libc::SYS_connect => call!(control::connect, fd: c_int, b: *const _, c: socklen_t),
        libc::SYS_accept => call!(control::accept, fd: c_int, b: *mut _, c: *mut _),
        libc::SYS_accept4 => call!(control::accept4, fd: c_int, b: *mut _, c: *mut _, d: c_int),
        libc::SYS_shutdown => call!(control::shutdown, fd: c_int, b: c_int),
        libc::SYS_setsockopt => call!(control::setsockopt, fd: c_int, b: c_int, c: c_int, d: *const _, e: socklen_t),
        libc::SYS_getsockopt => call!(mapped::getsockopt, fd: c_int, b: c_int, c: c_int, d: *mut _, e: *mut _),
        libc::SYS_ioctl => call!(control::ioctl, fd: c_int, b: c_ulong, c: *mut _),
        libc::SYS_fcntl => call!(control::fcntl, fd: c_int, b: c_int, c: c_long),
        libc::SYS_dup => call!(control::dup, fd: c_int),
        libc::SYS_dup2 => call!(control::dup2, fd: c_int, b: c_int),
        libc::SYS_dup3 => call!(control::dup3, fd: c_int, b: c_int, c: c_int),
        libc::SYS_close => call!(control::close, fd: c_int),
        libc::SYS_close_range => call!(control::close_range, a: c_uint, b: c_uint, c: c_int),
        libc::SYS_poll => call!(poll::poll, a: *mut _, b: nfds_t, c: c_int),
        libc::SYS_ppoll => call!(poll::ppoll, a: *mut _, b: nfds_t, c: *const _, d: *const _),
        libc::SYS_select => call!(poll::select, a: c_int, b: *mut _, c: *mut _, d: *mut _, e: *mut _),
        libc::SYS_pselect6 => {
            // SAFETY: (valid) null, or where the mask is and how long.
            let f = unsafe { (f as *const c_long).as_ref() }.map_or(0, |mask| *mask);
            call!(poll::pselect, a: c_int, b: *mut _, c: *mut _, d: *mut _, e: *const _, f: *const _)
        }
        libc::SYS_epoll_create => call!(control::epoll_create, a: c_int),
        libc::SYS_epoll_create1 => call!(control::epoll_create1, a: c_int),
        libc::SYS_epoll_ctl => call!(control::epoll_ctl, fd: c_int, b: c_int, c: c_int, d: *mut _),
        libc::SYS_epoll_wait => call!(control::epoll_wait, fd: c_int, b: *mut _, c: c_int, d: c_int),
        libc::SYS_epoll_pwait => call!(control::epoll_pwait, fd: c_int, b: *mut _, c: c_int, d: c_int, e: *const _),
        libc::SYS_epoll_pwait2 => call!(control::epoll_pwait2, fd: c_int, b: *mut _, c: c_int, d: *const _, e: *const _),
        libc::SYS_execve => call!(life::execve, a: *const _, b: *const _, c: *const _),
        libc::SYS_execveat => call!(life::execveat, a: c_int, b: *const _, c: *const _, d: *const _, e: c_int),
        libc::SYS_prctl => call!(confine::prctl, a: c_int, b: c_ulong, c: c_ulong, d: c_ulong, e: c_ulong),
        libc::SYS_io_submit => {
            // SAFETY: (contract) the caller's promise.
            unsafe { asynchronous::submitting(b, c as *const _) };
            // SAFETY: (contract) the caller's promise.
            unsafe { real::syscall(number, a, b, c, d, e, f) }
        }
        libc::SYS_io_uring_setup => {
            // SAFETY: (contract) the caller's promise.
            let made = unsafe { real::syscall(number, a, b, c, d, e, f) };
            if made >= 0 {
                // This library does not see what goes through it.
                confine::shut_in_if_made_here();
            }
            made
        }
        // SAFETY: (contract) the caller's promise.
        libc::SYS_seccomp => confine::seccomp(a, || unsafe { real::syscall(number, a, b, c, d, e, f) }),
        // SAFETY: (contract) the caller's promise.
        _ => unsafe { real::syscall(number, a, b, c, d, e, f) },
    }
}
