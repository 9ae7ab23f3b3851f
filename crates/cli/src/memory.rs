// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Determines how much memory this process may have.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Mount point of cgroups of version 2.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Memory limit of one of the cgroups that this process is in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limit {
    pub group: PathBuf,
    pub most: u64,
    pub used: u64,
}

impl Limit {
    pub fn left(&self) -> u64 {
        self.most.saturating_sub(self.used)
    }
}

/// Returns the available bytes, as the machine and each cgroup that this process is in count them. Returns 0 if that
/// cannot be found out.
pub fn available() -> u64 {
    limits().iter().map(Limit::left).fold(machine().unwrap_or(0), u64::min)
}

/// Returns the available bytes as the machine counts them.
pub fn machine() -> Option<u64> {
    fs::read_to_string("/proc/meminfo").ok().and_then(|text| free_of_machine(&text))
}

/// Returns the limits of the cgroups that this process is in, as far as they have one.
pub fn limits() -> Vec<Limit> {
    let limit = |group: PathBuf| {
        let number = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        // Without a limit the file contains "max".
        let (most, used) = (number("memory.max")?, number("memory.current")?);
        Some(Limit { group, most, used })
    };
    groups().into_iter().filter_map(limit).collect()
}

/// Returns the cgroup that this process is in, and those around it.
pub fn groups() -> Vec<PathBuf> {
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(path) = cgroups.lines().find_map(|line| line.strip_prefix("0::/")) else { return Vec::new() };
    let own = Path::new(CGROUPS).join(path);
    own.ancestors().take_while(|group| group.starts_with(CGROUPS)).map(Path::to_path_buf).collect()
}

fn free_of_machine(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_understood() {
        assert_eq!(free_of_machine("MemTotal:  9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(free_of_machine("MemTotal:  9 kB\n"), None);
    }
}
