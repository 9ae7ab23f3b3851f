// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defines the connection table: the list of its TCP connections that a process publishes for outside observers (S-11).
//! Only tools for people read it.

use crate::sockets::Address;

/// Name of the memory.
pub const MEMORY: &str = "tombolo-sockets";
/// Size of the memory in bytes.
pub const LEN: usize = 128 << 10;
/// First word: "TMBLROS", version 1.
pub const MAGIC: u64 = u64::from_le_bytes(*b"TMBLROS\x01");
/// Offset of the word that counts the connections for which there was no row.
pub const HIDDEN: usize = 8;
/// Number of words of a row that are in use. `STRIDE` is the number of bytes from one row to the next.
pub const WORDS: usize = 11;
const STRIDE: usize = 128;
/// Number of rows.
pub const ROWS: usize = LEN / STRIDE - 1;

/// Returns the offset of word `word` of a row. Word 0 is 0 if the row has no connection, and otherwise a number that no
/// earlier row had. A reader that finds the same number before and after it reads the other words has read one row.
#[must_use]
pub const fn place(row: usize, word: usize) -> usize {
    (row + 1) * STRIDE + word * 8
}

/// Index of the first word that changes: the transport. The four counts follow.
pub const STATE: usize = 6;
/// Index of the counts: sent over TCP, sent through the pipe, received over TCP, received through the pipe.
pub const COUNTS: usize = 7;

/// Progress of a connection, which determines its transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Stage {
    /// On TCP while the other endpoint is searched for.
    Candidate = 0,
    /// Has pipes, or is on the way back from them if there is a reason.
    Joined = 1,
    /// On TCP permanently.
    Plain = 2,
}

/// One connection of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// Own address, then the peer's.
    pub addresses: [Address; 2],
    /// Progress of the connection.
    pub stage: Stage,
    /// Reason why it stays on TCP, if that is decided (S-8).
    pub reason: Option<u16>,
    /// Counts in the order of [`COUNTS`].
    pub counts: [u64; 4],
}

/// Returns the word [`STATE`].
#[must_use]
pub const fn state(stage: Stage, reason: Option<u16>) -> u64 {
    let reason = match reason {
        Some(reason) => 1 << 32 | reason as u64,
        None => 0,
    };
    reason << 8 | stage as u64
}

impl Row {
    /// Returns all words of the row but the first.
    #[must_use]
    pub fn encode(&self) -> [u64; WORDS - 1] {
        let [own, peer] = self.addresses;
        let half = |host: [u8; 16], at: usize| u64::from_le_bytes(host[at..at + 8].try_into().expect("eight bytes"));
        let [a, b, c, d] = self.counts;
        [
            u64::from(own.port) << 16 | u64::from(peer.port),
            half(own.host, 0),
            half(own.host, 8),
            half(peer.host, 0),
            half(peer.host, 8),
            state(self.stage, self.reason),
            a,
            b,
            c,
            d,
        ]
    }

    /// Decodes the words of a row but the first. Returns `None` if they are invalid.
    #[must_use]
    pub fn decode(words: [u64; WORDS - 1]) -> Option<Self> {
        let [ports, a, b, c, d, state, counts @ ..] = words;
        let host = |low: u64, high: u64| {
            let mut host = [0; 16];
            host[..8].copy_from_slice(&low.to_le_bytes());
            host[8..].copy_from_slice(&high.to_le_bytes());
            host
        };
        let stage = match state as u8 {
            0 => Stage::Candidate,
            1 => Stage::Joined,
            2 => Stage::Plain,
            _ => return None,
        };
        let addresses = [
            Address { host: host(a, b), port: (ports >> 16) as u16 },
            Address { host: host(c, d), port: ports as u16 },
        ];
        Some(Self { addresses, stage, reason: (state >> 40 != 0).then_some((state >> 8) as u16), counts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s11_row_is_read_as_it_was_written() {
        let address = |host, port| Address { host: [host; 16], port };
        for (stage, reason) in [(Stage::Candidate, None), (Stage::Joined, Some(0)), (Stage::Plain, Some(13))] {
            let row =
                Row { addresses: [address(1, 80), address(2, 65535)], stage, reason, counts: [1, 2, 3, u64::MAX] };
            assert_eq!(Row::decode(row.encode()), Some(row));
        }
        assert_eq!(Row::decode([0xff; WORDS - 1]), None);
        assert!(place(ROWS - 1, WORDS) <= LEN);
    }
}
