// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures Tombolo beside the kernel's transports, in one run.

use std::io::{self, IsTerminal, Write};

use tombolo_bench::{BenchArgs, Event, Measurement, Plan, job::Mode, job::Test, job::Wait, run as measure, table};

use crate::failure::{Failure, Result, print_line};
use crate::output::print;

const KI: usize = 1 << 10;

/// Transports that are compared.
const TRANSPORTS: [&str; 3] = ["tombolo", "tcp", "unix-stream"];
/// Tests, and the message sizes that show what each test is about.
const TESTS: [(Test, &[usize]); 2] =
    [(Test::Throughput, &[64, KI, 16 * KI, 64 * KI, KI * KI]), (Test::Latency, &[1, 64, KI, 16 * KI, 64 * KI])];
/// Seconds of a sample, and number of samples of each kind.
const EFFORT: (f64, u16) = (0.12, 3);
const QUICK: (f64, u16) = (0.02, 1);

/// Measures and prints.
pub fn run(json: bool, quick: bool) -> Result<()> {
    print_line(&format!("measuring {} side by side", TRANSPORTS.join(", ")));
    let mut results = Vec::new();
    let mut failed = 0;
    for (test, sizes) in TESTS {
        let (seconds, runs) = if quick { QUICK } else { EFFORT };
        let sizes = if quick { &sizes[1..3] } else { sizes };
        let args = BenchArgs {
            tests: vec![test.name()],
            transports: TRANSPORTS.map(String::from).into(),
            sizes: sizes.into(),
            seconds,
            runs,
            ..BenchArgs::default()
        };
        let mut plan = Plan::try_from(&args)?;
        // Only streams are compared with each other.
        plan.transports.retain(|transport| transport.card().mode == Mode::Stream);
        let terminal = io::stderr().is_terminal();
        let mut written = Ok(());
        let outcome = measure(&plan, |event| match event {
            Event::Progress { done, total } if terminal => {
                let text =
                    if done < total { format!("{}: {done} of {total} samples", test.name()) } else { String::new() };
                let _ = write!(io::stderr(), "\r{text}\x1b[K");
            }
            Event::Measured(measurement) if json && written.is_ok() => written = print_json(measurement),
            Event::Skipped(skip) => {
                failed += usize::from(skip.failed);
                let word = if skip.failed { "FAIL" } else { "SKIP" };
                let clear = if terminal { "\r\x1b[K" } else { "" };
                print_line(&format!("{clear}{word} {} {}: {}", skip.test.name(), skip.transport, skip.reason));
            }
            _ => {}
        })?;
        written?;
        results.extend(outcome.measurements);
    }
    if !json {
        print(table::render(&results, None).trim_end())?;
        print(&summary(&results))?;
    }
    match failed {
        0 => Ok(()),
        n => Err(Failure::Outcome(format!("{n} measurements failed"))),
    }
}

fn print_json(measurement: &Measurement) -> Result<()> {
    print(&serde_json::to_string(measurement).unwrap_or_default())
}

/// Returns how many times better Tombolo is than the others, as a range from least to most.
fn summary(results: &[Measurement]) -> String {
    const WHAT: [(Test, Option<Wait>, &str); 3] = [
        (Test::Throughput, None, "throughput"),
        (Test::Latency, Some(Wait::Spin), "round trip spinning"),
        (Test::Latency, Some(Wait::Sleep), "round trip sleeping"),
    ];
    let mut lines = String::new();
    for rival in &TRANSPORTS[1..] {
        let parts = WHAT.iter().filter_map(|&(test, wait, what)| {
            let of = |name| move |m: &&Measurement| (m.test, m.wait, m.transport.as_str()) == (test, wait, name);
            let theirs = |size| results.iter().filter(of(rival)).find(|m| m.size == size);
            let ours = results.iter().filter(of(TRANSPORTS[0]));
            let ratios = ours.filter_map(|m| Some(m.times_better_than(theirs(m.size)?)));
            let (least, most) = ratios.fold((f64::INFINITY, 0f64), |(least, most), r| (least.min(r), most.max(r)));
            (most > 0.0).then(|| format!("{what} {least:.1} to {most:.1}"))
        });
        let parts: Vec<_> = parts.collect();
        if !parts.is_empty() {
            lines += &format!("\ntimes better than {rival}: {}", parts.join(", "));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn m(test: &str, transport: &str, size: usize, median: f64) -> Measurement {
        let wait = if test == "latency" { r#","wait":"spin""# } else { "" };
        serde_json::from_str(&format!(
            r#"{{"test":"{test}","transport":"{transport}","mode":"stream","size":{size},"channels":1,"unit":"","median":{median},"min":1,"max":2,"runs":5,"placement":"near","cpu":"cross"{wait}}}"#
        ))
        .unwrap()
    }

    #[test]
    fn summary_says_the_least_and_the_most() {
        let results = [
            m("throughput", "tombolo", 64, 30.0),
            m("throughput", "tcp", 64, 10.0),
            m("throughput", "tombolo", 1024, 200.0),
            m("throughput", "tcp", 1024, 10.0),
            m("latency", "tombolo", 64, 5.0),
            m("latency", "tcp", 64, 10.0),
        ];
        let text = "\ntimes better than tcp: throughput 3.0 to 20.0, round trip spinning 2.0 to 2.0";
        assert_eq!(summary(&results), text);
        assert_eq!(summary(&results[1..2]), "");
    }
}
