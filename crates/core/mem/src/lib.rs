// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 0. Uses: nothing.
//!
//! Makes, maps, copies and reads memory that another domain maps as well.
//!
//! Rules of this crate, from which everything else follows:
//!
//! 1. Each segment has one owner, which alone writes it ([`OwnSegment`]); its peer maps it read-only ([`PeerSegment`]).
//! 2. No `&[u8]` refers to memory that a peer can write. Bytes of a peer are copied out, or handed out as a
//!    [`SharedSlice`]. The one exception is an `unsafe fn` whose contract says that the peer is trusted.
//! 3. A word of the peer is [`Untrusted`] until it was checked, and is loaded once.
//!
//! [`CommonSegment`] is the named exception: memory that both endpoints write, for a foreign wire format (ADR 0050).
//!
//! This crate needs `unsafe` because its purpose is to map memory and to access it by address. It is the only place
//! below the backends that does so. The modules [`map`](self), `word`, `data`, `copy`, `loss`, `common` and `mutual`
//! contain all of it.
#![deny(unsafe_code)]

mod common;
mod copy;
mod data;
mod loss;
mod map;
mod memfd;
mod mutual;
mod segment;
mod untrusted;
mod word;

pub use common::{Common, LockGuard};
pub use copy::CopyMethod;
pub use data::{OwnBytes, PeerBytes, SharedSlice};
pub use map::replace_forgotten_mappings;
#[cfg(feature = "testing")]
pub use memfd::create_forgeable;
pub use memfd::{SealError, check_sealed, counts_pages, create_sealed, create_sealed_kept};
pub use mutual::CommonSegment;
#[cfg(miri)]
pub use segment::create_alone;
pub use segment::{OwnControl, OwnSegment, PeerSegment};
pub use untrusted::Untrusted;
pub use word::{MappedOwnWord, MappedPeerWord};

use std::fmt::Debug;

/// Kind of memory that a ring uses: mapped segments in operation, the cells of a model checker in its proofs.
pub trait Mem: Debug {
    /// Word that this endpoint writes and the peer reads.
    type OwnWord: OwnWord + Debug;
    /// Word that the peer writes.
    type PeerWord: PeerWord + Debug;
    /// Data that this endpoint writes.
    type OwnData: OwnData + Debug;
    /// Data that the peer writes.
    type PeerData: PeerData + Debug;

    /// Issues a full fence: everything before it is visible to the peer before anything after it is done.
    fn fence();

    /// Replaces [`Mem::fence`] where the other side issues a process-wide barrier instead: the compiler keeps the
    /// order, the CPU need not.
    fn light_fence();

    /// Tells the CPU that this is a spin loop.
    fn pause();
}

/// A `u64` in this endpoint's own memory: written here, read by the peer.
pub trait OwnWord {
    /// Publishes `value`, and with it everything that was written before.
    fn store_release(&self, value: u64);
    /// Stores `value` without an order of its own; a fence orders it.
    fn store_relaxed(&self, value: u64);
    /// Returns the last value that this endpoint stored.
    fn load(&self) -> u64;
}

/// A `u64` in the peer's memory. Every load returns a new, unchecked word.
pub trait PeerWord {
    /// Loads the word, and with it everything that the peer wrote before it published the word.
    fn load_acquire(&self) -> Untrusted<u64>;
    /// Loads the word without an order of its own; a fence orders it.
    fn load_relaxed(&self) -> Untrusted<u64>;
    /// Returns whether the memory was taken away by the time of the last load, so that the loaded word may not be the
    /// peer's.
    fn is_lost(&self) -> bool {
        false
    }
}

/// Bytes in this endpoint's own memory.
pub trait OwnData {
    /// Returns the number of bytes.
    fn len(&self) -> usize;
    /// Returns whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Copies `from` to `offset`.
    ///
    /// # Panics
    /// If it does not fit.
    fn copy_in(&mut self, offset: usize, from: &[u8]);
    /// Returns whether [`copy_in_past_caches`](Self::copy_in_past_caches) is a separate method, and this CPU does it
    /// well.
    fn can_bypass_caches(&self) -> bool {
        false
    }

    /// Copies `from` to `offset` past the caches, if the CPU has stores for that. All bytes are visible before the next
    /// store of this thread.
    fn copy_in_past_caches(&mut self, offset: usize, from: &[u8]) {
        self.copy_in(offset, from);
    }
    /// Stores a little-endian word at `offset`, a multiple of eight.
    ///
    /// # Panics
    /// If it does not fit.
    fn put_word(&mut self, offset: usize, word: u64) {
        self.copy_in(offset, &word.to_le_bytes());
    }
    /// Tells the CPU that the line at `offset` will soon be written. As a hint, it does nothing out of bounds.
    fn prepare(&self, _offset: usize) {}
    /// Copies the bytes at `offset` back into `to`. Only this endpoint wrote them, so they are trusted.
    ///
    /// # Panics
    /// If they reach beyond the end.
    fn copy_back(&self, offset: usize, to: &mut [u8]);
    /// Returns whether the memory was taken away by the time of the last copy, so that it may not have copied the bytes
    /// written.
    fn is_lost(&self) -> bool {
        false
    }
}

/// Bytes in the peer's memory.
pub trait PeerData {
    /// Returns the number of bytes.
    fn len(&self) -> usize;
    /// Returns whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Copies the bytes that are at `offset` now into `to`. The peer may be writing there, so any bytes may result.
    ///
    /// # Panics
    /// If they reach beyond the end.
    fn copy_out(&self, offset: usize, to: &mut [u8]);
    /// Loads the little-endian word that is at `offset`, a multiple of eight, now.
    ///
    /// # Panics
    /// If it reaches beyond the end.
    fn word(&self, offset: usize) -> Untrusted<u64> {
        let mut bytes = [0; 8];
        self.copy_out(offset, &mut bytes);
        Untrusted::new(u64::from_le_bytes(bytes))
    }
    /// Asks the CPU to fetch the lines of `offset .. offset + len`. As a hint, it does nothing out of bounds.
    fn prefetch(&self, offset: usize, len: usize);
    /// Returns whether the memory was taken away by the time of the last copy, so that the bytes may not be the peer's.
    fn is_lost(&self) -> bool {
        false
    }
}

/// Real memory: segments mapped into this process.
#[derive(Debug)]
pub enum Mapped {}

impl Mem for Mapped {
    type OwnWord = MappedOwnWord;
    type PeerWord = MappedPeerWord;
    type OwnData = OwnBytes;
    type PeerData = PeerBytes;

    #[inline]
    fn fence() {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    #[inline]
    fn light_fence() {
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    }

    #[inline]
    fn pause() {
        std::hint::spin_loop();
    }
}
