// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the tests that Miri can run, and checks that Miri finds undefined behaviour that a canary contains.
//!
//! Miri supports neither shared memory nor processes. So the ring's tests cover `mem`, over memory of one process.

use std::process::{Command, Output, Stdio};

/// Arguments that select the tests of each run.
const RUNS: [&[&str]; 2] = [&["-p", "tombolo-layout"], &["-p", "tombolo-ring", "--test", "alone"]];
/// Test with undefined behaviour, at which Miri ends the program.
const CANARY: &str = "canary_bytes_read_before_they_were_published";
/// Miri's message about it.
const FOUND: &str = "Undefined Behavior: Data race detected";

fn miri(args: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(["+nightly", "miri", "test"]).args(args);
    command.env("CARGO_TARGET_DIR", "target/miri");
    // Some code measures its own time, so the clock is the machine's. Random values are the same in each run.
    command.env("MIRIFLAGS", "-Zmiri-disable-isolation");
    command
}

/// Runs all tests. Returns whether they passed and Miri found only the canary's undefined behaviour.
pub fn run() -> Result<bool, String> {
    let failed = |error| format!("cannot run cargo miri: {error}");
    let mut passed = true;
    for args in RUNS {
        passed &= miri(args).status().map_err(failed)?.success();
    }
    let canary = ["-p", "tombolo-ring", "--test", "alone", "--", "--exact", "--ignored", CANARY];
    let output = miri(&canary).stdin(Stdio::null()).output().map_err(failed)?;
    let found = is_found(&output);
    println!("test miri_{CANARY} ... {}", if found { "ok" } else { "FAILED" });
    println!("test result: {}", if found { "ok. 1 passed; 0 failed;" } else { "FAILED. 0 passed; 1 failed;" });
    if !found {
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(passed && found)
}

fn is_found(output: &Output) -> bool {
    !output.status.success() && String::from_utf8_lossy(&output.stderr).contains(FOUND)
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::ExitStatusExt, process::ExitStatus};

    use super::*;

    fn said(code: i32, stderr: &str) -> Output {
        Output { status: ExitStatus::from_raw(code << 8), stdout: Vec::new(), stderr: stderr.into() }
    }

    #[test]
    fn canary_run_that_found_nothing_or_something_else_does_not_count() {
        assert!(is_found(&said(1, &format!("error: {FOUND} between ..."))));
        assert!(!is_found(&said(0, "")));
        assert!(!is_found(&said(1, "error: could not compile")));
    }

    /// The canary exists in the file where it is searched for.
    #[test]
    fn planted_behaviour_is_there() {
        let file = include_str!("../../crates/core/ring/tests/alone.rs");
        assert!(file.contains(&format!("fn {CANARY}()")) && file.contains("#[ignore"));
    }
}
