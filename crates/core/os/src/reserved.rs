// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps descriptors of a library out of the way of a program that knows nothing of it.
//!
//! A program counts on the lowest numbers, and on being the only one that opens and closes descriptors. So after
//! [`reserve_descriptors`] what backends hold goes to numbers beyond the program's limit, as `RLIMIT_NOFILE` bounds
//! numbers and not how many there are. [`is_reserved`] tells code that stands in for `close` what is not the program's
//! to close.

use std::{
    cell::Cell,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use rustix::{
    io::Errno,
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

/// Highest number that may be the first reserved one. Others are too costly: the kernel's table, which a fork copies,
/// is as long as the highest number.
const HIGH: u64 = 16 << 10;
/// Number of descriptors that there is room for beyond the program's limit.
const ROOM: u64 = 8 << 10;
/// Number of reserved descriptors at the end of the program's own, where its limit cannot be lifted; below, the least
/// limit with that many to spare.
const SPARE: u64 = 64;
const SPARES: u64 = 1 << 10;

/// Whether this process reserves descriptors.
static KEEPS: AtomicBool = AtomicBool::new(false);
/// One bit for each number: whether it is reserved.
static RESERVED: [AtomicU64; ((HIGH + 2 * ROOM) / 64) as usize] =
    [const { AtomicU64::new(0) }; ((HIGH + 2 * ROOM) / 64) as usize];
/// Lock held while the process's limit is not what the program set.
static LIMIT: Mutex<()> = Mutex::new(());

thread_local! {
    /// Limit that the program set, while this thread has lifted it.
    static BEFORE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Reserves descriptors from now on, because this process is another program's.
pub fn reserve_descriptors() {
    KEEPS.store(true, Ordering::Relaxed);
}

/// Returns a guard that keeps the process's limit at what the program set, for a caller that makes a copy of the
/// process.
pub fn hold() -> MutexGuard<'static, ()> {
    LIMIT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether `fd` is reserved.
#[must_use]
pub fn is_reserved(fd: RawFd) -> bool {
    let Some((word, bit)) = bit(fd) else { return false };
    word.load(Ordering::Relaxed) & bit != 0
}

/// Returns the first reserved number from `fd` on.
#[must_use]
pub fn next(fd: RawFd) -> Option<RawFd> {
    let from = usize::try_from(fd).ok()?;
    let words = RESERVED.iter().enumerate().skip(from / 64);
    words.into_iter().find_map(|(at, word)| {
        let before = if at == from / 64 { (1 << (from % 64)) - 1 } else { 0 };
        let left = word.load(Ordering::Relaxed) & !before;
        (left != 0).then(|| (at * 64) as RawFd + left.trailing_zeros() as RawFd)
    })
}

fn bit(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let at = usize::try_from(fd).ok()?;
    Some((RESERVED.get(at / 64)?, 1 << (at % 64)))
}

/// A descriptor that a backend holds for long.
#[derive(Debug)]
pub struct ReservedFd(OwnedFd);

impl ReservedFd {
    /// Moves `fd` to a reserved number if this process reserves descriptors; else it stays as it is.
    ///
    /// # Errors
    /// `MFILE` where there is no number to spare.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        if !keeps() {
            return Ok(Self(fd));
        }
        let moved = place(&fd)?;
        match bit(moved.as_raw_fd()) {
            Some((word, bit)) => word.fetch_or(bit, Ordering::Relaxed),
            None => return Err(Errno::MFILE.into()),
        };
        Ok(Self(moved))
    }
}

impl Drop for ReservedFd {
    fn drop(&mut self) {
        if let Some((word, bit)) = bit(self.0.as_raw_fd()) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

impl AsFd for ReservedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for ReservedFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Calls `f`, which opens descriptors for a moment, while the process may have more than the program's limit allows. At
/// that limit no thread of the program must miss a descriptor, nor this library a message. `f` may call this again, and
/// takes no lock that others hold when they begin this.
pub fn lifted<T>(f: impl FnOnce() -> T) -> T {
    let _lifted = (keeps() && BEFORE.get().is_none()).then(RaisedLimit::new).flatten();
    f()
}

/// Returns whether this process reserves descriptors.
#[must_use]
pub fn keeps() -> bool {
    KEEPS.load(Ordering::Relaxed)
}

/// Guard that lets the process open more descriptors than the program's limit allows.
struct RaisedLimit {
    before: Rlimit,
    _held: MutexGuard<'static, ()>,
}

impl RaisedLimit {
    fn new() -> Option<Self> {
        let held = hold();
        let before = getrlimit(Resource::Nofile);
        let now = before.current.filter(|now| *now <= HIGH)?;
        // Up to the hard limit if that allows more, else beyond it if the process may do that.
        let most = before.maximum.map(|most| most.max(now + ROOM));
        let lifts = |maximum: &Option<u64>| {
            let current = maximum.map_or(now + ROOM, |most| most.min(now + ROOM));
            current > now && setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum: *maximum }).is_ok()
        };
        let done = [before.maximum, most].iter().any(lifts);
        BEFORE.set(done.then_some(now));
        done.then_some(Self { before, _held: held })
    }
}

impl Drop for RaisedLimit {
    fn drop(&mut self) {
        BEFORE.set(None);
        // A return to a lower limit is always allowed.
        let _ = setrlimit(Resource::Nofile, self.before);
    }
}

/// Returns a copy of `fd` at a number that the program does not miss.
fn place(fd: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    lifted(|| match (BEFORE.get(), getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)) {
        (Some(before), _) => rustix::io::fcntl_dupfd_cloexec(fd, before as RawFd),
        (None, now) if now < SPARES => Err(Errno::MFILE),
        (None, now) => rustix::io::fcntl_dupfd_cloexec(fd, (now - SPARE).min(HIGH) as RawFd),
    })
}
