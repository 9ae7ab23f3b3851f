// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Maps memory that the broker writes and that untrusted processes have open as well.
//!
//! A write to a file waits for the file's lock. An untrusted process can hold that lock for as long as it likes, by
//! writing to the same file from memory whose pages never come (FUSE, userfaultfd). A thread that waits for the lock
//! cannot even be killed. A store to a mapping takes no lock, and neither does a read of a memfd.

use std::{
    io,
    os::fd::AsFd,
    sync::atomic::{Ordering, fence},
};

use tombolo_mem::CommonSegment;

/// Mapping of a whole memfd, whose seals keep it from shrinking. Clones share the mapping.
#[derive(Clone, Debug)]
pub struct Mapped(CommonSegment);

impl Mapped {
    /// Maps `memory`.
    ///
    /// # Errors
    /// The memory is sealed against writing, or the kernel cannot map it.
    pub fn new(memory: impl AsFd) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&memory)?;
        let len = usize::try_from(stat.st_size).map_err(io::Error::other)?;
        Ok(Self(CommonSegment::map(memory.as_fd(), len, true, ())?))
    }

    fn check(&self, at: u64, len: usize) -> io::Result<usize> {
        let at = usize::try_from(at).map_err(io::Error::other)?;
        match at.checked_add(len) {
            Some(end) if end <= self.0.len() => Ok(at),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Copies the bytes that are at an offset now. What is loaded afterwards is no older.
    ///
    /// # Errors
    /// The range is not within the memory.
    pub fn load(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.copy_out(self.check(at, bytes.len())?, bytes);
        // ORDER Acquire: with the release of the writer; what it wrote before these bytes is seen by later loads.
        fence(Ordering::Acquire);
        Ok(())
    }

    /// Writes bytes at an offset, after all that was written before.
    ///
    /// # Errors
    /// The bytes do not fit into the memory.
    pub fn store(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let at = self.check(at, bytes.len())?;
        // ORDER Release: with the acquire of the other side; a reader that sees these bytes sees what was written
        // before them.
        fence(Ordering::Release);
        self.0.copy_in(at, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::memory;

    #[test]
    fn b3_what_is_stored_is_in_the_file_and_nothing_is_outside_it() {
        let memory = memory::create("test", 64 << 10).unwrap();
        let mapped = Mapped::new(&memory).unwrap();
        mapped.store((64 << 10) - 2, &[7, 8]).unwrap();
        let mut bytes = [0; 2];
        rustix::io::pread(&memory, &mut bytes[..], (64 << 10) - 2).unwrap();
        assert_eq!(bytes, [7, 8]);
        rustix::io::pwrite(&memory, &[9], 5).unwrap();
        mapped.load(4, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 9]);
        for at in [(64 << 10) - 1, 64 << 10, u64::MAX] {
            assert!(mapped.store(at, &[1, 2]).is_err() && mapped.load(at, &mut bytes).is_err(), "{at}");
        }
        memory::seal_against_writing(&memory).unwrap();
        assert_eq!(Mapped::new(&memory).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
