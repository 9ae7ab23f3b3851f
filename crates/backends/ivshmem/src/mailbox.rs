// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The first page of a window: what one end says to the other, and which of the other's segments it let go (V-4, V-5).

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

/// The version of the page (V-4).
const VERSION: u64 = 1;
/// Bytes of the page (V-4).
pub(crate) const LEN: u64 = PAGE;
/// Messages that wait at most (V-5).
const ROOM: u64 = 8;
/// Segments of one end that the other has, or may still map (V-6).
pub(crate) const HANDLES: usize = 64;

/// Where a state stands in the page; its lowest byte is the kernel module's to close (V-4).
pub const STATE_AT: u32 = 0x80;
/// A state from which on the end is closed (V-4).
pub const CLOSED: u8 = 2;
const OPEN: u64 = 1;
/// Beside the state, in the line that its owner writes (V-9).
const AT_LEFT: usize = 0x88;

const AT_VERSION: usize = 0x08;
const AT_SENT: usize = 0x100;
const AT_TAKEN: usize = 0x180;
const AT_LET_GO: usize = 0x200;
const AT_MESSAGES: usize = 0x400;
const ENTRY: usize = 0x140;
const ENTRY_HEAD: usize = 0x20;

/// What breaks `clause`.
pub(crate) fn malformed(clause: &'static str, what: impl Into<String>) -> Error {
    Error::Malformed { clause, what: what.into() }
}

/// A segment on its way: where it is in its owner's window, and by which number it is given back (V-6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Passed {
    pub offset: u64,
    pub len: u64,
    pub handle: usize,
    pub serial: u64,
}

/// The own page as far as it is words, for whoever has one to store.
#[derive(Clone, Debug)]
pub(crate) struct OwnPage(Arc<OwnControl>);

impl OwnPage {
    pub(crate) fn close(&self) {
        self.0.word(STATE_AT as usize).store_release(CLOSED.into());
    }

    /// What this endpoint published is all there will be (V-9).
    pub(crate) fn leave(&self) {
        // ORDER Release: with the peer's Acquire; who sees it sees all that was published before.
        self.0.word(AT_LEFT).store_release(1);
    }

    /// Nothing of the peer's segment is mapped here any more (V-6).
    pub(crate) fn let_go(&self, handle: usize, serial: u64) {
        self.0.word(AT_LET_GO + 8 * handle).store_release(serial);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.0.is_lost()
    }
}

/// The peer's page, once it accepted: before that it has said nothing, taken nothing and let nothing go.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerPage(Arc<OnceLock<PeerSegment>>);

impl PeerPage {
    /// It accepted. Once it has, nothing changes any more.
    pub(crate) fn accepted(&self, page: PeerSegment) {
        let _ = self.0.set(page);
    }

    pub(crate) fn is_there(&self) -> bool {
        self.0.get().is_some()
    }

    /// Whether its end is over. Any state beyond those of an endpoint that is not counts: what stands there after the
    /// kernel closed it cannot be less.
    pub(crate) fn is_closed(&self) -> bool {
        self.word(STATE_AT as usize).is_some_and(|state| state.load_acquire().hint() >= CLOSED.into())
    }

    /// Whether its end publishes nothing more because the link is taken away (V-9).
    pub(crate) fn has_left(&self) -> bool {
        self.word(AT_LEFT).is_some_and(|left| left.load_acquire().hint() != 0)
    }

    /// The number of the last segment of `handle` that the peer let go (V-6).
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

/// Both pages, and how far each side is.
#[derive(Debug)]
pub(crate) struct Mailbox {
    own: OwnPage,
    entries: OwnBytes,
    peer: PeerPage,
    sent: u64,
    taken: u64,
    /// The peer's page was seen to be one.
    begun: bool,
}

impl Mailbox {
    /// Begins in a page of zeros.
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

    /// Puts a message there (V-5). The peer is still to be rung.
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
        // ORDER Release: with the peer's Acquire of the count; who sees it sees the message.
        self.own.0.word(AT_SENT).store_release(self.sent);
        Ok(())
    }

    /// Takes the next message out, or nothing (V-5).
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

    /// Whether there is a message.
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
            // Over it may be by now: what was sent before is still to be read.
            if peer.word(STATE_AT as usize).load_acquire().hint() == 0 {
                return Err(malformed("V-4", "a message of an end that has not begun"));
            }
            self.begun = true;
        }
        Ok(waits)
    }
}

/// The peer's segments that are mapped here.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mapped(Arc<Mutex<Vec<Passed>>>);

impl Mapped {
    /// The segment that is mapped, if it is one.
    pub(crate) fn only(&self) -> Option<Passed> {
        let mapped = lock(&self.0);
        if let [one] = mapped[..] { Some(one) } else { None }
    }

    /// Whether the peer may pass this memory now: whole pages of its window behind the page, apart from these and from
    /// the memory passed before that is still mapped (V-6).
    pub(crate) fn admit(&self, new: Passed, window: u64, max: u64, page: &OwnPage) -> Result<SegmentRelease> {
        let bad =
            |why: &str| Err(malformed("V-6", format!("segment of {:#x} bytes at {:#x}: {why}", new.len, new.offset)));
        // Whatever becomes of it, its owner may have it again when this is dropped.
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
