// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `xen demo`: moves a file from one domU to the other, then compares with TCP over the domains' virtual interfaces and
//! with libxenvchan, as the paper of 2018 did.
//!
//! Rates, round trips and context switches are the benchmark's, whose two ends run in the two domUs. CPU time is Xen's
//! own account of its domains; `xentrace` counts hypercalls in separate runs.

use crate::bench::BENCH;
use crate::many;
use crate::rig::{Pair, Rig};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::runner;
use tombolo_e2e::xen::host::Kind;
use tombolo_e2e::xen::trace::{self, Share};

/// Seconds that a whole table may take on a loaded machine.
const TABLE: u64 = 900;
const PORT: u16 = 7000;
const TRANSPORTS: [&str; 3] = ["tombolo", "tcp", "libxenvchan"];
/// Seconds of a bulk transfer whose CPU time is measured: Xen reports that time in tenths of a second.
const BULK: f64 = 5.0;
const TABLES: [(&str, &str); 3] = [
    ("throughput", "--size 64,1KiB,4KiB,16KiB,64KiB,1MiB --seconds 0.2 --runs 3"),
    ("latency", "--size 64,1KiB,4KiB,16KiB --wait spin --seconds 0.2 --runs 3"),
    ("latency", "--size 64,1KiB,4KiB,16KiB --wait sleep --think 300 --seconds 0.2 --runs 3"),
];

/// Parts of the demonstration, in this order.
const PARTS: [&str; 5] = ["file", "speed", "setup", "cpu", "volume"];
/// Ring sizes that are compared.
const RINGS: [&str; 2] = ["64KiB", "1MiB"];
/// Number of channels that are open at once.
const MANY: usize = 1000;

/// Runs the given parts, or all of them if there are none. Lines of JSON, the text and charts are written to the folder
/// `to`.
pub fn run(to: &Path, kind: Kind, parts: &[&str]) -> Result<()> {
    let unknown = parts.iter().find(|part| !PARTS.contains(part));
    ensure!(unknown.is_none(), "no part is called {}; there are {}", unknown.unwrap_or(&""), PARTS.join(", "));
    let wanted = |part| parts.is_empty() || parts.contains(&part);
    let mut rig = Rig::for_results(to, "xen.txt", kind)?;
    let pair = rig.pair(kind)?;
    // Keeps earlier results even if a later part fails.
    let mut text = Text { all: String::new(), to: to.join("xen.txt") };
    if wanted("file") {
        text.add(&file(pair)?)?;
    }
    let mut server = Serving::start(pair)?;
    let mut lines = [String::new(), String::new()];
    if wanted("speed") {
        for (ring, lines) in RINGS.iter().zip(&mut lines) {
            for (test, options) in TABLES {
                eprintln!("{test}, rings of {ring}");
                let options = format!("--test {test} {options} --ring {ring} --transport {}", TRANSPORTS.join(","));
                *lines += &server.measure(pair, &options)?;
            }
            fs::write(to.join(format!("ring-{ring}.jsonl")), &*lines)?;
        }
    }
    if wanted("setup") {
        eprintln!("set-up");
        text.add(&format!("{}\n", many::show(pair, MANY)?))?;
    }
    if wanted("cpu") {
        text.add(&bulk(pair, &mut server)?)?;
    }
    if wanted("volume") {
        text.add(&volume(&mut rig, kind, &mut server, &mut lines[1])?)?;
    }
    let pair = rig.pair(kind)?;
    pair.host.check()?;
    text.add(&server.end(pair)?)?;
    for (ring, lines) in RINGS.iter().zip(&lines).filter(|(_, lines)| !lines.is_empty()) {
        text.add(&tables(&rig, to, ring, lines)?)?;
    }
    println!("Lines of JSON, charts and this text are in {}.", to.display());
    runner::Rig::finish(rig)
}

/// The text of the results, printed and kept in a file.
struct Text {
    all: String,
    to: PathBuf,
}

impl Text {
    fn add(&mut self, more: &str) -> Result<()> {
        print!("{more}");
        self.all += more;
        fs::write(&self.to, &self.all).context(self.to.display())
    }
}

/// Moves a file and compares its checksums.
fn file(pair: &mut Pair) -> Result<String> {
    let (a, b) = (pair.number("A"), pair.number("B"));
    pair.sh("A", "dd if=/dev/urandom of=/tmp/file bs=1M count=64 2>/dev/null")?;
    let listen = format!("tombolo cat --listen xen:{a}/file --receive-only --output /tmp/file --checksum");
    let listener = pair.start("B", &listen)?;
    let start = Instant::now();
    let connect = format!("tombolo cat --connect xen:{b}/file --wait 60 --send-only --checksum /tmp/file");
    let sent = pair.sh("A", &connect)?;
    let received = pair.done("B", listener)?;
    let took = start.elapsed().as_secs_f64();
    let sums = [pair.sh("A", "sha256sum < /tmp/file")?, pair.sh("B", "sha256sum < /tmp/file; rm /tmp/file")?];
    ensure!(sums[0] == sums[1], "the file arrived changed: {sums:?}");
    pair.sh("A", "rm /tmp/file")?;
    Ok(format!("64 MiB from domU {a} to domU {b} in {took:.1} s; A: {sent}; B: {received}\n\n"))
}

/// The serving end of the benchmark, in B.
pub struct Serving {
    job: Job,
    via: [u16; 2],
    /// Messages about skipped or failed measurements.
    said: String,
}

impl Serving {
    /// Starts the serving end.
    pub fn start(pair: &mut Pair) -> Result<Self> {
        let via = [pair.number("B"), pair.number("A")];
        let job = pair.start("B", &format!("exec {BENCH} --serve 10.9.0.2:{PORT} --via xen:{}", via[1]))?;
        let said = pair.at("B")?.line(job, within(60))?;
        ensure!(said.starts_with("serving"), "{said}");
        Ok(Self { job, via, said: String::new() })
    }

    /// Returns the standard output of the driver in A. A measurement that fails is reported at the end, with the
    /// others.
    pub fn measure(&mut self, pair: &mut Pair, options: &str) -> Result<String> {
        let driver =
            format!("{BENCH} --peer 10.9.0.2:{PORT} --via xen:{} --json {options} >/tmp/out 2>/tmp/err", self.via[0]);
        let job = pair.start("A", &driver)?;
        let ended = pair.at("A")?.wait(job, within(TABLE))?;
        let said = pair.sh("A", "cat /tmp/err")?;
        let out = pair.sh("A", "cat /tmp/out")?;
        ensure!(!out.is_empty(), "{driver}: {:?}: {said}", ended.end);
        self.said += &said;
        Ok(out + "\n")
    }

    /// Ends the serving end. Returns the messages about what failed or was skipped.
    pub fn end(self, pair: &mut Pair) -> Result<String> {
        pair.at("B")?.kill(self.job)?;
        pair.at("B")?.wait(self.job, within(60))?;
        Ok(self.said + "\n")
    }
}

/// Returns the CPU seconds that dom0, A and B have used so far.
fn cpu(pair: &mut Pair) -> Result<[f64; 3]> {
    let list = pair.sh("dom0", "xl list")?;
    let of = |name: &str| -> Result<f64> {
        let line = list.lines().find(|line| line.split(' ').next() == Some(name));
        let time = line.and_then(|line| line.split_whitespace().last());
        Ok(time.ok_or_else(|| Error::new(format!("no {name} in {list}")))?.parse()?)
    };
    Ok([of("Domain-0")?, of("A")?, of("B")?])
}

/// Measures the domains' CPU time in a bulk transfer.
fn bulk(pair: &mut Pair, server: &mut Serving) -> Result<String> {
    let mut text = format!("% of a CPU in a bulk transfer, writes of 32 KiB, {BULK} s\n");
    writeln!(text, "{:<14}{:>8}{:>8}{:>8}", "", "dom0", "A", "B")?;
    for transport in ["nothing"].iter().chain(&TRANSPORTS) {
        eprintln!("CPU time: {transport}");
        let (before, start) = (cpu(pair)?, Instant::now());
        let options = format!("--test throughput --size 32KiB --seconds {BULK} --runs 1 --transport {transport}");
        match *transport {
            "nothing" => pair.sh("dom0", &format!("sleep {BULK}"))?,
            _ => server.measure(pair, &options)?,
        };
        let (after, seconds) = (cpu(pair)?, start.elapsed().as_secs_f64());
        let [dom0, a, b]: [f64; 3] = std::array::from_fn(|i| 100.0 * (after[i] - before[i]) / seconds);
        writeln!(text, "{transport:<14}{dom0:>8.1}{a:>8.1}{b:>8.1}")?;
    }
    Ok(text + "\n")
}

/// Counts the hypercalls and CPU switches for 1 GiB in writes of 32 KiB, beyond those of the same run without these
/// bytes. In that run the processes only start, map their memory and end. The lines report the guests' context
/// switches.
fn volume(rig: &mut Rig, kind: Kind, server: &mut Serving, lines: &mut String) -> Result<String> {
    let what = if kind == Kind::Pv { "hypercalls" } else { "exits" };
    let mut text = format!(
        "1 GiB in writes of 32 KiB: {what} of both domUs, by kind, and times that a CPU was given to one; the same run with \
         32 KiB in place of 1 GiB is subtracted\n"
    );
    for transport in TRANSPORTS {
        eprintln!("hypercalls: {transport}");
        let options = |volume| {
            format!("--test switches --volume {volume} --size 32KiB --runs 1 --ring 1MiB --transport {transport}")
        };
        *lines += &server.measure(rig.pair(kind)?, &options("1GiB"))?;
        // The benchmark makes two runs, as a stream and as messages, or with Nagle's algorithm and without, so each run
        // gets half.
        let half = options(if transport == "libxenvchan" { "1GiB" } else { "512MiB" });
        let whole = trace(rig, |pair| server.measure(pair, &half).map(drop))?;
        let none = trace(rig, |pair| server.measure(pair, &options("32KiB")).map(drop))?;
        let (switches, without) = (whole.switches, none.switches);
        let (kinds, total) = beyond(&whole, &none);
        let kinds: Vec<String> = kinds.iter().take(6).map(|(name, count)| format!("{name} {count}")).collect();
        writeln!(
            text,
            "{transport:<14}{total:>8} {what} ({}); {} with the start of its processes\n{:>22} switches; {switches} with it",
            kinds.join(", "),
            whole.total(),
            switches.saturating_sub(without)
        )?;
    }
    Ok(text)
}

/// Returns the hypercalls of `whole` beyond those of `none`, by kind with the most frequent first, and their sum.
fn beyond<'a>(whole: &'a Share, none: &Share) -> (Vec<(&'a str, u64)>, u64) {
    let without = |kind: &String| none.hypercalls.get(kind).copied().unwrap_or_default();
    let kinds = whole.hypercalls.iter().map(|(kind, count)| (kind.as_str(), count.saturating_sub(without(kind))));
    let mut kinds: Vec<_> = kinds.collect();
    kinds.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let total = kinds.iter().map(|(_, count)| count).sum();
    (kinds, total)
}

/// Returns what A and B together did while `run` ran, by Xen's own count.
pub fn trace(rig: &mut Rig, run: impl FnOnce(&mut Pair) -> Result<()>) -> Result<Share> {
    let (packages, pair) = rig.traced()?;
    // Traces scheduling, without which no event can be assigned to a domain, the hypercalls of paravirtualized guests,
    // and the exits of the others.
    let job = pair.start("dom0", "exec xentrace -D -S 256 -e 0x002af000 /tmp/trace")?;
    pair.sh("dom0", "until [ -s /tmp/trace ]; do :; done")?;
    run(pair)?;
    pair.sh("dom0", "killall -INT xentrace")?;
    pair.at("dom0")?.wait(job, within(120))?;
    let numbers = [pair.number("A"), pair.number("B")];
    let mut shares = pair.host.read_file_of("/tmp/trace", |file| trace::analyze(packages, file))?;
    let mut both = Share::default();
    for share in numbers.map(|number| shares.remove(&number).unwrap_or_default()) {
        both.switches += share.switches;
        for (kind, count) in share.hypercalls {
            *both.hypercalls.entry(kind).or_default() += count;
        }
    }
    Ok(both)
}

/// Returns the benchmark's own tables and charts of the lines.
pub fn tables(rig: &Rig, to: &Path, ring: &str, lines: &str) -> Result<String> {
    let (results, page) = (to.join(format!("ring-{ring}.jsonl")), to.join(format!("ring-{ring}")));
    fs::write(&results, lines)?;
    let mut report = Command::new(rig.tombolo()?);
    report.arg("bench").arg("--report").arg(&page).arg("--from").arg(&results);
    let output = report.stdin(Stdio::null()).output().context("tombolo bench")?;
    ensure!(output.status.success(), "no report: {}", String::from_utf8_lossy(&output.stderr));
    Ok(format!("Rings of {ring}\n\n{}\n", fs::read_to_string(page.join("report.txt"))?))
}
