// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Process 1 of a guest: prepares the guest, then runs the host's commands from the second serial line.

use crate::error::{Context, Result};
use crate::wire::{End, ToGuest, ToHost};
use rustix::fs::{Mode, OFlags, open};
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Signal, kill_process};
use rustix::system::{delete_module, finit_module};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use tombolo_os::lock::lock;

const MOUNTS: [(&str, &CStr, &str); 5] = [
    ("proc", c"proc", "/proc"),
    ("sysfs", c"sysfs", "/sys"),
    ("devtmpfs", c"devtmpfs", "/dev"),
    ("tmpfs", c"tmpfs", "/tmp"),
    ("debugfs", c"debugfs", "/sys/kernel/debug"),
];

type Line = Arc<Mutex<Box<dyn Write + Send>>>;
type Jobs = Arc<Mutex<BTreeMap<u32, Pid>>>;

/// Serves the host over the second serial line until the host closes it.
///
/// # Errors
/// The guest cannot be prepared.
pub fn serve() -> Result<()> {
    prepare()?;
    let line = open_raw("/dev/ttyS1")?;
    answer(line.try_clone()?, line)
}

/// Mounts the file systems that every guest needs.
///
/// # Errors
/// The kernel refuses.
pub fn prepare() -> Result<()> {
    for (source, kind, target) in MOUNTS {
        mount(source, target, kind, MountFlags::empty(), None).context(target)?;
    }
    Ok(())
}

/// Opens a serial line in raw mode, which changes no byte.
///
/// # Errors
/// No line has that name.
pub fn open_raw(path: &str) -> Result<File> {
    let line = File::from(open(path, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).context(path)?);
    let mut raw = tcgetattr(&line)?;
    raw.make_raw();
    tcsetattr(&line, OptionalActions::Now, &raw)?;
    Ok(line)
}

/// Runs the requests of `input` and answers on `out`, until the host closes the connection. Kills commands that still
/// run then.
///
/// # Errors
/// A request is not valid.
pub fn answer(input: impl Read, out: impl Write + Send + 'static) -> Result<()> {
    let (line, jobs): (Line, _) = (Arc::new(Mutex::new(Box::new(out))), Jobs::default());
    send_to_host(&line, &ToHost::Ready);
    for request in BufReader::new(input).lines().map_while(std::result::Result::ok) {
        match serde_json::from_str(&request)? {
            ToGuest::Run { job, argv } => start(job, &argv, &line, &jobs),
            ToGuest::Kill { job } => {
                if let Some(pid) = lock(&jobs).get(&job) {
                    _ = kill_process(*pid, Signal::KILL);
                }
            }
        }
    }
    for pid in lock(&jobs).values() {
        _ = kill_process(*pid, Signal::KILL);
    }
    Ok(())
}

fn start(job: u32, argv: &[String], line: &Line, jobs: &Jobs) {
    let mut command = Command::new(argv.first().map_or("", String::as_str));
    command.args(argv.iter().skip(1)).env("PATH", "/bin:/sbin").env("RUST_BACKTRACE", "0");
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(why) => {
            send_to_host(line, &ToHost::Line { job, text: why.to_string() });
            return send_to_host(line, &ToHost::Exit { job, end: End::NotStarted });
        }
    };
    if let Some(pid) = Pid::from_raw(i32::try_from(child.id()).unwrap_or(0)) {
        lock(jobs).insert(job, pid);
    }
    let streams = [forward(job, child.stdout.take(), line), forward(job, child.stderr.take(), line)];
    let (line, jobs) = (Arc::clone(line), Arc::clone(jobs));
    thread::spawn(move || {
        let status = child.wait();
        lock(&jobs).remove(&job);
        for stream in streams {
            _ = stream.join();
        }
        let end = match status {
            Ok(status) => status.signal().map_or_else(|| End::Code(status.code().unwrap_or(-1)), End::Signal),
            Err(_) => End::NotStarted,
        };
        send_to_host(&line, &ToHost::Exit { job, end });
    });
}

fn forward(job: u32, stream: Option<impl Read + Send + 'static>, line: &Line) -> thread::JoinHandle<()> {
    let line = Arc::clone(line);
    thread::spawn(move || {
        let Some(stream) = stream else { return };
        for text in BufReader::new(stream).split(b'\n').map_while(std::result::Result::ok) {
            send_to_host(&line, &ToHost::Line { job, text: String::from_utf8_lossy(&text).into_owned() });
        }
    })
}

fn send_to_host(line: &Line, what: &ToHost) {
    if let Ok(mut text) = serde_json::to_vec(what) {
        text.push(b'\n');
        _ = lock(line).write_all(&text);
    }
}

/// Loads a kernel module.
///
/// # Errors
/// The kernel refuses it.
pub fn load_module(file: &str) -> Result<()> {
    let module = File::open(file).context(file)?;
    finit_module(&module, c"", 0).context(file)
}

/// Unloads a kernel module.
///
/// # Errors
/// It is in use, or not loaded.
pub fn unload_module(name: &str) -> Result<()> {
    delete_module(&CString::new(name)?, OFlags::NONBLOCK.bits().cast_signed()).context(name)
}
