// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that prose in Markdown is wrapped, so that a change of it shows as changed lines.
//!
//! Tables, code blocks, headings, comments and targets of links may be longer, and so may a word without a space.

use crate::report::Report;
use crate::tree::Tree;

/// Largest number of columns of a line of prose.
const WIDTH: usize = 100;

/// Checks that no line of prose in `*.md` has more than `WIDTH` columns.
pub fn check(tree: &Tree) -> Report {
    let mut report = Report::default();
    let (mut files, mut lines) = (0, 0);
    for (path, page) in tree.files(&[".md"]) {
        files += 1;
        for (line, text) in prose_of(page) {
            lines += 1;
            let columns = text.chars().count();
            if columns > WIDTH && text.trim().contains(' ') {
                report.fail(format!("{path}:{line}: {columns} columns, {WIDTH} at most: wrap it"));
            }
        }
    }
    if lines == 0 {
        report.fail("no prose found");
    }
    report.summary = format!("{files} files, {lines} lines of prose");
    report
}

/// Returns the lines that can be wrapped, each with its number, counted from 1.
fn prose_of(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let (mut fence, mut comment, mut blank) = (None, false, true);
    (1..).zip(page.lines()).filter(move |(_, line)| {
        let text = line.trim_start();
        let after_blank = std::mem::replace(&mut blank, text.is_empty());
        let mark = ["```", "~~~"].into_iter().find(|mark| text.starts_with(mark));
        if fence.is_some() || mark.is_some() {
            fence = match fence {
                None => mark,
                open => open.filter(|_| mark != open),
            };
            return false;
        }
        if comment || text.starts_with("<!--") {
            comment = !text.contains("-->");
            return false;
        }
        let code = after_blank && line.starts_with("    ");
        let target = text.starts_with('[') && text.contains("]: ");
        !(code || target || text.is_empty() || text.starts_with(['|', '#', '<']))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_page(text: &str) -> Report {
        check(&Tree::of(&[("docs/a.md", text)]))
    }

    #[test]
    fn what_cannot_be_wrapped_may_be_wide() {
        let wide = "word ".repeat(WIDTH / 5 + 1);
        let word = "w".repeat(WIDTH + 1);
        check_page(&format!(
            "Say:\n\n```sh\n{wide}\n```\n\n    {wide}\n\n<!-- {wide}\n{wide} -->\n| {wide} |\n# {wide}\n{word}\n[a]: {wide}"
        ))
        .assert_passed();
        check_page(&format!("{}wörds", "ä".repeat(WIDTH - 5))).assert_passed();
    }

    #[test]
    fn canary_wide_line_fails_wherever_it_stands() {
        let wide = "w".repeat(WIDTH - 1) + " w";
        for (page, line) in
            [(wide.clone(), 1), (format!("* {wide}"), 1), (format!("* a\n\n  {wide}"), 3), (format!("> {wide}"), 1)]
        {
            check_page(&page).assert_only_failure(&format!("docs/a.md:{line}: 10"));
        }
    }

    #[test]
    fn canary_page_without_prose_fails() {
        check_page("```\na\n```").assert_only_failure("no prose found");
    }
}
