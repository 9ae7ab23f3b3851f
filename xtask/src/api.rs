// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists the public interface of a crate from its sources: the items that it defines, and those that it re-exports by
//! name from other members, with their methods and traits.
//!
//! The sources are read with `syn`, so that a stable toolchain suffices. Only the parts of Rust that the facade uses
//! are supported: a glob and a macro at the root of the crate are refused.

use std::collections::{BTreeMap, BTreeSet};

use quote::ToTokens;
use syn::{Attribute, Fields, FnArg, ImplItem, Item, ItemImpl, Pat, Signature, TraitItem, Type, UseTree, Visibility};

use crate::tree::Tree;
use crate::workspace::Workspace;

/// One line of the interface.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// The item, on one line: `fn Options::spin(self, most: Duration) -> Self`.
    pub line: String,
    /// First line of its documentation, empty if it has none.
    pub summary: String,
    /// Path of the file that contains it.
    pub path: String,
}

/// Sources of the members, by the name of each in Rust code.
pub struct Sources<'a> {
    tree: &'a Tree,
    /// Path of the crate root.
    roots: BTreeMap<String, String>,
}

impl<'a> Sources<'a> {
    pub fn new(workspace: &Workspace, tree: &'a Tree) -> Self {
        let mut roots = BTreeMap::new();
        for package in &workspace.packages {
            for target in package.targets.iter().filter(|target| target.ships && target.library) {
                roots.insert(package.name.replace('-', "_"), target.path.clone());
            }
        }
        Self { tree, roots }
    }

    /// Returns the whole interface of the member, sorted.
    pub fn interface(&self, krate: &str) -> Result<Vec<Entry>, String> {
        let mut entries = BTreeSet::new();
        self.list_file(krate, self.root(krate)?, "", &mut entries)?;
        Ok(entries.into_iter().collect())
    }

    fn root(&self, krate: &str) -> Result<&str, String> {
        self.roots.get(krate).map(String::as_str).ok_or_else(|| format!("{krate} is no library of the workspace"))
    }

    fn parse(&self, path: &str) -> Result<syn::File, String> {
        let text = self.tree.text(path).ok_or_else(|| format!("{path} is missing"))?;
        syn::parse_file(text).map_err(|error| format!("{path}: {error}"))
    }

    /// Lists the public items of the module in the file `path`, each under `prefix`.
    fn list_file(&self, krate: &str, path: &str, prefix: &str, entries: &mut BTreeSet<Entry>) -> Result<(), String> {
        for item in self.parse(path)?.items {
            match &item {
                Item::Use(item) if is_public(&item.vis) && !is_hidden(&item.attrs) => {
                    for (segments, name) in leaves(&item.tree, path)? {
                        self.list_use(krate, &segments, &format!("{prefix}{name}"), entries)?;
                    }
                }
                Item::Macro(_) => return Err(format!("{path}: a macro at the root of a module cannot be listed")),
                item => {
                    let Some(name) = public_name(item) else { continue };
                    if let Item::Mod(module) = item {
                        let file = module.content.is_none().then(|| format!("{}/{name}.rs", folder(path)));
                        let file = file.ok_or_else(|| format!("{path}: put the public module {name} into a file"))?;
                        self.list_file(krate, &file, &format!("{prefix}{name}::"), entries)?;
                    } else {
                        self.list_item(krate, &name, &format!("{prefix}{name}"), entries)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Lists the items that `use segments as shown` in `krate` exports.
    fn list_use(
        &self,
        krate: &str,
        segments: &[String],
        shown: &str,
        entries: &mut BTreeSet<Entry>,
    ) -> Result<(), String> {
        let (first, name) = (segments.first().map_or("", String::as_str), segments.last().map_or("", String::as_str));
        if !self.roots.contains_key(first) {
            return self.list_item(krate, name, shown, entries);
        }
        let root = self.root(first)?;
        // That crate may itself re-export the name.
        for item in self.parse(root)?.items {
            match &item {
                Item::Use(item) if is_public(&item.vis) => {
                    for (from, found) in leaves(&item.tree, root)? {
                        if found == *name {
                            return self.list_use(first, &from, shown, entries);
                        }
                    }
                }
                Item::Mod(module) if is_public(&module.vis) && module.ident == name => {
                    let file = format!("{}/{name}.rs", folder(root));
                    return self.list_file(first, &file, &format!("{shown}::"), entries);
                }
                _ => {}
            }
        }
        self.list_item(first, name, shown, entries)
    }

    /// Lists the item `name`, wherever in the crate it is defined, and everything that is implemented for it, under the
    /// name `shown`.
    fn list_item(&self, krate: &str, name: &str, shown: &str, entries: &mut BTreeSet<Entry>) -> Result<(), String> {
        let folder = format!("{}/", folder(self.root(krate)?));
        let mut defined = 0;
        for (path, text) in self.tree.files(&[".rs"]).filter(|(path, _)| path.starts_with(&folder)) {
            if !text.contains(name) {
                continue;
            }
            let mut lister = Lister { name, shown, path, entries, defined: 0 };
            lister.list_items(&self.parse(path)?.items);
            defined += lister.defined;
        }
        match defined {
            1 => Ok(()),
            0 => Err(format!("{krate} has no public {name}")),
            _ => Err(format!("{krate} has {defined} public {name}: one of them wants another name")),
        }
    }
}

/// Lists one name of one file.
struct Lister<'a> {
    name: &'a str,
    shown: &'a str,
    path: &'a str,
    entries: &'a mut BTreeSet<Entry>,
    defined: usize,
}

impl Lister<'_> {
    fn list_items(&mut self, items: &[Item]) {
        for item in items {
            match item {
                Item::Mod(module) if !is_test(&module.attrs) => {
                    if let Some((_, items)) = &module.content {
                        self.list_items(items);
                    }
                }
                Item::Impl(item) if is_of(&item.self_ty, self.name) && !is_hidden(&item.attrs) => self.list_impl(item),
                item if public_name(item).is_some_and(|name| name == self.name) => {
                    self.defined += 1;
                    self.list_definition(item);
                }
                _ => {}
            }
        }
    }

    fn add(&mut self, line: &str, attrs: &[Attribute]) {
        let entry = Entry { line: tidy(line), summary: summary(attrs), path: self.path.to_owned() };
        self.entries.insert(entry);
    }

    fn list_definition(&mut self, item: &Item) {
        let shown = self.shown;
        match item {
            Item::Fn(item) => self.add(&format!("fn {shown}{}", rest_of(&item.sig)), &item.attrs),
            Item::Struct(item) => {
                let generics = item.generics.to_token_stream();
                self.add(&format!("{}struct {shown}{generics}", traits(&item.attrs)), &item.attrs);
                self.list_fields(shown, &item.fields, false);
            }
            Item::Enum(item) => {
                let generics = item.generics.to_token_stream();
                self.add(&format!("{}enum {shown}{generics}", traits(&item.attrs)), &item.attrs);
                for variant in &item.variants {
                    let name = format!("{shown}::{}", variant.ident);
                    let number = variant.discriminant.as_ref().map(|(_, number)| format!(" = {}", text(number)));
                    self.add(&format!("variant {name}{}", number.unwrap_or_default()), &variant.attrs);
                    self.list_fields(&name, &variant.fields, true);
                }
            }
            Item::Type(item) => {
                let line = format!("type {shown}{} = {}", item.generics.to_token_stream(), text(&item.ty));
                self.add(&line, &item.attrs);
            }
            Item::Const(item) => self.add(&format!("const {shown}: {}", text(&item.ty)), &item.attrs),
            Item::Trait(item) => {
                let bounds = item.supertraits.to_token_stream();
                self.add(&format!("trait {shown}: {bounds}"), &item.attrs);
                for item in &item.items {
                    if let TraitItem::Fn(item) = item {
                        self.add(&format!("fn {shown}::{}{}", item.sig.ident, rest_of(&item.sig)), &item.attrs);
                    }
                }
            }
            _ => {}
        }
    }

    fn list_fields(&mut self, of: &str, fields: &Fields, all: bool) {
        for (at, field) in fields.iter().enumerate().filter(|(_, field)| all || is_public(&field.vis)) {
            let name = field.ident.as_ref().map_or_else(|| at.to_string(), ToString::to_string);
            // For a field without a name, the documentation of the variant suffices.
            let attrs: &[Attribute] = if field.ident.is_some() { &field.attrs } else { &[] };
            self.add(&format!("field {of}.{name}: {}", text(&field.ty)), attrs);
        }
    }

    fn list_impl(&mut self, item: &ItemImpl) {
        let generics = item.generics.to_token_stream();
        if let Some((_, of, _)) = &item.trait_ {
            if of.segments.iter().all(|segment| segment.ident != "Sealed") {
                self.add(&format!("impl{generics} {} for {}", text(of), text(&item.self_ty)), &[]);
            }
            return;
        }
        let shown = self.shown;
        // The arguments of a type such as `Rx<StreamMode>` show which of its forms has the method.
        let mode = item.generics.params.is_empty().then(|| text(&item.self_ty)).filter(|text| text.contains('<'));
        let mode = mode.filter(|text| !text.contains('\'')).and_then(|text| Some(text[text.find('<')?..].to_owned()));
        let of = format!("{shown}{}", mode.unwrap_or_default());
        for item in &item.items {
            match item {
                ImplItem::Fn(item) if is_public(&item.vis) && !is_hidden(&item.attrs) => {
                    self.add(&format!("fn {of}::{}{}", item.sig.ident, rest_of(&item.sig)), &item.attrs);
                }
                ImplItem::Const(item) if is_public(&item.vis) => {
                    self.add(&format!("const {of}::{}: {}", item.ident, text(&item.ty)), &item.attrs);
                }
                _ => {}
            }
        }
    }
}

/// Returns the paths and names that a `use` exports.
fn leaves(tree: &UseTree, path: &str) -> Result<Vec<(Vec<String>, String)>, String> {
    fn walk(tree: &UseTree, before: &[String], found: &mut Vec<(Vec<String>, String)>) -> bool {
        let with = |name: String| before.iter().cloned().chain([name]).collect::<Vec<_>>();
        match tree {
            UseTree::Path(tree) => walk(&tree.tree, &with(tree.ident.to_string()), found),
            UseTree::Name(tree) => {
                found.push((with(tree.ident.to_string()), tree.ident.to_string()));
                true
            }
            UseTree::Rename(tree) => {
                found.push((with(tree.ident.to_string()), tree.rename.to_string()));
                true
            }
            UseTree::Glob(_) => false,
            UseTree::Group(tree) => tree.items.iter().all(|item| walk(item, before, found)),
        }
    }
    let mut found = Vec::new();
    let whole = walk(tree, &[], &mut found);
    whole.then_some(found).ok_or_else(|| format!("{path}: `pub use …::*` shows what nobody named: name it"))
}

fn folder(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

fn is_public(vis: &Visibility) -> bool {
    matches!(vis, Visibility::Public(_))
}

fn public_name(item: &Item) -> Option<String> {
    let (vis, name, attrs) = match item {
        Item::Fn(item) => (&item.vis, &item.sig.ident, &item.attrs),
        Item::Struct(item) => (&item.vis, &item.ident, &item.attrs),
        Item::Enum(item) => (&item.vis, &item.ident, &item.attrs),
        Item::Type(item) => (&item.vis, &item.ident, &item.attrs),
        Item::Const(item) => (&item.vis, &item.ident, &item.attrs),
        Item::Trait(item) => (&item.vis, &item.ident, &item.attrs),
        Item::Mod(item) => (&item.vis, &item.ident, &item.attrs),
        _ => return None,
    };
    (is_public(vis) && !is_test(attrs) && !is_hidden(attrs)).then(|| name.to_string())
}

fn is_test(attrs: &[Attribute]) -> bool {
    attrs.iter().any(|attr| attr.path().is_ident("cfg") && text(&attr.meta).contains("test"))
}

fn is_hidden(attrs: &[Attribute]) -> bool {
    attrs.iter().any(|attr| attr.path().is_ident("doc") && text(&attr.meta).contains("hidden"))
}

/// Returns whether a type has this name, whatever its parameters.
fn is_of(ty: &Type, name: &str) -> bool {
    matches!(ty, Type::Path(path) if path.path.segments.last().is_some_and(|last| last.ident == name))
}

/// Returns the attributes that derive traits or mark an item as non-exhaustive.
fn traits(attrs: &[Attribute]) -> String {
    let shown = attrs.iter().filter(|attr| attr.path().is_ident("derive") || attr.path().is_ident("non_exhaustive"));
    shown.map(|attr| format!("#[{}] ", text(&attr.meta))).collect()
}

/// Returns the first line of the documentation.
fn summary(attrs: &[Attribute]) -> String {
    let mut lines = attrs.iter().filter_map(|attr| match &attr.meta {
        syn::Meta::NameValue(pair) if attr.path().is_ident("doc") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value().trim().to_owned()),
            _ => None,
        },
        _ => None,
    });
    lines.next().unwrap_or_default()
}

/// Returns a signature from its parameters on, without the parts that only the body needs.
fn rest_of(sig: &Signature) -> String {
    let mut sig = sig.clone();
    for input in &mut sig.inputs {
        match input {
            FnArg::Receiver(receiver) if receiver.reference.is_none() => receiver.mutability = None,
            FnArg::Typed(typed) => {
                if let Pat::Ident(name) = &mut *typed.pat {
                    name.mutability = None;
                }
            }
            FnArg::Receiver(_) => {}
        }
        match input {
            FnArg::Receiver(receiver) => receiver.attrs.clear(),
            FnArg::Typed(typed) => typed.attrs.clear(),
        }
    }
    let (inputs, output, wanted) = (&sig.inputs, &sig.output, &sig.generics.where_clause);
    let marks =
        [("const", sig.constness.is_some()), ("async", sig.asyncness.is_some()), ("unsafe", sig.unsafety.is_some())];
    let marks: String = marks.iter().filter(|(_, is)| *is).map(|(mark, _)| format!(" {mark}")).collect();
    let generics = sig.generics.to_token_stream();
    let wanted = wanted.to_token_stream();
    format!("{generics}({}) {} {wanted}{marks}", inputs.to_token_stream(), output.to_token_stream())
}

fn text(tokens: &impl ToTokens) -> String {
    tidy(&tokens.to_token_stream().to_string())
}

/// Removes the blanks between tokens that people do not write.
fn tidy(tokens: &str) -> String {
    let mut line = tokens.split_whitespace().collect::<Vec<_>>().join(" ");
    for (apart, together) in [
        (" ,", ","),
        (" ;", ";"),
        (" (", "("),
        ("( ", "("),
        (" )", ")"),
        (" < ", "<"),
        ("< ", "<"),
        (" >", ">"),
        ("& ", "&"),
        (" :: ", "::"),
        (":: ", "::"),
        (" ::", "::"),
        (" :", ":"),
        (" <", "<"),
        ("[ ", "["),
        (" ]", "]"),
        ("- >", "->"),
        (" ->", " ->"),
        ("->", " -> "),
        ("=(", "= ("),
        ("* const", "*const"),
        ("* mut", "*mut"),
        ("&'_", "&'_"),
        (",)", ")"),
        (" !", "!"),
    ] {
        line = line.replace(apart, together);
    }
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::{Package, Target};

    /// Lists a facade that re-exports from a lower crate, which re-exports some of it from a third.
    fn lines(facade: &str, lower: &str) -> Result<Vec<String>, String> {
        let third = "pub struct Time(u64);\nimpl Time { pub const NEVER: Self = Self(0); pub(crate) fn own(&self) {} }";
        let files = [("facade/lib.rs", facade), ("lower/lib.rs", lower), ("third/lib.rs", third)];
        let package = |name: &str| Package {
            name: name.into(),
            targets: vec![Target { ships: true, library: true, path: format!("{name}/lib.rs") }],
            ..Package::default()
        };
        let workspace =
            Workspace { packages: ["facade", "lower", "third"].map(package).into(), ..Workspace::default() };
        let tree = Tree::of(&files);
        let entries = Sources::new(&workspace, &tree).interface("facade")?;
        Ok(entries.into_iter().map(|entry| entry.line).collect())
    }

    #[test]
    fn interface_is_what_is_named_with_its_methods_fields_and_traits() {
        let lower = "
            pub use third::Time;
            #[derive(Clone)] pub struct Options { pub size: u64, own: u8 }
            impl Options { pub fn spin(mut self, most: Vec<u8>) -> Self { self } fn own(&self) {} #[doc(hidden)] pub fn fast() {} }
            impl Default for Options { fn default() -> Self { todo!() } }
            pub struct Rx<M>(M);
            impl<M> Rx<M> { pub fn close(&mut self) {} }
            impl Rx<u8> { pub fn read(&mut self, to: &mut [u8]) -> Result<Option<usize>, ()> { Ok(None) } }
            pub type Half = Rx<u8>;
            #[cfg(test)] mod tests { pub struct Options; }";
        let facade = "pub use lower::{Half, Options, Rx, Time as Moment};\npub fn connect<C: Into<u8>>(to: &str) -> C { todo!() }";
        let expected = [
            "#[derive(Clone)] struct Options",
            "const Moment::NEVER: Self",
            "field Options.size: u64",
            "fn Options::spin(self, most: Vec<u8>) -> Self",
            "fn Rx::close(&mut self)",
            "fn Rx<u8>::read(&mut self, to: &mut [u8]) -> Result<Option<usize>,()>",
            "fn connect<C: Into<u8>>(to: &str) -> C",
            "impl Default for Options",
            "struct Moment",
            "struct Rx<M>",
            "type Half = Rx<u8>",
        ];
        assert_eq!(lines(facade, lower).unwrap(), expected);
    }

    #[test]
    fn glob_and_name_that_is_not_there_are_refused() {
        assert!(lines("pub use lower::*;", "").unwrap_err().contains("name it"));
        assert!(lines("pub use lower::Gone;", "").unwrap_err().contains("has no public Gone"));
    }
}
