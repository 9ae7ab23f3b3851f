// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds processes that hold segments, as `/proc` shows them.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    ops::Range,
};

use tombolo_layout::{connection_table, local::MEMORY};
use tombolo_os::process::{Stat, is_frozen};

use crate::error::{Error, Result};

/// Device by which programs grant pages to other Xen domains.
const GRANTS: &str = "/dev/xen/gntalloc";

/// Device and inode of a piece of memory.
pub type Identity = (u64, u64);

/// A process that holds segments.
#[derive(Debug)]
pub struct Process {
    pub pid: u32,
    pub command: String,
    pub uid: Option<u32>,
    pub user: Option<String>,
    /// Whether it is stopped, traced or frozen.
    pub paused: bool,
    /// Descriptors that look like segments, with their names.
    pub memories: Vec<(u32, String)>,
    /// Its mappings of such memory.
    pub mappings: Vec<Mapping>,
    /// Addresses at which it has mapped pages that it granted to other Xen domains.
    pub granted: Vec<Range<u64>>,
}

/// A line of `/proc/PID/maps`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    pub identity: Identity,
    /// Whether it is writable: the owner of a segment is the process that can write it.
    pub writable: bool,
}

/// A process with a connection table, and the descriptor that leads to the table.
#[derive(Debug)]
pub struct ListingProcess {
    pub pid: u32,
    pub command: String,
    pub user: Option<String>,
    pub fd: u32,
}

/// Processes that `/proc` shows to this user.
#[derive(Debug, Default)]
pub struct Scan {
    /// Processes that hold segments.
    pub holders: Vec<Process>,
    /// Processes that have connection tables.
    pub listing: Vec<ListingProcess>,
    pub looked_into: u64,
    pub hidden: u64,
    /// Process that has each socket open, by the socket's inode.
    pub sockets: HashMap<u64, (u32, String)>,
    /// One process for each network namespace.
    pub networks: BTreeMap<String, u32>,
}

/// Looks at all processes that this user may look into.
pub fn scan() -> Result<Scan> {
    let unreadable = |source| Error::Read { file: "/proc".into(), source };
    let users = known_users();
    let mut scan = Scan::default();
    for entry in fs::read_dir("/proc").map_err(unreadable)? {
        let Some(pid) = entry.ok().and_then(|entry| entry.file_name().to_str()?.parse().ok()) else { continue };
        match descriptors(pid) {
            Ok(found) => scan.add_process(pid, found, &users),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !is_kernel_thread(pid) => scan.hidden += 1,
            // A kernel thread has no descriptors; any other process is gone by now.
            Err(_) => {}
        }
    }
    scan.holders.sort_by_key(|process| process.pid);
    scan.listing.sort_by_key(|process| process.pid);
    Ok(scan)
}

/// Descriptors of a process that matter here.
#[derive(Default)]
struct Descriptors {
    memories: Vec<(u32, String)>,
    lists: Vec<u32>,
    sockets: Vec<u64>,
    grants: bool,
}

impl Scan {
    fn add_process(&mut self, pid: u32, found: Descriptors, users: &HashMap<u32, String>) {
        self.looked_into += 1;
        if let Ok(network) = fs::read_link(format!("/proc/{pid}/ns/net")) {
            self.networks.entry(network.to_string_lossy().into_owned()).or_insert(pid);
        }
        let holds = !found.memories.is_empty() || found.grants;
        if !holds && found.lists.is_empty() && found.sockets.is_empty() {
            return;
        }
        let status = Status::of(pid);
        for socket in found.sockets {
            self.sockets.entry(socket).or_insert_with(|| (pid, status.command.clone()));
        }
        self.listing.extend(found.lists.into_iter().map(|fd| {
            let user = status.uid.map(|uid| name_of(uid, users));
            ListingProcess { pid, command: status.command.clone(), user, fd }
        }));
        if holds {
            let maps = maps(pid);
            self.holders.push(Process {
                pid,
                command: status.command,
                uid: status.uid,
                user: status.uid.map(|uid| name_of(uid, users)),
                paused: status.stopped || is_frozen(pid),
                memories: found.memories,
                mappings: maps.lines().filter_map(Mapping::parse).collect(),
                granted: maps.lines().filter_map(granted).collect(),
            });
        }
    }
}

impl Process {
    /// Returns a process that was named by number, or `None` if there is none with that number here.
    pub fn seen(pid: u32) -> Option<Self> {
        let status = Status::parse(&fs::read(format!("/proc/{pid}/status")).ok()?);
        let paused = status.stopped || is_frozen(pid);
        let user = status.uid.map(|uid| name_of(uid, &known_users()));
        Some(Self { pid, command: status.command, paused, ..Self::unseen(status.uid, user) })
    }

    /// Makes a process of which only the user is known.
    pub fn unseen(uid: Option<u32>, user: Option<String>) -> Self {
        let (memories, mappings, granted) = (Vec::new(), Vec::new(), Vec::new());
        Self { pid: 0, command: "?".into(), uid, user, paused: false, memories, mappings, granted }
    }
}

fn descriptors(pid: u32) -> io::Result<Descriptors> {
    let mut found = Descriptors::default();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let Some(fd) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let target = target.to_string_lossy();
        if let Some(name) = memory_name(&target) {
            found.memories.push((fd, name.into()));
        } else if target.strip_prefix("/memfd:").and_then(|rest| rest.strip_suffix(" (deleted)"))
            == Some(connection_table::MEMORY)
        {
            found.lists.push(fd);
        } else if target == GRANTS {
            found.grants = true;
        } else if let Some(inode) = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) {
            found.sockets.extend(inode.parse::<u64>());
        }
    }
    Ok(found)
}

/// Returns `/proc/PID/maps`, or nothing if it cannot be read. Paths in it need not be UTF-8.
fn maps(pid: u32) -> String {
    let maps = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    String::from_utf8_lossy(&maps).into_owned()
}

/// Returns the name of a memfd that is named as a segment is (L-13).
fn memory_name(shown: &str) -> Option<&str> {
    let name = shown.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?;
    (name == MEMORY || name.strip_prefix(MEMORY)?.starts_with(':')).then_some(name)
}

impl Mapping {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(6, ' ');
        let (_range, access, _offset) = (fields.next()?, fields.next()?, fields.next()?);
        let (major, minor) = fields.next()?.split_once(':')?;
        let number = |text| u32::from_str_radix(text, 16).ok();
        let device = rustix::fs::makedev(number(major)?, number(minor)?);
        let inode = fields.next()?.parse().ok()?;
        memory_name(fields.next()?.trim_start())?;
        // Shared mappings only: a private one is a copy.
        access.ends_with('s').then(|| Self { identity: (device, inode), writable: access.as_bytes()[1] == b'w' })
    }
}

/// Returns the addresses in a line of `/proc/PID/maps` if they map gntalloc, that is, pages that the process granted.
pub fn granted(line: &str) -> Option<Range<u64>> {
    let rest = line.strip_suffix(GRANTS)?.strip_suffix(' ')?;
    let (start, end) = rest.split(' ').next()?.split_once('-')?;
    let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).ok());
    Some(start?..end?)
}

#[derive(Default)]
struct Status {
    command: String,
    uid: Option<u32>,
    stopped: bool,
}

impl Status {
    fn of(pid: u32) -> Self {
        Self::parse(&fs::read(format!("/proc/{pid}/status")).unwrap_or_default())
    }

    fn parse(status: &[u8]) -> Self {
        let text = String::from_utf8_lossy(status);
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        Self {
            command: field("Name:").map_or("?".into(), printable),
            uid: field("Uid:").and_then(|ids| ids.split_whitespace().next()?.parse().ok()),
            stopped: field("State:").is_some_and(|state| state.starts_with(['T', 't'])),
        }
    }
}

fn is_kernel_thread(pid: u32) -> bool {
    Stat::of(pid).is_some_and(|stat| stat.is_kernel_thread())
}

fn users(passwd: &str) -> HashMap<u32, String> {
    let user = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        Some((fields.nth(1)?.parse().ok()?, printable(name)))
    };
    passwd.lines().filter_map(user).collect()
}

/// Returns a user's name, or its number where this machine has no name for it.
#[must_use]
pub fn name_of(uid: u32, users: &HashMap<u32, String>) -> String {
    users.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
}

/// Returns the names of this machine's users, by number.
#[must_use]
pub fn known_users() -> HashMap<u32, String> {
    users(&fs::read_to_string("/etc/passwd").unwrap_or_default())
}

/// Returns the names of this machine's groups, by number.
#[must_use]
pub fn known_groups() -> HashMap<u32, String> {
    // Each line begins as one of `/etc/passwd` does.
    users(&fs::read_to_string("/etc/group").unwrap_or_default())
}

/// Replaces control characters in text that other users chose, so that a terminal does not act on them.
pub fn printable(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { '?' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::ffi::OsStrExt,
        process::{Command, Stdio},
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn l13_only_memory_that_is_called_like_a_segment_is_looked_at() {
        assert_eq!(memory_name("/memfd:tombolo (deleted)"), Some("tombolo"));
        assert_eq!(memory_name("/memfd:tombolo:/run/a b (deleted)"), Some("tombolo:/run/a b"));
        for other in ["/memfd:tombolo-bench (deleted)", "/memfd:tombolo", "/tmp/tombolo (deleted)", "socket:[1]"] {
            assert_eq!(memory_name(other), None, "{other}");
        }
    }

    #[test]
    fn maps_line_of_a_segment_says_who_writes_it() {
        let line =
            "7f0000000000-7f0000101000 rw-s 00000000 00:01 2051                       /memfd:tombolo:/a b (deleted)";
        let identity = (rustix::fs::makedev(0, 1), 2051);
        assert_eq!(Mapping::parse(line), Some(Mapping { identity, writable: true }));
        assert_eq!(Mapping::parse(&line.replace("rw-s", "r--s")), Some(Mapping { identity, writable: false }));
        assert_eq!(Mapping::parse(&line.replace("rw-s", "rw-p")), None, "a private copy");
        for nonsense in ["", "a b c", "7f-7f rw-s 0 zz:1 5 /memfd:tombolo (deleted)", &line.replace("memfd:", "x")] {
            assert_eq!(Mapping::parse(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn maps_of_a_process_that_maps_a_file_whose_name_is_no_utf8_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
        fs::copy("/bin/cat", &program).unwrap();
        let mut child = Command::new(&program).stdin(Stdio::piped()).spawn().unwrap();
        // The kernel maps the program after `spawn` has returned.
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut seen = maps(child.id());
        while !seen.contains("/caf") && Instant::now() < deadline {
            std::thread::yield_now();
            seen = maps(child.id());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(seen.contains("/caf\u{fffd}\n") && seen.contains(" [stack]\n"), "{seen}");
    }

    #[test]
    fn granted_pages_are_read_from_maps() {
        let line = "7f1200000000-7f1200010000 rw-s 00000000 00:06 318                        /dev/xen/gntalloc";
        assert_eq!(granted(line), Some(0x7f12_0000_0000..0x7f12_0001_0000));
        assert_eq!(
            (granted(&line.replace("alloc", "dev")), granted("x /dev/xen/gntalloc"), granted("")),
            (None, None, None)
        );
    }

    #[test]
    fn status_of_a_hostile_program_is_printable() {
        let status = Status::parse(b"Name:\ta\x1b[2Jb\xff\nState:\tT (stopped)\nUid:\t7\t8\t8\t8\n");
        assert_eq!((status.command.as_str(), status.uid, status.stopped), ("a?[2Jb\u{fffd}", Some(7), true));
    }

    #[test]
    fn user_without_a_name_is_a_number() {
        assert_eq!(name_of(0, &known_groups()), "root");
        let users = users("root:x:0:0::/root:/bin/sh\nbroken\n");
        assert_eq!((name_of(0, &users).as_str(), name_of(7, &users).as_str()), ("root", "7"));
    }
}
