// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that unsafe code is confined to the files that `docs/unsafe.md` lists. The compiler refuses it elsewhere.

use crate::report::Report;
use crate::rust::{code_only, words};
use crate::tree::Tree;
use crate::workspace::Workspace;
use std::collections::BTreeSet;

const LIST: &str = "docs/unsafe.md";
const ROOT_LINES: [&str; 2] = ["#![forbid(unsafe_code)]", "#![deny(unsafe_code)]"];

/// Checks that every crate root that ships forbids or denies unsafe code, that every file that allows or contains
/// unsafe code is in the list, and that every file in the list contains some.
pub fn check(workspace: &Workspace, tree: &Tree) -> Report {
    let mut report = Report::default();
    let roots = workspace.packages.iter().flat_map(|package| &package.targets).filter(|target| target.ships);
    for root in roots {
        let head = head(tree.text(&root.path).unwrap_or_default());
        if !ROOT_LINES.iter().any(|line| head.contains(line)) {
            report.fail(format!("{}: must begin with {} or {}", root.path, ROOT_LINES[0], ROOT_LINES[1]));
        }
    }
    let listed = listed(tree.text(LIST).unwrap_or_default());
    let mut found = BTreeSet::new();
    for (path, source) in tree.files(&[".rs"]) {
        let Some((line, what)) = first_unsafe(source) else { continue };
        found.insert(path);
        if !listed.contains(path) {
            report.fail(format!("{path}:{line}: {what}, but {LIST} does not list this file"));
        }
    }
    for path in listed.iter().filter(|path| !found.contains(*path)) {
        report.fail(format!("{LIST} lists {path}, which holds no unsafe code or does not exist"));
    }
    report.summary = format!("{} files hold unsafe code", found.len());
    report
}

/// Returns the head of a crate root: comments, blank lines and inner attributes.
fn head(source: &str) -> Vec<&str> {
    let head = |line: &&str| line.is_empty() || line.starts_with("//") || line.starts_with("#![");
    source.lines().map(str::trim).take_while(head).collect()
}

/// Returns the files in the first column of a table: `| `path.rs` | why |`.
fn listed(page: &str) -> BTreeSet<&str> {
    let cells = page.lines().filter_map(|line| line.trim().strip_prefix('|')?.split('|').next());
    let names = cells.filter_map(|cell| cell.trim().strip_prefix('`')?.strip_suffix('`'));
    names.filter(|name| name.ends_with(".rs")).collect()
}

/// Returns the first place where a file allows or uses unsafe code.
fn first_unsafe(source: &str) -> Option<(usize, &'static str)> {
    let code = code_only(source);
    let mut before = "";
    for (line, word) in words(&code) {
        match word {
            "unsafe" => return Some((line, "unsafe code")),
            "unsafe_code" if before != "forbid" && before != "deny" => {
                return Some((line, "unsafe code is allowed"));
            }
            _ => before = word,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::{Package, Target};

    const PAGE: (&str, &str) = (LIST, "| file | why |\n|---|---|\n| `mem/src/sys.rs` | mmap |\n");
    const ROOT: (&str, &str) = ("mem/src/lib.rs", "// SPDX\n//! Layer 0.\n#![no_std]\n#![deny(unsafe_code)]\nmod sys;");
    const PLACE: (&str, &str) = ("mem/src/sys.rs", "#![allow(unsafe_code)]\nunsafe fn f() {}");

    fn check_files(files: &[(&str, &str)]) -> Report {
        let target = Target { ships: true, library: true, path: ROOT.0.into() };
        let package = Package { name: "mem".into(), targets: vec![target], ..Package::default() };
        let workspace = Workspace { packages: vec![package], ..Workspace::default() };
        check(&workspace, &Tree::of(files))
    }

    #[test]
    fn listed_places_pass() {
        check_files(&[PAGE, ROOT, PLACE]).assert_passed();
    }

    #[test]
    fn words_about_unsafe_code_pass() {
        let talk = ("mem/src/map.rs", "// unsafe\nfn f() { \"unsafe\"; unsafe_places(); }");
        check_files(&[PAGE, ROOT, PLACE, talk]).assert_passed();
    }

    #[test]
    fn canary_root_without_the_attribute_fails() {
        let root = (ROOT.0, "//! Layer 0.\nmod sys;\n#![deny(unsafe_code)]");
        check_files(&[PAGE, root, PLACE]).assert_only_failure("mem/src/lib.rs: must begin with");
    }

    #[test]
    fn canary_unlisted_allowance_fails() {
        let quiet = ("mem/src/map.rs", "\n#![allow(unsafe_code)]\n");
        check_files(&[PAGE, ROOT, PLACE, quiet]).assert_only_failure("mem/src/map.rs:2: unsafe code is allowed");
    }

    #[test]
    fn canary_unlisted_unsafe_in_a_test_file_fails() {
        let test = ("mem/tests/map.rs", "fn f() { unsafe { g() } }");
        check_files(&[PAGE, ROOT, PLACE, test]).assert_only_failure("mem/tests/map.rs:1: unsafe code");
    }

    #[test]
    fn canary_listed_file_without_unsafe_fails() {
        let safe = (PLACE.0, "fn f() {}");
        check_files(&[PAGE, ROOT, safe]).assert_only_failure("holds no unsafe code");
    }

    #[test]
    fn canary_listed_file_that_is_gone_fails() {
        check_files(&[PAGE, ROOT]).assert_only_failure("does not exist");
    }

    #[test]
    fn canary_missing_list_fails() {
        check_files(&[ROOT, PLACE]).assert_only_failure("does not list this file");
    }
}
