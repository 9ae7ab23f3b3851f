// SPDX-License-Identifier: Apache-2.0 OR MIT
//! B-6, B-14. The conversation with the broker at the other end of a link.

use std::io;

use tombolo_control::{Boxes, Event, Message, Name, Path, Reason, Said, Session, VERSION, code};

use crate::calls::{Made, No};

/// What the peer's broker wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Heard {
    /// It began anew: what was asked is forgotten.
    Began,
    /// It is there.
    Hello,
    /// Its program wants a channel: serial, service, slice, first event channel.
    Connect(u32, Name, (u64, u64), u16),
    /// It agrees: serial, slice.
    Accept(u32, (u64, u64)),
    /// It does not.
    Refuse(u32, u16, Reason),
    /// Its side of a call is over.
    Close(u32),
}

/// How often a peer is complained of in the log: it may begin anew as often as it likes.
const COMPLAINTS_MAX: u32 = 8;

/// The conversation.
#[derive(Debug)]
pub struct Peer {
    session: Session,
    own: Name,
    peer: Name,
    boot: [u8; 16],
    greeted: bool,
    complaints: u32,
}

impl Peer {
    /// Begins anew, as `own`, with the broker of `peer`.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn begin(epoch: u64, own: Name, peer: Name, boot: [u8; 16], boxes: &mut impl Boxes) -> io::Result<Self> {
        let session = Session::begin(Path::Link, epoch, boxes)?;
        Ok(Self { session, own, peer, boot, greeted: false, complaints: 0 })
    }

    /// Hears at most one message, and says at most one. Whether the peer is to be rung, and whether there may be more.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn turn(&mut self, boxes: &mut impl Boxes) -> io::Result<(Option<Heard>, bool, bool)> {
        let (event, changed) = self.session.turn(boxes)?;
        let heard = match event {
            Some(Event::Began) => {
                self.greeted = false;
                let (name, boot, epoch) = (self.own.clone(), self.boot, self.session.epoch());
                self.say(0, Message::Hello { version_min: VERSION, version_max: VERSION, epoch, boot, name });
                Some(Heard::Began)
            }
            Some(Event::Said(said)) => {
                let heard = self.understand(said);
                if heard.is_none() {
                    self.spoil("says what it may not (B-6)");
                }
                heard
            }
            Some(Event::Broke(fault)) => {
                self.spoil(&fault.to_string());
                None
            }
            None => return Ok((None, changed, changed)),
        };
        Ok((heard, changed, true))
    }

    /// Nothing of it is believed until it begins anew.
    pub fn spoil(&mut self, why: &str) {
        self.session.spoil();
        self.complaints = self.complaints.saturating_add(1);
        if self.complaints <= COMPLAINTS_MAX {
            crate::log(&format!("the broker of {} {why}: it is not heard until it begins anew", self.peer));
        }
    }

    /// Whether it is there and makes sense.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.greeted && !self.session.is_broken()
    }

    /// A message that goes when there is room; false if there are too many before it.
    pub fn say(&mut self, serial: u32, message: Message) -> bool {
        self.session.say(&Said { serial, message })
    }

    /// Says Connect.
    pub fn connect(&mut self, made: &Made, service: Name) -> bool {
        let (peer, (offset, len), channel) = (self.own.clone(), made.own, made.channel);
        self.say(made.serial, Message::Connect { peer, service, offset, len, channel })
    }

    /// Says Accept.
    pub fn accept(&mut self, made: &Made) -> bool {
        let (offset, len) = made.own;
        self.say(made.serial, Message::Accept { offset, len })
    }

    /// Says Refuse.
    pub fn refuse(&mut self, serial: u32, No(code, why): No) -> bool {
        self.say(serial, Message::Refuse { code, reason: why.into() })
    }

    fn understand(&mut self, Said { serial, message }: Said) -> Option<Heard> {
        match message {
            Message::Hello { version_min, version_max, name, .. } if !self.greeted => {
                self.greeted = name == self.peer && version_min <= VERSION && version_max >= VERSION;
                if !self.greeted {
                    let why = format!("this is the link with {}, and version {VERSION}", self.peer);
                    self.refuse(0, No(code::VERSION, why));
                }
                self.greeted.then_some(Heard::Hello)
            }
            _ if !self.greeted => None,
            // Who calls is who the host says is at the other end, whatever stands here.
            Message::Connect { peer, service, offset, len, channel } if peer == self.peer => {
                Some(Heard::Connect(serial, service, (offset, len), channel))
            }
            Message::Accept { offset, len } => Some(Heard::Accept(serial, (offset, len))),
            Message::Refuse { code, reason } => Some(Heard::Refuse(serial, code, reason)),
            Message::Close {} => Some(Heard::Close(serial)),
            _ => None,
        }
    }
}
