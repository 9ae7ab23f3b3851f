// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements mailboxes and listener pages: pages of words, both the own ones and the peer's.

use std::time::SystemTime;

use tombolo_domain::{Error, Result};
use tombolo_layout::{limits::CONTROL_MESSAGE_MAX, xen as at};
use tombolo_mem::{OwnControl, OwnSegment, OwnWord, PeerSegment, PeerWord, Untrusted};

use crate::hypervisor::DomId;

/// A page that this endpoint writes.
#[derive(Debug)]
pub(crate) struct OwnPage(OwnControl);

impl OwnPage {
    /// Fills the head of a page, and opens it.
    pub(crate) fn new(segment: OwnSegment, magic: u64, port: u32) -> Self {
        let (control, _no_data) = segment.split(at::PAGE);
        let page = Self(control);
        page.set(at::AT_PORT, u64::from(at::VERSION) | u64::from(port) << 32);
        page.set(at::AT_STATE, at::OPEN);
        page.set(at::AT_MAGIC, magic);
        page
    }

    pub(crate) fn set(&self, offset: usize, word: u64) {
        self.0.word(offset).store_release(word);
    }

    /// Tells the peer that this endpoint closed.
    pub(crate) fn close(&self) {
        self.set(at::AT_STATE, at::CLOSED);
    }

    /// Writes bytes at a place that nobody reads while they change.
    fn put(&self, offset: usize, bytes: &[u8]) {
        for (index, bytes) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.set(offset + 8 * index, u64::from_le_bytes(word));
        }
    }

    /// Writes the time at which the page was made.
    pub(crate) fn put_made(&self) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        self.set(at::AT_MADE, now.map_or(0, |now| now.as_nanos() as u64));
    }

    /// Writes the peer's number and the service's name, for tools.
    pub(crate) fn put_stats(&self, peer: DomId, service: &str) {
        self.put(at::AT_NAME, service.as_bytes());
        self.set(at::AT_STATS, at::stats_head(peer, false));
    }

    /// Writes the `number`th message to its place, with the references of a small segment, and publishes it.
    pub(crate) fn put_message(&self, number: u64, head: at::MessageHead, references: &[u32], message: &[u8]) {
        for (index, word) in words_of(references).enumerate() {
            self.set(references_at(number) + 8 * index, word);
        }
        let base = message_at(number);
        for (index, word) in head.encode().into_iter().enumerate() {
            self.set(base + 8 * index, word);
        }
        self.put(base + at::MESSAGE_HEAD, message);
        self.set(at::AT_SENT, number.wrapping_add(1));
    }
}

/// A page that the peer writes.
#[derive(Clone, Debug)]
pub(crate) struct PeerPage(PeerSegment);

impl PeerPage {
    /// Checks the head of a page. Returns the page and its owner's port.
    pub(crate) fn new(segment: PeerSegment, magic: u64) -> Result<(Self, u32)> {
        let page = Self(segment);
        let expect = |offset, expected, what: &str| {
            page.word(offset).check(|word| if word == expected { Ok(()) } else { Err(malformed("X-3", what)) })
        };
        expect(at::AT_MAGIC, magic, "the page that was granted does not begin as it should")?;
        let port = page.word(at::AT_PORT).check(|word| {
            if word as u32 == at::VERSION {
                Ok((word >> 32) as u32)
            } else {
                Err(malformed("X-3", format!("version {} of the pages, where {} is known", word as u32, at::VERSION)))
            }
        })?;
        Ok((page, port))
    }

    /// Takes a page without a check: a page of a list has no head.
    pub(crate) fn unchecked(segment: PeerSegment) -> Self {
        Self(segment)
    }

    pub(crate) fn word(&self, offset: usize) -> Untrusted<u64> {
        self.0.word(offset).load_acquire()
    }

    /// Returns the lowest byte of the state, which is the byte that a kernel clears.
    pub(crate) fn state(&self) -> u64 {
        self.word(at::AT_STATE).hint() & 0xff
    }

    /// Returns `count` references from `offset` on, each loaded once.
    pub(crate) fn references(&self, offset: usize, count: usize) -> impl Iterator<Item = u32> {
        let words = (0..count.div_ceil(2)).map(move |index| self.word(offset + 8 * index).hint());
        words.flat_map(|word| [word as u32, (word >> 32) as u32]).take(count)
    }

    /// Copies the `number`th message.
    pub(crate) fn message(&self, number: u64) -> Result<PeerMessage> {
        let base = message_at(number);
        let words = [0, 1, 2, 3].map(|index| self.word(base + 8 * index).hint());
        let head = at::MessageHead::decode(words).map_err(|what| malformed("X-6", what))?;
        let small = head.segment.filter(|name| name.list == 0).map_or(0, |name| name.pages as usize);
        let references = self.references(references_at(number), small).collect();
        let len = usize::from(head.len);
        debug_assert!(len <= CONTROL_MESSAGE_MAX, "decoded");
        let words = (0..len.div_ceil(8)).map(|index| self.word(base + at::MESSAGE_HEAD + 8 * index).hint());
        let mut message: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        message.truncate(len);
        Ok(PeerMessage { segment: head.segment, references, message })
    }
}

/// A received message.
#[derive(Debug)]
pub(crate) struct PeerMessage {
    pub segment: Option<at::SegmentName>,
    /// References of the pages of a small segment.
    pub references: Vec<u32>,
    pub message: Vec<u8>,
}

/// Packs references into words, two in each.
pub(crate) fn words_of(references: &[u32]) -> impl Iterator<Item = u64> {
    references.chunks(2).map(|two| u64::from(two[0]) | two.get(1).map_or(0, |second| u64::from(*second) << 32))
}

const fn references_at(number: u64) -> usize {
    at::AT_REFERENCES + (number % at::MESSAGES) as usize * at::REFERENCES * 4
}

const fn message_at(number: u64) -> usize {
    at::AT_MESSAGES + (number % at::MESSAGES) as usize * at::MESSAGE_STRIDE
}

/// Returns the error for a violation of `clause`.
pub(crate) fn malformed(clause: &'static str, what: impl Into<String>) -> Error {
    Error::Malformed { clause, what: what.into() }
}

/// Returns the number that identifies a service in its listener page, so that a reference that was used again does not
/// lead to another service: FNV-1a.
pub(crate) fn mark_of(service: &str) -> u64 {
    service.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
