// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fields of a body, one after the other (B-2).

/// Addresses in one message (B-22).
pub const ADDRESSES_MAX: usize = 60;

/// What is wrong with a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} ({clause})")]
pub struct Fault {
    /// The clause of `spec/7-broker.md`.
    pub clause: &'static str,
    /// What was found.
    pub what: &'static str,
}

impl Fault {
    pub(crate) const fn new(clause: &'static str, what: &'static str) -> Self {
        Self { clause, what }
    }
}

/// Something that stands in a body.
pub(crate) trait Field: Sized {
    fn encode_into(&self, body: &mut Vec<u8>);
    /// Takes it off the front of `body`.
    fn decode_from(body: &mut &[u8]) -> Result<Self, Fault>;
}

/// The next `N` bytes.
pub(crate) fn chunk<const N: usize>(body: &mut &[u8]) -> Result<[u8; N], Fault> {
    let (chunk, rest) = body.split_first_chunk().ok_or(Fault::new("B-2", "body is shorter than its fields"))?;
    *body = rest;
    Ok(*chunk)
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        impl Field for $number {
            fn encode_into(&self, body: &mut Vec<u8>) {
                body.extend_from_slice(&self.to_le_bytes());
            }
            fn decode_from(body: &mut &[u8]) -> Result<Self, Fault> {
                chunk(body).map(Self::from_le_bytes)
            }
        }
    )*};
}
numbers!(u8 u16 u32 u64);

impl<const N: usize> Field for [u8; N] {
    fn encode_into(&self, body: &mut Vec<u8>) {
        body.extend_from_slice(self);
    }
    fn decode_from(body: &mut &[u8]) -> Result<Self, Fault> {
        chunk(body)
    }
}

impl<const N: usize> Field for Box<[u64; N]> {
    fn encode_into(&self, body: &mut Vec<u8>) {
        self.iter().for_each(|word| word.encode_into(body));
    }
    fn decode_from(body: &mut &[u8]) -> Result<Self, Fault> {
        let mut words = [0; N];
        for word in &mut words {
            *word = u64::decode_from(body)?;
        }
        Ok(Box::new(words))
    }
}

/// A `u16` that says how many, and those addresses.
impl Field for Vec<[u8; 16]> {
    fn encode_into(&self, body: &mut Vec<u8>) {
        let kept = &self[..self.len().min(ADDRESSES_MAX)];
        (kept.len() as u16).encode_into(body);
        kept.iter().for_each(|address| body.extend_from_slice(address));
    }
    fn decode_from(body: &mut &[u8]) -> Result<Self, Fault> {
        let count = usize::from(u16::decode_from(body)?);
        if count > ADDRESSES_MAX {
            return Err(Fault::new("B-2", "too many addresses"));
        }
        (0..count).map(|_| chunk(body)).collect()
    }
}
