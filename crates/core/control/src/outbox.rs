// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries messages through a pair of pages, each of which one side writes (B-3 to B-5).

use std::collections::VecDeque;

use tombolo_layout::MAGIC;

use crate::{
    Fault, Path, VERSION,
    message::{Envelope, HEAD_LEN, Head, MESSAGE_MAX},
};

/// Number of bytes of a box: half a page (B-3).
pub const BOX_LEN: usize = 2048;
/// Offset of the sequence words in a box's page (B-3).
pub const SEQUENCE_AT: usize = BOX_LEN;
/// Largest number of messages that wait for room (B-5).
pub const QUEUE_MAX: usize = 256;

const AT_VERSION: usize = 0x08;
const AT_EPOCH: usize = 0x10;
const AT_PEER_EPOCH: usize = 0x18;
const AT_SENT: usize = 0x40;
const AT_TAKEN: usize = 0x80;
const AT_MESSAGE: usize = 0x100;

/// Access to the two pages. Each call takes effect before the next one.
pub trait Boxes {
    /// Copies from the peer's box.
    ///
    /// # Errors
    /// The memory cannot be reached.
    fn load(&mut self, offset: usize, bytes: &mut [u8]) -> std::io::Result<()>;
    /// Copies to the own box. 8 bytes at a multiple of 8 are stored atomically.
    ///
    /// # Errors
    /// The memory cannot be reached.
    fn store(&mut self, offset: usize, bytes: &[u8]) -> std::io::Result<()>;
}

/// Result of one look into the boxes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The peer appeared or restarted: all that was sent before is forgotten. The caller must begin with Hello.
    Began,
    /// The peer sent a message.
    Said(Envelope),
    /// The peer violated a clause. Nothing from it is believed until it restarts.
    Broke(Fault),
}

/// One side of a pair of boxes. It never waits: [`Session::turn`] does what can be done now.
///
/// Its decisions rest on its own fields; its own box is only ever written.
#[derive(Debug)]
pub struct Session {
    path: Path,
    epoch: u64,
    /// Epoch of the peer that this side answers.
    peer: u64,
    sent: u8,
    before_sent: u8,
    taken: u8,
    queue: VecDeque<Vec<u8>>,
    broken: bool,
}

impl Session {
    /// Begins a session in a box whose previous content no longer counts. `epoch` is random and not 0.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn begin(path: Path, epoch: u64, boxes: &mut impl Boxes) -> std::io::Result<Self> {
        debug_assert!(epoch != 0, "0 says that nobody is there");
        for at in [AT_EPOCH, AT_SENT, AT_TAKEN, AT_PEER_EPOCH] {
            boxes.store(at, &[0; 8])?;
        }
        boxes.store(0, &MAGIC)?;
        boxes.store(AT_VERSION, &u64::from(VERSION).to_le_bytes())?;
        boxes.store(AT_EPOCH, &epoch.to_le_bytes())?;
        Ok(Self { path, epoch, peer: 0, sent: 0, before_sent: 0, taken: 0, queue: VecDeque::new(), broken: false })
    }

    /// Returns this side's epoch.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Queues a message. Returns false if there is no room; the peer then gets nothing more until it restarts.
    pub fn queue_message(&mut self, said: &Envelope) -> bool {
        if self.broken || self.queue.len() >= QUEUE_MAX {
            self.spoil();
            return false;
        }
        self.queue.push_back(said.encode());
        true
    }

    /// Returns the number of further messages for which there is room.
    #[must_use]
    pub fn room(&self) -> usize {
        QUEUE_MAX - self.queue.len()
    }

    /// Returns whether the peer violated a clause, or does not read.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Records that the peer violated a clause that only the message's reader could check. Nothing from the peer is
    /// believed until it restarts (B-6).
    pub fn spoil(&mut self) {
        self.broken = true;
        self.queue.clear();
    }

    /// Looks once at the peer's box and does what its state allows: at most one message in and one out. The flag beside
    /// the event is true if this side's box changed, so that the caller must notify the peer.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn turn(&mut self, boxes: &mut impl Boxes) -> std::io::Result<(Option<Event>, bool)> {
        let theirs = word(boxes, AT_EPOCH)?;
        if theirs == 0 {
            return Ok((None, false));
        }
        if theirs != self.peer {
            let mut head = [0; 16];
            boxes.load(0, &mut head)?;
            if head[..8] != MAGIC || head[8..] != u64::from(VERSION).to_le_bytes() {
                return Ok((None, false));
            }
            (self.peer, self.broken) = (theirs, false);
            (self.sent, self.before_sent, self.taken) = (0, 0, 0);
            self.queue.clear();
            boxes.store(AT_SENT, &[0; 8])?;
            boxes.store(AT_TAKEN, &[0; 8])?;
            boxes.store(AT_PEER_EPOCH, &theirs.to_le_bytes())?;
            return Ok((Some(Event::Began), true));
        }
        if self.broken || word(boxes, AT_PEER_EPOCH)? != self.epoch {
            return Ok((None, false));
        }
        let (sent, taken) = (word(boxes, AT_SENT)?, word(boxes, AT_TAKEN)?);
        if word(boxes, AT_EPOCH)? != self.peer {
            // The peer restarted meanwhile, so these numbers mean nothing.
            return Ok((None, false));
        }
        let mut changed = false;
        if taken == u64::from(self.sent) {
            if let Some(message) = self.queue.pop_front() {
                boxes.store(AT_MESSAGE, &message)?;
                (self.before_sent, self.sent) = (self.sent, after(self.sent));
                boxes.store(AT_SENT, &u64::from(self.sent).to_le_bytes())?;
                changed = true;
            }
        } else if taken != u64::from(self.before_sent) {
            return Ok((Some(self.broke(Fault::new("B-5", "peer took a message that was not sent"))), changed));
        }
        if sent == u64::from(self.taken) {
            return Ok((None, changed));
        }
        if sent != u64::from(after(self.taken)) {
            return Ok((Some(self.broke(Fault::new("B-5", "peer sent a message out of turn"))), changed));
        }
        let mut bytes = [0; MESSAGE_MAX];
        boxes.load(AT_MESSAGE, &mut bytes)?;
        self.taken = after(self.taken);
        boxes.store(AT_TAKEN, &u64::from(self.taken).to_le_bytes())?;
        let event = match framed(&bytes).and_then(|message| Envelope::decode(self.path, message)) {
            Ok(said) => Event::Said(said),
            Err(fault) => self.broke(fault),
        };
        Ok((Some(event), true))
    }

    fn broke(&mut self, fault: Fault) -> Event {
        self.spoil();
        Event::Broke(fault)
    }
}

/// Returns the message number that follows `number`. Numbers fit into a byte, so that no reader sees half of one.
fn after(number: u8) -> u8 {
    number % 255 + 1
}

fn word(boxes: &mut impl Boxes, at: usize) -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    boxes.load(at, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Returns the message at the front of the bytes copied from a box.
fn framed(bytes: &[u8; MESSAGE_MAX]) -> Result<&[u8], Fault> {
    let len = usize::from(u16::from_le_bytes([bytes[6], bytes[7]])) + HEAD_LEN;
    let message = bytes.get(..len).ok_or(Fault::new("B-1", "message is too long"))?;
    Head::decode(message).map(|_| message)
}
