// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net` between two machines: packets cross, the carrier goes with the peer and comes back with it. Frames go through a
//! process on both sides, through the kernel's module on both, or through one of each.

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

pub const CASES: &[Case] = &[
    Case { name: "n7_n10_n11_packets_cross_between_machines_while_both_are_there", run: cross },
    Case { name: "n12_the_module_moves_the_frames_and_either_engine_may_be_the_other_end", run: kernel },
    Case { name: "n8_the_module_drops_and_counts_each_kind_of_bad_frame", run: hostile },
];

pub const HALVES: &[Half] = &[("net::send", send), ("net::receive", receive), ("net::hostile", harass)];

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
fn up(site: &mut Site, at: At, engine: &str) -> Result<Job> {
    let (how, number) = if at == At::B { ("--listen", 2) } else { ("--connect", 1) };
    let job = site.vm(at).start(&["tombolo", "net", "up", "tmb0", how, "vm:b/net", "--engine", engine])?;
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
    load_tun(site)?;
    let (a, b) = (up(site, At::A, "tap")?, up(site, At::B, "tap")?);
    wait_carrier(site, At::A, 1)?;
    check(site)?;
    let b = kill_and_start(site, b, "tap")?;
    check(site)?;
    let stat = stat(site, At::A)?;
    ensure!(stat.contains("\"links\":2") && stat.contains("\"state\":\"linked\""), "{stat}");
    down(site, At::A, a)?;
    down(site, At::B, b)?;
    Ok(Verdict::Done)
}

fn load_tun(site: &mut Site) -> Result<()> {
    for at in [At::A, At::B] {
        site.vm(at).sh("[ -e /dev/net/tun ] || /agent insmod $(cat /modules/order)", within(60))?;
    }
    Ok(())
}

fn stat(site: &mut Site, at: At) -> Result<String> {
    site.vm(at).sh("tombolo net stat tmb0 --json", within(60))
}

fn down(site: &mut Site, at: At, job: Job) -> Result<()> {
    site.vm(at).sh("tombolo net down tmb0", within(60))?;
    site.vm(at).wait(job, within(60))?.success().context("who was ended in order")?;
    Ok(())
}

/// Kills what has B's interface: the carrier of A's goes. Starts it again, by this engine: it comes back.
fn kill_and_start(site: &mut Site, job: Job, engine: &str) -> Result<Job> {
    site.b.kill(job)?;
    wait_carrier(site, At::A, 0)?;
    wait_for(site, At::B, "[ ! -e /sys/class/net/tmb0 ]")?;
    let job = up(site, At::B, engine)?;
    wait_carrier(site, At::A, 1)?;
    Ok(job)
}

fn kernel(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    load_tun(site)?;
    let (a, b) = (up(site, At::A, "kernel")?, up(site, At::B, "auto")?);
    wait_carrier(site, At::A, 1)?;
    check(site)?;
    for at in [At::A, At::B] {
        let stat = stat(site, at)?;
        ensure!(stat.contains("\"engine\":\"kernel\""), "{stat}");
        // Segments crossed whole, and the peer's frames were all taken.
        ensure!(stat.matches("\"segments\":0,").count() < 2, "{stat}");
        for why in ["short", "long", "header", "feature", "source", "refused"] {
            ensure!(stat.matches(&format!("\"{why}\":0")).count() == 2, "{why}: {stat}");
        }
    }
    // What was switched off and on goes on, and another MTU is told to the peer by a new link.
    site.a.sh("ip link set tmb0 down && ip link set tmb0 up", within(60))?;
    check(site)?;
    site.a.sh("ip link set tmb0 mtu 9000", within(60))?;
    wait_for(site, At::A, "tombolo net stat tmb0 --json | grep -q '\"links\":2'")?;
    wait_carrier(site, At::A, 1)?;
    check(site)?;
    // The other end may be a process, and is looked for again.
    let b = kill_and_start(site, b, "tap")?;
    check(site)?;
    let b = kill_and_start(site, b, "kernel")?;
    check(site)?;
    down(site, At::A, a)?;
    wait_carrier(site, At::B, 0)?;
    down(site, At::B, b)?;
    for at in [At::A, At::B] {
        site.vm(at).sh("[ ! -e /sys/class/net/tmb0 ]", within(60))?;
    }
    Ok(Verdict::Done)
}

/// What each kind of bad frame is sent so often.
const BAD: u64 = 40;

/// A header and a frame of 60 bytes from the address of the hello.
fn frame() -> Vec<u8> {
    let mut message = vec![0; 12 + 60];
    message[12..18].copy_from_slice(&[0xff; 6]);
    message[18..24].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    message[24..26].copy_from_slice(&[0x88, 0xb5]);
    message
}

/// Says a hello and then sends what no peer should: so often each kind, then as many random headers on random frames.
fn harass(_: &[String]) -> Result<()> {
    let options = tombolo::Options::new().wait_for_listener(Duration::from_secs(60));
    let mut channel = tombolo::connect_with::<tombolo::Messages>("vm:b/net", &options)?;
    let mut hello = [0; 64];
    hello[..5].copy_from_slice(b"TBNET");
    (hello[8], hello[10]) = (1, 1);
    hello[0x18..0x1c].copy_from_slice(&1500_u32.to_le_bytes());
    hello[0x1c..0x20].copy_from_slice(&65_553_u32.to_le_bytes());
    hello[0x20..0x26].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    channel.send(&hello)?;
    channel.recv(&mut [0; 64])?;
    let changed = |at: usize, with: &[u8]| {
        let mut message = frame();
        message[at..at + with.len()].copy_from_slice(with);
        message
    };
    for _ in 0..BAD {
        channel.send(&frame()[..25])?; // short
        channel.send(&vec![0; 12 + 65_554])?; // long
        channel.send(&changed(0, &[4]))?; // header: a flag
        channel.send(&changed(10, &[1]))?; // header: the last field
        channel.send(&changed(0, &[1, 0, 0, 0, 0, 0, 13, 0]))?; // header: a sum in the addresses
        channel.send(&changed(0, &[1, 0, 0, 0, 0, 0, 14, 0, 45, 0]))?; // header: a sum beyond the frame
        channel.send(&changed(1, &[3]))?; // header: a kind
        channel.send(&changed(0, &[1, 1, 0, 0, 0, 0, 14]))?; // header: packets of 0 bytes
        channel.send(&changed(0, &[1, 5, 0, 0, 9, 0, 14]))?; // feature: segments of UDP
        channel.send(&changed(18, &[2, 0, 0, 0, 0, 8]))?; // source
        channel.send(&frame())?;
    }
    let random = sent();
    for bytes in random.chunks_exact(100).take(40_000) {
        let mut message = bytes.to_vec();
        message[0] &= 3;
        message[1] &= 0x87;
        (message[10], message[11]) = (0, 0);
        message[18..24].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
        (message[24], message[25]) = if bytes[50] & 1 == 0 { (8, 0) } else { (0x86, 0xdd) };
        channel.send(&message)?;
    }
    println!("sent");
    // What the other stack says to its neighbours, until this is killed.
    while channel.recv(&mut vec![0; 70_000])?.is_some() {}
    Ok(())
}

fn hostile(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    let b = up(site, At::B, "kernel")?;
    let hostile = start(&mut site.a, "net::hostile", &[])?;
    line(&mut site.a, hostile, "sent", within(120))?;
    // All was received, and the link is there still.
    wait_for(site, At::B, "tombolo net stat tmb0 --json | grep -q '\"state\":\"linked\"'")?;
    let drops = |stat: &str, why: &str| -> Result<u64> {
        let received = stat.split("\"received\":").nth(1).unwrap_or_default();
        let number = received.split(&format!("\"{why}\":")).nth(1).unwrap_or_default();
        Ok(number.chars().take_while(char::is_ascii_digit).collect::<String>().parse()?)
    };
    let stat = stat(site, At::B)?;
    ensure!(drops(&stat, "short")? == BAD && drops(&stat, "long")? == BAD && drops(&stat, "source")? == BAD, "{stat}");
    ensure!(drops(&stat, "header")? >= 6 * BAD && drops(&stat, "feature")? >= BAD, "{stat}");
    ensure!(drops(&stat, "frames")? >= BAD && drops(&stat, "refused")? > 0, "{stat}");
    site.a.kill(hostile)?;
    wait_carrier(site, At::B, 0)?;
    down(site, At::B, b)?;
    Ok(Verdict::Done)
}
