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
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tombolo_domain::Rendezvous;
use tombolo_growth::RingBudget;
use tombolo_os::lock::lock;

use crate::{
    connection::Connection,
    journal::{Counters, Journal},
    kernel::Kernel,
    negotiation::Negotiations,
    ports::Ports,
    quota::Quota,
    roster::ConnectionTable,
    switch::Transport,
    switched::Switch,
    waiting::Instance,
};

/// Threads crowd where they found the links taken so often within one such time, and for so long after.
const CROWD: u64 = 2048;
const CROWD_WITHIN: Duration = Duration::from_millis(100);
const CROWD_LASTS: Duration = Duration::from_secs(1);

/// What a user can set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where ends meet: a folder that both can write to, and whose members trust each other.
    pub folder: PathBuf,
    /// Bytes of each direction's ring while it is busy, a power of two.
    pub ring: u64,
    /// Bytes that it begins with and has once it is idle, likewise; no more than that.
    pub first_ring: u64,
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
    /// How processes in neighbouring machines are found, if they are.
    pub(crate) machines: Option<Box<dyn Rendezvous>>,
    pub(crate) exchange: Mutex<Negotiations>,
    pub(crate) quota: Quota,
    /// S-20. What rings that follow their load know of the machine's memory; whether there are large ones, and when they are looked
    /// at again, in milliseconds.
    pub(crate) rings: RingBudget,
    pub(crate) has_large_rings: AtomicBool,
    pub(crate) rings_due: AtomicU64,
    pub(crate) roster: ConnectionTable,
    pub(crate) waiters: Mutex<Vec<Instance>>,
    /// Somebody heard that a path has ended, or that messages are left.
    pub(crate) rung: AtomicBool,
    pub(crate) counters: Counters,
    pub(crate) journal: Journal,
    pub(crate) switch: Switch,
    /// Sends of all connections that found no room.
    pub(crate) stalls: AtomicU64,
    begun: Instant,
    /// When the links were last listened to, in microseconds since then.
    heard: AtomicU64,
    /// When calls began to be counted that found the links taken, likewise; how many there were; until when threads crowd.
    crowd_since: AtomicU64,
    crowd_met: AtomicU64,
    crowded_until: AtomicU64,
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
            rings: RingBudget::new(u64::MAX),
            has_large_rings: AtomicBool::new(false),
            rings_due: AtomicU64::new(0),
            roster: ConnectionTable::default(),
            settings,
            kernel,
            rendezvous,
            machines: None,
            exchange: Mutex::default(),
            waiters: Mutex::default(),
            rung: AtomicBool::new(false),
            counters: Counters::default(),
            journal: Journal::default(),
            switch: Switch::default(),
            stalls: AtomicU64::new(0),
            begun: Instant::now(),
            heard: AtomicU64::new(0),
            crowd_since: AtomicU64::new(0),
            crowd_met: AtomicU64::new(0),
            crowded_until: AtomicU64::new(0),
        }
    }

    /// The same, for a process whose connections may be with neighbouring machines too: by the broker of this kernel (S-18).
    #[must_use]
    pub fn with_machines(mut self, machines: Option<Box<dyn Rendezvous>>) -> Self {
        self.machines = machines;
        self
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

    /// Whether anybody wants to know how connections end, also those over which nothing went.
    #[must_use]
    pub fn tells(&self) -> bool {
        self.settings.log.is_some() || self.settings.report.is_some()
    }

    /// A new connection that this end `dialled` or accepted. It begins on TCP; whether anybody is at the other end to
    /// join is found out later.
    #[must_use]
    pub fn track(&self, dialled: bool, fd: RawFd) -> Connection {
        let connection = Connection::new(dialled, fd);
        if self.tells() {
            // The kernel has forgotten them where the connection ends by a reset.
            connection.find_identity(self.kernel());
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

    /// A call found the links taken.
    pub(crate) fn met_others(&self) {
        let now = self.begun.elapsed().as_micros() as u64;
        // ORDER: Relaxed, here and below; a count that is off by some decides the same a moment later.
        if now.saturating_sub(self.crowd_since.load(Ordering::Relaxed)) > CROWD_WITHIN.as_micros() as u64 {
            self.crowd_since.store(now, Ordering::Relaxed);
            self.crowd_met.store(0, Ordering::Relaxed);
        }
        if self.crowd_met.fetch_add(1, Ordering::Relaxed) >= CROWD {
            self.crowded_until.store(now + CROWD_LASTS.as_micros() as u64, Ordering::Relaxed);
        }
    }

    /// Whether so many threads have to do with the links now that none should have them for long.
    pub(crate) fn is_crowded(&self) -> bool {
        (self.begun.elapsed().as_micros() as u64) < self.crowded_until.load(Ordering::Relaxed)
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
}
