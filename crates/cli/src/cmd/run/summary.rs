// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo run --summary`: reports what carried the connections of a program, of all its processes, once it has ended.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    io::{self, Read},
    os::unix::{
        fs::{OpenOptionsExt, PermissionsExt},
        net::UnixStream,
        process::ExitStatusExt,
    },
    path::Path,
    process::{Child, Command, ExitStatus},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use signal_hook::{
    consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH},
    flag, low_level,
};
use tombolo_sockets::Reason;

use crate::{
    failure::{Failure, Os, Result, print_line},
    human,
    signals::{await_any, die_of},
};

/// Signals that are for the program, whichever process gets them.
const HANDED_ON: [i32; 8] = [SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH];
/// Signals that a terminal sends to both processes.
const OF_THE_TERMINAL: [i32; 3] = [SIGINT, SIGQUIT, SIGWINCH];
/// Largest size of a report in bytes, and largest number of reports.
const REPORT: u64 = 4096;
const REPORTS: usize = 1 << 16;

/// Runs the program to its end and prints what its processes reported: into `reports`, or into a folder that is removed
/// afterwards. Ends as the program did.
///
/// # Errors
/// The reason why it could not be run.
pub fn run(mut command: Command, reports: Option<&Path>) -> Result<()> {
    let open = |source| Failure::Open { file: "a folder for reports".into(), source };
    // Daemons change their user. Any user who knows the inner folder's name can write there, and nobody can find that
    // name out.
    let outer = tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o711)).tempdir().map_err(open)?;
    let inner = tempfile::Builder::new().rand_bytes(24).tempdir_in(&outer).map_err(open)?;
    let folder = reports.unwrap_or(inner.path());
    if reports.is_none() {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o1777)).map_err(open)?;
        command.env("TOMBOLO_SOCKETS_REPORT", folder);
    }
    // A folder that was named may hold reports of earlier programs, which are not this program's.
    let before = read(folder);
    let signals = Signals::hold()?;
    let name = command.get_program().to_owned();
    let mut child = command.spawn().map_err(|source| Failure::Open { file: name.display().to_string(), source })?;
    let status = signals.stay(&mut child)?;
    let mut after = read(folder);
    after.retain(|pid, report| before.get(pid) != Some(report));
    print_line(Summary::of(&after).text(&name.to_string_lossy()).trim_end());
    drop((inner, outer));
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(()),
        (Some(code), _) => std::process::exit(code),
        (None, signal) => {
            die_of(signal.unwrap_or(SIGTERM));
            std::process::exit(1)
        }
    }
}

/// Signals that came, each with a flag of its own.
struct Signals {
    came: Vec<(i32, Arc<AtomicBool>)>,
    wake: UnixStream,
}

impl Signals {
    fn hold() -> Result<Self> {
        let (wake, theirs) = UnixStream::pair().os("socketpair")?;
        wake.set_nonblocking(true).os("fcntl")?;
        theirs.set_nonblocking(true).os("fcntl")?;
        let mut came = Vec::new();
        for signal in HANDED_ON {
            let flag = Arc::new(AtomicBool::new(false));
            flag::register(signal, Arc::clone(&flag)).os("sigaction")?;
            low_level::pipe::register(signal, theirs.try_clone().os("dup")?).os("sigaction")?;
            came.push((signal, flag));
        }
        Ok(Self { came, wake })
    }

    /// Waits until the program has ended; hands on to it the signals that are sent to this process meanwhile.
    fn stay(&self, child: &mut Child) -> Result<ExitStatus> {
        let pid = Pid::from_child(child);
        let life = pidfd_open(pid, PidfdFlags::empty()).os("pidfd_open")?;
        loop {
            if let Some(status) = child.try_wait().os("wait")? {
                return Ok(status);
            }
            use std::os::fd::AsFd;
            await_any(&[life.as_fd(), self.wake.as_fd()], None)?;
            while matches!((&self.wake).read(&mut [0; 64]), Ok(64)) {}
            for (signal, came) in &self.came {
                let is_theirs_already = OF_THE_TERMINAL.contains(signal) && is_in_foreground();
                if came.swap(false, Ordering::SeqCst)
                    && !is_theirs_already
                    && let Some(signal) = Signal::from_named_raw(*signal)
                {
                    // A program that has just ended gets no signal.
                    let _ = kill_process(pid, signal);
                }
            }
        }
    }
}

/// Returns whether this process and the program are the terminal's foreground.
fn is_in_foreground() -> bool {
    let terminal = fs::File::open("/dev/tty").ok();
    terminal.and_then(|terminal| rustix::termios::tcgetpgrp(terminal).ok()) == Some(rustix::process::getpgrp())
}

/// Report of one process.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
struct Report {
    sent_tcp: u64,
    sent_shared: u64,
    received_tcp: u64,
    received_shared: u64,
    joined: u64,
    /// Part of `joined` that had been joined before.
    #[serde(default)]
    joined_again: u64,
    #[serde(default)]
    reasons: Vec<u64>,
}

/// Reads the reports in a folder, by process. Ignores anything else there.
fn read(folder: &Path) -> BTreeMap<u32, Report> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().take(REPORTS);
    let one = |path: &Path| {
        let pid = path.file_name()?.to_str()?.strip_suffix(".json")?.parse().ok()?;
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let file = fs::OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path).ok()?;
        let mut text = String::new();
        io::Read::take(file, REPORT).read_to_string(&mut text).ok()?;
        Some((pid, serde_json::from_str(&text).ok()?))
    };
    files.filter_map(|entry| one(&entry.path())).collect()
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Summary {
    processes: u64,
    living: u64,
    joined: u64,
    joined_again: u64,
    sent: [u64; 2],
    received: [u64; 2],
    reasons: Vec<u64>,
}

impl Summary {
    fn of(reports: &BTreeMap<u32, Report>) -> Self {
        let mut all = Self { processes: reports.len() as u64, ..Self::default() };
        for (pid, report) in reports {
            all.living += u64::from(Path::new("/proc").join(pid.to_string()).exists());
            // Each connection counts once.
            all.joined = all.joined.saturating_add(report.joined.saturating_sub(report.joined_again));
            all.joined_again = all.joined_again.saturating_add(report.joined_again);
            for (sum, bytes) in [
                (&mut all.sent, [report.sent_tcp, report.sent_shared]),
                (&mut all.received, [report.received_tcp, report.received_shared]),
            ] {
                *sum = [0, 1].map(|at| sum[at].saturating_add(bytes[at]));
            }
            all.reasons.resize(all.reasons.len().max(report.reasons.len()), 0);
            for (sum, count) in all.reasons.iter_mut().zip(&report.reasons) {
                *sum = sum.saturating_add(*count);
            }
        }
        all
    }

    fn text(&self, name: &str) -> String {
        let stayed: u64 = self.reasons.iter().fold(0, |sum, count| sum.saturating_add(*count));
        let mut text = format!(
            "tombolo: {name}: {} joined, {} not, in {}\n",
            connections(self.joined),
            stayed,
            match self.processes {
                1 => "1 process".into(),
                n => format!("{n} processes"),
            }
        );
        for (what, [tcp, shared]) in [("sent", self.sent), ("received", self.received)] {
            let _ = writeln!(
                text,
                "  {what:8} {} through shared memory, {} over TCP",
                human::bytes(shared),
                human::bytes(tcp)
            );
        }
        let mut reasons: Vec<_> = self.reasons.iter().enumerate().filter(|(_, count)| **count > 0).collect();
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        for (number, count) in reasons {
            let _ = writeln!(text, "  {count} on TCP: {}", Reason::from_number(number as u16).words());
        }
        if self.joined_again > 0 {
            let _ =
                writeln!(text, "  {} times joined again, when memory that was taken away came back", self.joined_again);
        }
        if self.living > 0 {
            let _ = writeln!(text, "  {} still running: these are their last reports", self.living);
        }
        text
    }
}

fn connections(count: u64) -> String {
    format!("{count} connection{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_adds_what_all_processes_reported() {
        let folder = tempfile::tempdir().unwrap();
        let report = |joined, again, reasons: &str| {
            format!(
                "{{\"pid\":1,\"sent_tcp\":10,\"sent_shared\":2048,\"received_tcp\":1,\"received_shared\":0,\
                 \"joined\":{joined},{again}\"stayed\":0,\"reasons\":{reasons}}}   \n"
            )
        };
        // Process ids that no process has.
        for (name, text) in [
            ("4194301.json", report(6, "\"joined_again\":4,", "[0,3,0,1]")),
            ("4194302.json", report(1, "", "[0,4]")),
            ("4194303.json", String::new()),
            ("x.json", report(9, "", "[9]")),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        std::os::unix::fs::symlink("4194301.json", folder.path().join("4194300.json")).unwrap();
        let text = Summary::of(&read(folder.path())).text("server");
        let wanted = [
            "tombolo: server: 3 connections joined, 8 not, in 2 processes",
            "  sent     4.00 KiB through shared memory, 20 B over TCP",
            "  received 0 B through shared memory, 2 B over TCP",
            &format!("  7 on TCP: {}", Reason::NoPeer.words()),
            &format!("  1 on TCP: {}", Reason::LocalAddress.words()),
            "  4 times joined again, when memory that was taken away came back",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), wanted);
        assert_eq!(Summary::default().text("x").lines().count(), 3);
    }
}
