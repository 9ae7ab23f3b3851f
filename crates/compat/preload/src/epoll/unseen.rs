// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds sets that were made past this library: by system calls of the program's own, or by the program before it (ADR
//! 0096).

use std::{
    fs,
    os::fd::RawFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use tombolo_os::clock::coarse_time;

use crate::{inside, state};

/// Least time for which an answer counts. It also counts for at least `SHARE` times as long as the search took.
const WHILE: Duration = Duration::from_secs(1);
const SHARE: u32 = 100;

/// Returns whether this process has such a set, as far as was known a second ago.
pub(super) fn has_unseen_sets() -> bool {
    /// The last answer; below, when it becomes old, in milliseconds, or 0 before the first.
    static FOUND: AtomicBool = AtomicBool::new(false);
    static OLD: AtomicU64 = AtomicU64::new(0);
    let now = coarse_time();
    let until = |length: Duration| (now + length).as_millis() as u64;
    let old = OLD.load(Ordering::Acquire);
    let is_own_turn = || OLD.compare_exchange(old, until(WHILE), Ordering::Relaxed, Ordering::Relaxed).is_ok();
    if old == 0 || now.as_millis() as u64 >= old && is_own_turn() {
        let begun = Instant::now();
        let found = find();
        FOUND.store(found, Ordering::Relaxed);
        // ORDER Release: a thread that sees this time also sees the answer.
        OLD.store(until(WHILE.max(begun.elapsed() * SHARE)), Ordering::Release);
        return found;
    }
    FOUND.load(Ordering::Relaxed)
}

fn find() -> bool {
    inside::lifted(|| {
        let all = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        let all = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let found: Vec<_> = all.filter(|fd| is_unseen_set(*fd)).collect();
        // Another thread may have been about to move a descriptor of this library's to its reserved number.
        found.into_iter().any(is_unseen_set)
    })
}

/// Returns whether `fd` is such a set. A number that is known here is a socket, or a set that was seen to be made.
fn is_unseen_set(fd: RawFd) -> bool {
    let is_set = |file: PathBuf| file == Path::new("anon_inode:[eventpoll]");
    !state::is_known(fd) && !state::is_ours(fd) && fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(is_set)
}
