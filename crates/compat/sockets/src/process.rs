// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State that the connections of one process share: the user's settings, the negotiation with other processes, the
//! memory of rings, the waiters, and the journal.
//!
//! This library runs no threads. The program's own calls look at everything that is negotiated, by
//! [`Process::advance`], which never waits.

use std::{
    os::fd::RawFd,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use rustix::io::Errno;
use tombolo_domain::Rendezvous;
use tombolo_os::clock::coarse_time;

use crate::{
    Reason, connection::Connection, connection_table::ConnectionTable, credit::Credits, direction::Direction,
    exchange::Exchange, journal::Journal, kernel::Kernel, negotiation::RingMemory, pace::JoinPace, pipes::Broken,
    ports::Ports, stage::Stage, switch::Transport, switched::Switch, waiting::WaiterPool,
};

/// Line in the log for a connection that had to go back to TCP and could not in time.
pub const RESET_LINE: &str = "reset: it could not go back to TCP in time";

/// Settings that a user can make.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Folder in which endpoints meet: both can write to it, and its members trust each other.
    pub folder: PathBuf,
    /// Size in bytes of each direction's ring while it is busy, a power of two.
    pub ring: u64,
    /// Whether a busy connection tries a larger ring than that, where this machine's caches suggest that it is faster.
    pub tries_larger: bool,
    /// Size in bytes of the ring at the beginning and once it is idle, a power of two; no larger than `ring`.
    pub first_ring: u64,
    /// Number of bytes after which the peer of a connection is searched for; two requests and answers are enough as
    /// well. `None` where the other connections of its service decide.
    pub after: Option<u64>,
    /// Largest number of bytes of shared memory that this process makes, for all its connections.
    pub memory: u64,
    /// Whether connections inside one network namespace are joined.
    pub loopback: bool,
    /// Time after which both directions move to the other transport, again and again; for tests.
    pub flip: Option<Duration>,
    /// File that gets a line for each event, if any.
    pub log: Option<PathBuf>,
    /// Folder in which each process keeps a file with its counters.
    pub report: Option<PathBuf>,
    /// Services whose connections may be joined.
    pub ports: Ports,
}

/// One process, with the state that its connections need. It decides what becomes of them, and logs that.
pub struct Process {
    pub(crate) settings: Settings,
    kernel: Box<dyn Kernel>,
    pub(crate) rendezvous: Box<dyn Rendezvous>,
    /// Rendezvous with processes of other machines, if there is one.
    pub(crate) machines: Option<Box<dyn Rendezvous>>,
    /// Negotiation with other processes.
    pub exchange: Exchange,
    /// Share of the time that joins get.
    pub(crate) pace: JoinPace,
    pub(crate) rings: RingMemory,
    pub(crate) connection_table: ConnectionTable,
    /// Instances at which threads wait that poll several connections.
    pub waiters: WaiterPool,
    /// Counters and log of the connections.
    pub journal: Journal,
    pub(crate) switch: Switch,
    /// Credit of services, with which connections are joined before they have paid for it.
    pub(crate) credits: Credits,
    /// Number of sends of all connections that found no room.
    pub(crate) stalls: AtomicU64,
    begun: Instant,
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Process").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Process {
    /// Makes a process that has no connections yet. Opens nothing.
    #[must_use]
    pub fn new(settings: Settings, kernel: Box<dyn Kernel>, rendezvous: Box<dyn Rendezvous>) -> Self {
        Self {
            pace: JoinPace::new(settings.after.is_none()),
            rings: RingMemory::new(settings.memory),
            journal: Journal::new(settings.log.clone(), settings.report.clone()),
            connection_table: ConnectionTable::default(),
            settings,
            kernel,
            rendezvous,
            machines: None,
            exchange: Exchange::new(),
            waiters: WaiterPool::default(),
            switch: Switch::default(),
            credits: Credits::default(),
            stalls: AtomicU64::new(0),
            begun: Instant::now(),
        }
    }

    /// Adds the rendezvous by the broker of this kernel, for a process whose connections may be with other machines too
    /// (S-18).
    #[must_use]
    pub fn with_machines(mut self, machines: Option<Box<dyn Rendezvous>>) -> Self {
        self.machines = machines;
        self
    }

    /// Returns the number of sends of all connections that found no room so far.
    #[must_use]
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::SeqCst)
    }

    /// Returns the kernel's calls.
    pub fn kernel(&self) -> &dyn Kernel {
        &*self.kernel
    }

    /// Returns a new connection that this endpoint `dialled` or accepted. It begins on TCP; whether there is a peer to
    /// join with is found out later.
    #[must_use]
    pub fn track(&self, dialled: bool, fd: RawFd) -> Connection {
        let connection = Connection::new(dialled, fd);
        if self.journal.is_kept() {
            // The kernel forgets the addresses where the connection ends by a reset.
            connection.find_identity(self.kernel());
        }
        connection
    }

    /// Returns the transport by which this endpoint of a connection should send now.
    pub(crate) fn wanted(&self, connection: &Connection) -> Transport {
        // A program that waits for room by calls that the front does not see would be told that TCP has some.
        if connection.leaves() || !connection.wiring.waits().is_seen(Direction::Out) {
            return Transport::Tcp;
        }
        match self.settings.flip {
            Some(pace) if (self.begun.elapsed().as_micros() / pace.as_micros().max(1)) % 2 == 1 => Transport::Tcp,
            _ => Transport::Pipe,
        }
    }

    // ---- outcomes of connections

    pub(crate) fn log(&self, connection: &Connection, what: &str) {
        if self.journal.has_log()
            && let Some((tuple, _)) = connection.find_identity(self.kernel())
        {
            self.journal.write_line(&format_args!("{tuple} {what}"));
        }
    }

    /// Handles a stream that cannot go on. Returns the error that its program gets.
    pub(crate) fn broken(&self, connection: &Connection, broken: Broken) -> Errno {
        // A program may try again and again. This is logged once.
        if connection.ending.mark_broken() {
            self.log(connection, &format!("broken: {broken}"));
        }
        connection.leave(Reason::Corrupt);
        Errno::CONNRESET
    }

    /// Keeps the connection on TCP.
    pub fn stays(&self, connection: &Connection, reason: Reason) {
        // A connection that was joined before is tried again later, where that may help (S-22).
        if connection.stage() == Stage::Candidate && connection.returns.was_joined() && reason.may_pass() {
            connection.returns.postpone(coarse_time());
            return;
        }
        if connection.stay_plain(reason) {
            self.journal.count_stayed(reason);
            self.log(connection, &format!("stays on TCP: {}", reason.words()));
        }
    }

    /// Moves the connection back to TCP.
    pub fn leaves(&self, connection: &Connection, reason: Reason) {
        let is_news = |given: Reason| given.may_pass() && !reason.may_pass();
        if connection.stage() == Stage::Joined && connection.reason().is_none_or(is_news) {
            connection.leave(reason);
            self.log(connection, &format!("goes back to TCP: {}", reason.words()));
        } else {
            self.stays(connection, reason);
        }
    }

    /// Marks a connection to be ended, because it had to be on TCP and could not. Returns whether this is news.
    #[must_use]
    pub fn gives_up(&self, connection: &Connection) -> bool {
        let news = connection.ending.give_up();
        if news {
            self.log(connection, RESET_LINE);
        }
        news
    }

    /// Logs how a connection was carried, or why it stayed on TCP, when the program has given up its last descriptor,
    /// which is still open. Logs nothing while other processes have the connection.
    pub fn ended(&self, connection: &Connection) {
        if connection.members.has_departed() {
            return;
        }
        self.credits.write_off(self.kernel(), connection);
        // A connection whose addresses are unknown was never established.
        if !self.journal.is_kept() || connection.find_identity(self.kernel()).is_none() {
            return;
        }
        let reason = connection.reason_so_far();
        let was_joined = connection.stage() == Stage::Joined || connection.returns.was_joined();
        if let (Stage::Candidate, Some(reason), false) = (connection.stage(), reason, was_joined) {
            self.journal.count_reason(reason);
        }
        if !self.journal.has_log() {
            return;
        }
        let [[out_tcp, out_shared], [in_tcp, in_shared]] = Direction::BOTH
            .map(|direction| [connection.members.counted(direction), connection.piped.counted(direction)]);
        let both = format!(
            "sent {out_shared} through shared memory and {out_tcp} over TCP, received {in_shared} and {in_tcp}"
        );
        self.log(
            connection,
            &match (was_joined, reason) {
                (true, None) => format!("ended: {both}"),
                (true, Some(reason)) => format!("ended, back on TCP ({}): {both}", reason.words()),
                (_, reason) => {
                    let why = reason.unwrap_or(Reason::Unknown).words();
                    format!("ended, always on TCP ({why}): sent {out_tcp}, received {in_tcp}")
                }
            },
        );
    }
}
