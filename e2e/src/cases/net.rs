// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net` between two machines: packets cross, the carrier goes with the peer and comes back with it.

use super::{Case, Verdict};
use crate::rig::Rig;
use crate::site::{At, Site};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::lines::within;

pub const CASES: &[Case] =
    &[Case { name: "n7_n10_n11_packets_cross_between_machines_while_both_are_there", run: cross }];

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
    let listen = "nc -l -p 9 | sha256sum";
    let listener = site.b.start(&["sh", "-c", listen])?;
    let send = "head -c 4000000 /dev/urandom > /tmp/net && until nc 10.9.0.2 9 < /tmp/net; do usleep 100000; done; \
                sha256sum < /tmp/net && rm /tmp/net";
    let sent = site.a.sh(send, within(120))?;
    let came = site.b.wait(listener, within(60))?.success()?;
    ensure!(sent.trim() == came.trim(), "{sent} became {came}");
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
