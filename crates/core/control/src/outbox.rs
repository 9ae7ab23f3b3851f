// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages through a pair of pages, each written by one side (B-3 to B-5).

use std::collections::VecDeque;

use tombolo_layout::MAGIC;

use crate::{
    Fault, Path, VERSION,
    message::{Envelope, HEAD_LEN, Head, MESSAGE_MAX},
};

/// Bytes of a box: half a page (B-3).
pub const BOX_LEN: usize = 2048;
/// Where the marks are in a box's page (B-3).
pub const MARKS_AT: usize = BOX_LEN;
/// Most messages that wait for room (B-5).
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
    /// Copies to one's own box; 8 bytes at a multiple of 8 are stored as one.
    ///
    /// # Errors
    /// The memory cannot be reached.
    fn store(&mut self, offset: usize, bytes: &[u8]) -> std::io::Result<()>;
}

/// What a look into the boxes brought.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The peer is there, or began anew: all that was said before is forgotten. Begin with Hello.
    Began,
    /// The peer said something.
    Said(Envelope),
    /// The peer broke a clause. Nothing of it is believed until it begins anew.
    Broke(Fault),
}

/// One side of a pair of boxes. It does not wait: [`Session::turn`] does what can be done now.
///
/// All that it decides by is its own; what stands in its own box is only ever written.
#[derive(Debug)]
pub struct Session {
    path: Path,
    epoch: u64,
    /// The peer's epoch that this side answers.
    peer: u64,
    sent: u8,
    before_sent: u8,
    taken: u8,
    queue: VecDeque<Vec<u8>>,
    broken: bool,
}

impl Session {
    /// Begins, in a box whose content no longer counts. `epoch` is random and not 0.
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

    /// This side's epoch.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Puts a message behind those that wait; false if there is no room, and then the peer gets nothing more before it
    /// begins anew.
    pub fn queue_message(&mut self, said: &Envelope) -> bool {
        if self.broken || self.queue.len() >= QUEUE_MAX {
            self.spoil();
            return false;
        }
        self.queue.push_back(said.encode());
        true
    }

    /// For how many more messages there is room.
    #[must_use]
    pub fn room(&self) -> usize {
        QUEUE_MAX - self.queue.len()
    }

    /// Whether the peer broke a clause, or does not read.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// The peer broke a clause that only its reader could see: nothing of it is believed until it begins anew (B-6).
    pub fn spoil(&mut self) {
        self.broken = true;
        self.queue.clear();
    }

    /// Looks once what the peer did and does what that allows: at most one message in and one out. True beside the event
    /// says that this side's box changed, so that the peer is to be rung.
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
            // It began anew meanwhile: these are the numbers of nobody.
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

/// The number of the message after the one with this number. It fits into a byte, so that nobody ever sees half of it.
fn after(number: u8) -> u8 {
    number % 255 + 1
}

fn word(boxes: &mut impl Boxes, at: usize) -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    boxes.load(at, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// The message at the front of what was copied out of a box.
fn framed(bytes: &[u8; MESSAGE_MAX]) -> Result<&[u8], Fault> {
    let len = usize::from(u16::from_le_bytes([bytes[6], bytes[7]])) + HEAD_LEN;
    let message = bytes.get(..len).ok_or(Fault::new("B-1", "message is too long"))?;
    Head::decode(message).map(|_| message)
}
