// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random calls on both endpoints of a connection (`programs/random.c`): a seed gives the same output with the library
//! as without.

mod place;

use std::{env, fs, path::Path, process::Command};

use place::{Place, Started, built_with, has};

/// Number of calls of a seed, besides those after which its connections are joined.
const STEPS: &str = "180";

/// Returns the output of a seed without the library and with it; the library joins its connections.
fn both(place: &Place, program: &Path, seed: u32, words: &[&str]) -> [String; 2] {
    let run = |name: &str, dress: &dyn Fn(&mut Command)| {
        let mut command = Command::new(program);
        dress(command.arg(seed.to_string()).arg(STEPS).args(words).stdout(fs::File::create(place.path(name)).unwrap()));
        Started::new(&mut command).finish();
        fs::read_to_string(place.path(name)).unwrap()
    };
    let plain = run("plain", &|_| {});
    assert!(plain.ends_with("done\n"), "{plain}");
    let with = run("with", &|command| {
        place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0").env("TOMBOLO_SOCKETS_FIRST_RING", "65536"));
    });
    assert!(place.log().contains("joined:"), "{}", place.log());
    [plain, with]
}

fn program(test: &str) -> Option<(Place, std::path::PathBuf)> {
    if !has(test, &["cc"]) {
        return None;
    }
    let place = Place::new();
    let program = built_with(&place, "random.c", &["-O1"]);
    Some((place, program))
}

/// Returns where two texts begin to differ, with the lines before.
fn difference(texts: &[String; 2]) -> String {
    let [plain, with] = texts.each_ref().map(|text| text.lines().collect::<Vec<_>>());
    let at = plain.iter().zip(&with).take_while(|(plain, with)| plain == with).count();
    let before = plain[at.saturating_sub(30)..at].join("\n");
    format!("{before}\nwithout: {:?}\nwith:    {:?}", plain.get(at), with.get(at))
}

#[test]
fn calls_at_random_give_what_they_give_without_the_library() {
    let Some((place, program)) = program("random calls") else { return };
    let seeds = if env::var_os("TOMBOLO_LONG").is_some() { 1000 } else { 20 };
    for seed in 0..seeds {
        let texts = both(&place, &program, seed, &[]);
        assert!(texts[0] == texts[1], "seed {seed}:\n{}", difference(&texts));
    }
    place.assert_none_reset();
}

#[test]
fn canary_reads_past_the_library_are_a_difference() {
    let Some((place, program)) = program("random calls") else { return };
    let differs = (0..3).any(|seed| {
        let [plain, with] = both(&place, &program, seed, &["past"]);
        plain != with
    });
    assert!(differs, "what was received past the library was the same");
}
