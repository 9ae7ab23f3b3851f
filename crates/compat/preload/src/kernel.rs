// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Asks the kernel about sockets for the core, waits in the kernel, and keeps a page that the kernel clears in every
//! copy of this process.
//!
//! `unsafe` is needed because descriptors are the program's, numbers without an owner here; `TCP_INFO` has grown beyond
//! what libc's headers know; and the page is mapped.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    io::{IoSlice, IoSliceMut},
    mem,
    net::SocketAddr,
    os::fd::{BorrowedFd, RawFd},
    ptr,
    sync::atomic::{AtomicPtr, AtomicU32, Ordering},
    time::Duration,
};

use libc::{epoll_event, iovec, msghdr, nfds_t, pollfd, sigset_t, timespec};
use rustix::io::Errno;
use tombolo_sockets::{
    hook,
    kernel::{Counts, Kernel, Sample},
    tuple::Tuple,
};

use crate::{errno, inside, real};

/// Option that libc's headers lack (`asm-generic/socket.h`).
const SO_NETNS_COOKIE: c_int = 71;
/// Option that libc's headers lack, since Linux 5.14: which buffer sizes the program has set. Below, the bit of the
/// send buffer.
const SO_BUF_LOCK: c_int = 72;
const SNDBUF_LOCK: u32 = 1;
/// Request for the number of bytes written and not yet acknowledged (`linux/sockios.h`).
const SIOCOUTQ: libc::c_ulong = 0x5411;
/// Request for whether the next byte is the urgent one (`asm-generic/sockios.h`).
pub(crate) const SIOCATMARK: libc::c_ulong = 0x8905;
/// Offsets of the state and the two counts in `struct tcp_info` (`linux/tcp.h`), and how much of it must be there.
const INFO_STATE: usize = 0;
const INFO_BYTES_ACKED: usize = 120;
const INFO_BYTES_RECEIVED: usize = 128;
const INFO_LEN: usize = 136;
/// TCP states after the peer's FIN; below, after the own FIN (`net/tcp_states.h`).
const STATES_AFTER_PEERS_FIN: [u8; 5] = [6, 7, 8, 9, 11];
const STATES_AFTER_OWN_FIN: [u8; 6] = [4, 5, 6, 7, 9, 11];

/// The real kernel.
#[derive(Debug)]
pub(crate) struct Linux;

/// Borrows a descriptor of the program's.
pub(crate) fn borrow<'a>(fd: RawFd) -> BorrowedFd<'a> {
    // SAFETY: (open) nothing here relies on it: a call on a number that is no descriptor says EBADF, as it would have
    // said to the program; only -1 must not be.
    unsafe { BorrowedFd::borrow_raw(fd.max(0)) }
}

fn option<const N: usize>(fd: RawFd, level: c_int, name: c_int) -> Option<([u8; N], usize)> {
    let mut value = [0; N];
    let mut len = N as libc::socklen_t;
    // SAFETY: (valid) the value has `len` bytes, and the kernel writes no more than it is told there are.
    let done = unsafe { real::getsockopt(fd, level, name, value.as_mut_ptr().cast::<c_void>(), &raw mut len) };
    (done == 0).then_some((value, len as usize))
}

/// Returns the number that an ioctl reports, most often of bytes.
fn queue(fd: RawFd, request: libc::c_ulong) -> Option<u64> {
    let mut bytes: c_int = 0;
    // SAFETY: (valid) each of the requests stores one int.
    let done = unsafe { real::ioctl(fd, request, (&raw mut bytes).cast::<c_void>()) };
    (done == 0).then_some(bytes as u64)
}

fn info(fd: RawFd) -> Option<(u8, u64, u64)> {
    let (info, len) = option::<INFO_LEN>(fd, libc::IPPROTO_TCP, libc::TCP_INFO)?;
    let word = |at: usize| u64::from_ne_bytes(info[at..at + 8].try_into().expect("eight bytes"));
    (len == INFO_LEN).then(|| (info[INFO_STATE], word(INFO_BYTES_ACKED), word(INFO_BYTES_RECEIVED)))
}

fn sample(fd: RawFd, dialled: bool) -> Option<Sample> {
    // Three calls return the values. They are from one moment if the first call returns the same before and after the
    // others.
    for _ in 0..64 {
        let before = info(fd)?;
        let (unsent, unread) = (queue(fd, SIOCOUTQ)?, queue(fd, libc::FIONREAD)?);
        if info(fd)? != before {
            continue;
        }
        let (state, acked, received) = before;
        // The kernel counts SYN and FIN as bytes.
        let acked = acked.saturating_sub(u64::from(dialled));
        let fin = u64::from(STATES_AFTER_OWN_FIN.contains(&state));
        let written = (acked + unsent).saturating_sub(fin);
        let received = received.saturating_sub(u64::from(STATES_AFTER_PEERS_FIN.contains(&state)));
        return Some(Sample { counts: Counts { written, acked: acked.min(written), received }, unread });
    }
    None
}

impl Kernel for Linux {
    fn tuple(&self, fd: RawFd) -> Option<Tuple> {
        addresses(fd).filter(|_| !needs_kernel(fd)).map(|(own, peer)| Tuple::new(own, peer))
    }

    fn service_port(&self, fd: RawFd, dialled: bool) -> Option<u16> {
        let fd = borrow(fd);
        let named = || if dialled { rustix::net::getpeername(fd).ok()? } else { rustix::net::getsockname(fd).ok() };
        errno::kept(|| SocketAddr::try_from(named()?).ok().map(|address| address.port()))
    }

    fn cookie(&self, fd: RawFd) -> u64 {
        errno::kept(|| {
            option::<8>(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE).map_or(0, |(cookie, _)| u64::from_ne_bytes(cookie))
        })
    }

    fn counts(&self, fd: RawFd, dialled: bool) -> Option<Sample> {
        errno::kept(|| sample(fd, dialled))
    }

    fn sequences(&self, fd: RawFd, dialled: bool) -> Option<[u32; 2]> {
        let (said, len) = errno::kept(|| option::<8>(fd, hook::LEVEL, hook::SEQUENCES))?;
        (len == said.len()).then(|| hook::sequences(said, dialled))
    }

    fn holds(&self, fd: RawFd) -> Option<u64> {
        let number = |name| number(fd, libc::SOL_SOCKET, name).map(c_int::cast_unsigned);
        errno::kept(|| {
            let set = number(SO_BUF_LOCK)? & SNDBUF_LOCK != 0;
            if set { number(libc::SO_SNDBUF).map(u64::from) } else { None }
        })
    }

    fn push(&self, fd: RawFd) {
        let fd = borrow(fd);
        use rustix::net::sockopt::{set_tcp_nodelay, tcp_nodelay};
        if let Ok(false) = tcp_nodelay(fd) {
            // Setting it sends what TCP holds back; then the program's choice is restored.
            let _ = set_tcp_nodelay(fd, true);
            let _ = set_tcp_nodelay(fd, false);
        }
    }

    fn recv(&self, fd: RawFd, to: &mut [IoSliceMut<'_>], peek: bool) -> Result<usize, Errno> {
        let flags = libc::MSG_DONTWAIT | if peek { libc::MSG_PEEK } else { 0 };
        // SAFETY: (valid) all zeros is an empty message header.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        // An `IoSliceMut` has the layout of an `iovec`.
        message.msg_iov = to.as_mut_ptr().cast();
        message.msg_iovlen = to.len();
        // SAFETY: (valid) the header names `to.len()` parts, each writable for its length.
        errno::kept(|| errno::result(unsafe { real::recvmsg(fd, &raw mut message, flags) }))
    }

    fn send(&self, fd: RawFd, from: &[IoSlice<'_>]) -> Result<usize, Errno> {
        // SAFETY: (valid) all zeros is an empty message header.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        // An `IoSlice` has the layout of an `iovec`, and `sendmsg` writes to none.
        message.msg_iov = from.as_ptr().cast_mut().cast();
        message.msg_iovlen = from.len();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: (valid) the header names `from.len()` parts, each readable for its length.
        errno::kept(|| errno::result(unsafe { real::sendmsg(fd, &raw const message, flags) }))
    }

    fn poll(&self, fd: RawFd, events: i16) -> i16 {
        let mut one = libc::pollfd { fd, events, revents: 0 };
        // SAFETY: (valid) one entry, for the length of the call.
        errno::kept(|| unsafe { real::poll(&raw mut one, 1, 0) });
        one.revents
    }

    fn reset(&self, fd: RawFd) {
        let nowhere = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
        let len = size_of::<libc::sockaddr>() as libc::socklen_t;
        // SAFETY: (valid) the address is there for the call; that it has no family is what disconnects.
        errno::kept(|| unsafe { real::connect(fd, &raw const nowhere, len) });
    }
}

/// Returns whether `fd` is a TCP socket.
pub(crate) fn is_tcp(fd: RawFd) -> bool {
    number(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
}

/// Returns a number that identifies a socket for as long as the kernel runs, or 0 for anything else.
pub(crate) fn socket_cookie(fd: RawFd) -> u64 {
    errno::kept(|| {
        option::<8>(fd, libc::SOL_SOCKET, libc::SO_COOKIE).map_or(0, |(cookie, _)| u64::from_ne_bytes(cookie))
    })
}

/// Returns the own and the peer's address of a connected TCP socket, or `None` for anything else.
pub(crate) fn addresses(fd: RawFd) -> Option<(SocketAddr, SocketAddr)> {
    errno::kept(|| {
        if !is_tcp(fd) {
            return None;
        }
        let fd = borrow(fd);
        let own = rustix::net::getsockname(fd).ok()?;
        let peer = rustix::net::getpeername(fd).ok()??;
        Some((own.try_into().ok()?, peer.try_into().ok()?))
    })
}

/// Options that only the kernel can honour: a least number of bytes to report, times at which bytes were sent, an
/// offset to peek from, and a limit of the sending rate. Option 65 is the second of these by its name from after 2038.
const FOR_KERNEL: [(c_int, c_int); 5] = [
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPING),
    (libc::SOL_SOCKET, libc::SO_PEEK_OFF),
    (libc::SOL_SOCKET, 65),
    (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE),
];
/// Options by which `recvmsg` reports when bytes came, by their names from before and after 2038.
const ARRIVALS: [c_int; 4] = [libc::SO_TIMESTAMP, libc::SO_TIMESTAMPNS, 63, 64];

/// Returns whether only the kernel can honour this value of an option.
pub(crate) fn is_for_kernel((level, name): (c_int, c_int), value: c_int) -> bool {
    let least = match name {
        libc::SO_RCVLOWAT => 2,
        libc::SO_PEEK_OFF => 0,
        // All bits set mean no limit.
        libc::SO_MAX_PACING_RATE => return value != -1 && level == libc::SOL_SOCKET,
        _ => return value != 0 && FOR_KERNEL.contains(&(level, name)),
    };
    value >= least && FOR_KERNEL.contains(&(level, name))
}

/// Returns whether this option changes what `recvmsg` reports beside the bytes.
pub(crate) fn is_ancillary(level: c_int, name: c_int) -> bool {
    (level, name) == (libc::IPPROTO_TCP, libc::TCP_INQ) || level == libc::SOL_SOCKET && ARRIVALS.contains(&name)
}

/// Returns whether `recvmsg` reports when bytes came.
pub(crate) fn says_arrival(fd: RawFd) -> bool {
    errno::kept(|| ARRIVALS.into_iter().any(|name| number(fd, libc::SOL_SOCKET, name).is_some_and(|value| value != 0)))
}

/// Returns whether `recvmsg` reports how many bytes are left.
pub(crate) fn says_rest(fd: RawFd) -> bool {
    errno::kept(|| number(fd, libc::IPPROTO_TCP, libc::TCP_INQ).is_some_and(|value| value != 0))
}

/// Returns the number of bytes that the kernel received and nobody has read.
pub(crate) fn unread(fd: RawFd) -> u64 {
    errno::kept(|| queue(fd, libc::FIONREAD).unwrap_or(0))
}

/// Returns whether the next byte to be read is urgent.
pub(crate) fn is_at_mark(fd: RawFd) -> bool {
    errno::kept(|| queue(fd, SIOCATMARK) == Some(1))
}

/// Returns the value of an option that is a number.
fn number(fd: RawFd, level: c_int, name: c_int) -> Option<c_int> {
    option::<4>(fd, level, name).map(|(value, _)| i32::from_ne_bytes(value))
}

/// Returns whether the program has asked for something that only the kernel does: by an option, or by a request for
/// signals.
fn needs_kernel(fd: RawFd) -> bool {
    let is_set = |(level, name): (c_int, c_int)| {
        number(fd, level, name).is_some_and(|value| is_for_kernel((level, name), value))
    };
    FOR_KERNEL.into_iter().any(is_set)
        || rustix::fs::fcntl_getfl(borrow(fd)).is_ok_and(|flags| flags.bits() & libc::O_ASYNC as u32 != 0)
}

/// Returns what the kernel lists about an epoll set: a line for each registration.
pub(crate) fn registrations(epfd: RawFd) -> Option<String> {
    inside::lifted(|| std::fs::read_to_string(format!("/proc/self/fdinfo/{epfd}")).ok())
}

/// Returns whether one of these registrations is of `fd`, carries `data`, and would be reported.
pub(crate) fn is_armed(registrations: &str, fd: RawFd, data: u64) -> bool {
    let field = |line: &str, name: &str| {
        let mut words = line.split_whitespace().skip_while(|word| *word != name);
        words.nth(1).map(str::to_owned)
    };
    let is_it = |line: &&str| {
        field(line, "tfd:").and_then(|word| word.parse().ok()) == Some(fd)
            && field(line, "data:").and_then(|word| u64::from_str_radix(&word, 16).ok()) == Some(data)
    };
    // These bits stay set once the kernel has reported the registration: they tell how to report, not what.
    let how = (libc::EPOLLWAKEUP | libc::EPOLLONESHOT | libc::EPOLLET | libc::EPOLLEXCLUSIVE) as u32;
    registrations.lines().filter(is_it).any(|line| {
        let events = field(line, "events:").and_then(|word| u32::from_str_radix(&word, 16).ok());
        events.is_some_and(|events| events & !how != 0)
    })
}

/// Returns whether calls on `fd` return at once.
pub(crate) fn is_nonblocking(fd: RawFd) -> bool {
    rustix::fs::fcntl_getfl(borrow(fd)).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Returns how long a blocking call may wait (`SO_RCVTIMEO`, `SO_SNDTIMEO`).
pub(crate) fn patience(fd: RawFd, send: bool) -> Option<Duration> {
    use rustix::net::sockopt::{Timeout, socket_timeout};
    socket_timeout(borrow(fd), if send { Timeout::Send } else { Timeout::Recv }).ok().flatten()
}

/// Returns whether the time is below zero and the kernel accepts it as a time limit.
pub(crate) fn is_below_none(limit: libc::timeval) -> bool {
    limit.tv_sec < 0 && (0..1_000_000).contains(&limit.tv_usec)
}

/// Sends as the program would, and waits as the socket is set to.
pub(crate) fn sendmsg(fd: RawFd, from: &[IoSlice<'_>], flags: c_int) -> isize {
    // SAFETY: (valid) all zeros is an empty message header.
    let mut message: msghdr = unsafe { mem::zeroed() };
    message.msg_iov = from.as_ptr().cast::<iovec>().cast_mut();
    message.msg_iovlen = from.len();
    // SAFETY: (valid) slices have the layout of vectors, and the call writes to none.
    unsafe { real::sendmsg(fd, &raw const message, flags) }
}

/// Receives in the same way.
pub(crate) fn recvmsg(fd: RawFd, to: &mut [IoSliceMut<'_>], flags: c_int) -> isize {
    // SAFETY: (valid) as above.
    let mut message: msghdr = unsafe { mem::zeroed() };
    message.msg_iov = to.as_mut_ptr().cast::<iovec>();
    message.msg_iovlen = to.len();
    // SAFETY: (valid) slices have the layout of vectors, and are this call's to write to.
    unsafe { real::recvmsg(fd, &raw mut message, flags) }
}

/// Raises the signal that comes with `EPIPE`, for the thread that sends, which may have blocked it.
pub(crate) fn signal_broken_pipe() {
    // SAFETY: (contract) a number of a signal is all that it asks for.
    errno::kept(|| unsafe { libc::raise(libc::SIGPIPE) });
}

/// Makes the coming close reset the connection, as TCP does if bytes were left unread.
pub(crate) fn reset_at_close(fd: RawFd) {
    let _ = rustix::net::sockopt::set_socket_linger(borrow(fd), Some(Duration::ZERO));
}

/// Returns whether a call that a signal interrupted goes on after its handler, as far as can be determined. It is not
/// known which signal it was, so all signals with a handler must ask for that. Signals of faults do not count, because
/// they interrupt no call.
pub(crate) fn handlers_restart() -> bool {
    const FAULTS: [c_int; 7] =
        [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT, libc::SIGSYS];
    (1..=64).filter(|signal| !FAULTS.contains(signal)).all(|signal| {
        // SAFETY: (valid) all zeros is an action.
        let mut action: libc::sigaction = unsafe { mem::zeroed() };
        // SAFETY: (valid) room for an action; none is set.
        let known = errno::kept(|| unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) }) == 0;
        let handled = known && !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
        !handled || action.sa_flags & libc::SA_RESTART != 0
    })
}

// ---- waiting

/// Signals to block while the kernel waits.
pub(crate) type Mask = Option<*const sigset_t>;

fn spec(timeout: Duration) -> timespec {
    timespec { tv_sec: timeout.as_secs() as libc::time_t, tv_nsec: timeout.subsec_nanos().into() }
}

/// Polls `fds` in the kernel.
pub(crate) fn poll(fds: &mut [pollfd], timeout: Option<Duration>, mask: Mask) -> Result<usize, Errno> {
    let timeout = timeout.map(spec);
    let timeout = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
    let mask = mask.unwrap_or(ptr::null());
    // SAFETY: (valid) `fds` is a slice; the timeout and the mask are there for the call, or null.
    let answer = inside::leave(|| unsafe { real::ppoll(fds.as_mut_ptr(), fds.len() as nfds_t, timeout, mask) });
    errno::result(answer as isize)
}

/// Makes a change of this library's own to one of the program's sets.
pub(crate) fn epoll_ctl(epfd: RawFd, operation: c_int, fd: RawFd, mut event: epoll_event) -> Result<(), Errno> {
    // SAFETY: (valid) the event is there for the call.
    let answer = unsafe { real::epoll_ctl(epfd, operation, fd, &raw mut event) };
    errno::result(answer as isize).map(|_| ())
}

/// Returns the events that the kernel has for a set now, without waiting.
pub(crate) fn epoll_now(epfd: RawFd, events: &mut [epoll_event]) -> Result<usize, Errno> {
    // SAFETY: (valid) `events` is a slice.
    let answer = unsafe { real::epoll_wait(epfd, events.as_mut_ptr(), events.len() as c_int, 0) };
    errno::result(answer as isize)
}

/// Waits at an epoll instance of this library's own. The call has no signal mask, as the program's call had none.
pub(crate) fn epoll_until(epfd: RawFd, events: &mut [epoll_event], left: Option<Duration>) -> Result<usize, Errno> {
    let (room, millis) = (events.len() as c_int, left.map_or(-1, millis));
    // SAFETY: (valid) `events` is a slice.
    let answer = unsafe { real::epoll_wait(epfd, events.as_mut_ptr(), room, millis) };
    errno::result(answer as isize)
}

/// Converts a time to the milliseconds that `epoll_wait` takes, rounded up.
pub(crate) fn millis(left: Duration) -> c_int {
    let whole = left.as_secs().saturating_mul(1000).saturating_add(left.subsec_nanos().div_ceil(1_000_000).into());
    whole.min(i32::MAX as u64) as c_int
}

// ---- whose copy this is

/// Word that is 1 in this process, in its threads and in children of `vfork`. It is 0 in a copy made by a call that
/// this library did not see, because the kernel clears the page there.
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// Marks this process as one whose creation was seen. Without memory for the mark, every process counts as marked.
pub(crate) fn mark() {
    let mut place = MARK.load(Ordering::Acquire);
    if place.is_null() {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: (address) null with no MAP_FIXED lets the kernel choose a free range.
        let page = unsafe { libc::mmap(ptr::null_mut(), 4096, prot, flags, -1, 0) };
        // SAFETY: (range) the page just mapped, if it was.
        if page == libc::MAP_FAILED || unsafe { libc::madvise(page, 4096, libc::MADV_WIPEONFORK) } != 0 {
            return;
        }
        place = page.cast::<AtomicU32>();
    }
    // SAFETY: (valid) a page that is never unmapped, reached as an atomic only.
    unsafe { &*place }.store(1, Ordering::Relaxed);
    // Stored only now: until there is a mark, another thread takes the process for marked.
    MARK.store(place, Ordering::Release);
}

/// Returns whether this is the marked process and not a copy of it.
#[inline]
pub(crate) fn is_marked() -> bool {
    let place = MARK.load(Ordering::Relaxed);
    // SAFETY: (valid) as above, or null.
    unsafe { place.as_ref() }.is_none_or(|mark| mark.load(Ordering::Relaxed) != 0)
}
