// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The command `tombolo bench`.

use std::io::{self, Write};
use std::process::ExitCode;

use crate::args::{BenchArgs, Plan};
use crate::error::{Os, Result};
use crate::run::{Event, run};
use crate::table;
use crate::worker::chain;

/// Measures what the options say. Results go to standard output, as tables or as lines of JSON; what was skipped and why
/// goes to standard error, and so does the progress if that is a terminal.
///
/// Says how to exit: 0 if all went well (even if this machine could not do some of it), 1 if nothing was measured at all,
/// 2 if a measurement failed or the options make no sense. A closed standard output is no failure.
///
/// # Blocking
/// As [`run`].
pub fn main(args: &BenchArgs) -> ExitCode {
    match measure(args) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("bench: {}", chain(&e));
            ExitCode::from(2)
        }
    }
}

fn measure(args: &BenchArgs) -> Result<u8> {
    let plan = Plan::try_from(args)?;
    let terminal = io::IsTerminal::is_terminal(&io::stderr());
    let mut written = Ok(());
    let outcome = run(&plan, |event| match event {
        Event::Progress { done, total } if terminal => {
            eprint!("\r{done}/{total} samples\x1b[K{}", if done == total { "\r\x1b[K" } else { "" })
        }
        Event::Measured(measurement) if args.json && written.is_ok() => {
            written = serde_json::to_string(measurement)
                .map_err(io::Error::from)
                .and_then(|line| writeln!(io::stdout(), "{line}"));
        }
        Event::Skipped(skip) => {
            let clear = if terminal { "\r\x1b[K" } else { "" };
            let size = skip.size.map_or(String::new(), |n| format!(" {}", crate::size::show(n)));
            let word = if skip.failed { "FAIL" } else { "SKIP" };
            eprintln!("{clear}{word} {} {}{size}: {}", skip.test.name(), skip.transport, skip.reason);
        }
        _ => {}
    })?;
    if !args.json {
        written = io::stdout().write_all(table::render(&outcome.measurements, args.against.as_deref()).as_bytes());
    }
    match written {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(0),
        other => other.os("writing the results")?,
    }
    Ok(if outcome.skips.iter().any(|s| s.failed) { 2 } else { u8::from(outcome.measurements.is_empty()) })
}
