// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Segments: one owner writes, one or more peers read.

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

    /// Bytes of the segment.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Never: a segment has at least a page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// Leaves this mapping out of children made by fork.
    ///
    /// # Errors
    /// What the kernel says to `madvise`.
    pub fn forget_in_children(&self) -> io::Result<()> {
        self.0.forget_in_children()
    }

    /// Keeps `guard` until the segment and all words and slices of it are gone and the memory is unmapped.
    ///
    /// # Panics
    /// Never: a segment that was not split is held once.
    #[must_use]
    pub fn guarded(self, guard: impl Any + Send + Sync) -> Self {
        let mapping = Arc::into_inner(self.0).expect("a segment is held once until it is split");
        Self(Arc::new(mapping.guarded(guard)))
    }

    /// Takes the segment apart into its words (before `at`) and its data (from `at` on), each owned once.
    ///
    /// # Panics
    /// If `at` lies outside the segment.
    #[must_use]
    pub fn split(self, at: usize) -> (OwnControl, OwnBytes) {
        (OwnControl { mapping: Arc::clone(&self.0), len: at }, OwnBytes::new(self.0, at))
    }
}

/// The part of an own segment that holds its header and words.
#[derive(Debug)]
pub struct OwnControl {
    mapping: Arc<Mapping>,
    len: usize,
}

impl OwnControl {
    /// The word at `offset`.
    ///
    /// # Panics
    /// If it is misaligned or outside the control part.
    #[must_use]
    pub fn word(&self, offset: usize) -> MappedOwnWord {
        assert!(Some(offset) <= self.len.checked_sub(8), "word at {offset:#x} reaches into the data");
        MappedOwnWord::new(&self.mapping, offset)
    }

    /// Whether the memory was taken away while it was mapped, as far as anybody stumbled over it: what is there now are
    /// zeros of this process alone.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// Writes the immutable header, word by word, before the peer hears of the segment.
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
    /// Maps `len` bytes of `fd` read-only. Whether the memory can shrink under the mapping (a `SIGBUS`) is for the
    /// caller to know; see [`crate::check_sealed`].
    ///
    /// # Errors
    /// What the kernel says to `mmap`.
    pub fn map(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        Ok(Self(Arc::new(Mapping::new(fd, 0, len, Access::ReadOnly)?)))
    }

    /// As [`map`](Self::map), and drops `guard` when the segment and all words and slices of it are gone and the memory
    /// is unmapped (or could not be mapped): for a backend that has to tell somebody.
    ///
    /// # Errors
    /// What the kernel says to `mmap`.
    pub fn map_guarded(fd: BorrowedFd<'_>, len: usize, guard: impl Any + Send + Sync) -> io::Result<Self> {
        Ok(Self(Arc::new(Mapping::new(fd, 0, len, Access::ReadOnly)?.guarded(guard))))
    }

    /// As [`map_guarded`](Self::map_guarded), from `offset` on and of memory that can be taken away, as a device's is
    /// when it is unplugged: see [`is_lost`](Self::is_lost).
    ///
    /// # Errors
    /// What the kernel says to `mmap`.
    pub fn map_revocable(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        guard: impl Any + Send + Sync,
    ) -> io::Result<Self> {
        Ok(Self(Arc::new(Mapping::revocable(fd, offset, len, Access::ReadOnly)?.guarded(guard))))
    }

    /// Whether the memory was taken away while it was mapped, as far as anybody stumbled over it: what is there now are
    /// zeros.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.is_lost()
    }

    /// Bytes of the segment.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Never: a segment has at least a page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// Leaves this mapping out of children made by fork.
    ///
    /// # Errors
    /// What the kernel says to `madvise`.
    pub fn forget_in_children(&self) -> io::Result<()> {
        self.0.forget_in_children()
    }

    /// A private copy of the first `N` bytes.
    ///
    /// # Panics
    /// If the segment is smaller.
    #[must_use]
    pub fn header<const N: usize>(&self) -> [u8; N] {
        let mut header = [0; N];
        PeerBytes::new(Arc::clone(&self.0), 0).copy_out(0, &mut header);
        header
    }

    /// The word at `offset`.
    ///
    /// # Panics
    /// If it is misaligned or outside the segment.
    #[must_use]
    pub fn word(&self, offset: usize) -> MappedPeerWord {
        MappedPeerWord::new(&self.0, offset)
    }

    /// The data from `offset` on.
    ///
    /// # Panics
    /// If `offset` lies outside the segment.
    #[must_use]
    pub fn data(&self, offset: usize) -> PeerBytes {
        PeerBytes::new(Arc::clone(&self.0), offset)
    }

    /// Where it is mapped, for tests of what the kernel refuses to do with it.
    #[must_use]
    pub fn address(&self) -> (*const u8, usize) {
        (self.0.base().as_ptr(), self.0.len())
    }
}

/// A segment of `len` zeroed bytes and the peer's view of it, both of this process alone, for Miri.
#[cfg(miri)]
#[must_use]
pub fn create_alone(len: usize) -> (OwnSegment, PeerSegment) {
    let [own, peer] = crate::map::alone::twice(len);
    (OwnSegment::from_only_writable(own), PeerSegment(Arc::new(peer)))
}
