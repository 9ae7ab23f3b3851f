// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: os, channel, tombolo.
//!
//! The cases that need virtual machines. Their host halves run here, and their guest halves in the machines, which
//! contain a copy of this binary. It prints what libtest would.
//!
//! `vm [NAME...]` runs the cases whose names contain one of the words, `vm --module` those of the kernel module alone,
//! and `vm --list` lists them all. `vm --demo [PART...]` shows two machines at work, `vm --sockets-demo [ROUNDS]`
//! unmodified programs in them. `vm --host-sockets-demo ROUNDS` shows unmodified programs of a machine and of its host.
//! `vm --net-demo ROUNDS [PART...]` compares the interface of the module's engine with virtio-net.
//!
//! `vm up` boots two machines with a link and keeps them; then `vm run a COMMAND…`, `vm push a FILE [PATH]`, `vm log a`
//! and `vm down`, where `a` and `b` are the machines.

#![forbid(unsafe_code)]

mod cases;
mod demo;
mod parts;
mod rig;
mod site;
mod typed;

use parts::Parts;
use std::process::ExitCode;
use tombolo_e2e::agent;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::runner;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = if std::process::id() == 1 { agent::serve() } else { run(&words, &args) };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str], args: &[String]) -> Result<()> {
    match words {
        ["flush"] => Ok(()),
        ["insmod", files @ ..] if !files.is_empty() => files.iter().try_for_each(|file| agent::load_module(file)),
        ["rmmod", name] => agent::unload_module(name),
        ["guest", half, ..] => cases::guest_half(half, &args[2..]),
        ["--list"] => {
            cases::all().for_each(|case| println!("{}", case.name));
            Ok(())
        }
        ["--module", words @ ..] => runner::run(cases::of_module(), words),
        ["up"] => typed::up(),
        ["run" | "push" | "log" | "down", ..] => typed::ask(words),
        ["--demo", parts @ ..] => {
            demo::run(&Parts::get()?, demo::FULL, if parts.is_empty() { &demo::PARTS } else { parts })
        }
        ["--sockets-demo"] => demo::sockets::run(&Parts::get()?, demo::sockets::ROUNDS),
        ["--host-sockets-demo", rounds] => {
            demo::sockets::run_with_host(&Parts::get()?, rounds.parse().context("ROUNDS")?)
        }
        ["--sockets-demo", rounds] => demo::sockets::run(&Parts::get()?, rounds.parse().context("ROUNDS")?),
        ["--net-demo", rounds, parts @ ..] => {
            let parts = if parts.is_empty() { &demo::net::PARTS } else { parts };
            demo::net::run(&Parts::get()?, rounds.parse().context("ROUNDS")?, parts)
        }
        words => runner::run(cases::all(), words),
    }
}
