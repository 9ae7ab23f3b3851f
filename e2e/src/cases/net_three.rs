// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A network of three machines: what happens to one of them stops no other.

use super::net::{load_tun_of, wait_carrier, wait_for};
use super::net_load::Load;
use super::{Case, Half, Verdict};
use crate::rig::Rig;
use crate::site::{At, CONFIG, Site, line, start};
use serde_json::json;
use std::net::UdpSocket;
use std::time::{Duration, Instant};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::pass;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::qemu::Vm;

pub const LONG_CASES: &[Case] =
    &[Case { name: "n14_third_machine_that_is_paused_flooded_or_killed_stops_nobody_else", run: three }];
pub const HALVES: &[Half] = &[("net_three::flood", flood)];

/// Adds a third machine to the broker's configuration, and a network of all machines.
const LAN: &str = "[domain.c]\n[[net]]\nname = \"lan\"\ndomains = [\"*\"]\n\
                   addresses = { a = \"10.9.0.1/24\", b = \"10.9.0.2/24\", c = \"10.9.0.3/24\" }\n";
/// Number of datagrams: a running machine takes more, and a ring and a queue hold fewer.
const TAKEN: u64 = 3_000;
/// Number of datagrams after which a flood ends.
const FLOOD: u64 = 20_000;
/// Time for which the third machine is paused.
const PAUSE: Duration = Duration::from_secs(12);

/// Sends datagrams to one address, or to all, as fast as they are taken, and prints how many were sent.
fn flood(args: &[String]) -> Result<()> {
    let address = args.first().ok_or_else(|| Error::new("to whom?"))?;
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.set_broadcast(true)?;
    // Datagrams that a full queue refuses are lost, as is usual.
    socket.set_nonblocking(true)?;
    let (begun, mut sent) = (Instant::now(), 0_u64);
    println!("floods");
    while sent < FLOOD && begun.elapsed() < Duration::from_secs(5) {
        sent += u64::from(socket.send_to(&[7; 1400], (&address[..], 9)).is_ok());
    }
    println!("sent {sent}");
    Ok(())
}

/// Floods an address from the first machine while its connections with the second one continue. Returns how many
/// datagrams were taken.
fn floods(site: &mut Site, load: &Load, address: &str) -> Result<u64> {
    let job = start(&mut site.a, "net_three::flood", &[address])?;
    line(&mut site.a, job, "floods", within(60))?;
    let again = load.goes_on(site).context(format!("{address} is flooded"))?;
    let said = site.a.wait(job, within(60))?.success().context("who floods")?;
    let sent = said.lines().find_map(|line| line.strip_prefix("sent ")).unwrap_or_default().parse().context(&said)?;
    println!("{address} is flooded, {sent} datagrams were taken: all connections go on {again:?} later");
    Ok(sent)
}

fn follow(vm: &mut Vm) -> Result<Job> {
    load_tun_of(vm)?;
    vm.start(&["tombolo", "net", "follow", "--engine", "kernel"])
}

fn three(rig: &mut Rig) -> Result<Verdict> {
    rig.site()?.broker.configure(&format!("{CONFIG}{LAN}"))?;
    let mut c = rig.third("c")?;
    let site = rig.site()?;
    let jobs = [follow(&mut site.a)?, follow(&mut site.b)?];
    follow(&mut c)?;
    for (at, ports) in [(At::A, ["lan-b", "lan-c"]), (At::B, ["lan-a", "lan-c"])] {
        for port in ports {
            wait_carrier(site, at, port, 1)?;
        }
    }
    site.a.sh("ping -c 2 -W 20 10.9.0.3", within(60))?;
    let load = Load::start(site, "10.9.0.2")?;
    load.goes_on(site)?;

    let sent = floods(site, &load, "10.9.0.3").context("the third machine runs")?;
    ensure!(sent > TAKEN, "no flood: {sent} datagrams");
    c.qmp.run("stop", &json!({}))?;
    let paused = Instant::now();
    let to_it = floods(site, &load, "10.9.0.3").context("the third machine is paused")?;
    ensure!(to_it < TAKEN, "a machine that does not run took {to_it} datagrams");
    floods(site, &load, "10.9.0.255").context("the third machine is paused, and all are flooded")?;
    pass(PAUSE.saturating_sub(paused.elapsed()));
    load.goes_on(site)?;
    // The paused machine keeps its link, and takes what was queued.
    ensure!(carriers(site)? == "111", "of lan, lan-b and lan-c: {}", carriers(site)?);
    c.qmp.run("cont", &json!({}))?;
    wait_for(site, At::A, "ping -c 1 -W 2 10.9.0.3 > /dev/null")?;
    load.goes_on(site)?;

    // Kills the third machine, if it had no fault until then.
    c.finish()?;
    wait_carrier(site, At::A, "lan-c", 0)?;
    ensure!(carriers(site)? == "110", "of lan, lan-b and lan-c: {}", carriers(site)?);
    load.goes_on(site)?;
    let broken = load.end(site)?;
    ensure!(broken.is_empty(), "connections broke: {broken:?}");

    site.broker.configure(CONFIG)?;
    for (at, job) in [At::A, At::B].into_iter().zip(jobs) {
        wait_for(site, at, "[ ! -e /sys/class/net/lan ]")?;
        site.vm(at).kill(job)?;
        site.vm(at).wait(job, within(60))?;
    }
    Ok(Verdict::Done)
}

fn carriers(site: &mut Site) -> Result<String> {
    site.a.sh("cd /sys/class/net && cat lan/carrier lan-b/carrier lan-c/carrier | tr -d '\\n'", within(60))
}
