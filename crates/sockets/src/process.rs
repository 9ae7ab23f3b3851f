// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the connections of one process have in common: the folder, the links to other processes, the bells, the
//! counters.
//!
//! No thread lives here. Everything that is negotiated is looked at inside the program's own calls, by
//! [`Process::advance`], which never waits.

use std::{
    fmt::Write as _,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
    path::PathBuf,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, epoll},
    io::Errno,
};
use tombolo_domain::Rendezvous;

use crate::{
    Reason,
    connection::{Connection, Direction, Stage},
    kernel::Kernel,
    negotiation::Exchange,
    pipes::Broken,
    switch::Carrier,
    tuple::Tuple,
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
    hub: OnceLock<Option<Hub>>,
    waiters: Mutex<Vec<OwnedFd>>,
    /// Somebody took an edge of the bells, which may have told of a message or of a peer that is gone.
    rung: AtomicBool,
    pub(crate) counters: Counters,
    begun: Instant,
    pid: u32,
}

/// Where all bells of this process are heard. It is never drained: each who waits watches it for edges, by an epoll
/// instance of its own or the program's, so one that wakes takes nothing away from another.
struct Hub {
    epoll: OwnedFd,
    kick: OwnedFd,
}

impl Hub {
    fn new() -> rustix::io::Result<Self> {
        let hub = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            kick: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        watch(&hub.epoll, hub.kick.as_fd())?;
        Ok(hub)
    }
}

fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>) -> rustix::io::Result<()> {
    epoll::add(epoll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN | epoll::EventFlags::ET)
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
            settings,
            kernel,
            rendezvous,
            exchange: Mutex::default(),
            hub: OnceLock::new(),
            waiters: Mutex::default(),
            rung: AtomicBool::new(false),
            counters: Counters::default(),
            begun: Instant::now(),
            pid: std::process::id(),
        }
    }

    /// How many connections have been decided upon, one way or the other: grows when there is a reason to look again.
    #[must_use]
    pub fn decided(&self) -> u64 {
        self.counters.joined.load(Ordering::SeqCst) + self.counters.stayed.load(Ordering::SeqCst)
    }

    /// The kernel's calls.
    pub fn kernel(&self) -> &dyn Kernel {
        &*self.kernel
    }

    /// A new connection that this end `dialled` or accepted. It begins on TCP; whether anybody is at the other end to
    /// join is found out later.
    #[must_use]
    pub fn track(&self, tuple: Tuple, dialled: bool, fd: RawFd) -> Connection {
        Connection::new(tuple, dialled, random_id(), fd)
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

    fn hub(&self) -> Option<&Hub> {
        self.hub.get_or_init(|| Hub::new().ok()).as_ref()
    }

    /// The descriptor at which every bell of this process is an edge, to be put into an epoll set of the program's.
    /// Never to be read; it is always ready.
    #[must_use]
    pub fn bells(&self) -> Option<BorrowedFd<'_>> {
        self.hub().map(|hub| hub.epoll.as_fd())
    }

    pub(crate) fn listen_to(&self, bell: BorrowedFd<'_>) -> Result<(), Errno> {
        let hub = self.hub().ok_or(Errno::MFILE)?;
        watch(&hub.epoll, bell)
    }

    /// An edge of the bells was taken. Whoever sleeps next looks first at what it may have told.
    pub fn rang(&self) {
        self.rung.store(true, Ordering::SeqCst);
    }

    /// To be called before a sleep, when rings from before are forgotten: looks at what came over the links, if an edge was
    /// taken since the last look.
    pub fn before_sleep(&self) {
        if self.rung.swap(false, Ordering::SeqCst) {
            lock(&self.exchange).hear(self);
        }
    }

    /// Wakes everybody of this process who waits, to look again.
    pub fn kick(&self) {
        if let Some(Some(hub)) = self.hub.get() {
            // A counter that is full has been heard.
            let _ = rustix::io::write(&hub.kick, &1_u64.to_ne_bytes());
        }
    }

    /// An epoll instance for one who is about to wait: it polls readable when a bell rang after [`Waiter::forget`].
    #[must_use]
    pub fn waiter(&self) -> Option<Waiter<'_>> {
        let pooled = lock(&self.waiters).pop();
        let epoll = match pooled {
            Some(epoll) => epoll,
            None => {
                let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).ok()?;
                watch(&epoll, self.bells()?).ok()?;
                epoll
            }
        };
        Some(Waiter { process: self, epoll: Some(epoll) })
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

    pub(crate) fn log(&self, connection: &Connection, what: &str) {
        let Some(path) = &self.settings.log else { return };
        let line = format!("tombolo {}: {} {what}\n", self.pid, connection.tuple);
        // A log that cannot be written is no reason to disturb the program.
        let open = std::fs::OpenOptions::new().append(true).create(true).open(path);
        let _ = open.and_then(|mut file| io::Write::write_all(&mut file, line.as_bytes()));
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
        let open = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(folder.join(format!("{pid}.json")));
        let _ = open.and_then(|mut file| io::Write::write_all(&mut file, line.as_bytes()));
    }

    /// Keeps everything still while the process forks: nobody holds a lock that the child would find held.
    #[must_use]
    pub fn pause(&self) -> impl Sized + '_ {
        (lock(&self.exchange), lock(&self.waiters))
    }

    /// In a child made by fork: what the parent counted is the parent's, and so are its links.
    pub fn forked(&self) {
        for counter in self.counters.bytes.iter().flatten() {
            counter.store(0, Ordering::Relaxed);
        }
        self.counters.joined.store(0, Ordering::Relaxed);
        self.counters.stayed.store(0, Ordering::Relaxed);
        std::mem::take(&mut *lock(&self.exchange)).abandon();
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
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
    epoll: Option<OwnedFd>,
}

impl Waiter<'_> {
    /// Polls readable when a bell rang since the last [`forget`](Self::forget).
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_ref().expect("until it is dropped").as_fd()
    }

    /// R-12, A0: forgets rings that came before now.
    pub fn forget(&self) {
        let mut events = [std::mem::MaybeUninit::uninit(); 1];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        if epoll::wait(self.fd(), &mut events, Some(&now)).is_ok_and(|(rung, _)| !rung.is_empty()) {
            self.process.rang();
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        lock(&self.process.waiters).extend(self.epoll.take());
    }
}
