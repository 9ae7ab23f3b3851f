// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that a process has in common with those that it forks later, and with nobody else.
//!
//! # Safety
//! A [`Common`] is one page that stays mapped as long as the value lives. Its first bytes are the locks, which only
//! libc touches once they are made; behind them are words, which are only ever reached as atomics. No safe code reaches
//! one by way of the other. A lock that a thread has is in the list of those it has, by its address, for libc and the kernel:
//! so a page goes only if this process gave all of its locks back.
#![allow(unsafe_code)]

use std::{
    io,
    marker::PhantomData,
    ptr::{self, NonNull},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use libc::pthread_mutex_t;
use rustix::mm::{MapFlags, ProtFlags};

const LEN: usize = 4096;
/// Words in it.
const WORDS: usize = 256;
/// Locks in it.
const LOCKS: usize = 2;

/// What stands in the page.
#[repr(C)]
struct Page {
    locks: [pthread_mutex_t; LOCKS],
    words: [AtomicU64; WORDS],
}
const _: () = assert!(size_of::<Page>() <= LEN && align_of::<Page>() <= LEN);

/// A page of words and locks. A child made by fork has the same one.
#[derive(Debug)]
pub struct Common {
    page: NonNull<Page>,
    /// Which locks a thread of this process has. Written by who has the lock, so that plain stores do. A child that was made
    /// while another thread had one believes it for ever, and keeps a page too long.
    held: [AtomicBool; LOCKS],
}

// SAFETY: the page belongs to no thread; words are atomics, locks are made for threads and processes.
unsafe impl Send for Common {}
// SAFETY: as above.
unsafe impl Sync for Common {}

impl Common {
    /// A page whose words are 0 and whose locks are free.
    ///
    /// # Errors
    /// Where there is no memory.
    pub fn new() -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: (address) null with no MAP_FIXED lets the kernel choose a free range.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), LEN, prot, flags) }?;
        let page = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("the kernel mapped address 0"))?;
        let common = Self { page, held: [const { AtomicBool::new(false) }; LOCKS] };
        (0..LOCKS).try_for_each(|which| common.make(which))?;
        Ok(common)
    }

    /// Its words.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: (valid, aligned) the page is mapped while `self` lives and holds one `Page`, all zeros at first.
        let words = unsafe { &raw const (*self.page.as_ptr()).words };
        // SAFETY: (valid) as above; (aliasing) words are reached as atomics alone, by every process that has the page.
        unsafe { &*words }
    }

    /// Takes lock `which`, waiting for whoever has it. A thread must not take one that it has.
    ///
    /// # Errors
    /// Where the lock is broken, which only a write past the end of something else can do.
    ///
    /// # Panics
    /// If there is no such lock.
    pub fn lock(&self, which: usize) -> io::Result<LockGuard<'_>> {
        let lock = self.place(which);
        // SAFETY: (made) the lock was made in `new` and is destroyed nowhere.
        match unsafe { libc::pthread_mutex_lock(lock) } {
            0 => Ok(self.record_owner(which, false)),
            libc::EOWNERDEAD => {
                // SAFETY: (made) as above; (held) the call above took it, and said that it needs this.
                let _ = unsafe { libc::pthread_mutex_consistent(lock) };
                Ok(self.record_owner(which, true))
            }
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    fn record_owner(&self, which: usize, orphaned: bool) -> LockGuard<'_> {
        // ORDER Relaxed: the lock orders those who have it; `drop` comes after all of them.
        self.held[which].store(true, Ordering::Relaxed);
        LockGuard { common: self, which, orphaned, _of_this_thread: PhantomData }
    }

    fn place(&self, which: usize) -> *mut pthread_mutex_t {
        assert!(which < LOCKS, "there is no lock {which}");
        // SAFETY: (valid) as in `words`; only an address is made.
        let locks = unsafe { &raw mut (*self.page.as_ptr()).locks };
        // SAFETY: (in bounds) just checked.
        unsafe { locks.cast::<pthread_mutex_t>().add(which) }
    }

    /// Makes lock `which`: for all processes that have the page, and robust, so that the kernel tells the next one if
    /// its holder died.
    fn make(&self, which: usize) -> io::Result<()> {
        let done = |error| if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) };
        // SAFETY: (valid) all zeros is memory for attributes that are made next.
        let mut attributes = unsafe { std::mem::zeroed() };
        // SAFETY: (valid) the attributes are this function's own.
        done(unsafe { libc::pthread_mutexattr_init(&raw mut attributes) })?;
        // SAFETY: (made) by the call above.
        done(unsafe { libc::pthread_mutexattr_setpshared(&raw mut attributes, libc::PTHREAD_PROCESS_SHARED) })?;
        // SAFETY: (made) as above.
        done(unsafe { libc::pthread_mutexattr_setrobust(&raw mut attributes, libc::PTHREAD_MUTEX_ROBUST) })?;
        // SAFETY: (valid) room for a lock that nobody uses yet; (made) the attributes, as above.
        done(unsafe { libc::pthread_mutex_init(self.place(which), &raw const attributes) })
    }
}

impl Drop for Common {
    /// Where a lock was forgotten, or kept by a panic, the page stays: see the module.
    fn drop(&mut self) {
        if self.held.iter_mut().any(|held| *held.get_mut()) {
            return;
        }
        // SAFETY: (range) it came from mmap and is unmapped nowhere else; (users) references borrow `self`, and no thread of
        // this process has a lock. Other processes have mappings of their own.
        let unmapped = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), LEN) };
        debug_assert!(unmapped.is_ok(), "munmap of a whole mapping cannot fail");
    }
}

/// A lock that this thread has, until it is dropped.
#[derive(Debug)]
pub struct LockGuard<'a> {
    common: &'a Common,
    which: usize,
    orphaned: bool,
    /// Who took it gives it back: neither Send nor Sync.
    _of_this_thread: PhantomData<*mut pthread_mutex_t>,
}

impl LockGuard<'_> {
    /// Whether its last holder died with it: what it guards is as that one left it.
    #[must_use]
    pub fn is_orphaned(&self) -> bool {
        self.orphaned
    }
}

impl Drop for LockGuard<'_> {
    /// A thread that panics leaves it to be found orphaned, as what it guards may be half done.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.common.held[self.which].store(false, Ordering::Relaxed);
        // SAFETY: (held) by this thread, as the value is neither Send nor Clone; (made) it borrows its page.
        let _ = unsafe { libc::pthread_mutex_unlock(self.common.place(self.which)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r26_words_begin_as_zeros_and_keep_what_threads_store() {
        let common = Common::new().unwrap();
        assert!(common.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let held = common.lock(1).unwrap();
                        assert!(!held.is_orphaned());
                        let word = &common.words()[WORDS - 1];
                        word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(common.words()[WORDS - 1].load(Ordering::Relaxed), 4000);
    }

    #[test]
    fn r26_lock_whose_holder_died_says_so_once() {
        let common = Common::new().unwrap();
        // A thread that ends with a robust lock is a holder that died.
        std::thread::scope(|scope| {
            scope.spawn(|| std::mem::forget(common.lock(0).unwrap())).join().unwrap();
        });
        assert!(common.lock(0).unwrap().is_orphaned());
        assert!(!common.lock(0).unwrap().is_orphaned());
        assert!(!common.lock(1).unwrap().is_orphaned(), "the other lock is another");
    }

    #[test]
    fn page_whose_lock_was_never_given_back_stays_where_the_thread_remembers_it() {
        let common = Common::new().unwrap();
        let other = Common::new().unwrap();
        std::mem::forget(common.lock(0).unwrap());
        drop(common);
        // The thread's list of robust locks begins in that page now, and this adds to it.
        drop(other.lock(0).unwrap());
        drop(other.lock(1).unwrap());
    }

    #[test]
    fn page_whose_lock_a_panic_kept_stays_where_the_thread_remembers_it() {
        let (common, other) = (Common::new().unwrap(), Common::new().unwrap());
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = common.lock(0).unwrap();
            panic!("in the middle of a turn");
        }));
        assert!(caught.is_err());
        drop(common);
        drop(other.lock(0).unwrap());
    }
}
