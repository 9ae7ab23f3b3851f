// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench --report DIR`: runs the suite, and writes its results for people: lines of JSON, a text, charts, a
//! page.
//!
//! A report is made from the lines alone, so it can be made again from recorded lines, or from those of several runs.

mod axis;
mod figures;
mod page;
mod record;
mod suite;
mod svg;

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use crate::args::{BenchArgs, Plan};
use crate::console::{Console, exit_code};
use crate::error::{Error, Result};
use crate::run::{Event, run};
use crate::table;

pub use record::{About, Record, Records};

/// Name of the file with the lines of JSON in the directory of a report.
const LINES: &str = "results.jsonl";

/// Makes the report that the options ask for, in `dir`. Returns the exit code.
pub(crate) fn main(args: &BenchArgs, dir: &Path) -> Result<u8> {
    let (records, code) = if args.from.is_empty() {
        let measured = measure(args, dir)?;
        let code = exit_code(measured.measurements.is_empty(), &measured.skips);
        if measured.measurements.is_empty() {
            // Without results there is no report, and the next one may use the same directory.
            let _ = fs::remove_file(dir.join(LINES));
            let _ = fs::remove_dir(dir);
            return Ok(code);
        }
        (measured, code)
    } else {
        (gather(args)?, 0)
    };
    if !args.from.is_empty() {
        make_dir(dir)?;
        write(&dir.join(LINES), &records.lines()?)?;
    }
    render(&records, dir)?;
    // Standard output may be closed.
    let _ = writeln!(io::stdout(), "{}", dir.join("index.html").display());
    Ok(code)
}

/// Runs the suite. Each result is written to the file as soon as it is there, so that an interruption costs only what
/// is left.
fn measure(args: &BenchArgs, dir: &Path) -> Result<Records> {
    let base = Plan::try_from(args)?;
    make_dir(dir)?;
    let path = dir.join(LINES);
    let mut file = OpenOptions::new().write(true).create_new(true).open(&path).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => Error::Usage(format!(
            "{0} is there already; choose another directory, or render it: --from {0}",
            path.display()
        )),
        _ => Error::Usage(format!("cannot write {}: {e}", path.display())),
    })?;
    let mut records = Records::default();
    let mut written = add(&mut records, &mut file, &path, Record::About { about: About::now(base.pinned) });
    let console = Console::new();
    let steps = suite::steps(&base, args.quick);
    for (number, step) in steps.iter().enumerate() {
        if written.is_err() {
            break;
        }
        let name = step.tests[0].name();
        let title = format!("{name} ({} of {}): ", number + 1, steps.len());
        run(step, |event| match event {
            Event::Progress { done, total } => console.progress(&title, done, total),
            Event::Measured(m) if written.is_ok() => {
                written = add(&mut records, &mut file, &path, Record::Measurement(Box::new(m.clone())));
            }
            Event::Skipped(skip) if written.is_ok() && !records.skips.contains(skip) => {
                console.skipped(skip);
                written = add(&mut records, &mut file, &path, Record::Skip { skip: skip.clone() });
            }
            _ => {}
        })?;
    }
    written.map(|()| records)
}

fn add(records: &mut Records, file: &mut File, path: &Path, record: Record) -> Result<()> {
    let line = record.line()?;
    records.add(record);
    file.write_all(line.as_bytes()).map_err(|source| Error::File { path: path.to_owned(), source })
}

/// Reads all results of the files that the options name.
fn gather(args: &BenchArgs) -> Result<Records> {
    let mut all: Option<Records> = None;
    for path in &args.from {
        let records = Records::read(path)?;
        match &mut all {
            Some(all) => all.merge(records, &short(path)),
            None => all = Some(records),
        }
    }
    Ok(all.unwrap_or_default())
}

/// Returns a file's name, with its folder's.
fn short(path: &Path) -> String {
    let names: Vec<_> = path.iter().map(|name| name.to_string_lossy()).collect();
    names[names.len().saturating_sub(2)..].join("/").replace("//", "/")
}

/// Writes all files but the lines of JSON.
fn render(records: &Records, dir: &Path) -> Result<()> {
    let figures = figures::figures(&records.measurements);
    for figure in &figures {
        write(&dir.join(format!("{}.svg", figure.name)), &svg::file(&figure.svg))?;
    }
    write(&dir.join("report.txt"), &text(records))?;
    write(&dir.join("index.html"), &page::page(records, &figures))
}

/// Returns the report for a terminal.
fn text(records: &Records) -> String {
    let mut text = String::new();
    for about in &records.about {
        for (name, value) in about.lines() {
            let _ = writeln!(text, "{name:9} {value}");
        }
        text.push('\n');
    }
    for note in &records.notes {
        let _ = writeln!(text, "{note}");
    }
    text += table::render(&records.measurements, None).trim_start();
    for skip in &records.skips {
        let _ = writeln!(text, "\n{skip}");
    }
    text
}

fn make_dir(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(|e| Error::Usage(format!("cannot make the directory {}: {e}", dir.display())))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|source| Error::File { path: path.to_owned(), source })
}

impl About {
    /// Returns the circumstances as names and values, line by line.
    pub(crate) fn lines(&self) -> [(&'static str, String); 5] {
        let gib = self.memory as f64 / (1u64 << 30) as f64;
        let machine = format!("{} CPUs of {}, {gib:.0} GiB of memory, {}", self.cpus, self.cpu, self.kernel);
        [
            ("machine", machine),
            ("ends on", format!("CPU {} and CPU {}", self.pinned[0], self.pinned[1])),
            ("date", format!("{}; load before it {:.2}", self.date, self.load)),
            ("program", self.program.clone()),
            ("command", self.command.clone()),
        ]
    }
}
