// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the test suites of libuv and libevent, from Debian's sources, with the library and without it: each test gives
//! the same result. The sources are fetched and built when the test runs.

mod place;

use std::{
    io::Write,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::Command,
};

use place::{
    Place, has, output,
    suite::{self, Results, Use, at_length},
};

/// A user without rights: libuv refuses to run its tests as root.
const NOBODY: u32 = 65534;

/// Tests that connect to an address outside of this machine, and depend on the network's answer.
const OUTSIDE: [&str; 2] = ["tcp_close_while_connecting", "tcp_connect_timeout"];

/// A project's sources and its test program, built. They are deleted with the folder.
struct Built {
    _folder: tempfile::TempDir,
    source: PathBuf,
    program: PathBuf,
}

impl Built {
    /// Returns `None`, and reports a skip, in the short form or where something is missing.
    fn new(test: &str, package: &str, options: &[&str], target: &str, program: &str) -> Option<Self> {
        if !at_length(test) || !has(test, &["apt-get", "dpkg-source", "cmake", "make", "cc", "setpriv"]) {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let fetch = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tools/debian-source.sh"));
        let fetched = Command::new(fetch).arg(package).arg(folder.path()).output().unwrap();
        if !fetched.status.success() {
            let why = String::from_utf8_lossy(&fetched.stderr).trim().replace('\n', "; ");
            let _ = writeln!(std::io::stderr(), "SKIP {test} (needs Debian's sources): {why}");
            return None;
        }
        let (source, made) = (folder.path().join(package), folder.path().join("made"));
        let log = folder.path().join("log");
        output(Command::new("cmake").arg("-S").arg(&source).arg("-B").arg(&made).args(options), &log);
        suite::run(Command::new("make").arg("-C").arg(&made).args(["-j2", target]), &log);
        let program = made.join(program);
        assert!(program.is_file(), "{}", std::fs::read_to_string(log).unwrap());
        if rustix::process::geteuid().is_root() {
            output(Command::new("chown").args(["-R", &NOBODY.to_string()]).arg(folder.path()), &log);
        }
        Some(Self { _folder: folder, source, program })
    }

    /// Runs all tests. Returns what they printed.
    fn run(&self, place: &Place, dress: bool) -> String {
        let mut command = Command::new("setpriv");
        if rustix::process::geteuid().is_root() {
            for path in ["", "meet", "reports"] {
                chown(place.path(path), Some(NOBODY), Some(NOBODY)).unwrap();
            }
            command.arg(format!("--reuid={NOBODY}")).arg(format!("--regid={NOBODY}")).arg("--clear-groups");
        }
        command.arg(&self.program).current_dir(&self.source);
        if dress {
            place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
        }
        suite::run(&mut command, &place.path(if dress { "with" } else { "plain" }))
    }
}

#[test]
fn libuvs_own_tests_are_the_same() {
    let options = ["-DCMAKE_BUILD_TYPE=Release", "-DLIBUV_BUILD_TESTS=ON"];
    let built = Built::new("libuvs_own_tests_are_the_same", "libuv1", &options, "uv_run_tests", "uv_run_tests");
    if let Some(built) = built {
        suite::same("libuv", Use { ends: 2, percent: 80 }, |place, dress| of_libuv(&built.run(place, dress)));
    }
}

#[test]
fn libevents_own_tests_are_the_same() {
    // The tests call functions that libevent's shared libraries do not export.
    let options = ["-DCMAKE_BUILD_TYPE=Release", "-DEVENT__LIBRARY_TYPE=STATIC", "-DEVENT__DISABLE_SAMPLES=ON"];
    let built = Built::new("libevents_own_tests_are_the_same", "libevent", &options, "regress", "bin/regress");
    if let Some(built) = built {
        suite::same("libevent", Use { ends: 2, percent: 90 }, |place, dress| of_libevent(&built.run(place, dress)));
    }
}

/// Parses lines such as `not ok 205 - poll_oob` and `ok 7 - fs_poll # SKIP why`.
fn of_libuv(said: &str) -> Results {
    let one = |line: &str| {
        let (result, test) = line.split_once(" - ")?;
        let result = result.trim_end_matches(|c: char| c.is_ascii_digit() || c == ' ');
        let (test, skipped) = test.split_once(" # ").map_or((test, false), |(test, _)| (test, true));
        let result = if skipped { "skipped" } else { result };
        (matches!(result, "ok" | "not ok" | "skipped") && !OUTSIDE.contains(&test))
            .then(|| (test.to_owned(), result.to_owned()))
    };
    said.lines().filter_map(one).collect()
}

/// Parses lines such as `http/put: [forking] OK`; the reason of a failure comes on the next line.
fn of_libevent(said: &str) -> Results {
    let one = |line: &str| {
        let (test, result) = line.split_once(": ")?;
        let result = result.trim_start_matches("[forking]").trim();
        let result = if result == "OK" { "ok" } else { result };
        let is_test = !line.starts_with(' ') && test.contains('/') && !test.contains(' ');
        is_test.then(|| (test.to_owned(), result.to_owned()))
    };
    said.lines().filter_map(one).collect()
}

#[test]
fn canary_result_that_differs_is_seen() {
    let uv = |second: &str| of_libuv(&format!("1..2\nok 1 - tcp_open\n# Output of it\n{second}\n"));
    assert_eq!(uv("ok 2 - tcp_oob").len(), 2);
    for other in ["not ok 2 - tcp_oob", "ok 2 - tcp_oob # SKIP no", ""] {
        assert_ne!(uv("ok 2 - tcp_oob"), uv(other), "{other}");
    }
    let event =
        |second: &str| of_libevent(&format!("http/get: [forking] OK\n{second}\n1/2 TESTS FAILED. (0 skipped)\n"));
    assert_eq!(event("http/put: OK").len(), 2);
    assert_eq!(event("http/put: OK"), event("http/put: [forking] OK"));
    for other in ["http/put: [forking] \n  FAIL a.c:9: assert(a/b): no\n  [put FAILED]", "http/put: SKIPPED", ""] {
        assert_ne!(event("http/put: OK"), event(other), "{other}");
    }
}
