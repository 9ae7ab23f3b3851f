// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Describes what a tier or a test needs beyond a Rust toolchain, and what happens without it.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Stdio};

/// Need of a whole tier.
#[derive(Debug, Clone, Copy)]
pub enum Need {
    Rustfmt,
    Clippy,
    Asan,
    CargoFuzz,
    Miri,
    Mutants,
    Vm,
    Xen,
}

impl Need {
    /// Returns the name in `TOMBOLO_REQUIRE`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rustfmt => "rustfmt",
            Self::Clippy => "clippy",
            Self::Asan => "asan",
            Self::CargoFuzz => "fuzz",
            Self::Miri => "miri",
            Self::Mutants => "mutants",
            Self::Vm => "vm",
            Self::Xen => "xen",
        }
    }

    /// Returns what is missing and how to get it, or none if nothing is.
    pub fn missing(self) -> Option<String> {
        let (found, advice) = match self {
            Self::Rustfmt => (answers(&["fmt", "--version"]), "no rustfmt: `rustup component add rustfmt`"),
            Self::Clippy => (answers(&["clippy", "--version"]), "no clippy: `rustup component add clippy`"),
            Self::Asan => (
                asan_runtime(),
                "no nightly toolchain with AddressSanitizer: `rustup toolchain install nightly --profile minimal`",
            ),
            Self::CargoFuzz => {
                (answers(&["+nightly", "fuzz", "--version"]), "no cargo-fuzz: `cargo install cargo-fuzz`")
            }
            Self::Miri => {
                (answers(&["+nightly", "miri", "--version"]), "no Miri: `rustup +nightly component add miri rust-src`")
            }
            Self::Mutants => {
                (answers(&["mutants", "--version"]), "no cargo-mutants: `cargo install cargo-mutants --locked`")
            }
            Self::Vm => (runs("qemu-system-x86_64"), "no QEMU: `apt-get install qemu-system-x86`"),
            Self::Xen => (
                runs("qemu-system-x86_64") && runs("xz"),
                "no QEMU or no xz: `apt-get install qemu-system-x86 xz-utils`",
            ),
        };
        (!found).then(|| advice.to_owned())
    }
}

fn answers(args: &[&str]) -> bool {
    succeeds(Command::new("cargo").args(args))
}

fn runs(program: &str) -> bool {
    succeeds(Command::new(program).arg("--version"))
}

fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn asan_runtime() -> bool {
    let Ok(output) = Command::new("rustc").args(["+nightly", "--print", "target-libdir"]).output() else {
        return false;
    };
    let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.into_iter().any(|name| name.to_string_lossy().ends_with("rt.asan.a"))
}

/// Needs that this machine is known to meet, as in `TOMBOLO_REQUIRE=asan,userns`. A skip for lack of one of them is a
/// failure.
#[derive(Debug, Clone, Default)]
pub struct Required(BTreeSet<String>);

impl Required {
    /// Reads the needs from the environment.
    pub fn from_env() -> Self {
        Self::parse(&std::env::var("TOMBOLO_REQUIRE").unwrap_or_default())
    }

    /// Parses names separated by commas; `all` stands for every name.
    pub fn parse(names: &str) -> Self {
        Self(names.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect())
    }

    /// Returns whether this need must be met.
    pub fn contains(&self, need: &str) -> bool {
        self.0.contains(need) || self.0.contains("all")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn required_names_are_split_at_commas() {
        let required = Required::parse("asan, userns,");
        assert!(required.contains("asan") && required.contains("userns"));
        assert!(!required.contains("") && !required.contains("vm"));
        assert!(Required::parse("all").contains("vm"));
        assert!(!Required::parse("").contains("vm"));
    }
}
