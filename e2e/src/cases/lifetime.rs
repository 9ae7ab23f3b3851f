// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The module is loaded and unloaded, and windows outlive their programs.

use super::{Case, Half, Verdict};
use crate::parts::MODULE;
use crate::rig::Rig;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use tombolo_e2e::agent::{load_module, unload_module};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::sys::{self, Mapping, WindowArgs};
use tombolo_e2e::guest::{Ends, Window, open_node, until};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::module;

pub const CASES: &[Case] = &[
    Case { name: "module_describes_its_devices", run: describes },
    Case { name: "module_answers_32_bit_programs", run: compat },
    Case { name: "last_close_is_that_of_whoever_has_it_last", run: inherited },
    Case { name: "module_loads_and_unloads_100_times", run: reloads },
];
pub const HALVES: &[Half] = &[
    ("lifetime::describe", describe),
    ("lifetime::compat", guest_compat),
    ("lifetime::inherited", guest_inherited),
    ("lifetime::heir", heir),
    ("lifetime::reload", reload),
    ("lifetime::say", write_kernel_log),
    ("lifetime::panic", panic),
];

fn describes(rig: &mut Rig) -> Result<Verdict> {
    rig.solo()?.run("lifetime::describe", &[])?;
    Ok(Verdict::Done)
}

fn describe(args: &[String]) -> Result<()> {
    let (ends, _) = Ends::from_args(args)?;
    let (doorbell, own) = (sys::info(open_node(&ends.doorbell)?)?, sys::info(open_node(&ends.own)?)?);
    ensure!(doorbell.version == 2 && own.version == 2, "{doorbell:?} {own:?}");
    ensure!(doorbell.flags & sys::INFO_DOORBELL != 0 && doorbell.vectors == 4, "{doorbell:?}");
    ensure!(own.flags & sys::INFO_DOORBELL == 0 && own.vectors == 0, "{own:?}");
    ensure!(own.size == crate::rig::REGION && own.reserved == [0; 3], "{own:?}");
    Ok(())
}

fn compat(rig: &mut Rig) -> Result<Verdict> {
    rig.solo()?.run("lifetime::compat", &[])?;
    Ok(Verdict::Done)
}

fn guest_compat(args: &[String]) -> Result<()> {
    let node = open_node(&Ends::from_args(args)?.0.own)?;
    let (info, other) = (sys::info(&node)?, sys::info_of_32_bit(&node)?);
    ensure!((info.version, info.flags, info.size) == (other.version, other.flags, other.size), "{info:?} {other:?}");
    // This call is a sample for all: the header's structures have no holes, and each is as long as a 32-bit compiler
    // makes it.
    Ok(())
}

/// One page of the guest's own half with a state in its first byte.
const WINDOW: WindowArgs = WindowArgs {
    cookie: 3,
    offset: 0x30000,
    length: 0x1000,
    flags: 0,
    channel: 40,
    channels: 1,
    below: 2,
    closed: 3,
    state: [0; 2],
};

fn inherited(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    guest.run("lifetime::inherited", &[])?;
    guest.wait_notified(within(10)).context("the peer was not rung")?;
    Ok(Verdict::Done)
}

/// Tests a window that a copy of a killed program has mapped, and one that is in flight in a socket. A third window is
/// in flight in a socket that is itself in flight in itself. Each window is open as long as somebody could have it, and
/// closed after that.
fn guest_inherited(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let watched = link.window(&WindowArgs { flags: sys::WINDOW_READ_ONLY, channels: 0, below: 0, ..WINDOW })?;
    let watched = Mapping::readable(watched, 0x1000)?;
    let open = || -> Result<Window> {
        // A window stores its closed state before its range is free again.
        let mut window = link.window(&WINDOW);
        let is_there = || {
            if window.is_err() {
                window = link.window(&WINDOW);
            }
            window.is_ok()
        };
        until(within(30), is_there).context("the range is not free")?;
        let window = window?;
        Mapping::writable(&window, 0x1000)?.store(0, 1);
        Ok(window)
    };
    let is_open = || watched.load(0) == 1 && link.window(&WINDOW).is_err();
    let closed = |what: &str| until(within(30), || watched.load(0) == 3).context(format!("{what}: still open"));

    let heir = ["guest", "lifetime::heir"];
    let mut heir = Command::new("/agent").args(heir).stdin(open()?.0).stdout(Stdio::piped()).spawn()?;
    let mut copy = String::new();
    BufReader::new(heir.stdout.take().ok_or_else(|| Error::new("no output"))?).read_line(&mut copy)?;
    heir.kill()?;
    heir.wait()?;
    ensure!(is_open(), "closed, though a copy of the killed program has it mapped");
    let copy = Pid::from_raw(copy.trim().parse()?).ok_or_else(|| Error::new("no copy"))?;
    kill_process(copy, Signal::KILL)?;
    closed("mapped by a copy")?;

    let (one, other) = UnixStream::pair()?;
    send(&one, &[open()?.as_fd()])?;
    ensure!(is_open(), "closed on its way");
    drop((one, other));
    closed("in a socket")?;

    let (one, other) = UnixStream::pair()?;
    send(&one, &[open()?.as_fd(), other.as_fd()])?;
    ensure!(is_open(), "closed on its way");
    drop((one, other));
    // The kernel searches for such sockets when a socket is closed.
    until(within(30), || UnixStream::pair().is_ok_and(|_| watched.load(0) == 3)).context("in itself: still open")
}

/// Sends descriptors over a socket, in which they stay in flight.
pub fn send(socket: &UnixStream, fds: &[BorrowedFd<'_>]) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    ensure!(control.push(SendAncillaryMessage::ScmRights(fds)), "no room");
    sendmsg(socket, &[IoSlice::new(b"x")], &mut control, SendFlags::empty())?;
    Ok(())
}

/// Maps the window that is its standard input and makes a copy of itself, which does nothing.
fn heir(_: &[String]) -> Result<()> {
    let _mapping = Mapping::readable(std::io::stdin(), 0x1000)?;
    // From here on only the mapping is left.
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    if let Some(copy) = sys::fork()? {
        println!("{}", copy.as_raw_nonzero());
    }
    loop {
        std::thread::park();
    }
}

fn reloads(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    guest.unload()?;
    guest.end("lifetime::reload", &["100"], within(300))?.success()?;
    guest.load()?;
    guest.run("lifetime::describe", &[])?;
    Ok(Verdict::Done)
}

fn reload(args: &[String]) -> Result<()> {
    let times: u32 = args.last().ok_or_else(|| Error::new("how often?"))?.parse()?;
    for _ in 0..times {
        load_module(MODULE)?;
        unload_module(module::NAME)?;
    }
    Ok(())
}

/// Writes to the kernel's log, as a warning.
fn write_kernel_log(args: &[String]) -> Result<()> {
    Ok(fs::write("/dev/kmsg", format!("<4>{}\n", args.join(" ")))?)
}

fn panic(_: &[String]) -> Result<()> {
    Ok(fs::write("/proc/sysrq-trigger", "c")?)
}
