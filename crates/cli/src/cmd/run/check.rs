// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo run --check`: reports whether the connections of a program can be joined, as far as that is known before it
//! runs.

use std::{ffi::OsStr, io::Write, os::unix::fs::PermissionsExt, path::Path};

use super::{
    folder, library,
    program::{self, Runs},
};
use crate::failure::{Failure, Os, Result};

/// Prints a line for each thing that matters.
///
/// # Errors
/// The obstacle: exit code 1, or 2 where something named on the command line does not exist.
pub fn check(name: &OsStr, folder: Option<&Path>, library: Option<&Path>) -> Result<()> {
    let library = library::find(library)?;
    print_line(&format!("library   {}: there", library.display()))?;
    // A missing folder is made, as it would be for a program.
    let folder = folder::prepare(folder)?;
    let file = folder.join(format!("try-{}", std::process::id()));
    std::fs::write(&file, "")
        .and_then(|()| std::fs::remove_file(&file))
        .map_err(|source| Failure::Open { file: folder.display().to_string(), source })?;
    print_line(&format!("folder    {}: can be used by this user", folder.display()))?;
    let missing = |why: &str| Failure::Usage(format!("{}: {why}", name.display()));
    let path = program::find(name).ok_or_else(|| missing("no such program in PATH"))?;
    let found =
        std::fs::metadata(&path).map_err(|source| Failure::Open { file: path.display().to_string(), source })?;
    if !found.is_file() || found.permissions().mode() & 0o111 == 0 {
        return Err(missing("it is no file that can be executed"));
    }
    let runs = match program::runs(&path) {
        Runs::File(runs) => runs,
        Runs::Missing(interpreter) => {
            return Err(missing(&format!("its interpreter {} is not there", interpreter.display())));
        }
        Runs::Endless => return Err(missing("its interpreter is interpreted by another, and so on without end")),
    };
    let shown =
        if runs == path { path.display().to_string() } else { format!("{} by {}", path.display(), runs.display()) };
    match program::obstacle(&path, &library) {
        None => print_line(&format!("program   {shown}: can be preloaded")),
        Some(why) => Err(Failure::Outcome(format!("{} {why}: its connections stay on TCP", runs.display()))),
    }
}

fn print_line(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}").os("write")?)
}
