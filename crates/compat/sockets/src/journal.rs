// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a process says of itself: lines in a log, and a report of what it counted.
//!
//! None of it may disturb the program: what cannot be written is not written.

mod counters;

use std::{
    fmt::{Display, Write as _},
    fs, io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::fs::OFlags;
use tombolo_domain::aside;
use tombolo_os::lock::lock;

use crate::{Reason, connection::Connection, direction::Direction, process::Process, stage::Stage};

pub(crate) use counters::{Counters, Journal};

/// Bytes of a report, longer than numbers can make it.
const REPORT_LEN: usize = 1023;

impl Process {
    pub(crate) fn log(&self, connection: &Connection, what: &str) {
        if self.settings.log.is_some()
            && let Some((tuple, _)) = connection.find_identity(self.kernel())
        {
            self.write_line(&format_args!("{tuple} {what}"));
        }
    }

    fn write_line(&self, what: &dyn Display) {
        let Some(path) = &self.settings.log else { return };
        let line = format!("tombolo {}: {what}\n", std::process::id());
        // A FIFO that nobody reads makes nobody wait.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let open = || fs::OpenOptions::new().append(true).create(true).custom_flags(flags).open(path);
        let _ = aside::lifted(|| io::Write::write_all(&mut open()?, line.as_bytes()));
    }

    /// Something keeps all connections of this process on TCP, and somebody has to do something about it: said once.
    pub(crate) fn trouble(&self, what: &dyn Display) {
        let what = what.to_string();
        let mut said = lock(&self.journal.trouble);
        if said.as_ref() != Some(&what) {
            self.write_line(&format_args!("connections stay on TCP: {what}"));
            *said = Some(what);
        }
    }

    /// The program has given up the last descriptor of a connection, which is still open: says how it was carried, or why not.
    /// While other processes have it nothing is at its end.
    pub fn ended(&self, connection: &Connection) {
        // One whose addresses nobody knows never came about.
        if !self.tells() || connection.members.has_departed() || connection.find_identity(self.kernel()).is_none() {
            return;
        }
        let reason = connection.reason_so_far(self.settings.after);
        if let (Stage::Candidate, Some(reason)) = (connection.stage(), reason) {
            self.counters.reasons[reason as usize].fetch_add(1, Ordering::Relaxed);
        }
        if self.settings.log.is_none() {
            return;
        }
        let [[out_tcp, out_shared], [in_tcp, in_shared]] = Direction::BOTH.map(|direction| connection.bytes(direction));
        let both = format!(
            "sent {out_shared} through shared memory and {out_tcp} over TCP, received {in_shared} and {in_tcp}"
        );
        self.log(
            connection,
            &match (connection.stage(), reason) {
                (Stage::Joined, None) => format!("ended: {both}"),
                (Stage::Joined, Some(reason)) => format!("ended, back on TCP ({}): {both}", reason.words()),
                (_, reason) => {
                    let why = reason.unwrap_or(Reason::Unknown).words();
                    format!("ended, always on TCP ({why}): sent {out_tcp}, received {in_tcp}")
                }
            },
        );
    }

    /// Every 64 MiB, and every 256 calls.
    pub(crate) fn report_now_and_then(&self, n: usize) {
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
        let reasons = self.counters.reasons.iter().map(|counter| load(counter).to_string()).collect::<Vec<_>>();
        let _ = write!(line, ",\"reasons\":[{}]}}", reasons.join(","));
        // Of one length always and written at once, over the last: whoever is killed leaves a whole line.
        let line = format!("{line:REPORT_LEN$}\n");
        let _ =
            aside::lifted(|| io::Write::write_all(&mut open(&folder.join(format!("{pid}.json")))?, line.as_bytes()));
    }

    /// In a child made by fork: what the parent counted and said is the parent's.
    pub(crate) fn count_anew(&self) {
        let Counters { bytes, joined, stayed, reasons, told } = &self.counters;
        let all = bytes.iter().flatten().chain(reasons).chain([joined, stayed, told]);
        all.for_each(|counter| counter.store(0, Ordering::Relaxed));
        *lock(&self.journal.trouble) = None;
        self.switch.forget();
    }
}

/// A report's file. The folder may be one that others can write to: no link is followed, and nothing waited for.
fn open(file: &Path) -> io::Result<fs::File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(false).custom_flags(flags.bits() as i32).open(file)
}
