// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tells whether memory is short for this process: how much its control groups, the machine and the kernel's stall
//! figures leave to rings that follow load (ADR 0065).

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tombolo_os::files::read_text;

/// Time for which an observation is valid.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Divisor of each limit: the quotient is left to all other users of the memory.
const LEFT_ALONE: u64 = 16;
/// Divisor of a limit: memory is scarce while less than the quotient is free.
const SCARCE: u64 = 64;
/// Percentage of time from which memory is short if some task waited for it, and scarce if all tasks did.
const STALLED: f64 = 10.0;
/// Time after which lasting scarcity takes memory from busy rings. Idle ones have shrunk by then.
const PATIENCE: Duration = Duration::from_millis(1500);
/// Value from which a limit counts as no limit.
const UNLIMITED: u64 = 1 << 60;
/// Largest depth of a control group that is followed.
const DEEPEST: usize = 32;
/// Largest number of bytes of a file that is read.
const LONGEST: usize = 16 << 10;

/// Checks the memory now and then, and remembers the result.
#[derive(Debug)]
pub(crate) struct MemoryWatch {
    /// Root of the file system; another folder in tests.
    root: PathBuf,
    /// Time of the last check, in nanoseconds of the coarse clock plus one; 0 before the first.
    looked: AtomicU64,
    /// Number of bytes by which rings may still grow.
    room: AtomicU64,
    /// Time since which memory has been scarce, in the same unit; 0 while it is not.
    scarce_since: AtomicU64,
}

/// Result of one check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Seen {
    room: u64,
    scarce: bool,
}

impl MemoryWatch {
    pub(crate) fn new(root: &Path) -> Self {
        let (looked, room, scarce_since) = Default::default();
        Self { root: root.into(), looked, room, scarce_since }
    }

    /// Returns the watch of this process.
    pub(crate) fn of_process() -> Arc<Self> {
        static WATCH: OnceLock<Arc<MemoryWatch>> = OnceLock::new();
        Arc::clone(WATCH.get_or_init(|| Arc::new(Self::new(Path::new("/")))))
    }

    /// Takes `bytes` of what rings may grow by, and returns whether so many were left. The next check counts anew.
    pub(crate) fn take_room(&self, bytes: u64, now: Duration) -> bool {
        self.refresh(now);
        // ORDER: Relaxed, here and below; each number stands for itself.
        self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(bytes)).is_ok()
    }

    /// Returns whether rings have nothing left to grow by.
    pub(crate) fn is_short(&self, now: Duration) -> bool {
        self.refresh(now);
        self.room.load(Ordering::Relaxed) == 0
    }

    /// Returns whether memory has been scarce for so long that busy rings have to give some back as well.
    pub(crate) fn is_scarce(&self, now: Duration) -> bool {
        self.refresh(now);
        let since = self.scarce_since.load(Ordering::Relaxed);
        since != 0 && stamp(now).saturating_sub(since) >= PATIENCE.as_nanos() as u64
    }

    /// Checks again if the last check is a while ago. One of several threads checks, and the others use the earlier
    /// result.
    fn refresh(&self, now: Duration) {
        let (looked, at) = (self.looked.load(Ordering::Relaxed), stamp(now));
        if looked != 0 && at.saturating_sub(looked) < LOOK_EVERY.as_nanos() as u64 {
            return;
        }
        if self.looked.compare_exchange(looked, at, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        let Seen { room, scarce } = look_at(&self.root);
        self.room.store(room, Ordering::Relaxed);
        let since = self.scarce_since.load(Ordering::Relaxed);
        self.scarce_since.store(if scarce { if since == 0 { at } else { since } } else { 0 }, Ordering::Relaxed);
    }
}

/// Returns a time as it is stored: never 0.
fn stamp(time: Duration) -> u64 {
    time.as_nanos() as u64 + 1
}

impl Seen {
    /// Notes that `free` of `limit` bytes are free.
    fn note_limit(&mut self, limit: u64, free: u64) {
        self.room = self.room.min(free.saturating_sub(limit / LEFT_ALONE));
        self.scarce |= free < limit / SCARCE;
    }

    /// Notes the kernel's figures about tasks that wait for memory.
    fn note_stalls(&mut self, file: &Path) {
        let Some(text) = read_text(file, LONGEST) else { return };
        let percent = |kind: &str| -> Option<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
            line.split_whitespace().find_map(|field| field.strip_prefix("avg10="))?.parse().ok()
        };
        if percent("some ").is_some_and(|percent| percent >= STALLED) {
            self.room = 0;
        }
        self.scarce |= percent("full ").is_some_and(|percent| percent >= STALLED);
    }
}

fn look_at(root: &Path) -> Seen {
    let mut seen = Seen { room: u64::MAX, scarce: false };
    for_each_limit(root, |limit, free| seen.note_limit(limit, free));
    seen.note_stalls(&root.join("proc/pressure/memory"));
    groups(root).iter().for_each(|group| seen.note_stalls(&group.own.join("memory.pressure")));
    seen
}

/// Returns the smallest memory limit of this process: the machine's, or that of one of its control groups.
pub(crate) fn find_limit(root: &Path) -> Option<u64> {
    let mut least = None;
    for_each_limit(root, |limit, _| least = Some(least.map_or(limit, |least: u64| least.min(limit))));
    least
}

/// Calls `note` with each limit of this process and the number of its bytes that are free.
fn for_each_limit(root: &Path, mut note: impl FnMut(u64, u64)) {
    if let Some(text) = read_text(&root.join("proc/meminfo"), LONGEST) {
        let bytes = |name| number_after(&text, name).map(|kib| kib.saturating_mul(1 << 10));
        if let (Some(total), Some(available)) = (bytes("MemTotal:"), bytes("MemAvailable:")) {
            note(total, available);
        }
    }
    for Group { mount, own, names } in groups(root) {
        let levels = own.ancestors().take_while(|level| level.starts_with(&mount)).take(DEEPEST);
        levels.filter_map(|level| limit_of(level, names)).for_each(|(limit, free)| note(limit, free));
    }
}

/// A control group of this process: the mount point of its hierarchy, and the group's own folder there.
struct Group {
    mount: PathBuf,
    own: PathBuf,
    names: Names,
}

fn groups(root: &Path) -> Vec<Group> {
    let text = read_text(&root.join("proc/self/cgroup"), LONGEST).unwrap_or_default();
    let places = |(mounts, path, names): (&[&str], &str, Names)| {
        let place = |mount: &&str| (root.join(mount), root.join(mount).join(path));
        mounts.iter().map(place).map(|(mount, own)| Group { mount, own, names }).collect::<Vec<_>>()
    };
    text.lines().filter_map(hierarchy).flat_map(places).collect()
}

/// Names of a control group's files.
#[derive(Clone, Copy)]
struct Names {
    limits: &'static [&'static str],
    usage: &'static str,
    /// Fields that count used memory which the kernel can drop.
    droppable: [&'static str; 2],
}

const NAMES: Names = Names {
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    droppable: ["inactive_file ", "active_file "],
};
/// Names in version 1 of control groups.
const NAMES_V1: Names = Names {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    droppable: ["total_inactive_file ", "total_active_file "],
};

/// Returns the mount points and the path below them that a line of `/proc/self/cgroup` names. A path that leads outside
/// what this process can see stands for the mount point itself.
fn hierarchy(line: &str) -> Option<(&'static [&'static str], &str, Names)> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let path = if path.contains("..") { "" } else { path.trim_start_matches('/') };
    if controllers.is_empty() {
        Some((&["sys/fs/cgroup", "sys/fs/cgroup/unified"], path, NAMES))
    } else {
        let memory = controllers.split(',').any(|name| name == "memory");
        memory.then_some((&["sys/fs/cgroup/memory"][..], path, NAMES_V1))
    }
}

/// Returns the memory limit of one group, which includes the groups below it, and how many bytes of it are free.
fn limit_of(group: &Path, names: Names) -> Option<(u64, u64)> {
    let read = |name: &str| read_text(&group.join(name), LONGEST);
    let limit_in = |name: &&str| read(name)?.trim().parse().ok().filter(|limit| *limit < UNLIMITED);
    let limit: u64 = names.limits.iter().filter_map(limit_in).min()?;
    let used: u64 = read(names.usage)?.trim().parse().ok()?;
    let details = read("memory.stat").unwrap_or_default();
    let droppable = names.droppable.iter().filter_map(|name| number_after(&details, name)).fold(0, u64::saturating_add);
    Some((limit, limit.saturating_sub(used.saturating_sub(droppable))))
}

/// Returns the number in the line that begins with `name`.
fn number_after(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;

    use super::*;

    const MIB: u64 = 1 << 20;
    const NOTHING: Seen = Seen { room: u64::MAX, scarce: false };

    /// A file system of its own, removed at the end.
    pub(crate) struct Tree(pub PathBuf);

    impl Tree {
        pub(crate) fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tombolo-memory-{name}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Self(path)
        }

        pub(crate) fn write(&self, file: &str, text: &str) -> &Self {
            let path = self.0.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        /// Makes a machine of 1024 MiB with so many free.
        pub(crate) fn machine(&self, free: u64) -> &Self {
            self.write(
                "proc/meminfo",
                &format!("MemTotal:  1048576 kB\nMemFree: 7 kB\nMemAvailable: {} kB\n", free << 10),
            )
        }

        /// Makes the group `path` of cgroup v2.
        fn group(&self, path: &str, limit: &str, used: u64) -> &Self {
            let place = format!("sys/fs/cgroup/{path}");
            self.write(&format!("{place}/memory.max"), limit)
                .write(&format!("{place}/memory.current"), &used.to_string())
        }

        fn seen(&self) -> Seen {
            look_at(&self.0)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn machine_that_hides_everything_limits_nothing() {
        assert_eq!(Tree::new("hidden").seen(), NOTHING);
        let tree = Tree::new("nonsense");
        tree.write("proc/meminfo", "MemTotal: much\nMemAvailable:\n")
            .write("proc/pressure/memory", "some avg10=x\nfull");
        tree.write("proc/self/cgroup", "0:\n::\nx\n0::/a\n").group("a", "-5\n", 7);
        assert_eq!(tree.seen(), NOTHING);
        // A pipe without a writer is not waited for.
        let fifo = tree.0.join("sys/fs/cgroup/memory.max");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        assert_eq!(tree.seen(), NOTHING);
    }

    #[test]
    fn a_part_of_the_machine_is_left_alone_and_less_is_scarce() {
        let tree = Tree::new("machine");
        assert_eq!(find_limit(&tree.0), None);
        assert_eq!(tree.machine(512).seen(), Seen { room: 448 * MIB, scarce: false });
        assert_eq!(find_limit(&tree.0), Some(1024 * MIB), "however much of it is used");
        assert_eq!(tree.machine(64).seen(), Seen { room: 0, scarce: false });
        assert_eq!(tree.machine(15).seen(), Seen { room: 0, scarce: true });
    }

    #[test]
    fn group_and_those_above_it_limit_and_what_can_be_dropped_is_free() {
        let tree = Tree::new("groups");
        tree.machine(1024).write("proc/self/cgroup", "1:name=systemd:/\n0::/a/b\n");
        assert_eq!(tree.group("a/b", "max\n", 5 * MIB).seen().room, 960 * MIB);
        tree.group("a/b", &(64 * MIB).to_string(), 16 * MIB);
        assert_eq!(tree.seen(), Seen { room: 44 * MIB, scarce: false });
        assert_eq!(find_limit(&tree.0), Some(64 * MIB));
        tree.group("a", &(32 * MIB).to_string(), 28 * MIB);
        assert_eq!(tree.seen(), Seen { room: 2 * MIB, scarce: false }, "the group above has less");
        assert_eq!(find_limit(&tree.0), Some(32 * MIB));
        tree.write("sys/fs/cgroup/a/memory.stat", &format!("anon 9\ninactive_file {}\nactive_file {MIB}\n", 3 * MIB));
        assert_eq!(tree.seen(), Seen { room: 6 * MIB, scarce: false });
        tree.group("a", &(32 * MIB).to_string(), 36 * MIB);
        assert_eq!(tree.seen(), Seen { room: 0, scarce: true }, "it was made smaller than what it has");
        tree.write("sys/fs/cgroup/a/memory.stat", "").group("a", "max", 1);
        tree.write("sys/fs/cgroup/a/b/memory.high", &(20 * MIB).to_string());
        assert_eq!(tree.seen().room, (4 * MIB) - (20 * MIB) / 16, "it is slowed down from there on");
    }

    #[test]
    fn group_of_the_first_version_limits_as_well() {
        let tree = Tree::new("first");
        tree.machine(1024).write("proc/self/cgroup", "4:cpu,memory:/x/y\n0::/\n");
        let group = |path: &str, limit: u64, used: u64| {
            let place = format!("sys/fs/cgroup/memory/{path}");
            tree.write(&format!("{place}/memory.limit_in_bytes"), &limit.to_string());
            tree.write(&format!("{place}/memory.usage_in_bytes"), &used.to_string());
            tree.write(&format!("{place}/memory.stat"), &format!("inactive_file 1\ntotal_inactive_file {MIB}\n"));
        };
        group("", 9_223_372_036_854_771_712, 5);
        assert_eq!(tree.seen().room, 960 * MIB);
        group("x/y", 16 * MIB, 12 * MIB);
        assert_eq!(tree.seen(), Seen { room: 4 * MIB, scarce: false });
        // A group whose path cannot be seen here is known by its mount alone.
        tree.write("proc/self/cgroup", "4:memory:/../y\n");
        assert_eq!(tree.seen().room, 960 * MIB);
    }

    #[test]
    fn stalls_of_some_make_memory_short_and_of_all_scarce() {
        let tree = Tree::new("stalls");
        let say = |some: &str, full: &str| {
            let text = format!("some avg10={some} avg60=0.00 avg300=0.00 total=1\nfull avg10={full} avg60=0 total=0\n");
            tree.machine(1024).write("proc/pressure/memory", &text).seen()
        };
        assert_eq!(say("9.99", "0.00"), Seen { room: 960 * MIB, scarce: false });
        assert_eq!(say("10.00", "2.00"), Seen { room: 0, scarce: false });
        assert_eq!(say("55.10", "12.00"), Seen { room: 0, scarce: true });
        say("0.00", "0.00");
        tree.write("proc/self/cgroup", "0::/a\n")
            .write("sys/fs/cgroup/a/memory.pressure", "some avg10=11.00 avg60=0\n");
        assert_eq!(tree.seen().room, 0);
    }

    #[test]
    fn watch_looks_now_and_then_and_scarcity_has_to_last() {
        let tree = Tree::new("watch");
        let (watch, ms) = (MemoryWatch::new(&tree.machine(80).0), Duration::from_millis);
        assert!(watch.take_room(16 * MIB, ms(0)), "all that there is");
        assert!(!watch.take_room(1, ms(100)) && watch.is_short(ms(100)), "it was not looked at anew");
        assert!(watch.take_room(1, ms(260)) && !watch.is_short(ms(260)));
        tree.machine(1);
        assert!(watch.is_short(ms(600)) && !watch.is_scarce(ms(600)) && !watch.is_scarce(ms(1900)));
        assert!(watch.is_scarce(ms(2200)));
        tree.machine(512);
        assert!(!watch.is_scarce(ms(2500)) && !watch.is_short(ms(2500)));
        tree.machine(1);
        assert!(!watch.is_scarce(ms(3000)) && !watch.is_scarce(ms(4400)), "it begins anew");
        assert!(watch.is_scarce(ms(4600)));
    }
}
