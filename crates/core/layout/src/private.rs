// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defines the record of the private state of one half of a pipe, by which the processes of one endpoint can use it in
//! turns. It is in memory that these processes share with each other and with nobody else: a peer never sees it.

use crate::{
    header::{put, u64_at},
    state::State,
};

/// Size of the record in bytes.
pub const LEN: usize = 0x100;
/// Number of counters in the record.
pub const COUNTERS: usize = 9;

/// Version of the record.
const VERSION: u64 = 1;

// Offsets of the fields.
const AT_KIND: usize = 0x00;
const AT_STATE: usize = 0x08;
const AT_START: usize = 0x10;
const AT_POSITION: usize = 0x18;
const AT_PEER_POSITION: usize = 0x20;
const AT_BOUND: usize = 0x28;
const AT_NOTIFIED: usize = 0x30;
const AT_PEER_STATE: usize = 0x38;
const AT_RING: usize = 0x40;
const AT_TOLD: usize = 0x48;
const AT_COUNTERS: usize = 0x50;
const AT_RESERVED: usize = 0x98;
const _: () = assert!(AT_COUNTERS + 8 * COUNTERS == AT_RESERVED && AT_RESERVED < LEN);

/// Half of a pipe that a record belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Half {
    /// The writer.
    Writer,
    /// The reader.
    Reader,
}

impl Half {
    /// Returns the first field: the version, and the half that the record belongs to.
    const fn kind(self) -> u64 {
        match self {
            Self::Writer => VERSION | 1 << 16,
            Self::Reader => VERSION | 1 << 17,
        }
    }
}

/// Fields of the record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// Half that the record belongs to.
    pub half: Half,
    /// Own state word, as published.
    pub state: State,
    /// Position of the pipe's first byte.
    pub start: u64,
    /// Own position: the writer's tail or the reader's head.
    pub position: u64,
    /// The peer's position as last seen and checked.
    pub peer_position: u64,
    /// Writer: where the present ring begins to carry bytes (H-3), or the head if that is further. Reader: the head as
    /// last published.
    pub bound: u64,
    /// Wait word that the peer was last notified for.
    pub notified: u64,
    /// The peer's state word as last seen and checked.
    pub peer_state: State,
    /// Generation of the ring that the position is in.
    pub ring: u16,
    /// Reader: the newest announced ring that was examined (H-2).
    pub told: u16,
    /// Counters: records or calls; notifications sent, not sent, received; spurious wake-ups; spins that paid, that did
    /// not; sleeps; stalls.
    pub counters: [u64; COUNTERS],
}

impl Record {
    /// Returns the bytes to be shared.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        let mut field = |at, value: u64| put(&mut bytes, at, &value.to_le_bytes());
        field(AT_KIND, self.half.kind());
        field(AT_STATE, self.state.encode());
        field(AT_START, self.start);
        field(AT_POSITION, self.position);
        field(AT_PEER_POSITION, self.peer_position);
        field(AT_BOUND, self.bound);
        field(AT_NOTIFIED, self.notified);
        field(AT_PEER_STATE, self.peer_state.encode());
        field(AT_RING, self.ring.into());
        field(AT_TOLD, self.told.into());
        for (index, counter) in self.counters.iter().enumerate() {
            field(AT_COUNTERS + 8 * index, *counter);
        }
        bytes
    }

    /// Decodes a record. Returns `None` if the bytes are not of this version, or were never written.
    #[must_use]
    pub fn decode(bytes: &[u8; LEN]) -> Option<Self> {
        let field = |at| u64_at(bytes, at);
        let half = [Half::Writer, Half::Reader].into_iter().find(|half| half.kind() == field(AT_KIND))?;
        if bytes[AT_RESERVED..].iter().any(|byte| *byte != 0) {
            return None;
        }
        Some(Self {
            half,
            state: State::decode(field(AT_STATE))?,
            start: field(AT_START),
            position: field(AT_POSITION),
            peer_position: field(AT_PEER_POSITION),
            bound: field(AT_BOUND),
            notified: field(AT_NOTIFIED),
            peer_state: State::decode(field(AT_PEER_STATE))?,
            ring: u16::try_from(field(AT_RING)).ok()?,
            told: u16::try_from(field(AT_TOLD)).ok()?,
            counters: core::array::from_fn(|index| field(AT_COUNTERS + 8 * index)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Phase;

    fn sample(half: Half) -> Record {
        Record {
            half,
            state: State { phase: Phase::Closed, ready: 3, current: 2 },
            start: u64::MAX,
            position: 0x1818,
            peer_position: 0x2020,
            bound: 0x2828,
            notified: 0x3031,
            peer_state: State { phase: Phase::Open, ready: 0x38, current: 0 },
            ring: 0x4040,
            told: 0x4848,
            counters: core::array::from_fn(|index| 0x5050 + 0x808 * index as u64),
        }
    }

    #[test]
    fn r26_record_comes_back_as_it_was_written() {
        for half in [Half::Writer, Half::Reader] {
            assert_eq!(Record::decode(&sample(half).encode()), Some(sample(half)));
        }
    }

    #[test]
    fn r26_fields_stand_where_the_specification_says() {
        let bytes = sample(Half::Writer).encode();
        assert_eq!(u64_at(&bytes, 0), 0x1_0001);
        assert_eq!(u64_at(&sample(Half::Reader).encode(), 0), 0x2_0001);
        assert_eq!((u64_at(&bytes, 0x08), u64_at(&bytes, 0x10)), (0x2_0003_0002, u64::MAX));
        assert_eq!((u64_at(&bytes, 0x30), u64_at(&bytes, 0x38)), (0x3031, 0x38_0001));
        for at in (0x18..0x30).chain(0x40..0x98).step_by(8) {
            assert_eq!(u64_at(&bytes, at), (at << 8 | at) as u64, "field at {at:#x}");
        }
    }

    #[test]
    fn r26_memory_that_holds_no_record_of_this_version_is_refused() {
        assert_eq!(Record::decode(&[0; LEN]), None, "never written");
        for at in (0..8).chain([0x09, 0x3f, 0x42, 0x4f]).chain(AT_RESERVED..LEN) {
            let mut bytes = sample(Half::Reader).encode();
            bytes[at] ^= 0x80;
            assert_eq!(Record::decode(&bytes), None, "byte {at:#x}");
        }
    }
}
