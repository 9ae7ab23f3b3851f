// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite and the hostile peers, run one after the other.

#[path = "../../tests/support/victim.rs"]
mod victim;

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use tombolo_domain::{Deadline, Rendezvous};
use tombolo_domain_xen::hostile::{CALLERS, LISTENERS};
use tombolo_testing::conformance::{Fixture, Mortal, remote::Remote, set_patience};

use crate::{
    actors::HOSTILE,
    link::{Side, reach},
};

/// For calls that each travel through TCP under emulation.
const PATIENCE: Duration = Duration::from_secs(60);

/// Names that no run had before.
static NAMES: AtomicU32 = AtomicU32::new(0);

fn fresh() -> String {
    format!("s{}-{}", std::process::id(), NAMES.fetch_add(1, Ordering::Relaxed))
}

/// This domain and the agent's.
struct Pair {
    here: Side,
    there: Remote,
    listens_here: bool,
}

impl Fixture for Pair {
    fn listening(&self) -> &dyn Rendezvous {
        if self.listens_here { &self.here } else { &self.there }
    }

    fn connecting(&self) -> &dyn Rendezvous {
        if self.listens_here { &self.there } else { &self.here }
    }

    fn service(&self) -> String {
        fresh()
    }

    fn stale_service(&self) -> Option<String> {
        let service = fresh();
        if self.listens_here {
            crate::deaths::leave_stale(self.here.other, &service);
        } else {
            drop(self.there.cast("listener", &service));
        }
        Some(service)
    }

    fn mortal(&self) -> Option<Box<dyn Mortal>> {
        Some(self.there.mortal(&self.here, &fresh()))
    }

    fn quiesce(&self) {
        self.there.sync_memory();
    }

    fn times(&self, usual: usize) -> usize {
        (usual / 100).max(20)
    }
}

/// A test's name, and what it does.
type Test = (String, Box<dyn FnOnce()>);

/// Runs tests as libtest would, and says whether all passed.
fn run(tests: Vec<Test>, words: &[&str]) -> bool {
    let chosen: Vec<_> = tests
        .into_iter()
        .filter(|(name, _)| words.is_empty() || words.iter().any(|word| name.contains(word)))
        .collect();
    println!("running {} tests", chosen.len());
    let (mut passed, mut failed) = (0, Vec::new());
    for (name, test) in chosen {
        let start = Instant::now();
        let end = match catch_unwind(AssertUnwindSafe(test)) {
            Ok(()) => {
                passed += 1;
                "ok"
            }
            Err(_) => {
                failed.push(name.clone());
                "FAILED"
            }
        };
        println!("test {name} ... {end} <{:.1}s>", start.elapsed().as_secs_f64());
    }
    for name in &failed {
        println!("failed: {name}");
    }
    let word = if failed.is_empty() && passed > 0 { "ok" } else { "FAILED" };
    println!("test result: {word}. {passed} passed; {} failed; 0 ignored; 0 measured; 0 filtered out", failed.len());
    word == "ok"
}

/// The conformance suite, each side listening once.
pub fn suite(address: &str, other: &str, words: &[&str]) -> bool {
    set_patience(PATIENCE);
    let mut tests: Vec<Test> = Vec::new();
    for listens_here in [true, false] {
        let side = if listens_here { "here" } else { "there" };
        for (name, test) in tombolo_testing::conformance!(table Pair) {
            let (address, other) = (address.to_owned(), other.to_owned());
            let run = move || test(&Pair { here: Side::new(&other), there: reach(&address), listens_here });
            tests.push((format!("{side}::{name}"), Box::new(run)));
        }
    }
    run(tests, words)
}

/// The agent's domain, which is honest or not as asked.
struct There {
    remote: Remote,
}

impl victim::Other for There {
    fn hostile(&self, act: &str, service: &str, _until: Deadline) -> Box<dyn Any> {
        Box::new(self.remote.cast(act, service))
    }

    fn honest(&self) -> &dyn Rendezvous {
        &self.remote
    }
}

/// What hostile peers do, done to this domain.
pub fn hostile(address: &str, other: &str, words: &[&str]) -> bool {
    let mut tests: Vec<Test> = Vec::new();
    let with = |tests: &mut Vec<Test>, name: &'static str, calls: bool| {
        let (address, other) = (address.to_owned(), other.to_owned());
        let test = move || {
            let (here, there, service, honest) =
                (Side::new(&other), There { remote: reach(&address) }, fresh(), fresh());
            // Shorter than the hostile goes on.
            let time = HOSTILE / 2;
            if calls {
                victim::bears_a_caller(&here, &there, name, [&service; 3], time);
            } else {
                victim::bears_a_listener(&here, &there, name, [&service, &service, &honest, &honest], time);
            }
        };
        tests.push((format!("hostile::{name}"), Box::new(test)));
    };
    CALLERS.iter().for_each(|(name, _)| with(&mut tests, name, true));
    LISTENERS.iter().for_each(|(name, _)| with(&mut tests, name, false));
    run(tests, words)
}
