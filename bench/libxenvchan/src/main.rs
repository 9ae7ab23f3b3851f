// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `bench-libxenvchan`: the benchmark of Tombolo between two machines, with Xen's own libxenvchan and
//! libtombolo-vchan beside it in the same run.
//! It measures no other way between processes: libxenvchan joins domains.
#![deny(unsafe_code)]

mod vchan;

use std::process::ExitCode;

use clap::Parser;
use tombolo_bench::{BenchArgs, transport};

/// Measures Tombolo beside libxenvchan and TCP, between two domains of one Xen host.
#[derive(Parser)]
#[command(version)]
struct Options {
    #[command(flatten)]
    bench: BenchArgs,
}

fn main() -> ExitCode {
    for library in [vchan::Library::Original, vchan::Library::Ours, vchan::Library::Wire] {
        transport::add(library);
    }
    tombolo_bench::role_main().unwrap_or_else(|| tombolo_bench::main(&Options::parse().bench))
}
