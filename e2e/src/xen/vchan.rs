// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One program of C, linked with libtombolo-vchan and with Debian's libxenvchan.

use super::images::Extra;
use super::packages::Packages;
use crate::ensure;
use crate::error::{Context, Result};
use crate::image::LIBRARIES;
use crate::programs::Programs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program with our library, and with the original.
pub const OURS: &str = "vchan-ours";
/// See [`OURS`].
pub const ORIGINAL: &str = "vchan-original";

/// The library that programs load.
const SHARED: &str = "libtombolo-vchan.so.0.1";

/// What a Rust library needs of the system.
const SYSTEM: [&str; 7] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

/// Builds both.
///
/// # Errors
/// There is no C compiler, or they do not build.
pub fn programs(packages: &Packages) -> Result<Vec<Extra>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let archive = Programs::archive("tombolo-vchan", "libtombolo_vchan.a")?;
    let libraries = packages.root.join("usr/lib/x86_64-linux-gnu");
    let ours = build(OURS, &archive, |cc| {
        cc.arg("-I").arg(here.join("../include/vchan")).arg(&archive).arg("-Wl,--gc-sections").args(SYSTEM);
    })?;
    let original = build(ORIGINAL, &archive, |cc| {
        cc.arg("-isystem").arg(packages.root.join("usr/include")).arg("-L").arg(&libraries);
        cc.arg(format!("-Wl,-rpath-link,{}", libraries.display())).arg("-lxenvchan");
    })?;
    Ok(vec![(format!("bin/{OURS}"), ours), (format!("bin/{ORIGINAL}"), original)])
}

/// The library as programs load it, in the place where they look for it.
///
/// # Errors
/// It does not build.
pub fn shared() -> Result<Extra> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let archive = Programs::archive("tombolo-vchan", "libtombolo_vchan.a")?;
    let to = archive.with_file_name(SHARED);
    let mut cc = compiler();
    // As `make install` does.
    cc.arg("-shared").arg("-s").arg("-o").arg(&to).arg(format!("-Wl,-soname,{SHARED}"));
    cc.arg(format!("-Wl,--version-script={}", here.join("../crates/vchan/symbols.map").display()));
    cc.arg("-Wl,--whole-archive").arg(&archive).args(["-Wl,--no-whole-archive", "-Wl,--gc-sections"]).args(SYSTEM);
    run(cc, SHARED)?;
    Ok((format!("{LIBRARIES}/{SHARED}"), to))
}

fn compiler() -> Command {
    Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
}

fn run(mut cc: Command, name: &str) -> Result<()> {
    let output = cc.output().context("no C compiler")?;
    ensure!(output.status.success(), "{name} does not build: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Compiles the program, to a file beside `archive`.
fn build(name: &str, archive: &Path, link: impl FnOnce(&mut Command)) -> Result<PathBuf> {
    let to = archive.with_file_name(name);
    let mut cc = compiler();
    cc.args(["-O2", "-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-s", "-o"]).arg(&to);
    cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/xen/vchan/peer.c"));
    link(&mut cc);
    run(cc, name)?;
    Ok(to)
}
