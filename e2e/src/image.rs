// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An initramfs: files under their names in the guest, as a cpio archive in memory. It is not compressed, because
//! unpacking is what emulation is slow at.

use crate::error::{Context, Result};
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// The files of a guest.
#[derive(Debug, Default)]
pub struct Image {
    bytes: Vec<u8>,
    inodes: u32,
    folders: BTreeSet<String>,
}

impl Image {
    /// An image with this very program as `/init` and `/agent`, with the libraries that it uses.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn with_agent() -> Result<Self> {
        let mut image = Self::default();
        for folder in ["proc", "sys", "dev", "tmp", "run"] {
            image.add_folder(folder);
        }
        image.add("agent", Path::new("/proc/self/exe"))?;
        image.add_link("init", "agent");
        // What is mapped into this process is what its copy in the guest will want, at the same paths.
        let maps = fs::read_to_string("/proc/self/maps")?;
        let libraries: BTreeSet<&str> = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).collect();
        for library in libraries.into_iter().filter(|path| path.contains(".so")) {
            image.add(library.trim_start_matches('/'), Path::new(library))?;
            if let Some(name) = library.rsplit('/').next().filter(|name| name.starts_with("ld-linux")) {
                image.add_link(&format!("lib64/{name}"), library);
            }
        }
        image.add_link("lib", "usr/lib");
        Ok(image)
    }

    /// Adds a file of the host, executable.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn add(&mut self, name: &str, from: &Path) -> Result<()> {
        let bytes = fs::read(from).context(from.display())?;
        self.add_parents(name);
        self.entry(name, PROGRAM, &bytes);
        Ok(())
    }

    /// Adds a file with a text.
    pub fn add_text(&mut self, name: &str, text: &str) {
        self.add_parents(name);
        self.entry(name, PROGRAM, text.as_bytes());
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
    /// There is no memory for it.
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

    /// One entry in the "new ASCII" form: thirteen fields of eight hexadecimal digits, name, content, each padded to 4.
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

#[cfg(test)]
mod tests {
    use super::*;

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
