// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is no member of the workspace, because of what it needs, builds without warnings too.

use std::process::Command;

/// Where these are.
const APART: [&str; 2] = ["bench/compare", "fuzz"];
/// Built by a case of the tier `xen`, which has what it is linked with.
#[cfg(test)]
const WITH_XEN: &str = "bench/libxenvchan";

/// Builds them; true if nothing is wrong.
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
