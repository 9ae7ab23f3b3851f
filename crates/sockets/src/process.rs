// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the connections of one process have in common: the folder, the links to other processes, the bells, the
//! counters.
//!
//! No thread lives here. Everything that is negotiated is looked at inside the program's own calls, by
//! [`Process::advance`], which never waits.

use std::{
    fmt::Write as _,
    io,
    os::fd::RawFd,
    path::PathBuf,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::io::Errno;
use tombolo_domain::{Rendezvous, aside};

use crate::{
    Reason,
    connection::{Connection, Direction, Stage},
    kernel::Kernel,
    negotiation::Exchange,
    pipes::Broken,
    quota::Quota,
    roster::Roster,
    switch::Carrier,
    waiting::Instance,
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
}

/// Bytes of a report, longer than numbers can make it.
const REPORT_LEN: usize = 255;

/// What a process counts.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// By direction, then by carrier: bytes.
    bytes: [[AtomicU64; 2]; 2],
    pub joined: AtomicU64,
    pub stayed: AtomicU64,
    told: AtomicU64,
}

/// One process.
pub struct Process {
    pub(crate) settings: Settings,
    kernel: Box<dyn Kernel>,
    pub(crate) rendezvous: Box<dyn Rendezvous>,
    pub(crate) exchange: Mutex<Exchange>,
    pub(crate) quota: Quota,
    pub(crate) roster: Roster,
    pub(crate) waiters: Mutex<Vec<Instance>>,
    /// Somebody heard that a path has ended, or that messages are left.
    rung: AtomicBool,
    pub(crate) counters: Counters,
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
            roster: Roster::default(),
            settings,
            kernel,
            rendezvous,
            exchange: Mutex::default(),
            waiters: Mutex::default(),
            rung: AtomicBool::new(false),
            counters: Counters::default(),
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
        Connection::new(dialled, fd)
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
            lock(&self.exchange).hear(self);
        }
    }

    // ---- what happened

    /// Bytes of the program moved.
    pub(crate) fn moved(&self, direction: Direction, carrier: Carrier, n: usize) {
        let counter = &self.counters.bytes[direction as usize][carrier as usize];
        counter.fetch_add(n as u64, Ordering::Relaxed);
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
            self.counters.stayed.fetch_add(1, Ordering::Relaxed);
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

    pub(crate) fn log(&self, connection: &Connection, what: &str) {
        let Some(path) = &self.settings.log else { return };
        let Some((tuple, _)) = connection.identity(&*self.kernel) else { return };
        let line = format!("tombolo {}: {tuple} {what}\n", std::process::id());
        // A log that cannot be written is no reason to disturb the program.
        let open = || std::fs::OpenOptions::new().append(true).create(true).open(path);
        let _ = aside::lifted(|| io::Write::write_all(&mut open()?, line.as_bytes()));
    }

    /// Every 64 MiB, and every 256 calls.
    fn report_now_and_then(&self, n: usize) {
        if self.settings.report.is_none() {
            return;
        }
        // A call counts as 256 KiB or what it moved.
        let step = (n as u64).max(256 << 10);
        let before = self.counters.told.fetch_add(step, Ordering::Relaxed);
        if before >> 26 != (before + step) >> 26 {
            self.report();
        }
    }

    /// Writes this process's counters into the folder of reports, as one line of JSON.
    pub fn report(&self) {
        let Some(folder) = &self.settings.report else { return };
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let [[out_tcp, out_pipe], [in_tcp, in_pipe]] = &self.counters.bytes;
        let pid = std::process::id();
        let mut line = format!("{{\"pid\":{pid}");
        for (name, counter) in [
            ("sent_tcp", out_tcp),
            ("sent_shared", out_pipe),
            ("received_tcp", in_tcp),
            ("received_shared", in_pipe),
            ("joined", &self.counters.joined),
            ("stayed", &self.counters.stayed),
        ] {
            let _ = write!(line, ",\"{name}\":{}", load(counter));
        }
        line.push('}');
        // Of one length always and written at once, over the last: whoever is killed leaves a whole line.
        let line = format!("{line:REPORT_LEN$}\n");
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create(true).truncate(false);
        let open = || options.open(folder.join(format!("{pid}.json")));
        let _ = aside::lifted(|| io::Write::write_all(&mut open()?, line.as_bytes()));
    }

    /// In a child made by fork: what the parent counted is the parent's.
    pub(crate) fn count_anew(&self) {
        let Counters { bytes, joined, stayed, told } = &self.counters;
        bytes.iter().flatten().chain([joined, stayed, told]).for_each(|counter| counter.store(0, Ordering::Relaxed));
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
