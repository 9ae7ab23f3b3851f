// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names that say too little may not come back: what a function does has a verb and an object, and a type is called by
//! the field's word for it, as in the glossary of `spec/README.md`.

use crate::report::Report;
use crate::rust::code_only;
use crate::tree::Tree;
use std::collections::BTreeSet;

/// Functions called by a bare verb that fits anything, and so finds nothing.
const FUNCTIONS: [&str; 8] = ["hear", "keep", "look", "note", "say", "settle", "take", "tell"];
/// Words that the project once used for a thing that has a name elsewhere, and the name.
const TYPES: [(&str, &str); 24] = [
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
    ("Ringer", "Notifier"),
    ("Roster", "ConnectionTable"),
    ("Said", "Envelope"),
    ("Told", "what was sent"),
    ("Turn", "a guard"),
    ("Turns", "a lock"),
];

/// Shared test support whose functions are still to be renamed. A folder that has no such name any more has to leave this list.
const PENDING: [&str; 2] = ["crates/broker/tests/common/", "crates/compat/sockets/tests/victim/"];

/// No function or type of a crate has such a name, nor a function of what its tests share.
pub fn check(tree: &Tree) -> Report {
    check_but(tree, &PENDING)
}

/// What tests share is in folders below `tests`, or beside them in `examples`. Single tests are left out.
fn is_shared(path: &str) -> bool {
    ["/tests/", "/examples/"].iter().any(|folder| path.split_once(folder).is_some_and(|(_, rest)| rest.contains('/')))
}

fn check_but(tree: &Tree, pending: &[&str]) -> Report {
    let mut report = Report::default();
    let (mut named, mut left) = (0, BTreeSet::new());
    for (path, source) in tree.files(&[".rs"]).filter(|(path, _)| path.contains("/src/") || is_shared(path)) {
        for (row, line) in code_only(source).lines().enumerate() {
            let Some((kind, name)) = definition(line) else { continue };
            named += 1;
            let row = row + 1;
            let excused = pending.iter().find(|folder| path.starts_with(**folder));
            if kind == "fn" && FUNCTIONS.contains(&name) {
                if let Some(folder) = excused {
                    left.insert(*folder);
                    continue;
                }
                report.fail(format!("{path}:{row}: fn {name}: what does it {name}? Give the verb its object"));
            }
            let known = TYPES.iter().find(|(word, _)| kind != "fn" && *word == name && path.contains("/src/"));
            if let Some((_, instead)) = known {
                report.fail(format!("{path}:{row}: {kind} {name}: the glossary has another word ({instead})"));
            }
        }
    }
    for folder in pending.iter().filter(|folder| !left.contains(*folder)) {
        report.fail(format!("{folder} has no bare verb any more: take it from PENDING in names.rs"));
    }
    if named == 0 {
        report.fail("no function and no type was found: does this check still read the sources?");
    }
    report.summary = format!("{named} functions and types");
    report
}

/// What a line of blanked code defines: the keyword and the name.
fn definition(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start();
    let line = line.strip_prefix("pub(").and_then(|rest| rest.split_once(')')).map_or(line, |(_, rest)| rest);
    let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    let kind = words.find(|word| !is_qualifier(word))?;
    matches!(kind, "fn" | "struct" | "enum" | "trait" | "type" | "union")
        .then(|| words.next().map(|name| (kind, name)))?
}

/// What may stand before the keyword of a definition.
fn is_qualifier(word: &str) -> bool {
    matches!(word, "pub" | "const" | "async" | "unsafe" | "extern" | "default")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(source: &str) -> Report {
        check_but(&Tree::of(&[("crates/x/src/lib.rs", source)]), &[])
    }

    fn of_tests(path: &str, pending: &[&str]) -> Report {
        check_but(&Tree::of(&[("crates/x/src/lib.rs", "fn one() {}"), (path, "fn hear() {}\nstruct Told;")]), pending)
    }

    #[test]
    fn single_tests_and_types_of_tests_may_be_called_as_they_like() {
        of_tests("crates/x/tests/t.rs", &[]).assert_passed();
        of_tests("crates/x/tests/common/raw.rs", &["crates/x/tests/common/"]).assert_passed();
    }

    #[test]
    fn canary_bare_verb_in_what_tests_share_fails() {
        for path in ["crates/x/tests/common/raw.rs", "crates/x/tests/support/mod.rs", "crates/x/examples/pair/main.rs"]
        {
            of_tests(path, &[]).assert_only_failure("Give the verb its object");
        }
    }

    #[test]
    fn canary_pending_folder_without_bare_verbs_fails() {
        of_tests("crates/x/tests/t.rs", &["crates/x/tests/common/"]).assert_only_failure("take it from PENDING");
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
        for source in ["pub struct Told {", "enum Knock<'a> {", "type Lines = Vec<u8>;", "pub(super) trait Family {"] {
            of(source).assert_only_failure("the glossary has another word");
        }
    }

    #[test]
    fn canary_tree_without_definitions_fails() {
        check_but(&Tree::of(&[]), &[]).assert_only_failure("does this check still read");
    }
}
