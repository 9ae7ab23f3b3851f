// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that each source file states its licence, and that the tree contains the text of that licence.

use crate::report::Report;
use crate::tree::Tree;
use std::collections::BTreeSet;

const SOURCES: [&str; 8] = [".rs", ".c", ".h", ".py", ".sh", "Makefile", "Kbuild", ".ci/run"];
const TAG: &str = "SPDX-License-Identifier: ";
const OURS: &str = "Apache-2.0 OR MIT";
/// Folder and licence of the kernel module, the only part under the kernel's licence.
const KERNEL: (&str, &str) = ("kernel/", "GPL-2.0");

/// Checks that the first line of each source file, after `#!` if there is one, is its SPDX line.
pub fn check(tree: &Tree) -> Report {
    let mut report = Report::default();
    let mut files = 0;
    let mut named = BTreeSet::new();
    for (path, text) in tree.files(&SOURCES) {
        files += 1;
        let line = text.lines().find(|line| !line.starts_with("#!") || line.starts_with("#![")).unwrap_or_default();
        let Some((_, licence)) = line.split_once(TAG) else {
            report.fail(format!("{path}: the first line must be `{TAG}{OURS}` as a comment"));
            continue;
        };
        let licence = licence.trim_end_matches("*/").trim();
        if licence != OURS && !(path.starts_with(KERNEL.0) && licence.starts_with(KERNEL.1)) {
            report.fail(format!("{path}: licence `{licence}`, expected `{OURS}`"));
        }
        named.extend(names(licence));
    }
    for name in named.iter().filter(|name| !tree.has(&format!("LICENSES/{name}.txt"))) {
        report.fail(format!("LICENSES/{name}.txt is missing"));
    }
    if files == 0 {
        report.fail("no source file found");
    }
    report.summary = format!("{files} files");
    report
}

/// Returns the licences and exceptions in an expression: `GPL-2.0 WITH Linux-syscall-note OR MIT`.
fn names(licence: &str) -> impl Iterator<Item = &str> {
    licence.split([' ', '(', ')']).filter(|word| !matches!(*word, "" | "OR" | "AND" | "WITH"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS_LINE: &str = "// SPDX-License-Identifier: Apache-2.0 OR MIT\n";

    fn check_file(path: &str, text: &str) -> Report {
        check(&Tree::of(&[("LICENSES/Apache-2.0.txt", ""), ("LICENSES/MIT.txt", ""), (path, text)]))
    }

    #[test]
    fn licensed_files_pass() {
        check_file("a/src/lib.rs", OURS_LINE).assert_passed();
        check_file("tools/x.sh", "#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0 OR MIT\n").assert_passed();
        check_file("capi/x.h", "/* SPDX-License-Identifier: Apache-2.0 OR MIT */\n").assert_passed();
    }

    #[test]
    fn canary_missing_line_fails() {
        check_file("a/src/lib.rs", "//! Layer 0.\n").assert_only_failure("the first line must be");
    }

    #[test]
    fn canary_late_line_fails() {
        check_file("a/src/lib.rs", &format!("#![no_std]\n{OURS_LINE}")).assert_only_failure("the first line");
    }

    #[test]
    fn canary_foreign_licence_fails() {
        let report = check_file("a/src/lib.rs", "// SPDX-License-Identifier: MIT\n");
        report.assert_only_failure("licence `MIT`");
    }

    #[test]
    fn canary_licence_without_its_text_fails() {
        let report = check_file("kernel/main.c", "// SPDX-License-Identifier: GPL-2.0\n");
        report.assert_only_failure("LICENSES/GPL-2.0.txt is missing");
    }

    #[test]
    fn canary_empty_tree_fails() {
        check(&Tree::of(&[])).assert_only_failure("no source file");
    }
}
