// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Xen and its tools, and the kernel for all domains, from Debian's archive.

use crate::debian::{Archive, Kernel, Which};
use crate::ensure;
use crate::error::{Context, Error, Result};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Parts of a Xen host.
#[derive(Debug)]
pub struct Packages {
    /// Folder with Xen's packages, unpacked together.
    pub root: PathBuf,
    /// Hypervisor, in the form that QEMU boots.
    pub hypervisor: PathBuf,
    /// Kernel of all domains, with its modules.
    pub kernel: Kernel,
    /// The same kernel uncompressed, because emulation is slow at unpacking.
    pub vmlinux: PathBuf,
}

impl Packages {
    /// Fetches what is missing in the cache.
    ///
    /// # Errors
    /// The network is missing, or this Debian has no Xen.
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

    /// Returns the path of a Xen program: one of the tools that all commands stand for, or else a command.
    ///
    /// # Errors
    /// No program has that name.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        let tools = find(&self.root.join("usr/lib"), |name| name.starts_with("xen-"))?.join("bin");
        let places = [tools, self.root.join("usr/bin"), self.root.join("usr/sbin"), self.root.join("bin")];
        let found = places.iter().map(|place| place.join(name)).find(|path| path.exists());
        found.ok_or_else(|| Error::new(format!("Xen's packages have no program {name}")))
    }
}

/// Returns the first entry of a folder whose name `right` accepts.
fn find(folder: &Path, right: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).context(folder.display())?.flatten().map(|entry| entry.path());
    let is_right = |path: &PathBuf| path.file_name().is_some_and(|name| right(&name.to_string_lossy()));
    let found = entries.filter(is_right).min();
    found.ok_or_else(|| Error::new(format!("{} has not what it should", folder.display())))
}

/// Returns the compressed kernel in a bootable image, at the place that the image's header names.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let number = |at: usize| image.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
    let setup = (usize::from(*image.get(0x1f1)?) + 1) * 512;
    let start = setup + usize::try_from(number(0x248)?).ok()?;
    image.get(start..start + usize::try_from(number(0x24c)?).ok()?)
}

/// Unpacks bytes into a file, which appears only once it is complete.
fn unpack(tool: &str, args: &[&str], bytes: &[u8], to: &Path) -> Result<()> {
    let part = to.with_extension(format!("part-{}", std::process::id()));
    let mut command = Command::new(tool);
    command.args(args).stdin(Stdio::piped()).stdout(File::create(&part)?);
    let mut child = command.spawn().context(format!("no {tool}"))?;
    // A tool that stops before the end has read what it needed.
    _ = child.stdin.take().map(|mut stdin| stdin.write_all(bytes));
    let status = child.wait()?;
    ensure!(status.success(), "{tool} into {}: {status}", to.display());
    Ok(fs::rename(part, to)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_of_an_image_is_where_its_header_says_and_nowhere_else() {
        let mut image = vec![0; 0x300 + 1024];
        image[0x1f1] = 1;
        image[0x248] = 16;
        image[0x24c] = 4;
        image[1024 + 16..1024 + 20].copy_from_slice(b"kern");
        assert_eq!(payload(&image), Some(&b"kern"[..]));
        assert_eq!(payload(&image[..1024 + 19]), None);
        assert_eq!(payload(b"short"), None);
    }
}
