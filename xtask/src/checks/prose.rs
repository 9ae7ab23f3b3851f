// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that no sentence is too long for its reader.
//!
//! Code blocks, link targets and comments are not prose. A table cell, a list item and a heading each end a sentence;
//! inline code counts as one word. A colon or semicolon does not end a sentence.

use crate::report::Report;
use crate::tree::Tree;

/// Largest number of words in a sentence.
const LIMIT: usize = 40;
/// Words whose full stop does not end a sentence.
const ABBREVIATIONS: [&str; 3] = ["e.g.", "i.e.", "cf."];

/// Checks that every sentence in `*.md` and in a doc comment of Rust has at most `LIMIT` words.
pub fn check(tree: &Tree) -> Report {
    let pages = tree.files(&[".md"]).map(|(path, text)| (path, text.to_owned()));
    let pages = pages.chain(tree.files(&[".rs"]).map(|(path, text)| (path, doc_comments(text))));
    let mut report = Report::default();
    let (mut files, mut sentences, mut longest) = (0, 0, 0);
    for (path, text) in pages {
        files += 1;
        for sentence in sentences_of(&text) {
            sentences += 1;
            longest = longest.max(sentence.words);
            if sentence.words > LIMIT {
                let Sentence { line, words, begin } = sentence;
                report.fail(format!("{path}:{line}: {words} words, {LIMIT} at most, split it: {begin} …"));
            }
        }
    }
    if sentences == 0 {
        report.fail("no sentence found");
    }
    report.summary = format!("{files} files, {sentences} sentences, the longest has {longest} words");
    report
}

struct Sentence {
    /// Line on which the sentence begins, counted from 1.
    line: usize,
    words: usize,
    /// Its first few words.
    begin: String,
}

/// Returns the doc comments of a Rust source as Markdown, each on its own line; all other lines are blank.
fn doc_comments(source: &str) -> String {
    let text = |line: &str| {
        let line = line.trim_start();
        let text = line.strip_prefix("//!").or_else(|| line.strip_prefix("///").filter(|t| !t.starts_with('/')));
        text.map_or(String::new(), |text| text.strip_prefix(' ').unwrap_or(text).to_owned())
    };
    source.lines().map(|line| text(line) + "\n").collect()
}

/// Returns the sentences of a page of Markdown.
fn sentences_of(page: &str) -> Vec<Sentence> {
    let mut found = Vec::new();
    let mut paragraph: Vec<(usize, &str)> = Vec::new();
    let (mut fence, mut comment, mut list) = (None, false, false);
    for (line, whole) in (1..).zip(page.lines()) {
        let text = whole.trim();
        let mark = ["```", "~~~"].into_iter().find(|mark| text.starts_with(mark));
        if fence.is_some() || mark.is_some() {
            split(&mut paragraph, &mut found);
            fence = match fence {
                None => mark,
                open => open.filter(|_| mark != open),
            };
            continue;
        }
        if comment || text.starts_with("<!--") {
            split(&mut paragraph, &mut found);
            comment = !text.contains("-->");
            continue;
        }
        let indented = whole.starts_with("    ");
        if text.is_empty() || (paragraph.is_empty() && indented && !list) {
            split(&mut paragraph, &mut found);
        } else if let Some(cells) = text.strip_prefix('|') {
            for cell in cells.split('|') {
                split(&mut paragraph, &mut found);
                paragraph.push((line, cell));
            }
            split(&mut paragraph, &mut found);
        } else if text.starts_with('#') {
            split(&mut paragraph, &mut found);
            paragraph.push((line, text));
            split(&mut paragraph, &mut found);
        } else if let Some(item) = item_of(text) {
            split(&mut paragraph, &mut found);
            paragraph.push((line, item));
            list = true;
        } else if text.starts_with('[') && text.contains("]: ") {
            split(&mut paragraph, &mut found);
        } else {
            list &= !paragraph.is_empty() || whole.starts_with(' ');
            paragraph.push((line, text.trim_start_matches(['>', ' '])));
        }
    }
    split(&mut paragraph, &mut found);
    found
}

/// Returns the text after the mark of a list item.
fn item_of(text: &str) -> Option<&str> {
    let (mark, item) = text.split_once(' ')?;
    let number = mark.strip_suffix(['.', ')']).is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    (number || ["*", "-", "+"].contains(&mark)).then_some(item)
}

/// Splits the paragraph into sentences, and empties it.
fn split(paragraph: &mut Vec<(usize, &str)>, found: &mut Vec<Sentence>) {
    let Some((top, _)) = paragraph.first().copied() else { return };
    let text: Vec<&str> = paragraph.drain(..).map(|(_, text)| text).collect();
    let text = without_marks(&text.join("\n"));
    let words: Vec<(usize, &str)> = (top..)
        .zip(text.lines())
        .flat_map(|(line, text)| text.split_whitespace().map(move |word| (line, word)))
        .collect();
    let mut first = 0;
    for at in 0..words.len() {
        if at + 1 == words.len() || ends(words[at].1) {
            let sentence = &words[first..=at];
            let counted = sentence.iter().filter(|(_, word)| word.contains(char::is_alphanumeric)).count();
            let begin: Vec<&str> = sentence.iter().take(6).map(|(_, word)| *word).collect();
            found.push(Sentence { line: sentence[0].0, words: counted, begin: begin.join(" ") });
            first = at + 1;
        }
    }
}

/// Returns whether `word` ends a sentence. The next word may begin with a small letter: it may be the name of a
/// program.
fn ends(word: &str) -> bool {
    let bare = word.trim_end_matches([')', ']', '*', '_', '"', '\'', '”']);
    bare.ends_with(['.', '!', '?']) && !ABBREVIATIONS.contains(&bare.trim_start_matches('('))
}

/// Returns a paragraph with each inline code as one word, and without the targets of links. The lines stay as they are.
fn without_marks(paragraph: &str) -> String {
    let mut text = String::new();
    for (at, part) in paragraph.split('`').enumerate() {
        if at % 2 == 0 {
            text += part;
        } else {
            text += "Code";
            text.extend(part.matches('\n'));
        }
    }
    while let Some(at) = text.find("](") {
        let end = text[at..].find(')').map_or(text.len(), |end| at + end + 1);
        text.replace_range(at..end, "]");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(count: usize) -> String {
        "Word".to_owned() + &" word".repeat(count - 1)
    }

    fn check_page(text: &str) -> Report {
        check(&Tree::of(&[("docs/a.md", text)]))
    }

    #[test]
    fn sentence_at_the_limit_passes() {
        check_page(&format!("{}. {}! {}", words(LIMIT), words(LIMIT), words(LIMIT))).assert_passed();
    }

    #[test]
    fn code_comments_and_targets_of_links_are_no_prose() {
        let long = words(LIMIT + 1);
        let page = format!(
            "Say:\n\n```sh\n{long}\n```\n\n    {long}\n\n<!-- {long}\n{long} -->\n\nSee `{long}`, [this](a.md{long}).\n"
        );
        check_page(&page).assert_passed();
    }

    #[test]
    fn cells_items_and_headings_end_a_sentence() {
        let half = words(LIMIT / 2 + 1);
        let page =
            format!("# {half}\n{half}\n\n| {half} | {half} |\n|---|---|\n\n* {half}\n* {half}\n1. {half}\n\n{half}");
        check_page(&page).assert_passed();
    }

    #[test]
    fn small_letter_may_begin_a_sentence_and_an_abbreviation_ends_none() {
        let half = words(LIMIT / 2 + 1);
        check_page(&format!("{half}. {}", half.to_lowercase())).assert_passed();
        check_page(&format!("{half} (e.g. {half})")).assert_only_failure("docs/a.md:1: 43 words");
    }

    #[test]
    fn code_over_two_lines_is_one_word() {
        let page = format!("{} `one\ntwo` `three`\n", words(LIMIT - 2));
        check_page(&page).assert_passed();
        check_page(&format!("Say `a\nb`. {}", words(LIMIT + 1))).assert_only_failure("docs/a.md:2: 41 words");
    }

    #[test]
    fn canary_long_sentence_fails_wherever_it_stands() {
        let long = words(LIMIT + 1);
        let wrapped = format!("{}\n{}", words(LIMIT - 5), words(6));
        for (page, line) in [
            (format!("Short.\n\n{long}."), 3),
            (format!("Short. {wrapped}. Short."), 1),
            (format!("| a | {long} |"), 1),
            (format!("* a\n  {long}"), 1),
            (format!("Say:\n```\nx\n```\n{long}"), 5),
            (format!("* a\n\n      {long}"), 3),
            (format!("> {long}"), 1),
            (format!("**{long}.** Short."), 1),
        ] {
            check_page(&page).assert_only_failure(&format!("docs/a.md:{line}: 4"));
        }
    }

    #[test]
    fn canary_page_without_sentences_fails() {
        check_page("```\na\n```").assert_only_failure("no sentence found");
    }

    #[test]
    fn canary_long_sentence_of_a_doc_comment_fails() {
        let (long, half) = (words(LIMIT + 1), words(LIMIT / 2 + 1));
        let source = format!("//! {half}\nfn a() {{}} // {long}\n//// {long}\n/// {half}\n/// {half}\nfn b() {{}}\n");
        check(&Tree::of(&[("a.rs", &source)])).assert_only_failure("a.rs:4: 42 words");
    }
}
