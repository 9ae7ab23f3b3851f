// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Groups segments by endpoint and endpoints by channel, and determines the state of each channel.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::SystemTime,
};

use serde::Serialize;
use tombolo_control::Progress;
use tombolo_layout::{
    Features,
    local::MEMORY,
    private::COUNTERS,
    state::{Phase, State as StateWord},
    words,
};

use crate::{
    error::Result,
    machine::{Machine, RemoteConnection},
    process::{Identity, Mapping, Process, Scan, printable},
    segment::{Opener, Segment, identity},
    xen::Link,
};

/// A channel, or the endpoint of it that can be seen.
#[derive(Clone, Debug, Serialize)]
pub struct Channel {
    /// Inode of a segment, which no other channel has while this one exists.
    pub id: u64,
    /// Address at which the endpoints met, if the one that listened can be seen.
    pub address: Option<String>,
    /// Whether it carries bytes or messages.
    pub mode: Mode,
    /// State of the channel.
    pub state: State,
    /// Seconds since the endpoints met.
    pub age: Option<f64>,
    /// Bytes of memory of both endpoints.
    pub memory: u64,
    /// Number of the other endpoint's Xen domain, if that is not this one.
    pub peer_domain: Option<u16>,
    /// The other endpoint's virtual machine under QEMU, or its host, and the link to it.
    pub machine: Option<Machine>,
    /// Bytes that were retired and that the peer may still map, if known.
    pub quarantine: Option<u64>,
    /// The endpoints, first the one that listened, if known; `null` for one that cannot be seen.
    pub ends: [Option<Endpoint>; 2],
    /// Pipes from the first endpoint to the second, and back.
    pub pipes: [Pipe; 2],
}

/// Contents of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Bytes.
    Stream,
    /// Whole messages.
    Messages,
}

/// State of a channel, worst first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// An endpoint aborted the channel.
    Aborted,
    /// The process of one endpoint is gone, and the other endpoint has not closed yet.
    PeerGone,
    /// One endpoint cannot be seen: this user may not look into its process, or the process is gone.
    PeerHidden,
    /// Both directions are closed.
    Closed,
    /// One direction is closed.
    HalfClosed,
    /// The processes of an endpoint are stopped or frozen.
    Paused,
    /// The two endpoints have not met yet.
    Opening,
    /// Both directions are open.
    Open,
}

/// An endpoint and its process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Endpoint {
    /// Number of the process.
    pub pid: u32,
    /// Name of the process, safe for a terminal.
    pub command: String,
    /// Number of its user.
    pub uid: Option<u32>,
    /// Name of its user.
    pub user: Option<String>,
    /// Whether it is stopped, traced or frozen.
    pub paused: bool,
    /// Whether this is the endpoint that listened.
    pub listened: bool,
    /// Other processes of this endpoint, after a fork.
    pub shared_with: Vec<u32>,
    /// Bytes of memory of this endpoint.
    pub memory: u64,
}

/// One direction of a channel.
#[derive(Clone, Debug, Serialize)]
pub struct Pipe {
    /// Size of the ring in bytes; `null` if its writer cannot be seen.
    pub ring: Option<u64>,
    /// How the ring follows its load; `null` for a ring that does not.
    pub growth: Option<Growth>,
    /// Bytes written and not consumed.
    pub fill: Option<u64>,
    /// Bytes written in total.
    pub bytes: Option<u64>,
    /// State that its writer publishes.
    pub writer: Option<Half>,
    /// State that its reader publishes.
    pub reader: Option<Half>,
}

/// How a ring follows its load (C-12).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Growth {
    /// Size in bytes to which bulk data makes the ring grow.
    pub target: u64,
    /// Reason for the ring's current size.
    pub reason: &'static str,
}

/// State that an endpoint publishes for its half of a pipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Half {
    /// `fresh`, `open`, `closed`, `aborted` or `corrupt`.
    pub phase: &'static str,
    /// Whether it sleeps until the other half makes progress.
    pub asleep: bool,
    /// Its counters, if it publishes them.
    pub counters: Option<Counters>,
}

/// The counters of a stats page (C-12).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Counters {
    /// Messages, or calls that moved bytes.
    pub calls: u64,
    /// Notifications sent.
    pub notifications_sent: u64,
    /// Notifications that were not sent, because the other half had not asked for any.
    pub notifications_suppressed: u64,
    /// Notifications received.
    pub notifications_received: u64,
    /// Times that the half woke and found nothing.
    pub wakeups_spurious: u64,
    /// Times that polling found something before the half had to sleep.
    pub spins_paid: u64,
    /// Times that polling found nothing.
    pub spins_wasted: u64,
    /// Times that the half slept.
    pub sleeps: u64,
    /// Times that there was no room, or nothing to read.
    pub stalls: u64,
}

impl Counters {
    fn new(listed: [u64; COUNTERS]) -> Self {
        let [calls, notifications_sent, notifications_suppressed, notifications_received, wakeups_spurious, rest @ ..] =
            listed;
        let [spins_paid, spins_wasted, sleeps, stalls] = rest;
        Self {
            calls,
            notifications_sent,
            notifications_suppressed,
            notifications_received,
            wakeups_spurious,
            spins_paid,
            spins_wasted,
            sleeps,
            stalls,
        }
    }
}

/// Segments of one endpoint, and its processes.
struct EndpointMemory<'a> {
    /// Segment of generation 0, which has the shared words.
    first: Segment,
    identity: Identity,
    /// Segments of later rings.
    later: Vec<Segment>,
    holders: Vec<&'a Process>,
    /// Path at which the endpoints met, known only for the one that listened.
    path: Option<String>,
    peer_epoch: Option<u64>,
}

/// Processes by mapped memory: the owner, and after a fork its children, map it writable; the peer maps it read-only.
#[derive(Default)]
struct Mapped<'a> {
    writable: HashMap<Identity, Vec<&'a Process>>,
    readable: HashSet<(Identity, u32)>,
}

impl<'a> Mapped<'a> {
    fn by(scan: &'a Scan) -> Self {
        let mut mapped = Self::default();
        for process in &scan.holders {
            for Mapping { identity, writable } in &process.mappings {
                if *writable {
                    mapped.writable.entry(*identity).or_default().push(process);
                } else {
                    mapped.readable.insert((*identity, process.pid));
                }
            }
        }
        mapped
    }
}

/// Returns all channels that `scan` leads to, and the number of pieces of memory that are named as segments and are
/// none.
pub fn find(scan: &Scan) -> Result<(Vec<Channel>, u64)> {
    let mapped = Mapped::by(scan);
    let (mut sides, broken) = sides(scan, &mapped)?;
    let mut channels = Vec::new();
    while let Some(side) = sides.pop() {
        let partners: Vec<usize> = (0..sides.len()).filter(|&at| belong_together(&side, &sides[at], &mapped)).collect();
        // If several endpoints could be the partner, none is claimed to be.
        let partner = if let [only] = partners[..] { Some(sides.swap_remove(only)) } else { None };
        channels.push(channel(side, partner, scan.hidden > 0));
    }
    for process in &scan.holders {
        channels.extend(super::xen::granted(process).links.into_iter().map(|link| foreign(process, link)));
    }
    channels.sort_by_key(|channel| channel.id);
    Ok((channels, broken))
}

/// Opens the memory behind the processes' descriptors, each piece once, and groups it by endpoint.
fn sides<'a>(scan: &'a Scan, mapped: &Mapped<'a>) -> Result<(Vec<EndpointMemory<'a>>, u64)> {
    let opener = Opener::new()?;
    let mut seen = HashSet::new();
    let mut broken = 0;
    let mut rings = BTreeMap::<(u32, u64), Vec<(Identity, Segment, &str)>>::new();
    for process in &scan.holders {
        for (fd, name) in &process.memories {
            let Ok(memory) = opener.open(&format!("/proc/{}/fd/{fd}", process.pid)) else { continue };
            let Ok(identity) = identity(&memory) else { continue };
            // Memory that no process maps writable belongs to no endpoint.
            let Some([owner, ..]) = mapped.writable.get(&identity).map(Vec::as_slice) else { continue };
            if !seen.insert(identity) {
                continue;
            }
            match Segment::map(&memory) {
                Some(segment) => {
                    let end = (owner.pid, segment.header.epoch);
                    rings.entry(end).or_default().push((identity, segment, name));
                }
                None => broken += 1,
            }
        }
    }
    let sides = rings.into_values().filter_map(|mut rings| {
        rings.sort_by_key(|(identity, segment, _)| (segment.header.generation, *identity));
        let mut rings = rings.into_iter();
        let (identity, first, name) = rings.next().filter(|(_, segment, _)| segment.header.generation == 0)?;
        let peer_epoch = first.stats().map(|stats| stats.peer_epoch);
        let path = name.strip_prefix(MEMORY)?.strip_prefix(':').map(printable);
        let holders = mapped.writable.get(&identity)?.clone();
        Some(EndpointMemory {
            first,
            identity,
            later: rings.map(|(_, segment, _)| segment).collect(),
            holders,
            path,
            peer_epoch,
        })
    });
    Ok((sides.collect(), broken))
}

/// Returns whether two endpoints make a channel: each maps the other's segment, and each names the other as its peer.
/// The kernel guarantees the mapping; the names tell channels between the same two processes apart.
fn belong_together(a: &EndpointMemory<'_>, b: &EndpointMemory<'_>, mapped: &Mapped<'_>) -> bool {
    let names = |side: &EndpointMemory<'_>, other: &EndpointMemory<'_>| {
        side.peer_epoch.is_none_or(|epoch| epoch == other.first.header.epoch)
    };
    let maps = |side: &EndpointMemory<'_>, other: &EndpointMemory<'_>| {
        side.holders.iter().any(|process| mapped.readable.contains(&(other.identity, process.pid)))
    };
    names(a, b) && names(b, a) && maps(a, b) && maps(b, a)
}

fn channel(side: EndpointMemory<'_>, partner: Option<EndpointMemory<'_>>, some_hidden: bool) -> Channel {
    // The endpoint that listened comes first, else that of the older process.
    let rank = |side: &EndpointMemory<'_>| (side.path.is_none(), side.holders[0].pid, side.identity);
    let (a, b) = match partner {
        Some(other) if rank(&other) < rank(&side) => (other, Some(side)),
        partner => (side, partner),
    };
    let made = [Some(&a), b.as_ref()].into_iter().flatten().filter_map(|side| side.first.made).max();
    let pipes = [pipe(Some(&a), b.as_ref()), pipe(b.as_ref(), Some(&a))];
    let ends = [Some(a.end()), b.as_ref().map(EndpointMemory::end)];
    let unseen = if some_hidden { State::PeerHidden } else { State::PeerGone };
    Channel {
        id: a.identity.1,
        address: a.path.as_ref().map(|path| format!("local:{path}")),
        mode: mode(a.first.header.features),
        state: state(&ends, &pipes, a.peer_epoch, Some(unseen)),
        age: made.map(age),
        memory: ends.iter().flatten().map(|end| end.memory).sum(),
        peer_domain: None,
        machine: None,
        quarantine: None,
        ends,
        pipes,
    }
}

/// Describes a channel whose other endpoint is in another domain.
pub fn foreign(process: &Process, link: Link) -> Channel {
    let Link { peer, gone, address, greeting, listened, open, quarantine, made, segments } = link;
    let mut rings = segments.into_iter();
    let side = rings.next().filter(|first| first.header.generation == 0).map(|first| {
        let peer_epoch = first.stats().map(|stats| stats.peer_epoch);
        let (identity, path) = ((0, greeting.epoch), None);
        EndpointMemory { first, identity, later: rings.collect(), holders: vec![process], path, peer_epoch }
    });
    let mut pipes = [pipe(side.as_ref(), None), pipe(None, side.as_ref())];
    // For received bytes only the reader is visible here.
    pipes[1].bytes = side.as_ref().map(|side| side.first.word(words::HEAD));
    let memory = side.as_ref().map_or(0, EndpointMemory::memory);
    let ends = [Some(end(&[process], listened, memory)), None];
    let state = match &side {
        Some(side) => state(&ends, &pipes, side.peer_epoch, gone.then_some(State::PeerGone)),
        None if open => State::Opening,
        None => State::Closed,
    };
    Channel {
        // Drawn at random; short enough for a person to compare it.
        id: greeting.epoch >> 24,
        address: Some(address),
        mode: mode(greeting.offered),
        state,
        age: Some(age(made)),
        memory,
        peer_domain: Some(peer),
        machine: None,
        quarantine: Some(quarantine),
        ends,
        pipes,
    }
}

/// Describes a channel whose other endpoint is in another machine, as the broker lists it (B-20).
pub fn remote(process: &Process, connection: RemoteConnection) -> Channel {
    let RemoteConnection { address, machine, row, listened, progress, made, rings } = connection;
    let [own, theirs] = rings.map(|rings| {
        let mut rings = rings.into_iter();
        rings.next().map(|first| {
            let peer_epoch = first.stats().map(|stats| stats.peer_epoch);
            let (identity, path, holders) = ((0, 0), None, Vec::new());
            EndpointMemory { first, identity, later: rings.collect(), holders, path, peer_epoch }
        })
    });
    let pipes = [pipe(own.as_ref(), theirs.as_ref()), pipe(theirs.as_ref(), own.as_ref())];
    let memory = |side: &Option<EndpointMemory<'_>>| side.as_ref().map_or(0, EndpointMemory::memory);
    let ends = [Some(end(&[process], listened, memory(&own))), None];
    let gone = machine.life == "gone" || progress == Progress::Closed;
    let state = match &own {
        _ if progress == Progress::Asked => State::Opening,
        Some(own) => state(&ends, &pipes, own.peer_epoch, gone.then_some(State::PeerGone)),
        None if gone => State::PeerGone,
        None => State::Opening,
    };
    Channel {
        // Drawn at random; short enough for a person to compare it.
        id: own.as_ref().map_or(row, |own| own.first.header.epoch >> 24),
        address,
        mode: own.as_ref().map_or(Mode::Stream, |own| mode(own.first.header.features)),
        state: if machine.life == "paused" { state.min(State::Paused) } else { state },
        age: made.map(age),
        memory: memory(&own) + memory(&theirs),
        peer_domain: None,
        machine: Some(machine),
        quarantine: None,
        ends,
        pipes,
    }
}

fn mode(features: Features) -> Mode {
    if features.has(Features::MESSAGES) { Mode::Messages } else { Mode::Stream }
}

fn age(made: SystemTime) -> f64 {
    SystemTime::now().duration_since(made).unwrap_or_default().as_secs_f64()
}

fn end(holders: &[&Process], listened: bool, memory: u64) -> Endpoint {
    let first = holders[0];
    Endpoint {
        pid: first.pid,
        command: first.command.clone(),
        uid: first.uid,
        user: first.user.clone(),
        paused: holders.iter().all(|process| process.paused),
        listened,
        shared_with: holders[1..].iter().map(|process| process.pid).collect(),
        memory,
    }
}

impl EndpointMemory<'_> {
    fn end(&self) -> Endpoint {
        end(&self.holders, self.path.is_some(), self.memory())
    }

    /// Returns the bytes of its rings.
    fn memory(&self) -> u64 {
        self.rings().map(|segment| segment.header.segment_len).sum()
    }

    fn rings(&self) -> impl Iterator<Item = &Segment> {
        std::iter::once(&self.first).chain(&self.later)
    }
}

fn pipe(from: Option<&EndpointMemory<'_>>, to: Option<&EndpointMemory<'_>>) -> Pipe {
    // The head is read before the tail, with nothing between them, so that an active pipe does not look fuller than it
    // is.
    let head = to.map(|side| side.first.word(words::HEAD));
    let current = from.and_then(|side| {
        let state = StateWord::decode(side.first.word(words::WRITER_STATE))?;
        side.rings().find(|segment| segment.header.generation == state.current)
    });
    let tail = current.map(|ring| ring.word(words::TAIL));
    let room: u64 = from.map_or(0, |side| side.rings().map(|segment| segment.header.capacity).sum());
    Pipe {
        ring: current.map(|ring| ring.header.capacity),
        growth: from.and_then(|side| side.first.growth()).map(|(target, reason)| Growth { target, reason }),
        fill: tail.zip(head).map(|(tail, head)| fill(tail, head, room)),
        bytes: tail.zip(from).map(|(tail, side)| tail.wrapping_sub(side.first.header.start)),
        writer: from.map(|side| {
            let words = (words::WRITER_STATE, words::WANT_SPACE);
            half(side, words, head, side.first.stats().map(|stats| stats.writer))
        }),
        reader: to.map(|side| {
            let words = (words::READER_STATE, words::WANT_DATA);
            half(side, words, tail, side.first.stats().map(|stats| stats.reader))
        }),
    }
}

/// Returns the bytes between two positions that were not read at the same moment.
fn fill(tail: u64, head: u64, room: u64) -> u64 {
    let between = tail.wrapping_sub(head);
    if between > 1 << 63 { 0 } else { between.min(room) }
}

fn half(
    side: &EndpointMemory<'_>,
    (state, want): (usize, usize),
    position: Option<u64>,
    counters: Option<[u64; COUNTERS]>,
) -> Half {
    let want = side.first.word(want);
    let phase = match StateWord::decode(side.first.word(state)).map(|state| state.phase) {
        Some(Phase::Fresh) => "fresh",
        Some(Phase::Open) => "open",
        Some(Phase::Closed) => "closed",
        Some(Phase::Aborted) => "aborted",
        None => "corrupt",
    };
    // An armed wait word that is not reached: the half sleeps, or is about to.
    let asleep = want & 1 == 1 && position.is_none_or(|position| !words::reached(want, position));
    Half { phase, asleep: asleep && phase == "open", counters: counters.map(Counters::new) }
}

/// Determines the state of a channel. `unseen` is its state if the second endpoint cannot be seen, and if that tells
/// anything.
fn state(ends: &[Option<Endpoint>; 2], pipes: &[Pipe; 2], peer_epoch: Option<u64>, unseen: Option<State>) -> State {
    let phases: Vec<&str> =
        pipes.iter().flat_map(|pipe| [pipe.writer, pipe.reader]).flatten().map(|half| half.phase).collect();
    let over = |pipe: &Pipe| {
        [pipe.writer, pipe.reader].into_iter().flatten().any(|half| matches!(half.phase, "closed" | "aborted"))
    };
    if phases.iter().any(|phase| matches!(*phase, "aborted" | "corrupt")) {
        State::Aborted
    } else if ends[1].is_none() && (peer_epoch == Some(0) || phases.contains(&"fresh")) {
        State::Opening
    } else if let (None, Some(unseen)) = (&ends[1], unseen) {
        unseen
    } else if pipes.iter().all(over) {
        State::Closed
    } else if pipes.iter().any(over) {
        State::HalfClosed
    } else if ends.iter().flatten().any(|end| end.paused) {
        State::Paused
    } else if phases.contains(&"fresh") {
        State::Opening
    } else {
        State::Open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fill_of_a_pipe_in_motion_or_of_a_liar_is_in_bounds() {
        assert_eq!(fill(10, 4, 4096), 6);
        assert_eq!(fill(4, 10, 4096), 0, "the reader was looked at later");
        assert_eq!(fill(3, u64::MAX - 2, 4096), 6, "positions wrap");
        assert_eq!(fill(1 << 40, 0, 4096), 4096);
    }

    fn end(paused: bool) -> Option<Endpoint> {
        let (command, user) = (String::from("a"), None);
        Some(Endpoint { pid: 1, command, uid: None, user, paused, listened: true, shared_with: vec![], memory: 8192 })
    }

    fn pipe(writer: &'static str, reader: &'static str) -> Pipe {
        let half = |phase| Some(Half { phase, asleep: false, counters: None });
        Pipe { ring: None, growth: None, fill: None, bytes: None, writer: half(writer), reader: half(reader) }
    }

    #[test]
    fn state_is_the_worst_that_can_be_said() {
        let open = || pipe("open", "open");
        let both = [end(false), end(false)];
        let (named, gone) = (Some(7), Some(State::PeerGone));
        assert_eq!(state(&both, &[open(), open()], named, gone), State::Open);
        assert_eq!(state(&both, &[open(), pipe("closed", "open")], named, gone), State::HalfClosed);
        assert_eq!(state(&both, &[pipe("open", "closed"), pipe("closed", "open")], named, gone), State::Closed);
        assert_eq!(state(&both, &[open(), pipe("aborted", "open")], named, gone), State::Aborted);
        assert_eq!(state(&both, &[open(), pipe("corrupt", "open")], named, gone), State::Aborted);
        assert_eq!(state(&[end(false), end(true)], &[open(), open()], named, gone), State::Paused);
        let alone = [end(false), None];
        assert_eq!(state(&alone, &[open(), open()], named, gone), State::PeerGone);
        assert_eq!(state(&alone, &[open(), open()], named, None), State::Open, "in another domain");
        assert_eq!(state(&alone, &[open(), open()], Some(0), None), State::Opening);
    }
}
