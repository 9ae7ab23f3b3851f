// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo ls`: lists the channels, accelerated TCP connections and listeners of this kernel.

use std::{path::PathBuf, time::Duration};

use serde::Serialize;
use tombolo_inspect::{
    Bytes, Channel, Counters, Endpoint, Growth, Half, Listener, ListenerState, Machine, Mode, OrphanedGrants, Socket,
    State, Summary, Transport, View, inspect, known_folders,
};

use crate::{failure::Result, human, output};

/// List the channels and listeners of this machine
///
/// Finds the channels of all programs that this user may look into, through /proc; the programs are not asked and take
/// no notice. For each: where its two ends met, who is at them, how it fares, and for both directions the ring, what is
/// in it, and what the two ends counted. Then the TCP connections of programs under `tombolo run`, with the bytes that
/// went by each path and why they are on TCP if they are. Of channels to other machines under QEMU, or to their host,
/// the broker of this kernel tells: which machine, how it fares, by which link. Then the sockets in the folder of
/// services (for root: of all users), with those that nobody listens at any more. At last listeners for other machines
/// and other domains of Xen's, and pages of programs that died, which tombolod keeps until the other domain has said
/// that it unmapped them.
///
/// Exit codes: 0 if it was possible to look, whatever was found; 1 if not; 2 if the options make no sense or a FOLDER
/// cannot be looked into.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub folders: Folders,
    /// Print lines of JSON: one for each channel and listener, and a summary
    #[arg(long)]
    pub json: bool,
}

/// Where to look for listeners.
#[derive(Debug, clap::Args)]
pub struct Folders {
    /// Look for listeners in this folder instead of the folder of services; may be given more than once
    #[arg(long = "folder", value_name = "FOLDER")]
    named: Vec<PathBuf>,
}

impl Folders {
    /// Returns the folders that were named, or else the known ones.
    pub fn all(&self) -> Vec<PathBuf> {
        if self.named.is_empty() { known_folders() } else { self.named.clone() }
    }
}

/// One line of JSON: a type and its data.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Channel(&'a Channel),
    Socket(&'a Socket),
    Listener(&'a Listener),
    Kept(&'a OrphanedGrants),
    Summary(&'a Summary),
}

/// Carries out the command.
pub fn run(args: &Args) -> Result<()> {
    let view = inspect(&args.folders.all())?;
    output::unless_unread(if args.json { json(&view) } else { output::print(text(&view).trim_end()) })
}

/// Prints everything as JSON, a line for each item.
pub fn json(view: &View) -> Result<()> {
    view.channels.iter().try_for_each(|channel| output::json(&Line::Channel(channel)))?;
    view.sockets.iter().try_for_each(|socket| output::json(&Line::Socket(socket)))?;
    view.listeners.iter().try_for_each(|listener| output::json(&Line::Listener(listener)))?;
    view.kept.iter().try_for_each(|kept| output::json(&Line::Kept(kept)))?;
    output::json(&Line::Summary(&view.summary))
}

fn text(view: &View) -> String {
    let mut lines: Vec<String> = view.channels.iter().flat_map(channel).collect();
    if view.channels.is_empty() {
        lines.push("no channels".into());
    }
    lines.push(String::new());
    if !view.sockets.is_empty() {
        lines.push("TCP connections".into());
        lines.extend(view.sockets.iter().map(socket));
        lines.push(String::new());
    }
    if !view.listeners.is_empty() {
        lines.push("listeners".into());
        lines.extend(view.listeners.iter().map(listener));
        lines.push(String::new());
    }
    if !view.kept.is_empty() {
        lines.push("kept for programs that died, until the other domain has unmapped it".into());
        lines.extend(view.kept.iter().map(kept));
        lines.push(String::new());
    }
    lines.extend(remarks(&view.summary));
    lines.join("\n")
}

/// Describes what could not be seen.
pub fn remarks(summary: &Summary) -> Vec<String> {
    let mut lines = Vec::new();
    if summary.hidden > 0 {
        let all = summary.hidden + summary.processes;
        lines.push(format!("{} of {all} processes could not be looked into; root sees all", summary.hidden));
    }
    if summary.broken > 0 {
        lines.push(format!("{} pieces of memory are called tombolo and are no segments", summary.broken));
    }
    if summary.unlisted > 0 {
        lines.push(format!("{} TCP connections are not listed: their processes have too many", summary.unlisted));
    }
    if let Some(why) = &summary.broker {
        lines.push(format!("channels to other machines are not told: {why}"));
    }
    if summary.let_go > 0 {
        lines.push(format!(
            "{} pages of programs that died were left to the kernel: tombolod had no room",
            summary.let_go
        ));
    }
    lines
}

fn channel(channel: &Channel) -> Vec<String> {
    let mode = match channel.mode {
        Mode::Stream => "stream",
        Mode::Messages => "messages",
    };
    let age = channel.age.map_or("-".into(), |age| human::clock(Duration::from_secs_f64(age)));
    let (address, memory) = (channel.address.as_deref().unwrap_or("-"), human::bytes(channel.memory));
    let quarantine = quarantine(channel).map_or(String::new(), |bytes| format!("  quarantine {}", human::bytes(bytes)));
    let mut lines = vec![format!(
        "{address}  {}  {mode}  age {age}  memory {memory}{quarantine}  id {}",
        shown(channel.state),
        channel.id
    )];
    lines.extend(channel.machine.as_ref().map(machine));
    for (from, pipe) in channel.pipes.iter().enumerate() {
        let [from, to] = [from, 1 - from].map(|end| whom(channel.ends[end].as_ref(), channel));
        let size = |bytes: Option<u64>| bytes.map_or("?".into(), human::bytes);
        let (ring, fill, bytes) = (size(pipe.ring), size(pipe.fill), size(pipe.bytes));
        let growth = pipe.growth.as_ref().map_or(String::new(), growth);
        lines.push(format!("  {from} -> {to}  ring {ring}{growth}  fill {fill}  written {bytes}"));
        lines.extend(pipe.writer.map(|half| self::half("writer", &half)));
        lines.extend(pipe.reader.map(|half| self::half("reader", &half)));
    }
    lines
}

/// Describes how a ring follows its load: ` of 2.00 MiB (bulk)`.
fn growth(Growth { target, reason }: &Growth) -> String {
    format!(" of {} ({reason})", human::bytes(*target))
}

/// Describes the link that a channel is on, and the state of the machine at its other end.
fn machine(machine: &Machine) -> String {
    let Machine { name, life, link, generation, windows, storms } = machine;
    let storms = storms.filter(|storms| *storms > 0).map_or(String::new(), |storms| format!("  storms {storms}"));
    let [own, theirs] = windows.map(human::bytes);
    format!("  {name} {life}  link {link}  generation {generation}  windows {own} here, {theirs} there{storms}")
}

/// Returns the bytes that were retired and that the peer of a channel may still map, if there are any.
fn quarantine(channel: &Channel) -> Option<u64> {
    channel.quarantine.filter(|bytes| *bytes > 0)
}

/// Describes an endpoint as `1234 cat (root)`, or by its machine or domain if it cannot be seen.
fn whom(end: Option<&Endpoint>, channel: &Channel) -> String {
    let Some(end) = end else {
        let machine = channel.machine.as_ref().map(|machine| format!("machine {}", machine.name));
        return machine.or(channel.peer_domain.map(|number| format!("domain {number}"))).unwrap_or("?".into());
    };
    let user = end.user.as_deref().unwrap_or("?");
    let more = if end.shared_with.is_empty() { String::new() } else { format!(" and {} more", end.shared_with.len()) };
    format!("{} {} ({user}){more}", end.pid, end.command)
}

fn half(name: &str, half: &Half) -> String {
    let asleep = if half.asleep { ", asleep" } else { "" };
    let counted = half.counters.map_or(String::new(), |counted| format!("  {}", counters(&counted)));
    format!("    {name} {}{asleep}{counted}", half.phase)
}

fn counters(counted: &Counters) -> String {
    let Counters {
        calls, notifications_sent, notifications_suppressed, notifications_received, sleeps, stalls, ..
    } = counted;
    let Counters { wakeups_spurious, spins_paid, spins_wasted, .. } = counted;
    format!(
        "calls {calls}  stalls {stalls}  sleeps {sleeps} ({wakeups_spurious} for nothing)  notifications sent {notifications_sent}, \
         saved {notifications_suppressed}, received {notifications_received}  spins paid {spins_paid}, wasted {spins_wasted}"
    )
}

fn socket(socket: &Socket) -> String {
    let Socket { pid, command, own, peer, .. } = socket;
    let bytes = |bytes: Bytes| format!("{} shared, {} TCP", human::bytes(bytes.shared), human::bytes(bytes.tcp));
    let (sent, received) = (bytes(socket.sent), bytes(socket.received));
    format!("  {own} - {peer}  {pid} {command}  {}  sent {sent}  received {received}", carried(socket))
}

/// Describes the transport of a connection, with the reason if it is TCP.
pub fn carried(socket: &Socket) -> String {
    let how = match socket.state {
        Transport::Candidate => "TCP so far",
        Transport::Shared => "shared memory",
        Transport::Leaving => "back to TCP",
        Transport::Tcp => "TCP",
    };
    socket.reason.map_or(how.into(), |reason| format!("{how}: {reason}"))
}

fn listener(listener: &Listener) -> String {
    let Listener { address, user, .. } = listener;
    let who = match (&listener.state, listener.pid, &listener.command) {
        (ListenerState::Stale, ..) => "stale: its listener died, the next one replaces it".into(),
        (_, Some(pid), Some(command)) => format!("{pid} {command}"),
        (ListenerState::Listening, ..) => "listening".into(),
        _ => "not to be asked by this user".into(),
    };
    format!("  {address}  {who} ({user})")
}

fn kept(kept: &OrphanedGrants) -> String {
    let OrphanedGrants { address, peer_domain, pages, age, pid, command, user, .. } = kept;
    let age = human::clock(Duration::from_secs_f64(*age));
    format!("  {address}  {pages} pages  domain {peer_domain} may map them  age {age}  {pid} {command} ({user})")
}

/// Returns a state in words for people.
pub fn shown(state: State) -> &'static str {
    match state {
        State::Aborted => "aborted",
        State::PeerGone => "peer gone",
        State::PeerHidden => "peer hidden",
        State::Closed => "closed",
        State::HalfClosed => "half closed",
        State::Paused => "paused",
        State::Opening => "opening",
        State::Open => "open",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_seen_is_said() {
        let summary = Summary { processes: 7, hidden: 3, broken: 1, unlisted: 2, let_go: 4, broker: Some("no".into()) };
        let lines = remarks(&summary);
        assert_eq!(lines[0], "3 of 10 processes could not be looked into; root sees all");
        assert!(lines[1].contains("no segments"));
        assert!(lines[2].starts_with("2 TCP connections"));
        assert!(lines[3].ends_with("not told: no") && lines[4].starts_with("4 pages"));
        assert!(remarks(&Summary { hidden: 0, broken: 0, unlisted: 0, let_go: 0, broker: None, ..summary }).is_empty());
    }

    #[test]
    fn ring_that_follows_its_load_says_how_far_and_why() {
        let growth = growth(&Growth { target: 2 << 20, reason: "bulk" });
        assert_eq!(growth, format!(" of {} (bulk)", human::bytes(2 << 20)));
    }

    #[test]
    fn stale_listener_is_marked() {
        let mut one = Listener {
            address: "local:/a".into(),
            state: ListenerState::Stale,
            uid: 0,
            user: "root".into(),
            pid: None,
            command: None,
        };
        assert!(listener(&one).contains("stale"));
        (one.state, one.pid, one.command) = (ListenerState::Listening, Some(5), Some("cat".into()));
        assert_eq!(listener(&one), "  local:/a  5 cat (root)");
    }
}
