// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Everything at once, many times: programs that are killed at random, and devices that come and go under programs that
//! do all that is possible.

use super::lifetime::send;
use super::{Case, Half, Verdict};
use crate::rig::{Rig, VECTORS};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::guest::sys::{self, LinkArgs, Mapping, WindowArgs};
use tombolo_e2e::guest::{Ends, Window, node_name, open_node, polled, until};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::wire::End;

pub const CASES: &[Case] = &[
    Case { name: "programs_killed_at_random_leave_nothing", run: kills },
    Case { name: "devices_that_come_and_go_under_load_harm_nobody", run: rebinds },
];
pub const HALVES: &[Half] =
    &[("churn::work", work), ("churn::rebind", rebind), ("churn::spin", spin), ("churn::left", left)];

/// Four pages with state bytes and as many channels as a window can have.
const WINDOW: WindowArgs = WindowArgs {
    cookie: 1,
    offset: 0x40000,
    length: 0x4000,
    flags: 0,
    channel: 200,
    channels: 64,
    below: 2,
    closed: 3,
    state: [0x188, 0x208],
};
const STATE: u64 = WINDOW.offset + 0x188;
const ABORTED: u8 = 3;

/// Each program opens its state and is killed some time later, or before that. Afterwards the state is aborted, or was
/// never open.
fn kills(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let mut opened = 0;
    for round in 0..if super::long() { 2000 } else { 200_u64 } {
        guest.own()?.write(STATE, &[0])?;
        guest.quiet()?;
        let job = guest.start("churn::work", &[])?;
        // Every other program has its window; the others are killed on the way to it, or shortly after.
        if round % 2 == 0 {
            guest.vm.line(job, within(60))?;
        }
        let moment = Instant::now() + Duration::from_micros(round.wrapping_mul(7919) % 50_000);
        _ = guest.vm.line(job, moment);
        guest.vm.kill(job)?;
        let output = guest.vm.wait(job, within(60))?;
        ensure!(output.end == End::Signal(9), "round {round}: it ended otherwise: {output:?}");
        let state = guest.own()?.read(STATE, 1)?[0];
        ensure!(state == 0 || state == ABORTED, "round {round}: its state is still {state}");
        if state == ABORTED {
            guest.wait_notified(within(1)).context("closed, and the peer was not rung")?;
            opened += 1;
        }
    }
    println!("{opened} were killed with a window");
    ensure!(opened >= 100, "only {opened} were killed while they had a window");
    guest.run("churn::left", &[])?;
    Ok(Verdict::Done)
}

/// Makes a window, and writes and notifies for ever.
fn work(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let window = link.window(&WINDOW)?;
    let mapping = Mapping::writable(&window, WINDOW.length as usize)?;
    mapping.store(WINDOW.state[0] as usize, 1);
    println!("ready");
    loop {
        window.notify_channels(1)?;
    }
}

/// Fails if a window is left on the link, or if memory of a window or of a link is left.
fn left(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let (listed, count) = sys::windows(&link.0, 9)?;
    ensure!(count == 0, "{count} windows are left: {listed:?}");
    let window = link.window(&WINDOW)?;
    ensure!(allocated()?.len() >= 3, "a link, its view and a window are not seen: {:?}", allocated()?);
    drop((window, link));
    ensure!(allocated()?.is_empty(), "memory is left: {:?}", allocated()?);
    Ok(())
}

/// Returns the memory that the kernel's allocator counts as used by links and windows: lines of `slub_debug=U`.
fn allocated() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for cache in fs::read_dir("/sys/kernel/debug/slab").context("no slub_debug=U")? {
        let cache = cache?;
        // KASAN keeps freed memory for a while, and the allocator counts it as used meanwhile: shrinking a cache
        // releases it.
        _ = fs::write(Path::new("/sys/kernel/slab").join(cache.file_name()).join("shrink"), "1");
        let Ok(text) = fs::read_to_string(cache.path().join("alloc_traces")) else { continue };
        // Devices keep their memory as long as they exist, and the module keeps what it registers when it is loaded.
        let of_devices =
            |line: &str| ["probe", "vectors_start", "tombolo_net_start"].iter().any(|who| line.contains(who));
        let ours = |line: &&str| line.contains("[tombolo_ivshmem]") && !of_devices(line);
        found.extend(text.lines().filter(ours).map(|line| line.trim().to_owned()));
    }
    Ok(found)
}

/// Takes the three devices from the driver and returns them, in turn, while programs use them and the host notifies.
fn rebinds(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let rounds = if super::long() { "1000" } else { "40" };
    let job = guest.start("churn::rebind", &[rounds])?;
    let done = loop {
        match guest.vm.line(job, Instant::now() + Duration::from_millis(2)) {
            Ok(line) => break line,
            // The driver may lose the devices: the host's notifications reach nobody meanwhile.
            Err(why) if why.to_string().contains("deadline") => {
                for vector in 0..VECTORS {
                    guest.board()?.0.notify(guest.id, vector)?;
                }
            }
            Err(why) => return Err(why),
        }
    };
    guest.vm.wait(job, within(300))?.success()?;
    println!("{done}");
    guest.run("churn::left", &[])?;
    guest.run("lifetime::describe", &[])?;
    Ok(Verdict::Done)
}

fn rebind(args: &[String]) -> Result<()> {
    let (ends, rest) = Ends::from_args(args)?;
    let rounds: u32 = rest.first().map_or(Ok(1), |rounds| rounds.parse())?;
    // A device that was just plugged in may not have its driver yet, and then cannot be taken from it.
    for device in [&ends.own, &ends.peer, &ends.doorbell] {
        node_name(device)?;
    }
    let stop = "/tmp/stop";
    _ = fs::remove_file(stop);
    let start = |seed: &str| -> Result<_> {
        let mut argv = ends.to_args();
        argv.extend([seed.to_owned(), stop.to_owned()]);
        Ok(Command::new("/agent").args(["guest", "churn::spin"]).args(argv).spawn()?)
    };
    let spinners = [start("0")?, start("100")?, start("200")?];
    let driver = "/sys/bus/pci/drivers/tombolo_ivshmem";
    for round in 0..rounds * 3 {
        let device = [&ends.own, &ends.peer, &ends.doorbell][round as usize % 3];
        fs::write(format!("{driver}/unbind"), device)?;
        fs::write(format!("{driver}/bind"), device)?;
        node_name(device)?;
    }
    fs::write(stop, "")?;
    for mut spinner in spinners {
        let status = spinner.wait()?;
        ensure!(status.success(), "a program ended with {status}");
    }
    println!("{} times", rounds * 3);
    Ok(())
}

/// Makes links and windows, maps, waits, notifies, passes descriptors on, makes copies of itself and kills them, hangs
/// up and closes. Ignores what fails, until told to stop.
fn spin(args: &[String]) -> Result<()> {
    let (ends, rest) = Ends::from_args(args)?;
    let [channel, stop] = rest else { return Err("two more arguments".to_owned()).context("spin") };
    let channel: u32 = channel.parse()?;
    // Each program has a part of its own: links must not overlap.
    let offset = u64::from(channel) * 0x1000;
    let mut turns = 0_u32;
    while !fs::exists(stop)? {
        turns += 1;
        _ = turn(&ends, channel, offset, turns);
    }
    // The devices are there again: now everything must work.
    until(within(60), || turn(&ends, channel, offset, 1).is_ok()).context("nothing works afterwards")
}

/// A copy of this process. Killed when dropped.
struct Copied(Pid);

impl Copied {
    /// Repeats `what` for ever in the copy.
    fn new(what: impl Fn()) -> Result<Self> {
        match sys::fork()? {
            Some(copy) => Ok(Self(copy)),
            None => loop {
                what();
            },
        }
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        _ = kill_process(self.0, Signal::KILL);
        _ = waitpid(Some(self.0), WaitOptions::empty());
    }
}

fn turn(ends: &Ends, channel: u32, offset: u64, turns: u32) -> Result<()> {
    let (own, peer, doorbell) = (open_node(&ends.own)?, open_node(&ends.peer)?, open_node(&ends.doorbell)?);
    let args = LinkArgs {
        own_offset: offset,
        own_length: 0x8000,
        peer_offset: offset,
        peer_length: 0x8000,
        notify_peer: ends.notify_peer,
        notify_vector: ends.notify_vector,
        wait_vector: (turns % VECTORS as u32) as u16,
        ..LinkArgs::new(&peer, &doorbell)
    };
    let link = sys::link(&own, &args)?;
    let args = WindowArgs { cookie: 2, offset: 0x1000, length: 0x4000, channel, channels: 8, ..WINDOW };
    let window = Window(sys::window(&link, &args)?);
    let mapping = Mapping::writable(&window, 0x4000)?; // Not touched here: the device may go.
    // The copy does all that is possible with its descriptors and memory, until it is killed, or its memory is taken
    // away.
    let _copy = Copied::new(|| {
        mapping.store(0, 1);
        _ = window.notify_channels(0xff);
        _ = polled(window.as_fd(), Instant::now());
    })?;
    let (one, _other) = UnixStream::pair()?;
    send(&one, &[window.as_fd()])?;
    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    sys::eventfd(&window, turns % 8, event.as_raw_fd())?;
    for _ in 0..20 {
        window.notify_channels(0xff)?;
        polled(window.as_fd(), Instant::now())?;
    }
    sys::windows(&link, 4)?;
    if turns % 3 == 0 {
        sys::hang_up(&link)?;
    }
    Ok(())
}
