// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Links that the host's broker plugs and unplugs while machines run.

use super::{Case, Half, Verdict};
use crate::rig::Rig;
use crate::site::{At, Site, start};
use std::time::Instant;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::sys::{self, Mapping, WINDOW_PEER, WINDOW_READ_ONLY, WindowArgs};
use tombolo_e2e::guest::{Ends, node_name, open_node};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::qemu::Vm;

pub const CASES: &[Case] = &[
    Case { name: "link_plugged_at_run_time_joins_two_machines", run: joins },
    Case { name: "link_taken_back_is_gone_and_a_new_one_is_empty", run: comes_anew },
];
pub const HALVES: &[Half] =
    &[("links::arrived", arrived), ("links::write", write), ("links::read", read), ("links::store", store)];

/// Offset at which programs may have memory: after the page of the brokers.
const PAGE: u64 = 4096;
/// Channels that a program could get.
const WINDOW: WindowArgs = WindowArgs {
    cookie: 1,
    offset: PAGE,
    length: PAGE,
    flags: 0,
    channel: 1,
    channels: 3,
    below: 0,
    closed: 0,
    state: [0; 2],
};

/// Returns the site without brokers in its machines: these cases test the links, not their use.
fn bare(rig: &mut Rig) -> Result<&mut Site> {
    let site = rig.site()?;
    site.kill_broker(At::A)?;
    site.kill_broker(At::B)?;
    Ok(site)
}

/// Regions arrive in both machines. Each machine reads what the other writes, and cannot write there.
fn joins(rig: &mut Rig) -> Result<Verdict> {
    let site = bare(rig)?;
    site.unlink()?;
    let start = Instant::now();
    site.broker.link(&["add", "a", "b", "--wait", "60"])?;
    let up = start.elapsed();
    let [of_a, of_b] = site.ends()?;
    let rows = site.broker.list(&[])?;
    let size = rows.first().ok_or_else(|| Error::new("no link"))?["size"].to_string();
    half(&mut site.a, &of_a, "links::arrived", &[&size])?;
    half(&mut site.b, &of_b, "links::arrived", &[&size])?;
    println!("up after {up:?}, in both machines after {:?}", start.elapsed());

    half(&mut site.a, &of_a, "links::write", &["65"])?;
    half(&mut site.b, &of_b, "links::read", &["65"])?;
    // The kernel of b lets nobody write a's memory, and if it did, QEMU would not.
    half(&mut site.b, &of_b, "links::store", &[])?;
    half(&mut site.b, &of_b, "links::write", &["66"])?;
    half(&mut site.a, &of_a, "links::read", &["66"])?;
    half(&mut site.b, &of_b, "links::read", &["65"])?;
    Ok(Verdict::Done)
}

fn comes_anew(rig: &mut Rig) -> Result<Verdict> {
    let site = bare(rig)?;
    site.link("a", "b")?;
    let [of_a, of_b] = site.ends()?;
    half(&mut site.a, &of_a, "links::write", &["67"])?;
    half(&mut site.b, &of_b, "links::read", &["67"])?;
    site.unlink()?;
    ensure!(site.ends().is_err(), "the devices are still there");
    ensure!(site.a.address("tombolo").is_ok(), "the doorbell went as well");
    site.link("a", "b")?;
    let [_, of_b] = site.ends()?;
    half(&mut site.b, &of_b, "links::read", &["0"])?;
    Ok(Verdict::Done)
}

/// Runs a guest half, which must succeed, with the devices as its first arguments.
fn half(vm: &mut Vm, ends: &Ends, half: &str, more: &[&str]) -> Result<String> {
    let args = ends.to_args();
    let args: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
    let job = start(vm, half, &args)?;
    vm.wait(job, within(60))?.success().context(format!("{half} in {}", vm.name))
}

/// Checks that the driver has all three devices.
fn arrived(args: &[String]) -> Result<()> {
    let (ends, rest) = Ends::from_args(args)?;
    let size = rest.first().ok_or_else(|| Error::new("what size?"))?.parse::<u64>()?;
    for device in [&ends.own, &ends.peer, &ends.doorbell] {
        node_name(device)?;
    }
    let (own, peer) = (sys::info(open_node(&ends.own)?)?, sys::info(open_node(&ends.peer)?)?);
    ensure!(own.size == size && peer.size == size, "{own:?} {peer:?}");
    ensure!(own.flags & peer.flags & sys::INFO_WRITE_BACK != 0, "not cached: {own:?} {peer:?}");
    Ok(())
}

fn number(args: &[String]) -> Result<(Ends, u8)> {
    let (ends, rest) = Ends::from_args(args)?;
    let number = rest.first().ok_or_else(|| Error::new("which number?"))?.parse()?;
    Ok((ends, number))
}

/// Fills a page of its own half with a number.
fn write(args: &[String]) -> Result<()> {
    let (ends, number) = number(args)?;
    let window = ends.link()?.window(&WINDOW)?;
    let mapping = Mapping::writable(&window, PAGE as usize)?;
    (0..PAGE as usize).for_each(|at| mapping.store(at, number));
    Ok(())
}

/// Checks that the peer's page holds only this number.
fn read(args: &[String]) -> Result<()> {
    let (ends, number) = number(args)?;
    let window = ends.link()?.window(&peers())?;
    let mapping = Mapping::readable(&window, PAGE as usize)?;
    let other = (0..PAGE as usize).find(|at| mapping.load(*at) != number);
    ensure!(other.is_none(), "{} at {other:?} instead of {number}", mapping.load(other.unwrap_or(0)));
    Ok(())
}

fn peers() -> WindowArgs {
    WindowArgs { flags: WINDOW_PEER | WINDOW_READ_ONLY, channels: 0, channel: 0, ..WINDOW }
}

/// Checks that no program here can map the peer's page for writing.
fn store(args: &[String]) -> Result<()> {
    let window = Ends::from_args(args)?.0.link()?.window(&peers())?;
    ensure!(Mapping::writable(&window, PAGE as usize).is_err(), "it can be mapped for writing");
    Ok(())
}
