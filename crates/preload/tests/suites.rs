// SPDX-License-Identifier: Apache-2.0 OR MIT
//! CPython's own tests of its networking, with the library and without: each of them gives the same result.

mod place;

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use place::Place;

/// The slowest takes a minute and a half on an idle machine.
const PATIENCE: Duration = Duration::from_secs(600);

fn python() -> Command {
    Command::new("/usr/bin/python3")
}

/// Whether a suite is here; if not, it is skipped aloud.
fn has(suite: &str) -> bool {
    let import = python().args(["-c", &format!("import test.{suite}")]).stderr(Stdio::null()).status();
    let there = import.is_ok_and(|status| status.success());
    if !there {
        let _ = writeln!(std::io::stderr(), "SKIP {suite} (needs libpython3-testsuite): it is not installed");
    }
    there
}

/// Runs a suite; the result of each of its tests by name.
fn run(place: &Place, name: &str, suite: &str, dress: bool) -> BTreeMap<String, String> {
    let (out, folder) = (place.path(name), place.path(&format!("in-{name}")));
    fs::create_dir(&folder).unwrap();
    let mut command = python();
    // Sockets of virtual machines hang in some of them, whoever looks.
    command.args(["-m", "test", "-v", "-i", "*VSOCK*", suite]).current_dir(folder).stdin(Stdio::null());
    if dress {
        place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    }
    let file = fs::File::create(&out).unwrap();
    let mut child = command.stderr(file.try_clone().unwrap()).stdout(file).spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() >= deadline {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{suite} does not end:\n{}", fs::read_to_string(&out).unwrap());
        }
        thread::park_timeout(Duration::from_millis(20));
    }
    results(&fs::read_to_string(out).unwrap())
}

/// What each test came to. A test may print something before its result.
fn results(text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for line in text.lines() {
        let Some((test, result)) = line.split_once(" ... ") else { continue };
        let words = ["ok", "FAIL", "ERROR", "skipped", "expected failure", "unexpected success"];
        let word = words.into_iter().find(|word| result.starts_with(word) || result.ends_with(word));
        found.insert(test.to_owned(), word.unwrap_or("?").to_owned());
    }
    found
}

/// That a suite gives the same with the library; bytes received over TCP and through shared memory.
fn same(suite: &str) -> (u64, u64) {
    let place = Place::new();
    let plain = run(&place, "plain", suite, false);
    let with = run(&place, "with", suite, true);
    assert!(plain.len() > 3 && plain.values().any(|result| result == "ok"), "{suite}: {plain:?}");
    let differ: Vec<_> = plain.iter().filter(|(test, result)| with.get(*test) != Some(result)).collect();
    assert!(differ.is_empty(), "{suite} differs with the library:\n{differ:#?}\n{}", place.log());
    assert_eq!(plain.len(), with.len(), "{suite}");
    place.assert_tidy();
    place.received()
}

fn all(suites: &[&str], percent: u64) {
    let (mut tcp, mut shared) = (0, 0);
    for suite in suites.iter().filter(|suite| has(suite)) {
        let moved = same(suite);
        (tcp, shared) = (tcp + moved.0, shared + moved.1);
    }
    // Most connections of such tests end before both ends have found each other.
    assert!(shared * 100 >= (tcp + shared) * percent, "{shared} bytes shared, {tcp} over TCP");
}

#[test]
fn cpythons_tests_of_servers_and_protocols_give_what_they_give_without_the_library() {
    all(
        &["test_httpservers", "test_asyncore", "test_smtplib", "test_epoll", "test_select", "test_poll", "test_ftplib"],
        30,
    );
}

#[test]
#[ignore = "takes minutes: in the long tier"]
fn cpythons_long_tests_give_what_they_give_without_the_library() {
    all(&["test_socket", "test_selectors", "test_ssl", "test_asyncio"], 10);
}

#[test]
fn canary_result_that_differs_is_seen() {
    let plain = results("test_a (x.A.test_a) ... ok\ntest_b (x.A.test_b) ... noise ok\n");
    let with = results("test_a (x.A.test_a) ... ok\ntest_b (x.A.test_b) ... FAIL\n");
    assert_eq!(plain.len(), 2);
    assert_ne!(plain, with);
}
