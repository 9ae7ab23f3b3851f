// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whole runs of the example program: every transport of the kernel gives plausible numbers, a stuck worker costs a
//! bounded time, and nothing is left behind, however a run ends.

mod common;

use std::process::Output;
use std::time::{Duration, Instant};

use common::{Place, text};
use rustix::process::{Pid, Signal, kill_process};
use tombolo_bench::Measurement;
use tombolo_bench::job::Test;

fn measurements(output: &Output) -> Vec<Measurement> {
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The limit is useful only if a slower copy shows. The best sample counts: other programs can only slow one down, and
/// no placement on CPUs lets the slowed one reach half of the other. The ring is so large that neither side fills or
/// empties it within a time slice. Otherwise both would move a ring for each slice, however slow their copies.
#[test]
fn canary_raw_copy_that_copies_many_times_is_measured_as_slower() {
    let place = Place::new("raw");
    let output = place.run(
        "--test throughput --transport raw-copy-once,raw-copy-slowed --size 64KiB --seconds 0.1 --runs 5 --ring 16MiB --json",
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    let all = measurements(&output);
    let best = |name| all.iter().find(|m| m.transport == name).unwrap().max;
    assert!(best("raw-copy-slowed") < 0.5 * best("raw-copy-once"), "{all:?}");
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
        ("two-lines", "latency"),
        ("eventfd", "latency"),
        ("memcpy", "throughput rate"),
        ("raw-copy", "throughput"),
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
            Test::Rate => 10.0..1e10,
            Test::Latency | Test::Load => 10.0..1e9,
            Test::Setup => 0.1..1e7,
            Test::Cpu => 1e-3..1e3,
            Test::Switches | Test::Memory => 0.0..1e12,
        };
        assert!(sane.contains(&m.median), "{m:?}");
    }
    // A namespace pair is not available everywhere, but its absence must be reported.
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
    for options in
        ["--transport pigeon", "--test speed", "--size 4KB", "--size 0", "--seconds -1", "--runs 0", "--no-such"]
    {
        let output = place.run(options);
        assert_eq!(output.status.code(), Some(2), "{options}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{options}");
    }
    for (options, limit) in [
        ("--size 1TiB", "1TiB"),
        ("--size 512MiB", "the most is 256MiB"),
        ("--ring 5000", "a power of two"),
        ("--ring 1KiB", "the least is 4KiB"),
        ("--channels 0", "from 1 to 1024"),
        ("--channels 100000", "from 1 to 1024"),
        ("--rate 0", "1..=10000000"),
        ("--volume 2048GiB", "the most is 1024GiB"),
    ] {
        let output = place.run(options);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options}: {said}");
        assert_eq!(said.lines().filter(|line| line.starts_with("error:") && line.contains(limit)).count(), 1, "{said}");
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
    // A shell starts background jobs with SIGINT ignored.
    for signal in [Signal::TERM, Signal::KILL] {
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
        // A worker that is already gone with the other is as good.
        let _ = kill_process(worker, Signal::KILL);
    }
    let output = driver.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let sizes: Vec<_> = measurements(&output).iter().map(|m| m.size).collect();
    assert_eq!(sizes, [8192], "{}", text(&output.stderr));
    place.assert_nothing_left();
}
