// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs that do whatever they can think of with what they were given.

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
use tombolo_e2e::guest::sys::{self, LinkArgs, Mapping, SliceArgs, errno};
use tombolo_e2e::guest::{Ends, node_name, open_node};
use tombolo_e2e::line_reader::within;

pub const CASES: &[Case] = &[
    Case { name: "each_invalid_argument_is_refused", run: invalid },
    Case { name: "unprivileged_abuse_of_a_slice_harms_nobody", run: abuse },
];
pub const HALVES: &[Half] = &[("abuse::invalid", guest_invalid), ("abuse::spawn", spawn), ("abuse::wild", wild)];

const PAGE: u64 = 4096;
/// Somebody without any privilege.
const NOBODY: u32 = 65534;
/// What the wild programs get.
const SLICE: SliceArgs = SliceArgs {
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

/// Each time one thing is wrong, and everything else as it would be right.
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
        LinkArgs { bell_fd: good.peer_fd, ..good },
    ] {
        ensure!(errno(sys::link(&own, &bad)) == Some(Errno::INVAL), "accepted: {bad:?}");
    }
    ensure!(errno(sys::link(&own, &LinkArgs { peer_fd: -1, ..good })) == Some(Errno::BADF), "no descriptor");
    ensure!(errno(sys::link(&own, &LinkArgs { peer_fd: 0, ..good })) == Some(Errno::INVAL), "no node");
    let reader = File::open(format!("/dev/{}", node_name(&ends.own)?))?;
    ensure!(errno(sys::link(&reader, &good)) == Some(Errno::PERM), "a node opened for reading makes links");
    ensure!(errno(sys::slice(&own, &SLICE)) == Some(Errno::NOTTY), "a node makes slices");

    let link = sys::link(&own, &good)?;
    for bad in [
        SliceArgs { length: 0, ..SLICE },
        SliceArgs { length: PAGE - 1, ..SLICE },
        SliceArgs { offset: 8, ..SLICE },
        SliceArgs { offset: REGION, ..SLICE },
        SliceArgs { offset: REGION - PAGE, length: 2 * PAGE, ..SLICE },
        SliceArgs { offset: !(PAGE - 1), ..SLICE },
        SliceArgs { flags: 4, ..SLICE },
        SliceArgs { channels: 65, ..SLICE },
        SliceArgs { channel: 510, ..SLICE },
        SliceArgs { channel: u32::MAX, ..SLICE },
        SliceArgs { below: 256, ..SLICE },
        SliceArgs { closed: 256, ..SLICE },
        SliceArgs { state: [0, 0x8000], ..SLICE },
        SliceArgs { flags: sys::SLICE_PEER, ..SLICE },
        SliceArgs { flags: sys::SLICE_READ_ONLY, ..SLICE },
    ] {
        ensure!(errno(sys::slice(&link, &bad)) == Some(Errno::INVAL), "accepted: {bad:?}");
    }
    let slice = sys::slice(&link, &SLICE)?;
    for fd in [own.as_fd(), link.as_fd(), slice.as_fd()] {
        for number in 0..8 {
            ensure!(sys::abuse(fd, 0xe7 << 8 | number, None).is_err() || number == 4, "a call with no argument");
            ensure!(sys::abuse(fd, 3 << 30 | 64 << 16 | 0xe7 << 8 | number, None).is_err(), "a call of another size");
        }
    }
    Ok(())
}

/// Fills what the guest writes, lets wild programs loose on a slice of it, and looks at the rest.
fn abuse(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let seconds = if super::long() { "600" } else { "10" };
    let fill = vec![0xa5; (REGION - PAGE) as usize];
    guest.own()?.write(PAGE, &fill)?;
    let limit = within(seconds.parse::<u64>()? + 120);
    guest.end("abuse::spawn", &[seconds], limit)?.success()?;
    let mut seen = guest.own()?.read(PAGE, fill.len())?;
    let at = (SLICE.offset - PAGE) as usize;
    seen[at..at + SLICE.length as usize].fill(0xa5);
    ensure!(seen == fill, "something beyond the slice changed");
    Ok(Verdict::Done)
}

/// Two wild programs at once, with no privilege, and a slice as standard input.
fn spawn(args: &[String]) -> Result<()> {
    let (ends, rest) = Ends::from_args(args)?;
    let seconds = rest.first().map_or("1", String::as_str);
    let link = ends.link()?;
    let slice = link.slice(&SLICE)?;
    let start = |seed: &str| {
        let mut wild = Command::new("/agent");
        wild.args(["guest", "abuse::wild", &ends.own, seconds, seed]).uid(NOBODY).gid(NOBODY);
        wild.stdin(slice.0.try_clone()?).spawn().context("no wild program")
    };
    let children = [start("1")?, start("2")?];
    drop(slice);
    for mut child in children {
        let status = child.wait()?;
        ensure!(status.signal().is_none() && status.success(), "a wild program ended with {status}");
    }
    ensure!(sys::slices(&link.0, 9)?.1 == 0, "a slice is left");
    Ok(())
}

fn wild(args: &[String]) -> Result<()> {
    let [own, seconds, seed] = args else { return Err("three arguments".to_owned()).context("wild") };
    ensure!(open_node(own).is_err(), "nobody can open a node");
    let slice = std::io::stdin();
    rustix::fs::fcntl_setfl(&slice, rustix::fs::OFlags::NONBLOCK)?;
    let mut random = Random(seed.parse::<u64>()? | 1 << 60);
    let end = Instant::now() + Duration::from_secs(seconds.parse()?);
    let mut mappings: Vec<Mapping> = Vec::new();
    while Instant::now() < end {
        match random.below(7) {
            0 => {
                let argument = std::array::from_fn(|_| random.next());
                let opcode = random.below(4) << 30 | random.below(80) << 16 | 0xe7 << 8 | random.below(8);
                _ = sys::abuse(&slice, opcode as u32, random.coin().then_some(argument));
            }
            1 => {
                let offset = random.below(12) * PAGE;
                let prot = ProtFlags::from_bits_retain(random.below(8) as u32);
                let len = (random.below(12) * PAGE + random.below(2)) as usize;
                mappings.extend(Mapping::new(&slice, offset, len, prot, random.coin()).ok());
            }
            2 if !mappings.is_empty() => drop(mappings.swap_remove(random.below(mappings.len() as u64) as usize)),
            3 => {
                for mapping in &mappings {
                    _ = mapping.protect(MprotectFlags::from_bits_retain(random.below(8) as u32));
                }
            }
            4 => _ = rustix::io::write(&slice, &vec![0xff_u8; random.below(20) as usize]),
            5 => _ = rustix::io::write(&slice, &random.below(32).to_ne_bytes()),
            _ => _ = rustix::io::read(&slice, &mut vec![0_u8; random.below(20) as usize]),
        }
        // Writing is allowed in what can be mapped so.
        if let Ok(mapping) = Mapping::writable(&slice, SLICE.length as usize) {
            mapping.store(random.below(SLICE.length) as usize, random.next() as u8);
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
