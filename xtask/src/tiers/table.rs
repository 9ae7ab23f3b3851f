// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists the tiers, the fastest first. `docs/testing.md` describes them in words.

use super::need::Need;

/// A tier: a command under a time limit.
pub struct Tier {
    pub name: &'static str,
    /// Assumptions that its tests may make.
    pub assumes: &'static str,
    /// The command's words, separated by blanks. No shell runs it.
    pub command: &'static str,
    pub env: &'static [(&'static str, &'static str)],
    /// Time limit in minutes, builds included. It is far above the usual time and only ends a hang.
    pub limit: u64,
    /// Time limit of the long form in minutes, if there is one. A tier without one runs in a long run as in a short
    /// run.
    pub long: Option<u64>,
    pub gate: Gate,
    pub runs: Runs,
    pub needs: Option<Need>,
    /// Words between the command and the names of the failed tests, if these are run once more, alone. None for tiers
    /// that look for faults that may be rare.
    pub again: Option<&'static str>,
}

/// What a tier must show besides a successful exit code.
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
    /// In a long run, and when named.
    Long,
    /// Only when named: another tier covers it, or it never ends by itself.
    Asked,
}

const BASE: Tier = Tier {
    name: "",
    assumes: "nothing",
    command: "",
    env: &[],
    limit: 10,
    long: None,
    gate: Gate::Tests,
    runs: Runs::Always,
    needs: None,
    again: None,
};

/// All tiers in the order in which they run.
pub const TIERS: &[Tier] = &[
    Tier {
        name: "format",
        command: "cargo fmt --all --check",
        gate: Gate::ExitCode,
        needs: Some(Need::Rustfmt),
        ..BASE
    },
    Tier {
        name: "lint",
        command: "cargo clippy --workspace --all-targets --all-features -- -D warnings",
        gate: Gate::ExitCode,
        needs: Some(Need::Clippy),
        ..BASE
    },
    Tier { name: "rules", command: "cargo run --quiet --package xtask -- check", gate: Gate::ExitCode, ..BASE },
    Tier {
        name: "features",
        command: "cargo run --quiet --package xtask -- features",
        gate: Gate::ExitCode,
        runs: Runs::Long,
        ..BASE
    },
    Tier {
        name: "unit",
        command: "cargo test --workspace --all-features --no-fail-fast --lib --bins",
        long: Some(20),
        ..BASE
    },
    Tier {
        name: "doc",
        command: "cargo doc --workspace --all-features --no-deps",
        env: &[("RUSTDOCFLAGS", "-D warnings")],
        gate: Gate::ExitCode,
        ..BASE
    },
    Tier {
        name: "workspaces",
        assumes: "clippy; crates from the registry",
        command: "cargo run --quiet --package xtask -- workspaces",
        gate: Gate::ExitCode,
        runs: Runs::Long,
        needs: Some(Need::Clippy),
        ..BASE
    },
    Tier {
        name: "integration",
        assumes: "Linux, no privileges, loopback; root and TAP devices for `tombolo net`, else skipped",
        command: "cargo test --workspace --all-features --exclude tombolo-preload --no-fail-fast --test *",
        env: &[("TOMBOLO_TEST_BUILD", "--workspace --all-features")],
        limit: 30,
        again: Some("-- --exact"),
        ..BASE
    },
    Tier { name: "examples", command: "cargo test --workspace --all-features --doc", ..BASE },
    Tier {
        name: "loom",
        assumes: "nothing: the model checker replaces threads and atomics",
        command: "cargo test --release -p tombolo-ring --test loom",
        env: &[("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom")],
        long: Some(60),
        gate: Gate::Canaries,
        ..BASE
    },
    Tier {
        name: "hostile",
        assumes: "threads, time for deadlines",
        command: "cargo test --release --workspace --all-features --test hostile",
        long: Some(60),
        ..BASE
    },
    Tier {
        name: "stress",
        assumes: "two CPUs; membarrier, else skipped",
        command: "cargo test --release --workspace --all-features --no-fail-fast --test stress",
        runs: Runs::Long,
        long: Some(60),
        again: Some("-- --exact"),
        ..BASE
    },
    Tier {
        name: "crash",
        assumes: "Linux, processes to kill",
        command: "cargo test --release --workspace --all-features --test crash",
        long: Some(120),
        ..BASE
    },
    Tier {
        name: "sockets",
        assumes: "root for network namespaces; Python, socat, iperf3, Redis, nginx and more, else skipped",
        command: "cargo test --release -p tombolo-preload --no-fail-fast --test *",
        limit: 15,
        long: Some(90),
        gate: Gate::Canaries,
        again: Some("-- --exact"),
        ..BASE
    },
    Tier {
        name: "sockets-checked",
        assumes: "as `sockets`; with overflow checks and debug assertions",
        command: "cargo test -p tombolo-preload --no-fail-fast --test *",
        limit: 30,
        gate: Gate::Canaries,
        runs: Runs::Long,
        again: Some("-- --exact"),
        ..BASE
    },
    Tier {
        name: "sockets-inside",
        assumes: "Linux, no privileges; `integration` runs the same with overflow checks",
        command: "cargo test --release -p tombolo-sockets --no-fail-fast --test *",
        runs: Runs::Long,
        again: Some("-- --exact"),
        ..BASE
    },
    Tier {
        name: "asan",
        assumes: "a nightly toolchain with AddressSanitizer",
        command: "cargo +nightly test --target host-tuple -p tombolo-ring --test hostile",
        env: &[("RUSTFLAGS", "-Zsanitizer=address --cfg tombolo_plain_copy"), ("CARGO_TARGET_DIR", "target/asan")],
        long: Some(120),
        runs: Runs::Long,
        needs: Some(Need::Asan),
        ..BASE
    },
    Tier {
        name: "miri",
        assumes: "a nightly toolchain with Miri",
        command: "cargo run --quiet --package xtask -- miri",
        limit: 20,
        gate: Gate::Canaries,
        runs: Runs::Long,
        needs: Some(Need::Miri),
        ..BASE
    },
    Tier {
        name: "mutants",
        assumes: "cargo-mutants, git",
        command: "cargo run --quiet --package xtask -- mutants",
        limit: 150,
        gate: Gate::Canaries,
        runs: Runs::Long,
        needs: Some(Need::Mutants),
        ..BASE
    },
    Tier {
        name: "vm",
        assumes: "QEMU, gcc and make, Debian's archive or what was cached of it",
        command: "cargo run --quiet --release --package tombolo-e2e --bin vm",
        limit: 22,
        long: Some(60),
        gate: Gate::Canaries,
        needs: Some(Need::Vm),
        again: Some("--"),
        ..BASE
    },
    Tier {
        name: "xen",
        assumes: "QEMU, xz, strip; Debian's archive or what was cached of it",
        command: "cargo run --quiet --release --package tombolo-e2e --bin xen",
        limit: 20,
        long: Some(90),
        gate: Gate::Canaries,
        needs: Some(Need::Xen),
        again: Some("--"),
        ..BASE
    },
    Tier {
        name: "conformance",
        assumes: "Linux, no privileges; part of `integration`",
        command: "cargo test --workspace --all-features --test conformance",
        runs: Runs::Asked,
        ..BASE
    },
    Tier {
        name: "memcheck",
        assumes: "Linux, a C compiler with AddressSanitizer, valgrind; part of `integration`",
        command: "cargo test -p tombolo-capi --test memcheck",
        gate: Gate::Canaries,
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
        for tier in TIERS {
            assert!(!tier.name.is_empty() && tier.command.starts_with("cargo "), "{}", tier.name);
            assert!(tier.long.is_none_or(|long| long >= tier.limit), "{}", tier.name);
        }
    }

    #[test]
    fn tiers_that_look_for_what_is_rare_have_one_try() {
        for tier in TIERS.iter().filter(|tier| tier.again.is_some()) {
            assert!(
                !["loom", "hostile", "crash", "asan", "miri", "mutants", "fuzz"].contains(&tier.name),
                "{}",
                tier.name
            );
            // Tests after the first failure would never run.
            let stops = tier.command.contains(" test ") && !tier.command.contains("--no-fail-fast");
            assert!(!stops, "{} stops at the first failure", tier.name);
        }
    }

    #[test]
    fn own_flags_come_with_an_own_target_folder() {
        for tier in TIERS.iter().filter(|tier| tier.env.iter().any(|(key, _)| *key == "RUSTFLAGS")) {
            assert!(tier.env.iter().any(|(key, _)| *key == "CARGO_TARGET_DIR"), "{} would rebuild all", tier.name);
        }
    }
}
