// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make vm-demo`: two machines and their host, a file from one machine to the other, and a comparison of the speed
//! with that of their network. Every figure in the tables is measured in this run, between the machines that the file
//! crossed.

pub mod connecting;
mod goals;
pub mod net;
pub mod sockets;
mod table;
pub mod volume;

use crate::parts::Parts;
use crate::site::{At, Purpose, Site, line};
use goals::{Goal, Goals};
use std::io::Write;
use std::process::Stdio;
use std::time::Instant;
use table::Table;
use tombolo_e2e::console::Console;
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::until;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::process::Process;
use tombolo_e2e::qemu::Vm;
use tombolo_e2e::runner::Half;

/// Guest halves that the machines run for the demonstration, besides `tombolo`.
pub const HALVES: &[Half] = &[
    ("volume::send", volume::send),
    ("volume::receive", volume::receive),
    ("connecting::connect", connecting::connect),
    ("connecting::open", connecting::open),
];

/// Port at which the right end of a measurement listens for its left end.
const PORT: u16 = 7083;

/// Line that a right end prints once it listens.
const SERVING: &str = "serving at";

/// Extent of the measurements.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Samples of each measurement.
    runs: u32,
    /// Seconds of a sample.
    seconds: f64,
    /// Mebibytes that cross in 32 KiB writes, and how often.
    volume: u64,
    times: u32,
}

/// Effort for a meaningful table.
pub const FULL: Effort = Effort { runs: 5, seconds: 0.3, volume: 1024, times: 5 };
/// Effort for a check that everything works.
pub const QUICK: Effort = Effort { runs: 2, seconds: 0.1, volume: 64, times: 1 };

/// Time within which a link must be up, in milliseconds.
const LINK_UP: Goal = Goal::Most(1000.0);

/// Parts of the demonstration once the machines are up.
pub const PARTS: [&str; 4] = ["file", "speed", "setup", "volume"];

/// Runs the given parts, in their order.
pub fn run(made_of: &Parts, effort: Effort, parts: &[&str]) -> Result<()> {
    if let Some(unknown) = parts.iter().find(|part| !PARTS.contains(part)) {
        return Err(Error::new(format!(
            "no part of the demonstration is called {unknown}; there are {}",
            PARTS.join(", ")
        )));
    }
    let wanted = |part| parts.contains(&part);
    println!("Two machines, a and b, with Linux {}, under QEMU; tombolod on their host.", made_of.kernel.release);
    let start = Instant::now();
    let mut site = Site::boot(made_of, Purpose::Measuring)?;
    println!("booted in {:.1} s\n", start.elapsed().as_secs_f64());
    let mut goals = Goals::default();
    join(&mut site, &mut goals)?;
    if wanted("file") {
        file(&mut site)?;
    }
    if let Err(why) = &site.network {
        let mut errors = std::io::stderr();
        writeln!(
            errors,
            "SKIP comparison (needs netns): {why}: nothing is measured without a network to compare with"
        )?;
        return site.finish();
    }
    if wanted("speed") {
        let lines = measure(&mut site, effort, &mut goals)?;
        if let Some(path) = std::env::var_os("TOMBOLO_DEMO_LINES") {
            std::fs::write(&path, lines.join("\n") + "\n").context(path.to_string_lossy())?;
        }
    }
    if wanted("setup") {
        connecting::show(&mut site, &mut goals)?;
    }
    if wanted("volume") {
        volume::show(&mut site, effort.volume << 20, effort.times, &mut goals)?;
    }
    println!("{goals}");
    site.finish()
}

/// Prints a step as a user would type it.
fn print_step(place: &str, command: &str) {
    println!("{place}$ {command}");
}

/// Gives the machines memory to share, with each other and with the host.
fn join(site: &mut Site, goals: &mut Goals) -> Result<()> {
    for other in ["b", "host"] {
        print_step("host", &format!("tombolo link add a {other}"));
        let start = Instant::now();
        site.link("a", other)?;
        let up = start.elapsed().as_secs_f64() * 1000.0;
        println!("  up after {up:.0} ms ({})", goals.beside("a link is up, ms", up, Some(LINK_UP)));
    }
    print!("{}", site.broker.link(&["ls"])?);
    println!();
    Ok(())
}

/// Moves a file from a to b, and compares what arrived.
fn file(site: &mut Site) -> Result<()> {
    let (make, sum) = ("head -c 67108864 /dev/urandom > /tmp/file", "sha256sum");
    print_step("a", make);
    site.a.sh(make, within(120))?;
    let listen = "tombolo cat --listen vm:b/file --receive-only --output /tmp/copy";
    print_step("b", listen);
    let listener = site.b.start(&["sh", "-c", listen])?;
    let connect = "tombolo cat --connect vm:b/file --send-only --json /tmp/file";
    print_step("a", connect);
    let report = site.a.sh(connect, within(120))?;
    site.b.wait(listener, within(120))?.success().context("who listens")?;
    println!("  {report}");
    let mut sums = Vec::new();
    for (at, name) in [(At::A, "/tmp/file"), (At::B, "/tmp/copy")] {
        print_step(&site.vm(at).name, &format!("{sum} {name}"));
        let text = site.vm(at).sh(&format!("{sum} {name}"), within(120))?;
        println!("  {text}");
        sums.push(text.split(' ').next().unwrap_or_default().to_owned());
        site.vm(at).sh(&format!("rm {name}"), within(20))?;
    }
    ensure!(sums[0] == sums[1] && sums[0].len() == 64, "another file arrived");
    println!("  the same\n");
    Ok(())
}

/// Measures from a to b and from a to the host. Returns the lines of all measurements.
fn measure(site: &mut Site, effort: Effort, goals: &mut Goals) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    let server = site.b.start(&["tombolo", "bench", "--serve", &place(&site.addresses[1]), "--via", "vm:b"])?;
    word(&mut site.b, server, SERVING)?;
    lines.extend(pair(site, &table::BETWEEN, "vm:b", &site.addresses[1].clone(), effort, goals)?);
    site.b.kill(server)?;

    let (host, enter) = match &site.network {
        Ok(network) => (network.host(), network.enter()),
        Err(why) => return Err(why.clone()),
    };
    let mut serve = site.broker.command(&enter, &["bench", "--serve", &place(&host), "--via", "vm:host"])?;
    let mut server = Process::start(serve.stdout(Stdio::null()).stderr(Stdio::piped()))?;
    let mut said = server.stderr.take().map(Console::of).ok_or_else(|| Error::new("no standard error"))?;
    let serves = || said.text().iter().any(|line| line.starts_with(SERVING));
    until(within(60), serves).context("the host's end of the measurement")?;
    lines.extend(pair(site, &table::TO_HOST, "vm:host", &host, effort, goals)?);
    server.end()?;
    Ok(lines)
}

fn place(address: &str) -> String {
    format!("{address}:{PORT}")
}

/// Measures between a and another place, and prints the table.
fn pair(
    site: &mut Site,
    pair: &table::Pair,
    via: &str,
    address: &str,
    effort: Effort,
    goals: &mut Goals,
) -> Result<Vec<String>> {
    let title = pair.title;
    let place = place(address);
    let (runs, seconds) = (effort.runs.to_string(), effort.seconds.to_string());
    let common = ["tombolo", "bench", "--json", "--peer", &place, "--via", via, "--transport", "tombolo,tcp"];
    let sampling = ["--runs", &runs, "--seconds", &seconds];
    let tests: [&[&str]; 2] = [
        &["--test", "throughput", "--size", "64,1KiB,4KiB,16KiB,32KiB,64KiB"],
        &["--test", "latency", "--wait", "spin,sleep", "--size", "1,64,4KiB"],
    ];
    let mut lines = Vec::new();
    for test in tests {
        let job = site.a.start(&[&common[..], &sampling, test].concat())?;
        let output = site.a.wait(job, within(900))?.success().context(format!("measuring {title}"))?;
        lines.extend(output.lines().filter(|line| line.starts_with('{')).map(str::to_owned));
    }
    print!("{}", Table::of(pair, &lines)?.show(goals));
    println!();
    // Each line names its pair, because the file may hold several pairs.
    Ok(lines.into_iter().map(|line| line.replacen('{', &format!("{{\"pair\":\"{title}\","), 1)).collect())
}

/// Waits for a word of a guest half.
fn word(vm: &mut Vm, job: Job, word: &str) -> Result<String> {
    line(vm, job, word, within(300))
}
