// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whole suites of other projects, with the library and without: each of their tests gives the same result.

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

/// What each test of a suite came to, by its name.
pub type Results = BTreeMap<String, String>;

/// The slowest takes a minute and a half on an idle machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Runs a suite to its end, good or bad; what it printed.
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

/// That a suite gives the same with the library, and moves at least so many hundredths of what it moves through shared
/// memory: most connections of such tests end before both ends have found each other. `run` runs it, with or without.
pub fn same(suite: &str, percent: u64, run: impl Fn(&Place, bool) -> Results) {
    // Whether both ends of the longest connection find each other in time is chance: the results are to be the same each time,
    // the share once.
    let shares = (0..5).map(|_| share_of_same(suite, &run));
    let most = shares
        .inspect(|share| _ = writeln!(std::io::stderr(), "{suite}: {share} % shared"))
        .find(|share| *share >= percent);
    assert!(most.is_some(), "{suite}: {percent} % were to be shared");
}

/// That a suite gives the same with the library; how many hundredths of its bytes went through shared memory.
fn share_of_same(suite: &str, run: impl Fn(&Place, bool) -> Results) -> u64 {
    let place = Place::new();
    let plain = run(&place, false);
    let with = run(&place, true);
    assert!(plain.len() > 3 && plain.values().any(|result| result == "ok"), "{suite}: {plain:?}");
    let differ: Vec<_> = plain.iter().filter(|(test, result)| with.get(*test) != Some(result)).collect();
    assert!(differ.is_empty(), "{suite} differs with the library:\n{differ:#?}\n{}", place.log());
    assert_eq!(plain.len(), with.len(), "{suite}");
    let (tcp, shared) = place.received();
    shared * 100 / (tcp + shared).max(1)
}

/// What takes minutes runs in the long form alone.
pub fn at_length(test: &str) -> bool {
    let long = std::env::var_os("TOMBOLO_LONG").is_some();
    if !long {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs the long form): it takes minutes");
    }
    long
}
