// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets a hostile peer write its own memory.

use std::os::fd::OwnedFd;

use tombolo_domain::{Error, Result};

/// Writes a segment behind its owner's back, as its owner could: header, words and data, at any time, from any thread.
///
/// The kernel does the writes, so they may tear, also within a word, as a hostile peer's may. A victim must cope with
/// that; the *owner* must not be using its slices meanwhile (see [`tombolo_mem::create_forgeable`]).
#[derive(Debug)]
pub struct Forger {
    memory: OwnedFd,
    len: usize,
}

impl Forger {
    pub(super) fn new(memory: &OwnedFd, len: usize) -> Result<Self> {
        let memory = memory.try_clone().map_err(|error| Error::os("dup", error))?;
        Ok(Self { memory, len })
    }

    /// Returns the bytes of the segment.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `false`: a segment has at least a page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads the bytes at `offset`.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        self.check(offset, to.len());
        let read = rustix::io::pread(&self.memory, &mut *to, offset as u64);
        assert_eq!(read, Ok(to.len()), "a memfd reads in one piece");
    }

    /// Overwrites the bytes at `offset`.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    pub fn write(&self, offset: usize, from: &[u8]) {
        self.check(offset, from.len());
        let written = rustix::io::pwrite(&self.memory, from, offset as u64);
        assert_eq!(written, Ok(from.len()), "a memfd is written in one piece");
    }

    /// Overwrites the word at `offset`.
    ///
    /// # Panics
    /// If the range reaches beyond the end.
    pub fn store(&self, offset: usize, word: u64) {
        self.write(offset, &word.to_le_bytes());
    }

    fn check(&self, offset: usize, len: usize) {
        assert!(offset <= self.len && len <= self.len - offset, "{len} bytes at {offset:#x} of {:#x}", self.len);
    }
}
