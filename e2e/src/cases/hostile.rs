// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that controls its machine and follows no rule.

use super::{Case, Half, Verdict};
use crate::rig::{REGION, Rig};
use rustix::fs::{Mode, OFlags, open};
use std::fs;
use std::time::{Duration, Instant};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::Ends;
use tombolo_e2e::guest::sys::{Mapping, WindowArgs};
use tombolo_e2e::line_reader::within;

pub const CASES: &[Case] = &[
    Case { name: "guest_without_our_driver_cannot_write_the_peers_region", run: raw },
    Case { name: "marks_that_change_at_random_wake_and_nothing_else", run: marks },
];
pub const HALVES: &[Half] = &[("hostile::raw", guest_raw), ("hostile::listen", listen)];

const PAGE: u64 = 4096;
/// A window with the largest number of channels.
const WINDOW: WindowArgs = WindowArgs {
    cookie: 1,
    offset: PAGE,
    length: PAGE,
    flags: 0,
    channel: 448,
    channels: 64,
    below: 0,
    closed: 0,
    state: [0; 2],
};

/// QEMU, not Tombolo's driver, keeps a guest from writing its peer's memory.
fn raw(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let fill = vec![0x5a; REGION as usize];
    guest.peer()?.write(0, &fill)?;
    let said = guest.run("hostile::raw", &[])?;
    ensure!(said == "stored", "it did not even try: {said}");
    ensure!(guest.peer()?.read(0, REGION as usize)? == fill, "a store arrived");
    guest.run("lifetime::describe", &[])?;
    Ok(Verdict::Done)
}

/// Takes the device from the driver and stores to all of it.
fn guest_raw(args: &[String]) -> Result<()> {
    let (ends, _) = Ends::from_args(args)?;
    let driver = "/sys/bus/pci/drivers/tombolo_ivshmem";
    let device = format!("/sys/bus/pci/devices/{}", ends.peer);
    fs::write(format!("{driver}/unbind"), &ends.peer)?;
    fs::write(format!("{device}/enable"), "1")?;
    let memory =
        open(format!("{device}/resource2"), OFlags::RDWR | OFlags::SYNC, Mode::empty()).context("resource2")?;
    let mapping = Mapping::writable(&memory, REGION as usize)?;
    ensure!(mapping.load(0) == 0x5a, "this is not the region");
    (0..REGION as usize).step_by(64).for_each(|at| mapping.store(at, 0xff));
    drop(mapping);
    println!("stored");
    fs::write(format!("{device}/enable"), "0")?;
    Ok(fs::write(format!("{driver}/bind"), &ends.peer)?)
}

fn marks(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let job = guest.start("hostile::listen", &[])?;
    ensure!(guest.vm.line(job, within(60))? == "ready", "not ready");
    let end = Instant::now() + Duration::from_secs(3);
    let mut page = vec![0; PAGE as usize];
    let mut seed = 1_u64;
    while Instant::now() < end {
        for byte in &mut page {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (seed >> 56) as u8;
        }
        guest.peer()?.write(0, &page)?;
        guest.board()?.0.notify(guest.id, 1)?;
    }
    guest.vm.kill(job)?;
    let output = guest.vm.wait(job, within(60))?;
    let woken: u64 = output.text.lines().last().unwrap_or_default().parse().unwrap_or(0);
    println!("woken {woken} times");
    ensure!(woken > 0, "not woken at all: {output:?}");
    guest.run("lifetime::describe", &[])?;
    Ok(Verdict::Done)
}

/// Counts how often it is woken.
fn listen(args: &[String]) -> Result<()> {
    let window = Ends::from_args(args)?.0.link()?.window(&WINDOW)?;
    println!("ready");
    for woken in 1_u64.. {
        if window.wait()? == 0 {
            return Err(Error::new("hung up"));
        }
        if woken % 64 == 0 {
            println!("{woken}");
        }
    }
    Ok(())
}
