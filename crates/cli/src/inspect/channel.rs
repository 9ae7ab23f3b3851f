// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which segments belong to one end, which ends to one channel, and how that fares.

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

use super::{
    call::{Call, Machine},
    process::{Identity, Mapping, Process, Scan, printable},
    segment::{Opener, Segment, identity},
    xen::Link,
};
use crate::failure::Result;

/// A channel, or the end of one that can be seen.
#[derive(Clone, Debug, Serialize)]
pub struct Channel {
    /// The inode of a segment: its own for as long as the channel lives.
    pub id: u64,
    /// Where the two ends met, if the end that listened can be seen.
    pub address: Option<String>,
    pub mode: Mode,
    pub state: State,
    /// Seconds since the ends met.
    pub age: Option<f64>,
    /// Bytes of memory, of both ends.
    pub memory: u64,
    /// The number of the domain in which the other end is, if that is another one of Xen's.
    pub peer_domain: Option<u16>,
    /// The machine in which the other end is, and the link to it, if that is another one under QEMU, or its host.
    pub machine: Option<Machine>,
    /// Bytes that were retired and that the peer may still map, where that is known.
    pub quarantine: Option<u64>,
    /// The end that listened first, where that is known; `null` for one that cannot be seen.
    pub ends: [Option<End>; 2],
    /// From the first end to the second, and back.
    pub pipes: [Pipe; 2],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Stream,
    Messages,
}

/// How a channel fares, worst first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// An end gave up in the middle.
    Aborted,
    /// The process of one end is gone, and the other has not closed yet.
    PeerGone,
    /// One end cannot be seen: it belongs to a process that this user may not look into, or is gone.
    PeerHidden,
    /// Both directions are closed.
    Closed,
    /// One direction is closed.
    HalfClosed,
    /// A process at one of the ends is stopped or frozen.
    Paused,
    /// The two ends have not met yet.
    Opening,
    Open,
}

/// Who is at an end.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct End {
    pub pid: u32,
    pub command: String,
    pub uid: Option<u32>,
    pub user: Option<String>,
    pub paused: bool,
    /// Whether this is the end that listened.
    pub listened: bool,
    /// Other processes that hold this end, after a fork.
    pub shared_with: Vec<u32>,
    /// Bytes of memory of this end.
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
    pub writer: Option<Half>,
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

/// What one end says of its half of a pipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Half {
    pub phase: &'static str,
    /// Whether it sleeps until the other gets on.
    pub asleep: bool,
    /// What it counted, if it tells.
    pub counters: Option<Counted>,
}

/// The counters of a board (C-12).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Counted {
    /// Messages, or calls that moved something.
    pub calls: u64,
    pub rings_sent: u64,
    pub rings_suppressed: u64,
    pub rings_received: u64,
    pub wakeups_spurious: u64,
    pub spins_paid: u64,
    pub spins_wasted: u64,
    pub sleeps: u64,
    pub stalls: u64,
}

impl Counted {
    fn new(listed: [u64; COUNTERS]) -> Self {
        let [calls, rings_sent, rings_suppressed, rings_received, wakeups_spurious, rest @ ..] = listed;
        let [spins_paid, spins_wasted, sleeps, stalls] = rest;
        Self {
            calls,
            rings_sent,
            rings_suppressed,
            rings_received,
            wakeups_spurious,
            spins_paid,
            spins_wasted,
            sleeps,
            stalls,
        }
    }
}

/// The segments of one end, and the processes that have it.
struct Side<'a> {
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
fn sides<'a>(scan: &'a Scan, mapped: &Mapped<'a>) -> Result<(Vec<Side<'a>>, u64)> {
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
        let peer_epoch = first.board().map(|board| board.peer_epoch);
        let path = name.strip_prefix(MEMORY)?.strip_prefix(':').map(printable);
        let holders = mapped.writable.get(&identity)?.clone();
        Some(Side { first, identity, later: rings.map(|(_, segment, _)| segment).collect(), holders, path, peer_epoch })
    });
    Ok((sides.collect(), broken))
}

/// Two ends make a channel where each has mapped the other's segment, and each names the other as its peer. The kernel
/// vouches for the one; the other tells channels between the same two processes apart.
fn belong_together(a: &Side<'_>, b: &Side<'_>, mapped: &Mapped<'_>) -> bool {
    let names =
        |side: &Side<'_>, other: &Side<'_>| side.peer_epoch.is_none_or(|epoch| epoch == other.first.header.epoch);
    let maps = |side: &Side<'_>, other: &Side<'_>| {
        side.holders.iter().any(|process| mapped.readable.contains(&(other.identity, process.pid)))
    };
    names(a, b) && names(b, a) && maps(a, b) && maps(b, a)
}

fn channel(side: Side<'_>, partner: Option<Side<'_>>, some_hidden: bool) -> Channel {
    // The end that listened comes first, else the older process.
    let rank = |side: &Side<'_>| (side.path.is_none(), side.holders[0].pid, side.identity);
    let (a, b) = match partner {
        Some(other) if rank(&other) < rank(&side) => (other, Some(side)),
        partner => (side, partner),
    };
    let made = [Some(&a), b.as_ref()].into_iter().flatten().filter_map(|side| side.first.made).max();
    let pipes = [pipe(Some(&a), b.as_ref()), pipe(b.as_ref(), Some(&a))];
    let ends = [Some(a.end()), b.as_ref().map(Side::end)];
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

/// A channel whose other end is in another domain.
pub fn foreign(process: &Process, link: Link) -> Channel {
    let Link { peer, gone, address, greeting, listened, open, quarantine, made, segments } = link;
    let mut rings = segments.into_iter();
    let side = rings.next().filter(|first| first.header.generation == 0).map(|first| {
        let peer_epoch = first.board().map(|board| board.peer_epoch);
        let (identity, path) = ((0, greeting.epoch), None);
        Side { first, identity, later: rings.collect(), holders: vec![process], path, peer_epoch }
    });
    let mut pipes = [pipe(side.as_ref(), None), pipe(None, side.as_ref())];
    // Of what comes in the reader alone can be asked.
    pipes[1].bytes = side.as_ref().map(|side| side.first.word(words::HEAD));
    let memory = side.as_ref().map_or(0, Side::memory);
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

/// B-20. A channel whose other end is in another machine, as the broker tells of it.
pub fn across(process: &Process, call: Call) -> Channel {
    let Call { address, machine, place, listened, progress, made, rings } = call;
    let [own, theirs] = rings.map(|rings| {
        let mut rings = rings.into_iter();
        rings.next().map(|first| {
            let peer_epoch = first.board().map(|board| board.peer_epoch);
            let (identity, path, holders) = ((0, 0), None, Vec::new());
            Side { first, identity, later: rings.collect(), holders, path, peer_epoch }
        })
    });
    let pipes = [pipe(own.as_ref(), theirs.as_ref()), pipe(theirs.as_ref(), own.as_ref())];
    let memory = |side: &Option<Side<'_>>| side.as_ref().map_or(0, Side::memory);
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
        id: own.as_ref().map_or(place, |own| own.first.header.epoch >> 24),
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

fn end(holders: &[&Process], listened: bool, memory: u64) -> End {
    let first = holders[0];
    End {
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

impl Side<'_> {
    fn end(&self) -> End {
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

fn pipe(from: Option<&Side<'_>>, to: Option<&Side<'_>>) -> Pipe {
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
            half(side, words, head, side.first.board().map(|board| board.writer))
        }),
        reader: to.map(|side| {
            let words = (words::READER_STATE, words::WANT_DATA);
            half(side, words, tail, side.first.board().map(|board| board.reader))
        }),
    }
}

/// What lies between two positions that were not read at the same moment.
fn fill(tail: u64, head: u64, room: u64) -> u64 {
    let between = tail.wrapping_sub(head);
    if between > 1 << 63 { 0 } else { between.min(room) }
}

fn half(side: &Side<'_>, (state, want): (usize, usize), position: Option<u64>, board: Option<[u64; COUNTERS]>) -> Half {
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
    Half { phase, asleep: asleep && phase == "open", counters: board.map(Counted::new) }
}

/// How a channel fares; `unseen`: what is said of one whose second end cannot be seen, if that says anything.
fn state(ends: &[Option<End>; 2], pipes: &[Pipe; 2], peer_epoch: Option<u64>, unseen: Option<State>) -> State {
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

    fn end(paused: bool) -> Option<End> {
        let (command, user) = (String::from("a"), None);
        Some(End { pid: 1, command, uid: None, user, paused, listened: true, shared_with: vec![], memory: 8192 })
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
