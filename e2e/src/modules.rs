// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds modules of a guest's kernel, with those that they need.

use crate::debian::Kernel;
use crate::error::{Context, Error, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Modules for a network card of the kind that QEMU is fastest with.
pub const NETWORK: &[&str] = &["virtio_pci", "virtio_net"];

/// Modules that cases can do without: kernels with their own checks lack them.
const OPTIONAL: &[&str] = &["bridge"];

/// Returns the files of the modules `names` and of all that they need, in an order in which they can be loaded.
///
/// # Errors
/// The kernel's package has no such module.
pub fn of(kernel: &Kernel, names: &[&str]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    find(&kernel.modules(), &mut files)?;
    let mut chosen = Vec::new();
    // Built-in modules need no file.
    let builtin = fs::read_to_string(kernel.modules().join("../modules.builtin")).unwrap_or_default();
    let within: Vec<String> = builtin.lines().map(|line| named(Path::new(line))).collect();
    let is_there = |name: &str| files.iter().any(|file| named(file) == name);
    let names = names.iter().filter(|name| !within.contains(&name.replace('-', "_")));
    let names = names.filter(|name| !OPTIONAL.contains(name) || is_there(name));
    names.into_iter().try_for_each(|name| choose(name, &files, &mut chosen))?;
    Ok(chosen)
}

fn choose(name: &str, files: &[PathBuf], chosen: &mut Vec<PathBuf>) -> Result<()> {
    let file = files.iter().find(|file| named(file) == name.replace('-', "_"));
    let file = file.ok_or_else(|| Error::new(format!("the kernel has no module {name}")))?;
    if !chosen.contains(file) {
        for need in needs(&content(file)?) {
            choose(&need, files, chosen)?;
        }
        chosen.push(file.clone());
    }
    Ok(())
}

/// Returns the name of a module, which is its file's name up to the first dot.
fn named(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.split('.').next().unwrap_or_default().replace('-', "_")
}

/// Returns the content of a module, unpacked if necessary.
///
/// # Errors
/// The file cannot be read, or there is no tool to unpack it.
pub fn content(file: &Path) -> Result<Vec<u8>> {
    if file.extension().is_some_and(|end| end == "ko") {
        return fs::read(file).context(file.display());
    }
    let output = Command::new("xz").arg("-dc").arg(file).output().context("no xz (xz-utils)")?;
    if output.status.success() { Ok(output.stdout) } else { Err(Error::new(format!("xz -dc {}", file.display()))) }
}

/// Returns the modules that a module lists as its needs.
fn needs(module: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(at) = module.windows(key.len()).position(|bytes| bytes == key) else { return Vec::new() };
    let list: Vec<u8> = module[at + key.len()..].iter().copied().take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&list).split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn find(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).context(folder.display())? {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, found)?;
        } else if path.to_string_lossy().contains(".ko") {
            found.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_are_read_from_a_modules_own_words() {
        assert_eq!(needs(b"x\0license=GPL\0depends=virtio,net_failover\0name=y\0"), ["virtio", "net_failover"]);
        assert!(needs(b"\0depends=\0").is_empty() && needs(b"").is_empty());
        assert_eq!(named(Path::new("/a/virtio-rng.ko.xz")), "virtio_rng");
    }
}
