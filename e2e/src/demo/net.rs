// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The machines' part of `make net-demo`: compares the interface of the module's engine with virtio-net, between two
//! machines in one run. Each round measures every row over both, one right after the other, so that other load on this
//! machine affects both alike.

use super::table::spread;
use super::volume::{Count, processors, rung};
use crate::cases::net;
use crate::cases::sockets::{IPERF, SOCKPERF};
use crate::parts::Parts;
use crate::site::{At, CONFIG, Plan, Purpose, Site};
use serde_json::Value;
use std::path::Path;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::image::Extra;
use tombolo_e2e::line_reader::within;

/// Parts of the measurement.
pub const PARTS: [&str; 3] = ["bulk", "trips", "counts"];
/// Seconds of a sample.
const SECONDS: u32 = 1;
/// Volume that crosses while devices are counted.
const VOLUME: &str = "256M";
/// Address of the second machine over the interface; over virtio-net it has the network's own address.
const ADDRESS: &str = "10.9.0.2";

/// A row: its name, and the values over virtio-net and over the interface.
type Row = (String, [Vec<f64>; 2]);

/// Measures the parts in `rounds` rounds, and prints a table of them.
pub fn run(made_of: &Parts, rounds: u32, parts: &[&str]) -> Result<()> {
    ensure!(rounds > 0, "ROUNDS: at least 1");
    let unknown = parts.iter().find(|part| !PARTS.contains(part));
    ensure!(unknown.is_none(), "there is no part {unknown:?}, there are {}", PARTS.join(", "));
    for program in [IPERF, SOCKPERF] {
        ensure!(Path::new(program).exists(), "{program} is not installed (tools/install-deps.sh --for net)");
    }
    let site = &mut boot(made_of)?;
    let mut rows: Vec<Row> = Vec::new();
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        for part in parts {
            for kind in [0, 1] {
                for (at, (name, value)) in measure(site, part, kind)?.into_iter().enumerate() {
                    if round == 0 && kind == 0 {
                        rows.push((name.clone(), Default::default()));
                    }
                    let row = rows.iter_mut().find(|row| row.0 == name);
                    row.ok_or_else(|| Error::new(format!("row {at} is new: {name}")))?.1[kind].push(value);
                }
            }
        }
    }
    let stat = net::stat(site, At::A)?;
    ensure!(stat.contains("\"engine\":\"kernel\"") && stat.contains("\"links\":1,"), "another engine or link: {stat}");
    println!("\nTwo machines with Linux {}, under QEMU; {rounds} rounds of {SECONDS} s.\n", made_of.kernel.release);
    println!("| | virtio-net | `tombolo net`, the module's engine | ratio |\n|---|--:|--:|--:|");
    for (name, [theirs, ours]) in rows {
        let ratios = ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs).collect();
        let cell = |values: Vec<f64>| {
            let [median, least, most] = spread(values).map(short);
            format!("{median} ({least} to {most})")
        };
        println!("| {name} | {} | {} | {:.2} |", cell(theirs), cell(ours), spread(ratios)[0]);
    }
    Ok(())
}

fn short(value: f64) -> String {
    let digits = if value >= 99.95 { 0 } else { 2 };
    format!("{value:.digits$}")
}

/// Boots two machines, each with a card and an interface, and starts servers in the second one.
fn boot(made_of: &Parts) -> Result<Site> {
    let programs =
        [IPERF, SOCKPERF].map(|program| -> Extra { (program.trim_start_matches("/usr/").to_owned(), program.into()) });
    let plan = Plan { purpose: Purpose::Measuring, config: CONFIG, modules: &[], programs: &programs };
    let mut site = Site::boot_with(made_of, &plan, |_| Ok(()))?;
    if let Err(why) = &site.network {
        return Err(Error::new(format!("nothing to compare with: {why}")));
    }
    site.link("a", "b")?;
    for at in [At::B, At::A] {
        net::up(&mut site, at, "tmb0", "vm:b/net", "kernel", 9)?;
    }
    net::wait_carrier(&mut site, At::A, "tmb0", 1)?;
    let servers = ["iperf3 -s", "sockperf server --tcp -i 0.0.0.0 -p 5301", "sockperf server -i 0.0.0.0 -p 5302"];
    for server in servers {
        site.b.start(&server.split(' ').collect::<Vec<_>>())?;
    }
    let listens = |port: u32| format!("grep -q ':{port:04X} [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6");
    net::wait_for(&mut site, At::B, &format!("{} && {}", listens(5201), listens(5301)))?;
    net::wait_for(&mut site, At::B, "grep -q ':14B6 ' /proc/net/udp")?;
    Ok(site)
}

/// Returns the rows of a part, over virtio-net (0) or over the interface (1).
fn measure(site: &mut Site, part: &str, kind: usize) -> Result<Vec<(String, f64)>> {
    let address = if kind == 0 { site.addresses[1].clone() } else { ADDRESS.to_owned() };
    let sent = bytes_sent(site)?;
    let mut rows = Vec::new();
    match part {
        "bulk" => {
            for streams in ["1", "4"] {
                let name = if streams == "1" { "TCP, 1 stream" } else { "TCP, 4 streams" };
                let machines = [site.a.process(), site.b.process()];
                let before = processors(&machines)?;
                let (bytes, rate) = iperf(site, &address, &["-t", &SECONDS.to_string(), "-P", streams])?;
                rows.push((format!("{name}, MB/s"), rate / 1e6));
                rows.push((
                    format!("{name}, CPU s of both QEMUs for a GB"),
                    (processors(&machines)? - before) / (bytes / 1e9),
                ));
            }
        }
        "trips" => {
            for (name, how) in [("TCP", "--tcp -p 5301"), ("UDP", "-p 5302")] {
                let command = format!("sockperf ping-pong {how} -i {address} -m 64 -t {SECONDS}");
                let said = site.a.sh(&command, within(60))?;
                let line = said.lines().find(|line| line.contains("percentile 50.0"));
                let half: f64 = line.and_then(|line| line.rsplit(' ').next()).unwrap_or("").parse().context(said)?;
                rows.push((format!("{name}, 64 B there and back, µs"), 2.0 * half));
            }
        }
        _ => {
            let interrupts = rung(site)?;
            let counts = [Count::start(&mut site.a)?, Count::start(&mut site.b)?];
            iperf(site, &address, &["-n", VOLUME])?;
            let mut counted = [0; 2];
            for (count, at) in counts.into_iter().zip([At::A, At::B]) {
                let new = count.stop(site.vm(at))?;
                (counted[0], counted[1]) = (counted[0] + new[0], counted[1] + new[1]);
            }
            rows.push((format!("{VOLUME} over TCP: kicks, or stores to the doorbell"), counted[0] as f64));
            let all = counted[1] + rung(site)? - interrupts;
            rows.push((format!("{VOLUME} over TCP: interrupts of these devices"), all as f64));
        }
    }
    // Checks that the packets took the path that was meant to be measured.
    let sent = bytes_sent(site)? - sent;
    ensure!((sent > 10_000) == (kind == 1), "{sent} bytes went through the interface in {part} {kind}");
    Ok(rows)
}

/// Returns the bytes that arrived, and the bytes per second.
fn iperf(site: &mut Site, address: &str, how: &[&str]) -> Result<(f64, f64)> {
    let job = site.a.start(&[&["iperf3", "-c", address, "-i", "0", "--json"], how].concat())?;
    let said = site.a.wait(job, within(120))?.success().context("iperf3")?;
    let json: Value = serde_json::from_str(&said)?;
    let received = &json["end"]["sum_received"];
    match (received["bytes"].as_f64(), received["bits_per_second"].as_f64()) {
        (Some(bytes), Some(bits)) => Ok((bytes, bits / 8.0)),
        _ => Err(Error::new(said)),
    }
}

fn bytes_sent(site: &mut Site) -> Result<u64> {
    Ok(site.a.sh("cat /sys/class/net/tmb0/statistics/tx_bytes", within(60))?.trim().parse()?)
}
