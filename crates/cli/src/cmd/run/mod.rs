// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo run`: runs a program whose TCP connections to peer processes go through shared memory.
//!
//! Prepares the environment and becomes the program, so nothing stands between the program and its caller. Only with
//! `--summary` does it stay, to report at the end how the program's connections went.

mod check;
mod elf;
mod folder;
mod io_uring;
mod library;
mod program;
mod summary;
mod sweep;
mod switch;

use std::{
    ffi::OsString,
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use tombolo_bench::size;
use tombolo_sockets::ports::List;

use super::cat;
use crate::failure::{Failure, Os, Result, print_line};

/// Run a program with shared memory for its TCP connections to neighbours that run likewise
///
/// Connections to anything else stay as they are. Both ends must use one folder.
#[derive(clap::Args)]
pub struct Args {
    /// Folder in which ends meet: this user's, unless its tombolo.conf says otherwise [default: sockets in the folder
    /// of services]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Append a line for each connection that is joined, or why it is not
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Keep a file in this folder for each process, with its bytes by each path, as JSON
    #[arg(long, value_name = "FOLDER")]
    report: Option<PathBuf>,
    /// Say on standard error, when the program ends, what the connections of all its processes were carried by, and why
    /// not
    #[arg(long)]
    summary: bool,
    /// Say whether the folder and the library can be used and the program be preloaded, and do not run it
    #[arg(long, conflicts_with = "summary")]
    check: bool,
    /// Join connections to services at these ports alone: numbers and ranges, as in 80,443,8000-8080
    #[arg(long, value_name = "PORTS")]
    only: Option<String>,
    /// Leave connections to services at these ports on TCP
    #[arg(long, value_name = "PORTS")]
    not: Option<String>,
    /// A running process, and those that it started, join no more connections; those that are joined stay so
    #[arg(long, value_name = "PID", exclusive = true)]
    off: Option<u32>,
    /// Ends what --off began
    #[arg(long, value_name = "PID", exclusive = true)]
    on: Option<u32>,
    /// Leave connections inside one network namespace alone
    #[arg(long)]
    no_loopback: bool,
    /// Bytes after which a connection is joined; two requests with answers do as well [default: 16KiB, and for a
    /// service most of whose connections end soon 2MiB or 64 requests]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    after: Option<u64>,
    /// Bytes of shared memory for each direction of a busy connection: a power of two, from 4KiB to 1GiB [default:
    /// 1MiB, and up to 4MiB where that is no slower]
    #[arg(long, value_name = "SIZE", value_parser = ring)]
    ring: Option<u64>,
    /// Of these, bytes that a connection begins with and has when it is not busy
    #[arg(long, value_name = "SIZE", default_value = "256KiB", value_parser = ring)]
    first_ring: u64,
    /// Bytes of shared memory that a process makes at most for all its connections [default: no limit but the cgroup's]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    memory: Option<u64>,
    /// Let the program use io_uring, which the library cannot see
    #[arg(long)]
    allow_io_uring: bool,
    /// The library to preload [default: $TOMBOLO_PRELOAD, else beside this program, or in ../lib/tombolo]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required_unless_present_any = ["off", "on"], trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

fn bytes(text: &str) -> std::result::Result<u64, String> {
    Ok(size::parse(text)? as u64)
}

fn ring(text: &str) -> std::result::Result<u64, String> {
    let size = cat::ring(text)?;
    if size.is_power_of_two() { Ok(size) } else { Err("a power of two from 4KiB to 1GiB is needed".into()) }
}

pub fn run(args: &Args) -> Result<()> {
    if let Some(pid) = args.off {
        return switch::off(pid);
    }
    if let Some(pid) = args.on {
        return switch::on(pid);
    }
    for (option, list) in [("--only", &args.only), ("--not", &args.not)] {
        if let Some(Err(error)) = list.as_deref().map(str::parse::<List>) {
            return Err(Failure::Usage(format!("{option}: {error}")));
        }
    }
    if args.check {
        return check::check(&args.command[0], args.folder.as_deref(), args.library.as_deref());
    }
    let library = library::find(args.library.as_deref())?;
    let folder = folder::prepare(args.folder.as_deref())?;
    // A failure to remove leftovers of dead processes is no reason not to run.
    let _ = sweep::sweep(&folder);
    let (name, arguments) = args.command.split_first().expect("clap requires one");
    let obstacle = program::find(name).and_then(|path| program::obstacle(&path, &library));
    if let Some(why) = &obstacle {
        print_line(&format!("tombolo: {} {why}: its connections stay on TCP", name.display()));
    }
    let mut command = Command::new(name);
    command.args(arguments);
    command.env("LD_PRELOAD", library::preload(&library, std::env::var_os("LD_PRELOAD"))?);
    command.env("TOMBOLO_SOCKETS", folder);
    // A `tombolo run` within another does not inherit these.
    for (name, size) in [("TOMBOLO_SOCKETS_AFTER", args.after), ("TOMBOLO_SOCKETS_RING", args.ring)] {
        match size {
            Some(size) => command.env(name, size.to_string()),
            None => command.env_remove(name),
        };
    }
    command.env("TOMBOLO_SOCKETS_FIRST_RING", args.first_ring.to_string());
    command.env("TOMBOLO_SOCKETS_LOOPBACK", if args.no_loopback { "off" } else { "on" });
    if let Some(memory) = args.memory {
        command.env("TOMBOLO_SOCKETS_MEMORY", memory.to_string());
    }
    if let Some(log) = &args.log {
        command.env("TOMBOLO_SOCKETS_LOG", absolute(log)?);
    }
    for (name, list) in [("TOMBOLO_SOCKETS_ONLY", &args.only), ("TOMBOLO_SOCKETS_NOT", &args.not)] {
        if let Some(list) = list {
            command.env(name, list);
        }
    }
    let reports = match &args.report {
        Some(report) => {
            fs::create_dir_all(report)
                .map_err(|source| Failure::Open { file: report.display().to_string(), source })?;
            Some(absolute(report)?)
        }
        None => None,
    };
    if let Some(reports) = &reports {
        command.env("TOMBOLO_SOCKETS_REPORT", reports);
    }
    // Forbidding io_uring costs a program the rights that its file gives it, and without the library there is no need
    // for it.
    if !args.allow_io_uring && !obstacle.is_some_and(|why| why.is_rights()) {
        io_uring::forbid()?;
    }
    if args.summary {
        return summary::run(command, reports.as_deref());
    }
    // Returns only if the process could not become the program.
    let source = command.exec();
    Err(Failure::Open { file: name.display().to_string(), source })
}

/// Returns the absolute path, because the program may change its folder.
fn absolute(path: &Path) -> Result<PathBuf> {
    Ok(std::path::absolute(path).os("getcwd")?)
}
