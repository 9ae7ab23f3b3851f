// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the connections of one process have in common: the folder, the links to other processes, the bells, the
//! counters.
//!
//! No thread lives here. Everything that is negotiated is looked at inside the program's own calls, by
//! [`Process::advance`], which never waits.

use std::{
    os::fd::RawFd,
    path::PathBuf,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::io::Errno;
use tombolo_domain::Rendezvous;

use crate::{
    Reason,
    connection::{Connection, Direction, Stage},
    journal::{Counters, Journal},
    kernel::Kernel,
    negotiation::Negotiations,
    pipes::Broken,
    ports::Ports,
    quota::Quota,
    roster::ConnectionTable,
    switch::Transport,
    switched::Switch,
    waiting::Instance,
};

/// What the log says of a connection that had to go back to TCP and could not in time.
pub const RESET_LINE: &str = "reset: it could not go back to TCP in time";

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
    pub(crate) exchange: Mutex<Negotiations>,
    pub(crate) quota: Quota,
    pub(crate) roster: ConnectionTable,
    pub(crate) waiters: Mutex<Vec<Instance>>,
    /// Somebody heard that a path has ended, or that messages are left.
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
pub(crate) struct Waiting<'a>(MutexGuard<'a, Vec<Instance>>);

impl Waiting<'_> {
    /// In the child: it is the parent's.
    pub fn forget(mut self) {
        self.0.clear();
    }
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
            roster: ConnectionTable::default(),
            settings,
            kernel,
            rendezvous,
            exchange: Mutex::default(),
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
    pub(crate) fn wanted(&self, connection: &Connection) -> Transport {
        if connection.leaves() {
            return Transport::Tcp;
        }
        match self.settings.flip {
            Some(pace) if (self.begun.elapsed().as_micros() / pace.as_micros().max(1)) % 2 == 1 => Transport::Tcp,
            _ => Transport::Pipe,
        }
    }

    // ---- waiting

    pub(crate) fn hold_waiting(&self) -> Waiting<'_> {
        Waiting(lock(&self.waiters))
    }

    /// A path has ended, perhaps, or messages are left. Whoever sleeps next looks first.
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

    /// To be called before a sleep, when rings from before are forgotten: looks at what came over the links, if there is a
    /// reason to.
    #[inline]
    pub fn before_sleep(&self) {
        if self.rung.load(Ordering::SeqCst) && self.rung.swap(false, Ordering::SeqCst) {
            lock(&self.exchange).receive_messages(self);
        }
    }

    // ---- what happened

    /// Bytes of the program moved.
    pub(crate) fn moved(&self, direction: Direction, carrier: Transport, n: usize) {
        self.counters.move_bytes(direction, carrier, n);
        self.report_now_and_then(n);
    }

    /// Bytes of the program moved by the kernel, before the connection had a choice.
    pub fn moved_plain(&self, direction: Direction, n: usize) {
        self.moved(direction, Transport::Tcp, n);
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
            self.log(connection, RESET_LINE);
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
