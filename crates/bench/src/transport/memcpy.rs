// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures how fast one core copies on the working set of a ring: the ceiling of every transport that copies.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::{Card, Context, Namespaces, Transport};
use crate::error::Result;
use crate::job::{Mode, Report, Role, Test, Wait};

pub(super) struct Memcpy;

impl Transport for Memcpy {
    fn card(&self) -> Card {
        Card {
            name: "memcpy",
            mode: Mode::Message,
            variants: &[""],
            namespaces: Namespaces::Shared,
            tests: &[Test::Throughput, Test::Rate],
            waits: &[Wait::Spin, Wait::Sleep],
            size: None,
            rings: true,
        }
    }

    fn perform(&self, context: &mut Context) -> Result<Report> {
        let job = &context.job;
        Ok(match context.role {
            Role::Left => Report::default(),
            Role::Right => copy(job.size, job.ring, Duration::from_secs_f64(job.seconds)),
        })
    }
}

/// Copies pieces of `size` bytes from one buffer of `ring` bytes to another, again and again, for `time`. Returns how
/// many bytes and messages it copied in how many seconds.
pub fn copy(size: usize, ring: usize, time: Duration) -> Report {
    let ring = ring.max(size) / size * size;
    let (from, mut to) = (vec![1u8; ring], vec![2u8; ring]);
    let mut report = Report::default();
    let start = Instant::now();
    while report.seconds < time.as_secs_f64() {
        for (from, to) in from.chunks_exact(size).zip(to.chunks_exact_mut(size)) {
            black_box(to).copy_from_slice(black_box(from));
        }
        report.bytes += ring as u64;
        report.messages += (ring / size) as u64;
        report.seconds = start.elapsed().as_secs_f64();
    }
    report
}
