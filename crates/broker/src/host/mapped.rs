// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that strangers have open as well, and that the broker writes.
//!
//! To write to a file is to wait for its lock. A stranger who writes to the same file from memory whose pages never come (FUSE,
//! userfaultfd) holds that lock for as long as it likes, and who waits for it cannot even be killed. A store to a mapping
//! takes no lock. To read a memfd takes none either.

use std::{
    io,
    os::fd::AsFd,
    sync::atomic::{Ordering, fence},
};

use tombolo_mem::CommonSegment;

/// All of a memfd, which its seals keep from getting shorter. Copies are the same mapping.
#[derive(Clone, Debug)]
pub struct Mapped(CommonSegment);

impl Mapped {
    /// Maps `memory`.
    ///
    /// # Errors
    /// It is sealed against writing, or what the kernel says.
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

    /// Copies what stands at an offset now; what is loaded afterwards is no older.
    ///
    /// # Errors
    /// It does not lie in the memory.
    pub fn load(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.copy_out(self.check(at, bytes.len())?, bytes);
        // ORDER Acquire: with the release of who wrote it; what it wrote before is seen by whatever is loaded next.
        fence(Ordering::Acquire);
        Ok(())
    }

    /// Writes bytes at an offset, behind all that was written before.
    ///
    /// # Errors
    /// They do not fit into the memory.
    pub fn store(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let at = self.check(at, bytes.len())?;
        // ORDER Release: with the acquire of the other side; who sees these bytes sees what came before.
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
