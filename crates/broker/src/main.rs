// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: mem, os, control, domain-ivshmem, domain-xen, sockets.
//!
//! The command `tombolod`.
//!
//! Exit codes: 0 success; 1 failure; 2 the command line or the configuration is invalid.
#![forbid(unsafe_code)]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Parser, Subcommand};
use tombolo_broker::{
    config::{Config, ConfigError, parse_bytes},
    endpoint::{self, run::WINDOW},
    host::{self, descriptor_store, memory_jobs::What, qemu::ASK_AGAIN},
    log, xen,
};
use tracing_subscriber::filter::Targets;

/// Default path of the configuration.
const CONFIG: &str = "/etc/tombolo/tombolod.toml";
/// Default folder for sockets and state.
const STATE: &str = "/run/tombolo";

/// Gives virtual machines memory to share, doorbells, and news of each other, as the configuration allows.
#[derive(Parser)]
#[command(name = "tombolod", version, max_term_width = 100)]
struct Cli {
    /// What is allowed, and which domains there are
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// The folder for sockets and state
    #[arg(long, value_name = "FOLDER", default_value = STATE, global = true)]
    state: PathBuf,
    /// What is written to standard error: a level, or one for each part, as in `info,tombolo_broker::host=debug`;
    /// TOMBOLO_LOG says the same
    #[arg(long, value_name = "LEVEL", global = true, value_parser = log::parse_filter)]
    log: Option<Targets>,
    /// Do not start a descriptor store: one is there
    #[arg(long, alias = "no-holder")]
    no_store: bool,
    /// Be the broker of a virtual machine, or a domain of Xen's, not of its host: nothing is configured there
    #[arg(long, conflicts_with_all = ["config", "no_store", "check"])]
    guest: bool,
    /// With --guest: what each end of a channel may use of a link's memory, a multiple of 4096
    #[arg(long, alias = "slice", value_name = "BYTES", requires = "guest", default_value_t = WINDOW, value_parser = window)]
    window: u64,
    /// With --guest: do not attach the program that tells TCP connections' sequence numbers (`tombolo hook`)
    #[arg(long, requires = "guest")]
    no_hook: bool,
    /// Look through a configuration, say what is wrong with it, and end
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
    /// Milliseconds until a QEMU is asked again for what it tells of by no event, for tests
    #[arg(long, value_name = "MILLISECONDS", hide = true, default_value_t = ASK_AGAIN.as_millis() as u64)]
    ask_again: u64,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Subcommand)]
enum Role {
    /// Keep descriptors while the broker is away; the broker starts this by itself, or a service manager does
    Hold,
    /// Do something to the memory at standard input that may take for ever; the broker starts this by itself
    #[command(hide = true)]
    Memory { what: What },
}

fn main() -> ExitCode {
    let code = run(Cli::parse());
    log::finish();
    code
}

fn run(mut line: Cli) -> ExitCode {
    if let Err(why) = log::start(line.log.take()) {
        eprintln!("tombolod: {why}");
        return ExitCode::from(2);
    }
    if let Some(path) = &line.check {
        return match Config::read(path) {
            Ok(config) => {
                tracing::info!("{}: {} domains, {} rules", path.display(), config.domains.len(), config.rules.len());
                ExitCode::SUCCESS
            }
            Err(error) => usage(&error),
        };
    }
    let done = match line.role {
        Some(Role::Hold) => descriptor_store::serve(&line.state).map_err(Into::into),
        Some(Role::Memory { what }) => what.perform(std::io::stdin()).map_err(Into::into),
        None if line.guest && xen::grant_reaper::is_domain() => xen::run::run_in_domain(&line.state, !line.no_hook),
        None if line.guest => endpoint::run::run(&line.state, line.window, !line.no_hook).map_err(Into::into),
        None => match Config::read(&line.config) {
            Ok(_) => host::run::run(&line.config, &line.state, !line.no_store, Duration::from_millis(line.ask_again)),
            Err(error) => return usage(&error),
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Parses the size of a window in bytes.
fn window(text: &str) -> Result<u64, &'static str> {
    let fits = |bytes: &u64| *bytes != 0 && bytes % 4096 == 0 && *bytes <= tombolo_control::REGION_MAX;
    parse_bytes(text).filter(fits).ok_or("`4096` or `2MiB`: a multiple of 4096, at most 1GiB")
}

fn usage(error: &ConfigError) -> ExitCode {
    error.mistakes().for_each(|mistake| tracing::error!("{mistake}"));
    ExitCode::from(2)
}
