// SPDX-License-Identifier: Apache-2.0 OR MIT
//! This process: what the environment asks for, and which descriptors are watched.
//!
//! The table answers the one question that every call asks, and for a descriptor that is not watched it costs one load.

use std::{
    env,
    os::fd::RawFd,
    path::PathBuf,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use tombolo_backends::{machines, rendezvous_in, xen_domains};
use tombolo_sockets::{
    Process, Settings, aside,
    connection::{Connection, Stage},
    ports::Ports,
};

use crate::{
    epoll::{self, Set},
    errno, inside, kernel,
};

/// Descriptors beyond this are left alone.
const WATCHED: usize = 1 << 16;
/// Places of the table as it is made.
const SLOTS: usize = 256;

/// What a descriptor is.
const NOTHING: u8 = 0;
/// A socket that was connected, or accepted, and has moved no byte.
const DIALLED: u8 = 1;
const ACCEPTED: u8 = 2;
const CONNECTION: u8 = 3;
const SET: u8 = 4;
/// A TCP socket that the program made: one that it listens at, or that will be connected.
const STREAM: u8 = 5;
/// As above, and it was put into an epoll set.
const REGISTERED: u8 = 6;
/// One that was made as above and that somebody has by a way that is not watched: once connected it is left alone.
const SHARED: u8 = 7;
/// As `ACCEPTED`, and it is known that it is TCP.
const ACCEPTED_STREAM: u8 = 8;
/// As `DIALLED`, and it was put into an epoll set before.
const DIALLED_REGISTERED: u8 = 9;

static KINDS: [AtomicU8; WATCHED] = [const { AtomicU8::new(NOTHING) }; WATCHED];
/// By descriptor: the kernel's own number of the socket that is a connection.
static COOKIES: [AtomicU64; WATCHED] = [const { AtomicU64::new(0) }; WATCHED];
static WATCH: RwLock<Vec<Option<Watched>>> = RwLock::new(Vec::new());
/// Whether there ever was a [`STREAM`], or a [`SET`].
static STREAMS: AtomicBool = AtomicBool::new(false);
static SETS: AtomicBool = AtomicBool::new(false);
/// The process that the table describes: a child of vfork shares the memory and must leave it alone.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// How far this process is.
static STAGE: AtomicU8 = AtomicU8::new(IDLE);
/// There never was a connection.
const IDLE: u8 = 0;
const BUSY: u8 = 1;
/// It meant to become another program.
const LEFT: u8 = 2;
/// It has shut itself in: everything goes to the kernel.
const SHUT: u8 = 3;

/// What this process gave up because its image was to go.
pub(crate) static GIVEN_UP: Mutex<Vec<Arc<Connection>>> = Mutex::new(Vec::new());

#[derive(Clone, Debug)]
pub(crate) enum Watched {
    Connection(Arc<Connection>),
    Set(Arc<Set>),
}

/// Made under the table's lock.
static PROCESS: OnceLock<Option<Process>> = OnceLock::new();

/// This process, if the environment asks for it.
pub(crate) fn process() -> Option<&'static Process> {
    if STAGE.load(Ordering::Relaxed) == SHUT {
        return None;
    }
    if let Some(known) = PROCESS.get() {
        return known.as_ref();
    }
    errno::kept(|| {
        let _table = write();
        let first = || {
            let settings = settings()?;
            set_owner();
            aside::reserve_descriptors();
            let rendezvous = rendezvous_in(&settings.folder);
            // Where a broker is, connections may be with other machines too.
            let machines = env::var_os("TOMBOLO_SOCKETS_VM").is_none_or(|value| value != "off").then(machines);
            // In a domain of Xen's only where that is asked for: a fork may cost connections there.
            let machines = machines.flatten().or_else(|| wants_xen().then(xen_domains).flatten());
            Some(Process::new(settings, Box::new(kernel::Linux), rendezvous).with_machines(machines))
        };
        PROCESS.get_or_init(first).as_ref()
    })
}

fn write() -> RwLockWriteGuard<'static, Vec<Option<Watched>>> {
    WATCH.write().unwrap_or_else(PoisonError::into_inner)
}

fn read() -> RwLockReadGuard<'static, Vec<Option<Watched>>> {
    WATCH.read().unwrap_or_else(PoisonError::into_inner)
}

/// What a fork is about: this process if it was made, also where there is nothing to watch yet, as its other threads may have locked
/// something. Otherwise what keeps them from making it meanwhile.
pub(crate) fn made() -> Result<&'static Process, Option<impl Sized>> {
    if STAGE.load(Ordering::Relaxed) != IDLE || !is_owner() || !kernel::is_marked() {
        return busy().filter(|_| is_owner()).ok_or(None);
    }
    let known = || PROCESS.get().and_then(Option::as_ref);
    if let Some(process) = known() {
        return Ok(process);
    }
    let table = write();
    known().ok_or(Some(table))
}

/// What `tombolo run` put into the environment. Numbers that make no sense are as good as none: a program must not fail
/// for them.
fn settings() -> Option<Settings> {
    let number = |name| env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let path = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let ring = |name| number(name).filter(|ring| ring.is_power_of_two() && (4096..=1 << 30).contains(ring));
    let most = ring("TOMBOLO_SOCKETS_RING");
    Some(Settings {
        folder: path("TOMBOLO_SOCKETS")?,
        ring: most.unwrap_or(1 << 20),
        tries_larger: most.is_none(),
        first_ring: ring("TOMBOLO_SOCKETS_FIRST_RING").unwrap_or(256 << 10),
        after: number("TOMBOLO_SOCKETS_AFTER"),
        memory: number("TOMBOLO_SOCKETS_MEMORY").unwrap_or(u64::MAX),
        loopback: env::var_os("TOMBOLO_SOCKETS_LOOPBACK").is_none_or(|value| value != "off"),
        flip: number("TOMBOLO_SOCKETS_FLIP_US").map(Duration::from_micros),
        log: path("TOMBOLO_SOCKETS_LOG"),
        report: path("TOMBOLO_SOCKETS_REPORT"),
        ports: ports(),
    })
}

fn wants_xen() -> bool {
    env::var_os("TOMBOLO_SOCKETS_XEN").is_some_and(|value| value == "on")
}

/// Where a list makes no sense, nothing is joined.
fn ports() -> Ports {
    let list =
        |name| env::var_os(name).filter(|value| !value.is_empty()).map(|value| value.to_string_lossy().into_owned());
    Ports::parse(list("TOMBOLO_SOCKETS_ONLY").as_deref(), list("TOMBOLO_SOCKETS_NOT").as_deref())
}

/// Whether this is the process that the table describes.
pub(crate) fn is_owner() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    owner == 0 || owner == rustix::process::getpid().as_raw_nonzero().get() as u32
}

fn set_owner() {
    OWNER.store(std::process::id(), Ordering::Relaxed);
    kernel::mark();
}

/// A child made by fork owns its copy, also of a process that had nothing to watch yet.
pub(crate) fn inherit() {
    if OWNER.load(Ordering::Relaxed) != 0 {
        set_owner();
    }
    forget_absent();
}

/// The kernel copies a process's descriptors first and its memory later: what another thread of the parent opened in between is in
/// this copy of the table, and its number will be another file's here.
fn forget_absent() {
    for (fd, kind) in KINDS.iter().enumerate() {
        let found = kind.load(Ordering::Relaxed);
        // The others came there under the table's lock, which the parent held.
        if !matches!(found, NOTHING | CONNECTION | SET) && !errno::kept(|| kernel::is_tcp(fd as RawFd)) {
            forget_if(fd as RawFd, found);
        }
    }
}

fn kind(fd: RawFd) -> u8 {
    usize::try_from(fd).ok().and_then(|at| KINDS.get(at)).map_or(NOTHING, |kind| kind.load(Ordering::Acquire))
}

fn set_kind(fd: RawFd, kind: u8) {
    if let Some(slot) = usize::try_from(fd).ok().and_then(|at| KINDS.get(at)) {
        slot.store(kind, Ordering::Release);
    }
}

/// What is in the table for `fd`, if it is a connection or a set.
pub(crate) fn watched(fd: RawFd) -> Option<Watched> {
    if !matches!(kind(fd), CONNECTION | SET) {
        return None;
    }
    let _inside = inside::enter();
    read().get(fd as usize).cloned().flatten()
}

/// Whether there is anything about `fd` to forget.
#[inline]
pub(crate) fn is_known(fd: RawFd) -> bool {
    kind(fd) != NOTHING
}

/// Whether `fd` is the library's, which the program does not know of. A child of vfork closes its own copies.
#[inline]
pub(crate) fn is_ours(fd: RawFd) -> bool {
    aside::is_aside(fd) && is_owner()
}

/// The first of the library's descriptors from `first` on.
pub(crate) fn next_of_ours(first: u32) -> Option<u32> {
    let found = RawFd::try_from(first).ok().and_then(aside::next).filter(|_| is_owner());
    found.and_then(|fd| u32::try_from(fd).ok())
}

/// What `fd` is, if it is watched.
#[inline]
pub(crate) fn find(fd: RawFd) -> Option<Watched> {
    match kind(fd) {
        NOTHING | STREAM | REGISTERED | SHARED => None,
        fresh if is_fresh(fresh) => find_fresh(fd, fresh),
        _ => watched(fd),
    }
}

/// The connection that `fd` is, if it is one that is watched.
#[inline]
pub(crate) fn connection(fd: RawFd) -> Option<Arc<Connection>> {
    match find(fd) {
        Some(Watched::Connection(connection)) => Some(connection),
        _ => None,
    }
}

/// For a call that has interrupted another, or that this library makes by the standard library on a file of its own: whether `fd`
/// is joined, as far as can be told without waiting for a lock. Otherwise
/// the kernel can carry the call out.
pub(crate) fn is_out_of_reach(fd: RawFd) -> bool {
    let is_joined = |table: RwLockReadGuard<'_, Vec<Option<Watched>>>| match table.get(fd as usize) {
        Some(Some(Watched::Connection(connection))) => connection.stage() == Stage::Joined,
        _ => false,
    };
    kind(fd) == CONNECTION && is_still(fd) && WATCH.try_read().map_or(true, is_joined)
}

/// Whether the connection that `fd` is taken for still has that number: somebody may have closed it past this library.
pub(crate) fn is_still(fd: RawFd) -> bool {
    let known = usize::try_from(fd).ok().and_then(|at| COOKIES.get(at));
    kind(fd) != CONNECTION || known.is_some_and(|known| known.load(Ordering::Relaxed) == kernel::socket_cookie(fd))
}

/// For a call that has interrupted another: nothing is known of `fd` any more.
pub(crate) fn abandon(fd: RawFd) {
    set_kind(fd, NOTHING);
}

/// The epoll set that `fd` is, if it is one that is watched.
#[inline]
pub(crate) fn set(fd: RawFd) -> Option<Arc<Set>> {
    match kind(fd) {
        SET => match watched(fd) {
            Some(Watched::Set(set)) => Some(set),
            _ => None,
        },
        _ => None,
    }
}

/// The first call on a socket that may move bytes, and that was `found` to be fresh. What its addresses are is asked when it
/// has shown traffic.
#[cold]
fn find_fresh(fd: RawFd, found: u8) -> Option<Watched> {
    let process = process()?;
    if found == ACCEPTED && !errno::kept(|| kernel::is_tcp(fd)) {
        forget_if(fd, found);
        return None;
    }
    let _inside = inside::enter();
    let connection = Arc::new(process.track(matches!(found, DIALLED | DIALLED_REGISTERED), fd));
    let mut table = write();
    match kind(fd) {
        now if now == found => {
            if found == DIALLED_REGISTERED {
                sets_in(&table).iter().for_each(|(_, set)| _ = epoll::adopt(set, fd, &connection));
            }
            Some(put(&mut table, fd, Watched::Connection(connection)))
        }
        // Another thread was faster.
        CONNECTION => table.get(fd as usize).cloned().flatten(),
        _ => None,
    }
}

/// Nothing is known of `fd`, unless another thread has found out more meanwhile.
fn forget_if(fd: RawFd, found: u8) {
    change_kind(fd, found, NOTHING);
}

/// Says whether it was that.
fn change_kind(fd: RawFd, from: u8, to: u8) -> bool {
    let slot = usize::try_from(fd).ok().and_then(|at| KINDS.get(at));
    slot.is_some_and(|slot| slot.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok())
}

fn put(table: &mut Vec<Option<Watched>>, fd: RawFd, what: Watched) -> Watched {
    let at = fd as usize;
    if table.len() <= at {
        // Seldom: a handler of a signal that has interrupted `malloc` may wait for the table.
        table.resize((at + 1).next_power_of_two().max(SLOTS), None);
    }
    let kind = if matches!(what, Watched::Connection(_)) { CONNECTION } else { SET };
    if kind == CONNECTION {
        COOKIES[at].store(kernel::socket_cookie(fd), Ordering::Relaxed);
    }
    table[at] = Some(what.clone());
    set_kind(fd, kind);
    what
}

/// The program is about to connect `fd`: whoever waits for it from now on is seen.
pub(crate) fn dialling(fd: RawFd) {
    if is_unconnected(fd) && process().is_some() {
        began();
        change_kind(fd, STREAM, DIALLED);
        change_kind(fd, REGISTERED, DIALLED_REGISTERED);
    }
}

/// It did not come to that.
pub(crate) fn not_dialled(fd: RawFd) {
    change_kind(fd, DIALLED, STREAM);
    change_kind(fd, DIALLED_REGISTERED, REGISTERED);
}

/// Whether `fd` is a TCP socket that the program made, and did not connect so far.
#[inline]
pub(crate) fn is_unconnected(fd: RawFd) -> bool {
    matches!(kind(fd), STREAM | REGISTERED)
}

/// `fd`, which is not connected, is put into a set. Says whether it still is not.
pub(crate) fn registered(fd: RawFd) -> bool {
    change_kind(fd, STREAM, REGISTERED) || kind(fd) == REGISTERED
}

/// Somebody has `fd` by a way that is not watched. One that is not connected so far is left alone for good.
pub(crate) fn shared(fd: RawFd) {
    change_kind(fd, STREAM, SHARED);
    change_kind(fd, REGISTERED, SHARED);
}

/// Whatever `fd` is or becomes is the kernel's.
pub(crate) fn leave_alone(fd: RawFd) {
    set_kind(fd, SHARED);
}

/// The program accepted `fd`, of which nothing is known, from `listener`.
pub(crate) fn accepted(listener: RawFd, fd: RawFd) {
    let is_tcp = matches!(kind(listener), STREAM | REGISTERED | SHARED);
    set_kind(fd, if is_tcp { ACCEPTED_STREAM } else { ACCEPTED });
}

/// The program made a TCP socket.
pub(crate) fn made_stream(fd: RawFd) {
    set_kind(fd, STREAM);
    STREAMS.store(true, Ordering::Relaxed);
}

/// There is something to watch.
pub(crate) fn began() {
    let _ = STAGE.compare_exchange(IDLE, BUSY, Ordering::Relaxed, Ordering::Relaxed);
}

/// The table, held while the process forks.
pub(crate) struct Table(RwLockWriteGuard<'static, Vec<Option<Watched>>>);

/// Nobody changes the table while this is held. All sockets that turn out to be connections are in it: two processes will
/// have them.
pub(crate) fn hold_for_fork() -> Table {
    share_unconnected();
    for (fd, kind) in KINDS.iter().enumerate() {
        let found = kind.load(Ordering::Acquire);
        // What is not connected yet is nobody's yet.
        if is_fresh(found) && kernel::addresses(fd as RawFd).is_some() {
            find_fresh(fd as RawFd, found);
        }
    }
    Table(write())
}

/// A fork is coming: each socket that is not connected will be two processes'. Whichever connects it, the other may use it.
pub(crate) fn share_unconnected() {
    if STREAMS.swap(false, Ordering::Relaxed) {
        (0..WATCHED as RawFd).filter(|fd| is_unconnected(*fd)).for_each(shared);
    }
}

impl Table {
    /// Each connection once.
    pub fn all(&self) -> Vec<Arc<Connection>> {
        let mut all: Vec<_> = connections_in(&self.0).into_iter().map(|(_, connection)| connection).collect();
        all.sort_by_key(Arc::as_ptr);
        all.dedup_by_key(|connection| Arc::as_ptr(connection));
        all
    }

    /// Each set once, with one of its descriptors.
    pub fn sets(&self) -> Vec<(RawFd, Arc<Set>)> {
        let mut sets = sets_in(&self.0);
        sets.sort_by_key(|(_, set)| Arc::as_ptr(set));
        sets.dedup_by_key(|(_, set)| Arc::as_ptr(set));
        sets
    }
}

fn is_fresh(kind: u8) -> bool {
    matches!(kind, DIALLED | ACCEPTED | ACCEPTED_STREAM | DIALLED_REGISTERED)
}

/// Sockets that have moved no byte are left alone from now on.
pub(crate) fn forget_fresh() {
    for (fd, kind) in KINDS.iter().enumerate() {
        let found = kind.load(Ordering::Relaxed);
        if is_fresh(found) {
            forget_if(fd as RawFd, found);
        }
    }
}

/// A new descriptor that nothing is known of.
pub(crate) fn forget(fd: RawFd) -> Option<Watched> {
    if kind(fd) == NOTHING {
        return None;
    }
    let _inside = inside::enter();
    let mut table = write();
    set_kind(fd, NOTHING);
    table.get_mut(fd as usize).and_then(Option::take)
}

/// The program made an epoll set: from now on it may wait at one.
pub(crate) fn made_set() {
    SETS.store(true, Ordering::Relaxed);
}

/// From now on `fd`, which is below [`bound`], is `what`.
pub(crate) fn watch(fd: RawFd, what: Watched) {
    put(&mut write(), fd, what);
}

/// What [`Connection::begin_anew`] gives is from now on at all numbers of `old`, and in the sets, if nobody but the caller has `old`:
/// no thread is in a call on it, and none comes to be.
pub(crate) fn replace(old: &Arc<Connection>) -> Option<Arc<Connection>> {
    let _inside = inside::enter();
    let mut table = write();
    let is_its = |watched: &Option<Watched>| matches!(watched, Some(Watched::Connection(it)) if Arc::ptr_eq(it, old));
    let numbers: Vec<_> = (0..table.len()).filter(|at| is_its(&table[*at])).collect();
    if numbers.is_empty() {
        return None;
    }
    let table_guard = Table(table);
    let new = epoll::replacing::replace(&table_guard.sets(), old, numbers.len() + 1);
    table = table_guard.0;
    let new = new?;
    numbers.into_iter().for_each(|at| table[at] = Some(Watched::Connection(Arc::clone(&new))));
    Some(new)
}

/// `to` is another number of `from`, which is neither a connection nor a set. By one of the two it would be connected, and used
/// by the other.
pub(crate) fn share_with(from: RawFd, to: RawFd) {
    shared(from);
    set_kind(to, kind(from));
}

/// Another descriptor than `fd` of the same connection.
pub(crate) fn other(fd: RawFd, connection: &Arc<Connection>) -> Option<RawFd> {
    let table = read();
    table.iter().enumerate().find_map(|(at, watched)| match watched {
        Some(Watched::Connection(other)) if at as RawFd != fd && Arc::ptr_eq(other, connection) => Some(at as RawFd),
        _ => None,
    })
}

/// All connections that are watched, each with one of its descriptors.
pub(crate) fn connections() -> Vec<(RawFd, Arc<Connection>)> {
    let _inside = inside::enter();
    connections_in(&read())
}

fn connections_in(table: &[Option<Watched>]) -> Vec<(RawFd, Arc<Connection>)> {
    let all = table.iter().enumerate().filter_map(|(at, watched)| match watched {
        Some(Watched::Connection(connection)) => Some((at as RawFd, Arc::clone(connection))),
        _ => None,
    });
    all.collect()
}

/// All epoll sets that are watched, with their descriptors.
pub(crate) fn sets() -> Vec<(RawFd, Arc<Set>)> {
    let _inside = inside::enter();
    sets_in(&read())
}

fn sets_in(table: &[Option<Watched>]) -> Vec<(RawFd, Arc<Set>)> {
    let all = table.iter().enumerate().filter_map(|(at, watched)| match watched {
        Some(Watched::Set(set)) => Some((at as RawFd, Arc::clone(set))),
        _ => None,
    });
    all.collect()
}

/// Whether there may be something to put in order.
pub(crate) fn has_begun() -> bool {
    matches!(STAGE.load(Ordering::Relaxed), BUSY | LEFT) && is_owner()
}

/// This process, if it ever had a connection to watch. A copy that was made by a call nobody here saw is not it: there
/// everything goes to the kernel.
#[inline]
pub(crate) fn busy() -> Option<&'static Process> {
    match STAGE.load(Ordering::Relaxed) {
        IDLE | SHUT => return None,
        LEFT if is_owner() => came_back(),
        _ => {}
    }
    if kernel::is_marked() { process() } else { None }
}

/// The same, if it has a set that is waited for, also before there is anything to watch: a wait may last until there is.
#[inline]
pub(crate) fn waiting() -> Option<&'static Process> {
    match STAGE.load(Ordering::Relaxed) {
        IDLE if SETS.load(Ordering::Relaxed) && kernel::is_marked() => process(),
        _ => busy(),
    }
}

/// This process is about to become another program.
pub(crate) fn left() {
    STAGE.store(LEFT, Ordering::SeqCst);
}

/// From now on nothing is watched, and nobody asks whose process this is: that would be a call.
pub(crate) fn shut() {
    STAGE.store(SHUT, Ordering::SeqCst);
    OWNER.store(0, Ordering::SeqCst);
    KINDS.iter().for_each(|kind| kind.store(NOTHING, Ordering::Release));
}

#[cold]
fn came_back() {
    if STAGE.compare_exchange(LEFT, BUSY, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
        returned();
    }
}

/// It did not go: there was no such program.
#[cold]
fn returned() {
    for connection in GIVEN_UP.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        connection.members.come_back();
    }
}

/// Descriptors that may be watched: the highest plus one.
pub(crate) fn bound() -> RawFd {
    WATCHED as RawFd
}
