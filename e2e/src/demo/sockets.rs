// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make vm-sockets-demo`: Debian's programs in two machines, over plain TCP and under `tombolo run` in turn. Then one
//! of the machines migrates while it sends numbers.

use super::goals::{Goal, Goals};
use super::print_step;
use super::table::{Row, Table, Unit, spread};
use crate::cases::host_sockets::Place;
use crate::cases::{migration, sockets};
use crate::parts::Parts;
use crate::site::{At, Purpose, Site, line};
use serde_json::Value;
use std::path::Path;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;

/// Rounds of each row unless the caller asks for more.
pub const ROUNDS: u32 = 3;

/// A server in b and a client in a, in whose words B stands for b's address; and the function that reads the figure
/// from the client's output.
struct Pair {
    question: &'static str,
    server: &'static str,
    port: u16,
    client: &'static str,
    figure: fn(&str) -> Option<f64>,
    unit: Unit,
    goal: Option<Goal>,
}

const REDIS: &str = "redis-server --protected-mode no --dir /tmp";
const PAIRS: [Pair; 5] = [
    Pair {
        question: "iperf3, one stream",
        server: "iperf3 -s",
        port: 5201,
        client: "iperf3 -c B -t 5 -i 0 --json",
        figure: bytes_a_second,
        unit: Unit::Rate,
        goal: Some(Goal::Least(2.0)),
    },
    redis("Redis GET, 1 client", "redis-benchmark -h B -t get --csv -c 1 -n 6000", 2.0),
    redis("Redis GET, 50 clients", "redis-benchmark -h B -t get --csv -c 50 -n 40000", 1.5),
    redis("Redis GET, 50 clients, -P 16", "redis-benchmark -h B -t get --csv -c 50 -P 16 -n 200000", 1.0),
    Pair {
        question: "sockperf, 64 B, median",
        server: "sockperf server --tcp -i 0.0.0.0",
        port: 11111,
        client: "sockperf ping-pong --tcp -i B -m 64 -t 3",
        figure: median,
        unit: Unit::Time,
        goal: None,
    },
];

const fn redis(question: &'static str, client: &'static str, times: f64) -> Pair {
    let (server, unit, goal) = (REDIS, Unit::Requests, Some(Goal::Least(times)));
    Pair { question, server, port: 6379, client, figure: requests, unit, goal }
}

fn bytes_a_second(json: &str) -> Option<f64> {
    let said: Value = serde_json::from_str(json).ok()?;
    Some(said["end"]["sum_received"]["bits_per_second"].as_f64()? / 8.0)
}

fn requests(csv: &str) -> Option<f64> {
    csv.lines().find_map(|line| line.strip_prefix("\"GET\",\"")?.split('"').next()?.parse().ok())
}

/// Returns the median in nanoseconds.
fn median(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains("percentile 50.0"))?;
    Some(line.rsplit(' ').next()?.parse::<f64>().ok()? * 1000.0)
}

/// Measures iperf3 between a and a program of the host in both directions, in `rounds` rounds, and prints the table.
pub fn run_with_host(made_of: &Parts, rounds: u32) -> Result<()> {
    ensure!(rounds > 0, "ROUNDS: at least 1");
    if let Some(missing) = sockets::missing() {
        return Err(Error::new(format!("{missing} is not installed (tools/install-deps.sh --for sockets)")));
    }
    println!("A machine with Linux {}, under QEMU, and its host.", made_of.kernel.release);
    let mut site = sockets::boot(made_of, Purpose::Measuring)?;
    site.link("a", "host")?;
    let place = Place::new(&site)?;
    println!("Each row {rounds} times, plain and under `tombolo run` in turn.\n");
    let rows = [
        host_row(&mut site, &place, rounds, ("iperf3, a to the host", host_from_a))?,
        host_row(&mut site, &place, rounds, ("iperf3, the host to a", host_to_a))?,
    ];
    let mut goals = Goals::default();
    print!("\n{}", Table { title: "a and the host", rows: rows.into() }.show(&mut goals));
    println!("\n{goals}");
    site.finish()
}

/// Runs iperf3 once, plain or counting into a folder. Returns the bytes per second, and its client's bytes over TCP and
/// through memory.
type HostFigure = fn(&mut Site, &Place, Option<&str>) -> Result<(f64, [u64; 2])>;

fn host_row(site: &mut Site, place: &Place, rounds: u32, (question, figure): (&str, HostFigure)) -> Result<Row> {
    print_step("a, host", &format!("[tombolo run --] {question}"));
    let (mut ours, mut theirs, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        theirs.push(figure(site, place, None)?.0);
        let (rate, [tcp, memory]) = figure(site, place, Some(&format!("{}-{round}", question.len())))?;
        ours.push(rate);
        shares.push(100.0 * memory as f64 / (tcp + memory) as f64);
    }
    let [_, least, most] = spread(shares);
    println!("  through memory: {least:.2} to {most:.2} % of the client's bytes");
    let (unit, goal) = (Unit::Rate, Some(Goal::Least(1.5)));
    Ok(Row { question: question.to_owned(), ours: spread(ours), theirs: spread(theirs), unit, goal })
}

const IPERF_SERVER: [&str; 4] = ["iperf3", "-s", "-1", "--forceflush"];

fn iperf_client(address: &str) -> [&str; 8] {
    ["iperf3", "-c", address, "-t", "2", "-i", "0", "--json"]
}

fn host_from_a(site: &mut Site, place: &Place, name: Option<&str>) -> Result<(f64, [u64; 2])> {
    let address = site.network.as_ref().map_err(Clone::clone)?.host();
    let server = place.start(site, name, &IPERF_SERVER)?;
    server.wait_for_line("Server listening")?;
    let (client, folder) = (iperf_client(&address), name.map(|name| format!("/tmp/to-{name}")));
    let job = match &folder {
        Some(folder) => sockets::start(site, At::A, folder, &client)?,
        None => site.a.start(&client)?,
    };
    let said = site.a.wait(job, within(60))?.success().context("iperf3 in a")?;
    server.finish()?;
    let counts = folder.map_or(Ok([0; 2]), |folder| sockets::counted(site, At::A, &folder))?;
    Ok((bytes_a_second(&said).ok_or_else(|| Error::new(said))?, counts))
}

fn host_to_a(site: &mut Site, place: &Place, name: Option<&str>) -> Result<(f64, [u64; 2])> {
    let address = site.addresses[0].clone();
    let job = match name {
        Some(name) => sockets::start(site, At::A, &format!("/tmp/from-{name}"), &IPERF_SERVER)?,
        None => site.a.start(&IPERF_SERVER)?,
    };
    line(&mut site.a, job, "Server listening", within(60))?;
    let said = place.start(site, name, &iperf_client(&address))?.finish()?.join("\n");
    site.a.wait(job, within(60))?.success().context("iperf3 -s in a")?;
    let counts = name.map_or(Ok([0; 2]), |name| place.counted(name))?;
    Ok((bytes_a_second(&said).ok_or_else(|| Error::new(said))?, counts))
}

/// Measures each pair in `rounds` rounds, prints the table, and migrates a.
pub fn run(made_of: &Parts, rounds: u32) -> Result<()> {
    ensure!(rounds > 0, "ROUNDS: at least 1");
    if let Some(missing) = sockets::missing() {
        return Err(Error::new(format!("{missing} is not installed (tools/install-deps.sh --for sockets)")));
    }
    println!("Two machines, a and b, with Linux {}, under QEMU; tombolod on their host.", made_of.kernel.release);
    let mut site = sockets::boot(made_of, Purpose::Measuring)?;
    if let Err(why) = &site.network {
        return Err(Error::new(format!("nothing to compare with: {why}")));
    }
    println!("Each row {rounds} times, plain and under `tombolo run` in turn.\n");
    let (mut goals, mut rows) = (Goals::default(), Vec::new());
    for pair in &PAIRS {
        if pair.unit == Unit::Time && !Path::new(sockets::SOCKPERF).exists() {
            println!("SKIP {}: {} is not installed\n", pair.question, sockets::SOCKPERF);
            continue;
        }
        rows.push(row(&mut site, pair, rounds)?);
    }
    print!("\n{}", Table { title: "a to b", rows }.show(&mut goals));
    println!("\n{goals}");
    leave(&mut site)?;
    site.finish()
}

fn row(site: &mut Site, pair: &Pair, rounds: u32) -> Result<Row> {
    print_step("b", &format!("[tombolo run --] {}", pair.server));
    print_step("a", &format!("[tombolo run --] {}", client(site, pair)));
    let (mut ours, mut theirs, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        theirs.push(figure(site, pair, None)?);
        let folder = format!("/tmp/{}-{}-{round}", pair.port, pair.question.len());
        ours.push(figure(site, pair, Some(&folder))?);
        shares.push(100.0 * sockets::share(site, &folder).context(pair.question)?);
    }
    let [_, least, most] = spread(shares);
    println!("  through memory: {least:.2} to {most:.2} % of the client's bytes");
    let (ours, theirs) = (spread(ours), spread(theirs));
    Ok(Row { question: pair.question.to_owned(), ours, theirs, unit: pair.unit, goal: pair.goal })
}

fn client(site: &Site, pair: &Pair) -> String {
    pair.client.replace(" B ", &format!(" {} ", site.addresses[1]))
}

/// Runs a pair once, plain or under `tombolo run` with counts in a folder.
fn figure(site: &mut Site, pair: &Pair, folder: Option<&str>) -> Result<f64> {
    let client = client(site, pair);
    let start = |site: &mut Site, at, words: &str| {
        let words: Vec<&str> = words.split(' ').collect();
        match folder {
            Some(folder) => sockets::start(site, at, folder, &words),
            None => site.vm(at).start(&words),
        }
    };
    let server = start(site, At::B, pair.server)?;
    let listens = format!("grep -q ':{:04X} [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6", pair.port);
    site.b.sh(&format!("until {listens}; do usleep 20000; done"), within(60)).context(pair.server)?;
    let client = start(site, At::A, &client)?;
    let said = site.a.wait(client, within(180))?.success().context(pair.client)?;
    site.b.kill(server)?;
    site.b.wait(server, within(60))?;
    (pair.figure)(&said).ok_or_else(|| Error::new(format!("{}: no figure in what it said: {said}", pair.client)))
}

/// Migrates a while it sends numbers to b. What programs send to each other afterwards goes through memory again.
fn leave(site: &mut Site) -> Result<()> {
    let folder = "/tmp/numbers";
    print_step("a, b", "tombolo run -- a program that sends numbers, and one that checks them");
    let numbers = migration::Numbers::start(site, |site, at, words| sockets::start(site, at, folder, words))?;
    sockets::until_in_memory(site, folder)?;
    print_step("host", "tombolo vm prepare-migration a");
    println!(
        "  ready after {} ms: links are left, connections are on TCP, nothing was cut",
        migration::prepare(site)?["ms"]
    );
    print_step("host", "migrate a to another QEMU");
    println!("  {}", migration::leave(site)?);
    println!("  {}", numbers.end(site)?);
    let again = "/tmp/again";
    figure(site, &PAIRS[0], Some(again))?;
    println!("  iperf3 afterwards: {:.2} % through memory", 100.0 * sockets::share(site, again)?);
    Ok(())
}
