// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control messages that two endpoints exchange over a backend's control path, whatever that is (C-2 to C-6).
//!
//! Each is a fixed head of [`LEN`] bytes; a refusal carries its reason as UTF-8 behind it.

use alloc::{string::String, vec::Vec};

use crate::{
    Features, MAGIC, VERSION,
    header::{put, u16_at, u64_at},
    limits::REASON_MAX,
};

/// Bytes of a message's head.
pub const LEN: usize = 0x40;

const AT_KIND: usize = 0x08;
const AT_VERSION_MIN: usize = 0x0a;
const AT_VERSION_MAX: usize = 0x0c;
const AT_DETAIL: usize = 0x0e;
const AT_OFFERED: usize = 0x10;
const AT_REQUIRED: usize = 0x18;
const AT_EPOCH: usize = 0x20;
const AT_MAP_LIMIT: usize = 0x28;
const AT_RESERVED: usize = 0x30;

/// What one end says when a channel begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Greeting {
    /// Oldest layout version this endpoint speaks.
    pub version_min: u16,
    /// Newest layout version this endpoint speaks.
    pub version_max: u16,
    /// Features this endpoint offers.
    pub offered: Features,
    /// Features without which this endpoint will not talk.
    pub required: Features,
    /// Names this endpoint of this channel; the same number stands in its segment's header (M-3).
    pub epoch: u64,
    /// Largest segment that this endpoint is willing to map, in bytes.
    pub map_limit: u64,
}

/// Why an endpoint refuses a channel; the number on the wire is the variant's.
///
/// # Example
/// ```
/// # use tombolo_layout::handshake::Refusal;
/// assert_eq!(Refusal::Quota as u16, 5);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Refusal {
    /// A code that this version does not know.
    Unknown = 0,
    /// No common version.
    Version = 1,
    /// A required feature is not offered.
    Feature = 2,
    /// The segment is larger than the other is willing to map, or broken.
    Segment = 3,
    /// The message could not be understood.
    Malformed = 4,
    /// A limit of the refusing end is used up.
    Quota = 5,
    /// Policy forbids this pair.
    Denied = 6,
}

/// A control message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// The connecting end; carries its segment (C-3).
    Hello(Greeting),
    /// The listening end agrees; carries its segment (C-3).
    Welcome(Greeting),
    /// The listening end does not agree, and why (C-5).
    Refuse(Refusal, String),
    /// The writer offers ring `generation` of its pipe; carries the segment (H-1).
    Ring {
        /// Which ring this is.
        generation: u16,
        /// The sender's epoch.
        epoch: u64,
    },
}

/// The versions that the sender of `message` speaks, from the oldest to the newest: they stand in the same place in all
/// kinds and versions (C-6). `None` where it is too short to say.
#[must_use]
pub fn versions(message: &[u8]) -> Option<(u16, u16)> {
    (message.len() >= AT_DETAIL).then(|| (u16_at(message, AT_VERSION_MIN), u16_at(message, AT_VERSION_MAX)))
}

const HELLO: u16 = 1;
const WELCOME: u16 = 2;
const REFUSE: u16 = 3;
const RING: u16 = 4;

/// Why a control message is not understood.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MessageError {
    /// The clause of `spec/3-channel.md`.
    pub clause: &'static str,
    /// What is wrong, in words.
    pub what: &'static str,
}

impl Message {
    /// The bytes to send.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::from([0; LEN]);
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, AT_VERSION_MIN, &VERSION.to_le_bytes());
        put(&mut bytes, AT_VERSION_MAX, &VERSION.to_le_bytes());
        let kind = match self {
            Self::Hello(greeting) => {
                greeting.put(&mut bytes);
                HELLO
            }
            Self::Welcome(greeting) => {
                greeting.put(&mut bytes);
                WELCOME
            }
            Self::Refuse(refusal, reason) => {
                put(&mut bytes, AT_DETAIL, &(*refusal as u16).to_le_bytes());
                bytes.extend_from_slice(&reason.as_bytes()[..reason.floor_char_boundary(REASON_MAX)]);
                REFUSE
            }
            Self::Ring { generation, epoch } => {
                put(&mut bytes, AT_DETAIL, &generation.to_le_bytes());
                put(&mut bytes, AT_EPOCH, &epoch.to_le_bytes());
                RING
            }
        };
        put(&mut bytes, AT_KIND, &kind.to_le_bytes());
        bytes
    }

    /// Takes a received message apart.
    ///
    /// # Errors
    /// The first clause that it breaks. A greeting of another version is understood as far as its version range, so
    /// that the refusal can name both.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let bad = |clause, what| Err(MessageError { clause, what });
        if bytes.len() < LEN {
            return bad("C-2", "control message is truncated");
        }
        if bytes[..8] != MAGIC {
            return bad("C-2", "control message does not begin with the magic");
        }
        let (head, rest) = bytes.split_at(LEN);
        if head[AT_RESERVED..].iter().any(|byte| *byte != 0) {
            return bad("C-2", "reserved bytes of a control message are not zero");
        }
        let (kind, detail) = (u16_at(head, AT_KIND), u16_at(head, AT_DETAIL));
        if kind != REFUSE && !rest.is_empty() {
            return bad("C-2", "control message is longer than its kind");
        }
        match kind {
            HELLO | WELCOME if detail != 0 => bad("C-3", "greeting with a detail"),
            HELLO => Ok(Self::Hello(Greeting::at(head))),
            WELCOME => Ok(Self::Welcome(Greeting::at(head))),
            REFUSE if rest.len() > REASON_MAX => bad("C-5", "reason is too long"),
            REFUSE => match core::str::from_utf8(rest) {
                Ok(reason) => Ok(Self::Refuse(Refusal::from_wire(detail), reason.into())),
                Err(_) => bad("C-5", "reason is not UTF-8"),
            },
            RING => Ok(Self::Ring { generation: detail, epoch: u64_at(head, AT_EPOCH) }),
            _ => bad("C-2", "control message of unknown kind"),
        }
    }
}

impl Greeting {
    fn put(&self, bytes: &mut [u8]) {
        put(bytes, AT_VERSION_MIN, &self.version_min.to_le_bytes());
        put(bytes, AT_VERSION_MAX, &self.version_max.to_le_bytes());
        put(bytes, AT_OFFERED, &self.offered.0.to_le_bytes());
        put(bytes, AT_REQUIRED, &self.required.0.to_le_bytes());
        put(bytes, AT_EPOCH, &self.epoch.to_le_bytes());
        put(bytes, AT_MAP_LIMIT, &self.map_limit.to_le_bytes());
    }

    fn at(head: &[u8]) -> Self {
        Self {
            version_min: u16_at(head, AT_VERSION_MIN),
            version_max: u16_at(head, AT_VERSION_MAX),
            offered: Features(u64_at(head, AT_OFFERED)),
            required: Features(u64_at(head, AT_REQUIRED)),
            epoch: u64_at(head, AT_EPOCH),
            map_limit: u64_at(head, AT_MAP_LIMIT),
        }
    }
}

impl Refusal {
    const fn from_wire(code: u16) -> Self {
        match code {
            1 => Self::Version,
            2 => Self::Feature,
            3 => Self::Segment,
            4 => Self::Malformed,
            5 => Self::Quota,
            6 => Self::Denied,
            _ => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greeting() -> Greeting {
        Greeting {
            version_min: 1,
            version_max: 2,
            offered: Features(3),
            required: Features(1),
            epoch: 0x1122_3344_5566_7788,
            map_limit: 1 << 30,
        }
    }

    #[test]
    fn c2_every_message_comes_back_as_it_was_sent() {
        for message in [
            Message::Hello(greeting()),
            Message::Welcome(greeting()),
            Message::Refuse(Refusal::Quota, "no more channels".into()),
            Message::Ring { generation: 7, epoch: 9 },
        ] {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn c2_truncated_or_overlong_or_unknown_message_is_refused() {
        let whole = Message::Hello(greeting()).encode();
        for len in 0..whole.len() {
            assert!(Message::decode(&whole[..len]).is_err(), "{len} bytes");
        }
        let mut longer = whole.clone();
        longer.push(0);
        assert_eq!(Message::decode(&longer).unwrap_err().clause, "C-2");
        let mut unknown = whole;
        unknown[AT_KIND] = 0xee;
        assert_eq!(Message::decode(&unknown).unwrap_err().clause, "C-2");
    }

    #[test]
    fn c5_long_reason_is_cut_at_a_character() {
        let bytes = Message::Refuse(Refusal::Denied, "é".repeat(200)).encode();
        assert!(bytes.len() <= LEN + REASON_MAX);
        assert!(matches!(Message::decode(&bytes), Ok(Message::Refuse(Refusal::Denied, _))));
    }
}
