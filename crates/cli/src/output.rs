// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes to standard output: data, and nothing else.

use std::io::{self, Write};

use serde::Serialize;

use crate::failure::{Failure, Os, Result};

/// Writes lines.
pub fn print(lines: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{lines}").and_then(|()| out.flush()).map_err(failed)
}

/// Writes one line of JSON.
pub fn json(value: &impl Serialize) -> Result<()> {
    print(&serde_json::to_string(value).map_err(io::Error::from).os("writing JSON")?)
}

/// Returns the failure of standard output.
pub fn failed(source: io::Error) -> Failure {
    Failure::Write { file: "standard output".into(), source }
}

/// Treats a standard output that nobody reads any more as no failure.
pub fn unless_unread(done: Result<()>) -> Result<()> {
    match done {
        Err(Failure::Write { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}
