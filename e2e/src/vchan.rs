// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds C programs with libtombolo-vchan in them.

use crate::ensure;
use crate::error::{Context, Result};
use crate::image::Extra;
use crate::programs::Programs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of a program that tries every function, in Xen's spelling.
pub const XENS: &str = "vchan-apart-xen";
/// The same program in Qubes' spelling.
pub const QUBES: &str = "vchan-apart-qubes";
/// Last line that both ends print.
pub const TRIED: &str = "every function of this spelling did what its header says";

/// System libraries that a Rust library needs.
pub(crate) const SYSTEM: [&str; 7] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

/// Builds [`XENS`] and [`QUBES`].
///
/// # Errors
/// There is no C compiler, or the programs do not build.
pub fn apart() -> Result<Vec<Extra>> {
    let source = here("../crates/compat/vchan/tests/c/apart.c");
    let build =
        |name: &str, flags: &[&str]| -> Result<Extra> { Ok((format!("bin/{name}"), with_ours(name, &source, flags)?)) };
    Ok(vec![build(XENS, &[])?, build(QUBES, &["-DQUBES"])?])
}

/// Returns the shell command that starts one end of these programs, with a map of the domains' places.
#[must_use]
pub fn tries(program: &str, map: &str, role: &str, peer: u16, own: u16, many: u16) -> String {
    format!(
        "echo '{map}' >/tmp/{program}-{role}.conf; \
         TOMBOLO_VCHAN_CONF=/tmp/{program}-{role}.conf exec {program} {role} {peer} {own} {many}"
    )
}

/// Compiles a program and links it with Tombolo's library.
///
/// # Errors
/// There is no C compiler, or the program does not build.
pub fn with_ours(name: &str, source: &Path, flags: &[&str]) -> Result<PathBuf> {
    let archive = archive()?;
    compile(name, source, |cc| {
        cc.args(flags).arg("-I").arg(here("../include/vchan")).arg(&archive).arg("-Wl,--gc-sections").args(SYSTEM);
    })
}

/// Builds Tombolo's library and returns its path.
///
/// # Errors
/// The library does not build.
pub fn archive() -> Result<PathBuf> {
    Programs::library("tombolo-vchan", "libtombolo_vchan.a")
}

/// Returns the absolute path of a file that is named relative to this crate's folder.
#[must_use]
pub fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

pub(crate) fn compiler() -> Command {
    Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
}

pub(crate) fn run(mut cc: Command, name: &str) -> Result<()> {
    let output = cc.output().context("no C compiler")?;
    ensure!(output.status.success(), "{name} does not build: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Compiles a program to a file beside Tombolo's library.
///
/// # Errors
/// There is no C compiler, or the program does not build.
pub fn compile(name: &str, source: &Path, link: impl FnOnce(&mut Command)) -> Result<PathBuf> {
    let to = archive()?.with_file_name(name);
    let mut cc = compiler();
    cc.args(["-O2", "-std=c11", "-D_DEFAULT_SOURCE", "-pthread", "-Wall", "-Wextra", "-Werror", "-s", "-o"]).arg(&to);
    cc.arg(source);
    link(&mut cc);
    run(cc, name)?;
    Ok(to)
}
