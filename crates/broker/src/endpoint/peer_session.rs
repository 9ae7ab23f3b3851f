// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds the session with the broker at the other end of a link (B-6, B-14).

use std::io;

use tombolo_control::{
    Boxes, Envelope, Event, Message, Name, Path, Reason, Session, Side, VERSION, VERSION_FIND, code,
};

use crate::endpoint::connections::{Agreement, CONNECTIONS_MAX, Refusal};

/// A request or report of the peer's broker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerRequest {
    /// The peer's broker began a new session: what was asked before is forgotten.
    Began,
    /// The peer's broker is there, and is going to list its connections.
    Hello,
    /// The peer has this connection; true if it is over on the peer's side (B-18).
    Recount(Agreement, bool),
    /// A program of the peer wants a channel: serial, service, window, first event channel.
    Connect(u32, Name, (u64, u64), u16),
    /// The peer agrees: serial, window.
    Accept(u32, (u64, u64)),
    /// The peer does not agree: serial, code, reason.
    Refuse(u32, u16, Reason),
    /// The peer's side of a connection is over.
    Close(u32),
    /// The peer asks who waits for a TCP connection, or answers such a question (B-23).
    Inquire(Inquiry),
}

/// A question about a waiting TCP connection, or its answer, between the brokers of a link.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Inquiry {
    /// Asks who waits for a key: serial, key.
    Seek(u32, u32),
    /// A process with this service waits for it.
    Found(u32, Name),
    /// Nobody waits for it.
    Nobody(u32),
}

/// Largest number of warnings logged about a peer, which may begin new sessions as often as it likes.
const COMPLAINTS_MAX: u32 = 8;

/// The session with a peer's broker.
#[derive(Debug)]
pub struct Peer {
    session: Session,
    own: Name,
    peer: Name,
    boot: [u8; 16],
    greeted: bool,
    /// Whether the peer's broker understands Seek.
    finds: bool,
    /// Number of connections that the peer is still to list; `None` before it has sent how many there are (B-18).
    unrecounted: Option<u16>,
    complaints: u32,
}

impl Peer {
    /// Begins a new session, as `own`, with the broker of `peer`.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn begin(epoch: u64, own: Name, peer: Name, boot: [u8; 16], boxes: &mut impl Boxes) -> io::Result<Self> {
        let session = Session::begin(Path::Link, epoch, boxes)?;
        Ok(Self { session, own, peer, boot, greeted: false, finds: false, unrecounted: None, complaints: 0 })
    }

    /// Receives and sends at most one message each. Returns the message, whether to notify the peer, and whether there
    /// may be more.
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

    /// Ignores the peer's broker after a protocol violation until it begins a new session.
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

    /// Returns whether the peer's broker is ignored until it begins a new session.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.session.is_broken()
    }

    /// Returns whether the peer's broker is there, keeps to the protocol and has listed its connections.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.unrecounted == Some(0) && !self.is_broken()
    }

    /// Returns whether the peer's broker understands Seek (B-23).
    #[must_use]
    pub fn finds(&self) -> bool {
        self.finds
    }

    /// Queues a message, which is sent when there is room. Returns false if too many are queued before it.
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

    /// Queues Connect.
    pub fn connect(&mut self, made: &Agreement, service: Name) -> bool {
        let (peer, (offset, len), channel) = (self.own.clone(), made.own, made.channel);
        self.queue_message(made.serial, Message::Connect { peer, service, offset, len, channel })
    }

    /// Queues Accept.
    pub fn accept(&mut self, made: &Agreement) -> bool {
        let (offset, len) = made.own;
        self.queue_message(made.serial, Message::Accept { offset, len })
    }

    /// Queues Refuse.
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
            // The domain that connects is the one that the host named as the peer; any other name here is a violation.
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
