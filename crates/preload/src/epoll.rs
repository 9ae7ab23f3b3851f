// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program's epoll sets.
//!
//! A connection that has shared memory is registered in the kernel under a token of ours, edge-triggered, and what the
//! program asked for is kept here: events carry the program's data and not descriptors, and a TCP socket whose bytes go
//! another way would be writable for ever. Other registrations are left alone. All bells of this process are in the
//! program's set as one descriptor, whose edges wake it.

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use libc::{POLLOUT, POLLRDHUP, epoll_event};
use rustix::io::Errno;
use tombolo::sockets::{
    Process, Reason,
    connection::{Connection, Stage},
};

use crate::{control, errno, flow, poll::Mask, spin, state};

const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const EDGE: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
const NORM: u32 = (libc::EPOLLRDNORM | libc::EPOLLWRNORM) as u32;

/// Where tokens begin: no program's own data is likely to.
fn tokens() -> u64 {
    static BEGIN: OnceLock<u64> = OnceLock::new();
    *BEGIN.get_or_init(|| {
        let mut bytes = [0; 4];
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        u64::from(u32::from_ne_bytes(bytes) | 1 << 31) << 32
    })
}

/// One registration of a connection.
#[derive(Debug)]
struct Entry {
    fd: RawFd,
    connection: Arc<Connection>,
    /// What the program asked for, and its word.
    events: u32,
    data: u64,
    /// It is in the kernel under the token.
    wired: bool,
    token: u64,
    /// Reported once (`EPOLLONESHOT`), and not again before the program says so.
    spent: bool,
    /// What the kernel said and does not take back: errors and hang-ups.
    sticky: u32,
    /// For `EPOLLET`: something new since it was last reported.
    edge: bool,
    arrived: u64,
    stalls: u64,
}

#[derive(Debug, Default)]
struct Inner {
    entries: Vec<Entry>,
    next_token: u64,
    turn: usize,
}

/// A set of the program's.
#[derive(Debug, Default)]
pub(crate) struct Set {
    inner: Mutex<Inner>,
    /// Registrations of connections, and how many of them are wired.
    entries: AtomicUsize,
    wired: AtomicUsize,
    /// The bells are in it.
    bells: AtomicBool,
    /// Threads that sleep in it.
    sleepers: AtomicUsize,
}

impl Set {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, inner: &Inner) {
        self.entries.store(inner.entries.len(), Ordering::SeqCst);
        self.wired.store(inner.entries.iter().filter(|entry| entry.wired).count(), Ordering::SeqCst);
    }
}

/// Prepares every set of the program's for a connection that was joined; only then may its bytes come another way.
pub(crate) fn wire(process: &Process, connection: &Arc<Connection>) {
    for (epfd, set) in state::sets() {
        let mut inner = set.lock();
        let inner = &mut *inner;
        let mut touched = false;
        for at in 0..inner.entries.len() {
            if Arc::ptr_eq(&inner.entries[at].connection, connection) && !inner.entries[at].wired {
                if !wire_entry(process, epfd, &set, inner, at) {
                    process.leaves(connection, Reason::Usage);
                    return;
                }
                touched = true;
            }
        }
        if touched {
            set.count(inner);
        }
    }
    connection.set_wired();
    // Whoever sleeps since before looks again.
    process.kick();
}

fn wire_entry(process: &Process, epfd: RawFd, set: &Set, inner: &mut Inner, at: usize) -> bool {
    if inner.entries[at].events & EXCLUSIVE != 0 {
        return false; // The kernel does not let such a one be changed.
    }
    if !add_bells(process, epfd, set) {
        return false;
    }
    let entry = &mut inner.entries[at];
    let mine = epoll_event { events: IN | OUT | RDHUP | EDGE, u64: entry.token };
    let done = control::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, entry.fd, mine).is_ok();
    entry.wired = done;
    entry.edge = true;
    done
}

/// The token of the bells.
fn bells() -> u64 {
    tokens()
}

fn add_bells(process: &Process, epfd: RawFd, set: &Set) -> bool {
    if !set.bells.load(Ordering::SeqCst) {
        let event = epoll_event { events: IN | EDGE, u64: bells() };
        // Before the kernel can report it.
        set.bells.store(true, Ordering::SeqCst);
        let added = process
            .bells()
            .is_some_and(|fd| control::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd.as_raw_fd(), event).is_ok());
        set.bells.store(added, Ordering::SeqCst);
    }
    set.bells.load(Ordering::SeqCst)
}

/// The arguments of `epoll_ctl`.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub epfd: RawFd,
    pub operation: i32,
    pub fd: RawFd,
    pub event: Option<epoll_event>,
}

/// `epoll_ctl` on a watched set, about a watched descriptor. `real` is the call itself.
pub(crate) fn change(
    process: &Process,
    set: &Set,
    connection: &Arc<Connection>,
    request: Request,
    real: impl FnOnce() -> i32,
) -> i32 {
    let Request { operation, fd, event, .. } = request;
    if connection.stage() == Stage::Plain {
        return real();
    }
    let mut guard = set.lock();
    let inner = &mut *guard;
    let found = inner.entries.iter().position(|entry| entry.fd == fd);
    if connection.stage() == Stage::Joined && connection.is_wired() {
        let answer = change_joined(process, set, inner, connection, request, found);
        set.count(inner);
        return errno::answer(answer.map(|()| 0)) as i32;
    }
    let answer = real();
    if answer == 0 {
        match (operation, event) {
            (libc::EPOLL_CTL_DEL, _) => {
                inner.entries.retain(|entry| entry.fd != fd);
            }
            (_, Some(event)) => {
                let at = found.unwrap_or_else(|| push(inner, fd, connection));
                let entry = &mut inner.entries[at];
                (entry.events, entry.data) = (event.events, event.u64);
            }
            _ => {}
        }
        set.count(inner);
    }
    answer
}

fn push(inner: &mut Inner, fd: RawFd, connection: &Arc<Connection>) -> usize {
    inner.next_token += 1;
    inner.entries.push(Entry {
        fd,
        connection: Arc::clone(connection),
        events: 0,
        data: 0,
        wired: false,
        token: tokens() + inner.next_token,
        spent: false,
        sticky: 0,
        edge: true,
        arrived: 0,
        stalls: 0,
    });
    inner.entries.len() - 1
}

fn change_joined(
    process: &Process,
    set: &Set,
    inner: &mut Inner,
    connection: &Arc<Connection>,
    request: Request,
    found: Option<usize>,
) -> Result<(), Errno> {
    let Request { epfd, operation, fd, event } = request;
    match (operation, found, event) {
        (libc::EPOLL_CTL_DEL, Some(at), _) => {
            inner.entries.swap_remove(at);
            control::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, epoll_event { events: 0, u64: 0 })
        }
        (libc::EPOLL_CTL_ADD, Some(_), _) => Err(Errno::EXIST),
        (libc::EPOLL_CTL_ADD, None, Some(event)) => {
            if event.events & EXCLUSIVE != 0 || !add_bells(process, epfd, set) {
                process.leaves(connection, Reason::Usage);
                return Err(Errno::NOMEM);
            }
            let at = push(inner, fd, connection);
            let token = inner.entries[at].token;
            let mine = epoll_event { events: IN | OUT | RDHUP | EDGE, u64: token };
            if let Err(errno) = control::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, mine) {
                inner.entries.pop();
                return Err(errno);
            }
            let entry = &mut inner.entries[at];
            (entry.events, entry.data, entry.wired) = (event.events, event.u64, true);
            // Somebody may sleep on this set; the connection may be ready.
            process.kick();
            Ok(())
        }
        (libc::EPOLL_CTL_MOD, Some(at), Some(event)) => {
            let entry = &mut inner.entries[at];
            if event.events & EXCLUSIVE != 0 || entry.events & EXCLUSIVE != 0 {
                return Err(Errno::INVAL);
            }
            (entry.events, entry.data) = (event.events, event.u64);
            (entry.spent, entry.edge) = (false, true);
            process.kick();
            Ok(())
        }
        (libc::EPOLL_CTL_DEL | libc::EPOLL_CTL_MOD, None, _) => Err(Errno::NOENT),
        (_, _, None) => Err(Errno::FAULT),
        _ => Err(Errno::INVAL),
    }
}

/// Nobody changes these sets while this is held.
pub(crate) fn hold(sets: &[(RawFd, Arc<Set>)]) -> Vec<impl Sized + '_> {
    sets.iter().map(|(_, set)| set.lock()).collect()
}

/// In a child made by fork: sets that have the parent's bells need its own.
pub(crate) fn inherit(process: &Process, sets: &[(RawFd, Arc<Set>)]) {
    for (epfd, set) in sets {
        if set.bells.swap(false, Ordering::SeqCst) {
            add_bells(process, *epfd, set);
        }
    }
}

/// The last descriptor of a connection is closed: the kernel forgets its registrations, and so do we.
pub(crate) fn forget(connection: &Arc<Connection>) {
    for (_, set) in state::sets() {
        if set.entries.load(Ordering::SeqCst) != 0 {
            let mut inner = set.lock();
            inner.entries.retain(|entry| !Arc::ptr_eq(&entry.connection, connection));
            set.count(&inner);
        }
    }
}

/// The set itself is watched by another, or polled: there a bell is only an edge, so its connections go by TCP.
pub(crate) fn nested(process: &Process, set: &Set) {
    let all: Vec<_> = set.lock().entries.iter().map(|entry| Arc::clone(&entry.connection)).collect();
    for connection in &all {
        process.leaves(connection, Reason::Usage);
    }
}

/// `epoll_wait` on a watched set. `real` is the call itself, for so many events and so long.
pub(crate) fn wait(
    process: &Process,
    set: &Set,
    events: &mut [epoll_event],
    timeout: Option<Duration>,
    mask: Mask,
    mut real: impl FnMut(&mut [epoll_event], Option<Duration>) -> isize,
) -> isize {
    if set.entries.load(Ordering::SeqCst) == 0 && !set.bells.load(Ordering::SeqCst) {
        return real(events, timeout);
    }
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let before = errno::get();
    loop {
        let mut found = collect(process, set, events);
        if found > 0 {
            if found == events.len() && set.sleepers.load(Ordering::SeqCst) > 0 {
                process.kick(); // There may be more, for others.
            }
            if found < events.len() || mask.is_some() {
                let more = real(&mut events[found..], Some(Duration::ZERO));
                if more < 0 && errno::get() == libc::EINTR && mask.is_some() {
                    return -1;
                }
                found += filter(process, set, &mut events[found..], more.max(0) as usize);
            }
            errno::set(before);
            return found as isize;
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let rest = left;
        let joined = set.wired.load(Ordering::SeqCst) != 0;
        if joined && left != Some(Duration::ZERO) {
            if spin::until(|| stirs(set)) {
                continue;
            }
            errno::kept(|| process.before_sleep());
            arm(set);
            if stirs(set) {
                continue;
            }
        }
        let slept = spin::asleep();
        set.sleepers.fetch_add(1, Ordering::SeqCst);
        let n = real(events, rest);
        set.sleepers.fetch_sub(1, Ordering::SeqCst);
        if n < 0 {
            return n;
        }
        if joined {
            spin::learn(slept);
        }
        let kept = filter(process, set, events, n as usize);
        if kept > 0 {
            let more = collect(process, set, &mut events[kept..]);
            errno::set(before);
            return (kept + more) as isize;
        }
        if n == 0 && rest == left {
            // The time is over; what came in its last moment is seen.
            errno::set(before);
            return collect(process, set, events) as isize;
        }
    }
}

/// Takes our own events out of what the kernel said, and remembers what they mean.
fn filter(process: &Process, set: &Set, events: &mut [epoll_event], n: usize) -> usize {
    let ours = tokens()..=tokens() | u64::from(u32::MAX);
    let mut kept = 0;
    let mut inner = None;
    for at in 0..n {
        let event = events[at];
        if !ours.contains(&{ event.u64 }) {
            events[kept] = event;
            kept += 1;
            continue;
        }
        if { event.u64 } == bells() {
            process.rang();
            continue;
        }
        let inner = inner.get_or_insert_with(|| set.lock());
        if let Some(entry) = inner.entries.iter_mut().find(|entry| entry.token == { event.u64 }) {
            entry.connection.set_quiet(false);
            entry.sticky |= event.events & (RDHUP | ALWAYS);
            entry.edge = true;
        }
    }
    kept
}

/// Finds connections that are ready by now, and tells of them.
fn collect(process: &Process, set: &Set, events: &mut [epoll_event]) -> usize {
    if set.wired.load(Ordering::SeqCst) == 0 || events.is_empty() {
        return 0;
    }
    let mut inner = set.lock();
    let Inner { entries, turn, .. } = &mut *inner;
    let (len, mut found) = (entries.len(), 0);
    // Each time from another one on, so that few places do not starve the last.
    *turn = turn.wrapping_add(1);
    for step in 0..len {
        let entry = &mut entries[(*turn + step) % len];
        if !entry.wired || entry.spent {
            continue;
        }
        let ready = entry.ready(process);
        if ready != 0 {
            events[found] = epoll_event { events: ready, u64: entry.data };
            found += 1;
            entry.spent = entry.events & ONESHOT != 0;
            if found == events.len() {
                break;
            }
        }
    }
    found
}

impl Entry {
    /// What is to be told now.
    fn ready(&mut self, process: &Process) -> u32 {
        let connection = &self.connection;
        let mut ready = self.sticky;
        if self.events & (IN | NORM) != 0 && (!connection.is_quiet() || connection.stirs()) {
            // Quiet before the look: an edge that comes during it undoes it.
            connection.set_quiet(true);
            if connection.is_readable(process, self.fd) {
                connection.set_quiet(false);
                ready |= IN | libc::EPOLLRDNORM as u32;
                if !connection.stirs() {
                    let said = process.kernel().poll(self.fd, POLLRDHUP) as u16;
                    self.sticky |= u32::from(said) & (RDHUP | ALWAYS);
                    ready |= self.sticky;
                }
            }
        }
        if self.events & (OUT | NORM) != 0 {
            let room = connection.is_writable();
            if room.unwrap_or_else(|| process.kernel().poll(self.fd, POLLOUT) & POLLOUT != 0) {
                ready |= OUT | libc::EPOLLWRNORM as u32;
            }
        }
        ready &= self.events | ALWAYS;
        if self.events & EDGE == 0 || ready == 0 {
            return ready;
        }
        let (arrived, stalls) = (connection.arrived(), connection.stalls());
        let news = self.edge || arrived != self.arrived || (stalls != self.stalls && ready & OUT != 0);
        if !news {
            return 0;
        }
        self.edge = false;
        self.arrived = arrived;
        if ready & OUT != 0 {
            self.stalls = stalls;
        }
        ready
    }
}

/// Whether shared memory has something new, at no cost. One that is not quiet must be looked at as well.
fn stirs(set: &Set) -> bool {
    set.lock().entries.iter().any(|entry| {
        let connection = &entry.connection;
        let fresh = entry.events & EDGE == 0 || entry.edge || connection.arrived() != entry.arrived;
        let reads = entry.events & (IN | NORM) != 0 && connection.stirs() && fresh;
        let stalled = entry.events & EDGE == 0 || entry.edge || connection.stalls() != entry.stalls;
        let writes = entry.events & (OUT | NORM) != 0 && stalled && connection.is_writable() == Some(true);
        entry.wired && !entry.spent && (reads || writes)
    })
}

fn arm(set: &Set) {
    for entry in &set.lock().entries {
        if entry.wired && !entry.spent {
            entry.connection.arm(entry.events & (IN | NORM) != 0, entry.events & (OUT | NORM) != 0);
        }
    }
}

/// Gets on with the connections of a set that is waited for.
pub(crate) fn begin(process: &Process, set: &Set) {
    if set.entries.load(Ordering::SeqCst) == set.wired.load(Ordering::SeqCst) {
        return;
    }
    let candidates: Vec<_> = {
        let inner = set.lock();
        let unwired = inner.entries.iter().filter(|entry| !entry.wired);
        unwired.map(|entry| Arc::clone(&entry.connection)).filter(|one| one.stage() == Stage::Joined).collect()
    };
    for connection in &candidates {
        flow::begin(process, connection);
    }
}
