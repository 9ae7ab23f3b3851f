// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: os, mem, tombolo.
//!
//! Measures ways of moving bytes between two processes, side by side in one run.
//!
//! A *driver* (the program that calls [`run()`]) starts a pair of *workers*: itself once more, with a hidden argument
//! that [`role_main`] recognises. The left worker sends and makes requests, the right one receives and answers, each
//! tied to a CPU. The driver takes samples of all measurements in turns, so that a drift of the machine affects all of
//! them alike. Each sample lies between two probes of how far apart the two CPUs are (see [`Placement`]): a host moves
//! its guests' CPUs, and a round trip between distant ones takes five times as long. The median of the samples is
//! reported.
//!
//! The two workers may live on two machines instead: `--serve` on the right, `--peer` on the left.
//!
//! The data is copied from a private buffer and to a private buffer, stamped and checked. Nothing waits for ever: a
//! sample that takes too long fails, and its workers are ended. The workers end with the driver, however it ends.
//!
//! To add a transport, implement [`transport::Wire`] and name it in [`transport::all`]. A program of its own passes it
//! to [`transport::add`] instead.
#![forbid(unsafe_code)]

pub mod error;
pub mod job;
pub mod line;
pub mod link;
pub mod report;
pub mod size;
pub mod stats;
pub mod table;
pub mod transport;
pub mod usage;

mod apart;
mod args;
mod console;
mod front;
mod load;
mod loops;
mod meter;
mod pair;
mod result;
mod run;
mod scratch;
mod stopwatch;
mod wire;
mod worker;

pub use apart::Peer;
pub use args::{BenchArgs, Plan};
pub use error::{Error, Result};
pub use front::main;
pub use line::Placement;
pub use result::{Measurement, Skip};
pub use run::{Event, Outcome, run};
pub use worker::role_main;
