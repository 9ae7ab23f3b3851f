// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo demo` and `tombolo bench`: whole short runs, which leave nothing behind.

mod common;

use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use common::{Place, Running, wait_until};
use rustix::process::Signal;
use serde_json::Value;

/// One at a time: ends that spin on the same CPUs would keep each other from any progress.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the program with its temporary files in `place`.
fn start(place: &Place, options: &str) -> Running {
    let words: Vec<_> = options.split_whitespace().collect();
    Running::start(&words, |command| _ = command.env("TMPDIR", folder(place)))
}

/// Returns the folder of these files.
fn folder(place: &Place) -> PathBuf {
    let folder = place.path("tmp");
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

/// Returns the processes that have this folder on their command line.
fn processes(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let lines = entries.filter_map(|entry| fs::read_to_string(entry.path().join("cmdline")).ok());
    lines.filter(|line| line.contains(folder.to_str().unwrap())).collect()
}

fn lines(out: &[u8]) -> Vec<Value> {
    let out = str::from_utf8(out).unwrap();
    out.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

#[test]
fn demo_moves_checks_and_compares() {
    let (_turn, place) = (turn(), Place::new());
    let ended = start(&place, "demo --size 16MiB --quick").end().expect(0);
    let out = String::from_utf8(ended.out).unwrap();
    let digests: BTreeSet<_> =
        out.lines().filter_map(|line| line.strip_prefix("SHA-256 ")?.rsplit(' ').next()).collect();
    assert!(digests.len() == 1 && out.contains("\nidentical\n"), "{out}");
    for word in ["throughput", "round trip, spinning", "round trip, sleeping", "tombolo", "tcp", "unix-stream"] {
        assert!(out.contains(word), "{word}: {out}");
    }
    let kind = ["a user and network namespace of its own", "two plain processes, because"];
    assert!(kind.iter().any(|kind| ended.said.contains(kind)), "{}", ended.said);
    assert!(is_empty(&folder(&place)));
    assert_eq!(processes(&folder(&place)), [""; 0]);
}

#[test]
fn demo_of_a_named_file_as_json_is_lines_that_parse() {
    let (_turn, place) = (turn(), Place::new());
    let (file, bytes) = place.file("named", 3_000_001);
    let lines = lines(&start(&place, &format!("demo --json --quick {}", file.display())).end().expect(0).out);
    let transfer = &lines[0];
    assert_eq!((&transfer["test"], &transfer["bytes"]), (&"transfer".into(), &bytes.len().into()));
    assert_eq!((&transfer["identical"], &transfer["sha256_sent"]), (&true.into(), &transfer["sha256_received"]));
    let measured: BTreeSet<_> =
        lines[1..].iter().map(|line| (line["test"].as_str().unwrap(), line["transport"].as_str().unwrap())).collect();
    assert_eq!(measured.len(), 6, "{measured:?}");
    assert!(fs::read(file).unwrap() == bytes && is_empty(&folder(&place)));
}

#[test]
fn demo_that_is_interrupted_leaves_nothing() {
    let (_turn, place) = (turn(), Place::new());
    let folder = folder(&place);
    let demo = start(&place, "demo --size 1GiB --quick");
    wait_until("two domains at work", || processes(&folder).len() >= 2);
    demo.signal(Signal::INT);
    let ended = demo.end();
    assert_eq!(ended.status.signal(), Some(Signal::INT.as_raw()), "{}", ended.said);
    assert_eq!(ended.said.lines().last(), Some("tombolo: interrupted"));
    wait_until("no process is left", || processes(&folder).is_empty());
    assert!(is_empty(&folder));
}

#[test]
fn demo_that_is_killed_takes_its_domains_along() {
    let (_turn, place) = (turn(), Place::new());
    let folder = folder(&place);
    let demo = start(&place, "demo --size 1GiB --quick");
    wait_until("two domains at work", || processes(&folder).len() >= 2);
    demo.signal(Signal::KILL);
    demo.end();
    wait_until("no process is left", || processes(&folder).is_empty());
    // The folder of the socket may be left, but nothing in it, and no data.
    wait_until("the socket is gone", || fs::read_dir(&folder).unwrap().all(|entry| is_empty(&entry.unwrap().path())));
}

#[test]
fn demo_that_cannot_have_its_room_says_what_to_do() {
    let (_turn, place) = (turn(), Place::new());
    start(&place, "demo --size 999999GiB").end().expect_failure(2, &["free", "set TMPDIR"]);
    start(&place, "demo /no/such/file").end().expect_failure(2, &["/no/such/file"]);
    start(&place, "demo /dev/null").end().expect_failure(2, &["no regular file"]);
    let ended = Running::start(&["demo", "--size", "1MiB"], |command| _ = command.env("TMPDIR", "/no/such/folder"));
    ended.end().expect_failure(2, &["/no/such/folder"]);
}

#[test]
fn demo_whose_output_nobody_reads_is_success() {
    let (_turn, place) = (turn(), Place::new());
    let mut demo = start(&place, "demo --size 1MiB --quick");
    demo.child.stdout.take().unwrap().read_exact(&mut [0; 4]).unwrap();
    demo.end().expect(0);
    assert!(is_empty(&folder(&place)));
}

#[test]
fn bench_as_json_is_lines_that_parse() {
    let (_turn, place) = (turn(), Place::new());
    let options = "bench --json --test latency --transport tombolo,tcp --size 64 --runs 1 --seconds 0.02";
    let lines = lines(&start(&place, options).end().expect(0).out);
    assert!(lines.iter().all(|line| line["test"] == "latency" && line["median"].as_f64().unwrap() > 0.0), "{lines:?}");
    assert!(lines.iter().any(|line| line["transport"] == "tombolo"), "{lines:?}");
    wait_until("its workers are gone", || is_empty(&folder(&place)));
}
