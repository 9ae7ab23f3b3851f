// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that every clause of the specification has a test, and that every clause that a test names exists.
//!
//! A clause is a paragraph of `spec/*.md` that begins with its id in bold: `**R-7.** The reader …`. A test cites it by
//! name: `fn r7_reader_rejects_…`; several ids may be chained: `fn r7_m3_…`. This check reads names only. The test
//! runner checks that the tests were run and passed (`proven_by`).

use crate::report::Report;
use crate::rust::code_only;
use crate::tree::Tree;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Letters of the ids, each with the part of the specification that it numbers.
const PARTS: &[(&str, &str)] = &[
    ("M", "memory"),
    ("R", "ring"),
    ("C", "channel"),
    ("H", "hand-over"),
    ("S", "sockets"),
    ("L", "local rendezvous"),
    ("D", "domain backends"),
    ("B", "brokers"),
    ("V", "virtual machines"),
    ("X", "Xen"),
    ("W", "vchan"),
    ("N", "network interface"),
];
const RESERVED: &str = "*(reserved)*";

/// Id of a clause.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Clause {
    letters: String,
    number: u32,
}

impl fmt::Display for Clause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.letters, self.number)
    }
}

/// Compares the clauses of `spec/` with the names of all tests.
pub fn check(tree: &Tree) -> Report {
    let mut report = Report::default();
    let spec = read_spec(tree, &mut report);
    if spec.is_empty() {
        report.fail("spec/ holds no clause: a specification that says nothing cannot be tested");
    }
    let mut tested = BTreeSet::new();
    let mut tests = 0;
    for (path, source) in tree.files(&[".rs"]) {
        for (line, name) in test_names(path, source) {
            let cited = cited(&name);
            tests += usize::from(!cited.is_empty());
            for clause in cited {
                if !spec.contains_key(&clause) {
                    report.fail(format!("{path}:{line}: {name} names clause {clause}, which spec/ does not have"));
                }
                tested.insert(clause);
            }
        }
    }
    for (clause, place) in &spec {
        if !place.reserved && !tested.contains(clause) {
            report.fail(format!("{}: clause {clause} has no test", place.at));
        }
    }
    report.summary = format!("{} clauses, {tests} tests", spec.len());
    report
}

/// Returns the clauses that need a test.
pub fn known_clauses(tree: &Tree) -> BTreeSet<Clause> {
    let spec = read_spec(tree, &mut Report::default());
    spec.into_iter().filter(|(_, place)| !place.reserved).map(|(clause, _)| clause).collect()
}

/// Returns the clauses that the test `name`, as libtest prints it (`module::r7_subject`), cites.
pub fn proven_by(name: &str) -> Vec<Clause> {
    cited(name.split(' ').next().unwrap_or_default().rsplit("::").next().unwrap_or_default())
}

struct Place {
    at: String,
    reserved: bool,
}

fn read_spec(tree: &Tree, report: &mut Report) -> BTreeMap<Clause, Place> {
    let mut found: BTreeMap<Clause, Place> = BTreeMap::new();
    for (path, text) in tree.files(&[".md"]).filter(|(path, _)| path.starts_with("spec/")) {
        let mut fenced = false;
        for (row, line) in text.lines().enumerate() {
            fenced ^= line.trim_start().starts_with("```");
            if fenced {
                continue;
            }
            let at = format!("{path}:{}", row + 1);
            match heading(line) {
                None => {}
                Some(Err(why)) => report.fail(format!("{at}: {why}")),
                Some(Ok((clause, rest))) => {
                    let reserved = rest.trim_start().starts_with(RESERVED);
                    if let Some(first) = found.get(&clause) {
                        report.fail(format!("{at}: clause {clause} was already given at {}", first.at));
                    } else {
                        found.insert(clause, Place { at, reserved });
                    }
                }
            }
        }
    }
    found
}

/// Returns the clause that begins on a line of the specification, with the text after its id. A line that resembles the
/// beginning of a clause and is none is an error: otherwise a misspelt clause would silently have no effect.
fn heading(line: &str) -> Option<Result<(Clause, &str), String>> {
    let bare = line.trim_start_matches(|c: char| c.is_whitespace() || "-*>#|+".contains(c));
    let id_end = bare.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').unwrap_or(bare.len());
    let (letters, number) = bare[..id_end].split_once('-')?;
    let looks_like_id = !letters.is_empty()
        && letters.len() <= 2
        && letters.bytes().all(|b| b.is_ascii_uppercase())
        && number.starts_with(|c: char| c.is_ascii_digit());
    if !looks_like_id || !["**", "#"].iter().any(|mark| line[..line.len() - bare.len()].contains(mark)) {
        return None;
    }
    let id = &bare[..id_end];
    let rest = line.strip_prefix("**").and_then(|l| l.strip_prefix(id)).and_then(|l| l.strip_prefix(".**"));
    let number = number.parse();
    Some(match (rest, number) {
        _ if !PARTS.iter().any(|(part, _)| *part == letters) => {
            Err(format!("{id}: no part of the specification is numbered {letters}"))
        }
        (Some(rest), Ok(number)) => Ok((Clause { letters: letters.to_owned(), number }, rest)),
        _ => Err(format!("{id}: a clause is a paragraph that begins `**{letters}-1.** `")),
    })
}

/// Returns the names of a file's test functions, with their lines. These are the functions with a test attribute, and
/// every function in a `tests` folder or in a file of a conformance suite (which macros turn into tests).
fn test_names(path: &str, source: &str) -> Vec<(usize, String)> {
    let all = path.contains("/tests/") || path.contains("conformance");
    let code = code_only(source);
    let mut found = Vec::new();
    let mut marked = false;
    for (row, line) in code.lines().enumerate() {
        let line = line.trim();
        if line.starts_with("#[") {
            marked |= line.contains("test") || line.contains("should_panic") || line.contains("proof");
        }
        let Some(name) = function_name(line) else {
            marked &= line.is_empty() || line.starts_with("#[");
            continue;
        };
        if all || marked {
            found.push((row + 1, name.to_owned()));
        }
        marked = false;
    }
    found
}

fn function_name(line: &str) -> Option<&str> {
    let at = line.find("fn ").filter(|at| *at == 0 || line[..*at].ends_with([' ', ']', '(', '{']))?;
    let rest = line[at + 3..].trim_start();
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    Some(&rest[..end]).filter(|name| !name.is_empty())
}

/// Returns the clauses at the beginning of a test's name: R-7 and M-3 of `r7_m3_writer_stops`.
fn cited(name: &str) -> Vec<Clause> {
    name.split('_').map_while(clause_of).collect()
}

fn clause_of(segment: &str) -> Option<Clause> {
    let digits = segment.find(|c: char| c.is_ascii_digit())?;
    let letters = segment[..digits].to_uppercase();
    let known =
        segment[..digits].bytes().all(|b| b.is_ascii_lowercase()) && PARTS.iter().any(|(part, _)| *part == letters);
    let number = segment[digits..].parse().ok()?;
    known.then_some(Clause { letters, number })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: (&str, &str) = (
        "spec/2-ring.md",
        "# Ring\n\n**R-7.** The reader MUST.\n\n**R-8.** The writer, see **R-7**.\n\n**R-30.** *(reserved)*\n\n\
         ```\n**R-99.** in a listing\n```\n\n* R-7 is listed.\n- **UTF-8** is not a clause.\n",
    );

    fn check_with(spec: &str, test: &str) -> Report {
        check(&Tree::of(&[("spec/2-ring.md", spec), ("crates/core/ring/src/lib.rs", test)]))
    }

    #[test]
    fn clauses_with_tests_pass() {
        check_with(SPEC.1, "#[test]\nfn r7_r8_reader_rejects_a_lie() {}").assert_passed();
    }

    #[test]
    fn functions_of_macros_and_test_folders_count() {
        let files = [
            SPEC,
            ("crates/core/ring/tests/hostile.rs", "proptest! { fn r7_any_word_is_checked(w: u64) {} }"),
            ("crates/core/domain/src/conformance.rs", "pub fn r8_full_ring_waits<D: Domain>() {}"),
        ];
        check(&Tree::of(&files)).assert_passed();
    }

    #[test]
    fn attributes_between_mark_and_function_are_passed_over() {
        let test = "#[test]\n#[should_panic]\n// why\n/// what\npub async fn r7_r8_canary() {}";
        check_with(SPEC.1, test).assert_passed();
    }

    #[test]
    fn canary_clause_without_test_fails() {
        check_with(SPEC.1, "#[test]\nfn r7_x() {}").assert_only_failure("clause R-8 has no test");
    }

    #[test]
    fn canary_ordinary_function_is_no_test() {
        check_with(SPEC.1, "#[test]\nfn r7_x() {}\nfn r8_x() {}").assert_only_failure("clause R-8 has no test");
    }

    #[test]
    fn canary_test_in_a_string_or_comment_is_no_test() {
        let test = "#[test]\nfn r7_x() { \"\n#[test]\nfn r8_x() {}\" }\n// #[test] fn r8_y() {}";
        check_with(SPEC.1, test).assert_only_failure("clause R-8 has no test");
    }

    #[test]
    fn canary_test_of_an_unknown_clause_fails() {
        let test = "#[test]\nfn r7_r8_x() {}\n#[test]\nfn r9_y() {}";
        check_with(SPEC.1, test).assert_only_failure("lib.rs:4: r9_y names clause R-9");
    }

    #[test]
    fn canary_duplicate_clause_fails() {
        let spec = format!("{}\n**R-7.** Again.\n", SPEC.1);
        check_with(&spec, "#[test]\nfn r7_r8_x() {}").assert_only_failure("already given at spec/2-ring.md:3");
    }

    #[test]
    fn canary_misspelt_clause_fails() {
        for line in ["**R-9**. x", "- **R-9.** x", "### R-9 x", "**R-9a.** x", "**R-9. Title.** x"] {
            let spec = format!("{}\n{line}\n", SPEC.1);
            check_with(&spec, "#[test]\nfn r7_r8_x() {}").assert_only_failure("begins `**R-1.** `");
        }
    }

    #[test]
    fn canary_clause_of_an_unknown_part_fails() {
        let spec = format!("{}\n**Q-1.** x\n", SPEC.1);
        check_with(&spec, "#[test]\nfn r7_r8_x() {}").assert_only_failure("numbered Q");
    }

    #[test]
    fn canary_empty_specification_fails() {
        check(&Tree::of(&[])).assert_only_failure("no clause");
    }

    #[test]
    fn names_as_libtest_prints_them_cite_clauses() {
        let names = |name| proven_by(name).iter().map(Clause::to_string).collect::<Vec<_>>();
        assert_eq!(names("conformance::r7_m12_x - should panic"), ["R-7", "M-12"]);
        assert_eq!(names("r7::reader_u64_wraps"), [""; 0]);
    }
}
