// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ways in which an endpoint ends: a program is killed, a window is closed, a link is hung up.

use super::{Case, Half, Verdict};
use crate::rig::Rig;
use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Instant;
use tombolo_e2e::ensure;
use tombolo_e2e::error::Result;
use tombolo_e2e::guest::sys::{self, LinkArgs, Mapping, WindowArgs, errno};
use tombolo_e2e::guest::{Ends, open_node, polled};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::wire::End;

pub const CASES: &[Case] = &[
    Case { name: "killed_program_is_closed_and_its_peer_rung", run: killed },
    Case { name: "final_state_is_left_alone", run: final_state },
    Case { name: "link_tells_of_windows_that_went", run: departures },
    Case { name: "link_is_found_again", run: found_again },
    Case { name: "hung_up_link_ends_all_waits", run: hung_up },
];
pub const HALVES: &[Half] = &[
    ("death::hold", hold),
    ("death::departures", guest_departures),
    ("death::found_again", guest_found_again),
    ("death::hung_up", guest_hung_up),
];

const SIGKILL: i32 = 9;
const OPEN: u8 = 1;
const CLOSED: u8 = 2;
const ABORTED: u8 = 3;
/// Offsets of the states in a segment, as the layout defines them.
const STATES: [u32; 2] = [0x188, 0x208];

/// Four pages of the guest's own half with states and two channels.
const WINDOW: WindowArgs = WindowArgs {
    cookie: 77,
    offset: 0x10000,
    length: 0x4000,
    flags: 0,
    channel: 8,
    channels: 2,
    below: CLOSED as u16,
    closed: ABORTED as u16,
    state: STATES,
};

fn killed(rig: &mut Rig) -> Result<Verdict> {
    let states = after_kill(rig, [OPEN, OPEN])?;
    ensure!(states == [ABORTED, ABORTED], "the states are {states:?}");
    Ok(Verdict::Done)
}

fn final_state(rig: &mut Rig) -> Result<Verdict> {
    let states = after_kill(rig, [CLOSED, OPEN])?;
    ensure!(states == [CLOSED, ABORTED], "the states are {states:?}");
    Ok(Verdict::Done)
}

/// Kills a program that holds a window in these states. Returns the states that the peer sees once it is notified.
fn after_kill(rig: &mut Rig, states: [u8; 2]) -> Result<[u8; 2]> {
    let guest = rig.solo()?;
    let [one, two] = states.map(|state| state.to_string());
    let job = guest.start("death::hold", &[&one, &two])?;
    ensure!(guest.vm.line(job, within(60))? == "ready", "not ready");
    guest.quiet()?;
    let start = Instant::now();
    guest.vm.kill(job)?;
    guest.wait_notified(within(60))?;
    println!("rung {:?} after the order to kill", start.elapsed());
    let output = guest.vm.wait(job, within(60))?;
    ensure!(output.end == End::Signal(SIGKILL), "it ended otherwise: {output:?}");
    let own = guest.own()?;
    let mut seen = [0; 2];
    for (seen, at) in seen.iter_mut().zip(STATES) {
        *seen = own.read(WINDOW.offset + u64::from(at), 1)?[0];
    }
    Ok(seen)
}

fn hold(args: &[String]) -> Result<()> {
    let (ends, rest) = Ends::from_args(args)?;
    let window = ends.link()?.window(&WINDOW)?;
    let mapping = Mapping::writable(&window, 0x4000)?;
    for (at, state) in STATES.into_iter().zip(rest) {
        mapping.store(at as usize, state.parse()?);
    }
    println!("ready");
    window.wait().map(drop)
}

fn departures(rig: &mut Rig) -> Result<Verdict> {
    rig.solo()?.run("death::departures", &[])?;
    Ok(Verdict::Done)
}

fn guest_departures(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let other = WindowArgs { cookie: 78, channel: 20, ..WINDOW };
    let (one, two) = (link.window(&WINDOW)?, link.window(&other)?);
    let (listed, count) = sys::windows(&link.0, 1)?;
    ensure!((listed.len(), count) == (1, 2), "{count} windows, {listed:?}");
    let (mut listed, _) = sys::windows(&link.0, 9)?;
    listed.sort_by_key(|window| window.cookie);
    ensure!(listed == [WINDOW, other], "{listed:?}");
    ensure!(polled(link.0.as_fd(), Instant::now())?.is_empty(), "told of nothing");
    // A mapping holds a window as well as a descriptor does.
    let mapping = Mapping::readable(&one, 0x1000)?;
    drop(one);
    ensure!(sys::windows(&link.0, 9)?.1 == 2, "a mapped window went");
    drop(mapping);
    ensure!(polled(link.0.as_fd(), within(60))? == PollFlags::IN, "not told");
    ensure!(sys::windows(&link.0, 9)?.0 == [other], "the wrong one went");
    ensure!(polled(link.0.as_fd(), Instant::now())?.is_empty(), "told twice");
    // The channels of the closed window are free again.
    drop(link.window(&WINDOW)?);
    drop(two);
    Ok(())
}

fn found_again(rig: &mut Rig) -> Result<Verdict> {
    rig.solo()?.run("death::found_again", &[])?;
    Ok(Verdict::Done)
}

/// A broker that was restarted finds its links, and cannot make a link that overlaps one.
fn guest_found_again(args: &[String]) -> Result<()> {
    let (ends, _) = Ends::from_args(args)?;
    let link = ends.link()?;
    let window = link.window(&WINDOW)?;
    drop(link);
    let link = ends.link()?;
    ensure!(sys::windows(&link.0, 9)?.0 == [WINDOW], "another link");
    let (own, peer, doorbell) = (open_node(&ends.own)?, open_node(&ends.peer)?, open_node(&ends.doorbell)?);
    let across =
        LinkArgs { own_length: 0x2000, peer_length: 0x1000, wait_vector: 1, ..LinkArgs::new(&peer, &doorbell) };
    ensure!(errno(sys::link(&own, &across)) == Some(Errno::BUSY), "a link across another one");
    drop((link, window));
    sys::link(&own, &across)?;
    Ok(())
}

fn hung_up(rig: &mut Rig) -> Result<Verdict> {
    rig.solo()?.run("death::hung_up", &[])?;
    Ok(Verdict::Done)
}

fn guest_hung_up(args: &[String]) -> Result<()> {
    let (ends, _) = Ends::from_args(args)?;
    let link = ends.link()?;
    let window = link.window(&WINDOW)?;
    let quiet = link.window(&WindowArgs { channel: 20, ..WINDOW })?;
    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    sys::eventfd(&quiet, 0, event.as_raw_fd())?;
    let mapping = Mapping::writable(&window, 0x1000)?;
    mapping.store(0, 1);
    std::thread::scope(|scope| -> Result<()> {
        let waiter = scope.spawn(|| window.wait().map_err(|why| why.to_string()));
        sys::hang_up(&link.0)?;
        ensure!(waiter.join().is_ok_and(|end| end == Ok(0)), "the wait did not end as it should");
        Ok(())
    })?;
    for fd in [window.as_fd(), link.0.as_fd()] {
        ensure!(polled(fd, within(60))?.contains(PollFlags::HUP), "poll does not tell");
    }
    ensure!(polled(event.as_fd(), within(60))? == PollFlags::IN, "the eventfd was not signalled");
    ensure!(mapping.load(0) == 1, "the memory went");
    window.notify_channels(0b11)?; // Does nothing, and does not fail.
    ensure!(errno(sys::window(&link.0, &WINDOW)) == Some(Errno::NODEV), "a new window of a link that was hung up");
    ensure!(ends.link().is_err(), "found again though hung up");
    drop((window, quiet, mapping, link));
    ends.link().map(drop)
}
