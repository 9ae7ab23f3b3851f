// SPDX-License-Identifier: Apache-2.0 OR MIT
//! First bytes of each direction: they state that both endpoints are vchans, and how large a ring the server asks of
//! the client (W-2).

use std::time::Duration;

use tombolo::{Deadline, ReadHalf, WriteHalf};

use crate::border::{Fault, Outcome};

/// Bytes of a hello.
pub(crate) const LEN: usize = 16;
const MAGIC: [u8; 8] = *b"TbVchan\x01";
/// Time that the peer has for its hello.
const PATIENCE: Duration = Duration::from_secs(5);

/// Encodes a hello that asks the peer for a ring of at least `ring` bytes, or for nothing.
pub(crate) fn encode(ring: u64) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(&ring.to_le_bytes());
    bytes
}

pub(crate) fn decode(bytes: [u8; LEN]) -> Outcome<u64> {
    let (magic, ring) = bytes.split_at(8);
    if magic != MAGIC {
        return Err(Fault::new(libc::EPROTO, "the other end is no vchan of Tombolo's (W-2)"));
    }
    match u64::from_le_bytes(ring.try_into().expect("eight bytes")) {
        ring @ 0..=RING_MOST => Ok(ring),
        ring => Err(Fault::with(libc::EPROTO, format!("the server asks for a ring of {ring} bytes (W-2)"))),
    }
}

/// Largest ring.
pub(crate) const RING_MOST: u64 = 1 << 30;

/// Sends this endpoint's hello.
pub(crate) fn send_hello(writer: &mut WriteHalf, ring: u64) -> Outcome<()> {
    Ok(writer.write_all_until(&encode(ring), Deadline::after(PATIENCE))?)
}

/// Receives the peer's hello. Returns the ring that it asks for.
pub(crate) fn receive_hello(reader: &mut ReadHalf) -> Outcome<u64> {
    let (mut bytes, deadline) = ([0; LEN], Deadline::after(PATIENCE));
    if reader.wait_for(LEN, deadline)? < LEN as u64 {
        return Err(Fault::new(libc::ECONNRESET, "the other end went before it said hello"));
    }
    let read = reader.try_read(&mut bytes)?;
    reader.release()?;
    assert_eq!(read, Some(LEN), "what is there is read whole");
    decode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn w2_hello_says_the_ring_and_nothing_else_is_one() {
        for ring in [0, 4096, 1 << 20, RING_MOST] {
            assert_eq!(decode(encode(ring)), Ok(ring));
        }
        assert_eq!(encode(0x1_0000), *b"TbVchan\x01\0\0\x01\0\0\0\0\0");
        assert_eq!(decode(encode(RING_MOST + 1)).unwrap_err().errno, libc::EPROTO);
        for at in 0..8 {
            let mut bytes = encode(4096);
            bytes[at] ^= 1;
            assert_eq!(decode(bytes).unwrap_err().errno, libc::EPROTO);
        }
    }
}
