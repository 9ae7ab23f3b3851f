// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Links that the host's broker plugs and unplugs while machines run.

use super::{Case, Half, Verdict};
use crate::rig::Rig;
use crate::site::Site;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Error, Result};
use tombolo_e2e::guest::sys::{self, Mapping, SLICE_PEER, SLICE_READ_ONLY, SliceArgs};
use tombolo_e2e::guest::{Ends, node_name, open_node};
use tombolo_e2e::lines::within;

pub const CASES: &[Case] = &[
    Case { name: "link_plugged_at_run_time_joins_two_machines", run: joins },
    Case { name: "link_taken_back_is_gone_and_a_new_one_is_empty", run: comes_anew },
];
pub const HALVES: &[Half] = &[
    ("links::arrived", arrived),
    ("links::write", write),
    ("links::read", read),
    ("links::store", store),
    ("links::wait", wait),
];

/// Where programs may have memory: behind the page of the brokers.
const PAGE: u64 = 4096;
/// Two channels that a program could get.
const SLICE: SliceArgs = SliceArgs {
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

/// Regions arrive in both machines; what one writes the other reads, and cannot write; bells ring.
fn joins(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.unlink()?;
    let start = Instant::now();
    site.broker.link(&["add", "a", "b", "--wait", "60"])?;
    let up = start.elapsed();
    let [of_a, of_b] = site.ends()?;
    let soon = within(60);
    Site::half(&mut site.a, &of_a, "links::arrived", &[], soon)?;
    Site::half(&mut site.b, &of_b, "links::arrived", &[], soon)?;
    println!("up after {up:?}, in both machines after {:?}", start.elapsed());

    let listener = start_half(&mut site.b, &of_b, "links::wait", &[])?;
    ensure!(site.b.line(listener, soon)? == "ready", "not ready");
    Site::half(&mut site.a, &of_a, "links::write", &["65"], soon)?;
    ensure!(site.b.wait(listener, soon)?.success()? == "ready\nrung", "not rung");
    Site::half(&mut site.b, &of_b, "links::read", &["65"], soon)?;
    // The kernel of b lets nobody write a's memory, and if it did QEMU would not.
    Site::half(&mut site.b, &of_b, "links::store", &[], soon)?;
    Site::half(&mut site.b, &of_b, "links::write", &["66"], soon)?;
    Site::half(&mut site.a, &of_a, "links::read", &["66"], soon)?;
    Site::half(&mut site.b, &of_b, "links::read", &["65"], soon)?;
    Ok(Verdict::Done)
}

fn comes_anew(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link()?;
    let [of_a, of_b] = site.ends()?;
    let soon = within(60);
    Site::half(&mut site.a, &of_a, "links::write", &["67"], soon)?;
    Site::half(&mut site.b, &of_b, "links::read", &["67"], soon)?;
    site.unlink()?;
    ensure!(site.ends().is_err(), "the devices are still there");
    ensure!(site.a.address("tombolo").is_ok(), "the doorbell went as well");
    site.link()?;
    let [_, of_b] = site.ends()?;
    Site::half(&mut site.b, &of_b, "links::read", &["0"], soon)?;
    Ok(Verdict::Done)
}

fn start_half(
    vm: &mut tombolo_e2e::qemu::Vm,
    ends: &Ends,
    half: &str,
    more: &[&str],
) -> Result<tombolo_e2e::control::Job> {
    let args = ends.to_args();
    let mut argv = vec!["/agent", "guest", half];
    argv.extend(args.iter().map(String::as_str));
    argv.extend(more);
    vm.start(&argv)
}

/// The driver has all three devices.
fn arrived(args: &[String]) -> Result<()> {
    let (ends, _) = Ends::from_args(args)?;
    for device in [&ends.own, &ends.peer, &ends.bell] {
        node_name(device)?;
    }
    let (own, peer) = (sys::info(open_node(&ends.own)?)?, sys::info(open_node(&ends.peer)?)?);
    ensure!(own.size == 16 << 20 && peer.size == 16 << 20, "{own:?} {peer:?}");
    ensure!(own.flags & peer.flags & sys::INFO_WRITE_BACK != 0, "not cached: {own:?} {peer:?}");
    Ok(())
}

fn number(args: &[String]) -> Result<(Ends, u8)> {
    let (ends, rest) = Ends::from_args(args)?;
    let number = rest.first().ok_or_else(|| Error::new("which number?"))?.parse()?;
    Ok((ends, number))
}

/// Writes a number all over a page of its own, and rings.
fn write(args: &[String]) -> Result<()> {
    let (ends, number) = number(args)?;
    let slice = ends.link()?.slice(&SLICE)?;
    let mapping = Mapping::writable(&slice, PAGE as usize)?;
    (0..PAGE as usize).for_each(|at| mapping.store(at, number));
    slice.ring(0b1)
}

/// The page of the peer holds a number, and nothing else.
fn read(args: &[String]) -> Result<()> {
    let (ends, number) = number(args)?;
    let slice = ends.link()?.slice(&peers())?;
    let mapping = Mapping::readable(&slice, PAGE as usize)?;
    let other = (0..PAGE as usize).find(|at| mapping.load(*at) != number);
    ensure!(other.is_none(), "{} at {other:?} instead of {number}", mapping.load(other.unwrap_or(0)));
    Ok(())
}

fn peers() -> SliceArgs {
    SliceArgs { flags: SLICE_PEER | SLICE_READ_ONLY, channels: 0, channel: 0, ..SLICE }
}

/// Nobody here gets the peer's page to write.
fn store(args: &[String]) -> Result<()> {
    let slice = Ends::from_args(args)?.0.link()?.slice(&peers())?;
    ensure!(Mapping::writable(&slice, PAGE as usize).is_err(), "it can be mapped for writing");
    Ok(())
}

/// Says when the peer rings.
fn wait(args: &[String]) -> Result<()> {
    let slice = Ends::from_args(args)?.0.link()?.slice(&SLICE)?;
    println!("ready");
    let bits = tombolo_e2e::guest::polled(slice.0.as_fd(), Instant::now() + Duration::from_secs(60))?;
    ensure!(!bits.is_empty(), "not rung");
    println!("rung");
    Ok(())
}
