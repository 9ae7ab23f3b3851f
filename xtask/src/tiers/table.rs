// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The tiers, fastest first. `docs/testing.md` says the same in words.

use super::need::Need;

/// One tier: a command under a time limit.
pub struct Tier {
    pub name: &'static str,
    /// What its tests may assume.
    pub assumes: &'static str,
    /// Split at blanks; no shell.
    pub command: &'static str,
    pub env: &'static [(&'static str, &'static str)],
    /// The limit of the short and of the long form, builds included: far beyond the usual time, against a hang.
    pub minutes: (u64, u64),
    pub gate: Gate,
    pub runs: Runs,
    pub needs: Option<Need>,
}

/// What a tier must show besides a good exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Nothing.
    ExitCode,
    /// At least one test ran.
    Tests,
    /// At least one test ran, and at least one of them was a canary.
    Canaries,
}

/// When a tier is part of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runs {
    Always,
    /// Only if it is named: another tier covers it, or it has no natural end.
    Asked,
}

const BASE: Tier = Tier {
    name: "",
    assumes: "nothing",
    command: "",
    env: &[],
    minutes: (10, 20),
    gate: Gate::Tests,
    runs: Runs::Always,
    needs: None,
};

/// All tiers in the order in which they run.
pub const TIERS: [Tier; 13] = [
    Tier {
        name: "format",
        command: "cargo fmt --all --check",
        gate: Gate::ExitCode,
        needs: Some(Need::Rustfmt),
        ..BASE
    },
    Tier {
        name: "lint",
        command: "cargo clippy --workspace --all-targets -- -D warnings",
        gate: Gate::ExitCode,
        needs: Some(Need::Clippy),
        ..BASE
    },
    Tier { name: "rules", command: "cargo run --quiet --package xtask -- check", gate: Gate::ExitCode, ..BASE },
    Tier { name: "unit", command: "cargo test --workspace --lib --bins", ..BASE },
    Tier {
        name: "integration",
        assumes: "Linux, no privileges, loopback",
        command: "cargo test --workspace --test *",
        minutes: (15, 60),
        ..BASE
    },
    Tier { name: "doc", command: "cargo test --workspace --doc", ..BASE },
    Tier {
        name: "loom",
        assumes: "nothing: the model checker replaces threads and atomics",
        command: "cargo test --release -p tombolo-ring --test loom",
        env: &[("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom")],
        minutes: (10, 60),
        gate: Gate::Canaries,
        ..BASE
    },
    Tier {
        name: "hostile",
        assumes: "threads, time for deadlines",
        command: "cargo test --release -p tombolo-ring --test hostile",
        minutes: (10, 60),
        ..BASE
    },
    Tier {
        name: "stress",
        assumes: "two CPUs; membarrier, else skipped",
        command: "cargo test --release -p tombolo-ring --test stress",
        minutes: (10, 60),
        ..BASE
    },
    Tier {
        name: "crash",
        assumes: "Linux, processes to kill",
        command: "cargo test --release -p tombolo-channel --test crash",
        minutes: (10, 120),
        ..BASE
    },
    Tier {
        name: "asan",
        assumes: "a nightly toolchain with AddressSanitizer",
        command: "cargo +nightly test --target host-tuple -p tombolo-ring --test hostile",
        env: &[("RUSTFLAGS", "-Zsanitizer=address --cfg tombolo_plain_copy"), ("CARGO_TARGET_DIR", "target/asan")],
        minutes: (10, 120),
        needs: Some(Need::Asan),
        ..BASE
    },
    Tier {
        name: "conformance",
        assumes: "Linux, no privileges; part of `integration`",
        command: "cargo test --workspace --test conformance",
        runs: Runs::Asked,
        ..BASE
    },
    Tier {
        name: "fuzz",
        assumes: "a nightly toolchain, cargo-fuzz",
        command: "cargo +nightly fuzz run hostile -- -max_total_time=300",
        gate: Gate::ExitCode,
        runs: Runs::Asked,
        needs: Some(Need::CargoFuzz),
        ..BASE
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn tiers_are_complete_and_named_once() {
        let names: BTreeSet<&str> = TIERS.iter().map(|tier| tier.name).collect();
        assert_eq!(names.len(), TIERS.len());
        for tier in &TIERS {
            assert!(!tier.name.is_empty() && tier.command.starts_with("cargo "), "{}", tier.name);
            assert!(tier.minutes.0 <= tier.minutes.1, "{}", tier.name);
        }
    }

    #[test]
    fn own_flags_come_with_an_own_target_folder() {
        for tier in TIERS.iter().filter(|tier| tier.env.iter().any(|(key, _)| *key == "RUSTFLAGS")) {
            assert!(tier.env.iter().any(|(key, _)| *key == "CARGO_TARGET_DIR"), "{} would rebuild all", tier.name);
        }
    }
}
