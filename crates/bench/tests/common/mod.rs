// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The example program, run in a folder of its own.
#![allow(dead_code, reason = "each test program uses its part of this")]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Pid;

/// Returns the example, built beside the tests, because `cargo test --test processes` alone does not build it. Where
/// all crates are tested, `TOMBOLO_TEST_BUILD` gives the options with which they were built, so that they are not built
/// again without these.
pub fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        let tests = std::env::current_exe().unwrap();
        let profile = tests.ancestors().nth(2).unwrap();
        let mut build = Command::new(env!("CARGO"));
        let of = std::env::var("TOMBOLO_TEST_BUILD").unwrap_or_else(|_| "--package tombolo-bench".into());
        build.args(["build", "--quiet", "--example", "bench"]).args(of.split_whitespace());
        build.arg("--target-dir").arg(profile.parent().unwrap());
        build.args(["--profile", if profile.ends_with("release") { "release" } else { "test" }]);
        assert!(build.status().unwrap().success(), "the example cannot be built");
        profile.join("examples/bench")
    });
    &PROGRAM
}

/// A directory for the scratch files of one test, so that it does not take another test's files for its own.
pub struct Place(pub PathBuf, #[expect(dead_code, reason = "held, not looked at")] MutexGuard<'static, ()>);

impl Place {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tombolo-bench-test-{name}-{}", std::process::id()));
        // One run at a time: each keeps two CPUs busy.
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        fs::create_dir(&path).unwrap();
        Self(path, alone)
    }

    pub fn start(&self, options: &str) -> Child {
        let mut command = Command::new(program());
        command.args(options.split_whitespace()).env("TMPDIR", &self.0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    pub fn run(&self, options: &str) -> Output {
        self.start(options).wait_with_output().unwrap()
    }

    /// Returns the workers whose scratch directory is here.
    pub fn workers(&self) -> HashSet<Pid> {
        let here = self.0.to_str().unwrap();
        let is_ours = |pid: &i32| {
            let line = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("cmdline")).unwrap_or_default();
            line.contains("__bench-worker") && line.contains(here)
        };
        let entries = fs::read_dir("/proc").unwrap();
        let pids = entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(is_ours).filter_map(Pid::from_raw).collect()
    }

    pub fn await_workers(&self, wanted: impl Fn(usize) -> bool) -> HashSet<Pid> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let workers = self.workers();
            if wanted(workers.len()) {
                return workers;
            }
            assert!(Instant::now() < deadline, "there are still {} workers", workers.len());
            std::thread::yield_now();
        }
    }

    /// Returns the two workers, once both have the line mapped and so are in their first sample.
    pub fn await_sampling(&self) -> HashSet<Pid> {
        let sampling = |pid: &Pid| {
            let maps = fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_pid())).unwrap_or_default();
            maps.matches("tombolo-bench-line").count() == 2
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let workers = self.await_workers(|n| n == 2);
            if workers.iter().all(sampling) {
                return workers;
            }
            assert!(Instant::now() < deadline, "no sample has begun");
            std::thread::yield_now();
        }
    }

    pub fn assert_nothing_left(&self) {
        self.await_workers(|n| n == 0);
        let deadline = Instant::now() + Duration::from_secs(20);
        while fs::read_dir(&self.0).unwrap().next().is_some() {
            assert!(Instant::now() < deadline, "files are left in {}", self.0.display());
            std::thread::yield_now();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

pub fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}
