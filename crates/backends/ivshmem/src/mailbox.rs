// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements the first page of a window. It holds the messages from its owner to the peer, and records which of the
//! peer's segments the owner has let go (V-4, V-5).

use std::sync::{Arc, Mutex, OnceLock};

use tombolo_domain::{Error, Result};
use tombolo_layout::{
    MAGIC,
    limits::{CONTROL_MESSAGE_MAX, PAGE},
};
use tombolo_mem::{
    MappedPeerWord, OwnBytes, OwnControl, OwnData, OwnSegment, OwnWord, PeerData, PeerSegment, PeerWord,
};
use tombolo_os::lock::lock;

use crate::forks::Mapping;

/// Version of the page (V-4).
const VERSION: u64 = 1;
/// Number of bytes of the page (V-4).
pub(crate) const LEN: u64 = PAGE;
/// Largest number of messages that wait (V-5).
const ROOM: u64 = 8;
/// Largest number of segments of one endpoint that the peer has mapped or may still map (V-6).
pub(crate) const HANDLES: usize = 64;

/// Offset of the state in the page. The kernel module sets its lowest byte when it closes the window (V-4).
pub const STATE_AT: u32 = 0x80;
/// Lowest state that means that the endpoint is closed (V-4).
pub const CLOSED: u8 = 2;
const OPEN: u64 = 1;
/// Offset of *left*, beside the state because the owner writes both: they share a cache line (V-9).
const AT_LEFT: usize = 0x88;

const AT_VERSION: usize = 0x08;
const AT_SENT: usize = 0x100;
const AT_TAKEN: usize = 0x180;
const AT_LET_GO: usize = 0x200;
const AT_MESSAGES: usize = 0x400;
const ENTRY: usize = 0x140;
const ENTRY_HEAD: usize = 0x20;

/// Returns the error for a violation of `clause`.
pub(crate) fn malformed(clause: &'static str, what: impl Into<String>) -> Error {
    Error::Malformed { clause, what: what.into() }
}

/// A segment that is passed to the peer: its range of the owner's window, and the handle and serial by which it is let
/// go (V-6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Passed {
    pub offset: u64,
    pub len: u64,
    pub handle: usize,
    pub serial: u64,
}

/// The words of the own page, shared by everything that stores one of them.
#[derive(Clone, Debug)]
pub(crate) struct OwnPage(Arc<OwnControl>);

impl OwnPage {
    pub(crate) fn close(&self) {
        self.0.word(STATE_AT as usize).store_release(CLOSED.into());
    }

    /// Tells the peer that this endpoint publishes nothing more (V-9).
    pub(crate) fn leave(&self) {
        // ORDER Release: with the peer's Acquire; a peer that sees this word sees all that was published before.
        self.0.word(AT_LEFT).store_release(1);
    }

    /// Tells the peer that its segment is not mapped here any more (V-6).
    pub(crate) fn let_go(&self, handle: usize, serial: u64) {
        self.0.word(AT_LET_GO + 8 * handle).store_release(serial);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.0.is_lost()
    }
}

/// The peer's page, once the peer accepted. Before that the peer has sent nothing, taken nothing and let nothing go.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerPage(Arc<OnceLock<PeerSegment>>);

impl PeerPage {
    /// Sets the page when the peer accepts. Later calls change nothing.
    pub(crate) fn accepted(&self, page: PeerSegment) {
        let _ = self.0.set(page);
    }

    pub(crate) fn is_there(&self) -> bool {
        self.0.get().is_some()
    }

    /// Returns whether the peer's endpoint is over. Any state beyond those of an open endpoint counts, because the
    /// state cannot be lower after the kernel closed it.
    pub(crate) fn is_closed(&self) -> bool {
        self.word(STATE_AT as usize).is_some_and(|state| state.load_acquire().hint() >= CLOSED.into())
    }

    /// Returns whether the peer publishes nothing more because the link is taken away (V-9).
    pub(crate) fn has_left(&self) -> bool {
        self.word(AT_LEFT).is_some_and(|left| left.load_acquire().hint() != 0)
    }

    /// Returns the serial of the last segment of `handle` that the peer let go (V-6).
    pub(crate) fn let_go(&self, handle: usize) -> u64 {
        self.word(AT_LET_GO + 8 * handle).map_or(0, |word| word.load_acquire().hint())
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.0.get().is_some_and(PeerSegment::is_lost)
    }

    fn word(&self, at: usize) -> Option<MappedPeerWord> {
        self.0.get().map(|page| page.word(at))
    }
}

/// Both pages, and the progress of each side.
#[derive(Debug)]
pub(crate) struct Mailbox {
    own: OwnPage,
    entries: OwnBytes,
    peer: PeerPage,
    sent: u64,
    taken: u64,
    /// Whether the peer's page was seen to be valid.
    begun: bool,
}

impl Mailbox {
    /// Initialises the own page, which is all zeros.
    pub(crate) fn new(page: OwnSegment, peer: PeerPage) -> Self {
        let (control, entries) = page.split(AT_MESSAGES);
        control.word(AT_VERSION).store_relaxed(VERSION);
        control.word(STATE_AT as usize).store_relaxed(OPEN);
        control.word(0).store_release(u64::from_le_bytes(MAGIC));
        let own = OwnPage(Arc::new(control));
        Self { own, entries, peer, sent: 0, taken: 0, begun: false }
    }

    pub(crate) fn own(&self) -> &OwnPage {
        &self.own
    }

    pub(crate) fn peer(&self) -> &PeerPage {
        &self.peer
    }

    /// Stores a message in the own page (V-5). The caller must notify the peer afterwards.
    pub(crate) fn send(&mut self, message: &[u8], passed: Option<Passed>) -> Result<()> {
        let unread = |taken: u64| match self.sent.checked_sub(taken) {
            Some(unread @ 0..=ROOM) => Ok(unread),
            _ => Err(malformed("V-5", format!("{taken} messages taken of {} sent", self.sent))),
        };
        let unread = match self.peer.word(AT_TAKEN) {
            Some(taken) => taken.load_acquire().check(unread)?,
            None => unread(0)?,
        };
        if unread == ROOM {
            return Err(Error::Limit {
                what: "the room for control messages",
                remedy: "the peer does not read them: close the link or wait for it",
            });
        }
        let mut entry = [0; ENTRY_HEAD + CONTROL_MESSAGE_MAX];
        entry[..2].copy_from_slice(&(message.len() as u16).to_le_bytes());
        if let Some(passed) = passed {
            entry[2..4].copy_from_slice(&(passed.handle as u16 + 1).to_le_bytes());
            for (at, number) in [(0x08, passed.offset), (0x10, passed.len), (0x18, passed.serial)] {
                entry[at..at + 8].copy_from_slice(&number.to_le_bytes());
            }
        }
        entry[ENTRY_HEAD..][..message.len()].copy_from_slice(message);
        self.entries.copy_in((self.sent % ROOM) as usize * ENTRY, &entry);
        self.sent += 1;
        // ORDER Release: with the peer's Acquire of the count; a peer that sees the count sees the message.
        self.own.0.word(AT_SENT).store_release(self.sent);
        Ok(())
    }

    /// Takes the next message of the peer, if there is one (V-5).
    pub(crate) fn recv(&mut self) -> Result<Option<(Vec<u8>, Option<Passed>)>> {
        if !self.waits()? {
            return Ok(None);
        }
        let mut entry = [0; ENTRY_HEAD + CONTROL_MESSAGE_MAX];
        let peer = self.peer.0.get().expect("what waits is in it");
        peer.data(AT_MESSAGES + (self.taken % ROOM) as usize * ENTRY).copy_out(0, &mut entry);
        self.taken += 1;
        self.own.0.word(AT_TAKEN).store_release(self.taken);

        let number = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().expect("8 bytes"));
        let len = usize::from(u16::from_le_bytes([entry[0], entry[1]]));
        let handle = usize::from(u16::from_le_bytes([entry[2], entry[3]]));
        if len > CONTROL_MESSAGE_MAX || handle > HANDLES || entry[4..8] != [0; 4] {
            return Err(malformed("V-5", format!("message of {len} bytes with segment {handle}")));
        }
        let passed =
            Passed { offset: number(0x08), len: number(0x10), handle: handle.wrapping_sub(1), serial: number(0x18) };
        Ok(Some((entry[ENTRY_HEAD..][..len].to_vec(), (handle != 0).then_some(passed))))
    }

    /// Returns whether a message of the peer waits.
    pub(crate) fn waits(&mut self) -> Result<bool> {
        let (taken, Some(peer)) = (self.taken, self.peer.0.get()) else { return Ok(false) };
        let waits = peer.word(AT_SENT).load_acquire().check(|sent| match sent.checked_sub(taken) {
            Some(waiting @ 0..=ROOM) => Ok(waiting != 0),
            _ => Err(malformed("V-5", format!("{sent} messages sent after {taken} taken"))),
        })?;
        if waits && !self.begun {
            let head = peer.header::<16>();
            if head[..8] != MAGIC || head[8..] != VERSION.to_le_bytes() {
                return Err(malformed("V-4", "the peer's window does not begin with magic and version"));
            }
            // The peer may be closed by now: what it sent before is still to be read.
            if peer.word(STATE_AT as usize).load_acquire().hint() == 0 {
                return Err(malformed("V-4", "a message of an end that has not begun"));
            }
            self.begun = true;
        }
        Ok(waits)
    }
}

/// Segments of the peer that are mapped here.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mapped(Arc<Mutex<Vec<Passed>>>);

impl Mapped {
    /// Returns the mapped segment if there is exactly one.
    pub(crate) fn only(&self) -> Option<Passed> {
        let mapped = lock(&self.0);
        if let [one] = mapped[..] { Some(one) } else { None }
    }

    /// Checks whether the peer may pass this memory now. It must be whole pages of the peer's window behind the first
    /// page, apart from that page and from memory passed before that is still mapped (V-6).
    pub(crate) fn admit(&self, new: Passed, window: u64, max: u64, page: &OwnPage) -> Result<SegmentRelease> {
        let bad =
            |why: &str| Err(malformed("V-6", format!("segment of {:#x} bytes at {:#x}: {why}", new.len, new.offset)));
        // Dropping this gives the segment back to its owner, whether it is accepted or refused.
        let mut let_go = SegmentRelease { passed: new, page: page.clone(), mapped: None, since: Mapping::now() };
        let end = match new.offset.checked_add(new.len) {
            Some(end) if new.offset >= LEN && end <= window => end,
            _ => return bad("not within the window"),
        };
        if new.len == 0 || new.offset % PAGE != 0 || new.len % PAGE != 0 {
            return bad("not of whole pages");
        }
        if new.len > max {
            return bad(&format!("at most {max:#x} were agreed"));
        }
        let mut mapped = lock(&self.0);
        let clash = |old: &Passed| old.handle == new.handle || (old.offset < end && new.offset < old.offset + old.len);
        if mapped.iter().any(clash) {
            return bad("passed before, and not let go of yet");
        }
        mapped.push(new);
        let_go.mapped = Some(self.clone());
        drop(mapped);
        Ok(let_go)
    }
}

/// Gives a segment back to its owner when it is dropped.
#[derive(Debug)]
pub(crate) struct SegmentRelease {
    passed: Passed,
    page: OwnPage,
    mapped: Option<Mapped>,
    since: Mapping,
}

impl Drop for SegmentRelease {
    fn drop(&mut self) {
        if let Some(Mapped(mapped)) = &self.mapped {
            lock(mapped).retain(|it| *it != self.passed);
        }
        if !self.since.may_be_shared() {
            self.page.let_go(self.passed.handle, self.passed.serial);
        }
    }
}
