// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One program of C, linked with libtombolo-vchan and with Debian's libxenvchan.

use super::packages::Packages;
use crate::error::Result;
use crate::image::{Extra, LIBRARIES};
use crate::vchan::{self, SYSTEM, here};

/// The program with our library, and with the original.
pub const OURS: &str = "vchan-ours";
/// See [`OURS`].
pub const ORIGINAL: &str = "vchan-original";

/// The library that programs load.
const SHARED: &str = "libtombolo-vchan.so.0.1";

/// Builds both.
///
/// # Errors
/// There is no C compiler, or they do not build.
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

/// The library as programs load it, in the place where they look for it.
///
/// # Errors
/// It does not build.
pub fn shared() -> Result<Extra> {
    let archive = vchan::archive()?;
    let to = archive.with_file_name(SHARED);
    let mut cc = vchan::compiler();
    // As `make install` does.
    cc.arg("-shared").arg("-s").arg("-o").arg(&to).arg(format!("-Wl,-soname,{SHARED}"));
    cc.arg(format!("-Wl,--version-script={}", here("../crates/compat/vchan/symbols.map").display()));
    cc.arg("-Wl,--whole-archive").arg(&archive).args(["-Wl,--no-whole-archive", "-Wl,--gc-sections"]).args(SYSTEM);
    vchan::run(cc, SHARED)?;
    Ok((format!("{LIBRARIES}/{SHARED}"), to))
}
