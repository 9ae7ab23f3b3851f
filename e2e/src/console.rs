// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps a guest's console output and searches it for faults.

use crate::line_reader::{LineReader, within};
use std::io::Read;

/// Texts that a kernel prints when something is wrong with it. A program's own segmentation fault is not among them.
const FAULTS: [&str; 12] = [
    "BUG:",
    "BUG ",
    "WARNING:",
    "Oops",
    "Kernel panic",
    "general protection fault",
    "Call Trace:",
    "unable to handle",
    "blocked for more than",
    "soft lockup",
    "rcu: INFO",
    "refcount_t:",
];
/// Lines that look like faults and are none: every boot of a stock kernel prints them.
const HARMLESS: [&str; 1] = ["MDS CPU bug"];

/// All output of a guest's kernel.
#[derive(Debug)]
pub struct Console {
    lines: LineReader,
    seen: Vec<String>,
}

impl Console {
    /// Reads from `stream`.
    pub fn of(stream: impl Read + Send + 'static) -> Self {
        Self { lines: LineReader::of(stream), seen: Vec::new() }
    }

    /// Returns all output so far.
    pub fn text(&mut self) -> &[String] {
        self.seen.extend(self.lines.ready());
        &self.seen
    }

    /// Drops all output so far.
    pub fn forget(&mut self) {
        self.text();
        self.seen.clear();
    }

    /// Waits for the end of the stream, at most 10 s for each line.
    pub fn drain(&mut self) {
        let deadline = within(10);
        while let Ok(line) = self.lines.next_before(deadline) {
            self.seen.push(line);
        }
    }

    /// Returns the first line that shows a fault.
    pub fn fault(&mut self) -> Option<&str> {
        self.text().iter().map(String::as_str).find(|line| is_fault(line))
    }

    /// Returns the last lines, for a report.
    pub fn tail(&mut self, lines: usize) -> String {
        let text = self.text();
        text[text.len().saturating_sub(lines)..].join("\n    ")
    }
}

fn is_fault(line: &str) -> bool {
    FAULTS.iter().any(|fault| line.contains(fault)) && !HARMLESS.iter().any(|harmless| line.contains(harmless))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canary_faults_of_a_kernel_are_recognized() {
        for line in [
            "[    3.1] WARNING: CPU: 0 PID: 77 at mm/memory.c:1 foo+0x1/0x2",
            "[    3.1] BUG: kernel NULL pointer dereference, address: 0",
            "[    3.1] BUG kmalloc-64 (Tainted: G): Poison overwritten",
            "[    3.1] Oops: 0000 [#1] PREEMPT SMP",
            "[    3.1] Kernel panic - not syncing: panic_on_warn set ...",
        ] {
            assert!(is_fault(line), "{line}");
        }
    }

    #[test]
    fn faults_of_programs_and_boot_messages_are_not() {
        for line in
            ["[    3.1] vm[70]: segfault at 7f00 ip 55 sp 7f error 7", "[    0.0] Command line: panic_on_warn=1"]
        {
            assert!(!is_fault(line), "{line}");
        }
    }

    #[test]
    fn console_finds_the_first_fault_and_keeps_the_rest() {
        let mut console = Console::of(&b"up\nWARNING: x\nOops\n"[..]);
        console.drain();
        assert_eq!(console.fault(), Some("WARNING: x"));
        assert_eq!(console.tail(1), "Oops");
    }
}
