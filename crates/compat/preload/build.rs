// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The library is never unloaded: calls of the program's are in it, and handlers of signals.
#![forbid(unsafe_code)]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
