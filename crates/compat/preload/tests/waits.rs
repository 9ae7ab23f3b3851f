// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random waits (`programs/waits.c`): threads, sets, registrations, copies and closings in every order give with the library what
//! they give without. A difference is printed as the few calls that make it.

#[macro_use]
mod place;

use std::{collections::BTreeSet, process::Command, time::Duration};

use place::{Place, built_with, has, output_within};

/// Calls of an episode.
const STEPS: usize = 40;
/// Episodes that are compared at a time.
const CHUNK: u64 = 250;

/// What a run prints without and with the library: `count` episodes from `first` on, without the steps that are left out.
fn both(place: &Place, program: &std::path::Path, first: u64, count: u64, without: &BTreeSet<usize>) -> [String; 2] {
    [false, true].map(|with| {
        let mut command = Command::new(program);
        command.args([first, count].map(|number| number.to_string()));
        command.args(without.iter().map(usize::to_string));
        if with {
            place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
        }
        output_within(Duration::from_secs(300), &mut command, &place.path(if with { "with" } else { "plain" }))
    })
}

/// The number of the first episode in which the two differ.
fn differs([plain, with]: &[String; 2]) -> Option<u64> {
    let (one, other) = plain.lines().zip(with.lines()).find(|(one, other)| one != other)?;
    let episode = |line: &str| line.split('.').next().and_then(|number| number.parse().ok());
    episode(one).or_else(|| episode(other))
}

/// The calls of an episode that are enough for it to differ, and what they give.
fn least(place: &Place, program: &std::path::Path, episode: u64) -> String {
    let mut without = BTreeSet::new();
    for step in 0..STEPS {
        without.insert(step);
        let [plain, with] = both(place, program, episode, 1, &without);
        if plain == with {
            without.remove(&step);
        }
    }
    let words: Vec<_> = without.iter().map(usize::to_string).collect();
    let [plain, with] = both(place, program, episode, 1, &without);
    format!("waits {episode} 1 {}\n-- without the library\n{plain}-- with it\n{with}", words.join(" "))
}

#[test]
fn random_waits_give_what_the_kernel_gives() {
    if !has("random_waits_give_what_the_kernel_gives", &["cc"]) {
        return;
    }
    let place = Place::new();
    let program = built_with(&place, "waits.c", &["-O1"]);
    let long = std::env::var_os("TOMBOLO_LONG").is_some();
    // Millions of calls, or hundreds of thousands.
    let chunks = if long { 400 } else { 20 };
    for first in (0..chunks).map(|chunk| 1 + chunk * CHUNK) {
        let said = both(&place, &program, first, CHUNK, &BTreeSet::new());
        if let Some(episode) = differs(&said) {
            panic!("they differ:\n{}", least(&place, &program, episode));
        }
        assert_eq!(said[0], said[1], "one ended early");
    }
    let joined = place.log().matches("joined:").count() as u64;
    assert!(joined >= chunks * CHUNK * 2, "{joined} ends were joined");
}

#[test]
fn canary_a_difference_is_found_and_its_calls_are_few() {
    let say = |lines: &[&str]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let said = [say(&["3.1 wait in 1: 0", "4.2 wait in 0: 1"]), say(&["3.1 wait in 1: 0", "4.2 wait in 0: 0"])];
    assert_eq!(differs(&said), Some(4));
    assert_eq!(differs(&[said[0].clone(), said[0].clone()]), None);
}
