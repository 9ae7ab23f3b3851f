// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Common parts of the tests of unmodified programs: the folder and namespaces they run in, how they are started, and
//! what they leave behind.
#![allow(dead_code, reason = "each test uses its part")]

pub mod suite;
#[macro_use]
pub mod world;

use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Longer than anything here takes, by far.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Largest number of bytes of a program's output that are shown after a failure.
const LAST: usize = 16 << 10;

/// Length of a long stream in bytes.
pub const LONG: usize = if cfg!(debug_assertions) { 24 << 20 } else { 96 << 20 };

/// Folder in which endpoints meet and leave their files.
pub struct Place {
    folder: tempfile::TempDir,
    library: PathBuf,
}

impl Place {
    /// Makes a place with the library that cargo has built. It is copied, because only one user may be able to read
    /// cargo's files.
    pub fn new() -> Self {
        let built = env::current_exe().unwrap().with_file_name("libtombolo_preload.so");
        assert!(built.is_file(), "{} is not built", built.display());
        Self::with(|folder| {
            let library = folder.join("preload.so");
            fs::copy(built, &library).unwrap();
            library
        })
    }

    /// Makes a place with a library that does nothing.
    pub fn idle() -> Self {
        Self::with(|folder| {
            let library = folder.join("idle.so");
            let cc = Command::new("cc").args(["-shared", "-x", "c", "/dev/null", "-o"]).arg(&library).status();
            assert!(cc.unwrap().success(), "cc makes no library of nothing");
            library
        })
    }

    fn with(library: impl FnOnce(&Path) -> PathBuf) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let library = library(folder.path());
        let place = Self { folder, library };
        fs::create_dir(place.path("meet")).unwrap();
        fs::create_dir(place.path("reports")).unwrap();
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Returns the numbers of bytes that programs received over TCP and through shared memory.
    pub fn received(&self) -> (u64, u64) {
        let mut total = (0, 0);
        for report in fs::read_dir(self.path("reports")).unwrap() {
            let text = fs::read_to_string(report.unwrap().path()).unwrap();
            if text.is_empty() {
                continue; // The report of a process that was killed before it wrote its first one.
            }
            let report: serde_json::Value = serde_json::from_str(&text).unwrap();
            total.0 += report["received_tcp"].as_u64().unwrap();
            total.1 += report["received_shared"].as_u64().unwrap();
        }
        total
    }

    /// Checks that at least `percent` per cent of `payload` bytes went through shared memory.
    pub fn shared(&self, payload: u64, percent: u64) -> Result<(), String> {
        let (tcp, shared) = self.received();
        if shared * 100 >= payload * percent {
            return Ok(());
        }
        Err(format!("{shared} of {payload} bytes through shared memory, {tcp} over TCP; the log:\n{}", self.log()))
    }

    /// Checks that programs received at least `payload` bytes, and nearly all of them through shared memory.
    pub fn accelerated(&self, payload: u64) -> Result<(), String> {
        let (tcp, shared) = self.received();
        if tcp + shared < payload {
            return Err(format!(
                "{tcp} and {shared} bytes were received, {payload} were sent; the log:\n{}",
                self.log()
            ));
        }
        self.shared(tcp + shared, 95)
    }

    /// Sets up `command` as `tombolo run` starts it.
    pub fn dress(&self, command: &mut Command) {
        command.env("LD_PRELOAD", &self.library).env("TOMBOLO_SOCKETS", self.path("meet"));
        command.env("TOMBOLO_SOCKETS_LOG", self.path("log")).env("TOMBOLO_SOCKETS_REPORT", self.path("reports"));
    }

    /// Asserts that no connection was reset: each one that had to return to TCP did so in time.
    pub fn assert_none_reset(&self) {
        assert!(!self.log().contains(tombolo_sockets::RESET_LINE), "{}", self.log());
    }

    /// Asserts that no file is left in the folder where endpoints meet.
    pub fn assert_tidy(&self) {
        let claims = self.path("meet").join("claims");
        let left: Vec<_> = [self.path("meet"), claims.clone()]
            .iter()
            .filter_map(|folder| fs::read_dir(folder).ok())
            .flat_map(|entries| entries.map(|entry| entry.unwrap().path()))
            .filter(|path| *path != claims)
            .collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

impl Drop for Place {
    /// After a failure, shows the output of the library and of the servers, which is deleted with the folder.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let all = fs::read_dir(self.path("")).into_iter().flatten().flatten().map(|entry| entry.path());
        let name = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        for path in all.filter(|path| name(path) == "log" || name(path).starts_with("server-")) {
            // Only the end, because the output may be long.
            let said = fs::read(&path).unwrap_or_default();
            let end = String::from_utf8_lossy(&said[said.len().saturating_sub(LAST)..]).into_owned();
            let _ = writeln!(std::io::stderr(), "---- the end of {}:\n{end}", name(&path));
        }
    }
}

/// A child process that is killed at the latest when its test ends.
pub struct Started(Child);

impl Started {
    pub fn new(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    /// Starts a command with a file as its input.
    pub fn with_input(command: &mut Command, file: &str) -> Self {
        Self(
            command.stdin(fs::File::open(file).unwrap()).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")),
        )
    }

    pub fn finish(&mut self) -> ExitStatus {
        self.finish_within(PATIENCE)
    }

    pub fn finish_within(&mut self, patience: Duration) -> ExitStatus {
        let mut status = None;
        wait_within(patience, "the program ends", || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    pub fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    /// Sends the process SIGTERM.
    pub fn terminate(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        self.finish();
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    wait_within(PATIENCE, what, holds);
}

fn wait_within(patience: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within {patience:?}");
        thread::park_timeout(Duration::from_millis(5));
    }
}

/// Looks for a program in the path, among the system's daemons, and where Debian keeps PostgreSQL's.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut folders: Vec<_> = versions.map(|version| version.path().join("bin")).collect();
    folders.extend(env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]));
    folders.into_iter().map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Returns whether the programs are installed. If not, reports that the test is skipped.
pub fn has(test: &str, programs: &[&str]) -> bool {
    let missing = programs.iter().find(|program| find(program).is_none());
    if let Some(program) = missing {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs {program}): it is not installed");
    }
    missing.is_none()
}

pub fn python(script: &str) -> Command {
    // Debian's interpreter: one earlier in the path may be a wrapper around another program.
    let debian = Path::new("/usr/bin/python3");
    let mut command = Command::new(if debian.is_file() { debian } else { Path::new("python3") });
    command.arg("-uB").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(script));
    command
}

/// Builds a program in C in the test's folder.
pub fn built(place: &Place, source: &str) -> PathBuf {
    built_with(place, source, &[])
}

/// As [`built`], with further `options` for the compiler.
pub fn built_with(place: &Place, source: &str, options: &[&str]) -> PathBuf {
    let program = place.path(source.trim_end_matches(".c"));
    let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs")).join(source);
    let cc = Command::new("cc")
        .args(["-Wall", "-Werror", "-pthread"])
        .args(options)
        .arg("-o")
        .arg(&program)
        .arg(source)
        .status();
    assert!(cc.unwrap().success());
    program
}

pub fn output(command: &mut Command, to: &Path) -> String {
    output_within(PATIENCE, command, to)
}

pub fn output_within(patience: Duration, command: &mut Command, to: &Path) -> String {
    let file = fs::File::create(to).unwrap();
    let status = Started::new(command.stdout(file)).finish_within(patience);
    let text = fs::read_to_string(to).unwrap();
    assert!(status.success(), "{command:?}: {status}\n{text}");
    text
}

/// Two network namespaces with a pair of virtual Ethernet devices between them.
pub struct Namespaces([String; 2]);

pub const SERVER: &str = "10.77.0.1";
pub const SERVER_6: &str = "fd77::1";

impl Namespaces {
    /// Returns `None`, and reports a skip, where they cannot be made.
    pub fn new(test: &str) -> Option<Self> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let names = ["a", "b"].map(|end| format!("tombolo-{}-{number}{end}", std::process::id()));
        let made = Self(names);
        let [a, b] = &made.0;
        let steps = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add v0 netns {a} type veth peer name v1 netns {b}"),
            format!("-n {a} addr add {SERVER}/24 dev v0"),
            format!("-n {b} addr add 10.77.0.2/24 dev v1"),
            format!("-n {a} addr add {SERVER_6}/64 dev v0 nodad"),
            format!("-n {b} addr add fd77::2/64 dev v1 nodad"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
            format!("-n {a} link set v0 up"),
            format!("-n {b} link set v1 up"),
        ];
        for step in steps {
            let done = Command::new("ip").args(step.split(' ')).stdout(Stdio::null()).stderr(Stdio::null()).status();
            if !done.is_ok_and(|status| status.success()) {
                let _ = writeln!(std::io::stderr(), "SKIP {test} (needs netns): `ip {step}` fails");
                return None;
            }
        }
        Some(made)
    }

    pub fn command(&self, end: usize, program: &str, arguments: &str) -> Command {
        let mut command = self.bare(end, program);
        command.args(arguments.split(' ')).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// Returns a command for `program` in one of the two namespaces, without arguments.
    pub fn bare(&self, end: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[end]]).arg(program);
        command
    }

    pub fn name(&self, end: usize) -> &str {
        &self.0[end]
    }

    /// Returns the number of sockets in one namespace that are in a state of `/proc/net/tcp`, at their own `port`.
    fn count(&self, end: usize, port: u16, state: &str) -> usize {
        let mut look = Command::new("ip");
        let seen = look.args(["netns", "exec", &self.0[end], "cat", "/proc/net/tcp", "/proc/net/tcp6"]).output();
        let text = String::from_utf8_lossy(&seen.unwrap().stdout).into_owned();
        let wanted = format!(":{port:04X}");
        let is_wanted = |line: &&str| {
            let mut words = line.split_whitespace().skip(1);
            words.next().is_some_and(|own| own.ends_with(&wanted)) && words.nth(1) == Some(state)
        };
        text.lines().filter(is_wanted).count()
    }

    /// Waits until a program listens at `port` in the first namespace.
    pub fn wait_for(&self, port: u16) {
        wait_until("the server listens", || self.count(0, port, "0A") > 0);
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            // Processes that a failed test left in the namespace.
            let inside = Command::new("ip").args(["netns", "pids", name]).output().map(|said| said.stdout);
            let inside = String::from_utf8(inside.unwrap_or_default()).unwrap_or_default();
            for pid in inside.lines().filter_map(|line| rustix::process::Pid::from_raw(line.parse().ok()?)) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
        }
    }
}

pub fn random_file(path: &Path, len: usize) -> Vec<u8> {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let bytes: Vec<u8> = (0..len / 8)
        .flat_map(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed.to_le_bytes()
        })
        .collect();
    fs::write(path, &bytes).unwrap();
    bytes
}
