// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads the resources that a process has used so far: CPU time, context switches, memory.

use std::fs;
use std::ops::Sub;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Os, Result};

/// CPU time and context switches of a process, all its living threads together.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Nanoseconds of CPU time, user and system.
    pub cpu_ns: u64,
    /// Number of times that a thread gave up the CPU because it had to wait.
    pub voluntary: u64,
    /// Number of times that the scheduler took the CPU away.
    pub involuntary: u64,
}

impl Usage {
    /// Reads what this process has used so far.
    ///
    /// # Errors
    /// [`Error::Os`] if `/proc` is not there.
    pub fn now() -> Result<Self> {
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        let mut usage = Self { cpu_ns: cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64, ..Self::default() };
        for task in fs::read_dir("/proc/self/task").os("listing /proc/self/task")? {
            // A thread may end between the listing and the reading.
            let Ok(status) = fs::read_to_string(task.os("listing /proc/self/task")?.path().join("status")) else {
                continue;
            };
            usage.voluntary += field(&status, "voluntary_ctxt_switches:").unwrap_or(0);
            usage.involuntary += field(&status, "nonvoluntary_ctxt_switches:").unwrap_or(0);
        }
        Ok(usage)
    }
}

impl Sub for Usage {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns),
            voluntary: self.voluntary.saturating_sub(before.voluntary),
            involuntary: self.involuntary.saturating_sub(before.involuntary),
        }
    }
}

/// Returns the bytes of memory of this process; pages shared by n processes count as 1/n each.
///
/// # Errors
/// [`Error::Os`] if `/proc/self/smaps_rollup` cannot be read.
pub fn memory() -> Result<u64> {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").os("reading /proc/self/smaps_rollup")?;
    let kib = field(&rollup, "Pss:").ok_or_else(|| Error::Unsupported("the kernel does not report Pss".into()))?;
    Ok(kib * 1024)
}

/// Returns the number after `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_of_a_status_text_is_found_at_line_start_only() {
        let text = "nonvoluntary_ctxt_switches:\t7\nvoluntary_ctxt_switches:\t42\nPss:   12 kB\n";
        assert_eq!(field(text, "voluntary_ctxt_switches:"), Some(42));
        assert_eq!(field(text, "Pss:"), Some(12));
        assert_eq!(field(text, "Rss:"), None);
    }

    #[test]
    fn usage_after_waiting_counts_a_voluntary_switch() {
        let before = Usage::now().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let millisecond = rustix::time::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        let mut nothing = [rustix::event::PollFd::new(&reader, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut nothing, Some(&millisecond)).unwrap(), 0);
        drop(writer);
        let used = Usage::now().unwrap() - before;
        assert!(used.voluntary > 0 && used.cpu_ns > 0, "{used:?}");
    }

    #[test]
    fn memory_after_touching_64_mib_grows_by_it() {
        let before = memory().unwrap();
        let block = std::hint::black_box(vec![1u8; 64 << 20]);
        // Other tests run in this process as well, and release some of their memory.
        assert!(memory().unwrap() >= before + (32 << 20));
        drop(block);
    }
}
