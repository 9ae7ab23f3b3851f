// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The suite from which a report is made: steps of measurements, each a plan of its own.

use crate::args::Plan;
use crate::job::{Cpu, Rings, Test, Wait};

const KI: usize = 1 << 10;
const MI: usize = 1 << 20;
/// Nanoseconds busy before each message where the endpoints must sleep: longer than any of them waits awake.
const THINK_NS: u32 = 30_000;
/// Bytes of a ring for many connections.
const SMALL_RING: usize = 4 * KI;

/// Returns the steps. The transports, time, runs, ring and priority of `base` hold for all of them.
pub fn steps(base: &Plan, quick: bool) -> Vec<Plan> {
    let pick = |full: &[usize], few: &[usize]| if quick { few.to_vec() } else { full.to_vec() };
    let step = |test: Test, full: &[usize], few: &[usize]| Plan {
        tests: vec![test],
        sizes: pick(full, few),
        cpus: vec![Cpu::Cross],
        neighbour: false,
        think_ns: 0,
        volume: if quick { 32 * MI as u64 } else { 1 << 30 },
        ..base.clone()
    };
    let sizes = [8, 64, 256, KI, 4 * KI, 16 * KI, 64 * KI, 256 * KI, MI, 4 * MI];
    let trips = [1, 64, 256, KI, 4 * KI, 16 * KI, 64 * KI];
    let sleeping = |plan: Plan| Plan { waits: vec![Wait::Sleep], think_ns: THINK_NS, ..plan };
    let spinning = |plan: Plan| Plan { waits: vec![Wait::Spin], ..plan };
    let ringed: Vec<_> = base.transports.iter().filter(|t| t.card().rings).cloned().collect();
    let mut steps = vec![
        step(Test::Throughput, &sizes, &[8, 64, KI, 16 * KI, 256 * KI, 4 * MI]),
        step(Test::Rate, &sizes[..4], &[64, KI]),
        spinning(step(Test::Latency, &trips, &[1, 64, KI, 16 * KI])),
        sleeping(step(Test::Latency, &trips, &[64, KI, 16 * KI])),
        sleeping(Plan { cpus: vec![Cpu::Same], ..step(Test::Latency, &[64], &[64]) }),
        Plan { rates: vec![10_000, 100_000], ..step(Test::Load, &[64], &[64]) },
        step(Test::Cpu, &[32 * KI], &[32 * KI]),
        step(Test::Switches, &[32 * KI], &[32 * KI]),
        Plan { channels: pick(&[1, 2, 4, 8, 16, 32, 64], &[1, 4, 16]), ..step(Test::Channels, &[16 * KI], &[16 * KI]) },
        step(Test::Setup, &[], &[]),
    ];
    // Real-time priority would keep the competing thread from running.
    if !base.fifo {
        let waits = vec![Wait::Sleep];
        steps.push(Plan { neighbour: true, waits, ..step(Test::Latency, &[64], &[64]) });
    }
    if !ringed.is_empty() {
        let tests = vec![Test::Setup, Test::Memory];
        steps.push(Plan {
            transports: ringed,
            ring: SMALL_RING,
            rings: Rings::Fixed,
            tests,
            ..step(Test::Setup, &[], &[])
        });
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn steps_quick_and_full_hold_every_test() {
        let base = Plan::try_from(&crate::BenchArgs::default()).unwrap();
        for quick in [false, true] {
            let steps = steps(&base, quick);
            for test in Test::value_variants() {
                assert!(steps.iter().any(|step| step.tests.contains(test)), "{test:?}, quick {quick}");
            }
            assert!(steps.iter().all(|step| step.runs == base.runs && step.pinned == base.pinned));
        }
    }
}
