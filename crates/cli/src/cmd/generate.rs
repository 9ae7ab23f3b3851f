// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo __generate`: writes manual pages and shell completions, from the definitions of the command's options.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use clap_complete::Shell;

use crate::failure::{Failure, Result};

/// Write manual pages and shell completions, laid out as below /usr/share
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder; made if it is not there
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

/// Shells, and the place where each looks for completions.
const COMPLETIONS: [(Shell, &str, &str); 3] = [
    (Shell::Bash, "bash-completion/completions", "tombolo"),
    (Shell::Fish, "fish/vendor_completions.d", "tombolo.fish"),
    (Shell::Zsh, "zsh/site-functions", "_tombolo"),
];

/// Writes the files for `command`.
pub fn run(args: &Args, command: clap::Command) -> Result<()> {
    // The verb `help` needs no page of its own.
    let command = command.disable_help_subcommand(true);
    let manual = args.folder.join("man/man1");
    make(&manual)?;
    clap_mangen::generate_to(command.clone(), &manual).map_err(|source| failed(&manual, source))?;
    for (shell, folder, name) in COMPLETIONS {
        let folder = args.folder.join(folder);
        make(&folder)?;
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut command.clone(), "tombolo", &mut text);
        let file = folder.join(name);
        fs::write(&file, text).map_err(|source| failed(&file, source))?;
    }
    Ok(())
}

fn make(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|source| failed(folder, source))
}

fn failed(file: &Path, source: io::Error) -> Failure {
    Failure::Write { file: file.display().to_string(), source }
}
