// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads what `/proc` shows of a process.

use std::{fs, path::Path};

/// Folders where cgroup version 2 is mounted, alone or beside version 1.
const CGROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Flag of a process that is a thread of the kernel.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// The fields of `/proc/PID/stat` that are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stat {
    /// State: `R` runs, `S` and `D` sleep, `T` and `t` are stopped, `Z` and `X` are dead.
    pub state: char,
    /// Number of the parent process; 0 where that is not visible from here.
    pub parent: u32,
    /// The kernel's flags.
    flags: u64,
    /// Time at which the process began, in clock ticks since boot.
    pub began: u64,
}

impl Stat {
    /// Returns the fields of a process, or `None` if there is no process of that number here, or it is hidden.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        // A name need not be UTF-8, if only because the kernel cuts it after 15 bytes.
        Self::parse(&String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/stat")).ok()?))
    }

    fn parse(line: &str) -> Option<Self> {
        // The second field is the program's name in parentheses, and may itself hold any of ") R".
        let (_, fields) = line.rsplit_once(") ")?;
        let mut fields = fields.split(' ');
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let (flags, began) = (fields.nth(4)?.parse().ok()?, fields.nth(12)?.parse().ok()?);
        Some(Self { state, parent, flags, began })
    }

    /// Returns whether the process is stopped, by a signal or a debugger.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// Returns whether it is a thread of the kernel's.
    #[must_use]
    pub fn is_kernel_thread(&self) -> bool {
        self.flags & KERNEL_THREAD != 0
    }
}

/// Returns whether the process is in a frozen cgroup (a paused container), as far as the hierarchy is visible from
/// here.
#[must_use]
pub fn is_frozen(pid: u32) -> bool {
    let Ok(cgroups) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else { return false };
    let Some(path) = cgroups.lines().find_map(|line| line.strip_prefix("0::/")) else { return false };
    CGROUPS.iter().any(|root| {
        fs::read_to_string(Path::new(root).join(path).join("cgroup.events"))
            .is_ok_and(|events| events.lines().any(|line| line == "frozen 1"))
    })
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::ffi::OsStrExt,
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn l10_stat_line_of_a_program_with_a_spiteful_name_is_understood() {
        let line = "42 (a) R 1 (b) T) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 12345 1 1";
        let stat = Stat::parse(line).unwrap();
        assert_eq!(stat, Stat { state: 'S', parent: 1, flags: 4_194_560, began: 12345 });
        assert!(!stat.is_kernel_thread() && Stat { flags: 69_238_880, ..stat }.is_kernel_thread());
        assert_eq!(Stat::parse("42 (a) S 1"), None);
        assert_eq!(Stat::parse(""), None);
    }

    #[test]
    fn b12_process_is_stopped_if_its_state_says_so_whatever_its_name_is() {
        let rest = "1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 12345 1 1";
        for (begin, is_stopped) in
            [("7 (qemu) T", true), ("7 (qemu) t", true), ("7 (a) T (b) S", false), ("7 (qemu) R", false)]
        {
            assert_eq!(Stat::parse(&format!("{begin} {rest}")).unwrap().is_stopped(), is_stopped, "{begin}");
        }
    }

    #[test]
    fn process_whose_name_is_no_utf8_is_seen() {
        let program = tempfile::tempdir().unwrap();
        let name = std::ffi::OsStr::from_bytes(b"caf\xe9");
        std::os::unix::fs::symlink("/bin/cat", program.path().join(name)).unwrap();
        let mut child = Command::new(program.path().join(name)).stdin(Stdio::piped()).spawn().unwrap();
        let stat = Stat::of(child.id());
        let shown = fs::read(format!("/proc/{}/comm", child.id())).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(shown, b"caf\xe9\n", "canary: the name is what it should be");
        assert!(stat.is_some_and(|stat| !stat.is_stopped()));
    }

    #[test]
    fn own_process_runs_and_is_no_thread_of_the_kernel() {
        let stat = Stat::of(std::process::id()).unwrap();
        assert!(matches!(stat.state, 'R' | 'S' | 'D') && stat.began > 0 && !stat.is_kernel_thread(), "{stat:?}");
        assert_eq!(Stat::of(0), None);
    }
}
