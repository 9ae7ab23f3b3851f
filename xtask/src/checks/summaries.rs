// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that the first line of each public item's documentation states what the item does, because overviews show
//! that line. Also checks that no comment of Rust or C and no paragraph of a page begins with a clause of the
//! specification: the clause comes last.

use crate::api::Sources;
use crate::report::Report;
use crate::tree::Tree;
use crate::workspace::Workspace;

/// Crate all of whose public items are checked, wherever they are defined.
const FACADE: &str = "tombolo";
/// Advice for a clause that comes first.
const INSTEAD: &str = "say first what it is, and the clause in brackets at the end";

/// Checks that each item of the facade has a summary, and that no comment or paragraph begins with a clause.
pub fn check(workspace: &Workspace, tree: &Tree) -> Report {
    let mut report = Report::default();
    let mut looked = 0;
    match Sources::new(workspace, tree).interface(FACADE) {
        Err(why) => report.fail(why),
        Ok(entries) => {
            for entry in entries.iter().filter(|entry| !entry.line.starts_with("impl")) {
                looked += 1;
                let number = |name: &str| name.starts_with(|c: char| c.is_ascii_digit());
                let unnamed = entry.line.split_once('.').is_some_and(|(_, name)| number(name));
                if entry.summary.is_empty() && !unnamed {
                    report.fail(format!("{}: `{}` has no documentation", entry.path, entry.line));
                }
            }
        }
    }
    let (comments, paragraphs) = judge_prose(tree, &mut report);
    report.failures.sort();
    report.failures.dedup();
    report.summary = format!("{looked} items, {comments} comments, {paragraphs} paragraphs");
    report
}

/// Checks that no comment of any kind and no paragraph of a page begins with a clause. Returns the numbers of comments
/// and paragraphs.
fn judge_prose(tree: &Tree, report: &mut Report) -> (usize, usize) {
    let (mut comments, mut paragraphs) = (0, 0);
    for (path, text) in tree.files(&[".rs", ".c", ".h"]) {
        let mut goes_on = false;
        for (row, line) in (1..).zip(text.lines()) {
            let Some(text) = comment(line) else {
                goes_on = false;
                continue;
            };
            if !goes_on && !text.is_empty() {
                comments += 1;
                if begins_with_clause(text) {
                    report.fail(format!("{path}:{row}: `{text}`: {INSTEAD}"));
                }
            }
            goes_on = !text.is_empty() && !text.starts_with("SPDX");
        }
    }
    // Paragraphs of the specification are clauses and begin with their numbers.
    for (path, text) in tree.files(&[".md"]).filter(|(path, _)| !path.starts_with("spec/")) {
        for (row, text) in paragraphs_of(text) {
            paragraphs += 1;
            if labels_with_clause(text) {
                report.fail(format!("{path}:{row}: `{text}`: {INSTEAD}"));
            }
        }
    }
    (comments, paragraphs)
}

/// Returns the text of a line that is entirely a comment.
fn comment(line: &str) -> Option<&str> {
    let line = line.trim();
    let text = ["///", "//!", "//", "/**", "/*", "*/", "*"].iter().find_map(|mark| line.strip_prefix(mark))?;
    Some(text.trim_end_matches("*/").trim())
}

/// Returns the first line of each paragraph, item and cell of a page.
fn paragraphs_of(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut before = "";
    (1..).zip(page.lines()).flat_map(move |(row, line)| {
        let line = line.trim();
        let item = ["* ", "- ", "> "].iter().find_map(|mark| line.strip_prefix(mark));
        let begins = before.is_empty() || item.is_some() || line.starts_with('|');
        before = line;
        let cells = line.split('|').filter(|_| line.starts_with('|'));
        let whole = [item.unwrap_or(line)].into_iter().filter(move |_| begins && !line.starts_with('|'));
        cells
            .chain(whole)
            .map(str::trim)
            .filter(|text| !text.is_empty())
            .map(move |text| (row, text))
            .collect::<Vec<_>>()
    })
}

/// Returns whether the text begins with a clause as a label, followed by more text: `**S-3.** …`, `B-12: …`, `(S-3) …`.
/// A clause as the subject of a sentence may come first, and a list of clauses may stand alone.
fn labels_with_clause(text: &str) -> bool {
    let mut words = text.split_whitespace().map(|word| word.trim_matches('*')).peekable();
    let mut label = "";
    while let Some(word) = words.next_if(|word| begins_with_clause(word) || matches!(*word, "to" | "and" | "or" | "…"))
    {
        label = word;
    }
    begins_with_clause(label) && label.ends_with(['.', ':', ')', ';']) && words.next().is_some()
}

/// Returns whether the text begins with a clause: `R-12: …`, `C-2 to C-7, C-11. …`.
fn begins_with_clause(summary: &str) -> bool {
    let word = summary.split_whitespace().next().unwrap_or_default();
    let word = word.trim_start_matches('(').trim_end_matches(|c: char| c.is_ascii_punctuation());
    word.split_once('-').is_some_and(|(area, number)| {
        let area = !area.is_empty() && area.len() <= 2 && area.bytes().all(|byte| byte.is_ascii_uppercase());
        area && !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::{Package, Target};

    fn check_of(source: &str) -> Report {
        let target = Target { ships: true, library: true, path: "tombolo/lib.rs".into() };
        let package = Package { name: FACADE.into(), targets: vec![target], ..Package::default() };
        let workspace = Workspace { packages: vec![package], ..Workspace::default() };
        check(&workspace, &Tree::of(&[("tombolo/lib.rs", source)]))
    }

    #[test]
    fn summary_that_begins_with_what_it_does_passes() {
        check_of("//! A crate.\n/// Connects (C-1).\npub fn connect() {}\n/// Private (R-1).\nfn own() {}")
            .assert_passed();
    }

    fn check_page(path: &str, text: &str) -> Report {
        let mut report = Report::default();
        judge_prose(&Tree::of(&[(path, text)]), &mut report);
        report
    }

    #[test]
    fn clause_at_the_end_or_within_a_comment_passes() {
        for text in ["// Sleeps (R-12,\n// R-13).", "//! A-B. C", "fn a() {} // R-1.", "/* Once (M-8). */"] {
            check_page("a.rs", text).assert_passed();
        }
    }

    #[test]
    fn canary_comment_that_begins_with_a_clause_fails() {
        for (path, text) in [
            ("a.rs", "/// R-1. Private.\nfn own() {}"),
            ("a.rs", "    // R-12: what came before is seen."),
            ("a.rs", "// SPDX-License-Identifier: MIT\n//! B-6 to B-8, B-12. What the host says."),
            ("a.rs", "/// Says.\n///\n/// (S-3) What."),
            ("k.c", "\t/* R-8 */"),
            ("k.h", "/*\n * N-8: checks a header.\n */"),
        ] {
            check_page(path, text).assert_only_failure("say first what it is");
        }
    }

    #[test]
    fn clause_that_is_a_subject_or_a_list_passes_in_a_page() {
        let page = "R-13 lets the waiter pay.\n\n| clause |\n|---|\n| S-5, S-6. |\n\nIt does\n(B-8).\n\nS-5, S-6.";
        check_page("docs/a.md", page).assert_passed();
        check_page("spec/a.md", "**R-1.** It MUST.").assert_passed();
    }

    #[test]
    fn canary_paragraph_that_begins_with_a_clause_fails() {
        for page in [
            "**S-3.** It goes.",
            "Text.\n\n* B-12: it goes.",
            "| R-9, M-8: once |",
            "- C-2 to C-5. Any.",
            "| a | (S-3) It goes. |",
            "# T\n\n(S-3): it goes",
        ] {
            check_page("docs/a.md", page).assert_only_failure("say first what it is");
        }
    }

    #[test]
    fn canary_summary_that_begins_with_a_clause_fails() {
        check_of("/// C-1. Connects.\npub fn connect() {}").assert_only_failure("say first");
        check_of("//! C-2 to C-7, C-11. Connecting.").assert_only_failure("say first");
        check_of("/// S.\npub struct S {\n/// R-14: its CPU.\npub cpu: u8 }").assert_only_failure("say first");
    }

    #[test]
    fn canary_item_without_documentation_fails() {
        check_of("pub fn connect() {}").assert_only_failure("has no documentation");
    }
}
