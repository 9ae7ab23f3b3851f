// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whole runs, through the example program: that every transport of the kernel gives sane numbers, that a stuck worker
//! costs a bounded time, and that nothing is left behind, however a run ends.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tombolo_bench::Measurement;
use tombolo_bench::job::Test;

/// The example, built beside the tests: `cargo test --test processes` alone does not build it.
fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        let tests = std::env::current_exe().unwrap();
        let profile = tests.ancestors().nth(2).unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--package", "tombolo-bench", "--example", "bench", "--target-dir"]);
        build.arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "the example cannot be built");
        profile.join("examples/bench")
    });
    &PROGRAM
}

/// A directory for the scratch files of one test, so that no other test's are taken for its own.
struct Place(PathBuf, #[expect(dead_code, reason = "held, not looked at")] MutexGuard<'static, ()>);

impl Place {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tombolo-bench-test-{name}-{}", std::process::id()));
        // One run at a time: each keeps two CPUs busy.
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        fs::create_dir(&path).unwrap();
        Self(path, alone)
    }

    fn start(&self, options: &str) -> Child {
        let mut command = Command::new(program());
        command.args(options.split_whitespace()).env("TMPDIR", &self.0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn run(&self, options: &str) -> Output {
        self.start(options).wait_with_output().unwrap()
    }

    /// Workers whose scratch directory is here.
    fn workers(&self) -> HashSet<Pid> {
        let here = self.0.to_str().unwrap();
        let is_ours = |pid: &i32| {
            let line = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("cmdline")).unwrap_or_default();
            line.contains("__bench-worker") && line.contains(here)
        };
        let entries = fs::read_dir("/proc").unwrap();
        let pids = entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(is_ours).filter_map(Pid::from_raw).collect()
    }

    fn await_workers(&self, wanted: impl Fn(usize) -> bool) -> HashSet<Pid> {
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

    /// The two workers, once both have the line mapped and so are in their first sample.
    fn await_sampling(&self) -> HashSet<Pid> {
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

    fn assert_nothing_left(&self) {
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

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn measurements(output: &Output) -> Vec<Measurement> {
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn run_of_every_transport_and_test_is_sane_and_leaves_nothing() {
    let place = Place::new("all");
    let output = place
        .run("--test all --size 64,16KiB --seconds 0.02 --runs 1 --channels 1,3 --volume 4MiB --ring 64KiB --json");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let all = measurements(&output);
    for (transport, tests) in [
        ("tombolo", "throughput rate latency load switches setup channels cpu memory"),
        ("tcp", "throughput rate latency load switches setup channels cpu"),
        ("unix-stream", "throughput rate latency load switches setup channels cpu"),
        ("unix-seqpacket", "throughput rate latency load switches setup channels cpu"),
        ("pipe", "throughput rate latency load switches channels cpu"),
        ("line", "latency"),
        ("eventfd", "latency"),
        ("memcpy", "throughput rate"),
    ] {
        for test in tests.split(' ') {
            assert!(all.iter().any(|m| m.transport == transport && m.test.name() == test), "{transport} {test}");
        }
    }
    for m in &all {
        assert!(m.min <= m.median && m.median <= m.max && m.runs >= 1, "{m:?}");
        assert!(m.median > 0.0 || m.test == Test::Switches, "{m:?}");
        let sane = match m.test {
            Test::Throughput | Test::Channels => 1e3..1e12,
            Test::Rate => 1e3..1e10,
            Test::Latency | Test::Load => 10.0..1e9,
            Test::Setup => 10.0..1e7,
            Test::Cpu => 1e-3..1e3,
            Test::Switches | Test::Memory => 0.0..1e12,
        };
        assert!(sane.contains(&m.median), "{m:?}");
    }
    // A namespace pair is not to be had everywhere, but its absence is never silent.
    let veth = all.iter().any(|m| m.transport == "tcp-veth");
    assert!(veth || text(&output.stderr).contains("SKIP throughput tcp-veth"), "{}", text(&output.stderr));
    if !veth {
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!(
                "SKIP run_of_every_transport_and_test_is_sane_and_leaves_nothing (needs netns): no tcp-veth\n"
            ),
        );
    }
    place.assert_nothing_left();
}

#[test]
fn run_without_json_prints_tables_with_ratios() {
    let place = Place::new("table");
    let output = place
        .run("--test latency --wait sleep --transport pipe,eventfd --size 8 --seconds 0.01 --runs 1 --against eventfd");
    let table = text(&output.stdout);
    assert!(table.contains("round trip, sleeping") && table.contains("times better than eventfd"), "{table}");
    place.assert_nothing_left();
}

#[test]
fn run_of_what_does_not_exist_is_a_usage_error() {
    let place = Place::new("usage");
    for options in ["--transport pigeon", "--test speed", "--size 4KB", "--size 0", "--seconds -1", "--runs 0"] {
        let output = place.run(options);
        assert_eq!(output.status.code(), Some(2), "{options}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{options}");
    }
    let nothing = place.run("--test setup --transport memcpy");
    assert_eq!(nothing.status.code(), Some(1));
    assert!(text(&nothing.stderr).contains("SKIP setup memcpy"), "{}", text(&nothing.stderr));
    place.assert_nothing_left();
}

#[test]
fn run_with_a_stopped_worker_fails_in_bounded_time_and_leaves_nothing() {
    let place = Place::new("stuck");
    let driver = place.start("--test throughput --transport pipe --size 4KiB --seconds 1 --runs 1");
    let start = Instant::now();
    let workers = place.await_sampling();
    kill_process(*workers.iter().next().unwrap(), Signal::STOP).unwrap();
    let output = driver.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("FAIL throughput pipe 4KiB"), "{}", text(&output.stderr));
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    place.assert_nothing_left();
}

#[test]
fn run_ended_by_any_signal_leaves_nothing() {
    for signal in [Signal::INT, Signal::KILL] {
        let place = Place::new(&format!("signal-{}", signal.as_raw()));
        let mut driver = place.start("--test throughput --transport tcp,tcp-veth --size 64 --seconds 30 --runs 1");
        place.await_workers(|n| n >= 2);
        kill_process(Pid::from_child(&driver), signal).unwrap();
        driver.wait().unwrap();
        place.assert_nothing_left();
    }
}

#[test]
fn worker_killed_in_a_sample_fails_it_and_the_rest_goes_on() {
    let place = Place::new("killed");
    let driver = place.start("--test throughput --transport pipe --size 4KiB,8KiB --seconds 1 --runs 1 --json");
    let workers = place.await_sampling();
    for worker in workers {
        // Already gone with the other is as good.
        let _ = kill_process(worker, Signal::KILL);
    }
    let output = driver.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let sizes: Vec<_> = measurements(&output).iter().map(|m| m.size).collect();
    assert_eq!(sizes, [8192], "{}", text(&output.stderr));
    place.assert_nothing_left();
}
