// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A link to another process, and what is known of that.

use std::sync::{Arc, Weak};

use tombolo_domain::{Endpoint, Error};
use tombolo_layout::{
    limits,
    sockets::{Claim, Message},
};
use tombolo_os::addresses::shares_namespace;

use super::{outbox::Outbox, session_memory::SessionMemory};
use crate::{
    Reason,
    claim::Claims,
    connection::Connection,
    kernel::Kernel,
    proof::Secret,
    random::random_id,
    session::{Inherited, Session, SessionPath, path_of},
};

/// A link to another process.
#[derive(Debug)]
pub(crate) struct PeerProcess {
    pub(super) number: u64,
    /// The service, if this process dialled it.
    pub(super) service: Option<String>,
    pub(super) link: Box<dyn Endpoint>,
    pub(super) outbox: Outbox,
    pub(super) session: Option<Arc<Session>>,
    /// What of the link is watched for its end.
    pub(super) path: Option<Arc<SessionPath>>,
    /// A connection was joined over it.
    pub(super) proven: bool,
    /// Messages that led to nothing.
    pub(super) useless: u32,
    /// Segments that nobody wanted, since one was wanted.
    pub(super) unwanted: u32,
    /// Nothing more is to be talked about over it: its peer says that its memory will be taken away, or nothing can be sent.
    pub(super) is_closed: bool,
    /// It has ended, and is kept for its memory alone.
    pub(super) over: bool,
    /// What was joined over it.
    pub(super) joined: Vec<Weak<Connection>>,
    /// What its connections share, where they do (S-18).
    pub(super) memory: SessionMemory,
    /// Whether its process is in this one's network namespace, by this kernel's word; once it was asked.
    pub(super) near: Option<bool>,
}

/// In a child made by fork: a session of its parent's, and the connections that go over it.
#[derive(Debug)]
pub(crate) struct InheritedSession {
    pub session: Weak<Session>,
    pub joined: Vec<Weak<Connection>>,
}

impl PeerProcess {
    pub(super) fn new(service: Option<String>, link: Box<dyn Endpoint>) -> Self {
        let (number, outbox, memory) =
            (random_id(), Outbox::default(), SessionMemory::new(link.affordable(usize::MAX) as u64));
        Self {
            number,
            service,
            link,
            outbox,
            session: None,
            path: None,
            proven: false,
            useless: 0,
            unwanted: 0,
            memory,
            near: None,
            is_closed: false,
            over: false,
            joined: Vec::new(),
        }
    }

    /// Sends a message that brings nothing, now or later.
    pub(super) fn send_message(&mut self, message: &Message) -> Result<(), Error> {
        self.outbox.send(&mut *self.link, message)
    }

    /// Sends what waits, as far as there is room.
    pub(super) fn send_waiting(&mut self) -> Result<(), Error> {
        self.outbox.send_waiting(&mut *self.link)
    }

    /// Proposes `connection`. Says whether it did: where the session has ended, another may be tried (S-6).
    pub(super) fn propose(&mut self, connection: &Connection, claim: Claim) -> Result<bool, Reason> {
        if self.send_message(&Message::Propose(claim)).is_ok() {
            return Ok(true);
        }
        self.is_closed = true;
        self.return_spare(connection);
        if connection.search.may_propose_again() { Ok(false) } else { Err(Reason::PeerGone) }
    }

    /// Whether addresses that each namespace has may be those of a connection with it: where numbers prove that, or the kernel says
    /// so, and never in another kernel. S-5
    pub(super) fn may_be_local(&mut self, secret: Secret) -> bool {
        self.link.same_kernel() && (secret.is_some() || self.is_near())
    }

    /// Whether its process is in this one's network namespace, by what this kernel says of it. S-5
    pub(super) fn is_near(&mut self) -> bool {
        *self.near.get_or_insert_with(|| {
            let pid = self.link.peer().pid.filter(|_| self.link.same_kernel());
            pid.is_some_and(shares_namespace)
        })
    }

    /// What only the ends of `connection` have, as far as this kernel tells it (S-6).
    pub(super) fn find_secret(
        &self,
        kernel: &dyn Kernel,
        connection: &Connection,
        claims: &Claims,
    ) -> Result<Secret, Reason> {
        let secret = kernel.sequences(connection.descriptors.fd(), connection.dialled);
        // What passed can be guessed; only within one kernel does its word about the peer make up for that.
        let needed = claims.folder.sequences_required || !self.link.same_kernel();
        if secret.is_none() && needed { Err(Reason::Sequences) } else { Ok(secret) }
    }

    pub(crate) fn into_parts(self) -> (Option<Arc<Session>>, Option<Inherited>, Vec<Weak<Connection>>) {
        let link = self.link;
        (self.session, self.path.map(|path| Inherited { link, _path: path }), self.joined)
    }

    /// Whether it came by itself, and nobody has proved anything over it.
    pub(super) fn is_unproven(&self) -> bool {
        self.service.is_none() && !self.proven
    }

    /// Whether connections may be talked about over it.
    pub(super) fn is_open(&self) -> bool {
        !self.is_closed && self.session.as_ref().is_none_or(|session| !session.is_gone() && !session.is_leaving())
    }

    /// Whether its memory will be taken away: nothing more is joined over it (S-19).
    pub(super) fn is_leaving(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.is_leaving())
    }

    /// Whether another connection may share its memory (S-18).
    pub(super) fn may_be_shared(&self) -> bool {
        self.memory.may_be_shared(self.link.affordable(usize::MAX) as u64)
    }

    /// The largest ring that there is room for now, where memory is shared beside first rings of connections that may come (S-20).
    pub(super) fn room_for_ring(&self) -> u64 {
        let kept = if self.link.same_kernel() { 0 } else { self.memory.kept_for_sharers() };
        let room = (self.link.affordable(usize::MAX) as u64).saturating_sub(kept).saturating_sub(limits::CONTROL_LEN);
        room.checked_ilog2().map_or(0, |bits| 1 << bits)
    }

    /// The first message came: from now on connections may go over it.
    pub(super) fn begin_session(&mut self) -> Result<(), Error> {
        if self.session.is_some() {
            return Ok(());
        }
        let path = path_of(&*self.link).map_err(|errno| Error::os("fcntl", errno))?;
        self.session = Some(Arc::new(Session::new(&path, self.link.is_inherited())));
        self.path = Some(path);
        Ok(())
    }

    /// A connection was joined over it.
    pub(super) fn add_joined(&mut self, connection: &Arc<Connection>) {
        if self.joined.len() == self.joined.capacity() {
            self.joined.retain(|connection| connection.strong_count() > 0);
        }
        self.joined.push(Arc::downgrade(connection));
    }

    pub(super) fn end_session(&self) {
        if let Some(session) = &self.session {
            session.end();
        }
    }
}
