// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The registrations of a set. Those without news for long *rest*: their peers are asked to notify, and nobody looks at
//! a resting registration until its doorbell notifies. So the cost of a wait depends on what is busy and not on what
//! there is.

use std::{
    collections::HashMap,
    fmt,
    os::fd::RawFd,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use libc::epoll_event;
use tombolo_sockets::{Process, SessionPath, connection::Connection};

use super::entry::{Entry, Unheard};
use crate::kernel;

/// Number of registrations after which the numbers in tokens repeat.
const MANY: u64 = 0x7fff;

#[derive(Default)]
pub(super) struct Registry {
    /// All registrations. Those that are awake come first.
    entries: Vec<Entry>,
    awake: usize,
    /// For each descriptor, the index of its entry plus one.
    places: Vec<u32>,
    /// Requests for sockets that are not connected, by descriptor.
    early: HashMap<RawFd, epoll_event>,
    next_token: u64,
    /// Number of this look, by which nothing is reported twice in it.
    round: u64,
    turn: usize,
    /// Index at which a look begins. It is behind the entries that had the room of the last look, so that few places
    /// starve nobody.
    first: usize,
    /// [`Process::stalls`] when resting entries were last looked at for that.
    stalls: u64,
    paths: Paths,
    asked: Asked,
    /// Whether a thread took a notification that is about the whole set, and none has armed it since.
    missed: bool,
}

/// Paths to peers that are in the set.
#[derive(Default)]
pub(super) struct Paths(Vec<Weak<SessionPath>>);

impl Paths {
    pub fn has(&self, path: &Arc<SessionPath>) -> bool {
        let one = Arc::downgrade(path);
        self.0.iter().any(|other| other.ptr_eq(&one))
    }

    /// Adds a path that the kernel has taken into the set.
    pub fn add(&mut self, path: &Arc<SessionPath>) {
        self.0.retain(|path| path.strong_count() > 0);
        self.0.push(Arc::downgrade(path));
    }

    /// Removes all paths. Returns those that have not ended, which are to be taken out of the set.
    pub fn take_live(&mut self) -> Vec<Arc<SessionPath>> {
        std::mem::take(&mut self.0).iter().filter_map(Weak::upgrade).collect()
    }
}

/// Answer of the kernel about the registrations of a set.
pub(super) enum Known {
    /// A line for each registration.
    These(String),
    /// The kernel was asked too much recently.
    Later,
    /// The kernel does not answer.
    Not,
}

/// Amount that was read recently of the kernel's list of a set's registrations, which the kernel gives all at once. The
/// work for one connection grows with the number of all others, and nobody else may change the set meanwhile.
#[derive(Default)]
struct Asked {
    since: Option<Instant>,
    bytes: usize,
}

/// Number of bytes that may be read in a [`WHILE`], which takes some milliseconds. One more list is read if fewer bytes
/// were.
const READ: usize = 1 << 20;
const WHILE: Duration = Duration::from_secs(1);

impl Asked {
    fn may(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now.duration_since(since) >= WHILE) {
            (self.since, self.bytes) = (Some(now), 0);
        }
        self.bytes < READ
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("entries", &self.entries).finish_non_exhaustive()
    }
}

impl Registry {
    pub fn all(&self) -> &[Entry] {
        &self.entries
    }

    pub fn all_mut(&mut self) -> (&mut [Entry], &mut Paths) {
        (&mut self.entries, &mut self.paths)
    }

    pub fn find(&self, fd: RawFd, connection: &Arc<Connection>) -> Option<usize> {
        let place = *self.places.get(usize::try_from(fd).ok()?)?;
        let at = (place as usize).checked_sub(1)?;
        // A registration outlives its descriptor while there is another one of the same socket.
        Arc::ptr_eq(&self.entries[at].connection, connection).then_some(at)
    }

    /// Adds a registration, awake, with one of the tokens after `tokens`. Returns its index.
    pub fn push(&mut self, fd: RawFd, connection: &Arc<Connection>, tokens: u64) -> usize {
        // The token has the descriptor, by which the entry is found again, and a number by which a late event of
        // another entry is recognised.
        self.next_token = self.next_token % MANY + 1;
        connection.wiring.waits().note_both_asked();
        self.entries.push(Entry::new(fd, connection, tokens | self.next_token << 16 | fd as u64));
        let last = self.entries.len() - 1;
        self.place(last);
        self.wake(last);
        self.awake - 1
    }

    /// Returns the kernel's list of all that is in the set `epfd`, unless the kernel was asked too much recently.
    pub fn registrations(&mut self, epfd: RawFd) -> Known {
        if !self.asked.may(Instant::now()) {
            return Known::Later;
        }
        let lines = kernel::registrations(epfd);
        self.asked.bytes += lines.as_ref().map_or(0, String::len);
        lines.map_or(Known::Not, Known::These)
    }

    /// Keeps the program's request for a socket that is not connected. The request does not expire.
    pub fn register(&mut self, fd: RawFd, event: Option<epoll_event>) {
        match event {
            Some(event) => _ = self.early.insert(fd, event),
            None => _ = self.early.remove(&fd),
        }
    }

    /// Returns the request for a socket that was not connected, and forgets it.
    pub fn registered(&mut self, fd: RawFd) -> Option<epoll_event> {
        self.early.remove(&fd)
    }

    /// Records that the number `fd` of a connection is about to be closed while its registration stays. With `open`,
    /// records that it is a number of the connection again: then what was registered by it before can be changed.
    pub fn note_number(&mut self, fd: RawFd, connection: &Arc<Connection>, open: bool) {
        let is_its =
            |entry: &Entry| entry.orphan == open && entry.fd == fd && Arc::ptr_eq(&entry.connection, connection);
        if let Some(at) = self.entries.iter().position(is_its) {
            if let Some(place) = self.places.get_mut(fd as usize) {
                *place = 0;
            }
            self.entries[at].orphan = !open;
            self.place(at);
        }
    }

    fn place(&mut self, at: usize) {
        if self.entries[at].orphan {
            return;
        }
        let fd = self.entries[at].fd as usize;
        if self.places.len() <= fd {
            self.places.resize(fd + 1, 0);
        }
        self.places[fd] = at as u32 + 1;
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.entries.swap(a, b);
        self.place(a);
        self.place(b);
    }

    pub fn remove(&mut self, mut at: usize) {
        if at < self.awake {
            self.awake -= 1;
            self.swap(at, self.awake);
            at = self.awake;
        }
        let gone = self.entries.swap_remove(at);
        if !gone.orphan {
            self.places[gone.fd as usize] = 0;
        }
        if at < self.entries.len() {
            self.place(at);
        }
    }

    pub fn retain(&mut self, keep: impl Fn(&Entry) -> bool) {
        let rest = self.entries.split_off(self.awake);
        self.entries.retain(&keep);
        self.awake = self.entries.len();
        self.entries.extend(rest.into_iter().filter(|entry| keep(entry)));
        self.places.clear();
        (0..self.entries.len()).for_each(|at| self.place(at));
    }

    /// Makes an entry one that is looked at from now on.
    pub fn wake(&mut self, mut at: usize) -> &mut Entry {
        if at >= self.awake {
            self.swap(at, self.awake);
            at = self.awake;
            self.awake += 1;
        }
        &mut self.entries[at]
    }

    pub fn wake_all(&mut self) -> &[Entry] {
        self.awake = self.entries.len();
        &self.entries
    }

    /// Returns the index of the entry with this token.
    pub fn find_token(&self, token: u64) -> Option<usize> {
        let place = self.places.get((token & 0xffff) as usize).copied().unwrap_or_default();
        let known = (place as usize).checked_sub(1).filter(|at| self.entries[*at].token == token);
        // The entry may have outlived its descriptor.
        known.or_else(|| self.entries.iter().position(|entry| entry.token == token))
    }

    /// Handles a notification by the doorbell of the connection with this token.
    pub fn wake_notified(&mut self, token: u64) {
        let Some(at) = self.find_token(token) else {
            // The connection was registered by a descriptor that is closed, and there may be another.
            self.miss();
            self.wake_all();
            return;
        };
        let entry = self.wake(at);
        entry.notified = true;
        if entry.orphan || !entry.connection.descriptors.is_single() {
            self.miss();
            self.wake_all();
        }
    }

    /// Records that a notification about the whole set was taken.
    pub fn miss(&mut self) {
        self.missed = true;
    }

    /// Asks the peers, before a sleep, to notify for what is waited for.
    pub fn arm(&mut self, process: &Process) -> Unheard {
        let all = self.entries[..self.awake].iter_mut().map(|entry| entry.arm(process));
        let unheard =
            all.fold(Unheard::default(), |all, one| Unheard { owes: all.owes | one.owes, full: all.full | one.full });
        // If something is owed to a peer, a thread that sleeps has to look after it.
        self.missed = unheard.owes;
        unheard
    }

    /// Lets registrations that wait for room in a full pipe go over TCP, after a while in which nobody read (S-16).
    pub fn leave_full_pipes(&mut self, process: &Process) {
        for entry in self.entries[..self.awake].iter().filter(|entry| entry.is_full()) {
            entry.connection.for_call(process, entry.connection.descriptors.fd()).leave_full_pipe();
        }
    }

    /// Returns whether a notification was taken that other threads may sleep for, and nothing will wake them again.
    pub fn is_unarmed(&self) -> bool {
        self.missed || self.entries[..self.awake].iter().any(Entry::is_unarmed)
    }

    /// Records that the kernel has something to report of one entry.
    pub fn note_kernel_events(&mut self, at: usize, events: u32) -> Option<(epoll_event, u32)> {
        let round = self.round;
        self.wake(at).note_kernel_events(events, round)
    }

    /// Asks the kernel about entries that were reported in this look with bytes, and not with an end behind these that
    /// they ask for.
    pub fn ask_for_ends(&mut self, process: &Process) -> Vec<(epoll_event, u32)> {
        let round = self.round;
        self.entries[..self.awake].iter_mut().filter_map(|entry| entry.ask_for_end(process, round)).collect()
    }

    /// Begins a look. Wakes resting entries whose program found no room since the last look, because it waits for some.
    pub fn begin_round(&mut self, stalls: u64) {
        self.round += 1;
        // In each look another entry may rest.
        self.turn = if self.turn + 1 < self.awake { self.turn + 1 } else { 0 };
        if stalls == self.stalls {
            return;
        }
        self.stalls = stalls;
        for at in self.awake..self.entries.len() {
            if self.entries[at].is_stalled() {
                self.wake(at);
            }
        }
    }

    /// Finds entries that are ready by now, and reports them. An entry that is not ready costs one load.
    pub fn collect(&mut self, process: &Process, events: &mut [epoll_event]) -> usize {
        let round = self.round;
        let first = self.first.min(self.awake);
        let (before, after) = self.entries[..self.awake].split_at_mut(first);
        let all = after.iter_mut().chain(before).enumerate();
        let mut ready = all.filter_map(|(at, entry)| Some((at, entry.take_event(process, round)?)));
        let (mut found, mut last) = (0, 0);
        // A place is found first, because what is taken must be reported.
        for place in &mut *events {
            let Some((at, event)) = ready.next() else { break };
            *place = event;
            (found, last) = (found + 1, at);
        }
        drop(ready);
        if found > 0 && found == events.len() {
            self.first = (first + last + 1) % self.awake;
        }
        // A thread that waits for one entry alone sleeps when that is idle. A thread that is busy with others lets it
        // rest.
        if found > 0 {
            self.rest(process);
        }
        found
    }

    /// Lets one entry go to rest, if its time has come. Only one at a time, as each costs a fence.
    fn rest(&mut self, process: &Process) {
        if self.turn < self.awake && self.entries[self.turn].rests(process) {
            self.awake -= 1;
            self.swap(self.turn, self.awake);
        }
    }
}
