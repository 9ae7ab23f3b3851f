// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `compare`: the benchmark of Tombolo, with other ways through shared memory beside it in the same run. What each of
//! them may and may not be compared for is in the README.
#![deny(unsafe_code)]

mod iceoryx2;
mod ipmpsc;
mod rtrb;
mod shmem_ipc;
mod threads;
mod xenvchan;

use std::process::ExitCode;

use clap::Parser;
use tombolo_bench::{BenchArgs, transport};

use crate::threads::Threads;

/// What is measured if nobody asks for something else: the rivals, and what no ring can beat.
const DEFAULT: [&str; 9] =
    ["tombolo", "line", "memcpy", "rtrb", "libxenvchan-shape", "iceoryx2", "iceoryx2-untouched", "shmem-ipc", "ipmpsc"];

/// Measures Tombolo beside other shared-memory transports, in one run.
#[derive(Parser)]
#[command(version)]
struct Options {
    #[command(flatten)]
    bench: BenchArgs,
}

fn main() -> ExitCode {
    transport::add(Threads(rtrb::Rtrb));
    transport::add(Threads(xenvchan::Shape));
    transport::add(iceoryx2::Iceoryx2 { touched: true });
    transport::add(iceoryx2::Iceoryx2 { touched: false });
    transport::add(shmem_ipc::ShmemIpc);
    transport::add(ipmpsc::Ipmpsc);
    tombolo_bench::role_main().unwrap_or_else(|| {
        let mut bench = Options::parse().bench;
        if bench.transports.is_empty() && bench.from.is_empty() {
            bench.transports = DEFAULT.map(String::from).to_vec();
        }
        tombolo_bench::main(&bench)
    })
}
