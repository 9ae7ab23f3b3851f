// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net` between two machines: packets cross, the carrier goes with the peer and comes back with it.

use super::{Case, Half, Verdict};
use crate::rig::Rig;
use crate::site::{At, Site, line, start};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::lines::within;

pub const CASES: &[Case] =
    &[Case { name: "n7_n10_n11_packets_cross_between_machines_while_both_are_there", run: cross }];

pub const HALVES: &[Half] = &[("net::send", send), ("net::receive", receive)];

/// What goes over a connection: bytes without a pattern, the same each time.
fn sent() -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..500_000).flat_map(|_| next().to_le_bytes()).collect()
}

fn send(_: &[String]) -> Result<()> {
    let mut stream = TcpStream::connect(("10.9.0.2", 9))?;
    stream.set_write_timeout(Some(Duration::from_secs(60)))?;
    stream.write_all(&sent())?;
    Ok(stream.shutdown(Shutdown::Write)?)
}

fn receive(_: &[String]) -> Result<()> {
    let listener = TcpListener::bind(("10.9.0.2", 9))?;
    println!("listens");
    let mut stream = listener.accept()?.0;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut came = Vec::new();
    stream.read_to_end(&mut came)?;
    ensure!(came == sent(), "{} bytes came, or others", came.len());
    Ok(())
}

/// Waits in a machine until a condition of the shell's holds.
fn wait_for(site: &mut Site, at: At, what: &str) -> Result<String> {
    let script = format!("until {what}; do usleep 100000; done");
    site.vm(at).sh(&script, within(60)).context(what)
}

/// Starts the interface of a machine, and gives it an address once it is there.
fn up(site: &mut Site, at: At) -> Result<Job> {
    let (how, number) = if at == At::B { ("--listen", 2) } else { ("--connect", 1) };
    let job = site.vm(at).start(&["tombolo", "net", "up", "tmb0", how, "vm:b/net"])?;
    wait_for(site, at, "test -e /sys/class/net/tmb0")?;
    site.vm(at).sh(&format!("ip addr add 10.9.0.{number}/24 dev tmb0"), within(60))?;
    Ok(job)
}

fn wait_carrier(site: &mut Site, at: At, on: u8) -> Result<String> {
    wait_for(site, at, &format!("[ \"$(cat /sys/class/net/tmb0/carrier)\" = {on} ]"))
}

/// Each machine reaches the other, with one packet and with many.
fn check(site: &mut Site) -> Result<()> {
    site.a.sh("ping -c 2 -W 20 10.9.0.2 && ping -c 2 -W 20 -s 20000 10.9.0.2", within(120))?;
    let receiver = start(&mut site.b, "net::receive", &[])?;
    line(&mut site.b, receiver, "listens", within(60))?;
    let sender = start(&mut site.a, "net::send", &[])?;
    site.a.wait(sender, within(120))?.success().context("who sends")?;
    site.b.wait(receiver, within(60))?.success().context("who receives")?;
    Ok(())
}

fn cross(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    for at in [At::A, At::B] {
        site.vm(at).sh("[ -e /dev/net/tun ] || /agent insmod $(cat /modules/order)", within(60))?;
    }
    let (a, b) = (up(site, At::A)?, up(site, At::B)?);
    wait_carrier(site, At::A, 1)?;
    check(site)?;
    site.b.kill(b)?;
    wait_carrier(site, At::A, 0)?;
    let b = up(site, At::B)?;
    wait_carrier(site, At::A, 1)?;
    check(site)?;
    let stat = site.a.sh("tombolo net stat tmb0 --json", within(60))?;
    ensure!(stat.contains("\"links\":2") && stat.contains("\"state\":\"linked\""), "{stat}");
    for (at, job) in [(At::A, a), (At::B, b)] {
        site.vm(at).sh("tombolo net down tmb0", within(60))?;
        site.vm(at).wait(job, within(60))?.success().context("who was ended in order")?;
    }
    Ok(Verdict::Done)
}
