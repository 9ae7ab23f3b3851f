// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bare cache line as a transport: nothing that crosses between two cores can be quicker.

use std::time::{Duration, Instant};

use super::{Card, Context, Namespaces, Transport};
use crate::error::{Error, Result};
use crate::job::{Mode, Report, Role, Test, Wait};
use crate::stopwatch::Stopwatch;

pub(super) struct RawLine;

impl Transport for RawLine {
    fn card(&self) -> Card {
        Card {
            name: "line",
            mode: Mode::Message,
            variants: &[""],
            namespaces: Namespaces::Shared,
            tests: &[Test::Latency],
            waits: &[Wait::Spin],
            size: Some(8),
            rings: false,
        }
    }

    fn perform(&self, context: &mut Context) -> Result<Report> {
        let line =
            context.line.as_mut().ok_or_else(|| Error::Unsupported("two machines share no cache line".into()))?;
        match context.role {
            Role::Right => line.answer().map(|()| Report::default()),
            Role::Left => {
                let time = Duration::from_secs_f64(context.job.seconds);
                let watch = Stopwatch::run(Instant::now(), time, || line.ask())?;
                line.stop()?;
                Ok(watch.report(0.0))
            }
        }
    }
}
