// SPDX-License-Identifier: Apache-2.0 OR MIT
//! # Safety
//! A [`Mapping`] is an address range that stays mapped for as long as the value lives, because it is unmapped only in
//! `drop` and the fields are private to this module. Whether it may be written is fixed when it is made.
#![allow(unsafe_code)]

use std::{
    any::Any,
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    ptr::NonNull,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags},
};

use crate::loss::Watched;

/// A shared mapping of `len` bytes.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Entry of a mapping whose memory can be taken away. `drop` removes it before it unmaps the range.
    watched: Option<Watched>,
    /// Entry of a mapping that children made by fork do not inherit.
    forgotten: OnceLock<Forgotten>,
    /// Dropped once the range is unmapped, as fields are dropped after `drop` has run.
    guard: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: a mapping belongs to the process, not to a thread; what is done with the bytes is up to `word` and `data`.
unsafe impl Send for Mapping {}
// SAFETY: as above; the value itself is immutable.
unsafe impl Sync for Mapping {}

/// Access that a mapping permits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    ReadWrite,
    ReadOnly,
}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset` on, and fills the page tables at once.
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, len: usize, access: Access) -> io::Result<Self> {
        let prot = match access {
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
            Access::ReadOnly => ProtFlags::READ,
        };
        // SAFETY: (address) null with no MAP_FIXED lets the kernel choose a free range, so nothing of ours is replaced.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, offset) }?;
        // Populates as for reading, which maps present pages sixteen at a time, and writable where the mapping is.
        // Populating for writing (`MAP_POPULATE`) maps them one by one. Where this is impossible, pages are mapped as
        // they are used.
        // SAFETY: (range) base and len are those of the mapping just made; the advice changes no byte of it.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxPopulateRead) };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("the kernel mapped address 0"))?;
        Ok(Self { base, len, watched: None, forgotten: OnceLock::new(), guard: None })
    }

    /// Maps `len` zeroed bytes that children made by fork share.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: (address) null with no MAP_FIXED lets the kernel choose a free range.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, flags) }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("the kernel mapped address 0"))?;
        Ok(Self { base, len, watched: None, forgotten: OnceLock::new(), guard: None })
    }

    /// Maps as [`new`](Self::new) does, for memory that can be taken away.
    pub(crate) fn revocable(fd: BorrowedFd<'_>, offset: u64, len: usize, access: Access) -> io::Result<Self> {
        let mut mapping = Self::new(fd, offset, len, access)?;
        // SAFETY: (range) just mapped; `drop` removes the entry before it unmaps.
        let watched = unsafe { Watched::new(mapping.base.addr().get(), len, access == Access::ReadWrite) }?;
        mapping.watched = Some(watched);
        Ok(mapping)
    }

    /// Returns whether the memory was taken away and an access has found that: zeros then replace it. Bytes read before
    /// a call that returns false were there.
    pub(crate) fn is_lost(&self) -> bool {
        self.watched.as_ref().is_some_and(Watched::is_lost)
    }

    /// Returns whether the memory can be taken away.
    pub(crate) fn is_revocable(&self) -> bool {
        self.watched.is_some()
    }

    /// Keeps `guard` until the range is unmapped.
    pub(crate) fn guarded(mut self, guard: impl Any + Send + Sync) -> Self {
        self.guard = Some(Box::new(guard));
        self
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Keeps this mapping out of children made by fork, as a hypervisor's foreign mappings are.
    pub(crate) fn forget_in_children(&self) -> io::Result<()> {
        // SAFETY: (range) base and len are those of a live mapping; the advice changes only what a child inherits.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxDontFork) }?;
        if self.forgotten.get().is_none() {
            let _ = self.forgotten.set(Forgotten::new(self.base.addr().get(), self.len)?);
        }
        Ok(())
    }
}

/// Largest number of mappings in one process that its children do not inherit.
const FORGOTTEN_MAX: usize = 8192;

/// Address range of one of them. Has no lock, because another thread may hold one while this one forks.
struct Range {
    /// Start of the range. 0: the entry is free; 1: it is being filled.
    base: AtomicUsize,
    len: AtomicUsize,
}

static RANGES: [Range; FORGOTTEN_MAX] =
    [const { Range { base: AtomicUsize::new(0), len: AtomicUsize::new(0) } }; FORGOTTEN_MAX];

/// Number of table entries that were ever used. A child examines these: for most processes none.
static RANGES_USED: AtomicUsize = AtomicUsize::new(0);

/// Place of a range in the table until this is dropped.
#[derive(Debug)]
struct Forgotten {
    at: usize,
    /// Process that has the range.
    process: u32,
}

impl Forgotten {
    fn new(base: usize, len: usize) -> io::Result<Self> {
        let is_free = |range: &Range| range.base.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let at = RANGES.iter().position(is_free).ok_or_else(|| {
            io::Error::other(format!(
                "{FORGOTTEN_MAX} mappings of other domains' memory, the most that a process may have"
            ))
        })?;
        RANGES_USED.fetch_max(at + 1, Ordering::Relaxed);
        RANGES[at].len.store(len, Ordering::Relaxed);
        // ORDER Release: a reader that sees the base sees the length.
        RANGES[at].base.store(base, Ordering::Release);
        Ok(Self { at, process: std::process::id() })
    }
}

impl Drop for Forgotten {
    fn drop(&mut self) {
        RANGES[self.at].base.store(0, Ordering::Release);
    }
}

/// Puts zeroed memory, in a child made by fork, where its parent has mappings that children do not inherit. A word read
/// there is zero, which is as good as anything else that a peer may write. Does nothing where something is mapped
/// already.
pub fn replace_forgotten_mappings() {
    for range in &RANGES[..RANGES_USED.load(Ordering::Relaxed)] {
        let (base, len) = (range.base.load(Ordering::Acquire), range.len.load(Ordering::Relaxed));
        if base <= 1 {
            continue;
        }
        let address = base as *mut std::ffi::c_void;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: (address) the kernel replaces nothing: it refuses where anything is mapped, and kernels before Linux
        // 4.17 take the address for a hint.
        let mapped = unsafe { rustix::mm::mmap_anonymous(address, len, ProtFlags::READ | ProtFlags::WRITE, flags) };
        if let Ok(other) = mapped.map_err(drop)
            && other != address
        {
            // SAFETY: (range) just mapped, and used by nobody.
            let _ = unsafe { rustix::mm::munmap(other, len) };
        }
    }
}

/// Returns how many of the first `len` bytes of `fd` have memory, swapped out or not (M-7). Counts without a lock and
/// without allocating any. Returns `None` where the kernel (before Linux 6.5) or a filter does not let this process
/// count.
pub(crate) fn count_present(fd: BorrowedFd<'_>, len: u64) -> Option<u64> {
    let pages = stat_cache(fd.as_raw_fd(), len).ok()?;
    // Pages evicted from a memfd are on swap: they were allocated, and charged to the process that did so.
    Some((pages[0] + pages[3]) * rustix::param::page_size() as u64)
}

/// Returns whether this process may use [`count_present`] now. Calls it without a file, so that nothing is needed:
/// where the system call is available, it reports the missing file.
pub(crate) fn can_count() -> bool {
    stat_cache(-1, 0) == Err(Errno::BADF)
}

/// Calls `cachestat(2)`. Returns the pages in the cache, dirty, under write-back, evicted, recently evicted.
fn stat_cache(fd: RawFd, len: u64) -> Result<[u64; 5], Errno> {
    const CACHESTAT: libc::c_long = 451;
    let range: [u64; 2] = [0, len];
    let mut pages = [0_u64; 5];
    // SAFETY: (range) points to two words, which the kernel reads; (pages) to five, which it writes; both live until
    // the call returns, and it keeps neither.
    let done = unsafe { libc::syscall(CACHESTAT, fd, range.as_ptr(), pages.as_mut_ptr(), 0) };
    if done == 0 {
        return Ok(pages);
    }
    Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::NOSYS))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.watched = None;
        if cfg!(miri) {
            return; // The memory belongs to the guard, see `alone`.
        }
        // In a child another mapping may be at this address by now.
        if self.forgotten.get().is_some_and(|it| it.process != std::process::id()) {
            return;
        }
        drop(self.forgotten.take());
        // SAFETY: (range) base and len came from mmap and are unmapped nowhere else; (users) every word and slice holds
        // this mapping alive, so none is left.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of a whole mapping cannot fail");
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::{ffi::c_int, os::fd::AsFd};

    use super::*;

    /// Runs `child` in a child made by fork. Returns whether it returned true.
    fn forked(child: impl FnOnce() -> bool) -> bool {
        // SAFETY: (child) calls nothing but what `child` does, which takes no lock and allocates nothing, and `_exit`.
        let process = unsafe { libc::fork() };
        if process == 0 {
            let well = child();
            // SAFETY: (contract) ends the process.
            unsafe { libc::_exit(c_int::from(!well)) };
        }
        let mut status = -1;
        // SAFETY: (valid) room for a status.
        assert_eq!(unsafe { libc::waitpid(process, &raw mut status, 0) }, process);
        status == 0
    }

    #[test]
    fn r26_anonymous_memory_is_a_childs_as_well() {
        let memory = Mapping::anonymous(5000).unwrap();
        let at = memory.base().as_ptr().wrapping_add(4999);
        assert!(forked(|| {
            // SAFETY: (range) inside; the parent waits.
            unsafe { at.write_volatile(7) };
            true
        }));
        // SAFETY: (range) as above; the child has ended.
        assert_eq!(unsafe { at.read_volatile() }, 7);
    }

    #[test]
    fn x24_child_finds_zeros_where_its_parent_has_memory_that_is_not_inherited() {
        let memory = rustix::fs::memfd_create("forgotten", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 8192).unwrap();
        let [forgotten, inherited] =
            [(); 2].map(|()| Mapping::new(memory.as_fd(), 0, 8192, Access::ReadWrite).unwrap());
        // SAFETY: (range) both live, and this test alone uses them.
        let byte = |mapping: &Mapping| unsafe { mapping.base().as_ptr().wrapping_add(5000).read_volatile() };
        // SAFETY: (range) as above.
        unsafe { inherited.base().as_ptr().wrapping_add(5000).write_volatile(7) };
        forgotten.forget_in_children().unwrap();
        assert!(forked(|| {
            replace_forgotten_mappings();
            byte(&forgotten) == 0 && byte(&inherited) == 7
        }));
        replace_forgotten_mappings();
        assert_eq!(byte(&forgotten), 7, "where something is mapped it stays");
        drop(forgotten);
        assert!(forked(|| {
            replace_forgotten_mappings();
            byte(&inherited) == 7
        }));
    }
}

#[cfg(miri)]
pub(crate) mod alone {
    //! Memory of this process alone instead of memory that two processes map, because Miri knows no shared memory. It
    //! is used like a mapping.

    use std::{
        alloc::{Layout, alloc_zeroed, dealloc},
        ptr::NonNull,
        sync::Arc,
    };

    use super::Mapping;

    #[derive(Debug)]
    struct Heap {
        base: NonNull<u8>,
        layout: Layout,
    }

    // SAFETY: an address and a size; what is done with the bytes is up to `word` and `data`, as for a mapping.
    unsafe impl Send for Heap {}
    // SAFETY: as above.
    unsafe impl Sync for Heap {}

    impl Drop for Heap {
        fn drop(&mut self) {
            // SAFETY: (allocated) by `twice`, with this layout; (users) both views are gone.
            unsafe { dealloc(self.base.as_ptr(), self.layout) };
        }
    }

    /// Returns two views of `len` zeroed bytes.
    pub(crate) fn twice(len: usize) -> [Mapping; 2] {
        let layout = Layout::from_size_align(len, 4096).expect("a segment's length");
        assert!(len > 0);
        // SAFETY: (size) not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).expect("memory");
        let heap = Arc::new(Heap { base, layout });
        [(); 2].map(|()| Mapping {
            base,
            len,
            watched: None,
            forgotten: OnceLock::new(),
            guard: Some(Box::new(Arc::clone(&heap))),
        })
    }
}
