// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes what a process reports of itself: lines in a log, and a report of its counters.
//!
//! None of it may disturb the program: what cannot be written is dropped.

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

/// Length of a report in bytes, longer than numbers can make it.
const REPORT_LEN: usize = 1023;

/// Counters and log of a process. They are this process's alone, and begin anew in a child made by fork.
#[derive(Debug)]
pub struct Journal {
    log: Option<PathBuf>,
    report: Option<PathBuf>,
    /// Number of bytes, by direction, then by transport.
    bytes: [[AtomicU64; 2]; 2],
    joined: AtomicU64,
    /// Number of these that were joined before.
    joined_again: AtomicU64,
    stayed: AtomicU64,
    /// Number of connections that stayed on TCP, by reason. Includes those that ended while their peer was searched
    /// for.
    reasons: [AtomicU64; Reason::COUNT],
    /// Progress towards the next report: bytes, with a minimum for each call that moved fewer.
    told: AtomicU64,
    /// Trouble that a person has to fix, as it was last logged.
    trouble: Mutex<Option<String>>,
}

impl Journal {
    /// Makes a journal that writes lines to the file `log` and reports into the folder `report`, where these are given.
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

    /// Returns whether anybody wants to know how connections end, also those over which nothing went.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.has_log() || self.report.is_some()
    }

    /// Returns whether lines are written.
    pub(crate) fn has_log(&self) -> bool {
        self.log.is_some()
    }

    pub(crate) fn write_line(&self, what: &dyn Display) {
        let Some(path) = &self.log else { return };
        let line = format!("tombolo {}: {what}\n", std::process::id());
        // A FIFO that nobody reads must not block the program.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let open = || fs::OpenOptions::new().append(true).create(true).custom_flags(flags).open(path);
        let _ = aside::lifted(|| io::Write::write_all(&mut open()?, line.as_bytes()));
    }

    /// Logs, once, trouble that keeps all connections of this process on TCP and that a person has to fix.
    pub(crate) fn report_trouble(&self, what: &dyn Display) {
        let what = what.to_string();
        let mut said = lock(&self.trouble);
        if said.as_ref() != Some(&what) {
            self.write_line(&format_args!("connections stay on TCP: {what}"));
            *said = Some(what);
        }
    }

    /// Counts bytes of the program; those that the kernel moved before the connection had a choice count as TCP too.
    /// Writes the report every 64 MiB, and every 256 calls.
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

    /// Counts a connection that was joined, `again` if it was before.
    pub(crate) fn count_joined(&self, again: bool) {
        self.joined.fetch_add(1, Ordering::Relaxed);
        self.joined_again.fetch_add(u64::from(again), Ordering::Relaxed);
    }

    /// Counts a connection that stays on TCP permanently.
    pub(crate) fn count_stayed(&self, reason: Reason) {
        self.stayed.fetch_add(1, Ordering::Relaxed);
        self.count_reason(reason);
    }

    /// Counts a connection that was on TCP all the time, for this reason.
    pub(crate) fn count_reason(&self, reason: Reason) {
        self.reasons[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many connections have been joined or kept on TCP. When this grows, there is a reason to look again.
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
        // Always of one length and written at once over the last: a process that is killed leaves a whole line.
        let line = format!("{line:REPORT_LEN$}\n");
        let _ =
            aside::lifted(|| io::Write::write_all(&mut open(&folder.join(format!("{pid}.json")))?, line.as_bytes()));
    }

    /// Begins anew in a child made by fork: what the parent counted and logged is the parent's.
    pub(crate) fn begin_anew(&self) {
        let Self { bytes, joined, joined_again, stayed, reasons, told, trouble, log: _, report: _ } = self;
        let all = bytes.iter().flatten().chain(reasons).chain([joined, joined_again, stayed, told]);
        all.for_each(|counter| counter.store(0, Ordering::Relaxed));
        *lock(trouble) = None;
    }
}

/// Opens a report's file. The folder may be one that others can write to: does not follow a link, and does not block.
fn open(file: &Path) -> io::Result<fs::File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(false).custom_flags(flags.bits() as i32).open(file)
}
