// SPDX-License-Identifier: Apache-2.0 OR MIT
//! # Safety
//! A word keeps its mapping alive, was checked for bounds and alignment once when it was made, and is only ever
//! accessed as an atomic: this crate makes no other reference to the bytes of a control page.
#![allow(unsafe_code)]

use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{OwnWord, PeerWord, Untrusted, map::Mapping};

/// Address of an aligned word, with a reference that keeps it mapped.
#[derive(Clone, Debug)]
struct Address {
    at: NonNull<AtomicU64>,
    mapping: Arc<Mapping>,
}

// SAFETY: the address is shared and reached only by atomic operations, and the mapping is Send and Sync.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    fn new(mapping: &Arc<Mapping>, offset: usize) -> Self {
        let last = mapping.len().checked_sub(8);
        assert!(offset % 8 == 0 && Some(offset) <= last, "word at {offset:#x} outside its segment");
        // SAFETY: (in bounds) just checked against the length of the mapping.
        let at = unsafe { mapping.base().add(offset) };
        Self { at: at.cast(), mapping: Arc::clone(mapping) }
    }

    #[inline]
    fn word(&self) -> &AtomicU64 {
        // SAFETY: (valid, aligned) checked in `new`, the base being page-aligned; (alive) `mapping` is held;
        // (aliasing) only atomics touch this word, here and at the peer.
        unsafe { self.at.as_ref() }
    }
}

/// A word of a mapped segment that this endpoint owns.
#[derive(Debug)]
pub struct MappedOwnWord(Address);

/// A word of a mapped segment that the peer owns.
#[derive(Clone, Debug)]
pub struct MappedPeerWord(Address);

impl MappedOwnWord {
    pub(crate) fn new(mapping: &Arc<Mapping>, offset: usize) -> Self {
        Self(Address::new(mapping, offset))
    }
}

impl MappedPeerWord {
    pub(crate) fn new(mapping: &Arc<Mapping>, offset: usize) -> Self {
        Self(Address::new(mapping, offset))
    }
}

impl MappedOwnWord {
    /// Returns whether the memory was taken away by the time of the last access, so that the value found may not be
    /// this endpoint's own.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.mapping.is_lost()
    }
}

impl OwnWord for MappedOwnWord {
    #[inline]
    fn store_release(&self, value: u64) {
        self.0.word().store(value.to_le(), Ordering::Release);
    }

    #[inline]
    fn store_relaxed(&self, value: u64) {
        self.0.word().store(value.to_le(), Ordering::Relaxed);
    }

    #[inline]
    fn load(&self) -> u64 {
        u64::from_le(self.0.word().load(Ordering::Relaxed))
    }
}

impl PeerWord for MappedPeerWord {
    #[inline]
    fn load_acquire(&self) -> Untrusted<u64> {
        Untrusted::new(u64::from_le(self.0.word().load(Ordering::Acquire)))
    }

    #[inline]
    fn load_relaxed(&self) -> Untrusted<u64> {
        Untrusted::new(u64::from_le(self.0.word().load(Ordering::Relaxed)))
    }

    fn is_lost(&self) -> bool {
        self.0.mapping.is_lost()
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use crate::create_sealed;

    #[test]
    fn word_outside_its_segment_is_refused_also_where_its_end_would_wrap() {
        for offset in [4096, 4092, 4089, usize::MAX - 7, usize::MAX - 15] {
            let (own, fd) = create_sealed("test", 8192).unwrap();
            let peer = crate::PeerSegment::map(std::os::fd::AsFd::as_fd(&fd), 4096).unwrap();
            let refused = [
                catch_unwind(AssertUnwindSafe(|| own.split(4096).0.word(offset))).map(drop),
                catch_unwind(AssertUnwindSafe(|| peer.word(offset))).map(drop),
            ];
            for panic in refused {
                let said = *panic.expect_err("a word outside").downcast::<String>().unwrap();
                assert!(said.starts_with("word at"), "{said}");
            }
        }
    }
}
