// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The module builds without a warning. It did for the kernel that guests run, because otherwise nothing here would
//! run.

use super::{Case, Verdict};
use crate::rig::Rig;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use tombolo_e2e::debian::Which;
use tombolo_e2e::ensure;
use tombolo_e2e::error::Result;
use tombolo_e2e::module;

pub const CASES: &[Case] = &[
    Case { name: "module_builds_for_the_newest_kernel", run: newest },
    Case { name: "module_passes_sparse", run: sparse },
    Case { name: "build_canary_warning_fails", run: warning },
    Case { name: "build_canary_what_sparse_finds_fails", run: found_by_sparse },
    Case { name: "dkms_builds_for_linux_6_1_and_newer", run: dkms },
];

fn newest(rig: &mut Rig) -> Result<Verdict> {
    match rig.parts.archive.kernel(Which::Newest, false) {
        Ok(kernel) => module::build(&module::source(), &kernel, &[]).map(|_| Verdict::Done),
        Err(why) => Ok(Verdict::Skip { need: "backports", why: why.to_string() }),
    }
}

/// Returns a skip if there is no sparse here.
fn no_sparse() -> Option<Verdict> {
    let there = Command::new("sparse").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    there.is_err().then(|| Verdict::Skip { need: "sparse", why: "no sparse".into() })
}

fn sparse(rig: &mut Rig) -> Result<Verdict> {
    if let Some(skip) = no_sparse() {
        return Ok(skip);
    }
    module::build(&module::source(), &rig.parts.kernel, &["C=2"])?;
    Ok(Verdict::Done)
}

fn warning(rig: &mut Rig) -> Result<Verdict> {
    canary(rig, "\nstatic void unused_and_proud(void)\n{\n}\n", &[], "unused_and_proud")
}

/// Tests a fault that the compiler accepts: the code dereferences a user pointer.
fn found_by_sparse(rig: &mut Rig) -> Result<Verdict> {
    if let Some(skip) = no_sparse() {
        return Ok(skip);
    }
    let code = "\nint followed(const int __user *p);\nint followed(const int __user *p)\n{\n\treturn *p;\n}\n";
    canary(rig, code, &["C=2"], "dereference of noderef")
}

/// Checks that the module with this code at its end does not build, and that `what` is the reason.
fn canary(rig: &Rig, code: &str, flags: &[&str], what: &str) -> Result<Verdict> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/kernel/canary-source");
    module::copy(&module::source(), &folder)?;
    let file = folder.join("vector.c");
    let text = fs::read_to_string(&file)?;
    fs::write(&file, text + code)?;
    let why = module::build(&folder, &rig.parts.kernel, flags).err().map(|why| why.to_string()).unwrap_or_default();
    fs::remove_dir_all(folder)?;
    ensure!(why.contains(what), "it went unseen: {why}");
    // Restores the correct module, which the guests load.
    module::build(&module::source(), &rig.parts.kernel, &[])?;
    Ok(Verdict::Done)
}

/// DKMS is a shell script, and so is its configuration: DKMS compares a kernel's version with the pattern in it.
fn dkms(_: &mut Rig) -> Result<Verdict> {
    let pattern = format!(". {}; [[ $0 =~ $BUILD_EXCLUSIVE_KERNEL ]]", module::source().join("dkms.conf").display());
    for (version, wanted) in [
        ("5.10.0-30-amd64", false),
        ("6.0.12", false),
        ("6.1.0-56-amd64", true),
        ("6.12.95+deb12-amd64", true),
        ("7.0.1-amd64", true),
        ("10.0.0", true),
    ] {
        let taken = Command::new("bash").args(["-c", &pattern, version]).status()?;
        ensure!(taken.code() == Some(i32::from(!wanted)), "for {version} DKMS says {taken}");
    }
    Ok(Verdict::Done)
}
