// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that the workspaces outside the main one, which have special requirements, build without warnings too.

use std::process::Command;

/// Their folders.
const APART: [&str; 2] = ["bench/compare", "fuzz"];
/// Workspace that a case of the tier `xen` builds, because the library that it links with is there.
#[cfg(test)]
const WITH_XEN: &str = "bench/libxenvchan";

/// Builds them. Returns whether all builds passed.
pub fn run() -> Result<bool, String> {
    let mut all = true;
    for folder in APART {
        println!("{folder}");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut clippy = Command::new(cargo);
        clippy.args(["clippy", "--quiet", "--locked", "--all-targets", "--manifest-path"]);
        clippy.arg(format!("{folder}/Cargo.toml")).args(["--", "-D", "warnings"]);
        all &= clippy.status().map_err(|error| format!("cannot run cargo: {error}"))?.success();
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;
    use std::{collections::BTreeSet, path::Path};

    #[test]
    fn each_workspace_of_its_own_is_built_by_somebody() {
        let tree = Tree::load(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))).unwrap();
        let locks = tree.files(&["/Cargo.lock"]);
        let found: BTreeSet<_> = locks.map(|(path, _)| path.trim_end_matches("/Cargo.lock")).collect();
        assert_eq!(found, APART.into_iter().chain([WITH_XEN]).collect());
    }
}
