// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The benchmark as a program of its own: `cargo run --release --example bench -- --test latency`.

use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
struct Options {
    #[command(flatten)]
    bench: tombolo_bench::BenchArgs,
}

fn main() -> ExitCode {
    // The tests' canaries. Workers are this program too, so they come first.
    tombolo_bench::transport::RawCopy::CANARIES.into_iter().for_each(tombolo_bench::transport::add);
    tombolo_bench::role_main().unwrap_or_else(|| tombolo_bench::main(&Options::parse().bench))
}
