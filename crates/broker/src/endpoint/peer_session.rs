// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The session with the broker at the other end of a link (B-6, B-14).

use std::io;

use tombolo_control::{
    Boxes, Envelope, Event, Message, Name, Path, Reason, Session, Side, VERSION, VERSION_FIND, code,
};

use crate::endpoint::connections::{Agreement, CONNECTIONS_MAX, Refusal};

/// What the peer's broker wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerRequest {
    /// It began anew: what was asked is forgotten.
    Began,
    /// It is there, and is going to tell of its connections.
    Hello,
    /// The peer has this connection; true if it is over on its side (B-18).
    Recount(Agreement, bool),
    /// Its program wants a channel: serial, service, window, first event channel.
    Connect(u32, Name, (u64, u64), u16),
    /// It agrees: serial, window.
    Accept(u32, (u64, u64)),
    /// It does not.
    Refuse(u32, u16, Reason),
    /// Its side of a connection is over.
    Close(u32),
    /// The peer asks who waits for a TCP connection, or answers such a question (B-23).
    Inquire(Inquiry),
}

/// What brokers at the two ends of a link say to each other about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Inquiry {
    /// Who waits for this key? By serial.
    Seek(u32, u32),
    /// A process with this service does.
    Found(u32, Name),
    /// Nobody does.
    Nobody(u32),
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
    /// It understands Seek.
    finds: bool,
    /// How many connections the peer is still to list; none: it has not said how many there are (B-18).
    unrecounted: Option<u16>,
    complaints: u32,
}

impl Peer {
    /// Begins anew, as `own`, with the broker of `peer`.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn begin(epoch: u64, own: Name, peer: Name, boot: [u8; 16], boxes: &mut impl Boxes) -> io::Result<Self> {
        let session = Session::begin(Path::Link, epoch, boxes)?;
        Ok(Self { session, own, peer, boot, greeted: false, finds: false, unrecounted: None, complaints: 0 })
    }

    /// Hears at most one message, and says at most one. Whether the peer is to be rung, and whether there may be more.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn turn(&mut self, boxes: &mut impl Boxes) -> io::Result<(Option<PeerRequest>, bool, bool)> {
        let (event, changed) = self.session.turn(boxes)?;
        let heard = match event {
            Some(Event::Began) => {
                (self.greeted, self.finds, self.unrecounted) = (false, false, None);
                let (name, boot, epoch) = (self.own.clone(), self.boot, self.session.epoch());
                let (version_min, version_max) = (VERSION, VERSION_FIND);
                self.queue_message(0, Message::Hello { version_min, version_max, epoch, boot, name });
                Some(PeerRequest::Began)
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
            tracing::warn!(
                stranger = self.peer.as_str(),
                "the broker of {} {why}: it is not heard until it begins anew",
                self.peer
            );
        }
    }

    /// Whether it is not heard until it begins anew.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.session.is_broken()
    }

    /// Whether it is there, makes sense and has told of its connections.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.unrecounted == Some(0) && !self.is_broken()
    }

    /// Whether the peer's broker understands Seek (B-23).
    #[must_use]
    pub fn finds(&self) -> bool {
        self.finds
    }

    /// A message that goes when there is room; false if there are too many before it.
    pub fn queue_message(&mut self, serial: u32, message: Message) -> bool {
        self.session.queue_message(&Envelope { serial, message })
    }

    /// Lists the connections of this side, each with whether it is over here (B-18).
    pub fn recount(&mut self, connections: &[(Agreement, bool)]) {
        self.queue_message(0, Message::Calls { connections: connections.len() as u16 });
        for &(Agreement { serial, own, theirs, channel }, is_over) in connections {
            let ((offset, len), (peer_offset, peer_len)) = (own, theirs);
            let side = if is_over { Side::Over } else { Side::Open };
            self.queue_message(serial, Message::Call { offset, len, peer_offset, peer_len, channel, side });
        }
    }

    /// Says Connect.
    pub fn connect(&mut self, made: &Agreement, service: Name) -> bool {
        let (peer, (offset, len), channel) = (self.own.clone(), made.own, made.channel);
        self.queue_message(made.serial, Message::Connect { peer, service, offset, len, channel })
    }

    /// Says Accept.
    pub fn accept(&mut self, made: &Agreement) -> bool {
        let (offset, len) = made.own;
        self.queue_message(made.serial, Message::Accept { offset, len })
    }

    /// Says Refuse.
    pub fn refuse(&mut self, serial: u32, Refusal(code, why): Refusal) -> bool {
        self.queue_message(serial, Message::Refuse { code, reason: why.into() })
    }

    fn understand(&mut self, Envelope { serial, message }: Envelope) -> Option<PeerRequest> {
        match message {
            Message::Hello { version_min, version_max, name, .. } if !self.greeted => {
                self.greeted = name == self.peer && version_min <= VERSION && version_max >= VERSION;
                self.finds = version_max >= VERSION_FIND;
                if !self.greeted {
                    let why = format!("this is the link with {}, and version {VERSION}", self.peer);
                    self.refuse(0, Refusal(code::VERSION, why));
                }
                self.greeted.then_some(PeerRequest::Hello)
            }
            _ if !self.greeted => None,
            Message::Calls { connections } if self.unrecounted.is_none() && connections <= CONNECTIONS_MAX => {
                self.unrecounted = Some(connections);
                Some(PeerRequest::Hello)
            }
            Message::Call { offset, len, peer_offset, peer_len, channel, side } => {
                self.unrecounted = Some(self.unrecounted?.checked_sub(1)?);
                let (own, theirs) = ((peer_offset, peer_len), (offset, len));
                Some(PeerRequest::Recount(Agreement { serial, own, theirs, channel }, side == Side::Over))
            }
            Message::Refuse { code, reason } => Some(PeerRequest::Refuse(serial, code, reason)),
            _ if self.unrecounted != Some(0) => None,
            // Who connects is who the host says is at the other end, whatever stands here.
            Message::Connect { peer, service, offset, len, channel } if peer == self.peer => {
                Some(PeerRequest::Connect(serial, service, (offset, len), channel))
            }
            Message::Accept { offset, len } => Some(PeerRequest::Accept(serial, (offset, len))),
            Message::Close {} => Some(PeerRequest::Close(serial)),
            Message::Seek { key } => Some(PeerRequest::Inquire(Inquiry::Seek(serial, key))),
            Message::Found { peer, service } if peer == self.peer => {
                Some(PeerRequest::Inquire(Inquiry::Found(serial, service)))
            }
            Message::Nobody {} => Some(PeerRequest::Inquire(Inquiry::Nobody(serial))),
            _ => None,
        }
    }
}
