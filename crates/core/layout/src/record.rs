// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The header in front of each record in message mode: `len: u32`, `kind: u16`, `reserved: u16 = 0`.

use crate::limits::RECORD_ALIGN;

/// The only kind of this version: the payload follows in the ring. Others are reserved (padding, pool descriptors).
pub const KIND_DATA: u16 = 0;

/// Bytes that a record with `len` bytes of payload takes in the ring: header, payload, padding to 8.
#[must_use]
pub const fn span(len: u64) -> u64 {
    (RECORD_ALIGN + len + RECORD_ALIGN - 1) & !(RECORD_ALIGN - 1)
}

/// The header of a data record.
#[must_use]
pub const fn encode(len: u32) -> [u8; 8] {
    (len as u64).to_le_bytes()
}

/// The payload's length, if this is the header of a data record with its reserved bits zero.
#[must_use]
pub const fn decode(header: [u8; 8]) -> Option<u32> {
    let word = u64::from_le_bytes(header);
    if word >> 32 == 0 { Some(word as u32) } else { None }
}

const _: () = assert!(KIND_DATA == 0, "encode() leaves the upper half zero");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r20_span_is_header_and_payload_rounded_up_to_eight() {
        assert_eq!([span(0), span(1), span(8), span(9), span(4088)], [8, 16, 16, 24, 4096]);
    }

    #[test]
    fn r20_header_with_reserved_bits_is_refused() {
        assert_eq!(decode(encode(u32::MAX)), Some(u32::MAX));
        assert_eq!(decode([1, 0, 0, 0, 1, 0, 0, 0]), None, "unknown kind");
        assert_eq!(decode([1, 0, 0, 0, 0, 0, 0, 1]), None, "reserved half-word");
    }
}
