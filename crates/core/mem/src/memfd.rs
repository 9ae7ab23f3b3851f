// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sealed memfds: memory that its maker alone can ever write, and that nobody can take away from under a reader.
//!
//! The order is everything: map writable, *then* seal, *then* pass the descriptor on. Once `F_SEAL_FUTURE_WRITE` is set
//! no new writable mapping can be made by anyone through any path (`mprotect`, `/proc/self/fd`, a second `mmap`), while
//! the one made before goes on. See `memfd_create(2)`, "File sealing".

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{MemfdFlags, OFlags, SealFlags},
    process::{Resource, getrlimit},
};

use crate::{
    map::{Access, Mapping, can_count, count_present},
    segment::OwnSegment,
};

/// What a segment's descriptor must carry before it may be mapped.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL).union(SealFlags::FUTURE_WRITE);

/// `statfs` type of tmpfs; a hugetlbfs memfd, whose pages can fail to appear (`SIGBUS`), has another.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Makes `len` bytes of zeroed, allocated memory: the only writable mapping there will ever be, and the sealed
/// descriptor to pass on. `name` is what `/proc/PID/maps` shows.
///
/// # Errors
/// What the kernel says: no memory, a full quota, too many descriptors.
pub fn create_sealed(name: &str, len: usize) -> io::Result<(OwnSegment, OwnedFd)> {
    create(name, len, SEALS, |make| make())
}

/// As [`create_sealed`]. What `keep` gives is what is held of the descriptor, which it is to make by the call that it is given; only
/// then there is memory, which is what takes time.
///
/// # Errors
/// As [`create_sealed`], or what `keep` says.
pub fn create_sealed_kept<F: AsFd>(
    name: &str,
    len: usize,
    keep: impl FnOnce(&dyn Fn() -> io::Result<OwnedFd>) -> io::Result<F>,
) -> io::Result<(OwnSegment, F)> {
    create(name, len, SEALS, keep)
}

/// As [`create_sealed`], but `write(2)` to the descriptor is not sealed off: whoever holds it can change the bytes as
/// their owner could, which is how a test plays a lying peer. The descriptor is for the test alone; a peer maps one
/// that was opened for reading.
///
/// The owner's slices (`OwnBytes::slice_mut`) promise that nobody else writes: hold none while the test writes.
///
/// # Errors
/// As [`create_sealed`].
#[cfg(feature = "testing")]
pub fn create_forgeable(name: &str, len: usize) -> io::Result<(OwnSegment, OwnedFd)> {
    create(name, len, SEALS.difference(SealFlags::FUTURE_WRITE), |make| make())
}

fn create<F: AsFd>(
    name: &str,
    len: usize,
    seals: SealFlags,
    keep: impl FnOnce(&dyn Fn() -> io::Result<OwnedFd>) -> io::Result<F>,
) -> io::Result<(OwnSegment, F)> {
    let known = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let make = || match rustix::fs::memfd_create(name, known | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know NOEXEC_SEAL.
        Err(rustix::io::Errno::INVAL) => Ok(rustix::fs::memfd_create(name, known)?),
        made => Ok(made?),
    };
    let fd = keep(&make)?;
    // One beyond the process's limit for files would cost it a signal that ends it, be it in memory.
    if getrlimit(Resource::Fsize).current.is_some_and(|most| len as u64 > most) {
        return Err(rustix::io::Errno::FBIG.into());
    }
    fill_with_zeros(fd.as_fd(), len)?;
    let mapping = Mapping::new(fd.as_fd(), 0, len, Access::ReadWrite)?;
    rustix::fs::fcntl_add_seals(&fd, seals)?;
    Ok((OwnSegment::from_only_writable(mapping), fd))
}

/// Writes zeros to the first `len` bytes, which gives them memory now: so that want of memory is an error here and not a SIGBUS at
/// first touch. What `fallocate` gives is still to be cleared by then, a page fault for each page.
fn fill_with_zeros(fd: BorrowedFd<'_>, len: usize) -> rustix::io::Result<()> {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    let mut written = 0;
    while written < len {
        match rustix::io::pwrite(fd, &ZEROS[..ZEROS.len().min(len - written)], written as u64) {
            Ok(0) => return Err(rustix::io::Errno::NOSPC),
            Ok(n) => written += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Why a descriptor received from a peer is not taken for a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SealError {
    /// It is no memfd on tmpfs.
    NotMemory,
    /// Seals are missing: the bits that are.
    Unsealed(u32),
    /// It has no size that a segment can have.
    Size(u64),
    /// Some of its memory is not there: this many bytes of the size are.
    Sparse(u64, u64),
    /// It was opened for writing only, and cannot be mapped.
    Unreadable,
    /// Its pages may not be counted, though this process may count those of other memory.
    Uncountable,
}

/// Whether a receiver can now count the pages of a memfd, and so see every hole: Linux 6.5 and later, where no filter forbids
/// it. A filter may come while the program runs, so this is asked each time.
/// Where it cannot, memory that a peer allocated beyond the end passes for memory before it, and what is missing there
/// is allocated for whoever maps it: then only the length that is agreed to bounds that.
#[must_use]
pub fn counts_pages() -> bool {
    can_count()
}

/// Checks that `fd` is memory that can neither shrink nor be written by anyone but its maker, and says how long it is.
///
/// No call here takes the lock of the file. Its maker can hold that for ever: it writes from memory whose page never comes,
/// which older kernels wait for before they look at the seals.
///
/// # Errors
/// The first check that fails.
pub fn check_sealed(fd: BorrowedFd<'_>, max: u64) -> Result<usize, SealError> {
    // The seals first: asking them of something else fails at once, while a hostile file system may never answer the
    // other questions.
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| SealError::NotMemory)?;
    let statfs = rustix::fs::fstatfs(fd).map_err(|_| SealError::NotMemory)?;
    if statfs.f_type as u64 != TMPFS_MAGIC {
        return Err(SealError::NotMemory);
    }
    // A full write seal is as good: then not even the maker writes.
    let wanted = if seals.contains(SealFlags::WRITE) { SEALS - SealFlags::FUTURE_WRITE } else { SEALS };
    if !seals.contains(wanted) {
        return Err(SealError::Unsealed((wanted - seals).bits()));
    }
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|_| SealError::NotMemory)?;
    if flags.intersection(OFlags::RWMODE) == OFlags::WRONLY {
        return Err(SealError::Unreadable);
    }
    check_extent(fd, max)
}

/// Checks that memory which can neither shrink nor grow is of a size that is taken, and all there.
fn check_extent(fd: BorrowedFd<'_>, max: u64) -> Result<usize, SealError> {
    let stat = rustix::fs::fstat(fd).map_err(|_| SealError::NotMemory)?;
    let size = stat.st_size as u64;
    if size == 0 || size > max || size % 4096 != 0 {
        return Err(SealError::Size(size));
    }
    // Blocks may lie beyond the end and stand there for holes before it. So pages are counted as well; what the seals
    // checked above forbid is that one goes afterwards.
    let blocks = stat.st_blocks as u64 * 512;
    let present = match count_present(fd, size) {
        Some(present) => present,
        // Who can have this file's pages not counted could hide holes in it: the kernel counts for who may write a file.
        None if counts_pages() => return Err(SealError::Uncountable),
        None => size,
    };
    let allocated = blocks.min(present);
    if allocated < size {
        return Err(SealError::Sparse(allocated, size));
    }
    usize::try_from(size).map_err(|_| SealError::Size(size))
}

#[cfg(test)]
#[path = "../../../broker/tests/common/hold.rs"]
mod hold;

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, mpsc},
        time::Duration,
    };

    use super::*;
    use crate::PeerSegment;

    #[test]
    fn m7_sealed_memory_passes_its_own_check_and_cannot_be_written_by_descriptor() {
        let (segment, fd) = create_sealed("test", 8192).unwrap();
        assert_eq!(check_sealed(fd.as_fd(), 8192), Ok(8192));
        assert_eq!(check_sealed(fd.as_fd(), 4096), Err(SealError::Size(8192)));
        assert_eq!(rustix::io::pwrite(&fd, &[1], 0), Err(rustix::io::Errno::PERM));
        drop(segment);
    }

    #[test]
    fn m7_memory_with_holes_is_refused_though_as_much_is_allocated_beyond_its_end() {
        use rustix::fs::{FallocateFlags, fallocate};
        if !counts_pages() {
            use std::io::Write;
            let name = "m7_memory_with_holes_is_refused_though_as_much_is_allocated_beyond_its_end";
            let _ = writeln!(io::stderr(), "SKIP {name} (needs cachestat): Linux 6.5, and no filter that forbids it");
            return;
        }
        let len = 1 << 20;
        let faked = |there: u64| {
            let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            rustix::fs::ftruncate(&fd, len).unwrap();
            if there != 0 {
                fallocate(&fd, FallocateFlags::empty(), 0, there).unwrap();
            }
            if there != len {
                fallocate(&fd, FallocateFlags::KEEP_SIZE, len, len - there).unwrap();
            }
            rustix::fs::fcntl_add_seals(&fd, SEALS).unwrap();
            assert_eq!(rustix::fs::fstat(&fd).unwrap().st_blocks as u64 * 512, len, "the blocks alone look right");
            fd
        };
        for there in [0, 4096, len / 2, len - 4096] {
            assert_eq!(check_sealed(faked(there).as_fd(), len), Err(SealError::Sparse(there, len)));
        }
        let whole = faked(len);
        assert_eq!(check_sealed(whole.as_fd(), len), Ok(len as usize), "canary: allocated, though never touched");
        let punched = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(fallocate(&whole, punched, 0, 4096), Err(rustix::io::Errno::PERM), "and so it stays");
    }

    #[test]
    fn l5_nothing_that_a_receiver_asks_of_memory_waits_for_a_lock_that_its_maker_holds() {
        use rustix::fs::{SeekFrom, seek};
        if hold::is_missing("l5_nothing_that_a_receiver_asks_of_memory_waits_for_a_lock_that_its_maker_holds") {
            return;
        }
        const LEN: usize = 64 << 10;
        // Not sealed: newer kernels refuse to write to what is before they look for the page.
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, LEN as u64).unwrap();
        let holder = hold::Hold::lock_file(&fd);
        let (tell, told) = mpsc::channel();
        let (tell_canary, told_canary) = mpsc::channel();
        let fd = fd.as_fd();
        let (asked, canary) = std::thread::scope(|scope| {
            scope.spawn(move || {
                let sealed = check_sealed(fd, LEN as u64);
                let extent = check_extent(fd, LEN as u64);
                let mapped = PeerSegment::map(fd, LEN).map(drop).is_ok();
                tell.send((sealed, extent, mapped)).unwrap();
            });
            let asked = told.recv_timeout(Duration::from_secs(20));
            scope.spawn(move || tell_canary.send(seek(fd, SeekFrom::Hole(0)).is_ok()).unwrap());
            let canary = told_canary.recv_timeout(Duration::from_millis(200));
            // Whoever waits goes on.
            drop(holder);
            (asked, canary)
        });
        assert!(canary.is_err(), "the lock is held");
        let (sealed, extent, mapped) = asked.expect("no call waits for the lock");
        assert_eq!((sealed, extent, mapped), (Err(SealError::Unsealed(SEALS.bits())), Ok(LEN), true));
    }

    #[cfg(feature = "testing")]
    #[test]
    fn m7_forgeable_memory_is_refused_by_the_check() {
        let (_segment, fd) = create_forgeable("test", 4096).unwrap();
        assert_eq!(rustix::io::pwrite(&fd, &[1], 0), Ok(1));
        assert_eq!(check_sealed(fd.as_fd(), 4096), Err(SealError::Unsealed(SealFlags::FUTURE_WRITE.bits())));
    }

    #[test]
    fn m6_memory_is_allocated_to_its_end() {
        for len in [4096, 64 << 10, (64 << 10) + 4096, (1 << 20) + 4096] {
            let (_segment, fd) = create_sealed("test", len).unwrap();
            assert_eq!(check_sealed(fd.as_fd(), len as u64), Ok(len), "not more, and without holes");
        }
    }

    #[test]
    fn guard_goes_with_the_last_word_of_the_mapping() {
        let (_segment, fd) = create_sealed("test", 4096).unwrap();
        let guard = Arc::new(());
        let peer = PeerSegment::map_guarded(fd.as_fd(), 4096, Arc::clone(&guard)).unwrap();
        let word = peer.word(8);
        drop(peer);
        assert_eq!(Arc::strong_count(&guard), 2);
        drop(word);
        assert_eq!(Arc::strong_count(&guard), 1);
    }
}
