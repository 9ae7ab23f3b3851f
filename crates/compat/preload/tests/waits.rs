// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random waits (`programs/waits.c`): threads, sets, registrations, copies and closes in every order give the same
//! results with the library as without. A difference is reduced to the few calls that cause it, and printed.

#[macro_use]
mod place;

use std::{collections::BTreeSet, path::PathBuf, process::Command, time::Duration};

use place::{Place, built_with, has, output_within};

/// Number of calls of an episode.
const STEPS: usize = 40;
/// Number of episodes that are compared at a time.
const CHUNK: u64 = 250;

/// The program, and how it is run.
struct Model {
    place: Place,
    program: PathBuf,
    /// Time in microseconds after which directions move between TCP and shared memory.
    flip: Option<&'static str>,
}

impl Model {
    /// Returns what a run prints without and with the library: `count` episodes from `first` on, without the steps that
    /// are left out.
    fn both(&self, first: u64, count: u64, without: &BTreeSet<usize>) -> [String; 2] {
        [false, true].map(|with| {
            let mut command = Command::new(&self.program);
            command.args([first, count].map(|number| number.to_string()));
            command.args(without.iter().map(usize::to_string));
            if with {
                self.place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
                command.envs(self.flip.map(|pace| ("TOMBOLO_SOCKETS_FLIP_US", pace)));
            }
            let to = self.place.path(if with { "with" } else { "plain" });
            output_within(Duration::from_secs(300), &mut command, &to)
        })
    }

    /// Compares all episodes in chunks; more of them in the long form.
    fn compare(test: &str, flip: Option<&'static str>, chunks: u64) {
        if !has(test, &["cc"]) {
            return;
        }
        let place = Place::new();
        let options: &[&str] = if flip.is_some() { &["-O1", "-DEXCLUSIVE=0"] } else { &["-O1"] };
        let model = Self { program: built_with(&place, "waits.c", options), place, flip };
        // Millions of calls in the long form, or hundreds of thousands.
        let chunks = if std::env::var_os("TOMBOLO_LONG").is_some() { chunks * 20 } else { chunks };
        for first in (0..chunks).map(|chunk| 1 + chunk * CHUNK) {
            let said = model.both(first, CHUNK, &BTreeSet::new());
            if let Some(episode) = differs(&said) {
                panic!("they differ:\n{}", model.least(episode));
            }
            assert_eq!(said[0], said[1], "one ended early");
        }
        let joined = model.place.log().matches("joined:").count() as u64;
        assert!(joined >= chunks * CHUNK * 2, "{joined} ends were joined");
    }

    /// Returns a minimal set of calls of an episode for which it still differs, and their results.
    fn least(&self, episode: u64) -> String {
        let mut without = BTreeSet::new();
        for step in 0..STEPS {
            without.insert(step);
            let [plain, with] = self.both(episode, 1, &without);
            if plain == with {
                without.remove(&step);
            }
        }
        let words: Vec<_> = without.iter().map(usize::to_string).collect();
        let [plain, with] = self.both(episode, 1, &without);
        format!("waits {episode} 1 {}\n-- without the library\n{plain}-- with it\n{with}", words.join(" "))
    }
}

/// Returns the number of the first episode in which the two differ.
fn differs([plain, with]: &[String; 2]) -> Option<u64> {
    let (one, other) = plain.lines().zip(with.lines()).find(|(one, other)| one != other)?;
    let episode = |line: &str| line.split('.').next().and_then(|number| number.parse().ok());
    episode(one).or_else(|| episode(other))
}

#[test]
fn random_waits_give_what_the_kernel_gives() {
    Model::compare("random_waits_give_what_the_kernel_gives", None, 20);
}

#[test]
fn s15_random_waits_give_the_same_while_carriers_change() {
    Model::compare("s15_random_waits_give_the_same_while_carriers_change", Some("100"), 4);
}

#[test]
fn canary_a_difference_is_found_and_its_calls_are_few() {
    let say = |lines: &[&str]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let said = [say(&["3.1 wait in 1: 0", "4.2 wait in 0: 1"]), say(&["3.1 wait in 1: 0", "4.2 wait in 0: 0"])];
    assert_eq!(differs(&said), Some(4));
    assert_eq!(differs(&[said[0].clone(), said[0].clone()]), None);
}
