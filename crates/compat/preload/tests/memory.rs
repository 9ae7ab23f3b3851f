// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that is used up: the user's quota, and a memory cgroup that kills a process which uses too much. Connections
//! for which there is no memory stay on TCP, and the program notices nothing.

mod place;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use place::{Place, has, output, python};

const COUNT: u64 = 200;

/// Makes many connections at once, whose rings would take 100 MiB. Returns how many endpoints were joined, and how many
/// were not for lack of memory.
fn many(mut command: Command, place: &Place) -> (usize, usize) {
    command.args(["many", &COUNT.to_string()]).env("TOMBOLO_SOCKETS_AFTER", "0");
    place.dress(&mut command);
    let said = output(&mut command, &place.path("out"));
    assert!(said.contains("done"), "{said}{}", place.log());
    assert!(!place.log().contains("broken"), "{}", place.log());
    place.assert_tidy();
    (place.log().matches("joined").count(), place.log().matches("no memory or descriptors left").count())
}

#[test]
fn connections_beyond_the_quota_stay_on_tcp() {
    if !has("connections_beyond_the_quota_stay_on_tcp", &["python3"]) {
        return;
    }
    let place = Place::new();
    let mut command = python("crowd.py");
    command.env("TOMBOLO_SOCKETS_MEMORY", (4 << 20).to_string());
    let (joined, refused) = many(command, &place);
    // A ring of 256 KiB and a page: fifteen of these fit into 4 MiB, at each endpoint.
    assert_eq!(joined, 2 * 15, "{}", place.log());
    assert!(refused > 0 && joined < COUNT as usize, "{joined} joined, {refused} refused");
}

/// With the same quota, where rings begin small, all connections fit.
#[test]
fn small_rings_leave_room_for_all() {
    if !has("small_rings_leave_room_for_all", &["python3"]) {
        return;
    }
    let place = Place::new();
    let mut command = python("crowd.py");
    command.env("TOMBOLO_SOCKETS_MEMORY", (4 << 20).to_string());
    command.env("TOMBOLO_SOCKETS_FIRST_RING", (16 << 10).to_string());
    let (joined, refused) = many(command, &place);
    assert_eq!((joined, refused), (2 * COUNT as usize, 0), "{}", place.log());
}

static COUNTED: AtomicU32 = AtomicU32::new(0);

/// A memory cgroup for one test, removed when it is dropped.
struct Group(PathBuf);

impl Group {
    /// Makes a cgroup with far less memory than the rings would take. Returns `None`, and reports a skip, where it
    /// cannot be made.
    fn for_test(test: &str) -> Option<Self> {
        let made = Self::new(96 << 20);
        if let Err(error) = &made {
            let _ = writeln!(std::io::stderr(), "SKIP {test} (needs memcg): {error}");
        }
        made.ok()
    }

    /// Returns the beginning of a command line: the program named after it runs in this cgroup.
    fn command(&self) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).arg(&self.0);
        command
    }

    fn new(limit: u64) -> std::io::Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let mounted = Path::new("/sys/fs/cgroup");
        let find = |wanted: &str| {
            own.lines().find_map(|line| {
                let mut parts = line.splitn(3, ':').skip(1);
                (parts.next()?.split(',').any(|one| one == wanted)).then_some(parts.next()?.trim_start_matches('/'))
            })
        };
        let (parent, file) = match (find("memory"), find("")) {
            (Some(own), _) => (mounted.join("memory").join(own), "memory.limit_in_bytes"),
            (None, Some(_)) => (mounted.to_owned(), "memory.max"),
            (None, None) => return Err(std::io::ErrorKind::NotFound.into()),
        };
        let group = Self(parent.join(format!(
            "tombolo-test-{}-{}",
            std::process::id(),
            COUNTED.fetch_add(1, Ordering::Relaxed)
        )));
        fs::create_dir(&group.0)?;
        fs::write(group.0.join(file), limit.to_string())?;
        Ok(group)
    }

    /// Returns how many processes the kernel killed in this cgroup.
    fn kills(&self) -> u64 {
        let text = ["memory.oom_control", "memory.events"].map(|name| fs::read_to_string(self.0.join(name)));
        let text = text.into_iter().flatten().collect::<String>();
        let kills = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        kills.expect("a cgroup counts its kills").parse().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The cgroup is empty once the last of its processes is reaped.
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn memory_cgroup_that_is_full_leaves_connections_on_tcp_and_kills_nobody() {
    let test = "memory_cgroup_that_is_full_leaves_connections_on_tcp_and_kills_nobody";
    if !has(test, &["python3", "sh"]) {
        return;
    }
    let Some(group) = Group::for_test(test) else { return };
    let place = Place::new();
    let python = python("crowd.py");
    let mut command = group.command();
    command.arg(python.get_program()).args(python.get_args());
    let (joined, refused) = many(command, &place);
    assert!(joined > 0 && refused > 0, "{joined} joined, {refused} refused; the log:\n{}", place.log());
    assert_eq!(group.kills(), 0);
}

#[test]
fn canary_program_that_asks_the_cgroup_for_too_much_is_killed() {
    let test = "canary_program_that_asks_the_cgroup_for_too_much_is_killed";
    if !has(test, &["python3", "sh"]) {
        return;
    }
    let Some(group) = Group::for_test(test) else { return };
    let mut command = group.command();
    command.arg("python3").arg("-c");
    command.arg("import os; os.posix_fallocate(os.memfd_create('x'), 0, 256 << 20)");
    assert!(!command.stderr(std::process::Stdio::null()).status().unwrap().success());
    assert!(group.kills() > 0);
}
