// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compiles the few lines of C between Rust and libxenvchan, whose structure has bit fields. `XEN_ROOT` is where
//! Debian's package libxen-dev and what it depends on are unpacked; by default they are installed.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=src/vchan.c");
    println!("cargo::rerun-if-env-changed=XEN_ROOT");
    let root = env::var("XEN_ROOT").unwrap_or_else(|_| "/".into());
    let (root, out) = (Path::new(&root), env::var("OUT_DIR").expect("cargo sets it"));
    let object = Path::new(&out).join("vchan.o");
    let mut cc = Command::new(env::var("CC").unwrap_or_else(|_| "cc".into()));
    cc.args(["-O2", "-Wall", "-Wextra", "-Werror", "-c", "src/vchan.c", "-o"]).arg(&object);
    cc.arg("-isystem").arg(root.join("usr/include"));
    assert!(cc.status().is_ok_and(|status| status.success()), "vchan.c does not compile: is there a libxen-dev in {root:?}?");
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    println!("cargo::rustc-link-arg={}", object.display());
    println!("cargo::rustc-link-arg=-L{}", libraries.display());
    println!("cargo::rustc-link-arg=-Wl,-rpath-link,{}", libraries.display());
    println!("cargo::rustc-link-arg=-lxenvchan");
}
