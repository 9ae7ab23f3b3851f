// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the driver tells its workers to measure, and what they report.

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

/// How large Tombolo's rings are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rings {
    /// As it is by default: 1 MiB, and more where a busy channel finds that no slower.
    #[default]
    Default,
    /// As asked for.
    Fixed,
    /// Those of streams follow their load, up to what was asked for.
    Growing,
}

/// The two workers of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Connects, sends, asks.
    Left,
    /// Listens, receives, answers.
    Right,
}

/// One sample to be taken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// What is measured.
    pub test: Test,
    /// The transport's name.
    pub transport: String,
    /// The transport's mode.
    pub mode: Mode,
    /// One of the transport's variants.
    pub variant: String,
    /// Bytes of a message.
    pub size: usize,
    /// Connections at once.
    pub channels: usize,
    /// Bytes of a ring, for transports that have one.
    pub ring: usize,
    /// Whether Tombolo's keep that.
    pub rings: Rings,
    /// How long the sample takes.
    pub seconds: f64,
    /// Messages a second, in the test under load.
    pub rate: u32,
    /// How many bytes cross, for tests that move a volume.
    pub volume: u64,
    /// How the ends wait; `None` leaves it to the transport (the kernel's block).
    pub wait: Option<Wait>,
    /// Nanoseconds that either end is busy before it asks or answers, so that the other has surely gone to sleep; not
    /// counted in a round trip.
    pub think_ns: u32,
    /// Whether each end shares its CPU with a thread that only computes.
    pub neighbour: bool,
    /// Where the ends run.
    pub cpu: Cpu,
    /// The two CPUs.
    pub cpus: [usize; 2],
}

/// What the driver tells a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Say hello.
    Hello,
    /// Run this command line in the worker's namespaces.
    Run(Vec<String>),
    /// Take a sample.
    Sample {
        job: Job,
        /// The address under which the right worker is reached.
        host: String,
    },
}

/// What a worker tells the driver.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Reply {
    Done,
    Sampled(Box<Report>),
    Unsupported(String),
    Failed(String),
}

/// What one worker saw of a sample. What it did not see is 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Bytes within the measured window.
    pub bytes: u64,
    /// Messages, or connections, within the measured window; all round trips.
    pub messages: u64,
    /// The measured window.
    pub seconds: f64,
    /// All bytes that crossed, in the window and outside.
    pub total: u64,
    /// Round trips, or delays, if that was the question.
    pub times: Option<Times>,
    /// What this process used.
    pub usage: Usage,
    /// System calls, if the transport can say.
    pub syscalls: Option<u64>,
    /// Notifications to a sleeping peer, if the transport can say.
    pub notifications: Option<u64>,
    /// Bytes by channel.
    pub shares: Vec<u64>,
    /// Bytes of memory that the channels took.
    pub memory: u64,
    /// The placement probes before and after, in ns; only the left worker knows.
    pub probes: Option<[f64; 2]>,
}

/// Times of one sample, in nanoseconds: round trips, or under load the delays of messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// Median over blocks of round trips, no clock read inside; of delays, the same as the next.
    pub median: f64,
    /// Of single ones: half are quicker.
    pub p50: f64,
    /// Of single ones: 90 % are quicker.
    pub p90: f64,
    /// Of single ones: 99 % are quicker.
    pub p99: f64,
    /// Of single ones: 99.9 % are quicker.
    pub p999: f64,
}

impl Report {
    /// Where the CPUs were.
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

    /// A job for tests to change.
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
