// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds the benchmark that knows libxenvchan: it is a workspace of its own, built against Debian's package.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::image::Extra;
use tombolo_e2e::xen::packages::Packages;
use tombolo_e2e::xen::vchan;

/// Name of that benchmark in the domUs.
pub const BENCH: &str = "bench-libxenvchan";

/// Returns the benchmark, and the library that it loads.
pub fn programs(packages: &Packages) -> Result<Vec<Extra>> {
    Ok(vec![(format!("bin/{BENCH}"), build(packages)?), vchan::shared()?])
}

/// Builds the benchmark with libxenvchan, against Debian's package.
fn build(packages: &Packages) -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let target = root.join("target");
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--release", "--quiet", "--locked", "--manifest-path"]);
    build.arg(root.join("bench/libxenvchan/Cargo.toml")).arg("--target-dir").arg(&target);
    let status = build.env("XEN_ROOT", &packages.root).stdin(Stdio::null()).status().context("no cargo")?;
    ensure!(status.success(), "{BENCH} does not build: {status}");
    Ok(target.join("release").join(BENCH))
}
