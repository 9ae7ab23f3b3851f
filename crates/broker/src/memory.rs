// SPDX-License-Identifier: Apache-2.0 OR MIT
//! B-10. Memory that is all there, all zeros, and sealed at the right moment.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fcntl_add_seals};

/// `len` zeroed and allocated bytes that nobody can make shorter or longer.
///
/// # Errors
/// No memory, or no descriptor, is to be had.
pub fn create(name: &str, len: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know NOEXEC_SEAL.
        Err(rustix::io::Errno::INVAL) => rustix::fs::memfd_create(name, flags)?,
        other => other?,
    };
    rustix::fs::fallocate(&memory, FallocateFlags::empty(), 0, len)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(memory)
}

/// No new mapping will ever write it; those that are there go on.
///
/// # Errors
/// What the kernel says.
pub fn seal_against_writing(memory: impl AsFd) -> io::Result<()> {
    Ok(fcntl_add_seals(memory, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?)
}

/// No further seal: for memory that the host itself writes.
///
/// # Errors
/// What the kernel says.
pub fn seal_as_it_is(memory: impl AsFd) -> io::Result<()> {
    Ok(fcntl_add_seals(memory, SealFlags::SEAL)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b10_memory_is_zeroed_and_all_there_and_keeps_its_length() {
        let memory = create("test", 64 << 10).unwrap();
        let stat = rustix::fs::fstat(&memory).unwrap();
        assert_eq!((stat.st_size, stat.st_blocks * 512), (64 << 10, 64 << 10));
        let mut bytes = vec![1; 64 << 10];
        rustix::io::pread(&memory, &mut bytes[..], 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        for len in [0, 4096, 128 << 10] {
            assert_eq!(rustix::fs::ftruncate(&memory, len), Err(rustix::io::Errno::PERM));
        }
    }

    #[test]
    fn b10_memory_once_sealed_is_written_by_nobody_new() {
        let memory = create("test", 64 << 10).unwrap();
        assert_eq!(rustix::io::pwrite(&memory, &[1], 0), Ok(1));
        seal_against_writing(&memory).unwrap();
        assert_eq!(rustix::io::pwrite(&memory, &[1], 0), Err(rustix::io::Errno::PERM));
        assert_eq!(fcntl_add_seals(&memory, SealFlags::WRITE), Err(rustix::io::Errno::PERM));
    }
}
