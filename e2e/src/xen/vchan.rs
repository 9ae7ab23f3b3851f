// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One C program, linked with libtombolo-vchan and with Debian's libxenvchan.

use super::packages::Packages;
use crate::error::Result;
use crate::image::{Extra, LIBRARIES};
use crate::vchan::{self, SYSTEM, here};

/// Name of the program with Tombolo's library; [`ORIGINAL`] is the one with the original.
pub const OURS: &str = "vchan-ours";
/// Name of the program with the original library; see [`OURS`].
pub const ORIGINAL: &str = "vchan-original";

/// Name of the library that programs load.
const SHARED: &str = "libtombolo-vchan.so.0.1";

/// Builds both programs.
///
/// # Errors
/// There is no C compiler, or the programs do not build.
pub fn programs(packages: &Packages) -> Result<Vec<Extra>> {
    let source = here("src/xen/vchan/peer.c");
    let libraries = packages.root.join("usr/lib/x86_64-linux-gnu");
    let ours = vchan::with_ours(OURS, &source, &[])?;
    let original = vchan::compile(ORIGINAL, &source, |cc| {
        cc.arg("-isystem").arg(packages.root.join("usr/include")).arg("-L").arg(&libraries);
        cc.arg(format!("-Wl,-rpath-link,{}", libraries.display())).arg("-lxenvchan");
    })?;
    Ok(vec![(format!("bin/{OURS}"), ours), (format!("bin/{ORIGINAL}"), original)])
}

/// Builds the library that programs load, for the place where they look for it.
///
/// # Errors
/// The library does not build.
pub fn shared() -> Result<Extra> {
    let archive = vchan::archive()?;
    let to = archive.with_file_name(SHARED);
    let mut cc = vchan::compiler();
    // The same command as that of `make install`.
    cc.arg("-shared").arg("-s").arg("-o").arg(&to).arg(format!("-Wl,-soname,{SHARED}"));
    cc.arg(format!("-Wl,--version-script={}", here("../crates/compat/vchan/symbols.map").display()));
    cc.arg("-Wl,--whole-archive").arg(&archive).args(["-Wl,--no-whole-archive", "-Wl,--gc-sections"]).args(SYSTEM);
    vchan::run(cc, SHARED)?;
    Ok((format!("{LIBRARIES}/{SHARED}"), to))
}
