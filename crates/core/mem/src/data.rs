// SPDX-License-Identifier: Apache-2.0 OR MIT
//! # Safety
//! [`OwnBytes`] is unique: it comes from the one [`crate::OwnSegment`] of its memory and cannot be cloned, so a
//! `&mut` of it is the only way for this process to write those bytes, and no other domain can write them.
//! [`PeerBytes`] never becomes a reference: its bytes are copied by `copy`, which the peer may race.
#![allow(unsafe_code)]

use std::{marker::PhantomData, ptr::NonNull, sync::Arc};

use crate::{CopyMethod, OwnData, PeerData, Untrusted, copy, map::Mapping};

/// A range of a mapping, and what keeps it mapped.
#[derive(Debug)]
struct Range {
    base: NonNull<u8>,
    len: usize,
    /// Kept here as well, beside what every copy needs.
    revocable: bool,
    mapping: Arc<Mapping>,
}

// SAFETY: the range is an address in a mapping that is Send and Sync; who writes it is settled by the owners below.
unsafe impl Send for Range {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Range {}

impl Range {
    fn new(mapping: Arc<Mapping>, offset: usize) -> Self {
        assert!(offset % 8 == 0 && offset <= mapping.len(), "data begin at {offset:#x}, outside their segment");
        // SAFETY: (in bounds) just checked.
        let base = unsafe { mapping.base().add(offset) };
        Self { base, len: mapping.len() - offset, revocable: mapping.is_revocable(), mapping }
    }

    #[inline]
    fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        if offset > self.len || len > self.len - offset {
            outside(offset, len, self.len);
        }
        // SAFETY: (in bounds) just checked.
        unsafe { self.base.add(offset) }
    }
}

/// Kept out of the way of the fast paths, arguments by value.
#[cold]
#[inline(never)]
fn outside(offset: usize, len: usize, of: usize) -> ! {
    panic!("{len} bytes at {offset:#x} of {of:#x}");
}

#[cold]
#[inline(never)]
fn misaligned(offset: usize) -> ! {
    panic!("a word at {offset:#x}");
}

/// The data of a segment that this end owns.
#[derive(Debug)]
pub struct OwnBytes(Range);

impl OwnBytes {
    pub(crate) fn new(mapping: Arc<Mapping>, offset: usize) -> Self {
        Self(Range::new(mapping, offset))
    }

    /// The bytes at `offset`, to be filled in place before they are published.
    ///
    /// # Panics
    /// Where they would reach beyond the end.
    #[inline]
    pub fn slice_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        let at = self.0.at(offset, len);
        // SAFETY: (valid) `at` checked the range, the mapping is alive; (unique) `&mut self` is the only way to these
        // bytes in this process, see the module; (foreign writers) none: other domains map them read-only.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) }
    }

    /// Two disjoint ranges at once, for what wraps around the end of a ring.
    ///
    /// # Panics
    /// Where a range reaches beyond the end or the two overlap.
    #[inline]
    pub fn slices_mut(&mut self, first: (usize, usize), second: (usize, usize)) -> (&mut [u8], &mut [u8]) {
        assert!(first.0 >= second.0 + second.1 || second.0 >= first.0 + first.1, "ranges overlap");
        let (a, b) = (self.0.at(first.0, first.1), self.0.at(second.0, second.1));
        // SAFETY: as in `slice_mut`.
        let a = unsafe { std::slice::from_raw_parts_mut(a.as_ptr(), first.1) };
        // SAFETY: as in `slice_mut`; (unique) the ranges were checked to be disjoint.
        let b = unsafe { std::slice::from_raw_parts_mut(b.as_ptr(), second.1) };
        (a, b)
    }

    /// Copies `from` to `offset` by the given method.
    ///
    /// # Panics
    /// Where it would not fit.
    pub fn copy_in_by(&mut self, method: CopyMethod, offset: usize, from: &[u8]) {
        let to = self.0.at(offset, from.len());
        // SAFETY: as in `copy_in`.
        unsafe { copy::copy_by(method, from.as_ptr(), to.as_ptr(), from.len()) }
    }
}

impl OwnData for OwnBytes {
    fn len(&self) -> usize {
        self.0.len
    }

    #[inline(always)]
    fn copy_in(&mut self, offset: usize, from: &[u8]) {
        let to = self.0.at(offset, from.len());
        // SAFETY: (valid) both ranges hold `from.len()` bytes; (disjoint) `&mut self` excludes a slice into them.
        unsafe { copy::copy(from.as_ptr(), to.as_ptr(), from.len()) }
    }

    #[inline]
    fn put_word(&mut self, offset: usize, word: u64) {
        if offset % 8 != 0 {
            misaligned(offset);
        }
        let at = self.0.at(offset, 8).cast::<u64>();
        // SAFETY: (valid) `at` checked the range; (aligned) so was the offset, and data begin at a page; (unique) as in
        // `slice_mut`.
        unsafe { at.write(word.to_le()) }
    }

    #[inline(always)]
    fn prepare(&self, offset: usize) {
        if offset < self.0.len {
            copy::prefetch_to_write(self.0.at(offset, 1));
        }
    }

    #[inline]
    fn copy_back(&self, offset: usize, to: &mut [u8]) {
        let from = self.0.at(offset, to.len());
        // SAFETY: (valid) both ranges hold `to.len()` bytes; (disjoint) `to` is a private slice.
        unsafe { copy::copy(from.as_ptr(), to.as_mut_ptr(), to.len()) }
    }
}

/// The data of a segment that the peer owns and may be writing at any time.
#[derive(Debug)]
pub struct PeerBytes(Range);

impl PeerBytes {
    pub(crate) fn new(mapping: Arc<Mapping>, offset: usize) -> Self {
        Self(Range::new(mapping, offset))
    }

    /// The bytes at `offset`, in place.
    ///
    /// # Panics
    /// Where they would reach beyond the end.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> SharedSlice<'_> {
        SharedSlice { base: self.0.at(offset, len), len, _bytes: PhantomData }
    }

    /// Copies what stands at `offset` now into `to`, by the given method.
    ///
    /// # Panics
    /// Where it would reach beyond the end.
    pub fn copy_out_by(&self, method: CopyMethod, offset: usize, to: &mut [u8]) {
        let from = self.0.at(offset, to.len());
        // SAFETY: as in `SharedSlice::copy_to`.
        unsafe { copy::copy_by(method, from.as_ptr(), to.as_mut_ptr(), to.len()) }
    }
}

impl PeerData for PeerBytes {
    fn len(&self) -> usize {
        self.0.len
    }

    #[inline(always)]
    fn copy_out(&self, offset: usize, to: &mut [u8]) {
        self.slice(offset, to.len()).copy_to(to);
    }

    #[inline]
    fn word(&self, offset: usize) -> Untrusted<u64> {
        if offset % 8 != 0 {
            misaligned(offset);
        }
        let at = self.0.at(offset, 8).cast::<u64>();
        // SAFETY: (valid) `at` checked the range; (aligned) so was the offset, and data begin at a page; (races) a
        // volatile load of one word, whatever it finds.
        Untrusted::new(u64::from_le(unsafe { at.read_volatile() }))
    }

    #[inline]
    fn is_lost(&self) -> bool {
        self.0.revocable && self.0.mapping.is_lost()
    }

    #[inline]
    fn prefetch(&self, offset: usize, len: usize) {
        if offset < self.0.len && len <= self.0.len - offset {
            copy::prefetch(self.0.at(offset, len), len);
        }
    }
}

/// Bytes of shared memory, which the peer may change at any time.
///
/// Copy what you check, and check the copy.
///
/// # Example
/// See `Rx` of the crate `tombolo`, whose `peek` shows them.
#[derive(Clone, Copy, Debug)]
pub struct SharedSlice<'a> {
    base: NonNull<u8>,
    len: usize,
    _bytes: PhantomData<&'a PeerBytes>,
}

impl SharedSlice<'_> {
    /// Returns how many bytes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the bytes out as they are now.
    ///
    /// # Panics
    /// If `to` has another length.
    #[inline(always)]
    pub fn copy_to(&self, to: &mut [u8]) {
        assert!(self.len == to.len(), "copy_to between different lengths");
        // SAFETY: (valid) the slice was checked when it was made, its mapping lives as long as `'a`; (disjoint) `to` is
        // private memory; (races) `copy` allows the source to change.
        unsafe { copy::copy(self.base.as_ptr(), to.as_mut_ptr(), self.len) }
    }

    /// Returns the address of the first byte, for code that reads shared memory by its own means.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.base.as_ptr()
    }

    /// Returns the bytes as an ordinary slice, which only a trusted peer allows.
    ///
    /// # Safety
    /// The peer is trusted not to write these bytes for as long as the slice lives: that it follows the protocol and
    /// does not publish over bytes that were not consumed. A hostile or broken peer makes any use of the slice
    /// undefined behaviour; use [`copy_to`](Self::copy_to) for such.
    #[must_use]
    pub unsafe fn as_slice_trusting_peer(&self) -> &[u8] {
        // SAFETY: (valid) as in `copy_to`; (no writers) the caller's promise.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}
