// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that imports go in one direction, as `[workspace.metadata.layers]` in the root manifest lists it.

use crate::report::Report;
use crate::tree::Tree;
use crate::workspace::{DOUBLES, Package, Workspace};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Member that is in no layer: nothing depends on it and it depends on no member.
const OUTSIDE: &str = "xtask";
/// Prefix of a backend's name.
const BACKEND: &str = "tombolo-domain-";
/// The only crate that may name backends besides the layer that registers them.
const BROKER: &str = "tombolo-broker";
const REGISTRY: &str = "backends";

/// Checks that normal and build dependencies lead to a strictly lower layer or along a listed edge, and that only the
/// layer `backends` and the broker name backends. Also checks that test support does not ship, and that each crate's
/// doc begins with its layer and the crates it uses.
pub fn check(workspace: &Workspace, tree: &Tree) -> Report {
    let mut report = Report::default();
    let layers = Layers::parse(&workspace.layers, &mut report);
    let members: BTreeSet<&str> = workspace.packages.iter().map(|package| package.name.as_str()).collect();
    layers.check_names(&members, &mut report);
    let mut arrows = 0;
    for package in workspace.packages.iter() {
        let uses: Vec<&str> =
            package.dependencies.iter().map(String::as_str).filter(|name| members.contains(name)).collect();
        for to in &uses {
            arrows += 1;
            if let Err(why) = layers.allow(&package.name, to) {
                report.fail(format!("{} -> {to}: {why}", package.name));
            }
        }
        for to in package.testing.iter().filter(|_| package.name != DOUBLES) {
            report.fail(format!("{} ships with the test doubles of {to}: only tests may have them", package.name));
        }
        if package.name != OUTSIDE {
            check_crate_docs(package, &layers, &uses, &members, tree, &mut report);
        }
    }
    report.summary = format!("{} crates, {arrows} arrows", members.len());
    report
}

#[derive(Default)]
struct Layers<'a> {
    /// Layers, the lowest first.
    order: Vec<&'a str>,
    /// Index in `order`, by crate.
    place: BTreeMap<&'a str, usize>,
    edges: BTreeSet<(&'a str, &'a str)>,
    forbidden: BTreeSet<(&'a str, &'a str)>,
}

impl<'a> Layers<'a> {
    fn parse(json: &'a Value, report: &mut Report) -> Self {
        let mut layers = Self { order: names(&json["order"]), ..Self::default() };
        if layers.order.is_empty() {
            report.fail("[workspace.metadata.layers] has no `order`: which layer is the lowest?");
        }
        for (key, value) in json.as_object().into_iter().flatten() {
            match key.as_str() {
                "order" => {}
                "edges" => layers.edges = arrows(value, report),
                "forbidden" => layers.forbidden = arrows(value, report),
                layer => match layers.order.iter().position(|name| *name == layer) {
                    Some(place) => {
                        for name in names(value) {
                            if layers.place.insert(name, place).is_some() {
                                report.fail(format!("{name} is in two layers"));
                            }
                        }
                    }
                    None => report.fail(format!("layer `{layer}` is not in `order`")),
                },
            }
        }
        layers
    }

    /// Checks that the table names all members and nothing else.
    fn check_names(&self, members: &BTreeSet<&str>, report: &mut Report) {
        for name in members.iter().filter(|name| **name != OUTSIDE && !self.place.contains_key(*name)) {
            report.fail(format!("{name} is in no layer: add it to [workspace.metadata.layers]"));
        }
        let pairs = self.edges.iter().chain(&self.forbidden).flat_map(|(from, to)| [*from, *to]);
        let named: BTreeSet<&str> = self.place.keys().copied().chain(pairs).collect();
        for name in named.iter().filter(|name| !members.contains(*name)) {
            report.fail(format!("[workspace.metadata.layers] names {name}, which is no member"));
        }
        for (from, to) in &self.edges {
            if self.place.get(from) != self.place.get(to) {
                report.fail(format!("edge {from} -> {to}: edges join crates of one layer"));
            }
        }
    }

    fn allow(&self, from: &str, to: &str) -> Result<(), String> {
        if from == OUTSIDE || to == OUTSIDE {
            return Err(format!("{OUTSIDE} stands outside the layers"));
        }
        if self.forbidden.contains(&(from, to)) {
            return Err("forbidden by name".into());
        }
        let (Some(&above), Some(&below)) = (self.place.get(from), self.place.get(to)) else {
            return Ok(()); // check_names reports this.
        };
        if to.starts_with(BACKEND) && from != BROKER && self.order[above] != REGISTRY {
            return Err("only the layer `backends` and the broker name a backend".into());
        }
        if above > below || (above == below && self.edges.contains(&(from, to))) {
            return Ok(());
        }
        let (above, below) = (self.order[above], self.order[below]);
        let relation = if above == below { "a sibling that is not in `edges`" } else { "not lower" };
        Err(format!("{below} is {relation}, seen from {above}"))
    }

    fn layer(&self, name: &str) -> Option<&'a str> {
        self.place.get(name).map(|place| self.order[*place])
    }
}

fn names(json: &Value) -> Vec<&str> {
    json.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

fn arrows<'a>(json: &'a Value, report: &mut Report) -> BTreeSet<(&'a str, &'a str)> {
    let mut found = BTreeSet::new();
    for text in names(json) {
        match text.split_once(" -> ") {
            Some((from, to)) => _ = found.insert((from.trim(), to.trim())),
            None => report.fail(format!("`{text}` is no arrow: write `from -> to`")),
        }
    }
    found
}

/// Checks that the crate doc begins `//! Layer 1. Uses: layout, mem.` with the true number and names. A library's names
/// are compared with its dependencies; words that are not the short name of a member are ignored.
fn check_crate_docs(
    package: &Package,
    layers: &Layers<'_>,
    uses: &[&str],
    members: &BTreeSet<&str>,
    tree: &Tree,
    report: &mut Report,
) {
    for target in package.targets.iter().filter(|target| target.ships && !target.path.ends_with("build.rs")) {
        let path = &target.path;
        let doc = crate_doc(tree.text(path).unwrap_or_default());
        let Some(rest) = doc.strip_prefix("Layer ") else {
            report.fail(format!("{path}: the crate doc must begin `//! Layer N. Uses: a, b.`"));
            continue;
        };
        let number = layers.layer(&package.name).and_then(|layer| layer.strip_prefix('L'));
        let says = |number| rest.strip_prefix(number).is_some_and(|tail| tail.starts_with(['.', ':', ',', ' ']));
        if let Some(number) = number.filter(|number| !says(*number)) {
            report.fail(format!("{path}: {} is in layer {number}, its doc says otherwise", package.name));
        }
        if let (true, Some((_, said))) = (target.library, rest.split_once("Uses:")) {
            let said = members_named(said.split('.').next().unwrap_or_default(), members);
            let real: BTreeSet<&str> = uses.iter().map(|name| short(name)).collect();
            if said != real {
                report.fail(format!("{path}: the doc says it uses {said:?}, the manifest says {real:?}"));
            }
        }
    }
}

fn members_named<'a>(text: &'a str, members: &BTreeSet<&str>) -> BTreeSet<&'a str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '-' && c != '_')
        .map(short)
        .filter(|word| members.iter().any(|member| short(member) == *word))
        .collect()
}

fn short(name: &str) -> &str {
    name.strip_prefix("tombolo-").unwrap_or(name)
}

/// Returns the first paragraph of the crate doc, on one line.
fn crate_doc(source: &str) -> String {
    let lines = source.lines().map(str::trim).skip_while(|line| !line.starts_with("//!"));
    let first = lines.map_while(|line| line.strip_prefix("//!")).map(str::trim);
    first.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Target;
    use serde_json::json;

    fn package(name: &str, dependencies: &[&str]) -> Package {
        let path = format!("{name}/lib.rs");
        let dependencies = dependencies.iter().map(|d| (*d).to_owned()).collect();
        Package {
            name: name.to_owned(),
            dependencies,
            targets: vec![Target { ships: true, library: true, path }],
            ..Package::default()
        }
    }

    fn workspace(packages: Vec<Package>) -> Workspace {
        let layers = json!({
            "order": ["L0", "L2", "L3", "backends", "facade", "L4"],
            "L0": ["tombolo-mem"],
            "L2": ["tombolo-domain", "tombolo-domain-local"],
            "L3": ["tombolo-channel"],
            "backends": ["tombolo-backends"],
            "facade": ["tombolo"],
            "L4": ["tombolo-cli"],
            "edges": ["tombolo-domain-local -> tombolo-domain"],
            "forbidden": ["tombolo-cli -> tombolo-mem"],
        });
        Workspace { packages, layers, ..Workspace::default() }
    }

    /// Makes the whole workspace, correct except for the dependencies of one crate.
    fn sound(but: &str, dependencies: &[&str]) -> Workspace {
        let mut all = vec![
            package("tombolo-mem", &["libc"]),
            package("tombolo-domain", &["tombolo-mem"]),
            package("tombolo-domain-local", &["tombolo-domain", "tombolo-mem"]),
            package("tombolo-channel", &["tombolo-domain"]),
            package("tombolo-backends", &["tombolo-channel", "tombolo-domain-local"]),
            package("tombolo", &["tombolo-backends", "tombolo-channel"]),
            package("tombolo-cli", &["tombolo"]),
            package("xtask", &["serde_json"]),
        ];
        for package in all.iter_mut().filter(|package| package.name == but) {
            package.dependencies = dependencies.iter().map(|d| (*d).to_owned()).collect();
        }
        workspace(all)
    }

    const DOCS: [(&str, &str); 7] = [
        ("tombolo-mem/lib.rs", "// SPDX\n//! Layer 0. Uses: libc.\n"),
        ("tombolo-domain/lib.rs", "//! Layer 2. Uses: `mem`.\n"),
        ("tombolo-domain-local/lib.rs", "//! Layer 2. Uses: domain,\n//! mem. The rest is prose about channel.\n"),
        ("tombolo-channel/lib.rs", "//! Layer 3.\n"),
        ("tombolo-backends/lib.rs", "//! Layer backends. Uses: channel, domain-local.\n"),
        ("tombolo/lib.rs", "//! Layer facade. Uses: backends, channel.\n"),
        ("tombolo-cli/lib.rs", "//! Layer 4. Uses: tombolo.\n"),
    ];

    /// Checks the workspace with crate docs that do not state what is used, so that they cannot be wrong.
    fn check_arrows(workspace: &Workspace) -> Report {
        let mut docs = DOCS;
        for (_, text) in &mut docs {
            *text = text.split_once(" Uses").map_or(*text, |(layer, _)| layer);
        }
        check(workspace, &Tree::of(&docs))
    }

    #[test]
    fn sound_workspace_passes() {
        check(&sound("", &[]), &Tree::of(&DOCS)).assert_passed();
    }

    #[test]
    fn canary_upward_dependency_fails() {
        check_arrows(&sound("tombolo-mem", &["tombolo-channel"])).assert_only_failure("L3 is not lower");
    }

    #[test]
    fn canary_unlisted_sibling_fails() {
        let against_the_edge = sound("tombolo-domain", &["tombolo-domain-local"]);
        check_arrows(&against_the_edge).assert_only_failure("only the layer `backends`");
        let mut siblings = sound("tombolo-channel", &["tombolo-domain", "tombolo-mem"]);
        siblings.layers["L3"] = json!(["tombolo-channel", "tombolo-mem"]);
        siblings.layers["L0"] = json!([]);
        let report = check_arrows(&siblings);
        assert!(report.failures.iter().any(|f| f.contains("sibling")), "{report:#?}");
    }

    #[test]
    fn canary_forbidden_arrow_fails() {
        check_arrows(&sound("tombolo-cli", &["tombolo-mem"])).assert_only_failure("forbidden by name");
    }

    #[test]
    fn canary_front_that_names_a_backend_fails() {
        for front in ["tombolo-cli", "tombolo"] {
            check_arrows(&sound(front, &["tombolo-domain-local"])).assert_only_failure("only the layer `backends`");
        }
    }

    #[test]
    fn canary_double_that_ships_fails() {
        let mut shipped = sound("", &[]);
        shipped.packages[3].testing.push("tombolo-domain".into());
        check_arrows(&shipped).assert_only_failure("ships with the test doubles");
    }

    #[test]
    fn canary_member_without_layer_fails() {
        let mut extra = sound("", &[]);
        extra.packages.push(package("tombolo-new", &[]));
        let mut docs = DOCS.to_vec();
        docs.push(("tombolo-new/lib.rs", "//! Layer 4."));
        check(&extra, &Tree::of(&docs)).assert_only_failure("tombolo-new is in no layer");
    }

    #[test]
    fn canary_layer_of_a_crate_that_is_gone_fails() {
        let mut gone = sound("", &[]);
        gone.packages.retain(|package| package.name != "tombolo-cli");
        check(&gone, &Tree::of(&DOCS)).assert_only_failure("names tombolo-cli, which is no member");
    }

    #[test]
    fn canary_edge_between_layers_fails() {
        let mut upward = sound("", &[]);
        upward.layers["edges"] = json!(["tombolo-domain-local -> tombolo-domain", "tombolo-mem -> tombolo-cli"]);
        check(&upward, &Tree::of(&DOCS)).assert_only_failure("edges join crates of one layer");
    }

    #[test]
    fn canary_missing_table_fails() {
        let mut bare = sound("", &[]);
        bare.layers = Value::Null;
        assert!(!check(&bare, &Tree::of(&DOCS)).passed());
    }

    #[test]
    fn canary_crate_doc_without_layer_fails() {
        let mut docs = DOCS;
        docs[3].1 = "//! The channel.\n";
        check(&sound("", &[]), &Tree::of(&docs)).assert_only_failure("must begin `//! Layer");
    }

    #[test]
    fn canary_crate_doc_of_another_layer_fails() {
        let mut docs = DOCS;
        docs[3].1 = "//! Layer 1.\n";
        check(&sound("", &[]), &Tree::of(&docs)).assert_only_failure("is in layer 3");
    }

    #[test]
    fn canary_crate_doc_that_hides_a_dependency_fails() {
        let mut docs = DOCS;
        docs[2].1 = "//! Layer 2. Uses: domain.\n";
        check(&sound("", &[]), &Tree::of(&docs)).assert_only_failure("the manifest says");
    }
}
