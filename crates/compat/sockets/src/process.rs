// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the connections of one process have in common: what its user set, what is negotiated with other processes, the
//! memory of rings, who waits, and what is said of it all.
//!
//! No thread lives here. Everything that is negotiated is looked at inside the program's own calls, by
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
    exchange::Exchange, journal::Journal, kernel::Kernel, negotiation::RingMemory, pipes::Broken, ports::Ports,
    stage::Stage, switch::Transport, switched::Switch, waiting::WaiterPool,
};

/// What the log says of a connection that had to go back to TCP and could not in time.
pub const RESET_LINE: &str = "reset: it could not go back to TCP in time";

/// What a user can set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where ends meet: a folder that both can write to, and whose members trust each other.
    pub folder: PathBuf,
    /// Bytes of each direction's ring while it is busy, a power of two.
    pub ring: u64,
    /// Whether a busy one tries a larger ring than that, where this machine's caches let one expect that it is faster.
    pub tries_larger: bool,
    /// Bytes that it begins with and has once it is idle, likewise; no more than that.
    pub first_ring: u64,
    /// Bytes after which a connection is worth it; two requests and answers are as well. None where its service's other connections
    /// decide.
    pub after: Option<u64>,
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

/// One process, with what each of its connections needs: what becomes of them is decided and said here.
pub struct Process {
    pub(crate) settings: Settings,
    kernel: Box<dyn Kernel>,
    pub(crate) rendezvous: Box<dyn Rendezvous>,
    /// How processes in neighbouring machines are found, if they are.
    pub(crate) machines: Option<Box<dyn Rendezvous>>,
    /// What is negotiated with other processes.
    pub exchange: Exchange,
    pub(crate) rings: RingMemory,
    pub(crate) connection_table: ConnectionTable,
    /// Where threads wait that poll several connections.
    pub waiters: WaiterPool,
    /// What is counted and said of the connections.
    pub journal: Journal,
    pub(crate) switch: Switch,
    /// Which services' connections are joined before they have paid for it.
    pub(crate) credits: Credits,
    /// Sends of all connections that found no room.
    pub(crate) stalls: AtomicU64,
    begun: Instant,
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

    /// The same, for a process whose connections may be with neighbouring machines too: by the broker of this kernel (S-18).
    #[must_use]
    pub fn with_machines(mut self, machines: Option<Box<dyn Rendezvous>>) -> Self {
        self.machines = machines;
        self
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
        if self.journal.is_kept() {
            // The kernel has forgotten them where the connection ends by a reset.
            connection.find_identity(self.kernel());
        }
        connection
    }

    /// Where what this end of a connection sends should go now.
    pub(crate) fn wanted(&self, connection: &Connection) -> Transport {
        // Who waits for room unseen would be told that TCP has some.
        if connection.leaves() || !connection.wiring.waits().is_seen(Direction::Out) {
            return Transport::Tcp;
        }
        match self.settings.flip {
            Some(pace) if (self.begun.elapsed().as_micros() / pace.as_micros().max(1)) % 2 == 1 => Transport::Tcp,
            _ => Transport::Pipe,
        }
    }

    // ---- what becomes of connections

    pub(crate) fn log(&self, connection: &Connection, what: &str) {
        if self.journal.has_log()
            && let Some((tuple, _)) = connection.find_identity(self.kernel())
        {
            self.journal.write_line(&format_args!("{tuple} {what}"));
        }
    }

    /// A stream cannot go on: what its program hears.
    pub(crate) fn broken(&self, connection: &Connection, broken: Broken) -> Errno {
        // A program may try again for ever.
        if connection.ending.mark_broken() {
            self.log(connection, &format!("broken: {broken}"));
        }
        connection.leave(Reason::Corrupt);
        Errno::CONNRESET
    }

    /// The connection stays on TCP.
    pub fn stays(&self, connection: &Connection, reason: Reason) {
        // One that was joined before is tried again later, where that may help (S-22).
        if connection.stage() == Stage::Candidate && connection.returns.was_joined() && reason.may_pass() {
            connection.returns.postpone(coarse_time());
            return;
        }
        if connection.stay_plain(reason) {
            self.journal.count_stayed(reason);
            self.log(connection, &format!("stays on TCP: {}", reason.words()));
        }
    }

    /// The connection goes back to TCP.
    pub fn leaves(&self, connection: &Connection, reason: Reason) {
        let is_news = |given: Reason| given.may_pass() && !reason.may_pass();
        if connection.stage() == Stage::Joined && connection.reason().is_none_or(is_news) {
            connection.leave(reason);
            self.log(connection, &format!("goes back to TCP: {}", reason.words()));
        } else {
            self.stays(connection, reason);
        }
    }

    /// The connection had to be on TCP, and could not: it is to be ended. Says whether this is news.
    #[must_use]
    pub fn gives_up(&self, connection: &Connection) -> bool {
        let news = connection.ending.give_up();
        if news {
            self.log(connection, RESET_LINE);
        }
        news
    }

    /// The program has given up the last descriptor of a connection, which is still open: says how it was carried, or why not.
    /// While other processes have it nothing is at its end.
    pub fn ended(&self, connection: &Connection) {
        if connection.members.has_departed() {
            return;
        }
        self.credits.write_off(self.kernel(), connection);
        // One whose addresses nobody knows never came about.
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
