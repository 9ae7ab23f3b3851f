// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defines the head that the `local` backend puts in front of a control message on its socket, and the names of its
//! memory (L-4, L-5, L-13).
//!
//! ```text
//! 0..4   magic "TMBL", for ever
//! 4      doorbells that the datagram carries: 2 in the first one of each side, else 0
//! 5      segments that it carries: 0 or 1
//! 6..8   bytes of the message behind this head
//! ```

use crate::{
    header::{put, u16_at},
    limits::{CONTROL_MESSAGE_MAX, CONTROL_SEGMENTS_MAX},
};

/// First four bytes of every datagram (L-4).
pub const MAGIC: [u8; 4] = *b"TMBL";
/// Size of the head in bytes (L-4).
pub const HEAD_LEN: usize = 8;
/// Size of the longest datagram (L-4).
pub const DATAGRAM_MAX: usize = HEAD_LEN + CONTROL_MESSAGE_MAX;
/// Number of doorbells in the first datagram of each side: data, then space (L-5).
pub const DOORBELLS: usize = 2;
/// Largest number of descriptors that a datagram may carry: the doorbells, then the segment (L-5).
pub const DESCRIPTORS_MAX: usize = DOORBELLS + 1 + CONTROL_SEGMENTS_MAX;

/// Name of a segment's memfd. If its owner listened, a colon and the socket's path follow (L-13).
pub const MEMORY: &str = "tombolo";
/// Length of the longest name of a memfd in Linux (L-13).
pub const MEMFD_NAME_MAX: usize = 249;

const AT_DOORBELLS: usize = 4;
const AT_SEGMENTS: usize = 5;
const AT_LEN: usize = 6;

/// Fields of the head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// Whether the doorbells come with the datagram.
    pub doorbells: bool,
    /// Whether one doorbell for the subject of the message comes with the datagram.
    pub single: bool,
    /// Whether a segment comes with the datagram.
    pub segment: bool,
    /// Size of the message in bytes.
    pub len: u16,
}

impl Head {
    /// Returns the bytes to put in front of the message.
    #[must_use]
    pub fn encode(&self) -> [u8; HEAD_LEN] {
        let mut bytes = [0; HEAD_LEN];
        put(&mut bytes, 0, &MAGIC);
        bytes[AT_DOORBELLS] = self.doorbell_count() as u8;
        bytes[AT_SEGMENTS] = u8::from(self.segment);
        put(&mut bytes, AT_LEN, &self.len.to_le_bytes());
        bytes
    }

    /// Splits a datagram into its head and its message.
    ///
    /// # Errors
    /// A description of the fault; the clause is always L-4.
    pub fn decode(datagram: &[u8]) -> Result<(Self, &[u8]), &'static str> {
        let Some((head, message)) = datagram.split_at_checked(HEAD_LEN) else {
            return Err("datagram is shorter than its head");
        };
        if head[..4] != MAGIC {
            return Err("datagram does not begin with the magic");
        }
        let (doorbells, single) = match usize::from(head[AT_DOORBELLS]) {
            0 => (false, false),
            1 => (false, true),
            DOORBELLS => (true, false),
            3 => (true, true),
            _ => return Err("datagram claims more than three doorbells"),
        };
        let segment = match head[AT_SEGMENTS] {
            0 => false,
            1 => true,
            _ => return Err("datagram claims more than one segment"),
        };
        let len = u16_at(head, AT_LEN);
        if usize::from(len) != message.len() || message.len() > CONTROL_MESSAGE_MAX {
            return Err("datagram is not as long as its head says");
        }
        Ok((Self { doorbells, single, segment, len }, message))
    }

    const fn doorbell_count(&self) -> usize {
        (if self.doorbells { DOORBELLS } else { 0 }) + self.single as usize
    }

    /// Returns the number of descriptors that come with the datagram.
    #[must_use]
    pub const fn descriptors(&self) -> usize {
        self.doorbell_count() + self.segment as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram() -> [u8; HEAD_LEN + 5] {
        let mut bytes = [0x55; HEAD_LEN + 5];
        put(&mut bytes, 0, &Head { doorbells: true, single: false, segment: true, len: 5 }.encode());
        bytes
    }

    #[test]
    fn l4_head_comes_back_as_it_was_sent() {
        let (head, message) = Head::decode(&datagram()).map(|(head, message)| (head, message.to_vec())).unwrap();
        assert_eq!(head, Head { doorbells: true, single: false, segment: true, len: 5 });
        assert_eq!((message.len(), head.descriptors()), (5, 3));
        assert_eq!(datagram()[..HEAD_LEN], *b"TMBL\x02\x01\x05\x00", "golden bytes");
        for (doorbells, count) in [(false, 1), (true, 3)] {
            let head = Head { doorbells, single: true, segment: false, len: 0 };
            assert_eq!((head.encode()[AT_DOORBELLS], head.descriptors()), (count, usize::from(count)));
            assert_eq!(Head::decode(&head.encode()), Ok((head, &[][..])));
        }
    }

    #[test]
    fn l4_truncated_or_lying_head_is_refused() {
        for len in 0..datagram().len() {
            assert!(Head::decode(&datagram()[..len]).is_err(), "{len} bytes");
        }
        for (at, lie) in
            [(0, b'X'), (3, 0), (AT_DOORBELLS, 4), (AT_DOORBELLS, 255), (AT_SEGMENTS, 2), (AT_LEN, 6), (AT_LEN + 1, 1)]
        {
            let mut bytes = datagram();
            bytes[at] = lie;
            assert!(Head::decode(&bytes).is_err(), "{lie} at {at}");
        }
    }
}
