// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defines the pages by which two endpoints meet and talk where memory is passed by grant references (X-3 to X-7).
//!
//! All fields are little-endian words of eight bytes. A *mailbox* is one page of each endpoint, granted to the other:
//!
//! ```text
//! 000  magic
//! 008  version (low half), the end's event channel port (high half)
//! 010  state: 1 open, 2 closed, 0 gone; its lowest byte is what the kernel clears when the owner dies
//! 018  1 once the endpoint that connects has mapped the other's mailbox
//! 020  messages sent
//! 028  of an endpoint that connects: which service it wants
//! 030  of an endpoint that connects: reference of the reconnect page by which its process will connect from now on, or 0
//! 038  of ends that were named by dom0's broker: the number that this one has to show
//! 040  messages received
//! 080  64 words: for each place, the last generation that this endpoint unmapped or refused
//! 280  the stats page, for tools of the owner's domain: peer, quarantine, age, name
//! 400  8 messages of 288 bytes: head, place of the segment, two words reserved, 256 bytes of message
//! d00  8 lists of 24 references of four bytes: of the pages of a small segment that comes with the message
//! ```
//!
//! A *listener page* belongs to a listener: magic, version and state as above; at 038 the number that it has to show;
//! from 040 on the references of 24 reconnect pages that it listens to; from 100 on 480 answers. A *reconnect page* is
//! one page of a process that sends connect requests: magic, version, port and state as above; from 100 on 480 connect
//! requests. A *hints page* goes with the listener page of a process whose TCP connections may be joined; its reference
//! is at 028 of that page. It has magic, version and state as above; from 100 on 16 addresses; from 200 on 448 keys.

/// First word of a mailbox: "TMBLXENM" (X-3).
pub const MAILBOX_MAGIC: u64 = u64::from_le_bytes(*b"TMBLXENM");
/// First word of a listener page: "TMBLXEND" (X-3).
pub const LISTENER_PAGE_MAGIC: u64 = u64::from_le_bytes(*b"TMBLXEND");
/// First word of a reconnect page: "TMBLXENL" (X-3).
pub const RECONNECT_MAGIC: u64 = u64::from_le_bytes(*b"TMBLXENL");
/// First word of a hints page: "TMBLXENH" (X-23).
pub const HINTS_MAGIC: u64 = u64::from_le_bytes(*b"TMBLXENH");
/// First word of the page by which dom0's broker shows that it is running: "TMBLXENB" (X-22).
pub const BROKER_MAGIC: u64 = u64::from_le_bytes(*b"TMBLXENB");
/// Version of these pages (X-3).
pub const VERSION: u32 = 1;
/// Size of a page in bytes, whatever the machine's own page size.
pub const PAGE: usize = 4096;

/// Offset of the magic (X-3).
pub const AT_MAGIC: usize = 0x000;
/// Offset of version and port (X-3).
pub const AT_PORT: usize = 0x008;
/// Offset of the state (X-4).
pub const AT_STATE: usize = 0x010;
/// Offset of the word by which an endpoint shows that it has mapped the other's mailbox (X-5).
pub const AT_JOINED: usize = 0x018;
/// Offset of the service that is wanted, in the mailbox of an endpoint that sends a connect request (X-5).
pub const AT_WANTED: usize = 0x028;
/// Offset of the reference of its process's reconnect page, in the mailbox of an endpoint that sends a connect request
/// (X-11).
pub const AT_RECONNECT_PAGE: usize = 0x030;
/// Offset of the number that dom0's broker gave for the pair, or 0, in a listener page and in the mailbox of an
/// endpoint that sends a connect request (X-21).
pub const AT_PAIR: usize = 0x038;
/// Offset of the number of messages that an endpoint sent (X-6).
pub const AT_SENT: usize = 0x020;
/// Offset of the number of messages that an endpoint received (X-6).
pub const AT_RECEIVED: usize = 0x040;
/// Offset of the words that show which segments an endpoint has released (X-7).
pub const AT_RELEASED: usize = 0x080;
/// Offset of the messages (X-6).
pub const AT_MESSAGES: usize = 0x400;
/// Offset of the word that tells tools who an endpoint's peer is: [`stats_head`] (X-12).
pub const AT_STATS: usize = 0x280;
/// Offset of the number of retired bytes that an endpoint's peer may still map (X-12).
pub const AT_QUARANTINE: usize = 0x288;
/// Offset of the time when an endpoint was made, in nanoseconds since 1970 (X-12).
pub const AT_MADE: usize = 0x290;
/// Offset of the name at which the endpoints met, padded with zeros (X-12).
pub const AT_NAME: usize = 0x2c0;
/// Offset of the word that tells for which domain a listener page is: [`stats_head`] in the lower half, its own
/// reference in the upper half (X-12).
pub const AT_FOR: usize = 0x020;
/// Offset of the references of the reconnect pages that a listener page listens to (X-11).
pub const AT_RECONNECT_PAGES: usize = 0x040;
/// Offset of a listener page's answers (X-5).
pub const AT_ANSWERS: usize = 0x100;
/// Offset of the connect requests of a reconnect page (X-11).
pub const AT_REQUESTS: usize = 0x100;
/// Offset of the reference of the hints page that goes with a listener page, or 0 (X-23).
pub const AT_HINTS: usize = 0x028;
/// Offset of the addresses of a hints page, 16 bytes each; all zeros means none (X-23).
pub const AT_ADDRESSES: usize = 0x100;
/// Offset of the keys of a hints page: [`key_word`] (X-23).
pub const AT_KEYS: usize = 0x200;

/// State of an open endpoint (X-4).
pub const OPEN: u64 = 1;
/// State of a closed endpoint that may still map segments of the other (X-4).
pub const CLOSED: u64 = 2;
/// State of an endpoint that is gone and maps nothing any more (X-4).
pub const GONE: u64 = 0;

/// Number of messages that fit into a mailbox (X-6).
pub const MESSAGES: u64 = 8;
/// Number of bytes from one message to the next (X-6).
pub const MESSAGE_STRIDE: usize = 288;
/// Size of a message's head in bytes (X-6).
pub const MESSAGE_HEAD: usize = 32;
/// Offset of the references of small segments, in one list for each place of a message (X-7).
pub const AT_REFERENCES: usize = 0xd00;
/// Largest number of pages of a segment whose references are in such a list (X-7).
pub const REFERENCES: usize = 24;
/// Largest number of segments of one endpoint that are offered or still mapped at a time (X-7).
pub const PLACES: usize = 64;
/// Number of answers that fit into a listener page (X-5).
pub const ANSWERS: usize = 480;
/// Largest number of reconnect pages that a listener page listens to at a time (X-11).
pub const RECONNECT_PAGES: usize = 24;
/// Number of connect requests that fit into a reconnect page (X-11).
pub const REQUESTS: usize = 480;
/// Number of addresses that fit into a hints page (X-23).
pub const ADDRESSES: usize = (AT_KEYS - AT_ADDRESSES) / 16;
/// Number of keys that fit into a hints page (X-23).
pub const KEYS: usize = (PAGE - AT_KEYS) / 8;
/// Number of references that fit into a page of a list, after the reference of the next such page (X-7).
pub const LIST_REFS: usize = PAGE / 4 - 2;

/// Length of the longest name (X-1).
pub const NAME_MAX: usize = 64;

/// Returns the first word of a stats page: the peer's number, and whether it is known to be gone (X-12).
#[must_use]
pub const fn stats_head(peer: u16, gone: bool) -> u64 {
    peer as u64 | 1 << 16 | (gone as u64) << 17
}

/// Decodes [`stats_head`]. Returns `None` if the word is not one (X-12).
#[must_use]
pub const fn stats_peer(word: u64) -> Option<(u16, bool)> {
    if word >> 16 & 1 == 1 { Some((word as u16, word >> 17 & 1 == 1)) } else { None }
}

/// Returns the word of a key in a hints page, for which a process waits; 0 means none (X-23).
#[must_use]
pub const fn key_word(key: u32) -> u64 {
    1 << 32 | key as u64
}

/// Name of a segment in a message (X-7).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentName {
    /// Reference of the first page of the list of its pages, or 0 if the references are in the mailbox.
    pub list: u32,
    /// Number of pages of the segment itself, at least one.
    pub pages: u32,
    /// Place that the segment has among its owner's places.
    pub place: u8,
    /// Number of segments that have had this place, this one included: at least 1.
    pub generation: u32,
}

/// Head of a message (X-6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MessageHead {
    /// Size of the message in bytes.
    pub len: u16,
    /// Segment that comes with the message.
    pub segment: Option<SegmentName>,
}

impl MessageHead {
    /// Returns the first three words of the head; the fourth is 0.
    #[must_use]
    pub fn encode(&self) -> [u64; 3] {
        let len = u64::from(self.len);
        match self.segment {
            None => [len, 0, 0],
            Some(name) => [
                len | 1 << 16 | u64::from(name.place) << 24,
                u64::from(name.list) | u64::from(name.pages) << 32,
                u64::from(name.generation),
            ],
        }
    }

    /// Decodes the words of a head.
    ///
    /// # Errors
    /// A description of the fault; the clause is X-6.
    pub fn decode(words: [u64; 4]) -> Result<Self, &'static str> {
        let [first, pages, generation, reserved] = words;
        let len = (first & 0xffff) as u16;
        if usize::from(len) > crate::limits::CONTROL_MESSAGE_MAX {
            return Err("a message is longer than messages are");
        }
        let (kind, place) = (first >> 16 & 0xff, (first >> 24 & 0xff) as u8);
        if first >> 32 != 0 || kind > 1 || generation >> 32 != 0 || reserved != 0 {
            return Err("reserved bits of a message's head are set");
        }
        if kind == 0 {
            return if (place, pages, generation) == (0, 0, 0) {
                Ok(Self { len, segment: None })
            } else {
                Err("a message without a segment names one")
            };
        }
        let name =
            SegmentName { list: pages as u32, pages: (pages >> 32) as u32, place, generation: generation as u32 };
        let listed = name.list != 0 || name.pages as usize <= REFERENCES;
        if usize::from(place) >= PLACES || !listed || name.pages == 0 || name.generation == 0 {
            return Err("a segment has no place, no page, no list or no generation");
        }
        Ok(Self { len, segment: Some(name) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x6_head_is_what_was_encoded() {
        let name = SegmentName { list: 77, pages: 1700, place: 63, generation: 5 };
        let small = SegmentName { list: 0, pages: 24, place: 0, generation: 1 };
        for segment in [None, Some(name), Some(small)] {
            let head = MessageHead { len: 256, segment };
            let [first, pages, generation] = head.encode();
            assert_eq!(MessageHead::decode([first, pages, generation, 0]), Ok(head));
        }
    }

    #[test]
    fn x6_head_that_breaks_the_rules_is_refused() {
        let good = MessageHead { len: 1, segment: Some(SegmentName { list: 9, pages: 1, place: 1, generation: 1 }) };
        let [first, pages, generation] = good.encode();
        let bad = [
            [257, 0, 0],
            [first | 1 << 32, pages, generation],
            [first | 1 << 17, pages, generation],
            [first | 64 << 24, pages, generation],
            [first, pages & 0xffff_ffff, generation],
            [first, 25 << 32, generation],
            [first, pages, 0],
            [first, pages, 1 << 32],
            [1, 1, 0],
            [1 | 1 << 24, 0, 0],
        ];
        for [first, pages, generation] in bad {
            let words = [first, pages, generation, 0];
            assert!(MessageHead::decode(words).is_err(), "{words:x?}");
        }
        for fourth in [1, 1 << 63] {
            assert!(MessageHead::decode([first, pages, generation, fourth]).is_err(), "{fourth:x}");
            assert!(MessageHead::decode([1, 0, 0, fourth]).is_err(), "{fourth:x}");
        }
    }

    #[test]
    fn x12_board_says_who_the_peer_is_if_there_is_one() {
        for (peer, gone) in [(0, false), (32751, true), (u16::MAX, false)] {
            assert_eq!(stats_peer(stats_head(peer, gone)), Some((peer, gone)));
            assert_eq!(stats_peer(stats_head(peer, gone) | 77 << 32), Some((peer, gone)), "a listener page's");
        }
        assert_eq!(stats_peer(0), None);
    }

    #[test]
    fn x3_parts_of_a_page_do_not_overlap() {
        const {
            assert!(AT_RELEASED + 8 * PLACES <= AT_STATS && AT_MADE < AT_NAME && AT_NAME + NAME_MAX <= AT_MESSAGES);
            assert!(AT_FOR > AT_JOINED && AT_FOR < AT_RECONNECT_PAGES);
            assert!(AT_MESSAGES + MESSAGES as usize * MESSAGE_STRIDE == AT_REFERENCES);
            assert!(AT_REFERENCES + MESSAGES as usize * REFERENCES * 4 == PAGE);
            assert!(MESSAGE_HEAD + crate::limits::CONTROL_MESSAGE_MAX == MESSAGE_STRIDE);
            assert!(AT_ANSWERS + 8 * ANSWERS == PAGE);
            assert!(AT_REQUESTS + 8 * REQUESTS == PAGE);
            assert!(AT_RECONNECT_PAGES > AT_STATE && AT_RECONNECT_PAGES + 8 * RECONNECT_PAGES == AT_ANSWERS);
            assert!(
                AT_RECONNECT_PAGE > AT_WANTED
                    && AT_PAIR > AT_RECONNECT_PAGE
                    && AT_PAIR < AT_RECEIVED
                    && AT_PAIR < AT_RECONNECT_PAGES
            );
        }
    }
}
