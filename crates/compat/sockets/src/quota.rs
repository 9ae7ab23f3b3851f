// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Limits the memory that this process makes, by its user's setting, and by what its cgroups and its own limit have
//! left.
//!
//! A cgroup that is full kills one of its processes over a page of shared memory, where TCP would have gone on with
//! less. So the cgroups are asked first, and never more than a part of what is left is taken at a time. A process whose
//! address space is bounded (`RLIMIT_AS`) keeps half of it for what the program allocates.

use std::{
    fs,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::{
    param::page_size,
    process::{Resource, getrlimit},
};
use tombolo_domain::aside;
use tombolo_os::lock::lock;

/// Time for which an answer of the cgroups is valid.
const GOOD: Duration = Duration::from_millis(100);
/// Divisor of what is left: no more than this part is taken before the cgroups are asked again.
const PART: u64 = 4;

/// Names of a cgroup's files, and the lines of `memory.stat` that count memory which the kernel reclaims when it is
/// needed.
struct Names {
    most: &'static str,
    used: &'static str,
    given_back: [&'static str; 2],
}

const V2: Names = Names { most: "memory.max", used: "memory.current", given_back: ["inactive_file ", "active_file "] };
const V1: Names = Names {
    most: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    given_back: ["total_inactive_file ", "total_active_file "],
};

/// Amount of memory that a process may make.
#[derive(Debug)]
pub(crate) struct Quota {
    most: u64,
    used: Arc<AtomicU64>,
    /// Bytes that the cgroups had left when they were last asked, less those taken since.
    left: Mutex<Option<(Instant, u64)>>,
}

/// Memory that was granted. It counts until this is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    used: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Quota {
    pub fn new(most: u64) -> Self {
        Self { most, used: Arc::default(), left: Mutex::default() }
    }

    /// Grants all `bytes`, or nothing.
    pub fn reserve_bytes(&self, bytes: u64) -> Option<Lease> {
        let lease = Lease { used: Arc::clone(&self.used), bytes };
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let granted = before.saturating_add(bytes) <= self.most && self.is_left(bytes);
        granted.then_some(lease)
    }

    fn is_left(&self, bytes: u64) -> bool {
        let mut left = lock(&self.left);
        let now = Instant::now();
        let (until, room) = match *left {
            Some((until, room)) if now < until && bytes <= room => (until, room),
            _ => {
                let room = || room(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"));
                (now + GOOD, aside::lifted(|| (room() / PART).min(addresses())))
            }
        };
        let granted = bytes <= room;
        *left = Some((until, if granted { room - bytes } else { room }));
        granted
    }
}

/// Returns how many more bytes of the process's address space may be shared memory. The peer's memory is mapped as
/// well, so only half of the space is for its own.
fn addresses() -> u64 {
    let Some(most) = getrlimit(Resource::As).current else { return u64::MAX };
    let mapped = fs::read_to_string("/proc/self/statm").ok();
    let pages = mapped.and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    (most / 2).saturating_sub(pages.unwrap_or(most).saturating_mul(page_size() as u64)) / 2
}

/// Returns the bytes left in the process's cgroup that has least; no limit where none states one.
fn room(own: &Path, mounted: &Path) -> u64 {
    let own = fs::read_to_string(own).unwrap_or_default();
    let groups = own.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        match controllers {
            "" => Some((mounted.to_owned(), path, V2)),
            one if one.split(',').any(|one| one == "memory") => Some((mounted.join("memory"), path, V1)),
            _ => None,
        }
    });
    let rooms = groups.flat_map(|(root, path, names)| {
        // In a container, its own cgroup may be mounted where the root would be.
        let own = root.join(path);
        let all: Vec<_> = own.ancestors().take_while(|group| group.starts_with(&root)).map(Path::to_owned).collect();
        all.into_iter().filter_map(move |group| room_in(&group, &names))
    });
    rooms.min().unwrap_or(u64::MAX)
}

fn room_in(group: &Path, names: &Names) -> Option<u64> {
    let number = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let (most, used) = (number(names.most)?, number(names.used)?);
    if most >= 1 << 60 {
        return None; // Version 1 has no value that means no limit.
    }
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let given_back = stat.lines().filter_map(|line| {
        let name = names.given_back.iter().find(|name| line.starts_with(**name))?;
        line[name.len()..].parse::<u64>().ok()
    });
    Some(most.saturating_sub(used.saturating_sub(given_back.sum())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quota_grants_what_there_is_and_takes_it_back() {
        let quota =
            Quota { left: Mutex::new(Some((Instant::now() + Duration::from_secs(600), 1 << 30))), ..Quota::new(10) };
        let first = quota.reserve_bytes(6).unwrap();
        assert!(quota.reserve_bytes(5).is_none());
        assert!(quota.reserve_bytes(4).is_some());
        drop(first);
        assert!(quota.reserve_bytes(10).is_some());
    }

    #[test]
    fn cgroup_with_least_left_decides_and_files_it_can_drop_count_as_left() {
        let folder = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let file = folder.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let own = folder.path().join("own");
        let room = || super::room(&own, folder.path());
        assert_eq!(room(), u64::MAX, "nobody says");
        write("own", "3:memory,x:/a/b\n0::/c/d\n");
        assert_eq!(room(), u64::MAX, "nobody limits");
        write("memory/a/memory.limit_in_bytes", "1000\n");
        write("memory/a/memory.usage_in_bytes", "700\n");
        write("memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
        write("memory/a/b/memory.usage_in_bytes", "600\n");
        assert_eq!(room(), 300);
        write("memory/a/memory.stat", "inactive_file 9\ntotal_inactive_file 100\ntotal_active_file 50\n");
        assert_eq!(room(), 450);
        write("c/d/memory.max", "max\n");
        write("c/d/memory.current", "5\n");
        write("c/memory.max", "500\n");
        write("c/memory.current", "600\n");
        assert_eq!(room(), 0);
        write("c/memory.stat", "active_file 400\ninactive_file 100\n");
        assert_eq!(room(), 400);
    }

    #[test]
    fn grants_between_two_questions_are_a_part_of_what_was_left() {
        let quota = Quota::new(u64::MAX);
        *lock(&quota.left) = Some((Instant::now() + Duration::from_secs(600), 100));
        let left = || lock(&quota.left).unwrap().1;
        let mut all = Vec::new();
        while left() >= 30 {
            all.extend(quota.reserve_bytes(30));
        }
        assert_eq!(all.len(), 3);
    }
}
