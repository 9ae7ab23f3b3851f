// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names that say too little may not come back: what a function does has a verb and an object, and a type is called by
//! the field's word for it, as in the glossary of `spec/README.md`.

use crate::report::Report;
use crate::rust::code_only;
use crate::tree::Tree;

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

/// No function or type of a crate has such a name. Tests below `tests` are left out.
pub fn check(tree: &Tree) -> Report {
    let mut report = Report::default();
    let mut named = 0;
    for (path, source) in tree.files(&[".rs"]).filter(|(path, _)| path.contains("/src/")) {
        for (row, line) in code_only(source).lines().enumerate() {
            let Some((kind, name)) = definition(line) else { continue };
            named += 1;
            let row = row + 1;
            if kind == "fn" && FUNCTIONS.contains(&name) {
                report.fail(format!("{path}:{row}: fn {name}: what does it {name}? Give the verb its object"));
            }
            if let Some((_, instead)) = TYPES.iter().find(|(word, _)| kind != "fn" && *word == name) {
                report.fail(format!("{path}:{row}: {kind} {name}: the glossary has another word ({instead})"));
            }
        }
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
        check(&Tree::of(&[("crates/x/src/lib.rs", source)]))
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
        check(&Tree::of(&[])).assert_only_failure("does this check still read");
    }
}
