// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. The cases that need two domains of a Xen host, and the same pair for interactive use. This binary is the
//! host's program and process 1 of dom0 and of the domUs at once.
//!
//! `xen [NAME...]` runs the cases whose names contain one of the words, `xen --list` lists them all. It prints what
//! libtest would.
//!
//! `xen demo FOLDER [--pvh] [PART...]` moves a file, compares with TCP and libxenvchan, and leaves results, a text and
//! charts in the folder. Its parts are `file`, `speed`, `setup`, `cpu` and `volume`.
//!
//! `xen vchan FOLDER` compares libtombolo-vchan with the original in the same way.
//!
//! `xen up [--pvh]` boots the pair and keeps it; then `xen run A COMMAND…`, `xen push A FILE [PATH]`, `xen log A`,
//! `xen renew A` and `xen down`, where `A`, `B` and `dom0` are the domains.

#![forbid(unsafe_code)]

mod bench;
mod cases;
mod compare;
mod demo;
mod flow;
mod lives;
mod many;
mod rig;
mod unmodified;

use std::path::Path;
use std::process::ExitCode;
use tombolo_e2e::error::Result;
use tombolo_e2e::runner;
use tombolo_e2e::stream;
use tombolo_e2e::up;
use tombolo_e2e::wire::End;
use tombolo_e2e::xen::host::Kind;
use tombolo_e2e::xen::{self, init};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = if std::process::id() == 1 { init::serve().map(|()| End::Code(0)) } else { run(&args, &words) };
    match done {
        Ok(End::Code(code)) => ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)),
        Ok(end) => {
            eprintln!("{end:?}");
            ExitCode::FAILURE
        }
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String], words: &[&str]) -> Result<End> {
    match words {
        ["flush"] => Ok(()),
        ["plug", place, domid] => init::plug(place, domid),
        ["flow", address, note] => flow::send(address, note),
        ["sip", address, note] => flow::receive_flow(address, note),
        ["reap", role, address, count] => flow::reap(role, address, count),
        ["outlive", role, address, count] => flow::outlive(role, address, count),
        ["lives", address] => lives::print_liveness(address),
        ["open", address, count] => many::open(address, count),
        ["keep", address, word] => cases::shown::hold_channel(address, word),
        ["hold", address, count] => many::hold(address, count),
        ["stream-send", ..] => stream::send(&args[1..]),
        ["stream-receive"] => stream::receive(),
        ["up"] => xen::up::up(Kind::Pv),
        ["up", "--pvh"] => xen::up::up(Kind::Pvh),
        ["run" | "push" | "log" | "renew" | "down", ..] => return up::ask::<xen::up::RunningPair>(words),
        ["demo", to, "--pvh", parts @ ..] => demo::run(Path::new(to), Kind::Pvh, parts),
        ["demo", to, parts @ ..] => demo::run(Path::new(to), Kind::Pv, parts),
        ["vchan", to] => compare::run(Path::new(to)),
        ["--list"] => {
            cases::all().for_each(|case| println!("{}", case.name));
            Ok(())
        }
        words => runner::run(cases::all(), words),
    }
    .map(|()| End::Code(0))
}
