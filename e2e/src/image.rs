// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds an initramfs: files under their names in the guest, as a cpio archive in memory. The archive is not
//! compressed, because emulation is slow at unpacking.

use crate::error::{Context, Error, Result};
use crate::programs;
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
/// Folder in which Debian keeps libraries.
pub const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// A program for an image: its path in the image, and its path on the host.
pub type Extra = (String, PathBuf);

/// The files of a guest.
#[derive(Debug, Default)]
pub struct Image {
    bytes: Vec<u8>,
    inodes: u32,
    folders: BTreeSet<String>,
    files: BTreeSet<String>,
}

impl Image {
    /// Makes an image with the running program as `/init` and `/agent`, and with the libraries that it uses.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn with_agent() -> Result<Self> {
        let mut image = Self::default();
        for folder in ["proc", "sys", "dev", "tmp", "run"] {
            image.add_folder(folder);
        }
        image.add_link("lib", "usr/lib");
        image.add_link("lib64", "usr/lib64");
        image.add_program("agent", &programs::stripped(&std::env::current_exe()?)?)?;
        image.add_link("init", "agent");
        Ok(image)
    }

    /// Adds a program of the host and the libraries that it uses, at the paths where it looks for them.
    ///
    /// # Errors
    /// A file cannot be read, or a library is missing.
    pub fn add_program(&mut self, name: &str, from: &Path) -> Result<()> {
        self.add_packaged(name, from, Path::new("/"))
    }

    /// Adds a program of a package that is unpacked, with its libraries, in the folder `root`.
    ///
    /// # Errors
    /// As [`add_program`](Self::add_program).
    pub fn add_packaged(&mut self, name: &str, from: &Path, root: &Path) -> Result<()> {
        self.add(name, from)?;
        // The dynamic loader itself lists what it would load.
        let mut command = Command::new(from);
        command.env("LD_TRACE_LOADED_OBJECTS", "1").env("LD_LIBRARY_PATH", root.join(LIBRARIES));
        let output = command.output().context(from.display())?;
        for library in libraries(&String::from_utf8_lossy(&output.stdout))? {
            // In Debian, /lib and /lib64 are links.
            let place = Path::new("/").join(Path::new(&library).strip_prefix(root).unwrap_or(Path::new(&library)));
            let place = place.strip_prefix("/usr").or_else(|_| place.strip_prefix("/")).context(&library)?;
            self.add(&format!("usr/{}", place.display()), Path::new(&library))?;
        }
        Ok(())
    }

    /// Adds busybox, and links for its commands in the folder `bin`.
    ///
    /// # Errors
    /// busybox cannot be read.
    pub fn add_busybox(&mut self, from: &Path) -> Result<()> {
        self.add("bin/busybox", from)?;
        let output = Command::new(from).arg("--list").output().context(from.display())?;
        let list = String::from_utf8_lossy(&output.stdout).into_owned();
        list.lines()
            .filter(|name| *name != "busybox")
            .for_each(|name| self.add_link(&format!("bin/{name}"), "busybox"));
        Ok(())
    }

    /// Adds a file of the host and makes it executable.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn add(&mut self, name: &str, from: &Path) -> Result<()> {
        if !self.files.contains(name) {
            self.add_bytes(name, &fs::read(from).context(from.display())?);
        }
        Ok(())
    }

    /// Adds an executable file with this content, unless a file of that name exists.
    pub fn add_bytes(&mut self, name: &str, content: &[u8]) {
        if self.files.insert(name.to_owned()) {
            self.add_parents(name);
            self.entry(name, PROGRAM, content);
        }
    }

    /// Adds an empty folder.
    pub fn add_empty(&mut self, name: &str) {
        self.add_parents(name);
        self.add_folder(name);
    }

    /// Adds a symbolic link.
    pub fn add_link(&mut self, name: &str, to: &str) {
        self.add_parents(name);
        self.entry(name, LINK, to.as_bytes());
    }

    /// Ends the image, and returns a descriptor of it.
    ///
    /// # Errors
    /// There is no memory for the image.
    pub fn seal(mut self) -> Result<OwnedFd> {
        self.entry("TRAILER!!!", 0, b"");
        let fd = memfd_create("initramfs", MemfdFlags::CLOEXEC)?;
        let mut file = File::from(fd);
        file.write_all(&self.bytes)?;
        Ok(file.into())
    }

    fn add_parents(&mut self, name: &str) {
        for (at, _) in name.match_indices('/') {
            self.add_folder(&name[..at]);
        }
    }

    fn add_folder(&mut self, name: &str) {
        if self.folders.insert(name.to_owned()) {
            self.entry(name, FOLDER, b"");
        }
    }

    /// Adds one entry in the "new ASCII" form: thirteen fields of eight hexadecimal digits, the name and the content,
    /// each padded to 4 bytes.
    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.inodes += 1;
        let size = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        let links = if mode == FOLDER { 2 } else { 1 };
        let fields = [self.inodes, mode, 0, 0, links, 0, size(content.len()), 0, 0, 0, 0, size(name.len() + 1), 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// Returns the paths in the dynamic loader's trace: `NAME => PATH (ADDRESS)`, or `PATH (ADDRESS)` for the loader
/// itself.
fn libraries(trace: &str) -> Result<Vec<String>> {
    let mut paths = Vec::new();
    for line in trace.lines().map(str::trim) {
        let place = line.rsplit("=> ").next().unwrap_or(line);
        match place.split_once(" (") {
            Some((path, _)) if path.starts_with('/') => paths.push(path.to_owned()),
            None => return Err(Error::new(format!("the dynamic loader says `{line}`"))),
            Some(_) => {} // Mapped by the kernel itself.
        }
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_a_trace_are_its_paths_and_a_missing_one_is_told() {
        let trace = "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x7f)\n\t/lib64/ld.so.2 (0x7f)\n";
        assert_eq!(libraries(trace).unwrap(), ["/lib/x/libc.so.6", "/lib64/ld.so.2"]);
        assert!(libraries("\tlibfoo.so => not found\n").is_err());
    }

    #[test]
    fn entries_are_padded_and_folders_come_once_and_first() {
        let mut image = Image::default();
        image.add_link("a/b/c", "x");
        image.add_link("a/b/d", "y");
        let text = String::from_utf8(image.bytes.clone()).unwrap();
        assert_eq!(image.bytes.len() % 4, 0);
        assert_eq!(text.matches("070701").count(), 4);
        assert!(text.find("a/b\0").unwrap() < text.find("a/b/c\0").unwrap());
    }
}
