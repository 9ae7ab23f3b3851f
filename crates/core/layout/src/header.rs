// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defines the immutable header of a segment. Its owner writes it once before the peer learns of the segment. The
//! receiver copies and checks it once, and never reads it again (M-1 to M-4).

use crate::{Features, MAGIC, VERSION, limits};

/// Size of the header in bytes; the words begin after it.
pub const LEN: usize = 0x80;

// Offsets of the fields (M-1 to M-4).
const AT_MAGIC: usize = 0x00;
const AT_VERSION: usize = 0x08;
const AT_RESERVED_A: usize = 0x0a;
const AT_GENERATION: usize = 0x0c;
const AT_RESERVED_B: usize = 0x0e;
/// Offset of the length of the segment (M-2).
pub const SEGMENT_LEN: usize = 0x10;
const AT_DATA_OFFSET: usize = 0x18;
const AT_CAPACITY: usize = 0x20;
const AT_START: usize = 0x28;
const AT_FEATURES: usize = 0x30;
const AT_EPOCH: usize = 0x38;
const AT_RESERVED_C: usize = 0x40;

/// Fields of the header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentHeader {
    /// Generation of this ring in its pipe; 0 is the ring that the channel begins with (H-1).
    pub generation: u16,
    /// Size of the whole segment in bytes (M-2).
    pub segment_len: u64,
    /// Offset of the data (M-4).
    pub data_offset: u64,
    /// Size of the ring in bytes, a power of two (M-4).
    pub capacity: u64,
    /// Position of the first byte that this ring carries (M-4).
    pub start: u64,
    /// Features that the owner offers (C-4).
    pub features: Features,
    /// Random number that names the owner's endpoint of this channel, so that a stale peer is refused (M-3).
    pub epoch: u64,
}

/// Fields of a checked header that a receiver keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Offset of the data in the segment.
    pub data_offset: usize,
    /// Size of the ring in bytes, a power of two.
    pub capacity: u64,
    /// Position of the first byte that this ring carries.
    pub start: u64,
}

/// Reason why a header is refused: the clause that it breaks and the value found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeaderError {
    /// Clause of `spec/1-memory.md`.
    pub clause: &'static str,
    /// Description of the fault.
    pub what: &'static str,
    /// Value found.
    pub found: u64,
}

impl SegmentHeader {
    /// Returns the header of a fresh segment around a ring of `capacity` bytes.
    #[must_use]
    pub const fn new(capacity: u64, generation: u16, start: u64, features: Features, epoch: u64) -> Self {
        Self {
            generation,
            segment_len: limits::CONTROL_LEN + capacity,
            data_offset: limits::CONTROL_LEN,
            capacity,
            start,
            features,
            epoch,
        }
    }

    /// Returns the bytes to be written at offset 0.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        put(&mut bytes, AT_MAGIC, &MAGIC);
        put(&mut bytes, AT_VERSION, &VERSION.to_le_bytes());
        put(&mut bytes, AT_GENERATION, &self.generation.to_le_bytes());
        put(&mut bytes, SEGMENT_LEN, &self.segment_len.to_le_bytes());
        put(&mut bytes, AT_DATA_OFFSET, &self.data_offset.to_le_bytes());
        put(&mut bytes, AT_CAPACITY, &self.capacity.to_le_bytes());
        put(&mut bytes, AT_START, &self.start.to_le_bytes());
        put(&mut bytes, AT_FEATURES, &self.features.0.to_le_bytes());
        put(&mut bytes, AT_EPOCH, &self.epoch.to_le_bytes());
        bytes
    }

    /// Decodes a private copy of a peer's header, and checks it against `segment_len`, the size of the memory that was
    /// really received.
    ///
    /// # Errors
    /// The first clause that the header breaks.
    pub fn decode(bytes: &[u8; LEN], segment_len: u64) -> Result<Self, HeaderError> {
        let magic = u64_at(bytes, AT_MAGIC);
        check(magic == u64::from_le_bytes(MAGIC), "M-1", "no Tombolo segment begins here", magic)?;
        let version = u16_at(bytes, AT_VERSION);
        check(version == VERSION, "M-1", "layout version that this end does not speak", version.into())?;
        let header = Self {
            generation: u16_at(bytes, AT_GENERATION),
            segment_len: u64_at(bytes, SEGMENT_LEN),
            data_offset: u64_at(bytes, AT_DATA_OFFSET),
            capacity: u64_at(bytes, AT_CAPACITY),
            start: u64_at(bytes, AT_START),
            features: Features(u64_at(bytes, AT_FEATURES)),
            epoch: u64_at(bytes, AT_EPOCH),
        };
        let reserved = u64::from(u16_at(bytes, AT_RESERVED_A) | u16_at(bytes, AT_RESERVED_B));
        check(reserved == 0, "M-3", "reserved bytes are not zero", reserved)?;
        let reserved = bytes[AT_RESERVED_C..].iter().fold(0, |or, byte| or | byte);
        check(reserved == 0, "M-3", "reserved bytes are not zero", reserved.into())?;

        let found = header.segment_len;
        check(found == segment_len, "M-2", "segment length differs from the memory received", found)?;
        let found = header.capacity;
        let in_range = (limits::CAPACITY_MIN..=limits::CAPACITY_MAX).contains(&found);
        check(in_range && found.is_power_of_two(), "M-4", "capacity is no power of two in range", found)?;
        let found = header.data_offset;
        check(found >= limits::CONTROL_LEN && found % limits::PAGE == 0, "M-4", "data offset out of place", found)?;
        let end = found.checked_add(header.capacity);
        check(end == Some(segment_len), "M-4", "data do not end where the segment ends", found)?;
        Ok(header)
    }

    /// Returns the part that a ring needs.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        let data_offset = usize::try_from(self.data_offset).expect("checked to lie inside a mapped segment");
        Geometry { data_offset, capacity: self.capacity, start: self.start }
    }
}

const fn check(holds: bool, clause: &'static str, what: &'static str, found: u64) -> Result<(), HeaderError> {
    if holds { Ok(()) } else { Err(HeaderError { clause, what, found }) }
}

pub(crate) fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> SegmentHeader {
        SegmentHeader::new(1 << 16, 3, 77, Features::HANDOVER, 0x0123_4567_89ab_cdef)
    }

    #[test]
    fn m1_header_comes_back_as_it_was_written() {
        assert_eq!(SegmentHeader::decode(&sample().encode(), 4096 + (1 << 16)), Ok(sample()));
    }

    #[test]
    fn m1_other_magic_or_version_is_refused() {
        for at in [AT_MAGIC, AT_MAGIC + 7, AT_VERSION, AT_VERSION + 1] {
            let mut bytes = sample().encode();
            bytes[at] ^= 0x40;
            assert_eq!(SegmentHeader::decode(&bytes, 4096 + (1 << 16)).unwrap_err().clause, "M-1");
        }
    }

    #[test]
    fn m2_length_that_differs_from_the_memory_is_refused() {
        let error = SegmentHeader::decode(&sample().encode(), 4096 + (1 << 17)).unwrap_err();
        assert_eq!((error.clause, error.found), ("M-2", 4096 + (1 << 16)));
    }

    #[test]
    fn m3_reserved_byte_that_is_not_zero_is_refused() {
        let reserved = [AT_RESERVED_A, AT_RESERVED_A + 1, AT_RESERVED_B, AT_RESERVED_B + 1];
        for at in reserved.into_iter().chain(AT_RESERVED_C..LEN) {
            let mut bytes = sample().encode();
            bytes[at] = 1;
            assert_eq!(SegmentHeader::decode(&bytes, 4096 + (1 << 16)).unwrap_err().clause, "M-3", "byte {at}");
        }
    }

    #[test]
    fn m4_impossible_geometry_is_refused() {
        let refused = |change: fn(&mut SegmentHeader)| {
            let mut header = sample();
            change(&mut header);
            SegmentHeader::decode(&header.encode(), header.segment_len).unwrap_err().clause
        };
        assert_eq!(refused(|h| h.capacity = 0), "M-4");
        assert_eq!(refused(|h| h.capacity = 2048), "M-4");
        assert_eq!(refused(|h| h.capacity = (1 << 16) + 8), "M-4");
        assert_eq!(refused(|h| h.capacity = 1 << 31), "M-4");
        assert_eq!(refused(|h| h.data_offset = 0), "M-4");
        assert_eq!(refused(|h| h.data_offset = 4100), "M-4");
        assert_eq!(refused(|h| h.data_offset = 8192), "M-4");
        assert_eq!(refused(|h| h.data_offset = !4095), "M-4", "the sum overflows");
    }
}
