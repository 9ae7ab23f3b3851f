// SPDX-License-Identifier: Apache-2.0 OR MIT
//! B-6, B-14. The conversation with the broker at the other end of a link.

use std::io;

use tombolo_control::{Boxes, Event, Message, Name, Path, Reason, Said, Session, Side, VERSION, code};

use crate::calls::{CALLS_MAX, Made, No};

/// What the peer's broker wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Heard {
    /// It began anew: what was asked is forgotten.
    Began,
    /// It is there, and is going to tell of its calls.
    Hello,
    /// B-18. It has this call, and its side is open or over.
    Call(Made, bool),
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
    /// B-18. Of how many calls it is still to tell; none: it has not said how many there are.
    untold: Option<u16>,
    complaints: u32,
}

impl Peer {
    /// Begins anew, as `own`, with the broker of `peer`.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn begin(epoch: u64, own: Name, peer: Name, boot: [u8; 16], boxes: &mut impl Boxes) -> io::Result<Self> {
        let session = Session::begin(Path::Link, epoch, boxes)?;
        Ok(Self { session, own, peer, boot, greeted: false, untold: None, complaints: 0 })
    }

    /// Hears at most one message, and says at most one. Whether the peer is to be rung, and whether there may be more.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn turn(&mut self, boxes: &mut impl Boxes) -> io::Result<(Option<Heard>, bool, bool)> {
        let (event, changed) = self.session.turn(boxes)?;
        let heard = match event {
            Some(Event::Began) => {
                (self.greeted, self.untold) = (false, None);
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
            crate::log_of(
                self.peer.as_str(),
                &format!("the broker of {} {why}: it is not heard until it begins anew", self.peer),
            );
        }
    }

    /// Whether it is not heard until it begins anew.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.session.is_broken()
    }

    /// Whether it is there, makes sense and has told of its calls.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.untold == Some(0) && !self.is_broken()
    }

    /// A message that goes when there is room; false if there are too many before it.
    pub fn say(&mut self, serial: u32, message: Message) -> bool {
        self.session.say(&Said { serial, message })
    }

    /// B-18. Says which calls this side has, and which of them are over here.
    pub fn recount(&mut self, calls: &[(Made, bool)]) {
        self.say(0, Message::Calls { calls: calls.len() as u16 });
        for &(Made { serial, own, theirs, channel }, is_over) in calls {
            let ((offset, len), (peer_offset, peer_len)) = (own, theirs);
            let side = if is_over { Side::Over } else { Side::Open };
            self.say(serial, Message::Call { offset, len, peer_offset, peer_len, channel, side });
        }
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
            Message::Calls { calls } if self.untold.is_none() && calls <= CALLS_MAX => {
                self.untold = Some(calls);
                Some(Heard::Hello)
            }
            Message::Call { offset, len, peer_offset, peer_len, channel, side } => {
                self.untold = Some(self.untold?.checked_sub(1)?);
                let (own, theirs) = ((peer_offset, peer_len), (offset, len));
                Some(Heard::Call(Made { serial, own, theirs, channel }, side == Side::Over))
            }
            Message::Refuse { code, reason } => Some(Heard::Refuse(serial, code, reason)),
            _ if self.untold != Some(0) => None,
            // Who calls is who the host says is at the other end, whatever stands here.
            Message::Connect { peer, service, offset, len, channel } if peer == self.peer => {
                Some(Heard::Connect(serial, service, (offset, len), channel))
            }
            Message::Accept { offset, len } => Some(Heard::Accept(serial, (offset, len))),
            Message::Close {} => Some(Heard::Close(serial)),
            _ => None,
        }
    }
}
