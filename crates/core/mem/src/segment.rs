// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Provides segments: one owner writes, one or more peers read.

mod device;

use std::{any::Any, io, os::fd::BorrowedFd, sync::Arc};

use crate::{
    PeerData,
    data::{OwnBytes, PeerBytes},
    map::{Access, Mapping},
    word::{MappedOwnWord, MappedPeerWord},
};

/// A segment that this endpoint owns: the one writable mapping of its memory.
#[derive(Debug)]
pub struct OwnSegment(Arc<Mapping>);

impl OwnSegment {
    pub(crate) fn from_only_writable(mapping: Mapping) -> Self {
        Self(Arc::new(mapping))
    }

    /// Returns the size of the segment in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns false: a segment has at least a page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// Keeps this mapping out of children made by fork.
    ///
    /// # Errors
    /// The error of `madvise`.
    pub fn forget_in_children(&self) -> io::Result<()> {
        self.0.forget_in_children()
    }

    /// Keeps `guard` until the segment, with all its words and slices, is dropped and the memory is unmapped.
    ///
    /// # Panics
    /// Never: a segment that was not split is held once.
    #[must_use]
    pub fn guarded(self, guard: impl Any + Send + Sync) -> Self {
        let mapping = Arc::into_inner(self.0).expect("a segment is held once until it is split");
        Self(Arc::new(mapping.guarded(guard)))
    }

    /// Splits the segment into its words (before `at`) and its data (from `at` on), each owned once.
    ///
    /// # Panics
    /// If `at` lies outside the segment.
    #[must_use]
    pub fn split(self, at: usize) -> (OwnControl, OwnBytes) {
        (OwnControl { mapping: Arc::clone(&self.0), len: at }, OwnBytes::new(self.0, at))
    }
}

/// Part of an own segment that holds its header and words.
#[derive(Debug)]
pub struct OwnControl {
    mapping: Arc<Mapping>,
    len: usize,
}

impl OwnControl {
    /// Returns the word at `offset`.
    ///
    /// # Panics
    /// If it is misaligned or outside the control part.
    #[must_use]
    pub fn word(&self, offset: usize) -> MappedOwnWord {
        assert!(Some(offset) <= self.len.checked_sub(8), "word at {offset:#x} reaches into the data");
        MappedOwnWord::new(&self.mapping, offset)
    }

    /// Returns whether the memory was taken away while it was mapped, and an access has found that. The mapping then
    /// holds zeros of this process alone.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// Writes the immutable header, word by word, before the peer learns of the segment.
    ///
    /// # Panics
    /// If the header is no multiple of eight bytes.
    pub fn write_header(&self, header: &[u8]) {
        let (words, rest) = header.as_chunks::<8>();
        assert!(rest.is_empty(), "a header is made of words");
        for (index, word) in words.iter().enumerate() {
            crate::OwnWord::store_relaxed(&self.word(index * 8), u64::from_le_bytes(*word));
        }
    }
}

/// A segment that the peer owns, mapped read-only.
#[derive(Clone, Debug)]
pub struct PeerSegment(Arc<Mapping>);

impl PeerSegment {
    /// Maps `len` bytes of `fd` read-only. The caller must know whether the memory can shrink under the mapping (a
    /// `SIGBUS`); see [`crate::check_sealed`].
    ///
    /// # Errors
    /// The error of `mmap`.
    pub fn map(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        Ok(Self(Arc::new(Mapping::new(fd, 0, len, Access::ReadOnly)?)))
    }

    /// Maps as [`map`](Self::map) does. Drops `guard` when the segment, with all its words and slices, is dropped and
    /// the memory is unmapped, or if it could not be mapped. For a backend that has to report this.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub fn map_guarded(fd: BorrowedFd<'_>, len: usize, guard: impl Any + Send + Sync) -> io::Result<Self> {
        Ok(Self(Arc::new(Mapping::new(fd, 0, len, Access::ReadOnly)?.guarded(guard))))
    }

    /// Maps as [`map_guarded`](Self::map_guarded) does, from `offset` on, memory that can be taken away, like that of a
    /// device that is unplugged: see [`is_lost`](Self::is_lost).
    ///
    /// # Errors
    /// The error of `mmap`.
    pub fn map_revocable(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        guard: impl Any + Send + Sync,
    ) -> io::Result<Self> {
        Ok(Self(Arc::new(Mapping::revocable(fd, offset, len, Access::ReadOnly)?.guarded(guard))))
    }

    /// Returns whether the memory was taken away while it was mapped, and an access has found that. The mapping then
    /// holds zeros.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.is_lost()
    }

    /// Returns the size of the segment in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns false: a segment has at least a page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// Keeps this mapping out of children made by fork.
    ///
    /// # Errors
    /// The error of `madvise`.
    pub fn forget_in_children(&self) -> io::Result<()> {
        self.0.forget_in_children()
    }

    /// Returns a private copy of the first `N` bytes.
    ///
    /// # Panics
    /// If the segment is smaller.
    #[must_use]
    pub fn header<const N: usize>(&self) -> [u8; N] {
        let mut header = [0; N];
        PeerBytes::new(Arc::clone(&self.0), 0).copy_out(0, &mut header);
        header
    }

    /// Returns the word at `offset`.
    ///
    /// # Panics
    /// If it is misaligned or outside the segment.
    #[must_use]
    pub fn word(&self, offset: usize) -> MappedPeerWord {
        MappedPeerWord::new(&self.0, offset)
    }

    /// Returns the data from `offset` on.
    ///
    /// # Panics
    /// If `offset` lies outside the segment.
    #[must_use]
    pub fn data(&self, offset: usize) -> PeerBytes {
        PeerBytes::new(Arc::clone(&self.0), offset)
    }

    /// Returns address and length of the mapping, for tests of what the kernel refuses to do with it.
    #[must_use]
    pub fn address(&self) -> (*const u8, usize) {
        (self.0.base().as_ptr(), self.0.len())
    }
}

/// Makes a segment of `len` zeroed bytes and the peer's view of it, both in this process alone, for Miri.
#[cfg(miri)]
#[must_use]
pub fn create_alone(len: usize) -> (OwnSegment, PeerSegment) {
    let [own, peer] = crate::map::alone::twice(len);
    (OwnSegment::from_only_writable(own), PeerSegment(Arc::new(peer)))
}
