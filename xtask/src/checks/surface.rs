// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that the committed listings contain exactly the names that users of Rust and C can use, so that a review sees
//! each change.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::api::Sources;
use crate::checks::Project;
use crate::report::Report;
use crate::tree::Tree;
use crate::workspace::Workspace;

/// Crate whose interface is listed.
const FACADE: &str = "tombolo";
/// Header that C programs include.
const HEADER: &str = "include/tombolo.h";
/// Listings of the Rust interface and of the C interface.
const RUST: &str = "docs/surface/rust.txt";
const C: &str = "docs/surface/c.txt";
const REMEDY: &str =
    "If users shall see that, `cargo xtask surface --write` renews the listing, and the changelog says it";

/// Checks that both listings are up to date.
pub fn check(workspace: &Workspace, tree: &Tree) -> Report {
    let mut report = Report::default();
    let mut sizes = Vec::new();
    for (path, found) in [(RUST, list_rust(workspace, tree)), (C, list_c(tree))] {
        match found {
            Ok(found) => {
                sizes.push(found.len());
                compare(path, tree.text(path), &found, &mut report);
            }
            Err(why) => report.fail(why),
        }
    }
    report.summary = format!("lines of Rust and of C: {sizes:?}");
    report
}

/// Writes the listings.
pub fn write(project: &Project) -> Result<(), String> {
    let root: &Path = &project.workspace.root;
    for (path, found) in [(RUST, list_rust(&project.workspace, &project.tree)?), (C, list_c(&project.tree)?)] {
        fs::create_dir_all(root.join(path).parent().unwrap_or(root)).map_err(|e| format!("{path}: {e}"))?;
        fs::write(root.join(path), found.join("\n") + "\n").map_err(|e| format!("cannot write {path}: {e}"))?;
    }
    Ok(())
}

fn compare(path: &str, committed: Option<&str>, found: &[String], report: &mut Report) {
    let Some(committed) = committed else {
        report.fail(format!("{path} is missing. {REMEDY}"));
        return;
    };
    let committed: BTreeSet<&str> = committed.lines().collect();
    let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    let gone = committed.difference(&found).map(|line| format!("- {line}"));
    let changes: Vec<String> = gone.chain(found.difference(&committed).map(|line| format!("+ {line}"))).collect();
    if !changes.is_empty() {
        report.fail(format!("{path} is not what there is. {REMEDY}:\n  {}", changes.join("\n  ")));
    }
}

fn list_rust(workspace: &Workspace, tree: &Tree) -> Result<Vec<String>, String> {
    let entries = Sources::new(workspace, tree).interface(FACADE)?;
    let lines: BTreeSet<String> = entries.into_iter().map(|entry| entry.line).collect();
    Ok(lines.into_iter().collect())
}

/// Returns the declarations of the header, each on one line, without their comments.
fn list_c(tree: &Tree) -> Result<Vec<String>, String> {
    let header = tree.text(HEADER).ok_or_else(|| format!("{HEADER} is missing"))?;
    let mut lines = Vec::new();
    let mut declaration = String::new();
    let mut comment = false;
    for line in header.lines().map(str::trim) {
        comment |= line.starts_with("/*");
        let code = !comment && !line.is_empty();
        comment &= !line.ends_with("*/");
        if !code {
            continue;
        }
        if line.starts_with("#define ") {
            lines.push(line.to_owned());
        }
        if line.starts_with('#') || line.starts_with("extern \"C\"") || line == "}  // extern \"C\"" {
            continue;
        }
        declaration += if declaration.is_empty() { "" } else { " " };
        declaration += line;
        let open = declaration.matches('{').count() > declaration.matches('}').count();
        if line.ends_with(';') && !open {
            lines.push(std::mem::take(&mut declaration));
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::{Package, Target};

    const SOURCE: &str = "pub fn connect(address: &str) -> u8 { 0 }";
    const HEAD: &str = "#ifndef X\n#define X 1\n\n/**\n * Words; more.\n */\nint f(int a);\n\nstruct s {\n  /** One. */\n  int a;\n};\n#endif\n";
    const LISTED: &str = "fn connect(address: &str) -> u8\n";
    const LISTED_C: &str = "#define X 1\nint f(int a);\nstruct s { int a; };\n";

    fn check_with(source: &str, header: &str) -> Report {
        let path = "tombolo/lib.rs".to_owned();
        let target = Target { ships: true, library: true, path };
        let package = Package { name: FACADE.into(), targets: vec![target], ..Package::default() };
        let workspace = Workspace { packages: vec![package], ..Workspace::default() };
        check(&workspace, &Tree::of(&[("tombolo/lib.rs", source), (HEADER, header), (RUST, LISTED), (C, LISTED_C)]))
    }

    #[test]
    fn what_is_listed_passes() {
        check_with(SOURCE, HEAD).assert_passed();
    }

    #[test]
    fn canary_function_that_is_new_or_gone_fails() {
        check_with(&format!("{SOURCE}\npub fn listen() {{}}"), HEAD).assert_only_failure("+ fn listen()");
        check_with("", HEAD).assert_only_failure("- fn connect(address: &str) -> u8");
        check_with(SOURCE, &HEAD.replace("int f(", "long f(")).assert_only_failure("surface --write");
        check_with(SOURCE, &HEAD.replace("int a;\n}", "int a;\n  int b;\n}")).assert_only_failure("int b;");
    }

    #[test]
    fn canary_listing_that_is_missing_fails() {
        let report = check(&Workspace::default(), &Tree::of(&[(HEADER, "")]));
        assert_eq!(report.failures.len(), 2, "{report:#?}");
    }
}
