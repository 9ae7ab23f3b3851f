// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Provides memory that a process shares with its later children, and with nobody else.
//!
//! # Safety
//! A [`Common`] is one page that stays mapped as long as the value lives. It begins with the locks, which only libc
//! touches once they are made. Words follow, which are only ever accessed as atomics. No safe code reaches one by way
//! of the other. libc and the kernel keep each lock that a thread holds, by its address, in a list of that thread. So a
//! page is unmapped only if this process has released all of its locks.
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
/// Number of words in the page.
const WORDS: usize = 256;
/// Number of locks in the page.
const LOCKS: usize = 2;

/// Layout of the page.
#[repr(C)]
struct Page {
    locks: [pthread_mutex_t; LOCKS],
    words: [AtomicU64; WORDS],
}
const _: () = assert!(size_of::<Page>() <= LEN && align_of::<Page>() <= LEN);

/// A page of words and locks, which a child made by fork shares.
#[derive(Debug)]
pub struct Common {
    page: NonNull<Page>,
    /// Whether a thread of this process holds each lock. Written by the thread that holds the lock, so plain stores
    /// suffice. A child that was forked while another thread held one sees it as held for ever, and keeps the page too
    /// long.
    held: [AtomicBool; LOCKS],
}

// SAFETY: the page belongs to no thread; words are atomics, locks are made for threads and processes.
unsafe impl Send for Common {}
// SAFETY: as above.
unsafe impl Sync for Common {}

impl Common {
    /// Makes a page whose words are 0 and whose locks are free.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new() -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: (address) null with no MAP_FIXED lets the kernel choose a free range.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), LEN, prot, flags) }?;
        let page = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("the kernel mapped address 0"))?;
        let common = Self { page, held: [const { AtomicBool::new(false) }; LOCKS] };
        (0..LOCKS).try_for_each(|which| common.make(which))?;
        Ok(common)
    }

    /// Returns the words of the page.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: (valid, aligned) the page is mapped while `self` lives and holds one `Page`, all zeros at first.
        let words = unsafe { &raw const (*self.page.as_ptr()).words };
        // SAFETY: (valid) as above; (aliasing) words are reached as atomics alone, by every process that has the page.
        unsafe { &*words }
    }

    /// Takes lock `which`, and waits for its present holder. A thread must not take a lock that it holds.
    ///
    /// # Errors
    /// If the lock is broken, which only a write past the end of another object can cause.
    ///
    /// # Panics
    /// If there is no such lock.
    pub fn lock(&self, which: usize) -> io::Result<LockGuard<'_>> {
        let lock = self.place(which);
        // SAFETY: (made) the lock was made in `new` and is destroyed nowhere.
        match unsafe { libc::pthread_mutex_lock(lock) } {
            0 => Ok(self.record_owner(which, false)),
            libc::EOWNERDEAD => {
                // SAFETY: (made) as above; (held) the call above took it, and reported that it needs this.
                let _ = unsafe { libc::pthread_mutex_consistent(lock) };
                Ok(self.record_owner(which, true))
            }
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    fn record_owner(&self, which: usize, orphaned: bool) -> LockGuard<'_> {
        // ORDER Relaxed: the lock orders its holders; `drop` comes after all of them.
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

    /// Makes lock `which` for all processes that have the page. It is robust, so that the kernel tells the next holder
    /// if the last one died.
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
    /// Keeps the page if a lock was forgotten, or kept by a panic: see the module.
    fn drop(&mut self) {
        if self.held.iter_mut().any(|held| *held.get_mut()) {
            return;
        }
        // SAFETY: (range) it came from mmap and is unmapped nowhere else; (users) references borrow `self`, and no
        // thread of this process holds a lock. Other processes have mappings of their own.
        let unmapped = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), LEN) };
        debug_assert!(unmapped.is_ok(), "munmap of a whole mapping cannot fail");
    }
}

/// A lock that this thread holds until this is dropped.
#[derive(Debug)]
pub struct LockGuard<'a> {
    common: &'a Common,
    which: usize,
    orphaned: bool,
    /// The thread that took the lock must release it: neither Send nor Sync.
    _of_this_thread: PhantomData<*mut pthread_mutex_t>,
}

impl LockGuard<'_> {
    /// Returns whether the last holder died while it held the lock: what the lock guards is in the state that it left.
    #[must_use]
    pub fn is_orphaned(&self) -> bool {
        self.orphaned
    }
}

impl Drop for LockGuard<'_> {
    /// A panicking thread leaves the lock to be found orphaned, as what it guards may be half done.
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
        // A thread that ends with a robust lock counts as a holder that died.
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
