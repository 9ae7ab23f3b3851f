// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Creates memory that is zeroed and fully allocated, and seals it at the right moment (B-10).

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals};

use crate::host::mapped::Mapped;

/// Memory of a link: a region for each side, and the eventfd that notifies a side on the host.
#[derive(Debug)]
pub struct Regions {
    /// Regions for their owners, by the side that owns them.
    pub own: [Arc<OwnedFd>; 2],
    /// The same regions for the other side, open for reading alone.
    pub readonly: [Arc<OwnedFd>; 2],
    /// Eventfd through which a machine notifies programs of the host.
    pub doorbell: Option<Arc<OwnedFd>>,
    /// Mappings of the regions that this broker writes, by the side that owns them, once they are made: mapping much
    /// memory takes long.
    pub mapped: [Option<Mapped>; 2],
    /// Whether this broker knows all programs of the host that have the memory. Once it is retired and they release it,
    /// no program has it.
    pub is_known: bool,
}

impl Regions {
    /// Wraps two regions that [`create`] made.
    ///
    /// # Errors
    /// The regions cannot be opened once more.
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

    /// Restores regions from what the descriptor store kept; none if something is missing. This broker does not know
    /// who got them from an earlier one.
    #[must_use]
    pub fn from_descriptors(descriptors: Vec<OwnedFd>) -> Option<Self> {
        let mut all = descriptors.into_iter();
        let own = [all.next()?, all.next()?];
        let regions = Self::new(own, all.next()).ok().filter(|_| all.next().is_none())?;
        Some(Self { is_known: false, ..regions })
    }

    /// Returns the descriptors for the descriptor store.
    #[must_use]
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.own.iter().chain(&self.doorbell).map(|fd| fd.as_fd()).collect()
    }
}

/// Opens the same memory for reading alone.
fn readonly(memory: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Creates `len` bytes of zeroed and allocated memory, whose length nobody can change.
///
/// # Errors
/// No memory or no descriptor is available.
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

/// Creates the memory of a device. Nobody can seal it further, so that its QEMU cannot keep the host from writing it.
///
/// # Errors
/// No memory or no descriptor is available.
pub fn create_device(name: &str) -> io::Result<OwnedFd> {
    let memory = create(name, tombolo_control::DEVICE_LEN)?;
    fcntl_add_seals(&memory, SealFlags::SEAL)?;
    Ok(memory)
}

/// Creates two regions for a link. The sides that are `local` map their own memory later, and more than once.
///
/// # Errors
/// No memory or no descriptor is available.
pub fn create_pair(number: u32, ends: &[String; 2], size: u64, local: [bool; 2]) -> io::Result<Regions> {
    let make = |side: usize| {
        let region = create(&format!("tombolo-{number}-{}", ends[side]), size)?;
        if local[side] {
            seal_as_it_is(&region)?;
        }
        io::Result::Ok(region)
    };
    let doorbell = if local.contains(&true) { Some(tombolo_os::event::eventfd(0)?) } else { None };
    Regions::new([make(0)?, make(1)?], doorbell)
}

/// Seals memory against writing by new mappings. Existing mappings can still write it.
///
/// # Errors
/// The error of the kernel.
pub fn seal_against_writing(memory: impl AsFd) -> io::Result<()> {
    Ok(fcntl_add_seals(memory, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?)
}

/// Seals memory against further seals. Programs of the host write this memory, each through a mapping of its own.
/// Others cannot write it because they have it open for reading, and only its owner and root may open it otherwise.
///
/// # Errors
/// The error of the kernel.
pub fn seal_as_it_is(memory: impl AsFd) -> io::Result<()> {
    rustix::fs::fchmod(&memory, Mode::from_raw_mode(0o644))?;
    Ok(fcntl_add_seals(memory, SealFlags::SEAL)?)
}

/// Frees the pages of a region of the host. Otherwise programs might keep the pages by a mapping or a descriptor that
/// nobody can take from them (B-11). A region that a QEMU wrote is sealed, and its pages stay until the last program
/// releases it.
///
/// # Errors
/// The error of the kernel.
pub fn free(memory: impl AsFd) -> io::Result<()> {
    let len = u64::try_from(rustix::fs::fstat(&memory)?.st_size).map_err(io::Error::other)?;
    Ok(rustix::fs::fallocate(&memory, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, len)?)
}

/// Drops memory on another thread, because there may be much of it.
pub(crate) fn drop_in_background(memory: impl Send + 'static) {
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
        // A program keeps the descriptor for ever: the memory's pages are freed all the same.
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
