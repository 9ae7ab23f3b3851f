// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests what a program can do with a window's memory.

use super::{Case, Half, Verdict};
use crate::rig::{Guest, REGION, Rig};
use rustix::io::Errno;
use rustix::mm::{MprotectFlags, ProtFlags};
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Error, Result};
use tombolo_e2e::guest::sys::{self, LinkArgs, Mapping, WindowArgs, errno};
use tombolo_e2e::guest::{Ends, Window, open_node, polled};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::wire::End;

pub const CASES: &[Case] = &[
    Case { name: "window_maps_its_range_and_nothing_else", run: range },
    Case { name: "window_bytes_reach_the_peer", run: bytes },
    Case { name: "read_only_window_cannot_become_writable", run: read_only },
    Case { name: "store_to_a_read_only_window_is_a_sigsegv", run: stores },
    Case { name: "d1_range_that_is_cleared_is_zero_and_its_neighbours_stay", run: cleared },
    Case { name: "driver_writes_nothing_of_the_peers", run: untouched },
    Case { name: "memory_is_write_back", run: write_back },
];
pub const HALVES: &[Half] = &[
    ("mapping::range", guest_range),
    ("mapping::bytes", guest_bytes),
    ("mapping::read_only", guest_read_only),
    ("mapping::store", guest_store),
    ("mapping::soil", guest_soil),
    ("mapping::clear", guest_clear),
    ("mapping::untouched", guest_untouched),
    ("mapping::write_back", guest_write_back),
];

const PAGE: usize = 4096;
const SIGSEGV: i32 = 11;

/// Two pages of the guest's own half, from the third page on.
const OWN: WindowArgs = WindowArgs {
    cookie: 1,
    offset: 2 * PAGE as u64,
    length: 2 * PAGE as u64,
    flags: 0,
    channel: 0,
    channels: 0,
    below: 0,
    closed: 0,
    state: [0; 2],
};
/// The same pages of the peer's half.
const PEER: WindowArgs = WindowArgs { flags: sys::WINDOW_PEER, ..OWN };

fn range(rig: &mut Rig) -> Result<Verdict> {
    rig.solo()?.run("mapping::range", &[])?;
    Ok(Verdict::Done)
}

fn guest_range(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let window = link.window(&OWN)?;
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let refused = |offset: usize, len, prot, private| errno(Mapping::new(&window, offset as u64, len, prot, private));
    for (offset, len) in [(0, 3 * PAGE), (PAGE, 2 * PAGE), (2 * PAGE, PAGE), (1 << 40, PAGE), (0, REGION as usize)] {
        ensure!(refused(offset, len, both, false) == Some(Errno::INVAL), "{len} at {offset} can be mapped");
    }
    ensure!(refused(0, PAGE, both, true) == Some(Errno::INVAL), "a private mapping is possible");
    ensure!(refused(0, PAGE, ProtFlags::READ | ProtFlags::EXEC, false).is_some(), "peer's bytes can be run");
    let mapping = Mapping::new(&window, PAGE as u64, PAGE, both, false)?;
    mapping.store(0, 7);
    ensure!(Mapping::readable(&window, 2 * PAGE)?.load(PAGE) == 7, "two mappings of a window differ");
    ensure!(errno(mapping.protect(MprotectFlags::READ | MprotectFlags::EXEC)) == Some(Errno::ACCESS), "made to run");
    ensure!(errno(mapping.grow(2 * PAGE)) == Some(Errno::FAULT), "grown, though the window ends there");
    ensure!(
        errno(sys::window(&link.0, &WindowArgs { offset: REGION, ..OWN })) == Some(Errno::INVAL),
        "beyond the half"
    );
    let within = Mapping::writable(&window, PAGE)?;
    ensure!(errno(within.grow(2 * PAGE)) == Some(Errno::FAULT), "grown");
    // The module could not take back pages that somebody pins: no O_DIRECT, no registered buffers, no debugger's
    // access.
    within.store(0, 7);
    ensure!(errno(within.splice(&rustix::pipe::pipe()?.1)) == Some(Errno::FAULT), "pages in a pipe");
    ensure!(errno(within.page_by(&sys::pager()?)) == Some(Errno::INVAL), "somebody else brings the pages");
    ensure!(flags(&within)?.contains(" mw "), "writable, says the kernel: {}", flags(&within)?);
    Ok(())
}

fn bytes(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    guest.peer()?.write(PEER.offset, b"from the host")?;
    guest.run("mapping::bytes", &[])?;
    let seen = guest.own()?.read(OWN.offset, 14)?;
    ensure!(seen == b"from the guest", "the host sees {seen:?}");
    Ok(Verdict::Done)
}

fn guest_bytes(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let (own, peer) = (link.window(&OWN)?, link.window(&PEER)?);
    let (own, peer) = (Mapping::writable(&own, PAGE)?, Mapping::readable(&peer, PAGE)?);
    let seen: Vec<u8> = (0..13).map(|at| peer.load(at)).collect();
    ensure!(seen == b"from the host", "the guest sees {seen:?}");
    b"from the guest".iter().enumerate().for_each(|(at, byte)| own.store(at, *byte));
    Ok(())
}

fn read_only(rig: &mut Rig) -> Result<Verdict> {
    rig.solo()?.run("mapping::read_only", &[])?;
    Ok(Verdict::Done)
}

fn guest_read_only(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    for args in [PEER, WindowArgs { flags: sys::WINDOW_READ_ONLY, ..OWN }] {
        let window = link.window(&args)?;
        ensure!(errno(Mapping::writable(&window, PAGE)) == Some(Errno::ACCESS), "{args:?} maps for writing");
        let mapping = Mapping::readable(&window, PAGE)?;
        let changed = mapping.protect(MprotectFlags::READ | MprotectFlags::WRITE);
        ensure!(errno(changed) == Some(Errno::ACCESS), "{args:?} becomes writable");
        _ = mapping.load(0);
        // A debugger writes like this, even where the program may not write.
        let memory = File::options().read(true).write(true).open("/proc/self/mem")?;
        ensure!(memory.write_at(&[1], mapping.address() as u64).is_err(), "{args:?} is written through /proc/self/mem");
        let flags = flags(&mapping)?;
        ensure!(!["wr", "mw", "ex", "me"].iter().any(|flag| flags.contains(&format!(" {flag} "))), "{args:?}: {flags}");
        // No copy at a fork, not in a core dump, no growth, and nobody may pin the pages.
        ensure!(["sh", "io", "pf", "de", "dd"].iter().all(|flag| flags.contains(&format!(" {flag} "))), "{flags}");
    }
    Ok(())
}

/// Returns the kernel's flags of a mapping, as words of two letters with a space before and after each.
fn flags(mapping: &Mapping) -> Result<String> {
    let (list, start) = (fs::read_to_string("/proc/self/smaps")?, format!("{:x}-", mapping.address()));
    let lines = list.lines().skip_while(|line| !line.starts_with(&start));
    let flags = lines.into_iter().find_map(|line| line.strip_prefix("VmFlags:"));
    flags.map(|flags| format!("{flags} ")).ok_or_else(|| Error::new(format!("no {start} in {list}")))
}

fn stores(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    guest.peer()?.write(PEER.offset, &[1])?;
    for which in ["peer", "read-only"] {
        let output = guest.end("mapping::store", &[which], within(60))?;
        ensure!(output.end == End::Signal(SIGSEGV), "{which}: {output:?}");
    }
    ensure!(guest.peer()?.read(PEER.offset, 1)? == [1], "the store arrived");
    Ok(Verdict::Done)
}

fn guest_store(args: &[String]) -> Result<()> {
    let (ends, rest) = Ends::from_args(args)?;
    let peer = rest.first().is_some_and(|which| which == "peer");
    let args = if peer { PEER } else { WindowArgs { flags: sys::WINDOW_READ_ONLY, ..OWN } };
    let mapping = Mapping::readable(ends.link()?.window(&args)?, PAGE)?;
    mapping.store(0, mapping.load(0) + 1);
    Ok(())
}

/// Five pages, of which the second to the fourth are a window. All of them contain bytes: some from before the driver
/// knew of the link, some from a program, the last from the driver at a program's end.
fn cleared(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let page = |number: u64| SOILED.offset - PAGE as u64 + number * PAGE as u64;
    let host = |guest: &Guest, number| Ok::<_, Error>(guest.own()?.read(page(number), 1)?[0]);
    (0..5).try_for_each(|number| guest.own()?.write(page(number), &[5]))?;
    guest.run("mapping::clear", &["all"])?;
    let seen: Vec<u8> = (0..5).map(|number| host(guest, number)).collect::<Result<_>>()?;
    ensure!(seen == [5, 0, 0, 0, 5], "what was there before: {seen:?}");

    // While the link exists, the driver tracks which pages were written.
    let job = guest.start("mapping::clear", &["keep"])?;
    ensure!(guest.vm.line(job, within(60))? == "ready", "not ready");
    guest.run("mapping::soil", &[])?;
    let seen: Vec<u8> = (1..4).map(|number| host(guest, number)).collect::<Result<_>>()?;
    ensure!(seen == [9, 0, u8::try_from(SOILED.closed)?], "a program wrote and ended: {seen:?}");
    guest.run("mapping::clear", &["again"])?;
    let seen: Vec<u8> = (0..5).map(|number| host(guest, number)).collect::<Result<_>>()?;
    ensure!(seen == [5, 0, 0, 0, 5], "what programs wrote: {seen:?}");
    // The driver does not clear pages that nobody can have written, and so they cost nothing: here the host wrote one
    // without the driver's knowledge.
    guest.own()?.write(page(2), &[6])?;
    guest.run("mapping::clear", &["again"])?;
    ensure!(host(guest, 2)? == 6, "a page that nobody wrote was cleared");
    guest.vm.kill(job)?;
    guest.vm.wait(job, within(60)).map(drop)?;
    Ok(Verdict::Done)
}

/// Three pages, with the state bytes in the last.
const SOILED: WindowArgs = WindowArgs {
    offset: 16 * PAGE as u64,
    length: 3 * PAGE as u64,
    below: 2,
    closed: 3,
    state: [2 * PAGE as u32; 2],
    ..OWN
};

/// Writes the first page, and leaves the last to the driver.
fn guest_soil(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    Mapping::writable(link.window(&SOILED)?, PAGE)?.store(0, 9);
    Ok(())
}

fn guest_clear(args: &[String]) -> Result<()> {
    let (ends, rest) = Ends::from_args(args)?;
    let link = ends.link()?;
    let whole = PAGE as u64;
    for (offset, length) in [(0, 0), (1, whole), (0, whole - 1), (REGION, whole), (0, REGION + whole), (whole, REGION)]
    {
        ensure!(errno(sys::clear(&link.0, offset, length)) == Some(Errno::INVAL), "{length} at {offset} are cleared");
    }
    sys::clear(&link.0, SOILED.offset, SOILED.length)?;
    if rest.first().is_some_and(|what| what == "keep") {
        println!("ready");
        loop {
            std::thread::park();
        }
    }
    Ok(())
}

/// The peer's half is in the same device as the guest's own here, so that a store to it would arrive.
fn untouched(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let half = REGION / 2;
    guest.own()?.write(half, &vec![0x5a; half as usize])?;
    guest.own()?.write(OWN.offset, &[0])?;
    guest.run("mapping::untouched", &[])?;
    ensure!(guest.own()?.read(OWN.offset, 1)? == [3], "the driver did not even try");
    ensure!(guest.own()?.read(half, half as usize)? == vec![0x5a; half as usize], "the driver wrote there");
    Ok(Verdict::Done)
}

/// Does everything that makes the driver write: notifications, states, clearing.
fn guest_untouched(args: &[String]) -> Result<()> {
    let (ends, _) = Ends::from_args(args)?;
    let (own, doorbell) = (open_node(&ends.own)?, open_node(&ends.doorbell)?);
    let half = REGION / 2;
    let (own_length, peer_offset, peer_length) = (half, half, half);
    let link = sys::link(&own, &LinkArgs { own_length, peer_offset, peer_length, ..LinkArgs::new(&own, &doorbell) })?;
    sys::clear(&link, 0, half)?;
    for (number, args) in [OWN, PEER].into_iter().enumerate() {
        let states = if number == 0 { (2, 3) } else { (0, 0) };
        let (channel, below, closed) = (64 * number as u32, states.0, states.1);
        let window = Window(sys::window(&link, &WindowArgs { channel, channels: 64, below, closed, ..args })?);
        window.notify_channels(u64::MAX)?;
        _ = polled(window.as_fd(), Instant::now())?;
    }
    Ok(())
}

fn write_back(rig: &mut Rig) -> Result<Verdict> {
    let guest: &mut Guest = rig.solo()?;
    guest.run("mapping::write_back", &[])?;
    Ok(Verdict::Done)
}

/// Compares what the module reports about its caching with the kernel's own list.
fn guest_write_back(args: &[String]) -> Result<()> {
    let (ends, _) = Ends::from_args(args)?;
    let link = ends.link()?;
    for (args, address) in [(OWN, &ends.own), (PEER, &ends.peer)] {
        let node = open_node(address)?;
        let mapping = Mapping::readable(link.window(&args)?.as_fd(), PAGE)?;
        _ = mapping.load(0);
        ensure!(sys::info(&node)?.flags & sys::INFO_WRITE_BACK != 0, "{address}: not write-back, says the module");
        ensure!(memory_type(address)? == "write-back", "{address} is {}", memory_type(address)?);
    }
    // The doorbell's memory is below 4 GiB, where firmware forbids caching, and the module has to report that.
    let below = sys::info(open_node(&ends.doorbell)?)?.flags & sys::INFO_WRITE_BACK != 0;
    ensure!(below == (memory_type(&ends.doorbell)? == "write-back"), "the doorbell: {}", memory_type(&ends.doorbell)?);
    Ok(())
}

/// Reads the memory type from the kernel's list: `PAT: [mem 0x0000000100000000-0x0000000100400000] write-back`.
fn memory_type(address: &str) -> Result<String> {
    let resources = fs::read_to_string(format!("/sys/bus/pci/devices/{address}/resource"))?;
    let start = resources.lines().nth(2).and_then(|line| line.split(' ').next()).unwrap_or_default();
    let start = start.trim_start_matches("0x");
    let list = fs::read_to_string("/sys/kernel/debug/x86/pat_memtype_list")?;
    let line = list.lines().find(|line| line.contains(&format!("0x{start}-")));
    let line = line.ok_or_else(|| Error::new(format!("{address} at {start} is not in: {list}")))?;
    Ok(line.rsplit(' ').next().unwrap_or_default().to_owned())
}
