// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads what `cargo metadata` reports about the workspace.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Platform for which dependencies are resolved; those that only other platforms need are left out.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// The member that is part of nothing that ships.
const TOOLS: &str = "xtask";

/// The member with the test doubles and the conformance suite. Crates that ship may depend on it only behind a feature.
pub const DOUBLES: &str = "tombolo-testing";

/// The workspace as its manifests describe it.
#[derive(Debug, Default)]
pub struct Workspace {
    /// Folder of the root manifest.
    pub root: PathBuf,
    /// Members of the workspace.
    pub packages: Vec<Package>,
    /// All other packages that the members are built from.
    pub foreign: Vec<Foreign>,
    /// `[workspace.metadata.layers]`, null if there is none.
    pub layers: Value,
}

/// A member of the workspace.
#[derive(Debug, Default)]
pub struct Package {
    /// Its name in the manifest.
    pub name: String,
    /// Dependencies that it needs to be built or run, without those that only its tests need.
    pub dependencies: Vec<String>,
    /// Dependencies that it needs with any features and on any platform.
    pub always: Vec<String>,
    /// Dependencies that are for tests: their feature `testing` is on, or they are [`DOUBLES`].
    pub testing: Vec<String>,
    /// Targets that are compiled from it.
    pub targets: Vec<Target>,
}

/// A package from outside the workspace.
#[derive(Debug)]
pub struct Foreign {
    /// Its name and version.
    pub name: String,
    /// SPDX expression in its manifest.
    pub licence: String,
    /// Whether only xtask needs it, so that it is part of nothing that ships or is tested.
    pub tool: bool,
}

/// A crate root.
#[derive(Debug)]
pub struct Target {
    /// Whether it ships: true for a library, a program and the like; false for tests, examples and benches.
    pub ships: bool,
    /// Whether it is a library of any kind.
    pub library: bool,
    /// Path from the workspace root, with `/` between folders.
    pub path: String,
}

impl Workspace {
    /// Reads the workspace around the current folder by `cargo metadata`.
    pub fn load() -> Result<Self, String> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["metadata", "--format-version", "1", "--filter-platform", PLATFORM])
            .output()
            .map_err(|e| format!("cannot run cargo metadata: {e}"))?;
        if !output.status.success() {
            return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
        let json = serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo metadata: {e}"))?;
        Self::parse(&json)
    }

    /// Extracts the needed fields from cargo's output.
    pub fn parse(json: &Value) -> Result<Self, String> {
        let root = PathBuf::from(text(json, "workspace_root")?);
        let (members, others): (Vec<&Value>, Vec<&Value>) =
            list(json, "packages")?.iter().partition(|package| package["source"].is_null());
        let packages = members.iter().map(|member| package(member, &root)).collect::<Result<_, _>>()?;
        let needed = needed_beside_tools(json, &members);
        let foreign = others.iter().map(|other| foreign(other, &needed)).collect::<Result<_, _>>()?;
        Ok(Self { root, packages, foreign, layers: json["metadata"]["layers"].clone() })
    }
}

fn package(json: &Value, root: &Path) -> Result<Package, String> {
    let (mut dependencies, mut always, mut testing) = (Vec::new(), Vec::new(), Vec::new());
    for dependency in list(json, "dependencies")?.iter().filter(|d| d["kind"].as_str() != Some("dev")) {
        let name = text(dependency, "name")?;
        dependencies.push(name.to_owned());
        if dependency["optional"] != true && dependency["target"].is_null() {
            always.push(name.to_owned());
        }
        let testing_feature = dependency["features"].as_array().is_some_and(|all| all.iter().any(|f| f == "testing"));
        if testing_feature || (name == DOUBLES && dependency["optional"] != true) {
            testing.push(name.to_owned());
        }
    }
    dependencies.sort();
    dependencies.dedup();
    let targets = list(json, "targets")?.iter().map(|t| target(t, root)).collect::<Result<_, _>>()?;
    Ok(Package { name: text(json, "name")?.to_owned(), dependencies, always, testing, targets })
}

/// Returns the ids of all packages that some member other than the tools needs.
fn needed_beside_tools<'a>(json: &'a Value, members: &[&'a Value]) -> BTreeSet<&'a str> {
    let ids = members.iter().filter(|member| member["name"] != TOOLS).filter_map(|member| member["id"].as_str());
    let mut open: Vec<&str> = ids.collect();
    let mut needed = BTreeSet::new();
    let nodes = json["resolve"]["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
    while let Some(id) = open.pop() {
        if needed.insert(id) {
            let node = nodes.iter().find(|node| node["id"] == id);
            let dependencies = node.and_then(|node| node["dependencies"].as_array());
            open.extend(dependencies.into_iter().flatten().filter_map(Value::as_str));
        }
    }
    needed
}

fn foreign(json: &Value, needed: &BTreeSet<&str>) -> Result<Foreign, String> {
    let name = format!("{} {}", text(json, "name")?, text(json, "version")?);
    let licence = json["license"].as_str().unwrap_or_default().to_owned();
    Ok(Foreign { name, licence, tool: json["id"].as_str().is_some_and(|id| !needed.contains(id)) })
}

fn target(json: &Value, root: &Path) -> Result<Target, String> {
    let kinds: Vec<&str> = list(json, "kind")?.iter().filter_map(Value::as_str).collect();
    let path = Path::new(text(json, "src_path")?);
    let path = path.strip_prefix(root).unwrap_or(path).to_string_lossy().replace('\\', "/");
    let library = kinds.iter().any(|kind| kind.ends_with("lib") || *kind == "proc-macro");
    let ships = library || kinds.iter().any(|kind| matches!(*kind, "bin" | "custom-build"));
    Ok(Target { ships, library, path })
}

fn text<'a>(json: &'a Value, key: &str) -> Result<&'a str, String> {
    json[key].as_str().ok_or_else(|| format!("cargo metadata has no text `{key}`"))
}

fn list<'a>(json: &'a Value, key: &str) -> Result<&'a [Value], String> {
    json[key].as_array().map(Vec::as_slice).ok_or_else(|| format!("cargo metadata has no list `{key}`"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn metadata_is_reduced_to_what_checks_need() {
        let workspace = Workspace::parse(&json!({
            "workspace_root": "/w",
            "metadata": { "layers": { "order": ["L0"] } },
            "packages": [{
                "name": "ring", "id": "ring",
                "dependencies": [
                    { "name": "mem", "kind": null, "features": ["testing"] },
                    { "name": "cc", "kind": "build" },
                    { "name": "loom", "kind": "dev", "features": ["testing"] },
                    { "name": "mem", "kind": null, "target": "cfg(unix)" },
                    { "name": "tokio", "kind": null, "optional": true },
                ],
                "targets": [
                    { "kind": ["lib"], "src_path": "/w/crates/core/ring/src/lib.rs" },
                    { "kind": ["test"], "src_path": "/w/crates/core/ring/tests/loom.rs" },
                ],
            }, {
                "name": "xtask", "id": "xtask", "dependencies": [], "targets": [],
            }, {
                "name": "libc", "id": "libc", "version": "0.2.1", "source": "registry", "license": "MIT",
            }, {
                "name": "syn", "id": "syn", "version": "2.0.1", "source": "registry", "license": "MIT",
            }],
            "resolve": { "nodes": [
                { "id": "ring", "dependencies": ["mem"] }, { "id": "mem", "dependencies": ["libc"] },
                { "id": "xtask", "dependencies": ["syn", "libc"] },
            ] },
        }))
        .unwrap();
        let ring = &workspace.packages[0];
        assert_eq!(ring.dependencies, ["cc", "mem", "tokio"]);
        assert_eq!(ring.always, ["mem", "cc"]);
        assert_eq!(ring.testing, ["mem"]);
        assert_eq!(ring.targets[0].path, "crates/core/ring/src/lib.rs");
        assert!(ring.targets[0].ships && ring.targets[0].library);
        assert!(!ring.targets[1].ships);
        assert_eq!((workspace.packages.len(), workspace.foreign.len()), (2, 2));
        assert_eq!(workspace.foreign[0].name, "libc 0.2.1");
        assert!(!workspace.foreign[0].tool && workspace.foreign[1].tool);
        assert_eq!(workspace.layers["order"][0], "L0");
    }

    #[test]
    fn unexpected_metadata_is_an_error() {
        let error = Workspace::parse(&json!({ "workspace_root": "/w" })).unwrap_err();
        assert!(error.contains("packages"), "{error}");
    }
}
