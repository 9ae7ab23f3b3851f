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
    sync::atomic::{AtomicU32, Ordering},
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
    /// Its memory can be taken away. Given up in `drop`, before the range is.
    watched: Option<Watched>,
    /// The one process that has the range, where children made by fork do not get it; else 0.
    only_in: AtomicU32,
    /// Dropped once the range is unmapped: fields go after `drop` has run.
    guard: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: a mapping belongs to the process, not to a thread; what is done with the bytes is up to `word` and `data`.
unsafe impl Send for Mapping {}
// SAFETY: as above; the value itself is immutable.
unsafe impl Sync for Mapping {}

/// Who may write through a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    ReadWrite,
    ReadOnly,
}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset` on, page tables filled at once.
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, len: usize, access: Access) -> io::Result<Self> {
        let prot = match access {
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
            Access::ReadOnly => ProtFlags::READ,
        };
        // SAFETY: (address) null with no MAP_FIXED lets the kernel choose a free range, so nothing of ours is replaced.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, offset) }?;
        // As for reading, which takes what is there sixteen pages at a time, writable where the mapping is; for writing
        // (`MAP_POPULATE`) they come one by one. Where that cannot be done, they come as they are used.
        // SAFETY: (range) base and len are those of the mapping just made; the advice changes no byte of it.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxPopulateRead) };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("the kernel mapped address 0"))?;
        Ok(Self { base, len, watched: None, only_in: AtomicU32::new(0), guard: None })
    }

    /// As [`new`](Self::new), of memory that can be taken away.
    pub(crate) fn revocable(fd: BorrowedFd<'_>, offset: u64, len: usize, access: Access) -> io::Result<Self> {
        let mut mapping = Self::new(fd, offset, len, access)?;
        // SAFETY: (range) just mapped; `drop` gives it up before it unmaps.
        let watched = unsafe { Watched::new(mapping.base.addr().get(), len, access == Access::ReadWrite) }?;
        mapping.watched = Some(watched);
        Ok(mapping)
    }

    /// Whether the memory was taken away and somebody stumbled over that: then there are zeros in its place. What was read
    /// before a look that says no was there.
    pub(crate) fn is_lost(&self) -> bool {
        self.watched.as_ref().is_some_and(Watched::is_lost)
    }

    /// Whether the memory can be taken away.
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

    /// Leaves this mapping out of children made by fork, as a hypervisor's foreign mappings are.
    pub(crate) fn forget_in_children(&self) -> io::Result<()> {
        // SAFETY: (range) base and len are those of a live mapping; the advice changes only what a child inherits.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxDontFork) }?;
        self.only_in.store(std::process::id(), Ordering::Relaxed);
        Ok(())
    }
}

/// How many of the first `len` bytes of `fd` have memory, be it swapped out: counted without a lock and without asking for
/// any (M-7). `None` where the kernel (before Linux 6.5) or a filter does not let this process count.
pub(crate) fn count_present(fd: BorrowedFd<'_>, len: u64) -> Option<u64> {
    let pages = stat_cache(fd.as_raw_fd(), len).ok()?;
    // What is evicted from memory of a memfd is on swap: it was allocated, and charged to who did.
    Some((pages[0] + pages[3]) * rustix::param::page_size() as u64)
}

/// Whether [`count_present`] is a call that this process may make now. Asked about no file at all, so that nothing is needed
/// for it: where the call is there, it is the file that is missed.
pub(crate) fn can_count() -> bool {
    stat_cache(-1, 0) == Err(Errno::BADF)
}

/// `cachestat(2)`: pages in the cache, dirty, under write-back, evicted, recently evicted.
fn stat_cache(fd: RawFd, len: u64) -> Result<[u64; 5], Errno> {
    const CACHESTAT: libc::c_long = 451;
    let range: [u64; 2] = [0, len];
    let mut pages = [0_u64; 5];
    // SAFETY: (range) points to two words, which the kernel reads; (pages) to five, which it writes; both live until the
    // call returns, and it keeps neither.
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
            return; // It is memory of its guard, see `alone`.
        }
        // In a child something else may stand there by now.
        let only_in = *self.only_in.get_mut();
        if only_in != 0 && only_in != std::process::id() {
            return;
        }
        // SAFETY: (range) base and len came from mmap and are unmapped nowhere else; (users) every word and slice holds
        // this mapping alive, so none is left.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of a whole mapping cannot fail");
    }
}

#[cfg(miri)]
pub(crate) mod alone {
    //! Memory of this process alone in the place of what two map: Miri knows no shared memory. What is done with it is what
    //! is done with a mapping.

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

    /// Two views of `len` zeroed bytes.
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
            only_in: AtomicU32::new(0),
            guard: Some(Box::new(Arc::clone(&heap))),
        })
    }
}
