// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The module builds without a warning. For the kernel that guests run it did, or nothing here would run.

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
];

fn newest(rig: &mut Rig) -> Result<Verdict> {
    match rig.archive.kernel(Which::Newest, false) {
        Ok(kernel) => module::build(&module::source(), &kernel, &[]).map(|_| Verdict::Done),
        Err(why) => Ok(Verdict::Skip { need: "backports", why: why.to_string() }),
    }
}

fn sparse(rig: &mut Rig) -> Result<Verdict> {
    let there = Command::new("sparse").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if there.is_err() {
        return Ok(Verdict::Skip { need: "sparse", why: "no sparse".into() });
    }
    module::build(&module::source(), &rig.kernel, &["C=2"])?;
    Ok(Verdict::Done)
}

fn warning(rig: &mut Rig) -> Result<Verdict> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/kernel/canary-source");
    module::copy(&module::source(), &folder)?;
    let file = folder.join("vector.c");
    let text = fs::read_to_string(&file)?;
    fs::write(&file, text + "\nstatic void unused_and_proud(void)\n{\n}\n")?;
    let why = module::build(&folder, &rig.kernel, &[]).err().map(|why| why.to_string()).unwrap_or_default();
    fs::remove_dir_all(folder)?;
    ensure!(why.contains("unused_and_proud"), "the warning went unseen: {why}");
    // What the guests load is the good one.
    module::build(&module::source(), &rig.kernel, &[])?;
    Ok(Verdict::Done)
}
