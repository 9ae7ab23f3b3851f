// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Xen and its tools, and the kernel for all domains, from Debian's archive.

use crate::debian::{Archive, Kernel, Which};
use crate::ensure;
use crate::error::{Context, Error, Result};
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where Debian has libraries.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// What a Xen host is made of.
#[derive(Debug)]
pub struct Packages {
    /// Xen's packages, unpacked together.
    pub root: PathBuf,
    /// The hypervisor, as QEMU boots it.
    pub hypervisor: PathBuf,
    /// The kernel of all domains, with its modules.
    pub kernel: Kernel,
    /// The same kernel, not compressed: emulation is slow at that.
    pub vmlinux: PathBuf,
}

impl Packages {
    /// Fetches what is not in the cache.
    ///
    /// # Errors
    /// No network, or this Debian has no Xen.
    pub fn get(archive: &Archive) -> Result<Self> {
        let roots = ["xen-system-amd64", "xenstore-utils", "libxen-dev", "busybox-static"];
        let wanted = |name: &str| ["xen", "libxen", "libyajl"].iter().any(|start| name.starts_with(start));
        let root = archive.packages("xen", &roots, wanted)?;
        let kernel = archive.kernel(Which::Stable, true)?;
        let hypervisor = root.join("hypervisor");
        if !hypervisor.exists() {
            let packed = find(&root.join("boot"), |name| name.starts_with("xen-") && name.ends_with(".gz"))?;
            unpack("gzip", &["-dc"], &fs::read(packed)?, &hypervisor)?;
        }
        let vmlinux = root.join(format!("vmlinux-{}", kernel.release));
        if !vmlinux.exists() {
            let image = fs::read(kernel.image())?;
            let payload = payload(&image).ok_or_else(|| Error::new("the kernel's image has no payload"))?;
            unpack("xz", &["-dc", "--single-stream"], payload, &vmlinux)?;
        }
        Ok(Self { root, hypervisor, kernel, vmlinux })
    }

    /// A program of Xen's: one of the tools that all commands stand for, else a command.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        let tools = find(&self.root.join("usr/lib"), |name| name.starts_with("xen-"))?.join("bin");
        let places = [tools, self.root.join("usr/bin"), self.root.join("usr/sbin"), self.root.join("bin")];
        let found = places.iter().map(|place| place.join(name)).find(|path| path.exists());
        found.ok_or_else(|| Error::new(format!("Xen's packages have no program {name}")))
    }

    /// A module of the kernel and what it depends on, in the order in which they have to be loaded.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn module(&self, name: &str) -> Result<Vec<PathBuf>> {
        let file = format!("{name}.ko").replace('_', "-");
        let folder = self.kernel.root.join("lib/modules").join(&self.kernel.release).join("kernel");
        let path = search(&folder, &|found| found.replace('_', "-") == file)?;
        let path = path.ok_or_else(|| Error::new(format!("the kernel has no module {name}")))?;
        let mut order = Vec::new();
        for needed in depends(&fs::read(&path)?) {
            for path in self.module(&needed)? {
                if !order.contains(&path) {
                    order.push(path);
                }
            }
        }
        order.push(path);
        Ok(order)
    }

    /// The libraries that a program wants, Xen's or this machine's.
    ///
    /// # Errors
    /// One is nowhere.
    pub fn libraries(&self, program: &Path) -> Result<BTreeSet<PathBuf>> {
        let output = Command::new("ldd").arg(program).env("LD_LIBRARY_PATH", self.library_folder()).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(!text.contains("not found"), "{} lacks a library:\n{text}", program.display());
        let paths = text.lines().filter_map(|line| line.split("=> ").nth(1)?.split(" (").next());
        Ok(paths.map(PathBuf::from).collect())
    }

    /// Where Xen's libraries are.
    #[must_use]
    pub fn library_folder(&self) -> PathBuf {
        self.root.join(LIBRARIES)
    }
}

/// The first entry of a folder whose name is right.
fn find(folder: &Path, right: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder).context(folder.display())?.flatten().map(|e| e.path()).collect();
    paths.sort();
    let name = |path: &PathBuf| path.file_name().is_some_and(|name| right(&name.to_string_lossy()));
    paths.into_iter().find(name).ok_or_else(|| Error::new(format!("{} has not what it should", folder.display())))
}

/// A file below a folder.
fn search(folder: &Path, right: &dyn Fn(&str) -> bool) -> Result<Option<PathBuf>> {
    for entry in fs::read_dir(folder).context(folder.display())? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            if let Some(found) = search(&entry.path(), right)? {
                return Ok(Some(found));
            }
        } else if right(&entry.file_name().to_string_lossy()) {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

/// The names after `depends=` in a module.
fn depends(module: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(at) = module.windows(key.len()).position(|window| window == key) else { return Vec::new() };
    let value = module[at + key.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(value).split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// The compressed kernel in an image that boots by itself; its header says where.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let number = |at: usize| image.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
    let setup = (usize::from(*image.get(0x1f1)?) + 1) * 512;
    let start = setup + usize::try_from(number(0x248)?).ok()?;
    image.get(start..start + usize::try_from(number(0x24c)?).ok()?)
}

/// Unpacks bytes into a file, which is there when it is whole.
fn unpack(tool: &str, args: &[&str], bytes: &[u8], to: &Path) -> Result<()> {
    let part = to.with_extension("part");
    let mut command = Command::new(tool);
    command.args(args).stdin(Stdio::piped()).stdout(fs::File::create(&part)?);
    let mut child = command.spawn().context(format!("no {tool}"))?;
    // A tool that stops before the end has what it wanted.
    _ = child.stdin.take().map(|mut stdin| stdin.write_all(bytes));
    let status = child.wait()?;
    ensure!(status.success(), "{tool} into {}: {status}", to.display());
    Ok(fs::rename(part, to)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_say_what_they_need() {
        assert_eq!(depends(b"x\0depends=a,b-c\0y"), ["a", "b-c"]);
        assert!(depends(b"x\0depends=\0y").is_empty() && depends(b"").is_empty());
    }

    #[test]
    fn payload_of_an_image_that_is_none() {
        assert_eq!(payload(b"short"), None);
    }
}
