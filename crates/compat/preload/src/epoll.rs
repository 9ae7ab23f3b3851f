// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program's epoll sets.
//!
//! A connection that has shared memory is registered in the kernel under a token of ours, edge-triggered, and what the
//! program asked for is kept here. Events carry the program's data and not descriptors, and a TCP socket whose bytes go
//! another way would be writable for ever. Once it is there the kernel is not told of changes any more, for programs
//! change their mind at each request. Other registrations are left alone. Beside the socket the set has the bell of the
//! connection, whose edges wake whoever sleeps in the set, and nobody else.
//!
//! What was written before something that a wait reports is reported too ([`gather`]): so the kernel is asked whenever shared
//! memory has something, which also lets no listener or timer wait.

mod entry;
mod registry;

use std::{
    ops::{Deref, DerefMut},
    os::fd::{AsFd, AsRawFd, RawFd},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use libc::epoll_event;
use rustix::io::Errno;
use tombolo_sockets::{
    Process, Reason, SingleDoorbell, aside,
    connection::{Connection, Stage},
    gather::{KernelReply, Sources, gather},
    spin,
};

use self::{
    entry::{BELL, EDGE, EXCLUSIVE, Entry, IN, OUT, PRI, RDHUP},
    registry::{Known, Paths, Registry},
};
use crate::{
    control, errno, flow,
    inside::{self, Inside},
    kernel,
    poll::Mask,
    state,
    wait::BLIND,
};

/// Where tokens begin: no program's own data is likely to.
fn tokens() -> u64 {
    static BEGIN: OnceLock<u64> = OnceLock::new();
    *BEGIN.get_or_init(|| {
        let mut bytes = [0; 4];
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        u64::from(u32::from_ne_bytes(bytes) | 1 << 31) << 32
    })
}

/// The token of the paths to peers.
fn path() -> u64 {
    tokens()
}

/// The token of the set's own bell.
fn kick() -> u64 {
    tokens() + 1
}

/// A set of the program's.
#[derive(Debug, Default)]
pub(crate) struct Set {
    inner: Mutex<Registry>,
    /// Registrations of connections, and how many of them are wired.
    entries: AtomicUsize,
    wired: AtomicUsize,
    /// Its own bell is in it.
    bells: AtomicBool,
    /// Wakes who sleeps in it.
    bell: OnceLock<SingleDoorbell>,
    /// Threads that are about to sleep in it, or do.
    sleepers: AtomicUsize,
    /// It is in another set, or polled: somebody else sleeps for it.
    nested: AtomicBool,
    /// [`Process::decided`] when its entries were last gone through.
    decided: AtomicU64,
}

/// What a set has, for whoever holds this.
struct Locked<'a> {
    inner: MutexGuard<'a, Registry>,
    _inside: Inside,
}

impl Deref for Locked<'_> {
    type Target = Registry;

    fn deref(&self) -> &Registry {
        &self.inner
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Registry {
        &mut self.inner
    }
}

impl Set {
    fn lock(&self) -> Locked<'_> {
        let inside = inside::enter();
        Locked { inner: self.inner.lock().unwrap_or_else(PoisonError::into_inner), _inside: inside }
    }

    fn count(&self, inner: &Registry) {
        self.entries.store(inner.all().len(), Ordering::SeqCst);
        self.wired.store(inner.all().iter().filter(|entry| entry.wired).count(), Ordering::SeqCst);
    }

    /// Something changed that those who sleep for this set did not see.
    fn changed(&self) {
        // ORDER SeqCst: who sleeps says so before its last look, and the change was made before this.
        if self.sleepers.load(Ordering::SeqCst) > 0 || self.nested.load(Ordering::SeqCst) {
            self.kick();
        }
    }

    /// Who sleeps in it looks again.
    fn kick(&self) {
        self.bell.get().inspect(|bell| bell.notify());
    }

    /// Whether something is left in shared memory.
    fn stirs(&self) -> bool {
        self.lock().all().iter().any(|entry| entry.wired && entry.connection.stirs())
    }
}

/// Prepares every set of the program's for a connection that was joined; only then may its bytes come another way.
pub(crate) fn wire(process: &Process, connection: &Arc<Connection>) {
    let mut woken = Vec::new();
    let first = wire_sets(connection, &mut woken);
    if first.is_ok() {
        connection.set_wired();
    }
    // One that came to a set after that was looked at, and before this was said, nobody else wires.
    let both = first.and_then(|()| wire_sets(connection, &mut woken));
    match both {
        // The next call tries again.
        Err(Unwired::Later) if !connection.is_wired() => {}
        Ok(()) => {}
        Err(_) => {
            process.leaves(connection, Reason::Usage);
            if connection.is_wired() {
                // What is on its way there would not show.
                let _ = connection.retreat(process.kernel(), connection.fd(), Reason::Usage);
            }
        }
    }
    // Whoever sleeps since before looks again.
    woken.iter().for_each(|set| set.kick());
    if !woken.is_empty() || connection.is_wired() {
        connection.bell().inspect(|bell| bell.notify());
    }
}

/// Wires what is not wired of a connection's registrations, as many as can be, each for itself; adds the sets that had some to
/// `woken`. Fails if one cannot be, or not now: the worst of what is said of them.
fn wire_sets(connection: &Arc<Connection>, woken: &mut Vec<Arc<Set>>) -> Result<(), Unwired> {
    let mut all = Ok(());
    for (epfd, set) in state::sets() {
        let mut inner = set.lock();
        let inner = &mut *inner;
        let is_its = |entry: &Entry| !entry.wired && Arc::ptr_eq(&entry.connection, connection);
        if !inner.all().iter().any(is_its) {
            continue;
        }
        // Under the lock, so that nobody arms one again meanwhile. A call made in here takes none.
        let once = inner.all().iter().any(|entry| is_its(entry) && entry.is_once());
        let known = if once { inner.registrations(epfd) } else { Known::Not };
        let (mut gone, mut touched) = (Vec::new(), false);
        let (entries, paths) = inner.all_mut();
        for entry in entries.iter_mut().filter(|entry| is_its(entry)) {
            match wire_entry(epfd, &set, entry, paths, &known) {
                Ok(()) if entry.wired => touched = true,
                // The kernel has forgotten it.
                Ok(()) => gone.push(entry.token),
                Err(unwired) => all = all.and(Err(unwired)).map_err(|before: Unwired| before.max(unwired)),
            }
        }
        if gone.is_empty() && !touched {
            continue;
        }
        inner.retain(|entry| !gone.contains(&entry.token));
        if !inner.all().iter().any(|entry| Arc::ptr_eq(&entry.connection, connection)) {
            remove_bell(epfd, connection);
        }
        set.count(inner);
        woken.push(Arc::clone(&set));
    }
    all
}

/// Why an entry is not wired.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Unwired {
    /// A thread that waits may be told of it just now, as nobody else may be then; or the kernel was asked too much of late.
    Later,
    /// It cannot be: its connection has to stay on TCP.
    Stays,
}

/// One that is not in the set, as the kernel says, is not wired by that.
fn wire_entry(epfd: RawFd, set: &Set, entry: &mut Entry, paths: &mut Paths, known: &Known) -> Result<(), Unwired> {
    // The kernel does not let one that is exclusive be changed, nor one whose number is gone.
    let is_fixed = entry.is_exclusive() || entry.orphan || set.nested.load(Ordering::SeqCst);
    if is_fixed || !add_own_bell(epfd, set) || add_bell(epfd, entry).is_err() || add_path(epfd, entry, paths).is_err() {
        return Err(Unwired::Stays);
    }
    // The kernel alone knows whether one that is told once was told. Who begins to wait does so under the lock that is held here.
    let spent = entry.is_once()
        && match known {
            Known::These(lines) => !kernel::is_armed(lines, entry.fd, entry.data()),
            Known::Later => return Err(Unwired::Later),
            Known::Not => return Err(Unwired::Stays),
        };
    if entry.is_once() && !spent && set.sleepers.load(Ordering::SeqCst) > 0 {
        return Err(if entry.postpone() { Unwired::Later } else { Unwired::Stays });
    }
    let before = control::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, entry.fd, token(entry));
    match before {
        Ok(()) => entry.wire(spent),
        // Its number was closed, and made again for this one, behind our back.
        Err(Errno::NOENT) => {}
        Err(_) => return Err(Unwired::Stays),
    }
    Ok(())
}

/// What the kernel is to say of a wired entry.
fn token(entry: &Entry) -> epoll_event {
    epoll_event { events: IN | OUT | PRI | RDHUP | EDGE, u64: entry.token }
}

/// Adds the bell of a joined connection to a set.
fn add_bell(epfd: RawFd, entry: &Entry) -> Result<(), Errno> {
    let bell = entry.connection.bell().ok_or(Errno::NOTCONN)?;
    let event = epoll_event { events: OUT | EDGE, u64: entry.token | BELL };
    match control::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, bell.as_fd().as_raw_fd(), event) {
        // By another descriptor of the same connection.
        Err(Errno::EXIST) => Ok(()),
        answer => answer,
    }
}

/// One that another process has as well may sleep in the same set, which is one for all of them: there the bell stays, until
/// its last holder goes.
fn remove_bell(epfd: RawFd, connection: &Connection) {
    if let Some(bell) = connection.bell().filter(|_| connection.is_alone()) {
        let none = epoll_event { events: 0, u64: 0 };
        let _ = control::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, bell.as_fd().as_raw_fd(), none);
    }
}

fn add_own_bell(epfd: RawFd, set: &Set) -> bool {
    if !set.bells.load(Ordering::SeqCst) {
        if set.bell.get().is_none()
            && let Ok(bell) = aside::lifted(SingleDoorbell::new)
        {
            let _ = set.bell.set(bell);
        }
        // Before the kernel can report it.
        set.bells.store(true, Ordering::SeqCst);
        let added = set.bell.get().is_some_and(|bell| add(epfd, bell.as_fd().as_raw_fd(), OUT, kick()).is_ok());
        set.bells.store(added, Ordering::SeqCst);
    }
    set.bells.load(Ordering::SeqCst)
}

/// Adds a descriptor of ours to a set, for edges.
fn add(epfd: RawFd, fd: RawFd, events: u32, token: u64) -> Result<(), Errno> {
    match control::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, epoll_event { events: events | EDGE, u64: token }) {
        Err(Errno::EXIST) => Ok(()),
        answer => answer,
    }
}

/// Adds the path to the peer of a joined connection to a set: its end wakes who sleeps there.
fn add_path(epfd: RawFd, entry: &Entry, paths: &mut Paths) -> Result<(), Errno> {
    // One that has ended says so by the connection.
    let Some(path_to_peer) = entry.connection.path() else { return Ok(()) };
    if paths.has(&path_to_peer) {
        return Ok(());
    }
    add(epfd, path_to_peer.as_raw_fd(), RDHUP, path())?;
    paths.add(&path_to_peer);
    Ok(())
}

/// `epoll_ctl` about a socket that is not connected: what it asks for is kept for the connection that it may become. `real` is
/// the call itself.
pub(crate) fn register(set: &Set, request: Request, real: impl FnOnce() -> i32) -> i32 {
    let mut inner = set.lock();
    let answer = real();
    if answer == 0 {
        inner.register(request.fd, request.event.filter(|_| request.operation != libc::EPOLL_CTL_DEL));
    }
    answer
}

/// What was asked for before `fd` was connected is from now on about `connection`. Says whether that comes too late.
pub(crate) fn adopt(set: &Set, fd: RawFd, connection: &Arc<Connection>) -> bool {
    let mut guard = set.lock();
    let inner = &mut *guard;
    let Some(event) = inner.registered(fd) else { return false };
    if inner.find(fd, connection).is_none() {
        let at = inner.push(fd, connection, tokens());
        inner.wake(at).ask(event);
        set.count(inner);
    }
    connection.is_wired()
}

/// The number `fd` of `connection` is about to be closed, and there are others. Registrations by it stay, and nobody can change
/// them any more.
pub(crate) fn closed(fd: RawFd, connection: &Arc<Connection>) {
    for (_, set) in state::sets() {
        if set.entries.load(Ordering::SeqCst) != 0 {
            set.lock().abandon(fd, connection);
        }
    }
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
    if connection.stage() == Stage::Joined
        && operation == libc::EPOLL_CTL_ADD
        && event.is_some_and(|event| event.events & EXCLUSIVE != 0)
    {
        // The kernel lets nobody change such a registration: it is the program's own. One that was taken out is still there.
        let mut inner = set.lock();
        let absent = inner.find(fd, connection).filter(|at| inner.all()[*at].absent);
        if let Some(at) = absent {
            let none = epoll_event { events: 0, u64: 0 };
            let _ = errno::kept(|| control::epoll_ctl(request.epfd, libc::EPOLL_CTL_DEL, fd, none));
            inner.remove(at);
            set.count(&inner);
        }
        drop(inner);
        errno::kept(|| control::hand_over(process, fd, connection, Reason::Usage));
        return real();
    }
    let mut guard = set.lock();
    let inner = &mut *guard;
    let found = inner.find(fd, connection);
    // One may be in the kernel under its token while another of the same connection is not, which is tried again.
    let wired = connection.is_wired() || found.is_some_and(|at| inner.all()[at].wired);
    if connection.stage() == Stage::Joined && wired {
        if found.is_none() && operation != libc::EPOLL_CTL_ADD {
            return real(); // None, or one of the program's own.
        }
        let answer = change_joined(process, set, inner, connection, request, found);
        drop(guard);
        if answer.is_ok() && operation != libc::EPOLL_CTL_DEL {
            set.changed();
        }
        return errno::answer(answer.map(|()| 0)) as i32;
    }
    let answer = real();
    if answer == 0 {
        match (operation, found, event) {
            (libc::EPOLL_CTL_DEL, Some(at), _) => inner.remove(at),
            (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, _, Some(event)) => {
                let at = found.unwrap_or_else(|| inner.push(fd, connection, tokens()));
                inner.wake(at).ask(event);
            }
            _ => {}
        }
        set.entries.store(inner.all().len(), Ordering::SeqCst);
    }
    answer
}

fn change_joined(
    process: &Process,
    set: &Set,
    inner: &mut Registry,
    connection: &Arc<Connection>,
    request: Request,
    found: Option<usize>,
) -> Result<(), Errno> {
    let Request { epfd, operation, fd, event } = request;
    let present = found.filter(|at| !inner.all()[*at].absent);
    match (operation, present, event) {
        (libc::EPOLL_CTL_DEL, Some(at), _) => {
            inner.wake(at).absent = true;
            Ok(())
        }
        (libc::EPOLL_CTL_ADD, Some(_), _) => Err(Errno::EXIST),
        (libc::EPOLL_CTL_ADD, None, Some(event)) => {
            if !add_own_bell(epfd, set) {
                process.leaves(connection, Reason::Usage);
                return Err(Errno::NOMEM);
            }
            if let Some(at) = found {
                inner.wake(at).ask(event);
                return Ok(());
            }
            let at = inner.push(fd, connection, tokens());
            let (entries, paths) = inner.all_mut();
            let entry = &entries[at];
            let added = control::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, token(entry));
            let added = added.and_then(|()| {
                add_bell(epfd, entry).and_then(|()| add_path(epfd, entry, paths)).inspect_err(|_| {
                    let _ = control::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, epoll_event { events: 0, u64: 0 });
                })
            });
            match added {
                Ok(()) => {
                    let entry = inner.wake(at);
                    entry.ask(event);
                    entry.wire(false);
                }
                Err(_) => inner.remove(at),
            }
            set.count(inner);
            added
        }
        (libc::EPOLL_CTL_MOD, Some(at), Some(event)) => {
            if event.events & EXCLUSIVE != 0 || inner.all()[at].is_exclusive() {
                return Err(Errno::INVAL);
            }
            inner.wake(at).ask(event);
            Ok(())
        }
        (libc::EPOLL_CTL_DEL | libc::EPOLL_CTL_MOD, None, _) => Err(Errno::NOENT),
        (_, _, None) => Err(Errno::FAULT),
        _ => Err(Errno::INVAL),
    }
}

/// Nobody changes these sets while this is held, nor is in the middle of a first use of anything here.
pub(crate) fn hold(sets: &[(RawFd, Arc<Set>)]) -> Vec<impl Sized + '_> {
    let _ = tokens();
    sets.iter().map(|(_, set)| set.lock()).collect()
}

/// In a child made by fork, which has the parent's sets and what they watch: it looks at all once.
pub(crate) fn inherit(sets: &[(RawFd, Arc<Set>)]) {
    for (_, set) in sets {
        // The parent's threads that sleep are not here.
        set.sleepers.store(0, Ordering::SeqCst);
        let _ = set.lock().wake_all();
    }
}

/// All sets are the kernel's again, as the program has them.
pub(crate) fn give_back() {
    for (epfd, set) in state::sets() {
        let mut inner = set.lock();
        for entry in inner.all().iter().filter(|entry| entry.wired && !entry.orphan) {
            let (operation, event) = match entry.asked() {
                Some(event) => (libc::EPOLL_CTL_MOD, event),
                None => (libc::EPOLL_CTL_DEL, token(entry)),
            };
            let _ = control::epoll_ctl(epfd, operation, entry.fd, event);
            remove_bell(epfd, &entry.connection);
        }
        inner.retain(|_| false);
        set.count(&inner);
        if set.bells.swap(false, Ordering::SeqCst) {
            let none = epoll_event { events: 0, u64: 0 };
            let paths = inner.all_mut().1.take_live();
            let paths = paths.iter().map(|path| path.as_raw_fd());
            for fd in paths.chain(set.bell.get().map(|bell| bell.as_fd().as_raw_fd())) {
                let _ = control::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, none);
            }
        }
    }
}

/// The last descriptor of a connection is closed: the kernel forgets its registrations, and so do we.
pub(crate) fn forget(connection: &Arc<Connection>) {
    for (epfd, set) in state::sets() {
        if set.entries.load(Ordering::SeqCst) != 0 {
            let mut inner = set.lock();
            let mut of_it = inner.all().iter().filter(|entry| Arc::ptr_eq(&entry.connection, connection));
            if of_it.any(|entry| entry.wired) {
                remove_bell(epfd, connection);
            }
            inner.retain(|entry| !Arc::ptr_eq(&entry.connection, connection));
            set.count(&inner);
        }
    }
}

/// The set itself is watched by another, or polled. There a bell is only an edge, and who waits elsewhere does not see
/// what a set has in shared memory: its connections go back to TCP. Until the peer has followed, the bells make the set
/// readable.
pub(crate) fn nested(process: &Process, set: &Set) {
    set.nested.store(true, Ordering::SeqCst);
    if set.wired.load(Ordering::SeqCst) == 0 {
        return;
    }
    errno::kept(|| {
        let all: Vec<_> = set.lock().wake_all().iter().map(|entry| (entry.fd, Arc::clone(&entry.connection))).collect();
        for (fd, connection) in &all {
            process.leaves(connection, Reason::Usage);
            // Says so to the peer at once: what it sends from now on comes over TCP.
            let _ = connection.retreat(process.kernel(), *fd, Reason::Usage);
        }
        process.before_sleep();
    });
    if arm(process, set) || set.stirs() {
        set.kick();
    }
}

/// `epoll_wait` on a watched set. `real` is the call itself, for so many events and so long.
pub(crate) fn wait(
    process: &Process,
    (epfd, set): (RawFd, &Set),
    events: &mut [epoll_event],
    timeout: Option<Duration>,
    mask: Mask,
    mut real: impl FnMut(&mut [epoll_event], Option<Duration>) -> isize,
) -> isize {
    let before = errno::get();
    let polls = timeout == Some(Duration::ZERO);
    let deadline = timeout.filter(|_| !polls).and_then(|timeout| Instant::now().checked_add(timeout));
    let room = events.len();
    let done = |found| {
        pass_on(set, found, found == room);
        errno::set(before);
        found as isize
    };
    loop {
        let joined = set.wired.load(Ordering::SeqCst) != 0;
        let mut found = 0;
        if joined {
            let mut said = None;
            if polls || mask.is_some() {
                let asking = SleepGuard::new(set);
                let n = real(events, Some(Duration::ZERO));
                drop(asking);
                if n < 0 {
                    pass_on(set, 0, false);
                    return n;
                }
                said = Some(n as usize);
            }
            found = find_ready(process, (epfd, set), events, said);
            if found == 0 && !polls {
                spin::until(|| {
                    found = find_ready(process, (epfd, set), events, None);
                    found > 0
                });
            }
            if found > 0 {
                return done(found);
            }
        }
        let asleep = SleepGuard::new(set);
        let mut owes = false;
        if joined && (!polls || set.nested.load(Ordering::SeqCst)) {
            errno::kept(|| process.before_sleep());
            owes = arm(process, set);
            found = find_ready(process, (epfd, set), events, None);
        }
        if found > 0 || joined && polls {
            drop(asleep);
            return done(found);
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = if polls { timeout } else { left };
        let rest = if owes { Some(left.map_or(BLIND, |left| left.min(BLIND))) } else { left };
        let slept = spin::asleep();
        let n = real(events, rest);
        drop(asleep);
        if n < 0 {
            pass_on(set, 0, false);
            return n;
        }
        if joined {
            spin::learn(slept);
        }
        found = find_ready(process, (epfd, set), events, Some(n as usize));
        if found > 0 || n == 0 && rest.is_some() && rest == left {
            return done(found);
        }
    }
}

/// Finds what is ready by now, the kernel having `said` so many events, and tells of it: so many.
fn find_ready(process: &Process, (epfd, set): (RawFd, &Set), events: &mut [epoll_event], said: Option<usize>) -> usize {
    let mut inner = set.lock();
    inner.begin_round();
    inner.wake_stalled(process.stalls());
    let mut look = SetScan { process, epfd, inner: &mut inner, events, found: 0 };
    let said = said.map(|n| look.sort(n));
    // What the kernel refuses here it refuses again when it is waited for.
    let _ = gather(&mut look, said, true);
    look.found
}

/// One look at a set, which nobody changes meanwhile.
struct SetScan<'a> {
    process: &'a Process,
    epfd: RawFd,
    inner: &'a mut Registry,
    events: &'a mut [epoll_event],
    found: usize,
}

impl Sources for SetScan<'_> {
    type Error = Errno;

    fn collect(&mut self) -> usize {
        let new = self.inner.collect(self.process, &mut self.events[self.found..]);
        self.found += new;
        new
    }

    fn ask(&mut self) -> Result<KernelReply, Errno> {
        let n = control::epoll_now(self.epfd, &mut self.events[self.found..])?;
        Ok(self.sort(n))
    }

    fn has_room(&self) -> bool {
        self.found < self.events.len()
    }
}

impl SetScan<'_> {
    /// Takes our own events out of the `n` that the kernel gave, and remembers what they mean.
    fn sort(&mut self, n: usize) -> KernelReply {
        let ours = tokens()..=tokens() | u64::from(u32::MAX);
        let mut asked = KernelReply::default();
        for at in self.found..self.found + n {
            let event = self.events[at];
            let token = event.u64;
            if !ours.contains(&token) {
                self.events[self.found + asked.plain] = event;
                asked.plain += 1;
                continue;
            }
            asked.hints = true;
            if token == path() {
                // It has ended, and those that went over it have to hear of it.
                self.process.rang();
                self.inner.miss();
                self.inner.wake_all();
            } else if token == kick() {
                self.inner.miss();
            } else if token & BELL != 0 {
                self.inner.wake_rung(token & !BELL);
            } else if let Some(at) = self.inner.find_token(token) {
                self.inner.said(at, event.events);
            }
        }
        self.found += asked.plain;
        asked
    }
}

/// A thread that is about to sleep in a set, or does.
struct SleepGuard<'a>(&'a Set);

impl<'a> SleepGuard<'a> {
    fn new(set: &'a Set) -> Self {
        // Not while a registration is being wired.
        let _still = set.lock();
        set.sleepers.fetch_add(1, Ordering::SeqCst);
        Self(set)
    }
}

impl Drop for SleepGuard<'_> {
    fn drop(&mut self) {
        // In a child that was made in a signal handler amid the sleep it was counted out at its beginning.
        let _ = self.0.sleepers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |all| all.checked_sub(1));
    }
}

/// Before a wait returns with `found` events: where there may be more for others, they look. So they do where this thread took
/// what was to wake them: they asked no peer to notify them again since.
fn pass_on(set: &Set, found: usize, is_full: bool) {
    // ORDER SeqCst: who sleeps says so before it arms. What was taken before that it has seen; what was taken after, sees it here.
    let others = set.sleepers.load(Ordering::SeqCst) > 0 && (found > 0 && is_full || set.lock().is_unarmed());
    if others || found > 0 && set.nested.load(Ordering::SeqCst) && set.stirs() {
        set.kick();
    }
}

/// Says whether something is owed to a peer.
fn arm(process: &Process, set: &Set) -> bool {
    set.lock().arm(process)
}

/// Gets on with the connections of a set that is waited for: those that were joined are prepared, those that stay on TCP
/// are the kernel's alone.
pub(crate) fn begin(process: &Process, set: &Set) {
    let decided = process.decided();
    if set.decided.swap(decided, Ordering::SeqCst) == decided {
        return;
    }
    let joined: Vec<_> = {
        let mut inner = set.lock();
        inner.retain(|entry| entry.connection.stage() != Stage::Plain);
        set.count(&inner);
        let unwired = inner.all().iter().filter(|entry| !entry.wired && entry.connection.stage() == Stage::Joined);
        unwired.map(|entry| Arc::clone(&entry.connection)).collect()
    };
    for connection in &joined {
        flow::begin(process, connection);
    }
}
