// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs that do everything that is possible with the descriptors they were given.

use super::{Case, Half, Verdict};
use crate::rig::{REGION, Rig};
use rustix::io::Errno;
use rustix::mm::{MprotectFlags, ProtFlags};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::time::{Duration, Instant};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::guest::sys::{self, LinkArgs, Mapping, WindowArgs, errno};
use tombolo_e2e::guest::{Ends, node_name, open_node};
use tombolo_e2e::line_reader::within;

pub const CASES: &[Case] = &[
    Case { name: "each_invalid_argument_is_refused", run: invalid },
    Case { name: "unprivileged_abuse_of_a_window_harms_nobody", run: abuse },
];
pub const HALVES: &[Half] = &[("abuse::invalid", guest_invalid), ("abuse::spawn", spawn), ("abuse::wild", wild)];

const PAGE: u64 = 4096;
/// A user without any privilege.
const NOBODY: u32 = 65534;
/// Window that the wild programs get.
const WINDOW: WindowArgs = WindowArgs {
    cookie: 9,
    offset: 0x20000,
    length: 0x8000,
    flags: 0,
    channel: 100,
    channels: 4,
    below: 2,
    closed: 3,
    state: [0, 1],
};

fn invalid(rig: &mut Rig) -> Result<Verdict> {
    rig.solo()?.run("abuse::invalid", &[])?;
    Ok(Verdict::Done)
}

/// Makes one thing wrong each time, with everything else valid.
fn guest_invalid(args: &[String]) -> Result<()> {
    let (ends, _) = Ends::from_args(args)?;
    let (own, peer, doorbell) = (open_node(&ends.own)?, open_node(&ends.peer)?, open_node(&ends.doorbell)?);
    let good = LinkArgs { own_length: REGION, peer_length: REGION, wait_vector: 1, ..LinkArgs::new(&peer, &doorbell) };
    for bad in [
        LinkArgs { own_length: 0, ..good },
        LinkArgs { own_length: PAGE + 1, ..good },
        LinkArgs { own_offset: 1, own_length: PAGE, ..good },
        LinkArgs { own_offset: PAGE, ..good },
        LinkArgs { own_offset: u64::MAX - PAGE + 1, own_length: 2 * PAGE, ..good },
        LinkArgs { own_length: REGION + PAGE, ..good },
        LinkArgs { peer_offset: REGION, ..good },
        LinkArgs { peer_length: !(PAGE - 1), ..good },
        LinkArgs { wait_vector: 4, ..good },
        LinkArgs { flags: 1, ..good },
        LinkArgs { doorbell_fd: good.peer_fd, ..good },
    ] {
        ensure!(errno(sys::link(&own, &bad)) == Some(Errno::INVAL), "accepted: {bad:?}");
    }
    ensure!(errno(sys::link(&own, &LinkArgs { peer_fd: -1, ..good })) == Some(Errno::BADF), "no descriptor");
    ensure!(errno(sys::link(&own, &LinkArgs { peer_fd: 0, ..good })) == Some(Errno::INVAL), "no node");
    let reader = File::open(format!("/dev/{}", node_name(&ends.own)?))?;
    ensure!(errno(sys::link(&reader, &good)) == Some(Errno::PERM), "a node opened for reading makes links");
    ensure!(errno(sys::window(&own, &WINDOW)) == Some(Errno::NOTTY), "a node makes windows");

    let link = sys::link(&own, &good)?;
    for bad in [
        WindowArgs { length: 0, ..WINDOW },
        WindowArgs { length: PAGE - 1, ..WINDOW },
        WindowArgs { offset: 8, ..WINDOW },
        WindowArgs { offset: REGION, ..WINDOW },
        WindowArgs { offset: REGION - PAGE, length: 2 * PAGE, ..WINDOW },
        WindowArgs { offset: !(PAGE - 1), ..WINDOW },
        WindowArgs { flags: 4, ..WINDOW },
        WindowArgs { channels: 65, ..WINDOW },
        WindowArgs { channel: 510, ..WINDOW },
        WindowArgs { channel: u32::MAX, ..WINDOW },
        WindowArgs { below: 256, ..WINDOW },
        WindowArgs { closed: 256, ..WINDOW },
        WindowArgs { state: [0, 0x8000], ..WINDOW },
        WindowArgs { flags: sys::WINDOW_PEER, ..WINDOW },
        WindowArgs { flags: sys::WINDOW_READ_ONLY, ..WINDOW },
    ] {
        ensure!(errno(sys::window(&link, &bad)) == Some(Errno::INVAL), "accepted: {bad:?}");
    }
    let window = sys::window(&link, &WINDOW)?;
    for fd in [own.as_fd(), link.as_fd(), window.as_fd()] {
        for number in 0..8 {
            ensure!(sys::abuse(fd, 0xe7 << 8 | number, None).is_err() || number == 4, "a call with no argument");
            ensure!(sys::abuse(fd, 3 << 30 | 64 << 16 | 0xe7 << 8 | number, None).is_err(), "a call of another size");
        }
    }
    Ok(())
}

/// Fills the guest's own region, lets wild programs loose on a window of it, and checks the rest.
fn abuse(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let seconds = if super::long() { "600" } else { "10" };
    let fill = vec![0xa5; (REGION - PAGE) as usize];
    guest.own()?.write(PAGE, &fill)?;
    let limit = within(seconds.parse::<u64>()? + 120);
    guest.end("abuse::spawn", &[seconds], limit)?.success()?;
    let mut seen = guest.own()?.read(PAGE, fill.len())?;
    let at = (WINDOW.offset - PAGE) as usize;
    seen[at..at + WINDOW.length as usize].fill(0xa5);
    ensure!(seen == fill, "something beyond the window changed");
    Ok(Verdict::Done)
}

/// Runs two wild programs at once, with no privilege, and a window as standard input.
fn spawn(args: &[String]) -> Result<()> {
    let (ends, rest) = Ends::from_args(args)?;
    let seconds = rest.first().map_or("1", String::as_str);
    let link = ends.link()?;
    let window = link.window(&WINDOW)?;
    let start = |seed: &str| {
        let mut wild = Command::new("/agent");
        wild.args(["guest", "abuse::wild", &ends.own, seconds, seed]).uid(NOBODY).gid(NOBODY);
        wild.stdin(window.0.try_clone()?).spawn().context("no wild program")
    };
    let children = [start("1")?, start("2")?];
    drop(window);
    for mut child in children {
        let status = child.wait()?;
        ensure!(status.signal().is_none() && status.success(), "a wild program ended with {status}");
    }
    ensure!(sys::windows(&link.0, 9)?.1 == 0, "a window is left");
    Ok(())
}

fn wild(args: &[String]) -> Result<()> {
    let [own, seconds, seed] = args else { return Err("three arguments".to_owned()).context("wild") };
    ensure!(open_node(own).is_err(), "nobody can open a node");
    let window = std::io::stdin();
    rustix::fs::fcntl_setfl(&window, rustix::fs::OFlags::NONBLOCK)?;
    let mut random = Random(seed.parse::<u64>()? | 1 << 60);
    let end = Instant::now() + Duration::from_secs(seconds.parse()?);
    let mut mappings: Vec<Mapping> = Vec::new();
    while Instant::now() < end {
        match random.below(7) {
            0 => {
                let argument = std::array::from_fn(|_| random.next());
                let opcode = random.below(4) << 30 | random.below(80) << 16 | 0xe7 << 8 | random.below(8);
                _ = sys::abuse(&window, opcode as u32, random.coin().then_some(argument));
            }
            1 => {
                let offset = random.below(12) * PAGE;
                let prot = ProtFlags::from_bits_retain(random.below(8) as u32);
                let len = (random.below(12) * PAGE + random.below(2)) as usize;
                mappings.extend(Mapping::new(&window, offset, len, prot, random.coin()).ok());
            }
            2 if !mappings.is_empty() => drop(mappings.swap_remove(random.below(mappings.len() as u64) as usize)),
            3 => {
                for mapping in &mappings {
                    _ = mapping.protect(MprotectFlags::from_bits_retain(random.below(8) as u32));
                }
            }
            4 => _ = rustix::io::write(&window, &vec![0xff_u8; random.below(20) as usize]),
            5 => _ = rustix::io::write(&window, &random.below(32).to_ne_bytes()),
            _ => _ = rustix::io::read(&window, &mut vec![0_u8; random.below(20) as usize]),
        }
        // Writing is allowed in a mapping that can be made writable.
        if let Ok(mapping) = Mapping::writable(&window, WINDOW.length as usize) {
            mapping.store(random.below(WINDOW.length) as usize, random.next() as u8);
        }
        mappings.truncate(50);
    }
    Ok(())
}

/// Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}
