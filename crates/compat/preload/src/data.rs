// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exported calls that move bytes. Each call makes slices of the program's buffers and passes them to [`flow`].
//!
//! `unsafe` is needed because the program passes its buffers as pointers.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    io::{IoSlice, IoSliceMut},
    ptr, slice,
    sync::Arc,
};

use libc::{iovec, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;
use tombolo_sockets::{
    Process, Reason,
    connection::{Connection, Direction, Plain, Stage},
    proof::HISTORY,
};

use crate::{
    ancillary,
    epoll::waiting,
    errno, flow, handback,
    inside::{self, Few},
    plain::{self, Progress},
    poll::{self, check},
    real, renewal, splice,
    state::{self, Watched},
};

/// Largest number of bytes that one call moves, whatever length the program passes (`MAX_RW_COUNT`).
const MOST: usize = i32::MAX as usize & !4095;

/// The program's buffers, or the error with which the kernel rejects the arguments at once.
type Parts<T> = Result<T, Errno>;

/// # Safety
/// `len` bytes at `to` are the caller's to be written for the call, or `len` is 0.
unsafe fn part_mut<'a>(to: *mut c_void, len: size_t) -> Parts<IoSliceMut<'a>> {
    match (to.is_null(), len.min(MOST)) {
        (_, 0) => Ok(IoSliceMut::new(&mut [])),
        (true, _) => Err(Errno::FAULT),
        // SAFETY: (valid) the caller's promise.
        (false, len) => Ok(IoSliceMut::new(unsafe { slice::from_raw_parts_mut(to.cast::<u8>(), len) })),
    }
}

/// # Safety
/// `len` bytes at `from` are there to be read for the call, or `len` is 0.
unsafe fn part<'a>(from: *const c_void, len: size_t) -> Parts<IoSlice<'a>> {
    match (from.is_null(), len.min(MOST)) {
        (_, 0) => Ok(IoSlice::new(&[])),
        (true, _) => Err(Errno::FAULT),
        // SAFETY: (valid) the caller's promise.
        (false, len) => Ok(IoSlice::new(unsafe { slice::from_raw_parts(from.cast::<u8>(), len) })),
    }
}

/// # Safety
/// `count` parts at `parts`, each as for [`part_mut`].
unsafe fn parts_mut<'a>(parts: *const iovec, count: usize, too_many: Errno) -> Parts<Few<IoSliceMut<'a>>> {
    // SAFETY: (valid) the caller's promise.
    let parts = unsafe { vector(parts, count, too_many) }?;
    // SAFETY: (valid) the caller's promise, for each part.
    parts.map(|(at, len)| unsafe { part_mut(at, len) }).collect()
}

/// # Safety
/// `count` parts at `parts`, each as for [`part`].
unsafe fn parts<'a>(parts: *const iovec, count: usize, too_many: Errno) -> Parts<Few<IoSlice<'a>>> {
    // SAFETY: (valid) the caller's promise.
    let parts = unsafe { vector(parts, count, too_many) }?;
    // SAFETY: (valid) the caller's promise, for each part.
    parts.map(|(at, len)| unsafe { part(at, len) }).collect()
}

/// Returns the address of each part and its length, cut so that all lengths together stay within [`MOST`].
///
/// # Safety
/// `count` parts at `parts`, or null.
unsafe fn vector<'a>(
    parts: *const iovec,
    count: usize,
    too_many: Errno,
) -> Parts<impl Iterator<Item = (*mut c_void, usize)> + 'a> {
    let parts: &[iovec] = match count {
        0 => &[],
        1025.. => return Err(too_many),
        _ if parts.is_null() => return Err(Errno::FAULT),
        // SAFETY: (valid) the caller's promise.
        _ => unsafe { slice::from_raw_parts(parts, count) },
    };
    if parts.iter().any(|part| part.iov_len > isize::MAX as usize) {
        return Err(Errno::INVAL);
    }
    let mut left = MOST;
    Ok(parts.iter().map(move |part| {
        let len = part.iov_len.min(left);
        left -= len;
        (part.iov_base, len)
    }))
}

/// Evaluates to the process and the connection at `fd`. Otherwise returns from the function with the expression after
/// `else`.
macro_rules! watched {
    ($fd:expr, else $real:expr) => {
        match state::busy() {
            Some(_) if inside::has_interrupted() => {
                return if state::is_out_of_reach($fd) { poll::interrupted() as _ } else { $real };
            }
            Some(process) => match state::connection($fd) {
                Some(connection) => (process, renewal::current(process, $fd, connection)),
                None => return $real,
            },
            None => return $real,
        }
    };
}

/// # Safety
/// As `read(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::read(fd, to, len) };
    let (process, connection) = watched!(fd, else real());
    if len == 0 {
        return real(); // The kernel returns 0 without waiting.
    }
    // SAFETY: (valid) the caller's promise.
    let to = unsafe { part_mut(to, len) };
    flow::receive(process, &connection, fd, to.map(|part| [part]), 0, real)
}

/// # Safety
/// As `write(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::write(fd, from, len) };
    let (process, connection) = watched!(fd, else real());
    // SAFETY: (valid) the caller's promise.
    let from = unsafe { part(from, len) };
    flow::send(process, &connection, fd, from.map(|part| [part]), 0, real)
}

/// # Safety
/// As `recv(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recv(fd: c_int, to: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::recv(fd, to, len, flags) };
    let (process, connection) = watched!(fd, else real());
    if flags & libc::MSG_TRUNC != 0 {
        return flow::discard(process, &connection, fd, len, flags, real);
    }
    // SAFETY: (valid) the caller's promise.
    let to = unsafe { part_mut(to, len) };
    flow::receive(process, &connection, fd, to.map(|part| [part]), flags, real)
}

/// # Safety
/// As `send(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::send(fd, from, len, flags) };
    let (process, connection) = watched!(fd, else real());
    // SAFETY: (valid) the caller's promise.
    let from = unsafe { part(from, len) };
    flow::send(process, &connection, fd, from.map(|part| [part]), flags, real)
}

/// # Safety
/// As `recvfrom(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvfrom(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::recvfrom(fd, to, len, flags, address, address_len) };
    let (process, connection) = watched!(fd, else real());
    let answer = if flags & libc::MSG_TRUNC != 0 {
        flow::discard(process, &connection, fd, len, flags, real)
    } else {
        // SAFETY: (valid) the caller's promise.
        let to = unsafe { part_mut(to, len) };
        flow::receive(process, &connection, fd, to.map(|part| [part]), flags, real)
    };
    if answer < 0 || address.is_null() || address_len.is_null() {
        return answer;
    }
    // SAFETY: (valid) the caller gave a length to be looked at.
    if is_negative(unsafe { address_len.read() }) {
        errno::set(libc::EINVAL); // The kernel checks it only after receiving.
        return -1;
    }
    // The messages of a stream have no addresses; the kernel reports this as a length of 0.
    // SAFETY: (valid) the caller gave a length to be written.
    unsafe { address_len.write(0) };
    answer
}

/// # Safety
/// As `sendto(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    from: *const c_void,
    len: size_t,
    flags: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::sendto(fd, from, len, flags, address, address_len) };
    let (process, connection) = watched!(fd, else real());
    if !address.is_null() && address_len as usize > size_of::<libc::sockaddr_storage>() {
        return real(); // The kernel refuses such a length, and ignores shorter addresses.
    }
    // SAFETY: (valid) the caller's promise.
    let from = unsafe { part(from, len) };
    flow::send(process, &connection, fd, from.map(|part| [part]), flags, real)
}

/// Returns whether the kernel refuses this length of an address, because it reads the length as a signed number.
fn is_negative(len: socklen_t) -> bool {
    len.cast_signed() < 0
}

/// # Safety
/// As `readv(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn readv(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::readv(fd, vector, count) };
    let (process, connection) = watched!(fd, else real());
    // SAFETY: (valid) the caller's promise.
    let to = unsafe { parts_mut(vector, count as usize, Errno::INVAL) };
    if to.as_ref().is_ok_and(|to| to.iter().all(|part| part.is_empty())) {
        return real(); // As for `read`.
    }
    flow::receive(process, &connection, fd, to, 0, real)
}

/// # Safety
/// As `writev(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::writev(fd, vector, count) };
    let (process, connection) = watched!(fd, else real());
    // SAFETY: (valid) the caller's promise.
    let from = unsafe { parts(vector, count as usize, Errno::INVAL) };
    flow::send(process, &connection, fd, from, 0, real)
}

/// # Safety
/// As `recvmsg(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::recvmsg(fd, message, flags) };
    let (process, connection) = watched!(fd, else real());
    // SAFETY: (contract) null or a header of the caller's.
    let Some(header) = (unsafe { message.as_mut() }) else { return real() };
    if !header.msg_name.is_null() && is_negative(header.msg_namelen) {
        return real();
    }
    // SAFETY: (valid) the caller's promise.
    let to = unsafe { parts_mut(header.msg_iov, header.msg_iovlen, Errno::MSGSIZE) };
    // A call with room for control messages goes to the kernel if the connection is back on TCP, so that the kernel
    // writes them.
    if !header.msg_control.is_null()
        && flags & libc::MSG_PEEK == 0
        && let Some(received) = flow::receive_back_on_tcp(process, &connection, real)
    {
        return received;
    }
    ancillary::leave_for_arrivals(process, &connection, fd, header);
    if header.msg_controllen > 0
        && flags == libc::MSG_WAITALL
        && let Ok(to) = &to
    {
        // The kernel reports ancillary data once for a whole call, so the call is not split into pieces.
        let moved = |plain: &Plain<'_>, n| plain.moved(n, to.iter().map(|part| &**part));
        if let Some(n) = plain::plainly(process, &connection, Direction::In, true, real, moved) {
            return n;
        }
    }
    let mut made = false;
    let real = || {
        made = true;
        real()
    };
    // Bytes that are discarded need no buffer.
    let thrown_away = (flags & libc::MSG_TRUNC != 0).then(|| {
        // SAFETY: (valid) the caller's promise.
        let parts = unsafe { vector(header.msg_iov, header.msg_iovlen, Errno::MSGSIZE) };
        parts.map(|parts| parts.map(|(_, len)| len).sum())
    });
    let answer = match thrown_away {
        Some(Ok(len)) => flow::discard(process, &connection, fd, len, flags, real),
        _ => flow::receive(process, &connection, fd, to, flags, real),
    };
    if !made && answer >= 0 {
        header.msg_flags = flags & libc::MSG_CMSG_CLOEXEC;
        // SAFETY: (valid) the caller's promise about its header.
        unsafe { ancillary::write_ancillary(process, &connection, fd, header) };
        if !header.msg_name.is_null() {
            header.msg_namelen = 0;
        }
    }
    answer
}

/// # Safety
/// As `sendmsg(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::sendmsg(fd, message, flags) };
    // SAFETY: (contract) null or a header of the caller's.
    let Some(header) = (unsafe { message.as_ref() }) else { return real() };
    if !header.msg_control.is_null() && !inside::has_interrupted() {
        // SAFETY: (contract) the caller's promise: the control messages are well formed.
        unsafe { given_away(header) };
    }
    let (process, connection) = watched!(fd, else real());
    if !header.msg_name.is_null() && is_negative(header.msg_namelen) {
        return real();
    }
    if header.msg_controllen > 0 && connection.stage() == Stage::Joined {
        // The kernel checks the control messages before anything else, even where there is nothing to send.
        let alone = msghdr { msg_iov: ptr::null_mut(), msg_iovlen: 0, ..*header };
        // SAFETY: (contract) the caller's promise, for a message with no parts.
        let answer = unsafe { real::sendmsg(fd, &raw const alone, flags | libc::MSG_NOSIGNAL) };
        if answer < 0 && errno::get() == libc::EINVAL {
            return answer;
        }
    }
    // SAFETY: (valid) the caller's promise.
    let from = unsafe { parts(header.msg_iov, header.msg_iovlen, Errno::MSGSIZE) };
    if header.msg_controllen > 0
        && let Ok(from) = &from
    {
        // Control messages apply to the whole call, so the call is not split into pieces.
        let moved = |plain: &Plain<'_>, n| plain.moved(n, from.iter().map(|part| &**part));
        let counts = flags & flow::KERNEL_ONLY == 0;
        if let Some(n) = plain::plainly(process, &connection, Direction::Out, counts, real, moved) {
            return n;
        }
    }
    flow::send(process, &connection, fd, from, flags, real)
}

/// Prepares `fd` for being passed to another process.
fn give_away(fd: c_int) {
    state::shared(fd);
    let Some(process) = state::waiting() else { return };
    match state::find(fd) {
        Some(Watched::Connection(connection)) => handback::hand_over(process, fd, &connection, Reason::Shared),
        Some(Watched::Set(set)) => waiting::nested(process, &set),
        None => {}
    }
}

/// Moves connections that the message passes to another process by `SCM_RIGHTS` back to TCP first.
///
/// # Safety
/// As for `sendmsg(2)`.
unsafe fn given_away(header: &msghdr) {
    // SAFETY: (valid) the header is whole.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(header) };
    // SAFETY: (valid) null, or a control message within the header's.
    while let Some(one) = unsafe { control.as_ref() } {
        if one.cmsg_level == libc::SOL_SOCKET && one.cmsg_type == libc::SCM_RIGHTS {
            let bytes = one.cmsg_len.saturating_sub(size_of::<libc::cmsghdr>());
            for at in 0..bytes / size_of::<c_int>() {
                // SAFETY: (valid) it is a control message.
                let first = unsafe { libc::CMSG_DATA(control) }.cast::<c_int>();
                // SAFETY: (in bounds) the message says that so many descriptors follow it.
                let place = unsafe { first.add(at) };
                // SAFETY: (valid) as above; aligned or not.
                let fd = unsafe { place.read_unaligned() };
                errno::kept(|| give_away(fd));
            }
        }
        // SAFETY: (valid) as above.
        control = unsafe { libc::CMSG_NXTHDR(header, control) };
    }
}

/// # Safety
/// As `sendfile(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::sendfile(to, from, offset, count) };
    if offset.is_null() && count > 0 && splice::is_to_pipe(from, to) {
        // The kernel's call does the same. It would wait for bytes that are in shared memory.
        // SAFETY: (valid) no offsets.
        return unsafe { splice::splice(from, ptr::null_mut(), to, ptr::null_mut(), count, 0) };
    }
    let (process, connection) = watched!(to, else real());
    let moved = |plain: &Plain<'_>, n| {
        // SAFETY: (contract) null or an offset of the caller's.
        let end = match unsafe { offset.as_ref() } {
            Some(at) => *at,
            // SAFETY: (contract) any descriptor may be asked where it is.
            None => unsafe { libc::lseek(from, 0, libc::SEEK_CUR) },
        };
        moved_of_file(plain, from, end - n as off_t, n);
    };
    let mut done = 0;
    if plain::is_long(&connection, to, Direction::Out, count) {
        // SAFETY: (contract) the caller's promise.
        let piece = |_, len| unsafe { real::sendfile(to, from, offset, len) };
        let moved = |plain: &Plain<'_>, _, n| moved(plain, n);
        match plain::carry(process, &connection, to, Direction::Out, count, piece, moved) {
            Progress::Over(sent) => return sent,
            Progress::Joined(sent) => done = sent,
        }
    } else if let Some(sent) = plain::plainly(process, &connection, Direction::Out, true, real, moved) {
        return sent;
    }
    // SAFETY: (contract) null or an offset of the caller's.
    let begin = match unsafe { offset.as_ref() } {
        Some(at) => *at,
        // SAFETY: (contract) any descriptor may be asked where it is.
        None => unsafe { libc::lseek(from, 0, libc::SEEK_CUR) },
    };
    let sent = copy_file(process, &connection, to, from, begin, count - done);
    if sent <= 0 && done == 0 {
        // If the arguments are at fault, the kernel reports why: it checks them even if nothing is to be sent.
        // SAFETY: (contract) the caller's promise.
        let answer = errno::kept(|| errno::result(unsafe { real::sendfile(to, from, offset, 0) }));
        if let Err(error) = answer {
            errno::set(error.raw_os_error());
            return -1;
        }
    }
    if sent > 0 {
        // SAFETY: (contract) null or an offset of the caller's.
        match unsafe { offset.as_mut() } {
            Some(at) => *at += sent as off_t,
            // SAFETY: (contract) any descriptor may be moved.
            None => drop(unsafe { libc::lseek(from, begin + sent as off_t, libc::SEEK_SET) }),
        }
    }
    if done > 0 { done as ssize_t + sent.max(0) } else { sent }
}

/// Records that the kernel has sent `n` bytes of a file from `begin` on. Reads back as many of them as a proof may need
/// (S-6).
fn moved_of_file(plain: &Plain<'_>, from: c_int, begin: off_t, n: usize) {
    let mut bytes = [0_u8; HISTORY];
    let want = n.min(HISTORY);
    // SAFETY: (valid) there are `want` bytes.
    if plain.remembers() && unsafe { libc::pread(from, bytes.as_mut_ptr().cast(), want, begin) } == want as ssize_t {
        plain.moved(n, std::iter::once(&bytes[..want]));
    } else {
        plain.moved_unseen(n);
    }
}

/// Sends up to `count` bytes of a file from `begin` on, as far as there is room. The call waits for room only if there
/// is none at all.
fn copy_file(
    process: &Process,
    connection: &Arc<Connection>,
    to: c_int,
    from: c_int,
    begin: off_t,
    count: size_t,
) -> ssize_t {
    // The buffer is on the heap, because the thread's stack may be small.
    let mut buffer = Box::<[u8]>::new_uninit_slice(64 << 10);
    let mut done = 0;
    while done < count {
        let want = (count - done).min(buffer.len());
        // SAFETY: (valid) the buffer has `want` bytes.
        let there = unsafe { libc::pread(from, buffer.as_mut_ptr().cast(), want, begin + done as off_t) };
        if there <= 0 {
            return if done == 0 { there } else { done as ssize_t };
        }
        // SAFETY: (valid) the kernel has written so many bytes of it.
        let read = unsafe { slice::from_raw_parts(buffer.as_ptr().cast::<u8>(), there as usize) };
        let sent = flow::send(process, connection, to, Ok([IoSlice::new(read)]), 0, || -1);
        if sent < 0 {
            return if done == 0 { sent } else { done as ssize_t };
        }
        done += sent as usize;
        if sent < there {
            break;
        }
    }
    done as ssize_t
}

/// # Safety
/// As `sendfile(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile64(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    unsafe { sendfile(to, from, offset, count) }
}

// ---- fortified variants: the same calls, after a check that the buffer is large enough

/// # Safety
/// As `read(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __read_chk(fd: c_int, to: *mut c_void, len: size_t, size: size_t) -> ssize_t {
    check(len <= size);
    // SAFETY: (contract) the caller's promise.
    unsafe { read(fd, to, len) }
}

/// # Safety
/// As `recv(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __recv_chk(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    size: size_t,
    flags: c_int,
) -> ssize_t {
    check(len <= size);
    // SAFETY: (contract) the caller's promise.
    unsafe { recv(fd, to, len, flags) }
}

/// # Safety
/// As `recvfrom(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __recvfrom_chk(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    size: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    check(len <= size);
    // SAFETY: (contract) the caller's promise.
    unsafe { recvfrom(fd, to, len, flags, address, address_len) }
}
