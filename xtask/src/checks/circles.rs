// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that files of one crate import each other in one direction, without circles.
//!
//! An import is a `use` or a path in code, followed through re-exports to the file that defines the name. A file may
//! use names of the files above it in the module tree: it is a part of them, and Rust's privacy rules allow this as
//! well.

use crate::report::Report;
use crate::rust::words;
use crate::tree::Tree;
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::Visit;

/// Largest length of a chain of re-exports that is followed.
const REEXPORTS: usize = 8;

/// Checks that no crate has a circle of files.
pub fn check(tree: &Tree) -> Report {
    let mut report = Report::default();
    let mut crates: BTreeMap<&str, Crate> = BTreeMap::new();
    let mut files = 0;
    for (path, text) in tree.files(&[".rs"]) {
        let Some((root, module)) = module_of(path) else { continue };
        match syn::parse_file(text) {
            Ok(file) => {
                files += 1;
                crates.entry(root).or_default().add(path, module, &file);
            }
            Err(e) => report.fail(format!("{path}: no Rust: {e}")),
        }
    }
    for (root, source) in &crates {
        for circle in source.circles() {
            report.fail(format!("{root}: files import each other in a circle: {circle}"));
        }
    }
    report.summary = format!("{files} files of {} crates", crates.len());
    report
}

/// Returns the root folder of the crate that a source file belongs to, and the file's module path there. Returns none
/// for tests, examples and build scripts.
pub(super) fn module_of(path: &str) -> Option<(&str, Vec<String>)> {
    let at = path.find("/src/")? + "/src".len();
    let mut root = &path[..at];
    let mut rest = &path[at + 1..];
    if let Some(program) = rest.strip_prefix("bin/") {
        let (name, inner) = program.split_once('/')?;
        root = &path[..at + "/bin/".len() + name.len()];
        rest = inner;
    }
    let mut segments: Vec<String> = rest.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    if segments.last().is_some_and(|last| last == "mod" || (segments.len() == 1 && (last == "lib" || last == "main"))) {
        segments.pop();
    }
    Some((root, segments))
}

/// Files of one crate, and the names that each imports.
#[derive(Default)]
struct Crate {
    files: BTreeMap<Vec<String>, File>,
}

#[derive(Default)]
struct File {
    path: String,
    /// Paths that `use` brings into each module of the file, by module and name.
    names: BTreeMap<(Vec<String>, String), Vec<String>>,
    /// Paths in the file's code, each with the module that contains it.
    paths: BTreeSet<(Vec<String>, Vec<String>)>,
}

impl Crate {
    fn add(&mut self, path: &str, module: Vec<String>, source: &syn::File) {
        let mut reader = Reader { module: module.clone(), file: File { path: path.to_owned(), ..File::default() } };
        reader.visit_file(source);
        self.files.insert(module, reader.file);
    }

    /// Returns the module of the file that defines `path`, as `module` names it.
    fn resolve(&self, module: &[String], path: &[String], depth: usize) -> Option<Vec<String>> {
        let mut at: Vec<String> = module.to_vec();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => (at, rest) = (Vec::new(), &path[1..]),
            "self" => rest = &path[1..],
            "super" => {}
            first => {
                at.push(first.to_owned());
                if !self.files.contains_key(&at) {
                    return None; // Another crate, or something local.
                }
                rest = &path[1..];
            }
        }
        while rest.first().is_some_and(|word| word == "super") {
            at.pop()?;
            rest = &rest[1..];
        }
        while let Some(next) = rest.first() {
            at.push(next.clone());
            if !self.files.contains_key(&at) {
                at.pop();
                break;
            }
            rest = &rest[1..];
        }
        let inside = at.clone();
        while !self.files.contains_key(&at) {
            at.pop()?; // A module within a file.
        }
        let again = rest.first().and_then(|name| self.files[&at].names.get(&(inside, name.clone())));
        match again {
            Some(further) if depth > 0 => self.resolve(&at, further, depth - 1).or(Some(at)),
            _ => Some(at),
        }
    }

    /// Returns each pair of importing and imported file, with the imported names.
    fn arrows(&self) -> BTreeMap<(&[String], &[String]), BTreeSet<&str>> {
        let mut arrows: BTreeMap<_, BTreeSet<&str>> = BTreeMap::new();
        for (module, file) in &self.files {
            for (inside, path) in &file.paths {
                let Some(target) = self.resolve(inside, path, REEXPORTS) else { continue };
                let (target, _) = self.files.get_key_value(&target).expect("resolve names files");
                if !module.starts_with(target) {
                    let name = path.last().map_or("", String::as_str);
                    arrows.entry((module.as_slice(), target.as_slice())).or_default().insert(name);
                }
            }
        }
        arrows
    }

    /// Returns each circle as text: its files, and the imports that connect them.
    fn circles(&self) -> Vec<String> {
        let arrows = self.arrows();
        let mut reach: BTreeMap<&[String], BTreeSet<&[String]>> = BTreeMap::new();
        for start in self.files.keys() {
            let mut open = vec![start.as_slice()];
            let found = reach.entry(start).or_default();
            while let Some(at) = open.pop() {
                let next = arrows.keys().filter(|(from, _)| *from == at).map(|(_, to)| *to);
                open.extend(next.filter(|to| found.insert(to)));
            }
        }
        let mut told = BTreeSet::new();
        let mut circles = Vec::new();
        for (start, found) in &reach {
            let together: BTreeSet<_> = found.iter().copied().filter(|other| reach[other].contains(start)).collect();
            if together.len() > 1 && told.insert(together.clone()) {
                let within = arrows.iter().filter(|((from, to), _)| together.contains(from) && together.contains(to));
                let ties: Vec<_> = within
                    .map(|((from, to), names)| {
                        let names: Vec<_> = names.iter().copied().collect();
                        format!("\n    {} -> {}: {}", self.files[*from].path, self.files[*to].path, names.join(", "))
                    })
                    .collect();
                circles.push(format!("{} files{}", together.len(), ties.concat()));
            }
        }
        circles
    }
}

/// Collects the names that a file defines and uses, except in tests.
struct Reader {
    module: Vec<String>,
    file: File,
}

impl Reader {
    fn note_use(&mut self, tree: &syn::UseTree, path: &mut Vec<String>) {
        match tree {
            syn::UseTree::Path(step) => {
                path.push(step.ident.to_string());
                self.note_use(&step.tree, path);
                path.pop();
            }
            syn::UseTree::Group(group) => group.items.iter().for_each(|item| self.note_use(item, path)),
            syn::UseTree::Glob(_) => self.note_path(path.clone()),
            syn::UseTree::Name(name) => self.note_name(path, &name.ident, &name.ident),
            syn::UseTree::Rename(rename) => self.note_name(path, &rename.ident, &rename.rename),
        }
    }

    fn note_name(&mut self, path: &[String], name: &syn::Ident, shown: &syn::Ident) {
        let mut path = path.to_vec();
        let mut shown = shown.to_string();
        if name == "self" {
            shown = path.last().cloned().unwrap_or_default();
        } else {
            path.push(name.to_string());
        }
        self.note_path(path.clone());
        self.file.names.insert((self.module.clone(), shown), path);
    }

    fn note_path(&mut self, path: Vec<String>) {
        self.file.paths.insert((self.module.clone(), path));
    }
}

/// Returns whether an item is compiled for tests only.
pub(super) fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .meta
                .require_list()
                .is_ok_and(|list| words(&list.tokens.to_string()).any(|(_, word)| word == "test"))
    })
}

impl<'a> Visit<'a> for Reader {
    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        if !is_for_tests(&item.attrs) {
            self.note_use(&item.tree, &mut Vec::new());
        }
    }

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            self.module.push(item.ident.to_string());
            syn::visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        if !is_for_tests(&item.attrs) {
            syn::visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        if !is_for_tests(&item.attrs) {
            syn::visit::visit_item_impl(self, item);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            self.note_path(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        syn::visit::visit_path(self, path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOUND: [(&str, &str); 5] = [
        ("crates/x/src/lib.rs", "mod a; mod b; mod c;\npub use a::A;\n"),
        ("crates/x/src/a.rs", "use crate::b::B; use std::fmt; pub struct A(B);\n"),
        ("crates/x/src/b.rs", "mod inner; pub use inner::B; pub struct Own;\n"),
        ("crates/x/src/b/inner.rs", "use super::Own; pub struct B(Own);\n"),
        ("crates/x/src/c.rs", "fn f() -> crate::A { todo!() }\n"),
    ];

    fn with(path: &'static str, text: &'static str) -> Tree {
        let mut files = SOUND.to_vec();
        files.retain(|(at, _)| *at != path);
        files.push((path, text));
        Tree::of(&files)
    }

    #[test]
    fn imports_in_one_direction_pass() {
        check(&Tree::of(&SOUND)).assert_passed();
    }

    #[test]
    fn imports_of_tests_do_not_count() {
        let tests = "pub struct B; #[cfg(test)] mod tests { use crate::A; } #[cfg(all(test, feature = \"x\"))] use crate::a::A;";
        check(&with("crates/x/src/b/inner.rs", tests)).assert_passed();
    }

    #[test]
    fn canary_use_that_closes_a_circle_fails() {
        let report = check(&with("crates/x/src/b/inner.rs", "use crate::a::A; pub struct B(A);"));
        report.assert_only_failure("crates/x/src/b/inner.rs -> crates/x/src/a.rs: A");
    }

    #[test]
    fn canary_path_in_code_that_closes_a_circle_fails() {
        let path = "pub struct B; fn f() { super::super::a::A::new() }";
        check(&with("crates/x/src/b/inner.rs", path)).assert_only_failure("in a circle: 2 files");
    }

    #[test]
    fn canary_circle_through_a_reexport_fails() {
        check(&with("crates/x/src/b/inner.rs", "use crate::A; pub struct B(A);"))
            .assert_only_failure("crates/x/src/a.rs");
    }
}
