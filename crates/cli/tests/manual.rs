// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Manual pages and completions: they contain every verb and every flag of the help, and nothing hidden.

mod common;

use std::{collections::BTreeSet, fs, path::Path};

use common::{Place, Running};

/// Returns what the program prints when asked for help.
fn help(words: &[&str]) -> String {
    String::from_utf8(Running::start(words, |_| {}).end().expect(0).out).unwrap()
}

/// Returns every verb, as the words that a user types: `["link", "add"]`.
fn verbs() -> Vec<Vec<String>> {
    let mut verbs = below(&[]);
    let mut at = 0;
    while at < verbs.len() {
        verbs.extend(below(&verbs[at]));
        at += 1;
    }
    verbs
}

/// Returns the verbs below some words.
fn below(words: &[String]) -> Vec<Vec<String>> {
    let help = help_of(words);
    let Some((_, list)) = help.split_once("Commands:") else { return Vec::new() };
    let list = list.split("Options:").next().unwrap();
    let named = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = named.map(|line| line.split_whitespace().next().unwrap()).filter(|verb| *verb != "help");
    names.map(|verb| words.iter().cloned().chain([verb.into()]).collect()).collect()
}

fn help_of(words: &[String]) -> String {
    let words: Vec<_> = words.iter().map(String::as_str).chain(["--help"]).collect();
    help(&words)
}

/// Returns everything that looks like a long flag.
fn flags(text: &str) -> BTreeSet<String> {
    let lines = text.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    let words = lines.flat_map(|line| {
        line.split([' ', ',', '=', '[', '<']).take_while(|word| word.is_empty() || word.starts_with('-'))
    });
    words.filter(|word| word.starts_with("--")).map(String::from).collect()
}

fn generate(folder: &Path) {
    Running::start(&["__generate", folder.to_str().unwrap()], |_| {}).end().expect(0);
}

#[test]
fn manual_has_a_page_for_every_verb_with_every_flag() {
    let place = Place::new();
    let share = place.path("share");
    generate(&share);
    let page = |name: &str| fs::read_to_string(share.join("man/man1").join(name)).unwrap().replace('\\', "");
    let (verbs, front) = (verbs(), page("tombolo.1"));
    for known in [&["cat"][..], &["doctor"], &["link", "add"]] {
        assert!(verbs.iter().any(|verb| verb == known), "{known:?}");
    }
    assert_eq!(fs::read_dir(share.join("man/man1")).unwrap().count(), verbs.len() + 1, "a page for each, and no other");
    for verb in verbs {
        let (name, flags) = (verb.join("-"), flags(&help_of(&verb)));
        assert!(verb.len() > 1 || front.contains(&format!("tombolo-{name}(1)")), "{name}");
        let page = page(&format!("tombolo-{name}.1"));
        assert!(flags.contains("--help"), "{name}: {flags:?}");
        for flag in flags {
            assert!(page.contains(&flag), "tombolo-{name}.1 says nothing of {flag}");
        }
    }
}

#[test]
fn completions_know_every_verb_and_flag_and_nothing_hidden() {
    let place = Place::new();
    let share = place.path("share");
    generate(&share);
    for name in
        ["bash-completion/completions/tombolo", "fish/vendor_completions.d/tombolo.fish", "zsh/site-functions/_tombolo"]
    {
        let text = fs::read_to_string(share.join(name)).unwrap();
        assert!(!text.contains("__generate"), "{name}");
        for verb in verbs() {
            assert!(text.contains(verb.last().unwrap()), "{name}: {verb:?}");
            for flag in flags(&help_of(&verb)) {
                assert!(text.contains(flag.trim_start_matches('-')), "{name}: {verb:?} {flag}");
            }
        }
    }
}

#[test]
fn canary_flags_are_found_in_help() {
    let text = "Options:\n  -f, --folder <FOLDER>\n          Look --here\n      --progress[=<WHEN>]  x\n";
    assert_eq!(flags(text), ["--folder", "--progress"].map(String::from).into());
}

#[test]
fn folder_that_cannot_be_made_is_said() {
    let place = Place::new();
    let (file, _) = place.file("file", 1);
    let words = ["__generate", file.to_str().unwrap()];
    Running::start(&words, |_| {}).end().expect_failure(1, &["cannot write", "file"]);
}
