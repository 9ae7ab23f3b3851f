// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How much memory this process may fill with files.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Where cgroups of version 2 are mounted.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Bytes to be had, by the machine's account and by that of each cgroup that this process is in. 0 if nobody can tell.
pub fn available() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| free_of_machine(&text)).unwrap_or(0);
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(path) = cgroups.lines().find_map(|line| line.strip_prefix("0::/")) else { return machine };
    let groups: Vec<PathBuf> = Path::new(CGROUPS).join(path).ancestors().map(Path::to_path_buf).collect();
    let limits = groups.iter().take_while(|group| group.starts_with(CGROUPS)).filter_map(|group| {
        let number = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        // Without a limit the file says "max".
        Some(number("memory.max")?.saturating_sub(number("memory.current")?))
    });
    limits.fold(machine, u64::min)
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
