// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Orders of the driver to its workers, and their reports.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::line::Placement;
use crate::usage::Usage;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Test {
    /// Bytes per second in one direction; the receiver of a stream takes what is there.
    Throughput,
    /// Messages per second in one direction; the receiver takes them one by one.
    Rate,
    /// Nanoseconds of a round trip.
    Latency,
    /// Nanoseconds from when a message was due to be sent, at a fixed rate, until it is there.
    Load,
    /// Context switches of both processes while a volume crosses.
    Switches,
    /// Connections per second: connect, a byte there and back, close.
    Setup,
    /// Bytes per second through many channels at once on two CPUs.
    Channels,
    /// CPU seconds of both processes per GiB.
    Cpu,
    /// Bytes of memory of both processes per channel.
    Memory,
}

/// Whether messages are kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Bytes with no borders.
    Stream,
    /// Whole messages.
    Message,
}

/// How an end waits for the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Wait {
    /// It asks again and again; the kernel's transports with O_NONBLOCK.
    Spin,
    /// It blocks at once.
    Sleep,
}

/// Where the two ends run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Cpu {
    /// On two CPUs.
    Cross,
    /// On one.
    Same,
}

/// Sizing of Tombolo's rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rings {
    /// The default: 1 MiB, and more where a busy channel finds that no slower.
    #[default]
    Default,
    /// The size that was asked for.
    Fixed,
    /// Rings of streams follow their load, up to the size that was asked for.
    Growing,
}

/// The two workers of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Connects, sends, makes requests.
    Left,
    /// Listens, receives, answers.
    Right,
}

/// One sample to be taken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Test to run.
    pub test: Test,
    /// Name of the transport.
    pub transport: String,
    /// Mode of the transport.
    pub mode: Mode,
    /// One of the transport's variants.
    pub variant: String,
    /// Bytes of a message.
    pub size: usize,
    /// Connections at once.
    pub channels: usize,
    /// Bytes of a ring, for transports that have one.
    pub ring: usize,
    /// Sizing of Tombolo's rings.
    pub rings: Rings,
    /// Duration of the sample in seconds.
    pub seconds: f64,
    /// Messages per second, in the test under load.
    pub rate: u32,
    /// Number of bytes that cross, for tests that move a volume.
    pub volume: u64,
    /// Waiting method of the endpoints; `None` leaves that to the transport (the kernel's transports block).
    pub wait: Option<Wait>,
    /// Nanoseconds that either endpoint is busy before it asks or answers, so that the other has surely gone to sleep.
    /// They do not count in a round trip.
    pub think_ns: u32,
    /// Whether each endpoint shares its CPU with a thread that only computes.
    pub neighbour: bool,
    /// CPUs that the endpoints run on.
    pub cpu: Cpu,
    /// Numbers of the two CPUs.
    pub cpus: [usize; 2],
}

/// Order of the driver to a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Answer, to show that the worker runs.
    Hello,
    /// Run this command line in the worker's namespaces.
    Run(Vec<String>),
    /// Take a sample.
    Sample {
        job: Job,
        /// Address under which the right worker is reached.
        host: String,
    },
}

/// Reply of a worker to the driver.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Reply {
    Done,
    Sampled(Box<Report>),
    Unsupported(String),
    Failed(String),
}

/// Observations of one worker in a sample. A value that it did not observe is 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Bytes within the measured window.
    pub bytes: u64,
    /// Messages, or connections, within the measured window; all round trips.
    pub messages: u64,
    /// Length of the measured window in seconds.
    pub seconds: f64,
    /// All bytes that crossed, in the window and outside.
    pub total: u64,
    /// Times of round trips, or delays, if the test measures them.
    pub times: Option<Times>,
    /// CPU time and context switches of this process.
    pub usage: Usage,
    /// System calls, if the transport counts them.
    pub syscalls: Option<u64>,
    /// Notifications to a sleeping peer, if the transport counts them.
    pub notifications: Option<u64>,
    /// Bytes by channel.
    pub shares: Vec<u64>,
    /// Bytes of memory that the channels took.
    pub memory: u64,
    /// Placement probes before and after, in ns; only the left worker has them.
    pub probes: Option<[f64; 2]>,
}

/// Times of one sample, in nanoseconds: round trips, or under load the delays of messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// Median over blocks of round trips, with no clock read inside; of delays, the same as `p50`.
    pub median: f64,
    /// Median of single times: half are quicker.
    pub p50: f64,
    /// Percentile of single times: 90 % are quicker.
    pub p90: f64,
    /// Percentile of single times: 99 % are quicker.
    pub p99: f64,
    /// Percentile of single times: 99.9 % are quicker.
    pub p999: f64,
}

impl Report {
    /// Returns the placement of the CPUs.
    pub fn placement(&self, cpu: Cpu) -> Placement {
        match (cpu, self.probes) {
            (Cpu::Same, _) => Placement::Same,
            (Cpu::Cross, Some([before, after])) => Placement::of(before, after),
            (Cpu::Cross, None) => Placement::Unknown,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a job for tests to change.
    pub(crate) fn job() -> Job {
        Job {
            test: Test::Throughput,
            transport: "tcp".into(),
            mode: Mode::Stream,
            variant: String::new(),
            size: 64,
            channels: 1,
            ring: 4096,
            rings: Rings::Fixed,
            seconds: 1.0,
            rate: 1,
            volume: 1,
            wait: None,
            think_ns: 0,
            neighbour: false,
            cpu: Cpu::Cross,
            cpus: [0, 1],
        }
    }
}
