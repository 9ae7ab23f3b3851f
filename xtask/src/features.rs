// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that the public crate builds without warnings with each of its features alone, and that a backend whose
//! feature is off is not compiled.

use std::collections::BTreeSet;
use std::process::{Command, Output};

/// Arguments of each build, and the crates that must not be part of it.
const BUILDS: [(&[&str], &[&str]); 5] = [
    (&["--no-default-features"], &["tombolo-domain-ivshmem", "tombolo-domain-xen", "tokio"]),
    (&["--no-default-features", "--features", "vm"], &["tombolo-domain-xen", "tokio"]),
    (&["--no-default-features", "--features", "xen"], &["tombolo-domain-ivshmem", "tokio"]),
    (&["--no-default-features", "--features", "tokio"], &["tombolo-domain-ivshmem", "tombolo-domain-xen"]),
    (&["--all-features"], &[]),
];
/// Crates that are never part of the public crate, whatever features are on.
const NEVER: [&str; 3] = ["tombolo-sockets", "tombolo-testing", "tombolo-vchan-wire"];
/// Features that [`BUILDS`] covers.
const FEATURES: [&str; 4] = ["default", "tokio", "vm", "xen"];

/// Runs all builds and tests. Returns whether all passed.
pub fn run() -> Result<bool, String> {
    let mut wrong = Vec::new();
    for (arguments, absent) in BUILDS {
        let name = arguments.join(" ");
        println!("tombolo {name}");
        let check = cargo(&["check", "--quiet", "--package", "tombolo", "--message-format", "short"], arguments)?;
        wrong.extend(judge_build(&name, check.status.success(), &text(&check.stderr)));
        let tree = cargo(&["tree", "--package", "tombolo", "--edges", "normal,build", "--prefix", "none"], arguments)?;
        wrong.extend(judge_tree(&name, &text(&tree.stdout), absent));
    }
    // The test `features` checks the results of addresses of these backends: with none of the backends, and with each
    // of them alone.
    for (arguments, _) in &BUILDS[..3] {
        let test = cargo(&["test", "--quiet", "--package", "tombolo", "--test", "features"], arguments)?;
        if !test.status.success() || !text(&test.stdout).contains(" 1 passed;") {
            let (arguments, output, errors) = (arguments.join(" "), text(&test.stdout), text(&test.stderr));
            wrong.push(format!("the test `features` of tombolo fails with {arguments}:\n{output}{errors}"));
        }
    }
    let metadata = cargo(&["metadata", "--no-deps", "--format-version", "1"], &[])?;
    let metadata = serde_json::from_slice(&metadata.stdout).map_err(|error| format!("cargo metadata: {error}"))?;
    wrong.extend(judge_features(&metadata));
    wrong.iter().for_each(|wrong| println!("features: {wrong}"));
    Ok(wrong.is_empty())
}

fn cargo(command: &[&str], arguments: &[&str]) -> Result<Output, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    Command::new(cargo).args(command).args(arguments).output().map_err(|error| format!("cannot run cargo: {error}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn judge_build(name: &str, success: bool, output: &str) -> Option<String> {
    let warned = output.lines().any(|line| line.contains("warning: "));
    (!success || warned).then(|| format!("cargo check {name} fails or warns:\n{output}"))
}

fn judge_tree(name: &str, tree: &str, absent: &[&str]) -> Vec<String> {
    let there: BTreeSet<&str> = tree.lines().filter_map(|line| line.split_whitespace().next()).collect();
    if !there.contains("tombolo-channel") {
        return vec![format!("cargo tree {name} does not show tombolo-channel: does this check still read it?")];
    }
    let found = absent.iter().chain(&NEVER).filter(|krate| there.contains(*krate));
    found
        .map(|krate| format!("{name}: {krate} is compiled: make it an optional dependency behind its feature"))
        .collect()
}

/// Returns a failure if the crate has a feature that [`BUILDS`] does not cover: it needs a build of its own.
fn judge_features(metadata: &serde_json::Value) -> Option<String> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let facade = packages.into_iter().find(|package| package["name"] == "tombolo");
    let features: BTreeSet<&str> = facade
        .and_then(|facade| facade["features"].as_object())
        .into_iter()
        .flatten()
        .map(|(name, _)| name.as_str())
        .collect();
    (features != BTreeSet::from(FEATURES)).then(|| {
        format!("the features of tombolo are {features:?}, this check knows {FEATURES:?}: add a build to {}", file!())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "tombolo v0.1.0 (/w)\ntombolo-channel v0.1.0 (/w)\ntombolo-domain-xen v0.1.0 (/w) (*)\n";

    #[test]
    fn canary_backend_that_is_compiled_though_off_fails() {
        assert_eq!(judge_tree("all", TREE, &[]), [""; 0]);
        let wrong = judge_tree("none", TREE, &["tombolo-domain-xen", "tokio"]);
        assert!(wrong.len() == 1 && wrong[0].contains("tombolo-domain-xen is compiled"), "{wrong:?}");
        assert_eq!(judge_tree("none", "", &[]).len(), 1);
        assert_eq!(judge_tree("all", &TREE.replace("tombolo-domain-xen", "tombolo-sockets"), &[]).len(), 1);
    }

    #[test]
    fn canary_build_that_warns_fails() {
        assert_eq!(judge_build("none", true, ""), None);
        assert!(judge_build("none", true, "crates/x/src/lib.rs:1:1: warning: unused import: `x`").is_some());
        assert!(judge_build("none", false, "").is_some());
    }

    #[test]
    fn canary_feature_that_no_build_has_fails() {
        let features = |json| serde_json::json!({ "packages": [{ "name": "tombolo", "features": json }] });
        let known = serde_json::json!({ "default": [], "tokio": [], "vm": [], "xen": [] });
        assert_eq!(judge_features(&features(known)), None);
        assert!(judge_features(&features(serde_json::json!({ "default": [], "hyperv": [] }))).is_some());
    }
}
