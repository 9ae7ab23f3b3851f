// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks the lock files of workspaces outside the main one (fuzzers, comparisons): they must contain what this
//! project's crates need. Otherwise `--locked` fails for a user who only wants to see a demonstration.

use crate::report::Report;
use crate::tree::Tree;
use crate::workspace::Workspace;

/// Checks that each lock file lists, for each of this project's crates in it, everything that the crate needs.
pub fn check(workspace: &Workspace, tree: &Tree) -> Report {
    let mut report = Report::default();
    let mut locks = 0;
    for (path, text) in tree.files(&["Cargo.lock"]) {
        locks += 1;
        for entry in text.split("[[package]]").skip(1).filter(|entry| !entry.contains("\nsource = ")) {
            let name = field(entry, "name");
            let Some(package) = workspace.packages.iter().find(|package| package.name == name) else { continue };
            for missing in package.always.iter().filter(|needed| !lists(entry, needed)) {
                let folder = path.trim_end_matches("Cargo.lock");
                report.fail(format!(
                    "{path}: {name} needs {missing} by now: cargo update --workspace --manifest-path {folder}Cargo.toml"
                ));
            }
        }
    }
    report.summary = format!("{locks} lock files");
    report
}

/// Returns the text after `name = `.
fn field<'a>(entry: &'a str, name: &str) -> &'a str {
    let line = entry.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
    line.unwrap_or_default().trim_matches('"')
}

/// Returns whether an entry lists a dependency, with or without a version after it.
fn lists(entry: &str, dependency: &str) -> bool {
    let listed = entry.lines().filter_map(|line| line.strip_prefix(" \""));
    listed.filter_map(|line| line.split(['"', ' ']).next()).any(|name| name == dependency)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Package;

    fn check_lock(ring: &str) -> Report {
        let lock = format!(
            "version = 4\n\n[[package]]\nname = \"mem\"\nversion = \"0.1.0\"\n\n[[package]]\nname = \"ring\"\nversion = \
             \"0.1.0\"\n{ring}\n\n[[package]]\nname = \"ring\"\nversion = \"0.17.0\"\nsource = \"registry\"\n"
        );
        let package = |name: &str, always: &[&str]| Package {
            name: name.into(),
            always: always.iter().map(|&needed| needed.into()).collect(),
            ..Package::default()
        };
        let packages = vec![package("ring", &["mem", "rustix"]), package("mem", &[]), package("cli", &["ring"])];
        check(&Workspace { packages, ..Workspace::default() }, &Tree::of(&[("fuzz/Cargo.lock", &lock)]))
    }

    #[test]
    fn lock_file_that_knows_what_is_needed_passes() {
        check_lock("dependencies = [\n \"mem\",\n \"rustix 1.1.4\",\n]").assert_passed();
    }

    #[test]
    fn canary_lock_file_without_a_dependency_fails() {
        check_lock("dependencies = [\n \"rustix\",\n]").assert_only_failure("fuzz/Cargo.lock: ring needs mem by now");
        check_lock("dependencies = [\n \"memchr\",\n \"rustix\",\n]").assert_only_failure("ring needs mem");
    }
}
