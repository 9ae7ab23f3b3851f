// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo demo`: shows the main job. A large file goes from one domain to another through `tombolo cat`, and its
//! digests are compared. Then Tombolo is measured beside the kernel's transports, in the same run.

mod compare;
mod domain;
mod load;
mod transfer;

use std::path::PathBuf;

use tombolo_bench::size;

use crate::{
    failure::{Result, print_line},
    human, output,
    signals::Signals,
};

pub use domain::Kind;
use load::Load;

/// Move a large file between two domains, check it, and compare with TCP and UNIX sockets
///
/// Makes two processes, each in a user and network namespace of its own where that is allowed, moves a file from one to
/// the other through `tombolo cat`, and compares the SHA-256 of what was sent with that of what arrived. Then prints
/// throughput and round-trip time by message size beside TCP and a UNIX stream socket, measured in the same run. Takes
/// about a minute; leaves nothing behind.
///
/// Exit codes: 0 if the file arrived whole and everything was measured; 1 if not; 2 if the options make no sense, FILE
/// cannot be opened, or there is no room for the data.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Move this file instead of one that is made for the purpose
    #[arg(value_name = "FILE", conflicts_with = "size")]
    pub file: Option<PathBuf>,
    /// Bytes of the file that is made
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = size::parse)]
    pub size: usize,
    /// Leave out the measurements after the transfer
    #[arg(long)]
    pub no_bench: bool,
    /// Print lines of JSON instead of text: one for the transfer, one for each measurement
    #[arg(long)]
    pub json: bool,
    /// Measure so briefly that the numbers mean little
    #[arg(long, hide = true)]
    pub quick: bool,
}

/// Carries out the command.
pub fn run(args: &Args) -> Result<()> {
    output::unless_unread(show(args))
}

fn show(args: &Args) -> Result<()> {
    let signals = Signals::hold()?;
    transfer(args, &signals)?;
    // The files of the transfer are gone; the benchmark cleans up after itself.
    signals.let_through()?;
    if args.no_bench { Ok(()) } else { compare::run(args.json, args.quick) }
}

fn transfer(args: &Args, signals: &Signals) -> Result<()> {
    let load = match &args.file {
        Some(path) => Load::open(path)?,
        None => Load::make(args.size as u64, signals)?,
    };
    let kind = Kind::probe();
    print_line(&format!("moving {} from one domain to another: {kind}", human::bytes(load.size)));
    print_line(&format!("it arrives in a file in {}", load.folder.display()));
    let moved = transfer::run(&load, &kind, signals)?;
    if args.json {
        output::json(&moved)?;
    } else {
        output::print(&moved.text())?;
    }
    moved.verdict()
}
