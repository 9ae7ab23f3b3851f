// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sorts segments by endpoint and endpoints by channel, and judges how a channel fares.

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

/// A channel, or that endpoint of it which can be seen.
#[derive(Clone, Debug, Serialize)]
pub struct Channel {
    /// The inode of a segment: its own for as long as the channel lives.
    pub id: u64,
    /// Where the two endpoints met, if the one that listened can be seen.
    pub address: Option<String>,
    /// What it carries.
    pub mode: Mode,
    /// How it fares.
    pub state: State,
    /// Seconds since the endpoints met.
    pub age: Option<f64>,
    /// Bytes of memory, of both endpoints.
    pub memory: u64,
    /// The number of the Xen domain in which the other endpoint is, if that is not this one.
    pub peer_domain: Option<u16>,
    /// The machine under QEMU in which the other endpoint is, or its host, and the link to it.
    pub machine: Option<Machine>,
    /// Bytes that were retired and that the peer may still map, where that is known.
    pub quarantine: Option<u64>,
    /// The endpoint that listened first, where that is known; `null` for one that cannot be seen.
    pub ends: [Option<Endpoint>; 2],
    /// From the first endpoint to the second, and back.
    pub pipes: [Pipe; 2],
}

/// What a channel carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Bytes.
    Stream,
    /// Whole messages.
    Messages,
}

/// How a channel fares, worst first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// An endpoint gave up in the middle.
    Aborted,
    /// The process of one endpoint is gone, and the other has not closed yet.
    PeerGone,
    /// One endpoint cannot be seen: this user may not look into its process, or it is gone.
    PeerHidden,
    /// Both directions are closed.
    Closed,
    /// One direction is closed.
    HalfClosed,
    /// A process of one of the endpoints is stopped or frozen.
    Paused,
    /// The two endpoints have not met yet.
    Opening,
    /// Both directions are open.
    Open,
}

/// The process of an endpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Endpoint {
    /// Its number.
    pub pid: u32,
    /// Its name, as a terminal may show it.
    pub command: String,
    /// The number of its user.
    pub uid: Option<u32>,
    /// The name of its user.
    pub user: Option<String>,
    /// It is stopped, traced or frozen.
    pub paused: bool,
    /// Whether this is the endpoint that listened.
    pub listened: bool,
    /// Other processes of this endpoint, after a fork.
    pub shared_with: Vec<u32>,
    /// Bytes of memory of this endpoint.
    pub memory: u64,
}

/// One direction.
#[derive(Clone, Debug, Serialize)]
pub struct Pipe {
    /// Bytes of the ring; `null` where its writer cannot be seen.
    pub ring: Option<u64>,
    /// How the ring follows its load; `null` for one that does not.
    pub growth: Option<Growth>,
    /// Bytes written and not handed back.
    pub fill: Option<u64>,
    /// Bytes written in all.
    pub bytes: Option<u64>,
    /// What its writer publishes.
    pub writer: Option<Half>,
    /// What its reader publishes.
    pub reader: Option<Half>,
}

/// How a ring follows its load (C-12).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Growth {
    /// Bytes of the ring that bulk grows to.
    pub target: u64,
    /// Why the ring has the size that it has.
    pub reason: &'static str,
}

/// What an endpoint publishes of its half of a pipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Half {
    /// `fresh`, `open`, `closed`, `aborted` or `corrupt`.
    pub phase: &'static str,
    /// Whether it sleeps until the other half gets on.
    pub asleep: bool,
    /// What it counted, if it publishes that.
    pub counters: Option<Counters>,
}

/// The counters of a stats page (C-12).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Counters {
    /// Messages, or calls that moved something.
    pub calls: u64,
    /// Notifications sent.
    pub notifications_sent: u64,
    /// Notifications that nobody had asked for, and that were not sent.
    pub notifications_suppressed: u64,
    /// Notifications received.
    pub notifications_received: u64,
    /// Times that it woke and found nothing.
    pub wakeups_spurious: u64,
    /// Times that polling found something before it came to sleep.
    pub spins_paid: u64,
    /// Times that polling found nothing.
    pub spins_wasted: u64,
    /// Times that it slept.
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

/// The segments of one endpoint, and its processes.
struct EndpointMemory<'a> {
    /// That of generation 0, which has the words.
    first: Segment,
    identity: Identity,
    /// Later rings.
    later: Vec<Segment>,
    holders: Vec<&'a Process>,
    /// Where the ends met, which only the one that listened says.
    path: Option<String>,
    peer_epoch: Option<u64>,
}

/// Who has which memory mapped: its owner, and after a fork the owner's children, writable; the peer read-only.
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

/// All channels that `scan` leads to, and how many pieces of memory were called segments and are none.
pub fn find(scan: &Scan) -> Result<(Vec<Channel>, u64)> {
    let mapped = Mapped::by(scan);
    let (mut sides, broken) = sides(scan, &mapped)?;
    let mut channels = Vec::new();
    while let Some(side) = sides.pop() {
        let partners: Vec<usize> = (0..sides.len()).filter(|&at| belong_together(&side, &sides[at], &mapped)).collect();
        // Where more than one could be it, nothing is claimed.
        let partner = if let [only] = partners[..] { Some(sides.swap_remove(only)) } else { None };
        channels.push(channel(side, partner, scan.hidden > 0));
    }
    for process in &scan.holders {
        channels.extend(super::xen::granted(process).links.into_iter().map(|link| foreign(process, link)));
    }
    channels.sort_by_key(|channel| channel.id);
    Ok((channels, broken))
}

/// Opens what the processes' descriptors lead to, each piece of memory once, and sorts it by end.
fn sides<'a>(scan: &'a Scan, mapped: &Mapped<'a>) -> Result<(Vec<EndpointMemory<'a>>, u64)> {
    let opener = Opener::new()?;
    let mut seen = HashSet::new();
    let mut broken = 0;
    let mut rings = BTreeMap::<(u32, u64), Vec<(Identity, Segment, &str)>>::new();
    for process in &scan.holders {
        for (fd, name) in &process.memories {
            let Ok(memory) = opener.open(&format!("/proc/{}/fd/{fd}", process.pid)) else { continue };
            let Ok(identity) = identity(&memory) else { continue };
            // What nobody writes is nobody's end.
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

/// Two ends make a channel where each has mapped the other's segment, and each names the other as its peer. The kernel
/// vouches for the one; the other tells channels between the same two processes apart.
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
    // The end that listened comes first, else the older process.
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

/// A channel whose other endpoint is in another domain.
pub fn foreign(process: &Process, link: Link) -> Channel {
    let Link { peer, gone, address, greeting, listened, open, quarantine, made, segments } = link;
    let mut rings = segments.into_iter();
    let side = rings.next().filter(|first| first.header.generation == 0).map(|first| {
        let peer_epoch = first.stats().map(|stats| stats.peer_epoch);
        let (identity, path) = ((0, greeting.epoch), None);
        EndpointMemory { first, identity, later: rings.collect(), holders: vec![process], path, peer_epoch }
    });
    let mut pipes = [pipe(side.as_ref(), None), pipe(None, side.as_ref())];
    // Of what comes in the reader alone can be asked.
    pipes[1].bytes = side.as_ref().map(|side| side.first.word(words::HEAD));
    let memory = side.as_ref().map_or(0, EndpointMemory::memory);
    let ends = [Some(end(&[process], listened, memory)), None];
    let state = match &side {
        Some(side) => state(&ends, &pipes, side.peer_epoch, gone.then_some(State::PeerGone)),
        None if open => State::Opening,
        None => State::Closed,
    };
    Channel {
        // Drawn at random; so long that a person can still compare it.
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

/// A channel whose other endpoint is in another machine, as the broker lists it (B-20).
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
        // Drawn at random; so long that a person can still compare it.
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

    /// Bytes of its rings.
    fn memory(&self) -> u64 {
        self.rings().map(|segment| segment.header.segment_len).sum()
    }

    fn rings(&self) -> impl Iterator<Item = &Segment> {
        std::iter::once(&self.first).chain(&self.later)
    }
}

fn pipe(from: Option<&EndpointMemory<'_>>, to: Option<&EndpointMemory<'_>>) -> Pipe {
    // The reader's position before the writer's, with nothing between: a pipe in motion must not look fuller than it is.
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

/// What lies between two positions that were not read at the same moment.
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
    // Armed, and not reached: it sleeps, or is about to.
    let asleep = want & 1 == 1 && position.is_none_or(|position| !words::reached(want, position));
    Half { phase, asleep: asleep && phase == "open", counters: counters.map(Counters::new) }
}

/// How a channel fares; `unseen`: what is said of one whose second end cannot be seen, if that says anything.
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
