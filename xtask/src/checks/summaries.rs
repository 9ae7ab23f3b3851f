// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is said of a public item begins with what it does: its first line is what overviews show. The clause of the
//! specification comes last.

use syn::visit::Visit;

use crate::api::{Sources, summary};
use crate::report::Report;
use crate::tree::Tree;
use crate::workspace::Workspace;

/// The crate whose items are all looked at, wherever they are defined.
const FACADE: &str = "tombolo";
/// Crates of which every public item and every module is looked at. The others follow.
const WHOLE: [&str; 5] = ["tombolo", "tombolo-backends", "tombolo-capi", "tombolo-channel", "tombolo-inspect"];

/// No summary begins with a clause, and each item of the facade has one.
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
                judge(&entry.path, &entry.line, &entry.summary, &mut report);
            }
        }
    }
    let roots = workspace.packages.iter().filter(|package| WHOLE.contains(&package.name.as_str()));
    let roots: Vec<&str> = roots
        .flat_map(|package| &package.targets)
        .filter(|target| target.ships && target.library)
        .filter_map(|target| target.path.rsplit_once('/').map(|(folder, _)| folder))
        .collect();
    for (path, text) in tree.files(&[".rs"]) {
        if !roots.iter().any(|root| path.strip_prefix(*root).is_some_and(|rest| rest.starts_with('/'))) {
            continue;
        }
        match syn::parse_file(text) {
            Err(error) => report.fail(format!("{path}: {error}")),
            Ok(file) => {
                judge(path, "the module", &summary(&file.attrs), &mut report);
                let mut visitor = Summaries { path, report: &mut report, looked: 0 };
                visitor.visit_file(&file);
                looked += visitor.looked;
            }
        }
    }
    report.failures.sort();
    report.failures.dedup();
    report.summary = format!("{looked} items");
    report
}

fn judge(path: &str, what: &str, summary: &str, report: &mut Report) {
    if begins_with_clause(summary) {
        report
            .fail(format!("{path}: {what}: `{summary}`: say first what it is, and the clause in brackets at the end"));
    }
}

/// `R-12: …`, `C-2 to C-7, C-11. …`.
fn begins_with_clause(summary: &str) -> bool {
    let word = summary.split_whitespace().next().unwrap_or_default();
    let word = word.trim_start_matches('(').trim_end_matches(|c: char| c.is_ascii_punctuation());
    word.split_once('-').is_some_and(|(area, number)| {
        let area = !area.is_empty() && area.len() <= 2 && area.bytes().all(|byte| byte.is_ascii_uppercase());
        area && !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

struct Summaries<'a> {
    path: &'a str,
    report: &'a mut Report,
    looked: usize,
}

macro_rules! judge_public {
    ($($visit:ident: $node:ident),*) => {$(
        fn $visit(&mut self, node: &'ast syn::$node) {
            if matches!(node.vis, syn::Visibility::Public(_)) {
                self.looked += 1;
                judge(self.path, "a public item", &summary(&node.attrs), self.report);
            }
            syn::visit::$visit(self, node);
        }
    )*};
}

impl<'ast> Visit<'ast> for Summaries<'_> {
    judge_public! {
        visit_item_fn: ItemFn, visit_item_struct: ItemStruct, visit_item_enum: ItemEnum, visit_item_type: ItemType,
        visit_item_trait: ItemTrait, visit_item_const: ItemConst, visit_item_mod: ItemMod, visit_impl_item_fn: ImplItemFn,
        visit_field: Field
    }
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
        check_of("//! A crate.\n/// Connects (C-1).\npub fn connect() {}\n/// R-1. Private.\nfn own() {}")
            .assert_passed();
    }

    #[test]
    fn canary_summary_that_begins_with_a_clause_fails() {
        let report = check_of("/// C-1. Connects.\npub fn connect() {}");
        assert!(report.failures.iter().all(|failure| failure.contains("say first")) && !report.passed(), "{report:#?}");
        check_of("//! C-2 to C-7, C-11. Connecting.").assert_only_failure("the module");
        assert!(!check_of("/// S.\npub struct S {\n/// R-14: its CPU.\npub cpu: u8 }").passed());
    }

    #[test]
    fn canary_item_without_documentation_fails() {
        check_of("pub fn connect() {}").assert_only_failure("has no documentation");
    }
}
