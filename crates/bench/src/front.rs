// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements the command `tombolo bench`.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use crate::apart;
use crate::args::{BenchArgs, Plan};
use crate::console::{Console, exit_code};
use crate::error::{Os, Result};
use crate::report;
use crate::run::{Event, run};
use crate::table;
use crate::worker::chain;

/// Measures what the options ask for. Results go to standard output, as tables or as lines of JSON. Skipped
/// measurements and their reasons go to standard error, and so does the progress if that is a terminal.
///
/// Returns the exit code: 0 if all went well (even if this machine could not do some of it), 1 if nothing was measured
/// at all, 2 if a measurement failed or the options make no sense. A closed standard output is no failure.
///
/// # Blocking
/// The same as [`run`].
pub fn main(args: &BenchArgs) -> ExitCode {
    match measure(args) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("{}: {}", program(), chain(&e));
            ExitCode::from(2)
        }
    }
}

/// Returns the name under which this program was started.
fn program() -> String {
    let path = std::env::args_os().next().map(PathBuf::from);
    path.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned())).unwrap_or_else(|| "bench".into())
}

fn measure(args: &BenchArgs) -> Result<u8> {
    if let Some(dir) = &args.report {
        return report::main(args, dir);
    }
    if let Some(host) = &args.serve {
        let heard = |address| eprintln!("serving at {address}");
        return apart::serve(host, args.via.as_deref(), heard).map(|()| 0);
    }
    let plan = Plan::try_from(args)?;
    if args.ring_by_caches {
        eprintln!("rings of {}", tombolo::RingChoice::of_this_machine());
    }
    let console = Console::new();
    let mut written = Ok(());
    let outcome = run(&plan, |event| match event {
        Event::Progress { done, total } => console.progress("", done, total),
        Event::Measured(measurement) if args.json && written.is_ok() => {
            written = serde_json::to_string(measurement)
                .map_err(io::Error::from)
                .and_then(|line| writeln!(io::stdout(), "{line}"));
        }
        Event::Skipped(skip) => console.skipped(skip),
        _ => {}
    })?;
    if !args.json {
        written = io::stdout().write_all(table::render(&outcome.measurements, args.against.as_deref()).as_bytes());
    }
    match written {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(0),
        other => other.os("writing the results")?,
    }
    Ok(exit_code(outcome.measurements.is_empty(), &outcome.skips))
}
