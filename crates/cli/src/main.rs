// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: os, mem, control, sockets, backends, bench, inspect, net, tombolo.
//!
//! The command `tombolo VERB`: one module of `cmd` for each verb.
//!
//! Exit codes: 0 done; 1 a negative outcome or a failure in operation; 2 a command line that makes no sense, or
//! something named in it that cannot be opened. A command that is interrupted dies of the signal, once everything is
//! cleaned up. A standard output that nobody reads any more is no failure. Data goes to standard output, all else to
//! standard error.
#![forbid(unsafe_code)]

mod cmd;
mod failure;
mod human;
mod memory;
mod output;
mod progress;
mod signals;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use failure::{Failure, print_line};

/// Moves bytes between neighbouring virtual machines, containers and the host through memory that both sides map.
#[derive(Parser)]
#[command(name = "tombolo", version, arg_required_else_help = true, max_term_width = 100)]
struct Line<V: Subcommand> {
    #[command(subcommand)]
    verb: V,
}

#[derive(Subcommand)]
enum Verb {
    Cat(cmd::cat::Args),
    /// Measure Tombolo beside the kernel's transports, in one run and between two processes
    Bench(tombolo_bench::BenchArgs),
    Demo(cmd::demo::Args),
    Hook(cmd::hook::Args),
    Link(cmd::link::Args),
    Ls(cmd::ls::Args),
    Net(cmd::net::Args),
    Proxy(cmd::proxy::Args),
    Run(cmd::run::Args),
    Top(cmd::top::Args),
    Vm(cmd::vm::Args),
    Doctor(cmd::doctor::Args),
}

/// The verbs, and one that no manual names.
#[derive(Subcommand)]
enum Every {
    #[command(flatten)]
    Verb(Box<Verb>),
    #[command(name = "__generate", hide = true)]
    Generate(cmd::generate::Args),
}

fn main() -> ExitCode {
    // The benchmark starts this program again for its two endpoints.
    if let Some(code) = tombolo_bench::role_main() {
        return code;
    }
    let verb = match Line::<Every>::parse().verb {
        Every::Verb(verb) => verb,
        Every::Generate(args) => return end(cmd::generate::run(&args, Line::<Verb>::command())),
    };
    end(match *verb {
        Verb::Cat(args) => cmd::cat::run(&args),
        Verb::Bench(args) => return tombolo_bench::main(&args),
        Verb::Demo(args) => cmd::demo::run(&args),
        Verb::Hook(args) => cmd::hook::run(&args),
        Verb::Link(args) => cmd::link::run(&args),
        Verb::Ls(args) => cmd::ls::run(&args),
        Verb::Net(args) => cmd::net::run(&args),
        Verb::Proxy(args) => cmd::proxy::run(&args),
        Verb::Run(args) => cmd::run::run(&args),
        Verb::Top(args) => cmd::top::run(&args),
        Verb::Vm(args) => cmd::vm::run(&args),
        Verb::Doctor(args) => cmd::doctor::run(&args),
    })
}

fn end(done: failure::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            print_line(&format!("tombolo: {}", failure.chain()));
            if let Failure::Interrupted { signal, .. } = failure {
                signals::die_of(signal);
            }
            failure.exit_code()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a character that the generator of the help takes for a place to break lines, and leaves out.
    fn find_break(command: &clap::Command) -> Option<String> {
        let own = [command.get_about(), command.get_long_about(), command.get_after_help()];
        let flags = command.get_arguments().flat_map(|flag| [flag.get_help(), flag.get_long_help()]);
        let mut texts = own.into_iter().chain(flags).flatten().map(ToString::to_string);
        texts.find(|text| text.contains("{n}")).or_else(|| command.get_subcommands().find_map(find_break))
    }

    #[test]
    fn no_help_has_a_hole_where_something_in_braces_stood() {
        assert_eq!(find_break(&Line::<Verb>::command()), None);
    }
}
