// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that no type has too many methods for its reader, over all files that contain its methods.

use super::circles::{is_for_tests, module_of};
use crate::report::Report;
use crate::tree::Tree;
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::Visit;

/// Largest number of methods of one type, associated functions included. Methods of traits do not count.
const MOST: usize = 25;
const LARGEST: usize = 10;

/// Types that are still to be split. A type that has few enough methods must be removed from this list.
const PENDING: [&str; 0] = [];

/// A type: the root folder of its crate, the module that defines it, and its name.
type Type = (String, Vec<String>, String);

/// Checks that no type of a crate has more than [`MOST`] methods, except those of [`PENDING`].
pub fn check(tree: &Tree) -> Report {
    check_but(tree, &PENDING)
}

fn check_but(tree: &Tree, pending: &[&str]) -> Report {
    let mut report = Report::default();
    let mut reader = Reader::default();
    for (path, text) in tree.files(&[".rs"]) {
        let Some((root, module)) = module_of(path) else { continue };
        match syn::parse_file(text) {
            Ok(file) => {
                (reader.root, reader.module) = (root.to_owned(), module);
                reader.visit_file(&file);
            }
            Err(e) => report.fail(format!("{path}: no Rust: {e}")),
        }
    }
    let mut counts: Vec<(usize, String)> = reader.methods_of_types().into_iter().collect();
    counts.sort_by(|a, b| b.cmp(a));
    let mut split = BTreeSet::new();
    for (methods, name) in counts.iter().filter(|(methods, _)| *methods > MOST) {
        if pending.contains(&name.as_str()) {
            split.insert(name.as_str());
        } else {
            report.fail(format!("{name}: {methods} methods, {MOST} at most: split it by what it knows"));
        }
    }
    for name in pending.iter().filter(|name| !split.contains(*name)) {
        report.fail(format!("{name} has no more than {MOST} methods: take it from PENDING in types.rs"));
    }
    if counts.is_empty() {
        report.fail("no method of a type was found: does this check still read the sources?");
    }
    report.notes = counts.iter().take(LARGEST).map(|(methods, name)| format!("{methods:5}  {name}")).collect();
    let largest = counts.first().map_or(0, |first| first.0);
    report.summary =
        format!("{} types with methods, the largest has {largest}, {} to be split", counts.len(), pending.len());
    report
}

/// Collects types and the methods of `impl` blocks, except in tests.
#[derive(Default)]
struct Reader {
    root: String,
    module: Vec<String>,
    defined: BTreeSet<Type>,
    methods: BTreeMap<Type, usize>,
}

impl Reader {
    fn here(&self, name: &syn::Ident) -> Type {
        (self.root.clone(), self.module.clone(), name.to_string())
    }

    /// Returns each type with the number of its methods, from all `impl` blocks of one crate that belong to it.
    fn methods_of_types(&self) -> BTreeSet<(usize, String)> {
        let mut sums: BTreeMap<&Type, usize> = BTreeMap::new();
        for (block, methods) in &self.methods {
            // Of several types with that name, the block belongs to the one whose module is nearest.
            let same = self.defined.iter().filter(|defined| (&defined.0, &defined.2) == (&block.0, &block.2));
            let common = |defined: &&Type| defined.1.iter().zip(&block.1).take_while(|(a, b)| a == b).count();
            let nearest = same.max_by_key(|defined| (common(defined), usize::MAX - defined.1.len()));
            *sums.entry(nearest.unwrap_or(block)).or_default() += methods;
        }
        // Shows the crate by the name of its folder, wherever that folder is.
        let crate_of = |root: &str| root.trim_end_matches("/src").rsplit('/').next().unwrap_or_default().to_owned();
        let shown = |(root, module, name): &Type| {
            [&[crate_of(root)], &module[..], std::slice::from_ref(name)].concat().join("::")
        };
        sums.into_iter().map(|(defined, methods)| (methods, shown(defined))).collect()
    }
}

impl<'a> Visit<'a> for Reader {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            self.module.push(item.ident.to_string());
            syn::visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.defined.insert(self.here(&item.ident));
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.defined.insert(self.here(&item.ident));
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        let syn::Type::Path(path) = &*item.self_ty else { return };
        let Some(last) = path.path.segments.last().filter(|_| item.trait_.is_none()) else { return };
        if is_for_tests(&item.attrs) {
            return;
        }
        let methods = item.items.iter().filter(|item| match item {
            syn::ImplItem::Fn(method) => !is_for_tests(&method.attrs),
            _ => false,
        });
        let methods = methods.count();
        *self.methods.entry(self.here(&last.ident)).or_default() += methods;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a crate with a type in `a.rs` and `impl` blocks for it there and below, with the given numbers of methods.
    fn with(here: usize, below: usize, tail: &str) -> Tree {
        let methods =
            |from: usize, many: usize| (from..from + many).map(|n| format!("fn f{n}() {{}}\n")).collect::<String>();
        let text = format!("pub struct A;\nimpl A {{ {} }}\n{tail}", methods(0, here));
        let inner = format!(
            "use super::A;\nimpl A {{ {} }}\nimpl Drop for A {{ fn drop(&mut self) {{}} }}",
            methods(99, below)
        );
        let other = "pub struct A;\nimpl A { fn one() {} }\n";
        Tree::of(&[
            ("crates/x/src/a.rs", &text),
            ("crates/x/src/a/inner.rs", &inner),
            ("crates/x/src/other.rs", other),
            ("crates/x/tests/t.rs", &methods(0, 99)),
        ])
    }

    #[test]
    fn type_at_the_limit_passes() {
        check_but(&with(MOST - 5, 5, ""), &[]).assert_passed();
    }

    #[test]
    fn methods_of_traits_and_tests_do_not_count() {
        let tests = "#[cfg(test)] mod tests { impl super::A { fn t() {} } }\n#[cfg(test)] impl A { fn u() {} }";
        check_but(&with(MOST, 0, tests), &[]).assert_passed();
        check_but(&with(MOST, 0, "impl A { #[cfg(test)] fn t() {} }"), &[]).assert_passed();
    }

    #[test]
    fn pending_type_may_have_more() {
        check_but(&with(MOST, 1, ""), &["x::a::A"]).assert_passed();
    }

    #[test]
    fn canary_type_with_too_many_methods_in_two_files_fails() {
        check_but(&with(MOST, 1, ""), &[]).assert_only_failure("x::a::A: 26 methods");
    }

    #[test]
    fn canary_pending_type_that_was_split_fails() {
        check_but(&with(MOST, 0, ""), &["x::a::A"]).assert_only_failure("take it from PENDING");
    }

    #[test]
    fn canary_tree_without_types_fails() {
        check_but(&Tree::of(&[]), &[]).assert_only_failure("does this check still read");
    }
}
