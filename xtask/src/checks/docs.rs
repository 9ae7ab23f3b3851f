// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that the target of each link in the documentation exists.

use crate::report::Report;
use crate::tree::Tree;

/// Checks that relative links in `*.md` point to files or folders of the project.
pub fn check(tree: &Tree) -> Report {
    let mut report = Report::default();
    let (mut pages, mut links) = (0, 0);
    for (path, text) in tree.files(&[".md"]) {
        pages += 1;
        for (line, link) in relative_links(text) {
            links += 1;
            match resolve(path, link) {
                None => report.fail(format!("{path}:{line}: {link} leads out of the project")),
                Some(target) if !target.is_empty() && !tree.has(&target) => {
                    report.fail(format!("{path}:{line}: {link}: there is no {target}"));
                }
                Some(_) => {}
            }
        }
    }
    report.summary = format!("{pages} pages, {links} links");
    report
}

/// Returns the path from the root that a link on a page refers to, or none if it leads out of the tree.
fn resolve(page: &str, link: &str) -> Option<String> {
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(link.split('/')) {
        match part {
            "" | "." => {}
            ".." => _ = parts.pop()?,
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

/// Returns the targets of `[text](target)` and `[name]: target` outside of code, without `#fragment`, with their lines.
fn relative_links(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut fenced = false;
    for (row, line) in text.lines().enumerate() {
        fenced ^= line.trim_start().starts_with("```");
        if fenced {
            continue;
        }
        let inline = line.match_indices("](").filter(|(at, _)| line[..*at].matches('`').count() % 2 == 0);
        let targets = inline.filter_map(|(at, _)| line[at + 2..].split([')', ' ']).next());
        let named = line.strip_prefix('[').and_then(|l| l.split_once("]: ")).map(|(_, target)| target.trim());
        for target in targets.chain(named) {
            let path = target.split('#').next().unwrap_or_default();
            if !path.is_empty() && !path.contains(':') {
                found.push((row + 1, path));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_page(text: &str) -> Report {
        check(&Tree::of(&[("docs/a.md", text), ("docs/guide/b.md", ""), ("README.md", "")]))
    }

    #[test]
    fn links_that_lead_somewhere_pass() {
        check_page("[b](guide/b.md#x) ![r](../README.md) [g](guide/) [h](#here)\n[n]: ./guide/b.md").assert_passed();
    }

    #[test]
    fn links_to_elsewhere_and_code_are_passed_over() {
        check_page("[w](https://a.b/c) [m](mailto:a@b) `[x](gone)`\n```\n[y](gone)\n```").assert_passed();
    }

    #[test]
    fn canary_dead_links_fail() {
        check_page("\nsee [b](b.md)").assert_only_failure("docs/a.md:2: b.md: there is no docs/b.md");
        check_page("[n]: gone.md").assert_only_failure("there is no docs/gone.md");
    }

    #[test]
    fn canary_link_out_of_the_project_fails() {
        check_page("[x](../../etc/passwd)").assert_only_failure("leads out of the project");
    }
}
