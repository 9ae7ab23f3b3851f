// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that no file is too long for its reader.

use crate::report::Report;
use crate::tree::Tree;

/// Number of lines of one file without its tests beyond which an author should ask whether it has one subject.
const ASK: usize = 600;
/// Largest number of lines that passes.
const LIMIT: usize = 900;
const LARGEST: usize = 10;
const SOURCES: [&str; 5] = [".rs", ".c", ".h", ".py", ".sh"];

/// Checks that no source file has more than `LIMIT` lines before its tests, and counts the files beyond `ASK`.
/// `tests.rs` and files in a `tests` folder consist of tests only. The header in `include` is generated from sources
/// that count.
pub fn check(tree: &Tree) -> Report {
    let mut report = Report::default();
    let all_tests = |path: &str| path.contains("/tests/") || path.ends_with("/tests.rs");
    let sources = tree.files(&SOURCES).filter(|(path, _)| !all_tests(path) && !path.starts_with("include/"));
    let mut sizes: Vec<_> = sources.map(|(path, text)| (lines_before_tests(text), path)).collect();
    sizes.sort_by(|a, b| b.cmp(a));
    for (lines, path) in sizes.iter().filter(|(lines, _)| *lines > LIMIT) {
        report.fail(format!("{path}: {lines} lines without tests, {LIMIT} at most: split it by what it knows"));
    }
    if sizes.is_empty() {
        report.fail("no source file found");
    }
    report.notes = sizes.iter().take(LARGEST).map(|(lines, path)| format!("{lines:5}  {path}")).collect();
    let large = sizes.iter().filter(|(lines, _)| *lines > ASK).count();
    let largest = sizes.first().map_or(0, |s| s.0);
    report.summary = format!("{} files, {large} of more than {ASK} lines, the largest has {largest}", sizes.len());
    report
}

/// Returns the number of lines before the test module. Clippy (`items_after_test_module`) ensures that nothing follows
/// one.
fn lines_before_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let is_tests = |at: &usize| {
        let gate = lines[*at].starts_with("#[cfg(test)]") || lines[*at].starts_with("#[cfg(all(test");
        gate && lines[*at..].iter().find(|line| !line.starts_with("#[")).is_some_and(|line| opens_module(line))
    };
    (0..lines.len()).find(is_tests).unwrap_or(lines.len())
}

fn opens_module(line: &str) -> bool {
    line.trim_start_matches("pub ").starts_with("mod ") && line.ends_with('{')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_lines(path: &str, lines: usize, tail: &str) -> Report {
        check(&Tree::of(&[(path, &("x\n".repeat(lines) + tail))]))
    }

    #[test]
    fn file_at_the_limit_passes() {
        check_lines("a/src/lib.rs", LIMIT, "").assert_passed();
    }

    #[test]
    fn tests_are_not_counted() {
        let tests = format!("#[cfg(test)]\n#[allow(x)]\nmod tests {{\n{}}}\n", "x\n".repeat(LIMIT));
        check_lines("a/src/lib.rs", LIMIT, &tests).assert_passed();
        check(&Tree::of(&[("a/src/lib.rs", ""), ("a/tests/big.rs", &"x\n".repeat(LIMIT * 2))])).assert_passed();
    }

    #[test]
    fn generated_header_is_not_counted() {
        check(&Tree::of(&[("a/src/lib.rs", ""), ("include/a.h", &"x\n".repeat(LIMIT * 2))])).assert_passed();
    }

    #[test]
    fn file_that_is_worth_a_question_is_counted() {
        let report = check(&Tree::of(&[("a/src/lib.rs", &"x\n".repeat(ASK + 1)), ("b.rs", &"x\n".repeat(ASK))]));
        assert!(report.passed() && report.summary.contains("1 of more than 600"), "{}", report.summary);
    }

    #[test]
    fn ten_largest_are_noted() {
        let names: Vec<String> = (10..30).map(|n| format!("a/{n}.rs")).collect();
        let files: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "x\n")).collect();
        assert_eq!(check(&Tree::of(&files)).notes.len(), LARGEST);
    }

    #[test]
    fn canary_file_over_the_limit_fails() {
        for path in ["a/src/lib.rs", "kernel/main.c", "kernel/x.h", "e2e/run.py", "tools/x.sh"] {
            check_lines(path, LIMIT + 1, "").assert_only_failure("901 lines");
        }
    }

    #[test]
    fn canary_gated_item_or_file_does_not_end_the_count() {
        let tail = format!("#[cfg(test)]\nmod tests;\n#[cfg(test)]\nuse x;\n{}", "x\n".repeat(LIMIT));
        check_lines("a/src/lib.rs", 0, &tail).assert_only_failure("904 lines");
    }

    #[test]
    fn canary_empty_tree_fails() {
        check(&Tree::of(&[])).assert_only_failure("no source file");
    }
}
