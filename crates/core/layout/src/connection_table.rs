// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The list that a process keeps of its TCP connections for whoever looks at it from outside (S-11). Nothing reads it
//! but tools for people.

use crate::sockets::Address;

/// What the memory is called.
pub const MEMORY: &str = "tombolo-sockets";
/// Bytes of it.
pub const LEN: usize = 128 << 10;
/// The first word: "TMBLROS", version 1.
pub const MAGIC: u64 = u64::from_le_bytes(*b"TMBLROS\x01");
/// Where the word stands that counts the connections for which there was no row.
pub const HIDDEN: usize = 8;
/// Words of a row that are in use, and bytes from one to the next.
pub const WORDS: usize = 11;
const STRIDE: usize = 128;
/// How many rows there are.
pub const ROWS: usize = LEN / STRIDE - 1;

/// Where the word `at` of a row stands. Word 0 is 0 where there is no connection, and else a number
/// that no earlier row had: who reads it before and after the others has read one row.
#[must_use]
pub const fn place(row: usize, word: usize) -> usize {
    (row + 1) * STRIDE + word * 8
}

/// The words that change: what it is carried by, and the four counts.
pub const STATE: usize = 6;
/// Sent over TCP, sent through the pipe, received over TCP, received through the pipe.
pub const COUNTS: usize = 7;

/// How far a connection is, and so what carries it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Stage {
    /// TCP: the other endpoint is looked for.
    Candidate = 0,
    /// It has pipes, or is on the way back from them if there is a reason.
    Joined = 1,
    /// TCP, for good.
    Plain = 2,
}

/// One connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// Own address, the peer's.
    pub addresses: [Address; 2],
    /// How it is carried.
    pub stage: Stage,
    /// Why it is on TCP, if that is decided (S-8).
    pub reason: Option<u16>,
    /// As [`COUNTS`] says.
    pub counts: [u64; 4],
}

/// The word [`STATE`].
#[must_use]
pub const fn state(stage: Stage, reason: Option<u16>) -> u64 {
    let reason = match reason {
        Some(reason) => 1 << 32 | reason as u64,
        None => 0,
    };
    reason << 8 | stage as u64
}

impl Row {
    /// All its words but the first.
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

    /// Of its words but the first; `None` where they are none.
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
