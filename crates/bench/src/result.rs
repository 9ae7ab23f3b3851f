// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Results of a run: one [`Measurement`] per line of JSON.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::job::{Cpu, Mode, Test, Wait};
use crate::line::Placement;

/// Result of one measurement: the median of several samples, and what they have in common.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Test that was run.
    pub test: Test,
    /// Transport that was measured.
    pub transport: String,
    /// Mode of the transport.
    pub mode: Mode,
    /// Bytes of a message.
    pub size: usize,
    /// Connections at once.
    pub channels: usize,
    /// Unit of the numbers.
    pub unit: String,
    /// Median of the samples.
    pub median: f64,
    /// Smallest sample.
    pub min: f64,
    /// Largest sample.
    pub max: f64,
    /// Median over the samples of their medians of single round trips, or under load of single messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50: Option<f64>,
    /// The same of their 90th percentiles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p90: Option<f64>,
    /// The same of their 99th percentiles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99: Option<f64>,
    /// The same of their 99.9th percentiles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p999: Option<f64>,
    /// Samples that count.
    pub runs: usize,
    /// Placement of the two CPUs.
    pub placement: Placement,
    /// Waiting method of the endpoints; absent where the transport chose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait: Option<Wait>,
    /// Nanoseconds that either endpoint was busy before each request and answer; not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub think_ns: Option<u32>,
    /// Messages per second that were due, in the test under load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<u32>,
    /// Whether each endpoint shared its CPU with a thread that only computes; absent if not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub neighbour: Option<bool>,
    /// CPUs that the endpoints ran on.
    pub cpu: Cpu,
    /// Variant of the transport that was best, which this is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
    /// Bytes of a ring.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ring: Option<usize>,
    /// Voluntary context switches of both endpoints: per GiB in the test of switches, per message in that under load,
    /// per round trip in that of latency. In the latter a value of about 2 means that the endpoints really slept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub voluntary: Option<f64>,
    /// Involuntary context switches, in the same way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub involuntary: Option<f64>,
    /// System calls, in the same way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub syscalls: Option<f64>,
    /// Notifications to a sleeping peer, in the same way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub notifications: Option<f64>,
    /// Share of the channel that got least, as part of an equal share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_min: Option<f64>,
    /// Share of the channel that got most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_max: Option<f64>,
}

/// A measurement that was skipped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skip {
    /// Test that was to be run.
    pub test: Test,
    /// Transport that was to be measured.
    pub transport: String,
    /// Bytes of a message; `None` if the transport as a whole was skipped.
    pub size: Option<usize>,
    /// Reason for the skip.
    pub reason: String,
    /// Whether that is a failure and not only something that this machine cannot do.
    pub failed: bool,
}

impl fmt::Display for Skip {
    /// Formats one line: `SKIP latency tcp-veth 64: no namespaces to be had`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.failed { "FAIL" } else { "SKIP" };
        write!(f, "{word} {} {}", self.test.name(), self.transport)?;
        if let Some(size) = self.size {
            write!(f, " {}", crate::size::show(size))?;
        }
        write!(f, ": {}", self.reason)
    }
}

impl Test {
    /// Returns the unit of the test's numbers.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Throughput | Self::Channels => "bytes/s",
            Self::Rate => "messages/s",
            Self::Latency | Self::Load => "ns",
            Self::Switches => "switches/GiB",
            Self::Setup => "connections/s",
            Self::Cpu => "cpu-s/GiB",
            Self::Memory => "bytes",
        }
    }

    /// Returns whether more is better.
    pub fn more_is_better(self) -> bool {
        matches!(self, Self::Throughput | Self::Channels | Self::Rate | Self::Setup)
    }
}

impl Measurement {
    /// Returns whether the endpoints had to sleep, and often did not because the answer came before they could.
    pub fn dozed(&self) -> bool {
        self.wait == Some(Wait::Sleep) && self.voluntary.is_some_and(|switches| switches < 1.5)
    }

    /// Returns whether `other` measured the same, on the same transport.
    pub fn same_question(&self, other: &Self) -> bool {
        let question = |m: &Self| (m.test, m.mode, m.size, m.channels, m.ring, m.rate, m.wait, m.think_ns, m.cpu);
        question(self) == question(other) && (&self.transport, self.neighbour) == (&other.transport, other.neighbour)
    }

    /// Returns how many times better this is than `other`, a measurement of the same test.
    pub fn times_better_than(&self, other: &Self) -> f64 {
        if self.test.more_is_better() { self.median / other.median } else { other.median / self.median }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn sample() -> Measurement {
        Measurement {
            test: Test::Latency,
            transport: "unix-stream".into(),
            mode: Mode::Stream,
            size: 64,
            channels: 1,
            unit: Test::Latency.unit().into(),
            median: 2800.5,
            min: 2700.0,
            max: 3000.0,
            p50: Some(2790.0),
            p90: None,
            p99: Some(4000.0),
            p999: Some(9000.0),
            runs: 5,
            placement: Placement::Near,
            wait: Some(Wait::Spin),
            think_ns: None,
            rate: None,
            neighbour: None,
            cpu: Cpu::Cross,
            variant: None,
            ring: None,
            voluntary: None,
            involuntary: None,
            syscalls: None,
            notifications: None,
            share_min: None,
            share_max: None,
        }
    }

    #[test]
    fn measurement_as_json_has_the_agreed_names_in_the_agreed_order() {
        let json = serde_json::to_string(&sample()).unwrap();
        assert_eq!(
            json,
            r#"{"test":"latency","transport":"unix-stream","mode":"stream","size":64,"channels":1,"unit":"ns","median":2800.5,"min":2700.0,"max":3000.0,"p50":2790.0,"p99":4000.0,"p999":9000.0,"runs":5,"placement":"near","wait":"spin","cpu":"cross"}"#
        );
        assert_eq!(serde_json::from_str::<Measurement>(&json).unwrap(), sample());
    }

    #[test]
    fn times_better_turns_around_where_less_is_better() {
        let slow = Measurement { median: 28005.0, ..sample() };
        assert_eq!(sample().times_better_than(&slow), 10.0);
        let (a, b) = (
            Measurement { test: Test::Rate, median: 4.0, ..sample() },
            Measurement { test: Test::Rate, median: 2.0, ..sample() },
        );
        assert_eq!(a.times_better_than(&b), 2.0);
    }
}
