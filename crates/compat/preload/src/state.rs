// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds the state of this process: the settings from the environment and the table of watched descriptors.
//!
//! Every call looks its descriptor up in the table. For a descriptor that is not watched this costs one load.

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

/// Number of descriptors that can be watched. Higher ones are left to the kernel.
const WATCHED: usize = 1 << 16;
/// Number of entries that the table starts with.
const SLOTS: usize = 256;

/// Kind of a descriptor about which nothing is known. The constants below are the other kinds.
const NOTHING: u8 = 0;
/// A socket that was connected, or accepted (`ACCEPTED`), and has moved no byte.
const DIALLED: u8 = 1;
const ACCEPTED: u8 = 2;
const CONNECTION: u8 = 3;
const SET: u8 = 4;
/// A TCP socket that the program created: a listener, or one that will be connected.
const STREAM: u8 = 5;
/// As `STREAM`, and the program added it to an epoll set.
const REGISTERED: u8 = 6;
/// A socket created as `STREAM` that is also in use in a way that this library does not see. It stays with the kernel
/// even once it is connected.
const SHARED: u8 = 7;
/// As `ACCEPTED`, and known to be TCP.
const ACCEPTED_STREAM: u8 = 8;
/// As `DIALLED`, and the program had added it to an epoll set before.
const DIALLED_REGISTERED: u8 = 9;

static KINDS: [AtomicU8; WATCHED] = [const { AtomicU8::new(NOTHING) }; WATCHED];
/// For each descriptor that is a connection, the kernel's cookie of its socket.
static COOKIES: [AtomicU64; WATCHED] = [const { AtomicU64::new(0) }; WATCHED];
static WATCH: RwLock<Vec<Option<Watched>>> = RwLock::new(Vec::new());
/// Whether there may be a [`STREAM`]; below, whether there ever was a [`SET`].
static STREAMS: AtomicBool = AtomicBool::new(false);
static SETS: AtomicBool = AtomicBool::new(false);
/// ID of the process that the table describes. A child of vfork shares this memory and must not change the table.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// Stage that this process has reached.
static STAGE: AtomicU8 = AtomicU8::new(IDLE);
/// The process never had a connection.
const IDLE: u8 = 0;
const BUSY: u8 = 1;
/// The process was about to become another program.
const LEFT: u8 = 2;
/// The process has confined itself, so everything goes to the kernel.
const SHUT: u8 = 3;

/// Connections that this process gave up because its image was about to be replaced.
pub(crate) static GIVEN_UP: Mutex<Vec<Arc<Connection>>> = Mutex::new(Vec::new());

#[derive(Clone, Debug)]
pub(crate) enum Watched {
    Connection(Arc<Connection>),
    Set(Arc<Set>),
}

/// This process, initialised under the table's lock.
static PROCESS: OnceLock<Option<Process>> = OnceLock::new();

/// Returns this process, if the environment asks for shared memory.
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
            // If there is a broker, connections may be with other machines too.
            let machines = env::var_os("TOMBOLO_SOCKETS_VM").is_none_or(|value| value != "off").then(machines);
            // In a Xen domain only if the environment asks for that, because a fork may cost connections there.
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

/// Returns this process for a fork if it was initialised. That includes a process with nothing to watch yet, as its
/// other threads may hold locks. Otherwise returns a guard that keeps them from initialising it meanwhile.
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

/// Returns the settings that `tombolo run` put into the environment. An invalid number counts as absent, because it
/// must not make a program fail.
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

/// Returns the ports to join. If a list is invalid, no connection is joined.
fn ports() -> Ports {
    let list =
        |name| env::var_os(name).filter(|value| !value.is_empty()).map(|value| value.to_string_lossy().into_owned());
    Ports::parse(list("TOMBOLO_SOCKETS_ONLY").as_deref(), list("TOMBOLO_SOCKETS_NOT").as_deref())
}

/// Returns whether this is the process that the table describes.
pub(crate) fn is_owner() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    owner == 0 || owner == rustix::process::getpid().as_raw_nonzero().get() as u32
}

fn set_owner() {
    OWNER.store(std::process::id(), Ordering::Relaxed);
    kernel::mark();
}

/// Makes the child of a fork the owner of its copy of the table, even if the parent had nothing to watch yet.
pub(crate) fn inherit() {
    if OWNER.load(Ordering::Relaxed) != 0 {
        set_owner();
    }
    forget_absent();
}

/// Forgets descriptors that this child does not have. The kernel copies a process's descriptors first and its memory
/// later. A descriptor that another thread of the parent opened in between is in this copy of the table, but its number
/// will be another file's here.
fn forget_absent() {
    for (fd, kind) in KINDS.iter().enumerate() {
        let found = kind.load(Ordering::Relaxed);
        // Connections and sets entered the table under its lock, which the parent held.
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

/// Returns the table's entry for `fd`, if it is a connection or a set.
pub(crate) fn watched(fd: RawFd) -> Option<Watched> {
    if !matches!(kind(fd), CONNECTION | SET) {
        return None;
    }
    let _inside = inside::enter();
    read().get(fd as usize).cloned().flatten()
}

/// Returns whether there is anything about `fd` to forget.
#[inline]
pub(crate) fn is_known(fd: RawFd) -> bool {
    kind(fd) != NOTHING
}

/// Returns whether `fd` belongs to this library, unknown to the program. A child of vfork may close its own copies.
#[inline]
pub(crate) fn is_ours(fd: RawFd) -> bool {
    aside::is_reserved(fd) && is_owner()
}

/// Returns the first of this library's descriptors from `first` on.
pub(crate) fn next_of_ours(first: u32) -> Option<u32> {
    let found = RawFd::try_from(first).ok().and_then(aside::next).filter(|_| is_owner());
    found.and_then(|fd| u32::try_from(fd).ok())
}

/// Returns what `fd` is, if it is watched.
#[inline]
pub(crate) fn find(fd: RawFd) -> Option<Watched> {
    match kind(fd) {
        NOTHING | STREAM | REGISTERED | SHARED => None,
        fresh if is_fresh(fresh) => find_fresh(fd, fresh),
        _ => watched(fd),
    }
}

/// Returns the connection at `fd`, if it is watched.
#[inline]
pub(crate) fn connection(fd: RawFd) -> Option<Arc<Connection>> {
    match find(fd) {
        Some(Watched::Connection(connection)) => Some(connection),
        _ => None,
    }
}

/// Returns whether `fd` is joined, as far as this can be determined without waiting for a lock. If not, the kernel can
/// carry the call out. This is for a call that has interrupted another, or that this library makes through the standard
/// library on one of its own files.
pub(crate) fn is_out_of_reach(fd: RawFd) -> bool {
    let is_joined = |table: RwLockReadGuard<'_, Vec<Option<Watched>>>| match table.get(fd as usize) {
        Some(Some(Watched::Connection(connection))) => connection.stage() == Stage::Joined,
        _ => false,
    };
    kind(fd) == CONNECTION && is_still(fd) && WATCH.try_read().map_or(true, is_joined)
}

/// Returns whether the connection that the table has for `fd` still has that number. The program may have closed it
/// past this library.
pub(crate) fn is_still(fd: RawFd) -> bool {
    let known = usize::try_from(fd).ok().and_then(|at| COOKIES.get(at));
    kind(fd) != CONNECTION || known.is_some_and(|known| known.load(Ordering::Relaxed) == kernel::socket_cookie(fd))
}

/// Forgets `fd` in a call that has interrupted another.
pub(crate) fn abandon(fd: RawFd) {
    set_kind(fd, NOTHING);
}

/// Returns the epoll set at `fd`, if it is watched.
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

/// Begins to track a socket of the fresh kind `found` at the first call that may move bytes. Its addresses are looked
/// up only when it has shown traffic.
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

/// Forgets `fd`, unless another thread has found out more than `found` meanwhile.
fn forget_if(fd: RawFd, found: u8) {
    change_kind(fd, found, NOTHING);
}

/// Changes the kind of `fd` from `from` to `to`. Returns whether it was `from`.
fn change_kind(fd: RawFd, from: u8, to: u8) -> bool {
    let slot = usize::try_from(fd).ok().and_then(|at| KINDS.get(at));
    slot.is_some_and(|slot| slot.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok())
}

fn put(table: &mut Vec<Option<Watched>>, fd: RawFd, what: Watched) -> Watched {
    let at = fd as usize;
    if table.len() <= at {
        // Allocates seldom: a signal handler that has interrupted `malloc` may wait for the table.
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

/// Records that the program is about to connect `fd`. From now on this library sees every wait for it.
pub(crate) fn dialling(fd: RawFd) {
    if is_unconnected(fd) && process().is_some() {
        began();
        change_kind(fd, STREAM, DIALLED);
        change_kind(fd, REGISTERED, DIALLED_REGISTERED);
    }
}

/// Undoes [`dialling`] for a connect that has not begun.
pub(crate) fn not_dialled(fd: RawFd) {
    change_kind(fd, DIALLED, STREAM);
    change_kind(fd, DIALLED_REGISTERED, REGISTERED);
}

/// Returns whether `fd` is a TCP socket that the program created and has not connected so far.
#[inline]
pub(crate) fn is_unconnected(fd: RawFd) -> bool {
    matches!(kind(fd), STREAM | REGISTERED)
}

/// Records that the program adds `fd`, which is not connected, to an epoll set. Returns whether it is still
/// unconnected.
pub(crate) fn registered(fd: RawFd) -> bool {
    change_kind(fd, STREAM, REGISTERED) || kind(fd) == REGISTERED
}

/// Records that `fd` is in use in a way that this library does not see. A socket that is not connected so far then
/// stays on TCP permanently.
pub(crate) fn shared(fd: RawFd) {
    change_kind(fd, STREAM, SHARED);
    change_kind(fd, REGISTERED, SHARED);
}

/// Leaves `fd` to the kernel, whatever it is or becomes.
pub(crate) fn leave_alone(fd: RawFd) {
    set_kind(fd, SHARED);
}

/// Records that the program accepted `fd`, about which nothing is known, from `listener`.
pub(crate) fn accepted(listener: RawFd, fd: RawFd) {
    let is_tcp = matches!(kind(listener), STREAM | REGISTERED | SHARED);
    set_kind(fd, if is_tcp { ACCEPTED_STREAM } else { ACCEPTED });
}

/// Records that the program created a TCP socket.
pub(crate) fn made_stream(fd: RawFd) {
    set_kind(fd, STREAM);
    STREAMS.store(true, Ordering::Relaxed);
}

/// Records that there is something to watch.
pub(crate) fn began() {
    let _ = STAGE.compare_exchange(IDLE, BUSY, Ordering::Relaxed, Ordering::Relaxed);
}

/// The locked table, held while the process forks.
pub(crate) struct Table(RwLockWriteGuard<'static, Vec<Option<Watched>>>);

/// Locks the table, so that nobody changes it while the result is held. First adds every socket that turns out to be a
/// connection, because two processes will have it.
pub(crate) fn hold_for_fork() -> Table {
    share_unconnected();
    for (fd, kind) in KINDS.iter().enumerate() {
        let found = kind.load(Ordering::Acquire);
        // A socket that is not connected yet is not a connection of either process.
        if is_fresh(found) && kernel::addresses(fd as RawFd).is_some() {
            find_fresh(fd as RawFd, found);
        }
    }
    Table(write())
}

/// Prepares unconnected sockets for a fork, after which two processes have each of them. Whichever process connects
/// one, the other may use it.
pub(crate) fn share_unconnected() {
    if STREAMS.swap(false, Ordering::Relaxed) {
        (0..WATCHED as RawFd).filter(|fd| is_unconnected(*fd)).for_each(shared);
    }
}

impl Table {
    /// Returns each connection once.
    pub fn all(&self) -> Vec<Arc<Connection>> {
        let mut all: Vec<_> = connections_in(&self.0).into_iter().map(|(_, connection)| connection).collect();
        all.sort_by_key(Arc::as_ptr);
        all.dedup_by_key(|connection| Arc::as_ptr(connection));
        all
    }

    /// Returns each set once, with one of its descriptors.
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

/// Leaves sockets that have moved no byte to the kernel from now on.
pub(crate) fn forget_fresh() {
    for (fd, kind) in KINDS.iter().enumerate() {
        let found = kind.load(Ordering::Relaxed);
        if is_fresh(found) {
            forget_if(fd as RawFd, found);
        }
    }
}

/// Makes `fd` a descriptor about which nothing is known. Returns the entry that the table had for it.
pub(crate) fn forget(fd: RawFd) -> Option<Watched> {
    if kind(fd) == NOTHING {
        return None;
    }
    let _inside = inside::enter();
    let mut table = write();
    set_kind(fd, NOTHING);
    table.get_mut(fd as usize).and_then(Option::take)
}

/// Records that the program created an epoll set. From now on it may wait at one.
pub(crate) fn made_set() {
    SETS.store(true, Ordering::Relaxed);
}

/// Enters `fd`, which is below [`bound`], into the table as `what`.
pub(crate) fn watch(fd: RawFd, what: Watched) {
    put(&mut write(), fd, what);
}

/// Replaces `old` by the result of [`Connection::begin_anew`] at all its numbers and in the sets, if nobody but the
/// caller holds `old`. Then no thread is in a call on `old`, and none can begin one.
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

/// Records `to` as another number of `from`, which is neither a connection nor a set. The program may connect the
/// socket by one number and use it by the other.
pub(crate) fn share_with(from: RawFd, to: RawFd) {
    shared(from);
    set_kind(to, kind(from));
}

/// Returns a descriptor of the same connection other than `fd`.
pub(crate) fn other(fd: RawFd, connection: &Arc<Connection>) -> Option<RawFd> {
    let table = read();
    table.iter().enumerate().find_map(|(at, watched)| match watched {
        Some(Watched::Connection(other)) if at as RawFd != fd && Arc::ptr_eq(other, connection) => Some(at as RawFd),
        _ => None,
    })
}

/// Returns all watched connections, once for each of their descriptors.
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

/// Returns all watched epoll sets, with their descriptors.
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

/// Returns whether there may be something to put in order before the process ends.
pub(crate) fn has_begun() -> bool {
    matches!(STAGE.load(Ordering::Relaxed), BUSY | LEFT) && is_owner()
}

/// Returns this process, if it ever had a connection to watch. Returns `None` in a copy of the process that was made by
/// a call which this library did not see: there everything goes to the kernel.
#[inline]
pub(crate) fn busy() -> Option<&'static Process> {
    match STAGE.load(Ordering::Relaxed) {
        IDLE | SHUT => return None,
        LEFT if is_owner() => came_back(),
        _ => {}
    }
    if kernel::is_marked() { process() } else { None }
}

/// Returns the same. If the program has created a set, returns this process also before there is anything to watch,
/// because a wait may last until there is.
#[inline]
pub(crate) fn waiting() -> Option<&'static Process> {
    match STAGE.load(Ordering::Relaxed) {
        IDLE if SETS.load(Ordering::Relaxed) && kernel::is_marked() => process(),
        _ => busy(),
    }
}

/// Records that this process is about to become another program.
pub(crate) fn left() {
    STAGE.store(LEFT, Ordering::SeqCst);
}

/// Stops watching everything. Clears the owner too, because the question whose process this is would cost a system
/// call.
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

/// Takes back the connections given up for an `exec` that failed because there was no such program.
#[cold]
fn returned() {
    for connection in GIVEN_UP.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        connection.members.come_back();
    }
}

/// Returns the number of descriptors that may be watched: the highest plus one.
pub(crate) fn bound() -> RawFd {
    WATCHED as RawFd
}
