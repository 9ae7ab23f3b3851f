// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices that go while they are in use.

use super::{Case, Half, Verdict};
use crate::rig::{REGION, Rig};
use rustix::process::{Signal, WaitOptions, kill_process, waitpid};
use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use tombolo_e2e::ensure;
use tombolo_e2e::error::Result;
use tombolo_e2e::guest::sys::{self, Mapping, Stalling, WindowArgs};
use tombolo_e2e::guest::{Ends, polled};
use tombolo_e2e::ivshmem::Region;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::qemu::Access;
use tombolo_e2e::wire::End;

pub const CASES: &[Case] = &[
    Case { name: "unplugging_takes_mappings_and_ends_waits", run: unplugs },
    Case { name: "unplugging_races_with_mmap_and_wins", run: races },
    Case { name: "unbinding_the_doorbell_ends_waits", run: unbinds },
    Case { name: "module_in_use_cannot_be_unloaded", run: in_use },
    Case { name: "lister_whose_memory_stalls_holds_up_nobody", run: stalls },
];
pub const HALVES: &[Half] = &[
    ("unplug::touch", touch),
    ("unplug::wait", wait),
    ("unplug::race", race),
    ("unplug::remap", remap),
    ("unplug::fork", fork),
    ("unplug::unbind", unbind),
    ("unplug::stall", stall),
];

/// Signal for a store into memory that was taken away.
pub const SIGBUS: i32 = 7;
const WINDOW: WindowArgs = WindowArgs {
    cookie: 1,
    offset: 0x10000,
    length: 0x10000,
    flags: 0,
    channel: 0,
    channels: 1,
    below: 0,
    closed: 0,
    state: [0; 2],
};

fn unplugs(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let jobs = [guest.start("unplug::touch", &[])?, guest.start("unplug::wait", &[])?];
    for job in jobs {
        ensure!(guest.vm.line(job, within(60))? == "ready", "not ready");
    }
    guest.vm.unplug("own")?;
    let ends = jobs.map(|job| guest.vm.wait(job, within(60)));
    let [touched, waited] = ends;
    ensure!(touched.as_ref().is_ok_and(|output| output.end == End::Signal(SIGBUS)), "the mapping stays: {touched:?}");
    ensure!(waited.as_ref().is_ok_and(|output| output.text.ends_with("0")), "the wait goes on: {waited:?}");
    replug(rig)
}

/// Plugs new memory in, in place of the unplugged one.
fn replug(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let own = Region::new(REGION)?;
    let address = guest.vm.plug("own", &own, Access::Write)?;
    guest.own = Some(own);
    if let Some(ends) = &mut guest.ends {
        ends.own = address;
    }
    guest.run("lifetime::describe", &[])?;
    Ok(Verdict::Done)
}

/// Touches its memory for ever.
fn touch(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let mapping = Mapping::writable(link.window(&WINDOW)?, WINDOW.length as usize)?;
    mapping.store(0, 1);
    println!("ready");
    loop {
        mapping.store(0x8000, mapping.load(0).wrapping_add(1));
    }
}

/// Waits, for ever if necessary.
fn wait(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let window = link.window(&WindowArgs { channel: 1, ..WINDOW })?;
    println!("ready");
    println!("{}", window.wait()?);
    Ok(())
}

/// Programs map, touch and copy themselves all the time. Each must end by a signal, because a mapping that survived the
/// device would let its program run for ever. And no store of theirs may arrive after the device went.
fn races(rig: &mut Rig) -> Result<Verdict> {
    let rounds = if super::long() { 50 } else { 3 };
    for round in 0..rounds {
        let guest = rig.solo()?;
        let job = guest.start("unplug::race", &[])?;
        ensure!(guest.vm.line(job, within(60))? == "ready", "not ready");
        guest.vm.unplug("own")?;
        let own = guest.own()?;
        own.write(0, &vec![0; REGION as usize])?;
        guest.vm.wait(job, within(60))?.success()?;
        let left = guest.own()?.read(0, REGION as usize)?;
        ensure!(left.iter().all(|byte| *byte == 0), "round {round}: a store arrived after the device went");
        replug(rig)?;
    }
    Ok(Verdict::Done)
}

fn race(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let window = link.window(&WINDOW)?;
    let start = |half| -> Result<_> {
        let mut racer = Command::new("/agent");
        racer.args(["guest", half]).stdin(window.0.try_clone()?).stdout(Stdio::piped()).stderr(Stdio::null());
        Ok(racer.spawn()?)
    };
    let (remap, fork) = ("unplug::remap", "unplug::fork");
    let racers = [start(remap)?, start(remap)?, start(fork)?, start(fork)?];
    println!("ready");
    for mut racer in racers {
        let status = racer.wait()?;
        ensure!(status.signal() == Some(SIGBUS), "a racer ended with {status}");
        // The copies share its standard output: the read waits for a copy that still runs.
        racer.stdout.take().map_or(Ok(0), |mut copies| copies.read_to_end(&mut Vec::new()))?;
    }
    Ok(())
}

/// Maps the window that is its standard input and copies itself. Each copy touches the window until it is killed.
fn fork(_: &[String]) -> Result<()> {
    let mapping = Mapping::writable(std::io::stdin(), WINDOW.length as usize)?;
    let touch = || (0..WINDOW.length as usize).step_by(0x1000).for_each(|at| mapping.store(at, 1));
    loop {
        touch();
        let Some(copy) = sys::fork()? else {
            loop {
                touch();
            }
        };
        touch();
        kill_process(copy, Signal::KILL)?;
        waitpid(Some(copy), WaitOptions::empty())?;
    }
}

/// Maps, touches and unmaps the window that is its standard input.
fn remap(_: &[String]) -> Result<()> {
    let window = std::io::stdin();
    loop {
        let mapping = Mapping::writable(window.as_fd(), WINDOW.length as usize)?;
        (0..WINDOW.length as usize).step_by(0x1000).for_each(|at| mapping.store(at, 1));
    }
}

fn unbinds(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let job = guest.start("unplug::wait", &[])?;
    ensure!(guest.vm.line(job, within(60))? == "ready", "not ready");
    guest.run("unplug::unbind", &["unbind"])?;
    let waited = guest.vm.wait(job, within(60))?;
    ensure!(waited.text.ends_with('0'), "the wait goes on: {waited:?}");
    guest.run("unplug::unbind", &["bind"])?;
    guest.run("lifetime::describe", &[])?;
    Ok(Verdict::Done)
}

fn unbind(args: &[String]) -> Result<()> {
    let (ends, rest) = Ends::from_args(args)?;
    let file = format!("/sys/bus/pci/drivers/tombolo_ivshmem/{}", rest.join(""));
    Ok(fs::write(file, &ends.doorbell)?)
}

fn in_use(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let job = guest.start("unplug::wait", &[])?;
    ensure!(guest.vm.line(job, within(60))? == "ready", "not ready");
    ensure!(guest.unload().is_err(), "unloaded under a window");
    guest.vm.kill(job)?;
    guest.vm.wait(job, within(60))?;
    guest.unload()?;
    guest.load()?;
    guest.run("lifetime::describe", &[])?;
    Ok(Verdict::Done)
}

fn stalls(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let job = guest.start("unplug::stall", &[])?;
    ensure!(guest.vm.line(job, within(60))? == "listing", "not ready");
    ensure!(guest.vm.line(job, within(60))? == "closed", "the close waits for the lister");
    guest.run("unplug::unbind", &["unbind"])?;
    guest.run("unplug::unbind", &["bind"])?;
    guest.vm.kill(job)?;
    guest.vm.wait(job, within(60))?;
    guest.run("lifetime::describe", &[])?;
    Ok(Verdict::Done)
}

/// Lists windows into memory whose page never arrives, and closes a window meanwhile.
fn stall(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let (one, _two) = (link.window(&WINDOW)?, link.window(&WindowArgs { channel: 1, ..WINDOW })?);
    let (memory, pager) = Stalling::new()?;
    std::thread::scope(|scope| -> Result<()> {
        scope.spawn(|| sys::windows_into(&link.0, &memory));
        ensure!(!polled(pager.as_fd(), within(60))?.is_empty(), "the lister does not wait");
        println!("listing");
        drop(one);
        println!("closed");
        loop {
            std::thread::park();
        }
    })
}
