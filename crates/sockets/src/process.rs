// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the connections of one process have in common: the folder, the links to other processes, the bells, the
//! counters.
//!
//! No thread lives here. Everything that is negotiated is looked at inside the program's own calls, by
//! [`Process::advance`], which never waits.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, epoll},
    io::Errno,
};
use tombolo_domain::{
    Rendezvous, SingleBell, Slot,
    aside::{self, Aside},
};

use crate::{
    Reason,
    connection::{Connection, Direction, Stage},
    journal::{Counters, Journal},
    kernel::Kernel,
    negotiation::Exchange,
    pipes::{Broken, Line},
    ports::Ports,
    quota::Quota,
    roster::Roster,
    switch::Carrier,
    switched::Switch,
};

/// What a user can set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where ends meet: a folder that both can write to, and whose members trust each other.
    pub folder: PathBuf,
    /// Bytes of each direction's ring, a power of two.
    pub ring: u64,
    /// Bytes after which a connection is worth it; two requests and answers are as well.
    pub after: u64,
    /// Bytes of shared memory that this process makes at most, for all its connections.
    pub memory: u64,
    /// Whether connections inside one network namespace are joined.
    pub loopback: bool,
    /// For tests: both directions move to and fro at this pace.
    pub flip: Option<Duration>,
    /// Where a line for each event goes; nowhere if none.
    pub log: Option<PathBuf>,
    /// A folder for one file for each process with its counters.
    pub report: Option<PathBuf>,
    /// Services whose connections may be joined.
    pub ports: Ports,
}

/// One process.
pub struct Process {
    pub(crate) settings: Settings,
    kernel: Box<dyn Kernel>,
    pub(crate) rendezvous: Box<dyn Rendezvous>,
    pub(crate) exchange: Mutex<Exchange>,
    pub(crate) quota: Quota,
    pub(crate) roster: Roster,
    hub: Mutex<Option<Arc<Hub>>>,
    waiters: Mutex<Vec<Watch>>,
    /// Somebody took an edge of the hub, which may have told of a message or of a peer that is gone.
    rung: AtomicBool,
    pub(crate) counters: Counters,
    pub(crate) journal: Journal,
    pub(crate) switch: Switch,
    /// Sends of all connections that found no room.
    pub(crate) stalls: AtomicU64,
    begun: Instant,
    /// When the links were last listened to, in microseconds since then.
    heard: AtomicU64,
}

/// What those who wait use, held still while the process forks.
pub(crate) struct Waiting<'a> {
    hub: MutexGuard<'a, Option<Arc<Hub>>>,
    waiters: MutexGuard<'a, Vec<Watch>>,
}

impl Waiting<'_> {
    /// In the child: it is the parent's.
    pub fn forget(mut self) {
        *self.hub = None;
        self.waiters.clear();
    }
}

/// Where this process hears what concerns all who wait, and is rare: that the path to a neighbour is gone. It is never
/// drained: each who waits watches it for edges, by an epoll instance of its own or the program's, so one that wakes takes
/// nothing away from another.
#[derive(Debug)]
pub(crate) struct Hub {
    epoll: Aside,
    kick: Aside,
}

/// The descriptor of what concerns all.
#[derive(Debug)]
pub struct HubFd(Arc<Hub>);

impl AsFd for HubFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.epoll.as_fd()
    }
}

impl AsRawFd for HubFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.epoll.as_raw_fd()
    }
}

impl Hub {
    fn new() -> io::Result<Self> {
        let kick = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let hub = Self { epoll: instance()?, kick: Aside::new(kick)? };
        watch(&hub.epoll, hub.kick.as_fd(), HUB)?;
        Ok(hub)
    }
}

/// An epoll instance of ours.
fn instance() -> io::Result<Aside> {
    aside::lifted(|| Aside::new(epoll::create(epoll::CreateFlags::CLOEXEC)?))
}

/// What the events of a waiter's instance are about.
const HUB: u64 = 0;
const BELL: u64 = 1;

fn watch(epoll: &Aside, fd: BorrowedFd<'_>, about: u64) -> rustix::io::Result<()> {
    let ready = if about == BELL { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
    epoll::add(epoll, fd, epoll::EventData::new_u64(about), ready | epoll::EventFlags::ET)
}

/// An epoll instance that watches the hub and the bells of some connections.
#[derive(Debug)]
struct Watch {
    epoll: Aside,
    /// In the order of their addresses.
    bells: Vec<Arc<SingleBell>>,
}

impl Watch {
    /// Watches these and no others.
    fn turn_to(&mut self, bells: Vec<Arc<SingleBell>>) -> rustix::io::Result<()> {
        let before = std::mem::take(&mut self.bells);
        before
            .iter()
            .filter(|bell| !has(&bells, bell))
            .try_for_each(|bell| epoll::delete(&self.epoll, bell.as_fd()))?;
        bells.iter().filter(|bell| !has(&before, bell)).try_for_each(|bell| watch(&self.epoll, bell.as_fd(), BELL))?;
        self.bells = bells;
        Ok(())
    }

    fn is_for(&self, bells: &[Arc<SingleBell>]) -> bool {
        self.bells.len() == bells.len() && self.bells.iter().zip(bells).all(|(one, other)| Arc::ptr_eq(one, other))
    }
}

/// Whether `bell` is one of `bells`, which are in the order of their addresses.
fn has(bells: &[Arc<SingleBell>], bell: &Arc<SingleBell>) -> bool {
    bells.binary_search_by_key(&Arc::as_ptr(bell), Arc::as_ptr).is_ok()
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Process").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Process {
    /// A process that has no connections yet. Opens nothing.
    #[must_use]
    pub fn new(settings: Settings, kernel: Box<dyn Kernel>, rendezvous: Box<dyn Rendezvous>) -> Self {
        Self {
            quota: Quota::new(settings.memory),
            roster: Roster::default(),
            settings,
            kernel,
            rendezvous,
            exchange: Mutex::default(),
            hub: Mutex::default(),
            waiters: Mutex::default(),
            rung: AtomicBool::new(false),
            counters: Counters::default(),
            journal: Journal::default(),
            switch: Switch::default(),
            stalls: AtomicU64::new(0),
            begun: Instant::now(),
            heard: AtomicU64::new(0),
        }
    }

    /// How many connections have been decided upon, one way or the other: grows when there is a reason to look again.
    #[must_use]
    pub fn decided(&self) -> u64 {
        self.counters.joined.load(Ordering::SeqCst) + self.counters.stayed.load(Ordering::SeqCst)
    }

    /// Sends of all connections that found no room so far.
    #[must_use]
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::SeqCst)
    }

    /// The kernel's calls.
    pub fn kernel(&self) -> &dyn Kernel {
        &*self.kernel
    }

    /// A new connection that this end `dialled` or accepted. It begins on TCP; whether anybody is at the other end to
    /// join is found out later.
    #[must_use]
    pub fn track(&self, dialled: bool, fd: RawFd) -> Connection {
        let connection = Connection::new(dialled, fd);
        if self.tells() {
            // The kernel has forgotten them where the connection ends by a reset.
            connection.identity(self.kernel());
        }
        connection
    }

    /// Where both directions of a connection should be now.
    pub(crate) fn wanted(&self, connection: &Connection) -> Carrier {
        if connection.leaves() {
            return Carrier::Tcp;
        }
        match self.settings.flip {
            Some(pace) if (self.begun.elapsed().as_micros() / pace.as_micros().max(1)) % 2 == 1 => Carrier::Tcp,
            _ => Carrier::Pipe,
        }
    }

    // ---- waiting

    fn hub(&self) -> Option<Arc<Hub>> {
        let mut hub = lock(&self.hub);
        if hub.is_none() {
            *hub = aside::lifted(Hub::new).ok().map(Arc::new);
        }
        hub.clone()
    }

    /// The descriptor at which everything that concerns all who wait is an edge, to be put into an epoll set of the program's.
    /// Never to be read; it is always ready.
    #[must_use]
    pub fn hub_fd(&self) -> Option<HubFd> {
        self.hub().map(HubFd)
    }

    /// Hears from now on when the path that `bell` belongs to is gone.
    pub(crate) fn listen_to(&self, bell: BorrowedFd<'_>) -> Result<(), Errno> {
        let hub = self.hub().ok_or(Errno::MFILE)?;
        watch(&hub.epoll, bell, HUB)
    }

    pub(crate) fn hold_waiting(&self) -> Waiting<'_> {
        Waiting { waiters: lock(&self.waiters), hub: lock(&self.hub) }
    }

    /// In a child made by fork: hears the bells that the connections it inherited need. Where there are no descriptors
    /// for that, it looks now and then instead.
    pub(crate) fn listen_anew(&self, lines: &[Arc<Line>]) {
        for line in lines {
            let _ = self.listen_to(line.bell.fd(Slot::Data));
        }
        // Whatever rang while it was made.
        self.rang();
    }

    /// An edge of the hub was taken. Whoever sleeps next looks first at what it may have told.
    pub fn rang(&self) {
        self.rung.store(true, Ordering::SeqCst);
    }

    /// Whether the links were left alone for so long; who is told so listens.
    pub(crate) fn has_not_heard_for(&self, pause: Duration) -> bool {
        let now = self.begun.elapsed().as_micros() as u64;
        let due = now.wrapping_sub(self.heard.load(Ordering::Relaxed)) >= pause.as_micros() as u64;
        if due {
            self.heard.store(now, Ordering::Relaxed);
        }
        due
    }

    /// To be called before a sleep, when rings from before are forgotten: looks at what came over the links, if an edge was
    /// taken since the last look.
    pub fn before_sleep(&self) {
        if self.rung.swap(false, Ordering::SeqCst) {
            lock(&self.exchange).hear(self);
        }
    }

    /// Wakes everybody of this process who waits, to look again. For what is rare: it costs as much as there are.
    pub fn kick(&self) {
        if let Some(hub) = &*lock(&self.hub) {
            // A counter that is full has been heard.
            let _ = rustix::io::write(&hub.kick, &1_u64.to_ne_bytes());
        }
    }

    /// An epoll instance for one who is about to wait for these connections: it polls readable when one of their bells rang
    /// after [`Waiter::forget`].
    #[must_use]
    pub fn waiter<'c>(&self, connections: impl Iterator<Item = &'c Arc<Connection>>) -> Option<Waiter<'_>> {
        let mut bells: Vec<_> = connections.filter_map(|connection| connection.bell().cloned()).collect();
        bells.sort_by_key(Arc::as_ptr);
        bells.dedup_by_key(|bell| Arc::as_ptr(bell));
        let pooled = {
            let mut pool = lock(&self.waiters);
            let fit = pool.iter().rposition(|watch| watch.is_for(&bells));
            fit.map(|at| pool.swap_remove(at)).or_else(|| pool.pop())
        };
        let mut watch = match pooled {
            Some(watch) => watch,
            None => {
                let epoll = instance().ok()?;
                self::watch(&epoll, self.hub_fd()?.as_fd(), HUB).ok()?;
                Watch { epoll, bells: Vec::new() }
            }
        };
        if !watch.is_for(&bells) {
            watch.turn_to(bells).ok()?;
        }
        Some(Waiter { process: self, watch: Some(watch) })
    }

    /// The last descriptor of `connection` is closed: nobody waits for it any more.
    pub fn unwatch(&self, connection: &Connection) {
        if let Some(bell) = connection.bell() {
            lock(&self.waiters).retain(|watch| !has(&watch.bells, bell));
        }
    }

    // ---- what happened

    /// Bytes of the program moved.
    pub(crate) fn moved(&self, direction: Direction, carrier: Carrier, n: usize) {
        self.counters.move_bytes(direction, carrier, n);
        self.report_now_and_then(n);
    }

    /// Bytes of the program moved by the kernel, before the connection had a choice.
    pub fn moved_plain(&self, direction: Direction, n: usize) {
        self.moved(direction, Carrier::Tcp, n);
    }

    /// A stream cannot go on: what its program hears.
    pub(crate) fn broken(&self, connection: &Connection, broken: Broken) -> Errno {
        connection.leave(Reason::Corrupt);
        self.log(connection, &format!("broken: {broken}"));
        Errno::CONNRESET
    }

    /// The connection stays on TCP.
    pub fn stays(&self, connection: &Connection, reason: Reason) {
        if connection.stay_plain(reason) {
            self.counters.stay(reason);
            self.log(connection, &format!("stays on TCP: {}", reason.words()));
        }
    }

    /// The connection goes back to TCP.
    pub fn leaves(&self, connection: &Connection, reason: Reason) {
        if connection.stage() == Stage::Joined && connection.reason().is_none() {
            connection.leave(reason);
            self.log(connection, &format!("goes back to TCP: {}", reason.words()));
        } else {
            self.stays(connection, reason);
        }
    }

    /// The connection had to be on TCP, and could not: it is to be ended. Says whether this is news.
    #[must_use]
    pub fn gives_up(&self, connection: &Connection) -> bool {
        let news = connection.give_up();
        if news {
            self.log(connection, "ended: it could not go back to TCP in time");
        }
        news
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // So few bytes come whole and without waiting once the system is up.
    while !matches!(rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()), Ok(n) if n == N) {}
    bytes
}

pub(crate) fn random_id() -> u64 {
    u64::from_ne_bytes(random()).max(1)
}

/// One who waits.
#[derive(Debug)]
pub struct Waiter<'a> {
    process: &'a Process,
    watch: Option<Watch>,
}

impl Waiter<'_> {
    /// Polls readable when a bell rang since the last [`forget`](Self::forget).
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.watch.as_ref().expect("until it is dropped").epoll.as_fd()
    }

    /// R-12, A0: forgets rings that came before now.
    pub fn forget(&self) {
        let mut room = [const { std::mem::MaybeUninit::uninit() }; 16];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        while let Ok((rung, _)) = epoll::wait(self.fd(), &mut room, Some(&now)) {
            if rung.iter().any(|event| event.data.u64() == HUB) {
                self.process.rang();
            }
            if rung.len() < 16 {
                break;
            }
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        lock(&self.process.waiters).extend(self.watch.take());
    }
}
