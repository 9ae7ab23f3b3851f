// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a process says of itself: lines in a log, and a report of what it counted.
//!
//! None of it may disturb the program: what cannot be written is not written.

use std::{
    fmt::{Display, Write as _},
    fs, io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::fs::OFlags;
use tombolo_domain::aside;
use tombolo_os::lock::lock;

use crate::{Reason, direction::Direction, switch::Transport};

/// Bytes of a report, longer than numbers can make it.
const REPORT_LEN: usize = 1023;

/// What a process counts and says: all of it is of this process alone, and begins anew in a child made by fork.
#[derive(Debug)]
pub struct Journal {
    log: Option<PathBuf>,
    report: Option<PathBuf>,
    /// By direction, then by transport: bytes.
    bytes: [[AtomicU64; 2]; 2],
    joined: AtomicU64,
    /// Of these, ones that were joined before.
    joined_again: AtomicU64,
    stayed: AtomicU64,
    /// By number: connections that stayed on TCP, those included that ended while the other end was looked for.
    reasons: [AtomicU64; Reason::COUNT],
    /// What says when the report is due: bytes, with so many for each call that moved fewer.
    told: AtomicU64,
    /// What somebody has to do something about, as it was said last.
    trouble: Mutex<Option<String>>,
}

impl Journal {
    /// One that writes lines to the file `log` and reports into the folder `report`, where these are given.
    pub(crate) fn new(log: Option<PathBuf>, report: Option<PathBuf>) -> Self {
        Self {
            log,
            report,
            bytes: Default::default(),
            joined: AtomicU64::new(0),
            joined_again: AtomicU64::new(0),
            stayed: AtomicU64::new(0),
            reasons: [const { AtomicU64::new(0) }; Reason::COUNT],
            told: AtomicU64::new(0),
            trouble: Mutex::default(),
        }
    }

    /// Whether anybody wants to know how connections end, also those over which nothing went.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.has_log() || self.report.is_some()
    }

    /// Whether lines are written.
    pub(crate) fn has_log(&self) -> bool {
        self.log.is_some()
    }

    pub(crate) fn write_line(&self, what: &dyn Display) {
        let Some(path) = &self.log else { return };
        let line = format!("tombolo {}: {what}\n", std::process::id());
        // A FIFO that nobody reads makes nobody wait.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let open = || fs::OpenOptions::new().append(true).create(true).custom_flags(flags).open(path);
        let _ = aside::lifted(|| io::Write::write_all(&mut open()?, line.as_bytes()));
    }

    /// Something keeps all connections of this process on TCP, and somebody has to do something about it: said once.
    pub(crate) fn report_trouble(&self, what: &dyn Display) {
        let what = what.to_string();
        let mut said = lock(&self.trouble);
        if said.as_ref() != Some(&what) {
            self.write_line(&format_args!("connections stay on TCP: {what}"));
            *said = Some(what);
        }
    }

    /// Bytes of the program moved; those that the kernel moved before the connection had a choice went over TCP too. Writes the
    /// report every 64 MiB, and every 256 calls.
    pub fn count_bytes(&self, direction: Direction, transport: Transport, n: usize) {
        self.bytes[direction as usize][transport as usize].fetch_add(n as u64, Ordering::Relaxed);
        if self.report.is_none() {
            return;
        }
        // A call counts as 256 KiB or what it moved.
        let step = (n as u64).max(256 << 10);
        let before = self.told.fetch_add(step, Ordering::Relaxed);
        if before >> 26 != (before + step) >> 26 {
            self.write_report();
        }
    }

    /// A connection was joined, `again` if it was before.
    pub(crate) fn count_joined(&self, again: bool) {
        self.joined.fetch_add(1, Ordering::Relaxed);
        self.joined_again.fetch_add(u64::from(again), Ordering::Relaxed);
    }

    /// A connection stays on TCP for good.
    pub(crate) fn count_stayed(&self, reason: Reason) {
        self.stayed.fetch_add(1, Ordering::Relaxed);
        self.count_reason(reason);
    }

    /// A connection was on TCP all its life, for this reason.
    pub(crate) fn count_reason(&self, reason: Reason) {
        self.reasons[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How many connections have been decided upon, one way or the other: grows when there is a reason to look again.
    #[must_use]
    pub fn decided(&self) -> u64 {
        self.joined.load(Ordering::SeqCst) + self.stayed.load(Ordering::SeqCst)
    }

    /// Writes this process's counters into the folder of reports, as one line of JSON.
    pub fn write_report(&self) {
        let Some(folder) = &self.report else { return };
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let [[out_tcp, out_pipe], [in_tcp, in_pipe]] = &self.bytes;
        let pid = std::process::id();
        let mut line = format!("{{\"pid\":{pid}");
        for (name, counter) in [
            ("sent_tcp", out_tcp),
            ("sent_shared", out_pipe),
            ("received_tcp", in_tcp),
            ("received_shared", in_pipe),
            ("joined", &self.joined),
            ("joined_again", &self.joined_again),
            ("stayed", &self.stayed),
        ] {
            let _ = write!(line, ",\"{name}\":{}", load(counter));
        }
        let reasons = self.reasons.iter().map(|counter| load(counter).to_string()).collect::<Vec<_>>();
        let _ = write!(line, ",\"reasons\":[{}]}}", reasons.join(","));
        // Of one length always and written at once, over the last: whoever is killed leaves a whole line.
        let line = format!("{line:REPORT_LEN$}\n");
        let _ =
            aside::lifted(|| io::Write::write_all(&mut open(&folder.join(format!("{pid}.json")))?, line.as_bytes()));
    }

    /// In a child made by fork: what the parent counted and said is the parent's.
    pub(crate) fn begin_anew(&self) {
        let Self { bytes, joined, joined_again, stayed, reasons, told, trouble, log: _, report: _ } = self;
        let all = bytes.iter().flatten().chain(reasons).chain([joined, joined_again, stayed, told]);
        all.for_each(|counter| counter.store(0, Ordering::Relaxed));
        *lock(trouble) = None;
    }
}

/// A report's file. The folder may be one that others can write to: no link is followed, and nothing waited for.
fn open(file: &Path) -> io::Result<fs::File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(false).custom_flags(flags.bits() as i32).open(file)
}
