// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Refuses names that say too little. A function's name needs a verb and an object, and a type is named by the standard
//! term, as in the glossary of `spec/README.md`.

use crate::report::Report;
use crate::rust::code_only;
use crate::tree::Tree;

/// Bare verbs that fit any function, so that a search for them finds nothing.
const FUNCTIONS: [&str; 8] = ["hear", "keep", "look", "note", "say", "settle", "take", "tell"];
/// Words that the project once used for things that have a standard term, and that term.
const TYPES: [(&str, &str); 30] = [
    ("Bell", "Doorbell"),
    ("Bells", "Doorbells"),
    ("Board", "StatsPage"),
    ("Book", "BrokerState"),
    ("Brought", "PeerResources"),
    ("Carrier", "Transport"),
    ("Door", "ListenerPage, or what it is"),
    ("Family", "ForkGroup"),
    ("Heard", "what was received"),
    ("Holder", "DescriptorStore"),
    ("Keeper", "GrantReaper"),
    ("Keeping", "ReaperClient"),
    ("Keepings", "ReaperListing"),
    ("Kept", "what is stored"),
    ("Knock", "connect request"),
    ("Knocks", "ConnectRequests"),
    ("Lines", "ReconnectPages, or what they are"),
    ("Made", "what was agreed"),
    ("Met", "what it is"),
    ("Neighbour", "PeerProcess"),
    ("No", "Refusal"),
    ("OwnCarrier", "OwnRing"),
    ("PeerCarrier", "PeerRing"),
    ("Ringer", "Notifier"),
    ("Roster", "ConnectionTable"),
    ("Said", "Envelope"),
    ("Told", "what was sent"),
    ("Sleeper", "Waiter"),
    ("Turn", "a guard"),
    ("Turns", "a lock"),
];

/// Words that the glossary replaced, and their replacements. No name in the code may contain one of them, be it a
/// function, type, local or field.
const REPLACED: [(&str, &str); 8] = [
    ("bell", "doorbell"),
    ("bells", "doorbells"),
    ("door", "listener, socket, or what it is"),
    ("doors", "listeners, sockets, or what they are"),
    ("ringer", "notifier"),
    ("ringers", "notifiers"),
    ("sleeper", "waiter"),
    ("sleepers", "waiters"),
];
/// Further such words in the broker's crates, which mean something else in other crates.
const REPLACED_IN_BROKER: [(&str, &str); 4] =
    [("book", "state"), ("calls", "connections"), ("holder", "descriptor store"), ("told", "what was sent")];
const BROKER: [&str; 2] = ["crates/broker/", "crates/core/control/"];
/// Names of messages, as the specification has them.
const GIVEN: [&str; 4] = ["Bell", "Call", "CallRow", "Calls"];
/// Largest number of words of a name that is checked. Longer names, as those of tests, are sentences and may contain
/// any word.
const WORDS_MAX: usize = 3;

/// Checks that no function of a crate or of its tests has such a name, nor a type or module of a crate. Words that were
/// replaced everywhere may be in no name at all.
pub fn check(tree: &Tree) -> Report {
    let mut report = Report::default();
    let mut named = 0;
    for (path, source) in tree.files(&[".rs"]) {
        let words = words_for(path);
        for (row, line) in code_only(source).lines().enumerate() {
            let row = row + 1;
            for (name, instead) in replaced(line, &words) {
                report.fail(format!("{path}:{row}: {name}: the glossary has another word ({instead})"));
            }
            let Some((kind, name)) = definition(line) else { continue };
            named += 1;
            if kind == "fn" && FUNCTIONS.contains(&name) {
                report.fail(format!("{path}:{row}: fn {name}: what does it {name}? Give the verb its object"));
            }
            let word = capitalised(name);
            let known = TYPES.iter().find(|(old, _)| kind != "fn" && path.contains("/src/") && *old == word);
            if let Some((_, instead)) = known {
                report.fail(format!("{path}:{row}: {kind} {name}: the glossary has another word ({instead})"));
            }
        }
    }
    if named == 0 {
        report.fail("no function and no type was found: does this check still read the sources?");
    }
    report.summary = format!("{named} functions, types and modules");
    report
}

/// Returns the name of a module in the form of a type: `DescriptorStore` for `descriptor_store`.
fn capitalised(name: &str) -> String {
    let capital = |part: &str| part[..1].to_uppercase() + &part[1..];
    name.split('_').filter(|part| part.is_ascii() && !part.is_empty()).map(capital).collect()
}

/// Returns the words that no name in a file may contain.
fn words_for(path: &str) -> Vec<(&'static str, &'static str)> {
    let is_in = |folders: &[&str]| folders.iter().any(|folder| path.starts_with(folder));
    REPLACED.iter().chain(REPLACED_IN_BROKER.iter().filter(|_| is_in(&BROKER))).copied().collect()
}

/// Returns the names in a line of blanked code that contain one of these words, with its replacement.
fn replaced<'a>(
    line: &'a str,
    known: &'a [(&'static str, &'static str)],
) -> impl Iterator<Item = (&'a str, &'static str)> {
    let names = line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|name| !GIVEN.contains(name));
    names.filter_map(move |name| {
        let words = words_of(name);
        let known = known.iter().find(|(old, _)| words.iter().any(|word| word == old));
        known.filter(|_| words.len() <= WORDS_MAX).map(|(_, instead)| (name, *instead))
    })
}

/// Returns the words of a name in lower case: the same for `TOLD_AT`, `told_at` and `ToldAt`.
fn words_of(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_small = false;
    for letter in name.chars() {
        if letter == '_' || (was_small && letter.is_uppercase()) {
            words.push(String::new());
        }
        was_small = letter.is_lowercase();
        words.last_mut().into_iter().for_each(|word| word.extend(letter.to_lowercase().filter(|it| *it != '_')));
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Returns what a line of blanked code defines: the keyword and the name.
fn definition(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start();
    let line = line.strip_prefix("pub(").and_then(|rest| rest.split_once(')')).map_or(line, |(_, rest)| rest);
    let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    let kind = words.find(|word| !is_qualifier(word))?;
    matches!(kind, "fn" | "mod" | "struct" | "enum" | "trait" | "type" | "union")
        .then(|| words.next().map(|name| (kind, name)))?
}

/// Returns whether a word may stand before the keyword of a definition.
fn is_qualifier(word: &str) -> bool {
    matches!(word, "pub" | "const" | "async" | "unsafe" | "extern" | "default")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(source: &str) -> Report {
        check(&Tree::of(&[("crates/x/src/lib.rs", source)]))
    }

    #[test]
    fn types_of_tests_may_be_called_as_they_like() {
        check(&Tree::of(&[("crates/x/tests/t.rs", "struct Told;\nmod family;")])).assert_passed();
    }

    #[test]
    fn canary_bare_verb_of_a_test_or_an_example_fails() {
        for path in
            ["crates/x/tests/t.rs", "crates/x/tests/common/raw.rs", "crates/x/examples/pair/main.rs", "fuzz/a.rs"]
        {
            check(&Tree::of(&[(path, "fn hear() {}")])).assert_only_failure("Give the verb its object");
        }
    }

    #[test]
    fn names_with_an_object_pass() {
        of("pub fn take_message() {}\nfn tell_peer() { self.take() }\nstruct OwnLine;\n// fn tell() {}\n")
            .assert_passed();
    }

    #[test]
    fn canary_bare_verb_fails_however_it_is_qualified() {
        for source in ["fn tell() {}", "    pub(crate) async fn look(&self)", "pub(in crate::x) const unsafe fn keep()"]
        {
            of(source).assert_only_failure("Give the verb its object");
        }
    }

    #[test]
    fn canary_private_word_for_a_known_thing_fails() {
        for source in [
            "pub struct Told {",
            "pub struct PeerCarrier<M: Mem> {",
            "struct OwnCarrier;",
            "enum Knock<'a> {",
            "type Lines = Vec<u8>;",
            "pub(super) trait Family {",
            "pub mod family;",
            "mod lines {",
        ] {
            of(source).assert_only_failure("the glossary has another word");
        }
    }

    #[test]
    fn canary_replaced_word_in_a_renamed_crate_fails_whatever_has_it() {
        for source in ["fn f(told: u8) {}", "struct S { own_bell: u8 }", "use x::CALLS_MAX;", "enum E { OwnDoor }"] {
            for path in ["crates/broker/src/lib.rs", "crates/core/control/tests/t.rs"] {
                check(&Tree::of(&[(path, &format!("{source}\nfn found() {{}}"))]))
                    .assert_only_failure("the glossary has another word");
            }
        }
    }

    #[test]
    fn canary_word_that_no_crate_uses_fails_in_each() {
        for path in ["crates/x/src/lib.rs", "crates/core/ring/tests/t.rs", "fuzz/a.rs"] {
            check(&Tree::of(&[(path, "fn f(door: u8) {}")])).assert_only_failure("the glossary has another word");
        }
    }

    #[test]
    fn replaced_word_passes_elsewhere_in_messages_in_sentences_and_as_a_part_of_another() {
        for (path, source) in [
            ("crates/x/src/lib.rs", "fn f(told: u8) {}"),
            (
                "crates/broker/src/lib.rs",
                "fn f() { Message::CallRow(told_apart_by_name_and_number, doorbell, recall) }",
            ),
            ("crates/broker/src/lib.rs", "fn f() {} // told"),
        ] {
            check(&Tree::of(&[(path, source)])).assert_passed();
        }
    }

    #[test]
    fn canary_tree_without_definitions_fails() {
        check(&Tree::of(&[])).assert_only_failure("does this check still read");
    }
}
