// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds the kernel module and treats warnings as errors.

use crate::debian::Kernel;
use crate::error::{Context, Error, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of the module.
pub const NAME: &str = "tombolo_ivshmem";

/// Returns the folder with the module's source.
#[must_use]
pub fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernel/ivshmem")
}

/// Returns the folder for what is built for guests.
///
/// # Errors
/// The folder cannot be made.
pub fn target() -> Result<PathBuf> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/kernel");
    fs::create_dir_all(&target)?;
    Ok(target.canonicalize()?)
}

/// Builds a copy of the source at `source` for `kernel` in `target/kernel`, and returns the module's path. `flags` are
/// passed to make.
///
/// # Errors
/// The build failed or warned; the error has its messages.
pub fn build(source: &Path, kernel: &Kernel, flags: &[&str]) -> Result<PathBuf> {
    let target = target()?.join(&kernel.release);
    copy(source, &target)?;
    let mut make = Command::new("make");
    make.arg("-C").arg(kernel.headers()).arg(format!("M={}", target.display()));
    // Builds without BTF, which needs the kernel's own types, and its headers lack them.
    make.args(flags).args(["modules", "W=1", "KCFLAGS=-Werror", "CONFIG_DEBUG_INFO_BTF_MODULES="]).env("LC_ALL", "C");
    let output = make.output().context("no make")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let warned: Vec<&str> = said.lines().filter(|line| is_warning(line)).collect();
    match output.status.success() && warned.is_empty() {
        true => Ok(target.join(format!("{NAME}.ko"))),
        false => Err(Error::new(format!("the module for {} does not build cleanly: {said}", kernel.release))),
    }
}

/// Ignores two kinds of messages: the compilers sometimes differ by a security update, and there is no vmlinux for BTF.
fn is_warning(line: &str) -> bool {
    let harmless = ["the compiler differs", "The kernel was built by", "You are using", "Skipping BTF generation"];
    !line.trim().is_empty() && !harmless.iter().any(|text| line.contains(text))
}

/// Copies a folder, except for files that are already the same.
///
/// # Errors
/// A file cannot be read or written.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).context(from.display())? {
        let entry = entry?;
        let place = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &place)?;
        } else if fs::read(&place).ok() != Some(fs::read(entry.path())?) {
            fs::copy(entry.path(), &place)?;
        }
    }
    Ok(())
}
