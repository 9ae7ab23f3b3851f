// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the project's own checks and its test runner: `cargo xtask <command>`.
//!
//! A check reads the tree and reports everything that breaks a rule of the project; a tier is a command with a time
//! limit. Both are data plus small functions, so that a new one needs a new file and one line in a table.
#![forbid(unsafe_code)]

mod api;
mod checks;
mod features;
mod miri;
mod mutants;
mod report;
mod rust;
mod tiers;
mod tree;
mod workspace;
mod workspaces;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask <command>

  check               every check below; one line each, then everything that is wrong
  layers              dependencies go one way, as [workspace.metadata.layers] says
  circles             files of a crate import each other in one direction
  clauses             every clause of spec/ has a test, every test's clause exists
  unsafe              unsafe code lives only where docs/unsafe.md says
  names               no function is a bare verb, no type a word that the glossary replaced
  size                no file over the limit of lines; the ten largest
  types               no type has more than 25 methods; the ten largest
  spdx                each source file begins with its licence
  licences            dependencies come under licences that go with ours
  locks               lock files of bench/ and fuzz/ know what our crates need
  header              include/tombolo.h is what crates/capi says; --write makes it so
  surface             what users can name is what docs/surface lists; --write makes it so
  summaries           what is said of a public item begins with what it does, not with a clause
  docs                relative links in *.md lead somewhere
  prose               no sentence of *.md or of a doc comment has more than 40 words
  columns             no line of prose in *.md has more than 100 columns
  tables              tables of results hold what the recorded runs do

  table               make those tables again, in place

  features            the public crate with each feature alone; what is off is not compiled
  workspaces          what is no member of the workspace builds without warnings

  miri                what Miri can run, and a canary
  mutants [FILE...]   changes what matters most, line by line, and sees that tests fail; --record keeps what came of it

  tiers               the table of test tiers
  test [TIER...]      run all tiers, or those named; --long for the long forms

exit code: 0 all is well, 1 something is wrong, 2 usage or the command could not run";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(why) => {
            eprintln!("xtask: {why}");
            ExitCode::from(2)
        }
    }
}

/// Runs one command. Returns whether all is well.
fn run(words: &[&str]) -> Result<bool, String> {
    match words {
        ["help" | "-h" | "--help"] => {
            println!("{USAGE}");
            Ok(true)
        }
        ["check"] => checks::run_all(&checks::Project::load()?),
        ["table"] => {
            let project = checks::Project::load()?;
            checks::write_tables(&project.workspace.root, &project.tree)
        }
        ["tiers"] => {
            print!("{}", tiers::describe());
            Ok(true)
        }
        ["test", rest @ ..] => tiers::run(rest),
        ["miri"] => miri::run(),
        ["features"] => features::run(),
        ["workspaces"] => workspaces::run(),
        ["surface", "--write"] => checks::write_surface(&checks::Project::load()?).map(|()| true),
        ["mutants", rest @ ..] => mutants::run(rest),
        ["header", "--write"] => checks::write_header(&workspace::Workspace::load()?.root).map(|()| true),
        [name] => match checks::find(name) {
            Some(check) => Ok(checks::run_one(check, &checks::Project::load()?)),
            None => Err(format!("unknown command `{name}`\n\n{USAGE}")),
        },
        _ => Err(format!("what to do?\n\n{USAGE}")),
    }
}
