// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks the header before a frame (N-7, N-8).

use serde::Serialize;

use crate::{features::Features, hello::Hello, mac::Mac};

/// Length of the header in bytes: virtio's `virtio_net_hdr` with `num_buffers`.
pub const HEADER: usize = 12;
/// Length of a frame's own head in bytes: two addresses and the type.
pub const ETHERNET: usize = 14;
/// Number of bytes of a message that are checked: its header and the head of its frame.
pub const HEAD: usize = HEADER + ETHERNET;

/// Flag: the checksum from `csum_start` on is still to be computed.
const NEEDS_CHECKSUM: u8 = 1;
/// Flag: the checksum was verified.
const CHECKSUM_VALID: u8 = 2;
/// Kinds of segments; `PLAIN` means none.
const PLAIN: u8 = 0;
const TCP4: u8 = 1;
const TCP6: u8 = 4;
const UDP: u8 = 5;
/// Flag beside a kind of TCP segments: with congestion marks.
const MARKED: u8 = 0x80;

/// Reason for which a frame is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DropReason {
    /// No room for a header and the head of a frame.
    Short,
    /// Longer than the receiver's hello allows.
    Long,
    /// The header is invalid.
    Header,
    /// The frame needs a feature that the receiver's hello does not have.
    Feature,
    /// The source is not the sender's address.
    Source,
}

/// Limits of messages in one direction: those in the receiver's hello, and the address of the sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    features: Features,
    frame_most: usize,
    source: Option<Mac>,
}

impl Limits {
    /// Makes the limits for frames to an endpoint with the hello `receiver`, from address `source`, or from any.
    #[must_use]
    pub fn new(receiver: &Hello, source: Option<Mac>) -> Self {
        Self { features: receiver.features, frame_most: receiver.frame_most as usize, source }
    }

    /// Checks a message of `len` bytes by a private copy of its beginning, and replaces the header by the fields that
    /// were checked and nothing else.
    ///
    /// # Errors
    /// The reason for which the frame is dropped.
    pub fn check(&self, len: usize, head: &mut [u8; HEAD]) -> Result<Frame, DropReason> {
        if len < HEAD {
            return Err(DropReason::Short);
        }
        let frame = len - HEADER;
        if frame > self.frame_most {
            return Err(DropReason::Long);
        }
        let u16_at = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let (flags, kind) = (head[0], head[1]);
        let [header_len, segment, start, offset, buffers] = [2, 4, 6, 8, 10].map(u16_at);
        if flags & !(NEEDS_CHECKSUM | CHECKSUM_VALID) != 0 || buffers != 0 {
            return Err(DropReason::Header);
        }
        let needs_checksum = flags & NEEDS_CHECKSUM != 0;
        let mut checked = [0; HEADER];
        checked[0] = flags;
        let mut put = |at: usize, value: u16| checked[at..at + 2].copy_from_slice(&value.to_le_bytes());
        if needs_checksum {
            // The two bytes of the checksum must be within the frame, after its head.
            let start_at = usize::from(start);
            if start_at < ETHERNET || start_at + usize::from(offset) + 2 > frame {
                return Err(DropReason::Header);
            }
            if !self.features.has(Features::CHECKSUM) {
                return Err(DropReason::Feature);
            }
            put(6, start);
            put(8, offset);
        }
        if kind != PLAIN {
            let needed = match kind & !MARKED {
                TCP4 => Features::TSO4,
                TCP6 => Features::TSO6,
                UDP if kind & MARKED == 0 => Features::USO,
                _ => return Err(DropReason::Header),
            };
            if !needs_checksum || segment == 0 || usize::from(header_len) > frame {
                return Err(DropReason::Header);
            }
            let marked = kind & MARKED == 0 || self.features.has(Features::ECN);
            if !self.features.has(needed) || !marked {
                return Err(DropReason::Feature);
            }
            put(2, header_len);
            put(4, segment);
            checked[1] = kind;
        }
        if self.source.is_some_and(|source| head[HEADER + 6..HEADER + 12] != source.0) {
            return Err(DropReason::Source);
        }
        head[..HEADER].copy_from_slice(&checked);
        Ok(Frame { len: frame, segments: kind != PLAIN })
    }
}

/// A frame that may be passed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame {
    /// Length of the frame in bytes.
    pub len: usize,
    /// Whether it is still to be divided into segments.
    pub segments: bool,
}

#[cfg(test)]
mod tests;
