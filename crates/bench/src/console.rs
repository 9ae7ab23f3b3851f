// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reports the progress of measurements, and chooses exit codes.

use std::io;

use crate::result::Skip;

/// Returns 2 if something failed, 1 if there is nothing to show, else 0.
pub(crate) fn exit_code(nothing: bool, skips: &[Skip]) -> u8 {
    if skips.iter().any(|s| s.failed) { 2 } else { u8::from(nothing) }
}

/// Standard error: shows the progress, if it is a terminal, and what was skipped.
pub(crate) struct Console {
    terminal: bool,
}

impl Console {
    pub(crate) fn new() -> Self {
        Self { terminal: io::IsTerminal::is_terminal(&io::stderr()) }
    }

    pub(crate) fn progress(&self, title: &str, done: usize, total: usize) {
        if self.terminal {
            eprint!("\r{title}{done}/{total} samples\x1b[K{}", if done == total { "\r\x1b[K" } else { "" });
        }
    }

    pub(crate) fn skipped(&self, skip: &Skip) {
        eprintln!("{}{skip}", if self.terminal { "\r\x1b[K" } else { "" });
    }
}
