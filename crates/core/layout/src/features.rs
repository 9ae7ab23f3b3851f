// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Feature bits of a channel: offered by both endpoints, in force where both offered them (C-4).

/// A set of feature bits.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Features(pub u64);

impl Features {
    /// No feature beyond the base protocol.
    pub const NONE: Self = Self(0);
    /// Records instead of a stream of bytes.
    pub const MESSAGES: Self = Self(1 << 0);
    /// This endpoint's process is registered for the kernel's global expedited membarrier, and both endpoints run on
    /// one kernel: the notifier omits its fence, and the waiter issues the barrier.
    pub const MEMBARRIER: Self = Self(1 << 1);
    /// This endpoint follows a hand-over to a new ring (H-*).
    pub const HANDOVER: Self = Self(1 << 2);
    /// This endpoint publishes its counters on its stats page, for tools that read its segment from outside (C-12).
    pub const STATISTICS: Self = Self(1 << 3);
    /// This endpoint follows its peer's writer into a ring that was offered and not taken yet (H-9).
    pub const AHEAD: Self = Self(1 << 4);
    /// Reserved: several reader pages on one pipe.
    pub const MULTICAST: Self = Self(1 << 8);
    /// Reserved: records that describe buffers in a shared pool.
    pub const POOL: Self = Self(1 << 9);
    /// Reserved: padding records, so that no record straddles the end of the ring.
    pub const CONTIGUOUS: Self = Self(1 << 10);

    /// Bits that this version supports.
    pub const KNOWN: Self =
        Self(Self::MESSAGES.0 | Self::MEMBARRIER.0 | Self::HANDOVER.0 | Self::STATISTICS.0 | Self::AHEAD.0);

    /// Returns whether all bits of `other` are set.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the bits set in both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the bits set in either.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the bits of this set that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns whether no bit is set.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}
