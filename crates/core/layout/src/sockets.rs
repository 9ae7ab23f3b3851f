// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defines what two endpoints of a TCP connection exchange when its bytes go through shared memory (S-*). It holds the
//! words by which each direction moves between the kernel's connection and its pipe, and the messages by which two
//! endpoints find out that they belong to one connection.

use alloc::vec::Vec;

use crate::{
    MAGIC,
    header::{put, u16_at, u64_at},
};

/// Offset of the number of moves of the direction that this endpoint sends: even on TCP, odd in the pipe (S-1). Owner:
/// the sender.
pub const MOVES: usize = 0x300;
/// Offset of the point of the last move: the bytes sent over TCP, or the position in the pipe (S-1). Owner: the sender.
pub const BOUNDARY: usize = 0x308;
/// Offset of the word that tells which moves the receiver has followed, and what it wants next (S-2). Owner: the
/// receiver.
pub const FOLLOWED: usize = 0x380;
const _: () = assert!(MOVES >= crate::words::RESERVED && (FOLLOWED as u64) < crate::limits::CONTROL_LEN);

/// Size in bytes of the largest ring that a connection moves to: no endpoint has to map a larger one (S-20).
pub const RING_MAX: u64 = 64 << 20;

/// Fields of the receiver's word (S-2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Followed {
    /// Number of moves that the receiver has followed.
    pub moves: u64,
    /// Whether the receiver is ready for a move into the pipe.
    pub ready: bool,
    /// Whether the receiver wants the direction on TCP.
    pub leave: bool,
}

impl Followed {
    /// Returns the word.
    #[must_use]
    pub const fn encode(self) -> u64 {
        self.moves << 2 | (self.leave as u64) << 1 | self.ready as u64
    }

    /// Returns whether the receiver is in the pipe and reads no more of it: in the pipe, *ready* has no other meaning.
    #[must_use]
    pub const fn recalls(self) -> bool {
        self.moves % 2 == 1 && self.ready && self.leave
    }

    /// Decodes the word; every word is valid.
    #[must_use]
    pub const fn decode(word: u64) -> Self {
        Self { moves: word >> 2, ready: word & 1 != 0, leave: word & 2 != 0 }
    }
}

/// Size in bytes of an address in a message: IPv6, or IPv4 mapped into it, and the port.
const ADDRESS_LEN: usize = 18;

/// One address of a connection, as IPv6 (IPv4 mapped into it).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Address {
    /// Address of the host.
    pub host: [u8; 16],
    /// Port number.
    pub port: u16,
}

/// Counts of the kernel for one endpoint: bytes of the stream, without SYN and FIN (S-5).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Bytes that the program wrote.
    pub written: u64,
    /// Bytes of these that the other endpoint's kernel acknowledged.
    pub acked: u64,
    /// Bytes that the kernel received, read or not.
    pub received: u64,
}

/// Description that an endpoint gives of itself (S-4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// A random number that names this endpoint of this connection, never 0; the epoch (M-3) of its segment.
    pub id: u64,
    /// Cookie of the network namespace; 0 if unknown.
    pub cookie: u64,
    /// Own address, then the peer's, as this endpoint sees them.
    pub addresses: [Address; 2],
    /// Number of bytes, from the beginning of what it sent and of what it read, that the endpoint can vouch for (S-6).
    pub known: [u16; 2],
    /// Counts of its kernel.
    pub counts: Counts,
    /// Random number for the tag.
    pub nonce: [u8; 16],
}

/// Number of bytes of the tag that an *Answer* carries: enough that guessing them fails, too few to search for the
/// bytes that were hashed (S-6).
pub const SHORT_TAG: usize = 4;

/// Lengths of the two directions' prefixes that were hashed, and the tag (S-6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proof {
    /// Number of bytes of the direction that the proposing endpoint sends.
    pub proposer: u32,
    /// Number of bytes of the other direction.
    pub answerer: u32,
    /// Tag; in an *Answer* all but the first [`SHORT_TAG`] bytes are zero.
    pub tag: [u8; 32],
}

impl Proof {
    /// Returns the proof as an *Answer* carries it.
    #[must_use]
    pub fn shortened(mut self) -> Self {
        self.tag[SHORT_TAG..].fill(0);
        self
    }
}

/// A message in the session of two processes. It concerns one connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// The proposing endpoint describes itself.
    Propose(Claim),
    /// The answering endpoint has found an endpoint that fits, describes it, and sends its segment.
    Answer {
        /// Number of the proposing endpoint.
        to: u64,
        /// Description of the answering endpoint.
        claim: Claim,
        /// Proof of the answering endpoint.
        proof: Proof,
    },
    /// The proposing endpoint accepts the proof, and sends its segment.
    Confirm {
        /// Number of the answering endpoint.
        to: u64,
        /// Proof of the proposing endpoint.
        proof: Proof,
    },
    /// This connection stays on TCP.
    Refuse {
        /// Number of the other endpoint.
        to: u64,
        /// Number of the reason (S-8).
        reason: u16,
    },
    /// The sender offers the ring that comes with this message (S-20).
    Ring {
        /// Number of the receiving endpoint.
        to: u64,
        /// Generation of the ring (H-1).
        generation: u16,
    },
}

const PROPOSE: u16 = 1;
const ANSWER: u16 = 2;
const CONFIRM: u16 = 3;
const REFUSE: u16 = 4;
const RING: u16 = 5;
/// Version of these messages.
const VERSION: u16 = 2;

const AT_KIND: usize = 0x08;
const AT_VERSION: usize = 0x0a;
const AT_REASON: usize = 0x0c;
const AT_TO: usize = 0x10;
const AT_CLAIM: usize = 0x18;
const CLAIM_LEN: usize = 16 + 2 * ADDRESS_LEN + 4 + 24 + 16;
const AT_PROOF: usize = AT_CLAIM + CLAIM_LEN;
const PROOF_LEN: usize = 40;
/// Size of every message in bytes (S-4).
pub const LEN: usize = AT_PROOF + PROOF_LEN;
const _: () = assert!(LEN <= crate::limits::CONTROL_MESSAGE_MAX && LEN % 8 == 0);

impl Message {
    /// Returns the bytes to send.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::from([0; LEN]);
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, AT_VERSION, &VERSION.to_le_bytes());
        let (kind, to) = match self {
            Self::Propose(claim) => {
                put_claim(&mut bytes, claim);
                (PROPOSE, 0)
            }
            Self::Answer { to, claim, proof } => {
                put_claim(&mut bytes, claim);
                put_proof(&mut bytes, &proof.shortened());
                (ANSWER, *to)
            }
            Self::Confirm { to, proof } => {
                put_proof(&mut bytes, proof);
                (CONFIRM, *to)
            }
            Self::Refuse { to, reason } => {
                put(&mut bytes, AT_REASON, &reason.to_le_bytes());
                (REFUSE, *to)
            }
            Self::Ring { to, generation } => {
                put(&mut bytes, AT_REASON, &generation.to_le_bytes());
                (RING, *to)
            }
        };
        put(&mut bytes, AT_KIND, &kind.to_le_bytes());
        put(&mut bytes, AT_TO, &to.to_le_bytes());
        bytes
    }

    /// Returns whether a segment comes with the message, and whether a doorbell does.
    #[must_use]
    pub const fn carries(&self) -> (bool, bool) {
        match self {
            Self::Answer { .. } | Self::Confirm { .. } => (true, true),
            Self::Ring { .. } => (true, false),
            Self::Propose(_) | Self::Refuse { .. } => (false, false),
        }
    }

    /// Decodes a message; the clause of a fault is always S-4.
    ///
    /// # Errors
    /// A description of the fault.
    pub fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let bytes: &[u8; LEN] = bytes.try_into().map_err(|_| "message of another length")?;
        if bytes[..8] != MAGIC || u16_at(bytes, AT_VERSION) != VERSION {
            return Err("message of another kind or version");
        }
        let to = u64_at(bytes, AT_TO);
        let message = match u16_at(bytes, AT_KIND) {
            PROPOSE => Self::Propose(claim(bytes)),
            ANSWER => Self::Answer { to, claim: claim(bytes), proof: proof(bytes) },
            CONFIRM => Self::Confirm { to, proof: proof(bytes) },
            REFUSE => Self::Refuse { to, reason: u16_at(bytes, AT_REASON) },
            RING => Self::Ring { to, generation: u16_at(bytes, AT_REASON) },
            _ => return Err("message of an unknown kind"),
        };
        if let Self::Propose(claim) | Self::Answer { claim, .. } = &message
            && claim.id == 0
        {
            return Err("a claim of an end without a number");
        }
        // Each message has one encoding: fields without a meaning are zero.
        if message.encode() == bytes { Ok(message) } else { Err("message with reserved bytes set") }
    }
}

fn put_claim(bytes: &mut [u8], claim: &Claim) {
    let mut at = AT_CLAIM;
    let mut field = |value: &[u8]| {
        put(bytes, at, value);
        at += value.len();
    };
    field(&claim.id.to_le_bytes());
    field(&claim.cookie.to_le_bytes());
    for address in claim.addresses {
        field(&address.host);
        field(&address.port.to_be_bytes());
    }
    for known in claim.known {
        field(&known.to_le_bytes());
    }
    for count in [claim.counts.written, claim.counts.acked, claim.counts.received] {
        field(&count.to_le_bytes());
    }
    field(&claim.nonce);
}

fn claim(bytes: &[u8; LEN]) -> Claim {
    let address = |at: usize| Address {
        host: core::array::from_fn(|index| bytes[at + index]),
        port: u16::from_be_bytes([bytes[at + 16], bytes[at + 17]]),
    };
    let after = AT_CLAIM + 16 + 2 * ADDRESS_LEN + 4;
    Claim {
        id: u64_at(bytes, AT_CLAIM),
        cookie: u64_at(bytes, AT_CLAIM + 8),
        addresses: [address(AT_CLAIM + 16), address(AT_CLAIM + 16 + ADDRESS_LEN)],
        known: [u16_at(bytes, after - 4), u16_at(bytes, after - 2)],
        counts: Counts {
            written: u64_at(bytes, after),
            acked: u64_at(bytes, after + 8),
            received: u64_at(bytes, after + 16),
        },
        nonce: core::array::from_fn(|index| bytes[after + 24 + index]),
    }
}

fn put_proof(bytes: &mut [u8], proof: &Proof) {
    put(bytes, AT_PROOF, &proof.proposer.to_le_bytes());
    put(bytes, AT_PROOF + 4, &proof.answerer.to_le_bytes());
    put(bytes, AT_PROOF + 8, &proof.tag);
}

fn proof(bytes: &[u8; LEN]) -> Proof {
    let u32_at = |at| u64_at(bytes, at) as u32;
    Proof {
        proposer: u32_at(AT_PROOF),
        answerer: u32_at(AT_PROOF + 4),
        tag: core::array::from_fn(|index| bytes[AT_PROOF + 8 + index]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Claim {
        let host = |last| core::array::from_fn(|index| if index == 15 { last } else { 0x20 + index as u8 });
        Claim {
            id: 0x0102_0304_0506_0708,
            cookie: 77,
            addresses: [Address { host: host(1), port: 0x1f90 }, Address { host: host(2), port: 51_234 }],
            known: [1024, 3],
            counts: Counts { written: 1 << 40, acked: 9, received: 3 },
            nonce: [0xab; 16],
        }
    }

    fn all() -> [Message; 5] {
        let proof = Proof { proposer: 100, answerer: 1024, tag: [0x5a; 32] };
        [
            Message::Propose(sample()),
            Message::Answer { to: 5, claim: sample(), proof: proof.shortened() },
            Message::Confirm { to: 6, proof },
            Message::Refuse { to: 7, reason: 12 },
            Message::Ring { to: 8, generation: 0x0203 },
        ]
    }

    #[test]
    fn s2_word_of_the_receiver_comes_back() {
        for moves in [0, 1, 1 << 61] {
            for (ready, leave) in [(false, false), (true, false), (false, true), (true, true)] {
                let word = Followed { moves, ready, leave };
                assert_eq!(Followed::decode(word.encode()), word);
            }
        }
        assert_eq!(Followed { moves: 3, ready: true, leave: false }.encode(), 0b1101);
    }

    #[test]
    fn s4_messages_come_back_as_they_were_sent() {
        for message in all() {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
        let carried = all().map(|message| message.carries());
        assert_eq!(carried, [(false, false), (true, true), (true, true), (false, false), (true, false)]);
        let bytes = all()[0].encode();
        assert_eq!((u16_at(&bytes, 8), u16_at(&bytes, 10), u64_at(&bytes, 0x18)), (1, 2, 0x0102_0304_0506_0708));
        assert_eq!(&bytes[0x38..0x3a], [0x1f, 0x90], "ports are in network order");
    }

    #[test]
    fn s4_other_lengths_kinds_versions_and_reserved_bytes_are_refused() {
        for message in all() {
            let bytes = message.encode();
            assert!(Message::decode(&bytes[..LEN - 1]).is_err());
            for at in [0, 7, AT_VERSION, AT_VERSION + 1, AT_KIND + 1, 0x0e, 0x0f] {
                let mut changed = bytes.clone();
                changed[at] ^= 0x40;
                assert!(Message::decode(&changed).is_err(), "byte {at:#x} of {message:?}");
            }
        }
        let mut answer = all()[1].encode();
        assert_eq!((answer[AT_PROOF + 11], answer[AT_PROOF + 12]), (0x5a, 0), "of the tag there are four bytes");
        answer[AT_PROOF + 12] = 1;
        assert!(Message::decode(&answer).is_err(), "an answer with more of its tag");
        let mut refuse = all()[3].encode();
        refuse[AT_PROOF] = 1;
        assert!(Message::decode(&refuse).is_err(), "a refusal has no proof");
        let mut ring = all()[4].encode();
        assert_eq!((u16_at(&ring, AT_KIND), u16_at(&ring, AT_REASON)), (5, 0x0203));
        ring[AT_CLAIM] = 1;
        assert!(Message::decode(&ring).is_err(), "a ring has no claim");
        for message in &all()[..2] {
            let mut nobodys = message.encode();
            nobodys[AT_CLAIM..AT_CLAIM + 8].fill(0);
            assert!(Message::decode(&nobodys).is_err(), "the number of an end is never 0: {message:?}");
        }
    }
}
