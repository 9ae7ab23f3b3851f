// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Features: what an endpoint takes beyond plain frames (N-4).

/// Features that an endpoint takes: bits of its hello.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features(u64);

impl Features {
    /// Frames whose checksum is still to be computed.
    pub const CHECKSUM: Self = Self(1);
    /// Segments of TCP over IPv4 that are still to be divided.
    pub const TSO4: Self = Self(1 << 1);
    /// Segments of TCP over IPv6 that are still to be divided.
    pub const TSO6: Self = Self(1 << 2);
    /// TCP segments with congestion marks.
    pub const ECN: Self = Self(1 << 3);
    /// Datagrams of UDP that are still to be divided, over IPv4 or IPv6.
    pub const USO: Self = Self(1 << 4);

    /// Names for people and scripts.
    const NAMES: [(Self, &'static str); 5] = [
        (Self::CHECKSUM, "checksum"),
        (Self::TSO4, "tso4"),
        (Self::TSO6, "tso6"),
        (Self::ECN, "ecn"),
        (Self::USO, "uso"),
    ];

    /// No features: plain frames only.
    #[must_use]
    pub const fn none() -> Self {
        Self(0)
    }

    /// All features.
    #[must_use]
    pub const fn all() -> Self {
        Self(0x1f)
    }

    /// Decodes the `bits` of a hello. Ignores unknown bits, and all others if checksums are missing.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        if bits & Self::CHECKSUM.0 == 0 { Self(0) } else { Self(bits & Self::all().0) }
    }

    /// Returns the bits of a hello.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns whether all features of `other` are included.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the features without those of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the features that `other` has as well.
    #[must_use]
    pub const fn among(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the names of the features.
    #[must_use]
    pub fn names(self) -> Vec<&'static str> {
        Self::NAMES.iter().filter(|(bit, _)| self.has(*bit)).map(|(_, name)| *name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n4_unknown_bits_mean_nothing_and_segments_need_checksums() {
        assert_eq!(Features::from_bits(u64::MAX), Features::all());
        assert_eq!(Features::from_bits(0x1e), Features::none());
        assert_eq!(Features::from_bits(1 << 40), Features::none());
        assert_eq!(Features::from_bits(0x03).names(), ["checksum", "tso4"]);
        assert_eq!(Features::all().without(Features::USO).bits(), 0x0f);
        assert!(Features::all().has(Features::USO) && !Features::from_bits(0x0f).has(Features::USO));
    }
}
