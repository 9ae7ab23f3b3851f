// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exported calls that create, configure, duplicate and close descriptors.
//!
//! `unsafe` is needed because the arguments come as the program passed them, and go on to the real call.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_long, c_uint, c_ulong, c_void},
    ops::RangeInclusive,
    os::fd::{AsRawFd, RawFd},
    slice,
    sync::Arc,
    time::Duration,
};

use libc::{epoll_event, sigset_t, sockaddr, socklen_t};
use rustix::net::{AddressFamily, SocketType};
use tombolo_sockets::{Reason, connection};

use crate::{
    closing,
    epoll::{
        self,
        changes::{self, Request},
        waiting, wiring,
    },
    errno, handback, inside, kernel, life, plain, poll, real,
    state::{self, Watched},
};

/// Descriptors that libc has a stream for from the start. Whatever these numbers become, standard I/O may read and
/// write them past this library.
const STREAMS: RangeInclusive<RawFd> = libc::STDIN_FILENO..=libc::STDERR_FILENO;

/// Number of events above which the kernel refuses the call (`EP_MAX_EVENTS`).
const MOST_EVENTS: c_int = c_int::MAX / size_of::<epoll_event>() as c_int;

// ---- sockets

/// # Safety
/// As `socket(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: (contract) the caller's promise.
    let fd = unsafe { real::socket(domain, kind, protocol) };
    if fd >= 0 {
        // The program may have closed this number by a call that this library did not see.
        forget(fd);
        let stream = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == libc::SOCK_STREAM;
        if stream && matches!(domain, libc::AF_INET | libc::AF_INET6) && matches!(protocol, 0 | libc::IPPROTO_TCP) {
            state::made_stream(fd);
        }
    }
    fd
}

/// Drops everything that the table holds about a number that is now a new descriptor.
fn forget(fd: RawFd) {
    if inside::has_interrupted() {
        state::abandon(fd);
    } else {
        closing::forget_reused(fd);
    }
}

/// # Safety
/// As `connect(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: (valid) the caller gave so much of an address, whose first field is its family.
    let family = if address.is_null() || len < 2 { None } else { Some(c_int::from(unsafe { (*address).sa_family })) };
    if !inside::has_interrupted() {
        if family == Some(libc::AF_UNSPEC) {
            errno::kept(|| closing::disconnecting(fd));
        }
        errno::kept(|| state::dialling(fd));
    }
    // SAFETY: (contract) the caller's promise.
    let answer = unsafe { real::connect(fd, address, len) };
    let began = answer == 0 || matches!(errno::get(), libc::EINPROGRESS | libc::EINTR | libc::EALREADY | libc::EISCONN);
    if !began || !matches!(family, Some(libc::AF_INET | libc::AF_INET6)) {
        state::not_dialled(fd);
    }
    answer
}

fn accepted(listener: c_int, fd: c_int) -> c_int {
    if inside::has_interrupted() {
        state::abandon(fd);
    } else if fd >= 0 {
        errno::kept(|| {
            if state::process().is_some() {
                state::began();
                closing::forget_reused(fd);
                state::accepted(listener, fd);
            }
        });
    }
    fd
}

/// # Safety
/// As `accept(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: (contract) the caller's promise.
    accepted(fd, unsafe { real::accept(fd, address, len) })
}

/// # Safety
/// As `accept4(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    // SAFETY: (contract) the caller's promise.
    accepted(fd, unsafe { real::accept4(fd, address, len, flags) })
}

/// # Safety
/// As `shutdown(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn shutdown(fd: c_int, how: c_int) -> c_int {
    let known = state::connection(fd).filter(|_| !inside::has_interrupted());
    let ends = known.as_ref().filter(|_| how != libc::SHUT_RD);
    if let Some(connection) = ends {
        errno::kept(|| {
            handback::drain_before_close(fd, connection);
            connection.end_sending();
        });
    }
    // SAFETY: (contract) the caller's promise.
    let done = unsafe { real::shutdown(fd, how) };
    if let (0, Some(connection), Some(process)) = (done, &known, state::busy()) {
        errno::kept(|| connection.for_call(process, fd).finish_shutdown(how != libc::SHUT_WR));
    }
    // Another thread may wait for room, which never comes now. TCP reports this only to a thread that asks.
    if let Some(doorbell) = ends.and_then(|connection| connection.pipes.doorbell()) {
        errno::kept(|| doorbell.notify());
    }
    done
}

/// # Safety
/// As `setsockopt(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let kernel_only = match (level, name) {
        // SAFETY: (contract) the caller's promise.
        (libc::IPPROTO_TCP, libc::TCP_ULP) => state::is_known(fd) && unsafe { has_protocol(value, len) },
        (libc::IPPROTO_TCP, libc::TCP_REPAIR) => true,
        (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER | libc::SO_ATTACH_BPF) => true,
        _ if !value.is_null() && len as usize >= size_of::<c_int>() => {
            // SAFETY: (valid) the caller gave at least an int, aligned or not.
            kernel::is_for_kernel((level, name), unsafe { value.cast::<c_int>().read_unaligned() })
        }
        _ => false,
    };
    if kernel_only
        && !inside::has_interrupted()
        && let (Some(process), Some(connection)) = (state::busy(), state::connection(fd))
    {
        errno::kept(|| match (level, name) {
            // This option affects what comes after the peer's next call. Nobody waits for that, and bytes already in
            // the pipe stay there.
            (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => handback::ask_for_tcp(process, fd, &connection, Reason::Usage),
            _ => handback::use_kernel(process, fd, &connection),
        });
    }
    // Both time limits, by their names from before and after the change for the year 2038.
    let is_limit = level == libc::SOL_SOCKET && matches!(name, 20 | 21 | 66 | 67);
    let least = libc::timeval { tv_sec: 0, tv_usec: 1 };
    let enough = is_limit && !value.is_null() && len as usize >= size_of::<libc::timeval>();
    // SAFETY: (valid) the caller gave as much, aligned or not.
    let below = enough && kernel::is_below_none(unsafe { value.cast::<libc::timeval>().read_unaligned() });
    // With a time limit below zero calls do not wait, but the kernel reports such a limit as no limit.
    let value = if below && kernel::is_tcp(fd) { (&raw const least).cast() } else { value };
    // SAFETY: (contract) the caller's promise, or a time, of which the kernel reads no more.
    let answer = unsafe { real::setsockopt(fd, level, name, value, len) };
    if is_limit || kernel::is_ancillary(level, name) {
        set_anew(fd);
    }
    answer
}

/// Returns whether the kernel has, or may have, the named protocol above TCP. TLS libraries try this option, and go on
/// without it.
///
/// # Safety
/// As `setsockopt(2)`.
unsafe fn has_protocol(name: *const c_void, len: socklen_t) -> bool {
    errno::kept(|| {
        let Ok(socket) = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None) else { return true };
        // SAFETY: (contract) the caller's promise.
        let refused = unsafe { real::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_ULP, name, len) } < 0;
        // If the kernel has the protocol, it fails because the socket is not connected yet.
        !(refused && matches!(errno::get(), libc::ENOENT | libc::EINVAL))
    })
}

/// Records that the program changed how calls on `fd` wait.
fn set_anew(fd: RawFd) {
    if !state::is_known(fd) {
        return;
    }
    if inside::has_interrupted() {
        connection::set_anew();
    } else if let Some(Watched::Connection(connection)) = state::watched(fd) {
        connection.options.set_anew();
    }
}

/// # Safety
/// As `ioctl(2)`; no request has more than one argument.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if request == libc::FIOASYNC && !inside::has_interrupted() {
        signals(fd);
    }
    // SAFETY: (contract) the caller's promise.
    let answer = unsafe { real::ioctl(fd, request, argument) };
    if request == libc::FIONBIO {
        set_anew(fd);
    }
    if request == kernel::SIOCATMARK
        && answer == 0
        && !inside::has_interrupted()
        && state::connection(fd).is_some_and(|connection| errno::kept(|| connection.unread()) > 0)
    {
        // The urgent mark is among the bytes on TCP, which come after those in the pipe.
        // SAFETY: (valid) the kernel stored an int there, aligned or not.
        unsafe { argument.cast::<c_int>().write_unaligned(0) };
    }
    if request == libc::FIONREAD
        && answer == 0
        && !inside::has_interrupted()
        && let (Some(process), Some(connection)) = (state::busy(), state::connection(fd))
    {
        // A program that only polls `FIONREAD` makes no other call that could serve the peer's requests, so this call
        // does (S-2).
        errno::kept(|| connection.for_call(process, fd).send_recalled());
        let more = errno::kept(|| connection.unread()).min(i32::MAX as u64) as c_int;
        let place = argument.cast::<c_int>();
        // SAFETY: (valid) the kernel stored an int there, aligned or not.
        let bytes = unsafe { place.read_unaligned() };
        // SAFETY: (valid) as above.
        unsafe { place.write_unaligned(bytes.saturating_add(more)) };
    }
    answer
}

/// Replaces libc's function, which would ask the kernel past this library.
///
/// # Safety
/// As `sockatmark(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sockatmark(fd: c_int) -> c_int {
    let mut mark: c_int = 0;
    // SAFETY: (valid) there is room for the int that the kernel stores.
    let answer = unsafe { ioctl(fd, kernel::SIOCATMARK, (&raw mut mark).cast::<c_void>()) };
    if answer < 0 { answer } else { mark }
}

/// Moves the connection to TCP, because the program wants a signal for every event of the socket, and only the kernel
/// sends it.
fn signals(fd: RawFd) {
    if let (Some(process), Some(connection)) = (state::busy(), state::connection(fd)) {
        errno::kept(|| handback::wait_for_tcp(process, fd, &connection, Reason::Usage));
    }
}

// ---- descriptors

/// Fails a call that would affect one of this library's own descriptors. `dup2(2)` may find any number busy for a
/// moment, and a program that chose such a number itself gets that error.
fn refused(errno: c_int) -> c_int {
    errno::set(errno);
    -1
}

/// # Safety
/// As `close(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    if state::is_ours(fd) {
        return refused(libc::EBADF);
    }
    life::closing_ours_in_child(fd.cast_unsigned(), fd.cast_unsigned());
    closing::close_watched(fd);
    // SAFETY: (contract) the caller's promise.
    unsafe { real::close(fd) }
}

/// # Safety
/// As `close_range(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // The kernel refuses invalid flags itself.
    if flags & !(libc::CLOSE_RANGE_UNSHARE as c_int) == 0 {
        life::closing_ours_in_child(first, last);
        (first..=last.min(state::bound() as c_uint)).for_each(|fd| closing::close_watched(fd as RawFd));
    }
    let mut from = first;
    while let Some(ours) = state::next_of_ours(from).filter(|ours| *ours <= last) {
        // SAFETY: (contract) the caller's promise, for a part of its range.
        if from < ours && unsafe { real::close_range(from, ours - 1, flags) } != 0 {
            return -1;
        }
        from = ours + 1;
    }
    if from > last && first <= last {
        return 0;
    }
    // SAFETY: (contract) the caller's promise.
    unsafe { real::close_range(from, last, flags) }
}

fn duplicated(from: c_int, to: c_int) -> c_int {
    if to >= 0 && to != from && state::is_owner() && !inside::has_interrupted() {
        errno::kept(|| watch_duplicate(from, to));
    }
    to
}

/// Watches `to` as what `from` is.
fn watch_duplicate(from: RawFd, to: RawFd) {
    closing::forget_reused(to);
    match state::find(from) {
        Some(Watched::Connection(connection)) if (0..state::bound()).contains(&to) => {
            connection.descriptors.add(to);
            wiring::note_number(to, &connection, true);
            state::watch(to, Watched::Connection(Arc::clone(&connection)));
            if STREAMS.contains(&to)
                && let Some(process) = state::busy()
            {
                handback::use_kernel(process, to, &connection);
            }
        }
        Some(Watched::Connection(connection)) => {
            // The table cannot hold this descriptor, so the program would read from it unseen by this library.
            if let Some(process) = state::process() {
                process.leaves(&connection, Reason::Usage);
            }
        }
        Some(Watched::Set(set)) if (0..state::bound()).contains(&to) => {
            state::watch(to, Watched::Set(set));
        }
        // The table cannot hold this number, so a thread may wait on it unseen by this library.
        Some(Watched::Set(set)) => {
            if let Some(process) = state::process() {
                waiting::nested(process, &set);
            }
        }
        None => state::share_with(from, to),
    }
}

/// # Safety
/// As `dup(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    // SAFETY: (contract) the caller's promise.
    duplicated(fd, unsafe { real::dup(fd) })
}

/// Prepares `to` for becoming a duplicate of `fd`, if `fd` is open.
fn replacing(fd: RawFd, to: RawFd) {
    if fd != to && state::is_known(to) && inside::has_interrupted() {
        state::abandon(to);
    } else if fd != to && state::is_known(to) {
        errno::kept(|| {
            if fd >= 0 && rustix::io::fcntl_getfd(kernel::borrow(fd)).is_ok() {
                closing::before_close(to);
            }
        });
    }
}

/// # Safety
/// As `dup2(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup2(fd: c_int, to: c_int) -> c_int {
    if fd != to && state::is_ours(to) {
        return refused(libc::EBUSY);
    }
    replacing(fd, to);
    // SAFETY: (contract) the caller's promise.
    duplicated(fd, unsafe { real::dup2(fd, to) })
}

/// # Safety
/// As `dup3(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    if fd != to && state::is_ours(to) {
        return refused(libc::EBUSY);
    }
    if flags & !libc::O_CLOEXEC == 0 {
        replacing(fd, to);
    }
    // SAFETY: (contract) the caller's promise.
    duplicated(fd, unsafe { real::dup3(fd, to, flags) })
}

fn controlled(fd: c_int, command: c_int, argument: c_long, real: impl FnOnce() -> c_int) -> c_int {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => return duplicated(fd, real()),
        libc::F_SETFL if argument as c_int & libc::O_ASYNC != 0 && !inside::has_interrupted() => signals(fd),
        _ => {}
    }
    let answer = real();
    if command == libc::F_SETFL {
        set_anew(fd);
    }
    answer
}

/// # Safety
/// As `fcntl(2)`; no command has more than one argument.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: (contract) the caller's promise.
    controlled(fd, command, argument, || unsafe { real::fcntl(fd, command, argument) })
}

/// # Safety
/// As `fcntl(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: (contract) the caller's promise.
    controlled(fd, command, argument, || unsafe { real::fcntl64(fd, command, argument) })
}

// ---- epoll

fn made_set(fd: c_int) -> c_int {
    if fd >= 0 {
        errno::kept(|| {
            if state::process().is_some() && (0..state::bound()).contains(&fd) {
                state::made_set();
                closing::forget_reused(fd);
                state::watch(fd, Watched::Set(Arc::default()));
            }
        });
    }
    fd
}

/// # Safety
/// As `epoll_create(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_create(size: c_int) -> c_int {
    // SAFETY: (contract) the caller's promise.
    made_set(unsafe { real::epoll_create(size) })
}

/// # Safety
/// As `epoll_create1(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_create1(flags: c_int) -> c_int {
    // SAFETY: (contract) the caller's promise.
    made_set(unsafe { real::epoll_create1(flags) })
}

/// # Safety
/// As `epoll_ctl(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_ctl(epfd: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::epoll_ctl(epfd, operation, fd, event) };
    let Some(process) = state::waiting().filter(|_| !inside::has_interrupted()) else {
        // The set may be one that this library does not know.
        state::shared(fd);
        return real();
    };
    let set = state::set(epfd);
    // SAFETY: (contract) null or an event of the caller's.
    let event = unsafe { event.as_ref() }.copied();
    let found = loop {
        let found = state::find(fd);
        if found.is_some() || !state::is_unconnected(fd) {
            break found;
        }
        match &set {
            None => state::shared(fd),
            Some(set) if state::registered(fd) => {
                let answer = changes::register(set, Request { epfd, operation, fd, event }, real);
                if let Some(Watched::Connection(connection)) = state::find(fd) {
                    // Another thread connected the socket meanwhile.
                    if epoll::adopt(set, fd, &connection) {
                        errno::kept(|| process.leaves(&connection, Reason::Usage));
                    }
                }
                return answer;
            }
            Some(_) => {}
        }
    };
    match (set, found) {
        (Some(set), Some(Watched::Connection(connection))) => {
            plain::begin(process, &connection);
            changes::change(process, &set, &connection, Request { epfd, operation, fd, event }, real)
        }
        (None, Some(Watched::Connection(connection))) => {
            // The set was created before this library was active, or by another process.
            errno::kept(|| process.leaves(&connection, Reason::Usage));
            real()
        }
        (_, Some(Watched::Set(inner))) => {
            errno::kept(|| waiting::nested(process, &inner));
            real()
        }
        (_, None) => real(),
    }
}

/// # Safety
/// As `epoll_wait(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int {
    let limit = u64::try_from(timeout).ok().map(Duration::from_millis);
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::epoll_wait(epfd, events, max, timeout) };
    // SAFETY: (contract) the caller's promise.
    unsafe { wait(epfd, events, max, limit, std::ptr::null(), real) }
}

/// # Safety
/// As `epoll_pwait(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    let limit = u64::try_from(timeout).ok().map(Duration::from_millis);
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::epoll_pwait(epfd, events, max, timeout, mask) };
    // SAFETY: (contract) the caller's promise.
    unsafe { wait(epfd, events, max, limit, mask, real) }
}

/// # Safety
/// As `epoll_pwait2(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait2(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: *const libc::timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::epoll_pwait2(epfd, events, max, timeout, mask) };
    // SAFETY: (contract) null or a time.
    let Ok(limit) = poll::duration(unsafe { timeout.as_ref() }) else { return real() };
    // SAFETY: (contract) the caller's promise.
    unsafe { wait(epfd, events, max, limit, mask, real) }
}

/// Waits at the set `epfd`. `real` makes the program's call itself.
///
/// # Safety
/// As `epoll_pwait(2)`; a null mask is none.
unsafe fn wait(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    limit: Option<Duration>,
    mask: *const sigset_t,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let Some(process) = state::waiting() else { return real() };
    if inside::has_interrupted() {
        return poll::interrupted();
    }
    let Some(set) = state::set(epfd) else { return real() };
    if events.is_null() || !(1..=MOST_EVENTS).contains(&max) {
        return real();
    }
    waiting::begin(process, &set);
    // SAFETY: (valid) the caller promises room for `max` events, its own for the call.
    let events = unsafe { slice::from_raw_parts_mut(events, max as usize) };
    let answer =
        waiting::wait(process, (epfd, &set), events, limit, (!mask.is_null()).then_some(mask), |events, left| {
            // Rounded up, because a wait that ends early would be repeated again and again.
            let millis = left.map_or(-1, kernel::millis);
            // SAFETY: (contract) the caller's promise, also for a part of the array; a null mask is none.
            unsafe { real::epoll_pwait(epfd, events.as_mut_ptr(), events.len() as c_int, millis, mask) as isize }
        });
    answer as c_int
}
