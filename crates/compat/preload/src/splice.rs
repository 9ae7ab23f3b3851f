// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries out `splice` from and to connections: by way of a buffer if they have shared memory. Before they have some,
//! the kernel moves the bytes, which are counted.
//!
//! `unsafe` is needed because the program passes its offsets as pointers.
#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_uint, c_void},
    io::IoSliceMut,
    os::fd::{AsRawFd, OwnedFd},
    ptr,
    sync::Arc,
};

use libc::{off_t, size_t, ssize_t};
use rustix::io::Errno;
use tombolo_sockets::{
    Process, Source,
    connection::{Connection, Direction, Plain, Stage},
    kernel::Kernel,
    proof::HISTORY,
};

use crate::{errno, flow, inside, kernel, plain, real, state};

/// Number of bytes moved at once, which is what a pipe holds. Below, what has room in a pipe that reports room
/// (`PIPE_BUF`); no packet is longer.
const MOST: usize = 64 << 10;
const PAGE: usize = 4096;
/// All flags that exist.
const FLAGS: c_uint = libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

/// Way in which the bytes of a call are moved.
enum How {
    /// By a buffer: through shared memory, or because a proof needs the first ones (S-6).
    Copied,
    /// By the kernel.
    Spliced,
}

fn how(process: &Process, connection: &Arc<Connection>, direction: Direction) -> How {
    plain::begin(process, connection);
    match connection.plain(direction) {
        None => How::Copied,
        Some(plain) if plain.remembers() => How::Copied,
        Some(_) => How::Spliced,
    }
}

/// Lets the kernel move the bytes, and counts them. Returns `None` if the connection was joined meanwhile.
fn spliced(
    process: &Process,
    connection: &Arc<Connection>,
    direction: Direction,
    real: impl FnOnce() -> ssize_t,
) -> Option<ssize_t> {
    plain::plainly(process, connection, direction, true, real, |plain, n| plain.moved_unseen(n))
}

/// Hands what has come on the connection on to a pipe.
fn from_connection(
    process: &Process,
    connection: &Arc<Connection>,
    from: c_int,
    to: c_int,
    len: usize,
    flags: c_uint,
) -> ssize_t {
    // The buffer is on the heap, because the thread's stack may be small.
    let mut buffer = vec![0; len];
    let waits = waits_for_pipe(to, flags);
    loop {
        // The order is the kernel's: first the pipe, then the socket.
        if let Err(errno) = wait_for_room(to, waits) {
            return failed(errno);
        }
        if connection.stage() != Stage::Joined {
            return first_from_connection(process, connection, (from, to), &mut buffer, waits);
        }
        // The flag is about the pipe alone. This look is the call's wait for the socket, which counts even if there is
        // something (S-2).
        let there = receive(process, connection, from, &mut buffer[..1], libc::MSG_PEEK);
        if there <= 0 {
            return there;
        }
        let give = |bytes: &[u8]| errno::result(write(to, bytes, true));
        let moved = flow::receive_through(process, connection, from, &mut buffer, give);
        // Another thread may have taken what there was, or filled the pipe.
        if moved >= 0 || errno::get() != libc::EAGAIN || !waits {
            return moved;
        }
    }
}

/// Hands on the first bytes, which come over TCP and which a proof needs. Peeks at them, writes them to the pipe, and
/// then takes what was written.
fn first_from_connection(
    process: &Process,
    connection: &Arc<Connection>,
    (from, to): (c_int, c_int),
    buffer: &mut [u8],
    waits: bool,
) -> ssize_t {
    let there = receive(process, connection, from, buffer, libc::MSG_PEEK);
    if there <= 0 {
        return there;
    }
    let written = write(to, &buffer[..there as usize], !waits);
    if written > 0 {
        receive(process, connection, from, &mut buffer[..written as usize], libc::MSG_DONTWAIT | libc::MSG_WAITALL);
    }
    written
}

fn receive(process: &Process, connection: &Arc<Connection>, from: c_int, to: &mut [u8], flags: c_int) -> ssize_t {
    let (at, len) = (to.as_mut_ptr().cast::<c_void>(), to.len());
    // SAFETY: (valid) `to` is a slice, which the call of this library does not touch while the kernel's lasts.
    let real = || unsafe { real::recv(from, at, len, flags) };
    flow::receive(process, connection, from, Ok([IoSliceMut::new(to)]), flags, real)
}

/// Writes as much to a pipe as has room in it, by pages, as a pipe that reports room has room for a page. A call that
/// waits does so for the first page only.
fn write(to: c_int, bytes: &[u8], at_once: bool) -> ssize_t {
    let mut done = 0;
    for part in bytes.chunks(PAGE) {
        let written = if at_once || done > 0 {
            write_now(to, part)
        } else {
            // SAFETY: (valid) the part is there for the call.
            unsafe { real::write(to, part.as_ptr().cast::<c_void>(), part.len()) }
        };
        if written < 0 {
            return if done == 0 { -1 } else { done };
        }
        done += written;
        if written < part.len() as ssize_t {
            break;
        }
    }
    done
}

/// Does the same without waiting, also if another thread fills the pipe meanwhile.
fn write_now(to: c_int, bytes: &[u8]) -> ssize_t {
    let part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: (valid) one part, which is a slice and is only read.
    let written = unsafe { real::pwritev2(to, &raw const part, 1, -1, libc::RWF_NOWAIT) };
    if written >= 0 || errno::get() != libc::EOPNOTSUPP {
        return written;
    }
    match Detour::new() {
        Ok(detour) => detour.give(to, bytes),
        Err(errno) => failed(errno),
    }
}

/// Returns what the kernel reports of a descriptor now. A signal handler of the program may not run in the middle of
/// this as if nothing were locked.
fn ask_events(fd: c_int, events: i16) -> i16 {
    kernel::Linux.poll(fd, events)
}

/// Returns whether a call on the descriptor would not wait, because it can be done or fails.
fn is_ready(fd: c_int, events: i16) -> bool {
    ask_events(fd, events) != 0
}

/// A pipe of this library's, through which bytes go from and to those of the program's pipes that do not know
/// `RWF_NOWAIT`. Those are FIFOs that have a name, pipes that were opened anew, and before Linux 6.4 all. `splice`
/// between two pipes does not wait if it is told so. It leaves the rest of a packet (`O_DIRECT`) where it is, which a
/// read discards.
struct Detour {
    reads: OwnedFd,
    writes: OwnedFd,
}

impl Detour {
    fn new() -> Result<Self, Errno> {
        let made = errno::kept(|| inside::lifted(|| rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)));
        made.map(|(reads, writes)| Self { reads, writes })
    }

    /// Takes from a pipe what is there, as far as `to` has room.
    fn take_bytes(&self, from: c_int, to: &mut [u8]) -> ssize_t {
        let there = moved(from, self.writes.as_raw_fd(), to.len(), libc::SPLICE_F_NONBLOCK);
        let mut done = 0;
        while done < there {
            let rest = &mut to[done as usize..there as usize];
            // SAFETY: (valid) `rest` is a slice.
            let n = unsafe { real::read(self.reads.as_raw_fd(), rest.as_mut_ptr().cast::<c_void>(), rest.len()) };
            match n {
                // A signal changes nothing here, because so many bytes are in the pipe.
                -1 => {}
                0 => break,
                n => done += n,
            }
        }
        there
    }

    /// Puts as much of `bytes` into a pipe as has room there, a page at most.
    fn give(self, to: c_int, bytes: &[u8]) -> ssize_t {
        // SAFETY: (valid) the bytes are there for the call.
        let n = unsafe { real::write(self.writes.as_raw_fd(), bytes.as_ptr().cast::<c_void>(), bytes.len()) };
        if n <= 0 { n } else { moved(self.reads.as_raw_fd(), to, n as usize, libc::SPLICE_F_NONBLOCK) }
    }
}

/// The program's pipe from which a call takes bytes, and the socket to which the kernel is to give them.
struct Taken {
    from: c_int,
    to: c_int,
    flags: c_uint,
    patient: bool,
    empty: bool,
    /// Made while nothing is locked, once something could not be taken otherwise.
    detour: Option<Detour>,
    wants_detour: bool,
}

impl Taken {
    fn looked(&mut self, answer: ssize_t) -> Result<usize, Errno> {
        let taken = errno::result(answer);
        self.empty = taken == Err(Errno::AGAIN);
        taken
    }

    /// Returns whether a read of `len` bytes cuts no packet. A packet longer than all that is there now is possible
    /// only if another thread takes from the pipe as well.
    fn takes_whole_packets(&self, len: usize) -> bool {
        len >= PAGE || rustix::io::ioctl_fionread(kernel::borrow(self.from)).is_ok_and(|there| there <= len as u64)
    }
}

impl Source for Taken {
    fn take_bytes(&mut self, to: &mut [u8]) -> Result<usize, Errno> {
        if let Some(detour) = &self.detour {
            let taken = detour.take_bytes(self.from, to);
            return self.looked(taken);
        }
        if errno::kept(|| self.takes_whole_packets(to.len())) {
            let part = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
            // SAFETY: (valid) one part, which is a slice.
            let taken = unsafe { real::preadv2(self.from, &raw const part, 1, -1, libc::RWF_NOWAIT) };
            if taken >= 0 || errno::get() != libc::EOPNOTSUPP {
                return self.looked(taken);
            }
        }
        (self.wants_detour, self.empty) = (true, true);
        Err(Errno::AGAIN)
    }

    fn pass_on(&mut self, most: usize) -> Result<usize, Errno> {
        if !is_ready(self.from, libc::POLLIN) {
            self.empty = true;
            return Err(Errno::AGAIN);
        }
        let mut len = most;
        if self.patient {
            // The kernel would wait for room within its call, during which nobody else may send or fork.
            if !is_ready(self.to, libc::POLLOUT) {
                self.empty = false;
                return Err(Errno::AGAIN);
            }
            len = len.min(PAGE);
        }
        let moved = errno::result(moved(self.from, self.to, len, self.flags | libc::SPLICE_F_NONBLOCK));
        self.empty = moved == Err(Errno::AGAIN) && !is_ready(self.from, libc::POLLIN);
        moved
    }
}

impl flow::Supply for Taken {
    fn be_patient(&mut self, patient: bool) {
        self.patient = patient;
    }

    fn is_empty(&self) -> bool {
        self.empty
    }
}

/// Makes the kernel's call between two descriptors, without offsets.
fn moved(from: c_int, to: c_int, len: usize, flags: c_uint) -> ssize_t {
    // SAFETY: (valid) no offsets.
    unsafe { real::splice(from, ptr::null_mut(), to, ptr::null_mut(), len, flags) }
}

/// Waits until there is something in a pipe, if the call waits for that.
fn wait_for_bytes(from: c_int, waits: bool) -> Result<(), Errno> {
    while !is_ready(from, libc::POLLIN) {
        let mut one = [libc::pollfd { fd: from, events: libc::POLLIN, revents: 0 }];
        match if waits { kernel::poll(&mut one, None, None) } else { Err(Errno::AGAIN) } {
            Err(errno) if errno != Errno::INTR || !kernel::handlers_restart() => return Err(errno),
            _ => {}
        }
    }
    Ok(())
}

/// Waits until a pipe has room, if the call waits for that. A pipe that nobody reads has none.
fn wait_for_room(to: c_int, waits: bool) -> Result<(), Errno> {
    loop {
        let said = ask_events(to, libc::POLLOUT);
        if said & libc::POLLERR != 0 {
            kernel::signal_broken_pipe();
            return Err(Errno::PIPE);
        }
        if said != 0 {
            return Ok(());
        }
        let mut one = [libc::pollfd { fd: to, events: libc::POLLOUT, revents: 0 }];
        match if waits { kernel::poll(&mut one, None, None) } else { Err(Errno::AGAIN) } {
            Err(errno) if errno != Errno::INTR || !kernel::handlers_restart() => return Err(errno),
            _ => {}
        }
    }
}

fn failed(errno: Errno) -> ssize_t {
    errno::set(errno.raw_os_error());
    -1
}

/// Sends what is in a pipe on the connection, once there is something.
fn to_connection(
    process: &Process,
    connection: &Arc<Connection>,
    (from, to): (c_int, c_int),
    len: usize,
    flags: c_uint,
) -> ssize_t {
    let waits = waits_for_pipe(from, flags);
    let mut taken = Taken { from, to, flags, patient: true, empty: false, detour: None, wants_detour: false };
    loop {
        if let Err(errno) = wait_for_bytes(from, waits) {
            return failed(errno);
        }
        taken.empty = false;
        let sent = flow::send_from(process, connection, to, &mut taken, len);
        if sent < 0 && taken.wants_detour && taken.detour.is_none() {
            match Detour::new() {
                Ok(detour) => taken.detour = Some(detour),
                Err(errno) => return failed(errno),
            }
            continue;
        }
        // Another thread may have taken what there was.
        if sent >= 0 || !taken.empty || !waits {
            return sent;
        }
    }
}

/// Sends the first bytes by the kernel's call, and looks at them before, because a proof needs them.
fn first_to_connection(
    process: &Process,
    connection: &Arc<Connection>,
    (from, to): (c_int, c_int),
    len: usize,
    flags: c_uint,
) -> ssize_t {
    if let Err(errno) = wait_for_bytes(from, waits_for_pipe(from, flags)) {
        return failed(errno);
    }
    let seen = show(from, len.min(HISTORY)).unwrap_or_default();
    let real = || moved(from, to, len, flags);
    // A proof knows nothing of bytes beyond those seen, which have come since. But it needs no more than `HISTORY`
    // bytes.
    let count = |plain: &Plain<'_>, n: usize| match seen.get(..n.min(HISTORY)) {
        Some(seen) => plain.moved(n, std::iter::once(seen)),
        None => plain.moved_unseen(n),
    };
    plain::plainly(process, connection, Direction::Out, true, real, count)
        .unwrap_or_else(|| to_connection(process, connection, (from, to), len, flags))
}

/// Returns up to `most` of the bytes in a pipe, which stay there. Another reader of the pipe may take them before this
/// call does: then a proof fails.
fn show(from: c_int, most: usize) -> Option<Vec<u8>> {
    errno::kept(|| {
        let (reads, writes) = inside::lifted(|| rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)).ok()?;
        let flags = rustix::pipe::SpliceFlags::NONBLOCK;
        let there = rustix::pipe::tee(kernel::borrow(from), &writes, most, flags).ok()?;
        let mut bytes = vec![0; there];
        let n = if there == 0 { 0 } else { rustix::io::read(&reads, &mut bytes).ok()? };
        bytes.truncate(n);
        Some(bytes)
    })
}

fn waits_for_pipe(fd: c_int, flags: c_uint) -> bool {
    flags & libc::SPLICE_F_NONBLOCK == 0 && !kernel::is_nonblocking(fd)
}

/// # Safety
/// As `splice(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_at: *mut off_t,
    to: c_int,
    to_at: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::splice(from, from_at, to, to_at, len, flags) };
    let Some(process) = state::busy().filter(|_| !inside::has_interrupted()) else { return real() };
    // A connection has no offset, and the pipe on the other side has none.
    if !from_at.is_null() || !to_at.is_null() || len == 0 || flags & !FLAGS != 0 {
        return real();
    }
    if let Some(connection) = state::connection(from) {
        if !is_pipe(to, libc::O_WRONLY) {
            return real(); // The kernel refuses this.
        }
        return match how(process, &connection, Direction::In) {
            How::Copied => from_connection(process, &connection, from, to, len.min(MOST), flags),
            How::Spliced => spliced(process, &connection, Direction::In, real)
                .unwrap_or_else(|| from_connection(process, &connection, from, to, len.min(MOST), flags)),
        };
    }
    if let Some(connection) = state::connection(to) {
        if !is_pipe(from, libc::O_RDONLY) {
            return real(); // As above.
        }
        let ends = (from, to);
        return match (how(process, &connection, Direction::Out), connection.stage()) {
            (How::Copied, Stage::Joined) => to_connection(process, &connection, ends, len, flags),
            (How::Copied, _) => first_to_connection(process, &connection, ends, len, flags),
            (How::Spliced, _) => spliced(process, &connection, Direction::Out, real)
                .unwrap_or_else(|| to_connection(process, &connection, ends, len, flags)),
        };
    }
    real()
}

/// Returns whether a call between these two takes from a connection and gives to a pipe.
pub fn is_to_pipe(from: c_int, to: c_int) -> bool {
    state::busy().is_some_and(|_| !inside::has_interrupted())
        && state::connection(from).is_some()
        && is_pipe(to, libc::O_WRONLY)
}

/// Returns whether `fd` is a pipe, open for reading or for writing as `way` says.
fn is_pipe(fd: c_int, way: c_int) -> bool {
    errno::kept(|| {
        let fd = kernel::borrow(fd);
        let is_fifo = |found: rustix::fs::Stat| rustix::fs::FileType::from_raw_mode(found.st_mode).is_fifo();
        let mode = rustix::fs::fcntl_getfl(fd).map(|flags| flags.bits() as c_int & libc::O_ACCMODE);
        rustix::fs::fstat(fd).is_ok_and(is_fifo) && mode.is_ok_and(|mode| mode == way || mode == libc::O_RDWR)
    })
}
