// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds and kills the descendants of this process: all processes that a tier started, directly or not, whatever group
//! or session they moved to.
//!
//! Killing a process group misses children that left the group, as tests of crashes and namespaces do. So this process
//! adopts orphans (as a "child subreaper"), and every descendant stays reachable through its parents in /proc.

use rustix::process::{Pid, Signal, getpid, kill_process, set_child_subreaper};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::time::{Duration, Instant};

/// Daemons that compiler wrappers leave behind on purpose.
const WELCOME: [&str; 1] = ["sccache"];
const TICK: Duration = Duration::from_millis(20);

/// A live process that descends from this one.
#[derive(Debug)]
pub struct Kin {
    pid: i32,
    name: String,
}

impl fmt::Display for Kin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.pid)
    }
}

/// Makes this process the parent of descendants that become orphans from now on.
pub fn adopt() -> rustix::io::Result<()> {
    set_child_subreaper(Some(getpid()))
}

/// Returns all live descendants.
pub fn all() -> Vec<Kin> {
    let mut children: BTreeMap<i32, Vec<Kin>> = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if let Some((name, parent)) = parse_stat(&stat) {
            children.entry(parent).or_default().push(Kin { pid, name: name.to_owned() });
        }
    }
    let mut found = children.remove(&getpid().as_raw_nonzero().get()).unwrap_or_default();
    let mut at = 0;
    while at < found.len() {
        found.extend(children.remove(&found[at].pid).unwrap_or_default());
        at += 1;
    }
    found.retain(|kin| !WELCOME.contains(&kin.name.as_str()));
    found
}

/// Waits until no descendant is left, for `grace` at most. Returns those that are left.
pub fn outlasting(grace: Duration) -> Vec<Kin> {
    let deadline = Instant::now() + grace;
    loop {
        let left = all();
        if left.is_empty() || Instant::now() >= deadline {
            return left;
        }
        pause();
    }
}

/// Kills all descendants, also those that start meanwhile.
pub fn end_all() {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let left = all();
        if left.is_empty() || Instant::now() >= deadline {
            return;
        }
        for pid in left.iter().filter_map(|kin| Pid::from_raw(kin.pid)) {
            _ = kill_process(pid, Signal::KILL); // It may have ended by itself.
        }
        pause();
    }
}

/// Pauses briefly between two looks at other processes.
#[expect(clippy::disallowed_methods, reason = "nothing tells when somebody else's child ends")]
pub fn pause() {
    std::thread::sleep(TICK);
}

/// Returns name and parent from `pid (name) state parent …`, or none for a process that has ended.
fn parse_stat(stat: &str) -> Option<(&str, i32)> {
    let (head, tail) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    let mut fields = tail.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some((name, parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_of_a_process_with_an_odd_name_is_read() {
        assert_eq!(parse_stat("12 (a) b (c) S 7 12 12 0"), Some(("a) b (c", 7)));
    }

    #[test]
    fn ended_and_unreadable_processes_are_none() {
        assert_eq!(parse_stat("12 (a) Z 7 12"), None);
        assert_eq!(parse_stat(""), None);
    }
}
