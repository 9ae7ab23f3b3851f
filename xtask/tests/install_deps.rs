// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `tools/install-deps.sh` installs for each group, on a machine with nothing but an `apt-get` that records its
//! arguments.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A folder for programs, and nothing else.
struct Bare(PathBuf);

impl Bare {
    fn new(test: &str) -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(test);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let bare = Self(folder);
        bare.program("id", "echo 0");
        bare.program("apt-get", &format!("echo \"$@\" >> {}", bare.0.join("asked").display()));
        bare
    }

    fn program(&self, name: &str, does: &str) {
        let path = self.0.join(name);
        fs::write(&path, format!("#!/bin/sh\n{does}\n")).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    }

    fn run(&self, words: &[&str]) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/install-deps.sh");
        Command::new("/bin/sh").arg(script).args(words).env_clear().env("PATH", &self.0).output().unwrap()
    }

    /// Packages that were installed.
    fn installed(&self, words: &[&str]) -> Vec<String> {
        let _ = fs::remove_file(self.0.join("asked"));
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {output:?}");
        let asked = fs::read_to_string(self.0.join("asked")).unwrap_or_default();
        let install = asked.lines().find(|line| line.starts_with("install ")).unwrap_or_default();
        install
            .split_whitespace()
            .skip(1)
            .filter(|word| !word.contains('-') || word.len() > 2)
            .map(String::from)
            .collect()
    }
}

#[test]
fn each_group_gets_what_it_needs_and_no_databases() {
    let bare = Bare::new("groups");
    let has = |all: &[String], package: &str| all.iter().any(|it| it == package);
    for (group, needs) in [
        ("demo", &["gcc", "iproute2"][..]),
        ("vm", &["gcc", "qemu-system-x86", "make", "xz-utils"]),
        ("xen", &["gcc", "qemu-system-x86", "binutils"]),
        ("sockets", &["gcc", "python3", "iperf3"]),
        ("debug", &["gcc", "qemu-system-x86", "flex", "bison", "bc"]),
    ] {
        let all = bare.installed(&["--for", group]);
        for need in needs {
            assert!(has(&all, need), "{group} needs {need}: {all:?}");
        }
        for other in ["postgresql", "nginx-light", "openmpi-bin", "default-jdk-headless", "openssh-server", "valgrind"]
        {
            assert!(!has(&all, other), "{group} does without {other}: {all:?}");
        }
    }
    let all = bare.installed(&[]);
    for need in ["gcc", "postgresql", "nginx-light", "valgrind"] {
        assert!(has(&all, need), "the tests need {need}: {all:?}");
    }
}

#[test]
fn what_is_there_is_not_installed_and_a_failure_is_told() {
    let bare = Bare::new("there");
    bare.program("cc", "");
    bare.program("ip", "");
    assert_eq!(bare.installed(&["--for", "demo"]), [""; 0]);
    fs::remove_file(bare.0.join("ip")).unwrap();
    bare.program("apt-get", "exit 1");
    let output = bare.run(&["--for", "demo"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("going on without iproute2"), "{said}");
}

#[test]
fn group_that_there_is_not_is_refused_with_those_that_there_are() {
    let bare = Bare::new("unknown");
    for words in [&["--for", "vms"][..], &["--for"]] {
        let output = bare.run(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(2) && said.contains("demo, vm, xen, sockets, net or debug"),
            "{words:?}: {said}"
        );
        assert!(!bare.0.join("asked").exists());
    }
}
