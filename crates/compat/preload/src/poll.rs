// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exported calls `poll`, `select` and their variants.
//!
//! `unsafe` is needed because the program passes its arrays as pointers.
#![allow(unsafe_code)]

use std::{
    ffi::c_int,
    slice,
    sync::Arc,
    time::{Duration, Instant},
};

use libc::{fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use rustix::{
    io::Errno,
    process::{Resource, getrlimit},
};
use tombolo_sockets::{
    Process,
    connection::{Connection, Direction, Plain, Stage},
};

use crate::{
    epoll::waiting,
    errno,
    inside::{self, Few},
    kernel::Mask,
    plain, real, state,
    wait::{self, Joined},
};

/// Converts a time that a call passes. An invalid time is an error, for the kernel to refuse.
pub(crate) fn duration(limit: Option<&timespec>) -> Result<Option<Duration>, Errno> {
    let given = |limit: &timespec| match (u64::try_from(limit.tv_sec), limit.tv_nsec) {
        (Ok(seconds), 0..1_000_000_000) => Ok(Duration::new(seconds, limit.tv_nsec as u32)),
        _ => Err(Errno::INVAL),
    };
    limit.map(given).transpose()
}

/// Returns the point in time at which a timeout ends, `None` for never.
fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// Advances the connections among `fds`. Returns those that are joined, and a guard for each of the others, whose
/// kernel call this is.
fn sort<'a>(process: &Process, fds: &[pollfd], all: &'a [(usize, Arc<Connection>)]) -> (Few<Joined>, Few<Plain<'a>>) {
    let (mut joined, mut plain) = (Few::new(), Few::new());
    for set in fds.iter().filter_map(|entry| state::set(entry.fd)) {
        waiting::nested(process, &set);
    }
    for (at, connection) in all {
        note_asked(connection, fds[*at].events);
        plain::begin(process, connection);
        match connection.stage() {
            Stage::Joined => joined.push((*at, Arc::clone(connection))),
            Stage::Candidate if fds[*at].events & (libc::POLLIN | libc::POLLRDNORM) != 0 => {
                match connection.plain(Direction::In) {
                    Some(inside) => plain.push(inside),
                    None => joined.push((*at, Arc::clone(connection))),
                }
            }
            Stage::Candidate | Stage::Plain => {}
        }
    }
    (joined, plain)
}

/// Records that the program waits for these events by a call that comes here. A program that asks for bytes by such a
/// call asks for room by one too.
fn note_asked(connection: &Connection, events: i16) {
    let waits = connection.wiring.waits();
    if events & (libc::POLLIN | libc::POLLRDNORM) != 0 {
        waits.note_both_asked();
    } else if events & (libc::POLLOUT | libc::POLLWRNORM) != 0 {
        waits.note_asked(Direction::Out);
    }
}

/// Returns the failure of a call that a signal handler makes, if it would need what the interrupted call holds.
pub(crate) fn interrupted() -> c_int {
    errno::set(libc::EINTR);
    -1
}

/// Returns the connections among `fds`. Usually there are none, which costs a load for each.
fn connections(fds: &[pollfd]) -> Few<Joined> {
    let found = fds.iter().enumerate().filter_map(|(at, entry)| state::connection(entry.fd).map(|found| (at, found)));
    found.collect()
}

/// Carries out `poll` with the timeout as a duration; `real` is the program's call itself.
fn poll_any(fds: &mut [pollfd], timeout: Option<Duration>, mask: Mask, real: impl FnOnce() -> c_int) -> c_int {
    let Some(process) = state::waiting() else { return real() };
    if inside::has_interrupted() {
        return if fds.iter().any(|entry| state::is_out_of_reach(entry.fd)) { interrupted() } else { real() };
    }
    let all = connections(fds);
    // Connections that are not joined stay so until this ends. Nobody here would see what came for them another way.
    let (joined, _plain) = sort(process, fds, &all);
    if joined.is_empty() {
        return real();
    }
    let before = errno::get();
    fds.iter_mut().for_each(|entry| entry.revents = 0);
    let answer = errno::answer(wait::all(process, fds, &joined, deadline(timeout), mask)) as c_int;
    if answer >= 0 {
        errno::set(before);
    }
    answer
}

/// Returns the entries of a call, or none where the kernel refuses the call for their number before it looks at any.
///
/// # Safety
/// As `poll(2)`.
unsafe fn entries<'a>(fds: *mut pollfd, count: nfds_t) -> &'a mut [pollfd] {
    // The limit is read only for so many entries that they may be a mistake of the caller's: a sandbox may kill a
    // process that reads it.
    let too_many =
        count > libc::FD_SETSIZE as nfds_t && getrlimit(Resource::Nofile).current.is_some_and(|most| count > most);
    if fds.is_null() || count == 0 || too_many {
        return &mut [];
    }
    // SAFETY: (valid) the caller of `poll` promises `count` entries that are its own for the call.
    unsafe { slice::from_raw_parts_mut(fds, count as usize) }
}

/// # Safety
/// As `poll(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: (contract) the caller's promise.
    let entries = unsafe { entries(fds, count) };
    let limit = u64::try_from(timeout).ok().map(Duration::from_millis);
    poll_any(entries, limit, None, || {
        // SAFETY: (contract) the caller's promise.
        unsafe { real::poll(fds, count, timeout) }
    })
}

/// # Safety
/// As `poll(2)`, with the size of the array known to the compiler.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, size: usize) -> c_int {
    check(size / size_of::<pollfd>() >= count as usize);
    // SAFETY: (contract) the caller's promise.
    unsafe { poll(fds, count, timeout) }
}

/// # Safety
/// As `ppoll(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: (contract) the caller's promise.
    let entries = unsafe { entries(fds, count) };
    // SAFETY: (contract) null or a time.
    let limit = unsafe { timeout.as_ref() };
    // SAFETY: (contract) the caller's promise.
    let real = || unsafe { real::ppoll(fds, count, timeout, mask) };
    let Ok(limit) = duration(limit) else { return real() };
    poll_any(entries, limit, (!mask.is_null()).then_some(mask), real)
}

/// # Safety
/// As `ppoll(2)`, with the size of the array known to the compiler.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    size: usize,
) -> c_int {
    check(size / size_of::<pollfd>() >= count as usize);
    // SAFETY: (contract) the caller's promise.
    unsafe { ppoll(fds, count, timeout, mask) }
}

/// Aborts as a fortified function does, if a buffer is too small.
pub(crate) fn check(fits: bool) {
    if !fits {
        std::process::abort();
    }
}

/// The bits of a `select` set. Programs make sets larger than `FD_SETSIZE`, so the length is the caller's count.
struct Bits(*mut fd_set);

impl Bits {
    /// Returns the word that has the bit of `fd`, and the bit.
    fn word(&self, fd: c_int) -> Option<(*mut u64, u64)> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: (in bounds) the caller of `select` promises bits for every descriptor below its count.
        let word = unsafe { self.0.cast::<u64>().add(fd as usize / 64) };
        Some((word, 1 << (fd % 64)))
    }

    fn has(&self, fd: c_int) -> bool {
        // SAFETY: (valid) as in `word`; a set is made of whole words.
        self.word(fd).is_some_and(|(word, bit)| unsafe { word.read() } & bit != 0)
    }

    fn put(&self, fd: c_int, value: bool) {
        let Some((word, bit)) = self.word(fd) else { return };
        // SAFETY: (valid) as in `has`.
        let others = unsafe { word.read() } & !bit;
        // SAFETY: (valid) as in `has`; (exclusive) the set is the caller's for the call.
        unsafe { word.write(if value { others | bit } else { others }) };
    }
}

/// Returns how many of `count` descriptors the kernel would look at without this library. These are no more than its
/// table has room for, which grows with the highest number that was ever taken. Programs that pass `getdtablesize()`
/// have room for fewer, and rely on that.
fn known(count: c_int) -> c_int {
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let open = inside::lifted(|| {
        let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        open.filter_map(number).filter(|fd| !state::is_ours(*fd)).max()
    });
    let room = |highest: c_int| (highest as u32 + 1).next_power_of_two().max(libc::FD_SETSIZE as u32);
    open.map_or(count, |highest| count.min(room(highest) as c_int))
}

/// Carries out `select`, by way of `poll` if any of its descriptors is joined; `real` is the program's call itself.
/// Also returns how much of the time is left, if that call was not made.
fn select_any(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: Option<Duration>,
    mask: Mask,
    real: impl FnOnce(c_int) -> c_int,
) -> (c_int, Option<Duration>) {
    let Some(process) = state::waiting() else { return (real(count), None) };
    let count = if count as usize <= libc::FD_SETSIZE || inside::has_interrupted() {
        count
    } else {
        errno::kept(|| known(count))
    };
    let begun = Instant::now();
    let sets = sets.map(Bits);
    let mut fds = Few::new();
    for fd in 0..count.max(0) {
        let wants = [0, 1, 2].map(|set| sets[set].has(fd));
        if wants != [false; 3] {
            let events = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI];
            let events = events.iter().zip(wants).filter(|(_, wanted)| *wanted).map(|(event, _)| event).sum();
            fds.push(pollfd { fd, events, revents: 0 });
        }
    }
    if inside::has_interrupted() {
        let stops = fds.iter().any(|entry| state::is_out_of_reach(entry.fd));
        return (if stops { interrupted() } else { real(count) }, None);
    }
    let all = connections(&fds);
    let (joined, _plain) = sort(process, &fds, &all);
    if joined.is_empty() {
        return (real(count), None);
    }
    let before = errno::get();
    // Also reported after a signal: a program that begins again with the whole time would wait for ever if many signals
    // come.
    let left = || timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
    if let Err(error) = wait::all(process, &mut fds, &joined, deadline(timeout), mask) {
        errno::set(error.raw_os_error());
        return (-1, left());
    }
    if fds.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        errno::set(libc::EBADF);
        return (-1, left());
    }
    errno::set(before);
    let ready = [libc::POLLIN | libc::POLLHUP | libc::POLLERR, libc::POLLOUT | libc::POLLERR, libc::POLLPRI];
    let mut found = 0;
    for entry in &fds {
        for (set, ready) in sets.iter().zip(ready) {
            let hit = set.has(entry.fd) && entry.revents & ready != 0;
            set.put(entry.fd, hit);
            found += c_int::from(hit);
        }
    }
    (found, left())
}

/// # Safety
/// As `select(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: (contract) null or a time.
    let limit = unsafe { timeout.as_ref() };
    // SAFETY: (contract) the caller's promise.
    let real = |count| unsafe { real::select(count, read, write, except, timeout) };
    if limit.is_some_and(|limit| limit.tv_sec < 0 || limit.tv_usec < 0) {
        return real(count); // The kernel refuses it.
    }
    let limit =
        limit.map(|limit| Duration::from_secs(limit.tv_sec as u64) + Duration::from_micros(limit.tv_usec as u64));
    let (answer, left) = select_any(count, [read, write, except], limit, None, real);
    if let Some(left) = left {
        // Linux reports how much of the time is left.
        let rest = timeval { tv_sec: left.as_secs() as libc::time_t, tv_usec: left.subsec_micros().into() };
        // SAFETY: (valid) a time was given, so the pointer is not null, and it is the caller's to be written.
        unsafe { timeout.write(rest) };
    }
    answer
}

/// # Safety
/// As `pselect(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: (contract) null or a time.
    let limit = unsafe { timeout.as_ref() };
    // SAFETY: (contract) the caller's promise.
    let real = |count| unsafe { real::pselect(count, read, write, except, timeout, mask) };
    let Ok(limit) = duration(limit) else { return real(count) };
    let mask_or_none = (!mask.is_null()).then_some(mask);
    select_any(count, [read, write, except], limit, mask_or_none, real).0
}
