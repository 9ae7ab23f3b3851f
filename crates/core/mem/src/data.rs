// SPDX-License-Identifier: Apache-2.0 OR MIT
//! # Safety
//! [`OwnBytes`] is unique: it comes from the one [`crate::OwnSegment`] of its memory and cannot be cloned, so a
//! `&mut` of it is the only way for this process to write those bytes, and no other domain can write them.
//! [`PeerBytes`] never becomes a reference: its bytes are copied by `copy`, which the peer may race.
#![allow(unsafe_code)]

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsFd, AsRawFd},
    ptr::NonNull,
    sync::Arc,
};

use crate::{CopyMethod, OwnData, PeerData, Untrusted, copy, map::Mapping};

/// A range of a mapping, with a reference that keeps it mapped.
#[derive(Debug)]
struct Range {
    base: NonNull<u8>,
    len: usize,
    /// Whether the mapping is revocable. Copied here to stand beside the fields that every copy needs.
    revocable: bool,
    mapping: Arc<Mapping>,
}

// SAFETY: the range is an address in a mapping that is Send and Sync; the owners below determine who writes it.
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

/// Panics, apart from the fast paths and with its arguments by value.
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

/// Data of a segment that this endpoint owns.
#[derive(Debug)]
pub struct OwnBytes(Range);

impl OwnBytes {
    pub(crate) fn new(mapping: Arc<Mapping>, offset: usize) -> Self {
        Self(Range::new(mapping, offset))
    }

    /// Returns the bytes at `offset`, to be filled in place before they are published.
    ///
    /// # Panics
    /// If they reach beyond the end.
    #[inline]
    pub fn slice_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        let at = self.0.at(offset, len);
        // SAFETY: (valid) `at` checked the range, the mapping is alive; (unique) `&mut self` is the only way to these
        // bytes in this process, see the module; (foreign writers) none: other domains map them read-only.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) }
    }

    /// Returns two disjoint ranges at once, for bytes that wrap around the end of a ring.
    ///
    /// # Panics
    /// If a range reaches beyond the end or the two overlap.
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
    /// If they do not fit.
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

    fn can_bypass_caches(&self) -> bool {
        copy::can_bypass_caches()
    }

    fn copy_in_past_caches(&mut self, offset: usize, from: &[u8]) {
        self.copy_in_by(CopyMethod::NonTemporal, offset, from);
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

    fn is_lost(&self) -> bool {
        self.0.revocable && self.0.mapping.is_lost()
    }
}

/// Data of a segment that the peer owns and may be writing at any time.
#[derive(Debug)]
pub struct PeerBytes(Range);

impl PeerBytes {
    pub(crate) fn new(mapping: Arc<Mapping>, offset: usize) -> Self {
        Self(Range::new(mapping, offset))
    }

    /// Returns the bytes at `offset` in place.
    ///
    /// # Panics
    /// If they reach beyond the end.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> SharedSlice<'_> {
        SharedSlice { base: self.0.at(offset, len), len, _bytes: PhantomData }
    }

    /// Copies the bytes that are at `offset` now into `to`, by the given method.
    ///
    /// # Panics
    /// If they reach beyond the end.
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
        // volatile load of one word, whatever its value.
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
/// Copy the bytes before you check them, and check the copy.
///
/// # Example
/// See `Rx` of the crate `tombolo`, whose `peek` returns them.
#[derive(Clone, Copy, Debug)]
pub struct SharedSlice<'a> {
    base: NonNull<u8>,
    len: usize,
    _bytes: PhantomData<&'a PeerBytes>,
}

impl SharedSlice<'_> {
    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no bytes.
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

    /// Divides the bytes in two, before the byte at `at`.
    ///
    /// # Panics
    /// If there are fewer than `at` bytes.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        assert!(at <= self.len, "split_at {at} of {} bytes", self.len);
        // SAFETY: (in bounds) just checked; one past the end is in bounds as well.
        let base = unsafe { self.base.add(at) };
        (Self { len: at, ..self }, Self { base, len: self.len - at, ..self })
    }

    /// Writes `head` and then the bytes of `parts`, as they are at that moment, to a descriptor in one call (`writev`).
    ///
    /// The kernel reads shared memory itself, without a copy in between. Returns the number of bytes that it took.
    ///
    /// # Blocking
    /// If the descriptor blocks.
    ///
    /// # Errors
    /// The error of `writev`; an interrupted call is repeated.
    pub fn write_with_head(fd: impl AsFd, head: &[u8], parts: [Self; 2]) -> io::Result<usize> {
        let entry = |base: *const u8, len| libc::iovec { iov_base: base.cast_mut().cast(), iov_len: len };
        let [first, second] = parts.map(|part| entry(part.base.as_ptr(), part.len));
        let list = [entry(head.as_ptr(), head.len()), first, second];
        loop {
            // SAFETY: (valid) `head` is a live slice and each part was checked when it was made, its mapping lives as
            // long as `'a`; (read only) `writev` writes to none of them; (races) the kernel copies whatever it finds,
            // and answers EFAULT where nothing is mapped.
            let written = unsafe { libc::writev(fd.as_fd().as_raw_fd(), list.as_ptr(), list.len() as i32) };
            match usize::try_from(written) {
                Ok(written) => return Ok(written),
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
    }

    /// Returns the address of the first byte, for code that reads shared memory itself.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.base.as_ptr()
    }

    /// Returns the bytes as an ordinary slice, which only a trusted peer allows.
    ///
    /// # Safety
    /// The peer is trusted not to write these bytes for as long as the slice lives: it follows the protocol and does
    /// not publish over bytes that were not consumed. A hostile or broken peer makes any use of the slice undefined
    /// behaviour; use [`copy_to`](Self::copy_to) for such a peer.
    #[must_use]
    pub unsafe fn as_slice_trusting_peer(&self) -> &[u8] {
        // SAFETY: (valid) as in `copy_to`; (no writers) the caller's promise.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore)]
    fn shared_bytes_go_to_a_descriptor_behind_a_head_wherever_they_are_divided() {
        let (own, fd) = crate::create_sealed("parts", 8192).unwrap();
        let (_control, mut data) = own.split(4096);
        let peer = crate::PeerSegment::map(fd.as_fd(), 8192).unwrap().data(4096);
        data.copy_in(0, b"world");
        data.copy_in(4090, b"hello,");
        let (mut reader, writer) = UnixStream::pair().unwrap();
        for at in 0..=6 {
            // As a ring shows bytes that lie across its end.
            let (skipped, first) = peer.slice(4090, 6).split_at(at);
            let (second, rest) = peer.slice(0, 6).split_at(5);
            assert_eq!((skipped.len(), rest.len(), rest.is_empty()), (at, 1, false));
            let len = SharedSlice::write_with_head(&writer, b"head ", [first, second]).unwrap();
            let mut came = vec![0; len];
            reader.read_exact(&mut came).unwrap();
            assert_eq!(came, [b"head ", &b"hello,"[at..], b"world"].concat());
        }
        // Shut down rather than closed: a process forked by another test may hold the other end for a moment.
        reader.shutdown(Shutdown::Both).unwrap();
        let refused = SharedSlice::write_with_head(&writer, b"x", [peer.slice(0, 1), peer.slice(0, 0)]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    #[should_panic(expected = "split_at 3 of 2 bytes")]
    fn canary_shared_bytes_are_not_divided_beyond_their_end() {
        let (_own, fd) = crate::create_sealed("parts", 8192).unwrap();
        let peer = crate::PeerSegment::map(fd.as_fd(), 8192).unwrap().data(4096);
        let _ = peer.slice(0, 2).split_at(3);
    }
}
