// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whole test suites of other projects, with the library and without: each test gives the same result.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::Place;

/// Result of each test of a suite, by its name.
pub type Results = BTreeMap<String, String>;

/// Largest time for a suite. The slowest takes a minute and a half on an idle machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Runs a suite to its end, whatever its exit status. Returns what it printed.
pub fn run(command: &mut Command, out: &Path) -> String {
    let file = fs::File::create(out).unwrap();
    command.stdin(Stdio::null()).stderr(file.try_clone().unwrap()).stdout(file);
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() >= deadline {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{command:?} does not end:\n{}", fs::read_to_string(out).unwrap());
        }
        thread::park_timeout(Duration::from_millis(20));
    }
    String::from_utf8_lossy(&fs::read(out).unwrap()).into_owned()
}

/// Use that a suite must make of the library, in the best of five runs. Most connections of such tests end before the
/// two endpoints have found each other, and a call that began on TCP stays with the kernel until it returns. Where few
/// bytes are moved, or all in one call, the shared number of bytes is random. Whether endpoints join is not random, or
/// less so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub struct Use {
    /// Number of endpoints that join.
    pub ends: usize,
    /// Percentage of all bytes that go through shared memory.
    pub percent: u64,
}

impl Use {
    /// Computes the use from the log and the reports of the suite's processes.
    pub fn of(place: &Place) -> Self {
        let (tcp, shared) = place.received();
        Self { ends: place.log().matches("joined:").count(), percent: shared * 100 / (tcp + shared).max(1) }
    }

    pub fn is_at_least(self, other: Self) -> bool {
        self.ends >= other.ends && self.percent >= other.percent
    }
}

/// Asserts that a suite gives the same results with the library in each run, and makes at least the use `wanted` of it
/// in one run. `run` runs it, with the library or without.
pub fn same(suite: &str, wanted: Use, run: impl Fn(&Place, bool) -> Results) {
    let seen: Vec<_> = (0..5)
        .map(|_| use_of_same(suite, &Place::new(), &run))
        .inspect(|seen| _ = writeln!(std::io::stderr(), "{suite}: {seen:?}"))
        .take_while(|seen| !seen.is_at_least(wanted))
        .collect();
    assert!(seen.len() < 5, "{suite}: {wanted:?} is wanted once in {seen:?}");
}

/// Asserts that a suite gives the same results with the library. Returns the use that it made of it.
fn use_of_same(suite: &str, place: &Place, run: impl Fn(&Place, bool) -> Results) -> Use {
    let plain = run(place, false);
    let with = run(place, true);
    assert!(plain.len() > 3 && plain.values().any(|result| result == "ok"), "{suite}: {plain:?}");
    let differ: Vec<_> = plain.iter().filter(|(test, result)| with.get(*test) != Some(result)).collect();
    assert!(differ.is_empty(), "{suite} differs with the library:\n{differ:#?}\n{}", place.log());
    assert_eq!(plain.len(), with.len(), "{suite}");
    Use::of(place)
}

pub fn is_long() -> bool {
    std::env::var_os("TOMBOLO_LONG").is_some()
}

/// Returns whether the tests run in the long form. Tests that take minutes run only there.
pub fn at_length(test: &str) -> bool {
    let long = is_long();
    if !long {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs the long form): it takes minutes");
    }
    long
}
