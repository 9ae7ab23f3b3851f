// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Provides memory that several write. Rule 1 of this crate does not hold for it. So it serves two purposes only: a
//! foreign wire format that requires it, and memory that the processes of one endpoint share.
//!
//! # Safety
//! A [`CommonSegment`] never becomes a reference to its bytes: single bytes and words are accessed as atomics, others
//! are copied by `copy`. A byte that is accessed as an atomic must not be part of a word that is. The offsets of a
//! format ensure this; on the machines that this runs on it would be harmless.
#![allow(unsafe_code)]

use std::{
    any::Any,
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU32, Ordering},
    },
};

use crate::{
    copy,
    map::{Access, Mapping},
};

/// Memory that a peer, or another process of this endpoint, may write as well.
#[derive(Clone, Debug)]
pub struct CommonSegment {
    mapping: Arc<Mapping>,
    writable: bool,
}

impl CommonSegment {
    /// Maps `len` bytes of `fd`, and drops `guard` when they are unmapped or could not be mapped.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub fn map(fd: BorrowedFd<'_>, len: usize, writable: bool, guard: impl Any + Send + Sync) -> io::Result<Self> {
        let access = if writable { Access::ReadWrite } else { Access::ReadOnly };
        Ok(Self { mapping: Arc::new(Mapping::new(fd, 0, len, access)?.guarded(guard)), writable })
    }

    /// Makes `len` zeroed bytes that this process shares with the children it forks, and with nobody else.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub fn among_processes(len: usize) -> io::Result<Self> {
        Ok(Self { mapping: Arc::new(Mapping::anonymous(len)?), writable: true })
    }

    /// Keeps this mapping out of children made by fork.
    ///
    /// # Errors
    /// The error of `madvise`.
    pub fn forget_in_children(&self) -> io::Result<()> {
        self.mapping.forget_in_children()
    }

    /// Returns the size of the segment in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Returns false: a segment has at least a page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.mapping.len() == 0
    }

    #[inline(always)]
    fn at(&self, offset: usize, len: usize, align: usize, writes: bool) -> *mut u8 {
        let all = self.len();
        if (writes && !self.writable) || offset % align != 0 || offset > all || len > all - offset {
            self.refuse(offset, len);
        }
        // SAFETY: (in bounds) just checked.
        unsafe { self.mapping.base().add(offset) }.as_ptr()
    }

    /// Panics, apart from the fast paths.
    #[cold]
    #[inline(never)]
    fn refuse(&self, offset: usize, len: usize) -> ! {
        let how = if self.writable { "" } else { ", or a store to memory that is mapped read-only" };
        panic!("{len} bytes at {offset:#x} of {:#x}{how}", self.len());
    }

    #[inline]
    fn byte(&self, offset: usize, writes: bool) -> &AtomicU8 {
        // SAFETY: (valid) `at` checked the bounds, the mapping is alive as long as `self`; (aliasing) atomics alone
        // touch it.
        unsafe { AtomicU8::from_ptr(self.at(offset, 1, 1, writes)) }
    }

    #[inline]
    fn word(&self, offset: usize, writes: bool) -> &AtomicU32 {
        let at = self.at(offset, 4, 4, writes).cast();
        // SAFETY: (valid, aligned) `at` checked both, the base being page-aligned; the mapping is alive as long as
        // `self`; (aliasing) atomics alone touch it.
        unsafe { AtomicU32::from_ptr(at) }
    }

    /// Returns the byte at an offset.
    ///
    /// # Panics
    /// If it is outside the segment. The following functions panic likewise, and those that store also where it is
    /// mapped read-only.
    #[inline]
    #[must_use]
    pub fn load8(&self, offset: usize) -> u8 {
        self.byte(offset, false).load(Ordering::Acquire)
    }

    /// Stores a byte, and publishes with it everything that was written before.
    #[inline]
    pub fn store8(&self, offset: usize, value: u8) {
        self.byte(offset, true).store(value, Ordering::Release);
    }

    /// Sets bits of a byte between two full fences. Returns the previous value.
    #[inline]
    pub fn set_bits(&self, offset: usize, bits: u8) -> u8 {
        let before = self.byte(offset, true).fetch_or(bits, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        before
    }

    /// Clears bits of a byte between two full fences. Returns the previous value.
    #[inline]
    pub fn clear_bits(&self, offset: usize, bits: u8) -> u8 {
        std::sync::atomic::fence(Ordering::SeqCst);
        self.byte(offset, true).fetch_and(!bits, Ordering::SeqCst)
    }

    /// Returns the little-endian word at a multiple of four. Everything written before that word is visible.
    #[inline]
    #[must_use]
    pub fn load32(&self, offset: usize) -> u32 {
        u32::from_le(self.word(offset, false).load(Ordering::Acquire))
    }

    /// Stores a word at a multiple of four, and publishes with it everything that was written before.
    #[inline]
    pub fn store32(&self, offset: usize, value: u32) {
        self.word(offset, true).store(value.to_le(), Ordering::Release);
    }

    /// Copies bytes to an offset. A concurrent writer there spoils these bytes, and nothing else.
    #[inline]
    pub fn copy_in(&self, offset: usize, from: &[u8]) {
        let to = self.at(offset, from.len(), 1, true);
        // SAFETY: (valid) both ranges hold `from.len()` bytes; (disjoint) `from` is private; (other writers) the stores
        // are in assembly or volatile, and the bytes never become a reference, so no code assumes their value.
        unsafe { copy::copy(from.as_ptr(), to, from.len()) }
    }

    /// Copies the bytes that are at an offset now.
    #[inline]
    pub fn copy_out(&self, offset: usize, to: &mut [u8]) {
        let from = self.at(offset, to.len(), 1, false);
        // SAFETY: (valid) both ranges hold `to.len()` bytes; (disjoint) `to` is private.
        unsafe { copy::copy(from, to.as_mut_ptr(), to.len()) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn pages(len: usize) -> std::os::fd::OwnedFd {
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, len as u64).unwrap();
        fd
    }

    #[test]
    fn both_ends_see_what_either_writes() {
        let fd = pages(8192);
        let [a, b] = [(); 2].map(|()| CommonSegment::map(fd.as_fd(), 8192, true, ()).unwrap());
        a.store32(4, 0x1234_5678);
        assert_eq!((b.load32(4), b.load8(4)), (0x1234_5678, 0x78));
        assert_eq!((b.set_bits(20, 3), a.clear_bits(20, 1), b.load8(20)), (0, 3, 2));
        b.store8(20, 9);
        assert_eq!(a.load8(20), 9);
        let bytes: Vec<u8> = (0..=255).cycle().take(5000).collect();
        a.copy_in(3001, &bytes);
        let mut back = vec![0; 5000];
        b.copy_out(3001, &mut back);
        assert_eq!(back, bytes);
    }

    #[test]
    fn what_lies_outside_or_is_read_only_is_refused() {
        let fd = pages(4096);
        let segment = CommonSegment::map(fd.as_fd(), 4096, true, ()).unwrap();
        let reader = CommonSegment::map(fd.as_fd(), 4096, false, ()).unwrap();
        assert_eq!(reader.load32(0), 0);
        let refused = |call: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err();
        assert!(refused(&|| segment.store8(4096, 1)));
        assert!(refused(&|| segment.store32(4094, 1)));
        assert!(refused(&|| _ = segment.load32(2)));
        assert!(refused(&|| segment.copy_in(4000, &[0; 97])));
        assert!(refused(&|| segment.copy_out(usize::MAX, &mut [0; 2])));
        assert!(refused(&|| reader.store32(0, 1)));
        assert!(refused(&|| _ = reader.set_bits(0, 1)));
    }
}
