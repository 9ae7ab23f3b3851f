// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encodes and decodes XenStore's messages: a head of four words, then a payload. Only this module decodes what
//! XenStore sends.

use std::io;

/// Number of bytes of a head.
pub(crate) const HEAD_LEN: usize = 16;
/// Largest payload that XenStore allows.
pub(crate) const PAYLOAD_MAX: usize = 4096;

/// Kind of a message, as far as this backend needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum Kind {
    Directory = 1,
    Read = 2,
    Watch = 4,
    Unwatch = 5,
    Write = 11,
    Mkdir = 12,
    Rm = 13,
    SetPerms = 14,
    WatchEvent = 15,
    Error = 16,
}

impl Kind {
    const ALL: [Self; 10] = [
        Self::Directory,
        Self::Read,
        Self::Watch,
        Self::Unwatch,
        Self::Write,
        Self::Mkdir,
        Self::Rm,
        Self::SetPerms,
        Self::WatchEvent,
        Self::Error,
    ];
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Message {
    pub kind: Kind,
    /// Number of the request that this message is or answers.
    pub request: u32,
    pub payload: Vec<u8>,
}

impl Message {
    /// Makes a request whose payload is `parts`, each ended by a NUL, followed by `rest`.
    pub(crate) fn request(kind: Kind, request: u32, parts: &[&str], rest: &[u8]) -> Self {
        let mut payload = Vec::new();
        for part in parts {
            payload.extend_from_slice(part.as_bytes());
            payload.push(0);
        }
        payload.extend_from_slice(rest);
        Self { kind, request, payload }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let len = self.payload.len() as u32;
        let head = [self.kind as u32, self.request, 0, len];
        let mut bytes: Vec<u8> = head.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend_from_slice(&self.payload);
        bytes
    }

    /// Returns the parts of the payload, which NULs end.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &[u8]> {
        let whole = self.payload.strip_suffix(&[0]).unwrap_or(&self.payload);
        whole.split(|byte| *byte == 0)
    }
}

/// Splits received bytes into messages, and keeps those of an incomplete one.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    buffer: Vec<u8>,
}

impl Parser {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next message, or `None` while it is incomplete.
    ///
    /// # Errors
    /// The bytes are invalid; nothing after them can be decoded.
    pub(crate) fn message(&mut self) -> io::Result<Option<Message>> {
        let Some((head, rest)) = self.buffer.split_at_checked(HEAD_LEN) else { return Ok(None) };
        let (words, _) = head.as_chunks::<4>();
        let [kind, request, _transaction, len] = [0, 1, 2, 3].map(|at| u32::from_ne_bytes(words[at]));
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        if len as usize > PAYLOAD_MAX {
            return Err(invalid("XenStore sent a message longer than its messages are"));
        }
        let Some(kind) = Kind::ALL.into_iter().find(|known| *known as u32 == kind) else {
            return Err(invalid("XenStore sent a message of an unknown kind"));
        };
        let Some(payload) = rest.get(..len as usize) else { return Ok(None) };
        let message = Message { kind, request, payload: payload.to_vec() };
        self.buffer.drain(..HEAD_LEN + len as usize);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kinds() -> impl Strategy<Value = Kind> {
        prop::sample::select(&Kind::ALL[..])
    }

    proptest! {
        #[test]
        fn x2_message_is_understood_however_it_is_cut(
            kind in kinds(),
            request: u32,
            payload in prop::collection::vec(any::<u8>(), 0..200),
            cut in 1usize..64,
        ) {
            let message = Message { kind, request, payload };
            let mut parser = Parser::default();
            let bytes = [message.encode(), message.encode()].concat();
            let mut found = Vec::new();
            for piece in bytes.chunks(cut) {
                parser.push(piece);
                found.extend(std::iter::from_fn(|| parser.message().unwrap()));
            }
            prop_assert_eq!(found, vec![message.clone(), message]);
        }

        #[test]
        fn x2_parser_takes_any_bytes_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut parser = Parser::default();
            parser.push(&bytes);
            while let Ok(Some(message)) = parser.message() {
                let _ = message.parts().count();
            }
        }
    }

    #[test]
    fn x2_message_that_is_too_long_or_unknown_is_refused() {
        let words = |words: [u32; 4]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
        for head in [[2, 0, 0, 4097], [99, 0, 0, 0]] {
            let mut parser = Parser::default();
            parser.push(&words(head));
            assert!(parser.message().is_err(), "{head:?}");
        }
    }
}
