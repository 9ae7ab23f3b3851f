// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Event channels: a notification reaches the waiter that it is for, and nobody else; and too many notifications are
//! held back.

use super::{Case, Half, Verdict};
use crate::parts::checks_itself;
use crate::rig::{Guest, Rig};
use rustix::event::{EventfdFlags, PollFlags, epoll, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::json;
use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::sys::{self, WindowArgs, errno};
use tombolo_e2e::guest::{Ends, Link, Window, open_node, polled};
use tombolo_e2e::line_reader::within;

pub const CASES: &[Case] = &[
    Case { name: "sleeper_in_a_guest_hears_the_host", run: from_host },
    Case { name: "host_hears_a_guest", run: to_host },
    Case { name: "channels_are_apart", run: apart },
    Case { name: "rings_without_a_doorbell_are_made_up_for", run: redirected },
    Case { name: "rings_while_the_machine_is_suspended_are_heard", run: suspended },
    Case { name: "storm_is_bounded_and_counted", run: storm },
    Case { name: "storm_of_true_rings_is_bounded_too", run: flood },
    Case { name: "rings_of_an_eventfd_that_thousands_watch_are_bounded_in_time", run: watched },
    Case { name: "sleepers_in_two_guests_hear_each_other", run: between_guests },
];
pub const HALVES: &[Half] = &[
    ("doorbells::listen", listen),
    ("doorbells::ring", ring),
    ("doorbells::apart", guest_apart),
    ("doorbells::redirected", guest_redirected),
    ("doorbells::counters", counters),
    ("doorbells::doze", doze),
    ("doorbells::suspend", suspend),
    ("doorbells::flooded", flooded),
    ("doorbells::watched", guest_watched),
    ("doorbells::ping", ping),
    ("doorbells::pong", pong),
];

/// Offset of the sequence words of a region half, and the first channel of this module's window.
const SEQUENCE_WORDS: u64 = 0x800;
const CHANNEL: u32 = 5;
/// `TOMBOLO_NOBODY`
const NOBODY: u16 = 0xffff;
/// One page of the guest's own half, with two channels.
const WINDOW: WindowArgs = WindowArgs {
    cookie: 5,
    offset: 4096,
    length: 4096,
    flags: 0,
    channel: CHANNEL,
    channels: 2,
    below: 0,
    closed: 0,
    state: [0; 2],
};

/// Notifies as the peer's driver would: first the sequence word in the peer's own memory, then the doorbell.
fn notify_as_host(guest: &Guest, channel: u32) -> Result<()> {
    let at = SEQUENCE_WORDS + u64::from(CHANNEL + channel) * 4;
    let word = guest.peer()?.read(at, 4)?;
    let word = u32::from_le_bytes(word.try_into().map_err(|_| Error::new("four bytes"))?);
    guest.peer()?.write(at, &word.wrapping_add(1).to_le_bytes())?;
    guest.board()?.0.notify(guest.id, 1)
}

fn from_host(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let job = guest.start("doorbells::listen", &["3"])?;
    ensure!(guest.vm.line(job, within(60))? == "ready", "not ready");
    for (channel, heard) in [(0, "1"), (1, "2"), (0, "1")] {
        notify_as_host(guest, channel)?;
        let line = guest.vm.line(job, within(60))?;
        ensure!(line == heard, "channel {channel} was heard as {line}");
    }
    guest.vm.wait(job, within(60))?.success()?;
    Ok(Verdict::Done)
}

/// Prints the channels that are notified, so many times.
fn listen(args: &[String]) -> Result<()> {
    let (ends, rest) = Ends::from_args(args)?;
    let window = ends.link()?.window(&WINDOW)?;
    println!("ready");
    for _ in 0..rest.first().map_or(Ok(1), |times| times.parse::<u32>())? {
        println!("{}", window.wait()?);
    }
    Ok(())
}

fn to_host(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let word = |guest: &Guest| guest.own()?.read(SEQUENCE_WORDS + u64::from(CHANNEL + 1) * 4, 4);
    let before = word(guest)?;
    guest.quiet()?;
    let job = guest.start("doorbells::ring", &[])?;
    guest.wait_notified(within(60))?;
    ensure!(word(guest)? != before, "notified without a sequence word");
    guest.vm.wait(job, within(60))?.success()?;
    Ok(Verdict::Done)
}

fn ring(args: &[String]) -> Result<()> {
    Ends::from_args(args)?.0.link()?.window(&WINDOW)?.notify_channels(0b10)
}

fn redirected(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let word = |guest: &Guest| guest.own()?.read(SEQUENCE_WORDS + u64::from(CHANNEL) * 4, 4);
    let before = word(guest)?;
    guest.quiet()?;
    let job = guest.start("doorbells::redirected", &[])?;
    ensure!(guest.vm.line(job, within(60))? == "rung nobody", "not ready");
    ensure!(guest.wait_notified(Instant::now()).is_err(), "a doorbell that was taken away was rung");
    ensure!(word(guest)? != before, "a ring was not counted");
    notify_as_host(guest, 0)?;
    // Nothing else notifies the host: only the change of the doorbell does, for the earlier notification.
    guest.wait_notified(within(60))?;
    ensure!(guest.vm.line(job, within(60))? == "changed", "not changed");
    ensure!(guest.wait_notified(Instant::now()).is_err(), "rung twice");
    guest.vm.kill(job)?;
    guest.vm.wait(job, within(60)).map(drop)?;
    Ok(Verdict::Done)
}

/// Notifies while there is no peer to notify; once the host has notified it, makes the peer reachable again.
fn guest_redirected(args: &[String]) -> Result<()> {
    let (ends, _) = Ends::from_args(args)?;
    let link = ends.link()?;
    let window = link.window(&WINDOW)?;
    sys::set_notify_target(&link.0, NOBODY, 0)?;
    window.notify_channels(0b1)?;
    println!("rung nobody");
    window.wait()?;
    sys::set_notify_target(&link.0, ends.notify_peer, ends.notify_vector)?;
    println!("changed");
    window.wait().map(drop)
}

fn apart(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let job = guest.start("doorbells::apart", &[])?;
    for step in ["poll", "eventfd"] {
        let line = guest.vm.line(job, within(60))?;
        ensure!(line == step, "`{line}` instead of `{step}`");
        notify_as_host(guest, 1)?;
    }
    guest.vm.wait(job, within(60))?.success()?;
    Ok(Verdict::Done)
}

fn guest_apart(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let window = link.window(&WINDOW)?;
    // A channel that is taken stays taken, and a channel that is not the window's cannot be notified.
    let next = WindowArgs { channel: CHANNEL + 1, ..WINDOW };
    ensure!(errno(sys::window(&link.0, &next)) == Some(Errno::BUSY), "a channel has two owners");
    let other = link.window(&WindowArgs { channel: CHANNEL + 2, ..WINDOW })?;
    ensure!(window.notify_channels(0b100).is_err(), "rings somebody else's channel");
    ensure!(link.window(&WindowArgs { channels: 0, ..WINDOW })?.notify_channels(1).is_err(), "rings without channels");

    fcntl_setfl(&window, OFlags::NONBLOCK)?;
    fcntl_setfl(&other, OFlags::NONBLOCK)?;
    ensure!(nothing(&window)? && nothing(&other)?, "an event before the first ring");
    println!("poll");
    ensure!(polled(window.as_fd(), within(60))? == PollFlags::IN, "poll says something else");
    ensure!(nothing(&other)?, "the other window hears it");
    ensure!(window.wait()? == 0b10, "another channel");
    ensure!(nothing(&window)?, "an event stays after it was read");

    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    sys::eventfd(&window, 1, event.as_raw_fd())?;
    println!("eventfd");
    ensure!(polled(event.as_fd(), within(60))? == PollFlags::IN, "the eventfd was not signalled");
    ensure!(nothing(&window)?, "the event came twice");
    sys::eventfd(&window, 1, -1)?;
    ensure!(errno(sys::eventfd(&window, 2, -1)) == Some(Errno::INVAL), "a channel beyond the window");
    ensure!(errno(sys::eventfd(&window, 0, window.0.as_raw_fd())) == Some(Errno::INVAL), "no eventfd at all");
    Ok(())
}

/// Returns whether a window that does not block has no event.
fn nothing(window: &Window) -> Result<bool> {
    let quiet = polled(window.as_fd(), Instant::now())?.is_empty();
    Ok(quiet && errno(rustix::io::read(window, &mut [0_u8; 8])) == Some(Errno::AGAIN))
}

/// Tests interrupts that come while a machine is suspended to memory: they are lost with the state of its processors.
fn suspended(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    let job = guest.start("doorbells::doze", &[])?;
    ensure!(guest.vm.line(job, within(60))? == "ready", "not ready");
    let sleep = guest.start("doorbells::suspend", &[])?;
    guest.vm.qmp.event(|event| event["event"] == "SUSPEND", within(60)).context("no suspend")?;
    notify_as_host(guest, 0)?;
    guest.vm.qmp.run("system_wakeup", &json!({}))?;
    guest.vm.wait(sleep, within(60)).context("it does not wake")?.success()?;
    ensure!(guest.vm.line(job, within(60)).context("what came meanwhile is lost")? == "heard", "not heard");
    guest.vm.wait(job, within(60))?.success()?;
    Ok(Verdict::Done)
}

/// Waits for a notification at an eventfd, which no program checks again merely because the machine woke up.
fn doze(args: &[String]) -> Result<()> {
    let window = Ends::from_args(args)?.0.link()?.window(&WINDOW)?;
    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    sys::eventfd(&window, 0, event.as_raw_fd())?;
    println!("ready");
    rustix::io::read(&event, &mut [0_u8; 8])?;
    println!("heard");
    Ok(())
}

/// Suspends the machine to memory, and returns when the machine is back.
fn suspend(_: &[String]) -> Result<()> {
    Ok(fs::write("/sys/power/state", "mem")?)
}

/// The host notifies as fast as it can, without need. That must lead to few interrupts, and a waiter must still learn
/// of real notifications.
fn storm(rig: &mut Rig) -> Result<Verdict> {
    const LONG: Duration = Duration::from_secs(3);
    let guest = rig.solo()?;
    let job = guest.start("doorbells::listen", &["1"])?;
    ensure!(guest.vm.line(job, within(60))? == "ready", "not ready");
    let (interrupts, storms) = count(guest)?;
    let mut rings = 0_u64;
    let end = Instant::now() + LONG;
    while Instant::now() < end {
        guest.board()?.0.notify(guest.id, 1)?;
        rings += 1;
    }
    let (after, storms_after) = count(guest)?;
    let came = after - interrupts;
    println!("{rings} rings in {LONG:?}: {came} interrupts, closed {} times", storms_after - storms);
    if checks_itself() && storms_after == storms {
        guest.vm.kill(job)?;
        guest.vm.wait(job, within(60))?;
        let why = format!("{came} interrupts in {LONG:?} under a kernel that checks itself are no storm");
        return Ok(Verdict::Skip { need: "speed", why });
    }
    ensure!(storms_after > storms, "no storm was counted: {came} interrupts");
    ensure!(came < 10_000, "{came} interrupts in {LONG:?}");
    notify_as_host(guest, 0)?;
    ensure!(guest.vm.line(job, within(10))? == "1", "not heard after the storm");
    guest.vm.wait(job, within(60))?.success()?;
    Ok(Verdict::Done)
}

/// The host changes all sequence words each time that it notifies, so that no interrupt is spurious and each wakes as
/// many waiters as there are. The wakes are what costs: under emulation interrupts alone are too few for a storm,
/// whatever the budget.
fn flood(rig: &mut Rig) -> Result<Verdict> {
    const LONG: Duration = Duration::from_secs(3);
    let guest = rig.solo()?;
    let job = guest.start("doorbells::flooded", &[])?;
    ensure!(guest.vm.line(job, within(60))? == "ready", "not ready");
    let (interrupts, storms) = count(guest)?;
    let end = Instant::now() + LONG;
    for word in 1_u32.. {
        guest.peer()?.write(SEQUENCE_WORDS, &word.to_le_bytes().repeat(512))?;
        guest.board()?.0.notify(guest.id, 1)?;
        if Instant::now() >= end {
            break;
        }
    }
    let (after, storms_after) = count(guest)?;
    let events: u64 = guest.vm.line(job, within(60))?.parse()?;
    let (came, closed) = (after - interrupts, storms_after - storms);
    println!("{came} interrupts in {LONG:?}: {events} events, closed {closed} times");
    guest.vm.wait(job, within(60))?.success()?;
    ensure!(closed > 0, "no storm was counted: {came} interrupts brought {events} events");
    Ok(Verdict::Done)
}

/// Number of watchers of one eventfd.
const WATCHERS: usize = 20_000;

/// The host follows the rules and notifies a channel whose eventfd thousands watch. The interrupts and wakes are too
/// few for a storm, but each takes long. Their total time is bounded.
fn watched(rig: &mut Rig) -> Result<Verdict> {
    const LONG: Duration = Duration::from_secs(3);
    let guest = rig.solo()?;
    let job = guest.start("doorbells::watched", &[])?;
    let once = guest.vm.line(job, within(120))?;
    let once = Duration::from_micros(once.parse().context(once)?);
    let (interrupts, storms) = count(guest)?;
    let end = Instant::now() + LONG;
    while Instant::now() < end {
        notify_as_host(guest, 0)?;
    }
    let (after, storms_after) = count(guest)?;
    let events: u32 = guest.vm.line(job, within(60))?.parse()?;
    let (came, closed) = (after - interrupts, storms_after - storms);
    println!("{came} interrupts in {LONG:?}: {events} events of {once:?} each, closed {closed} times");
    guest.vm.wait(job, within(60))?.success()?;
    ensure!(closed > 0, "the vector was never closed: {came} interrupts brought {events} events of {once:?}");
    ensure!(once * events < LONG * 7 / 10, "{events} events of {once:?} in {LONG:?}");
    notify_as_host(guest, 0)?;
    Ok(Verdict::Done)
}

/// Has very many watch an eventfd, prints how many microseconds it takes to wake them all, and then how often they were
/// woken.
fn guest_watched(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let window = link.window(&WINDOW)?;
    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    let most = Rlimit { current: Some(2 * WATCHERS as u64), maximum: Some(2 * WATCHERS as u64) };
    setrlimit(Resource::Nofile, most)?;
    let watch = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let copies = (0..WATCHERS).map(|_| event.try_clone()).collect::<std::io::Result<Vec<_>>>()?;
    for copy in &copies {
        epoll::add(&watch, copy, epoll::EventData::new_u64(0), epoll::EventFlags::IN | epoll::EventFlags::ET)?;
    }
    let mut bytes = [0_u8; 8];
    let mut once = Duration::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        rustix::io::write(&event, &1_u64.to_ne_bytes())?;
        once = once.min(start.elapsed());
    }
    rustix::io::read(&event, &mut bytes)?;
    sys::eventfd(&window, 0, event.as_raw_fd())?;
    println!("{}", once.as_micros());
    let (mut events, mut last) = (0, None);
    while last.is_none_or(|last: Instant| last.elapsed() < Duration::from_secs(2)) {
        if !polled(event.as_fd(), Instant::now() + Duration::from_millis(100))?.is_empty() {
            rustix::io::read(&event, &mut bytes)?;
            (events, last) = (events + u64::from_ne_bytes(bytes), Some(Instant::now()));
        }
    }
    println!("{events}");
    Ok(())
}

/// Budget for the cost of interrupts within a tick.
const BUDGET: &str = "/sys/module/tombolo_ivshmem/parameters/budget";

/// Sends the notifications of 384 channels to an eventfd, and prints how many came once none has come for a second.
fn flooded(args: &[String]) -> Result<()> {
    let link = Ends::from_args(args)?.0.link()?;
    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    let windows = (0..6).map(|number| link.window(&WindowArgs { channel: 64 * (number + 1), channels: 64, ..WINDOW }));
    let windows: Vec<Window> = windows.collect::<Result<_>>()?;
    for window in &windows {
        (0..64).try_for_each(|channel| sys::eventfd(window, channel, event.as_raw_fd()))?;
    }
    // Makes one interrupt exceed the budget already, however slow this machine is.
    fs::write(BUDGET, "256")?;
    println!("ready");
    let (mut events, mut last) = (0, None);
    while last.is_none_or(|last: Instant| last.elapsed() < Duration::from_secs(1)) {
        if !polled(event.as_fd(), Instant::now() + Duration::from_millis(100))?.is_empty() {
            let mut bytes = [0_u8; 8];
            rustix::io::read(&event, &mut bytes)?;
            (events, last) = (events + u64::from_ne_bytes(bytes), Some(Instant::now()));
        }
    }
    println!("{events}");
    Ok(fs::write(BUDGET, "1024")?)
}

fn count(guest: &mut Guest) -> Result<(u64, u64)> {
    let text = guest.run("doorbells::counters", &[])?;
    let (interrupts, storms) = text.split_once(' ').ok_or_else(|| Error::new("no counters"))?;
    Ok((interrupts.parse()?, storms.parse()?))
}

fn counters(args: &[String]) -> Result<()> {
    let info = sys::info(open_node(&Ends::from_args(args)?.0.doorbell)?)?;
    println!("{} {}", info.interrupts, info.storms);
    Ok(())
}

/// Each side sleeps until the other notifies it, by turns: a lost notification makes the case end at the deadline.
fn between_guests(rig: &mut Rig) -> Result<Verdict> {
    let (mut a, mut b, _board) = rig.pair()?;
    for (first, second) in [("doorbells::ping", "doorbells::pong"), ("doorbells::pong", "doorbells::ping")] {
        let (one, two) = (a.start(first, &["200"])?, b.start(second, &["200"])?);
        let (pinger, job) = if first == "doorbells::ping" { (&mut a, one) } else { (&mut b, two) };
        pinger.vm.wait(job, within(120))?.success()?;
        let (ponger, job) = if first == "doorbells::ping" { (&mut b, two) } else { (&mut a, one) };
        ponger.vm.wait(job, within(120))?.success()?;
    }
    a.vm.finish()?;
    b.vm.finish()?;
    Ok(Verdict::Done)
}

fn ping(args: &[String]) -> Result<()> {
    let (_link, window, times) = paired(args)?;
    // The other side may not be there yet, and earlier notifications are dropped, so this side notifies until one is
    // answered.
    while polled(window.as_fd(), Instant::now() + Duration::from_millis(50))?.is_empty() {
        window.notify_channels(0b10)?;
    }
    for _ in 0..times {
        ensure!(window.wait()? & 0b01 != 0, "rung at the wrong channel");
        window.notify_channels(0b10)?;
    }
    Ok(())
}

fn pong(args: &[String]) -> Result<()> {
    let (_link, window, times) = paired(args)?;
    for _ in 0..=times {
        ensure!(window.wait()? & 0b10 != 0, "rung at the wrong channel");
        window.notify_channels(0b01)?;
    }
    Ok(())
}

fn paired(args: &[String]) -> Result<(Link, Window, u32)> {
    let (ends, rest) = Ends::from_args(args)?;
    let link = ends.link()?;
    let window = link.window(&WINDOW)?;
    Ok((link, window, rest.first().ok_or_else(|| Error::new("how often?"))?.parse()?))
}
