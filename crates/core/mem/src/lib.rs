// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 0. Uses: nothing.
//!
//! Memory that another domain maps as well: how it is made, mapped, copied and read.
//!
//! Laws of this crate, from which everything else follows:
//!
//! 1. Each segment has one owner, who alone writes it ([`OwnSegment`]); its peer maps it read-only ([`PeerSegment`]).
//! 2. No `&[u8]` to memory that a peer can write. What a peer wrote is copied out, or handed out as a
//!    [`SharedSlice`]. The one exception is an `unsafe fn` whose contract says that the peer is trusted.
//! 3. A word of the peer is [`Untrusted`] until it was checked, and is loaded once.
//!
//! [`CommonSegment`] is exempt by name: memory that both endpoints write, for a wire format that is not ours (ADR
//! 0050).
//!
//! Why there is `unsafe` at all: mapping memory, and reaching it by address, is what this crate is for. It is the one
//! place below the backends that does so; the modules [`map`](self), `word`, `data`, `copy`, `loss`, `common` and `mutual`
//! hold all of it.
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

/// The kind of memory a ring runs over: mapped segments in real life, a model checker's cells in its proofs.
pub trait Mem: Debug {
    /// A word that this endpoint writes and the peer reads.
    type OwnWord: OwnWord + Debug;
    /// A word that the peer writes.
    type PeerWord: PeerWord + Debug;
    /// Data that this endpoint writes.
    type OwnData: OwnData + Debug;
    /// Data that the peer writes.
    type PeerData: PeerData + Debug;

    /// A full fence: everything before it is visible to the peer before anything after it is done.
    fn fence();

    /// What stands in for [`Mem::fence`] where the other side issues a process-wide barrier instead: the compiler keeps
    /// the order, the CPU need not.
    fn light_fence();

    /// Tells the CPU that this is a spin loop.
    fn pause();
}

/// A `u64` in this endpoint's own memory: written here, read by the peer.
pub trait OwnWord {
    /// Publishes `value`, and with it all that was written before.
    fn store_release(&self, value: u64);
    /// Stores `value` with no order of its own; a fence gives it one.
    fn store_relaxed(&self, value: u64);
    /// This endpoint's own last value.
    fn load(&self) -> u64;
}

/// A `u64` in the peer's memory. Every load gives a new, unchecked word.
pub trait PeerWord {
    /// The word, and with it all that the peer wrote before it published the word.
    fn load_acquire(&self) -> Untrusted<u64>;
    /// The word with no order of its own; a fence gives it one.
    fn load_relaxed(&self) -> Untrusted<u64>;
    /// Whether the memory was taken away by the time of the last load, so that what was loaded may not be the peer's word.
    fn is_lost(&self) -> bool {
        false
    }
}

/// Bytes in this endpoint's own memory.
pub trait OwnData {
    /// How many.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Copies `from` to `offset`.
    ///
    /// # Panics
    /// Where it would not fit.
    fn copy_in(&mut self, offset: usize, from: &[u8]);
    /// Whether [`copy_in_past_caches`](Self::copy_in_past_caches) is another way, and this CPU good at it.
    fn can_bypass_caches(&self) -> bool {
        false
    }

    /// The same past the caches, where the CPU has stores for that. All of it is there before what this thread stores next.
    fn copy_in_past_caches(&mut self, offset: usize, from: &[u8]) {
        self.copy_in(offset, from);
    }
    /// Stores a little-endian word at `offset`, a multiple of eight.
    ///
    /// # Panics
    /// Where it would not fit.
    fn put_word(&mut self, offset: usize, word: u64) {
        self.copy_in(offset, &word.to_le_bytes());
    }
    /// Tells the CPU that the line at `offset` is to be written soon; a hint, so out of bounds it does nothing.
    fn prepare(&self, _offset: usize) {}
    /// Copies what stands at `offset` back into `to`: this endpoint alone wrote it, so it is trusted.
    ///
    /// # Panics
    /// Where it would reach beyond the end.
    fn copy_back(&self, offset: usize, to: &mut [u8]);
    /// Whether the memory was taken away by the time of the last copy, so that what was copied back may not be what was written.
    fn is_lost(&self) -> bool {
        false
    }
}

/// Bytes in the peer's memory.
pub trait PeerData {
    /// How many.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Copies what stands at `offset` now into `to`. The peer may be writing there: the bytes are what they are.
    ///
    /// # Panics
    /// Where it would reach beyond the end.
    fn copy_out(&self, offset: usize, to: &mut [u8]);
    /// Loads the little-endian word that stands at `offset`, a multiple of eight, now.
    ///
    /// # Panics
    /// Where it would reach beyond the end.
    fn word(&self, offset: usize) -> Untrusted<u64> {
        let mut bytes = [0; 8];
        self.copy_out(offset, &mut bytes);
        Untrusted::new(u64::from_le_bytes(bytes))
    }
    /// Asks the CPU to fetch the lines of `offset .. offset + len`; a hint, so out of bounds it does nothing.
    fn prefetch(&self, offset: usize, len: usize);
    /// Whether the memory was taken away by the time of the last copy, so that what was copied may not be the peer's bytes.
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
