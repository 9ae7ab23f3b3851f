// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that is all there, all zeros, and sealed at the right moment (B-10).

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals};

use crate::host::mapped::Mapped;

/// A link's memory: a region for each end, and what rings an end that is on the host.
#[derive(Debug)]
pub struct Regions {
    /// The regions, by the side that owns them, for their owners.
    pub own: [Arc<OwnedFd>; 2],
    /// The same for the other end: open for reading alone.
    pub readonly: [Arc<OwnedFd>; 2],
    /// Rung by a machine for programs of the host.
    pub doorbell: Option<Arc<OwnedFd>>,
    /// What this broker writes of it, by the side whose it is, once that is mapped: it takes long where there is much of it.
    pub mapped: [Option<Mapped>; 2],
    /// No program of the host has it but those that this broker knows of; once it is out of use and they let go, none has.
    pub is_known: bool,
}

impl Regions {
    /// Of two regions, as [`create`] makes them.
    ///
    /// # Errors
    /// They cannot be opened once more.
    pub fn new(own: [OwnedFd; 2], doorbell: Option<OwnedFd>) -> io::Result<Self> {
        let [Ok(a), Ok(b)] = own.each_ref().map(readonly) else { return Err(io::ErrorKind::NotFound.into()) };
        Ok(Self {
            own: own.map(Arc::new),
            readonly: [Arc::new(a), Arc::new(b)],
            doorbell: doorbell.map(Arc::new),
            mapped: [None, None],
            is_known: true,
        })
    }

    /// From safe keeping; none if something is missing. Who got it from an earlier broker this one does not know.
    #[must_use]
    pub fn from_descriptors(descriptors: Vec<OwnedFd>) -> Option<Self> {
        let mut all = descriptors.into_iter();
        let own = [all.next()?, all.next()?];
        let regions = Self::new(own, all.next()).ok().filter(|_| all.next().is_none())?;
        Some(Self { is_known: false, ..regions })
    }

    /// For safe keeping.
    #[must_use]
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.own.iter().chain(&self.doorbell).map(|fd| fd.as_fd()).collect()
    }
}

/// The same memory, for reading alone.
fn readonly(memory: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

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

/// The same for a device: nobody seals it further, so that its QEMU cannot keep the host from writing it.
///
/// # Errors
/// No memory, or no descriptor, is to be had.
pub fn create_device(name: &str) -> io::Result<OwnedFd> {
    let memory = create(name, tombolo_control::DEVICE_LEN)?;
    fcntl_add_seals(&memory, SealFlags::SEAL)?;
    Ok(memory)
}

/// Two regions for a link; the ends that are `local` map their own part later, and more than once.
///
/// # Errors
/// No memory, or no descriptor, is to be had.
pub fn create_pair(number: u32, ends: &[String; 2], size: u64, local: [bool; 2]) -> io::Result<Regions> {
    let make = |side: usize| {
        let region = create(&format!("tombolo-{number}-{}", ends[side]), size)?;
        if local[side] {
            seal_as_it_is(&region)?;
        }
        io::Result::Ok(region)
    };
    let doorbell = if local.contains(&true) { Some(super::eventfd::event()?) } else { None };
    Regions::new([make(0)?, make(1)?], doorbell)
}

/// No new mapping will ever write it; those that are there go on.
///
/// # Errors
/// What the kernel says.
pub fn seal_against_writing(memory: impl AsFd) -> io::Result<()> {
    Ok(fcntl_add_seals(memory, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?)
}

/// No further seal: for memory that programs of the host write, each with a mapping of its own. What keeps others from
/// writing it is that they have it open for reading, and may not open it otherwise unless they are its owner or root.
///
/// # Errors
/// What the kernel says.
pub fn seal_as_it_is(memory: impl AsFd) -> io::Result<()> {
    rustix::fs::fchmod(&memory, Mode::from_raw_mode(0o644))?;
    Ok(fcntl_add_seals(memory, SealFlags::SEAL)?)
}

/// Frees the pages of a region of the host, which its programs might keep by a mapping or a descriptor that nobody can
/// take from them (B-11). A region that a QEMU wrote is sealed, and its pages are there until the last program lets go.
///
/// # Errors
/// What the kernel says.
pub fn free(memory: impl AsFd) -> io::Result<()> {
    let len = u64::try_from(rustix::fs::fstat(&memory)?.st_size).map_err(io::Error::other)?;
    Ok(rustix::fs::fallocate(&memory, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, len)?)
}

/// Drops memory beside this thread: there may be much of it.
pub(crate) fn drop_aside(memory: impl Send + 'static) {
    tokio::task::spawn_blocking(move || drop(memory));
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
    fn b9_memory_of_a_device_cannot_be_sealed_against_its_host() {
        let memory = create_device("test").unwrap();
        for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
            assert_eq!(fcntl_add_seals(&memory, seal), Err(rustix::io::Errno::PERM));
        }
        assert_eq!(rustix::io::pwrite(&memory, &[1], 0), Ok(1));
    }

    #[test]
    fn b10_region_of_the_host_is_read_by_the_other_end_and_not_written() {
        let region = || create("test", 64 << 10).unwrap();
        let (a, b) = (region(), region());
        seal_as_it_is(&a).unwrap();
        let regions = Regions::new([a, b], None).unwrap();
        assert_eq!(rustix::io::pwrite(&regions.readonly[0], &[1], 0), Err(rustix::io::Errno::BADF));
        assert_eq!(rustix::io::pwrite(&regions.own[0], &[1], 0), Ok(1));
        assert_eq!(rustix::fs::fstat(&regions.own[0]).unwrap().st_mode & 0o777, 0o644);
        assert!(fcntl_add_seals(&regions.own[0], SealFlags::WRITE).is_err());
        assert_eq!(regions.descriptors().len(), 2);
        // A program keeps it for ever: its pages go all the same.
        let kept = regions.own[0].try_clone().unwrap();
        free(&regions.own[0]).unwrap();
        assert_eq!(rustix::fs::fstat(&kept).unwrap().st_blocks, 0);
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
