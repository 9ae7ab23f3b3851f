// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists the checks: one module for each, and a table of all.

mod circles;
mod clauses;
mod columns;
mod docs;
mod header;
mod layers;
mod licences;
mod locks;
mod names;
mod prose;
mod size;
mod spdx;
mod summaries;
mod surface;
mod tables;
mod types;
mod unsafe_places;

pub use tables::write_all as write_tables;

pub use clauses::{Clause, known_clauses, proven_by};
pub use header::write as write_header;
pub use surface::write as write_surface;

use crate::report::Report;
use crate::tree::Tree;
use crate::workspace::Workspace;

/// Everything that a check may read.
pub struct Project {
    /// Content of the manifests.
    pub workspace: Workspace,
    /// Content of the files.
    pub tree: Tree,
}

impl Project {
    /// Reads the project that contains the current folder.
    pub fn load() -> Result<Self, String> {
        let workspace = Workspace::load()?;
        let tree = Tree::load(&workspace.root)?;
        Ok(Self { workspace, tree })
    }
}

/// A check and its name on the command line.
pub struct Check {
    name: &'static str,
    run: fn(&Project) -> Report,
}

const CHECKS: [Check; 17] = [
    Check { name: "layers", run: |project| layers::check(&project.workspace, &project.tree) },
    Check { name: "circles", run: |project| circles::check(&project.tree) },
    Check { name: "clauses", run: |project| clauses::check(&project.tree) },
    Check { name: "unsafe", run: |project| unsafe_places::check(&project.workspace, &project.tree) },
    Check { name: "names", run: |project| names::check(&project.tree) },
    Check { name: "size", run: |project| size::check(&project.tree) },
    Check { name: "types", run: |project| types::check(&project.tree) },
    Check { name: "spdx", run: |project| spdx::check(&project.tree) },
    Check { name: "licences", run: |project| licences::check(&project.workspace) },
    Check { name: "locks", run: |project| locks::check(&project.workspace, &project.tree) },
    Check { name: "header", run: |project| header::check(&project.workspace.root, &project.tree) },
    Check { name: "surface", run: |project| surface::check(&project.workspace, &project.tree) },
    Check { name: "summaries", run: |project| summaries::check(&project.workspace, &project.tree) },
    Check { name: "docs", run: |project| docs::check(&project.tree) },
    Check { name: "prose", run: |project| prose::check(&project.tree) },
    Check { name: "columns", run: |project| columns::check(&project.tree) },
    Check { name: "tables", run: |project| tables::check(&project.tree) },
];

/// Returns the check with that name.
pub fn find(name: &str) -> Option<&'static Check> {
    CHECKS.iter().find(|check| check.name == name)
}

/// Runs one check and prints all its findings. Returns whether it passed.
pub fn run_one(check: &Check, project: &Project) -> bool {
    let report = (check.run)(project);
    for note in &report.notes {
        println!("{note}");
    }
    print_line(check, &report);
    print_failures(check, &report);
    report.passed()
}

/// Runs all checks. Prints one line for each, then every failure of every check. Returns whether all passed.
pub fn run_all(project: &Project) -> Result<bool, String> {
    let reports: Vec<_> = CHECKS.iter().map(|check| (check, (check.run)(project))).collect();
    for (check, report) in &reports {
        print_line(check, report);
    }
    for (check, report) in &reports {
        print_failures(check, report);
    }
    Ok(reports.iter().all(|(_, report)| report.passed()))
}

fn print_line(check: &Check, report: &Report) {
    let verdict = match report.failures.len() {
        0 => "ok".to_owned(),
        wrong => format!("FAILED, {wrong} wrong"),
    };
    println!("{:9} {verdict} ({})", check.name, report.summary);
}

fn print_failures(check: &Check, report: &Report) {
    for failure in &report.failures {
        println!("{}: {failure}", check.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn every_check_is_called_and_has_canaries() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/checks");
        let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), CHECKS.len(), "a check that nobody calls: {files:?}");
        for file in files {
            let source = fs::read_to_string(&file).unwrap();
            assert!(source.contains("fn canary_"), "{} has no canary", file.display());
        }
    }

    #[test]
    fn every_check_is_in_the_usage() {
        for check in &CHECKS {
            assert!(crate::USAGE.contains(&format!("\n  {:19} ", check.name)), "{} is missing", check.name);
        }
    }
}
