// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S-4 to S-7. How two ends find out that they are the ends of one connection, and join.
//!
//! ```text
//! waiting end                         folder                        seeking end
//! claims the connection  ──────────▶  KEY.waiting: its service  ──▶ finds it, claims KEY.seeking
//!                                                              ◀──  link to the service (one for each two processes)
//!                                                              ◀──  Propose: who I am, what I counted
//! compares; makes a segment           Answer: who I am, hash   ──▶
//!                                                                   compares, checks the hash; makes a segment; joins
//! checks the hash; joins                                       ◀──  Confirm: hash
//! ```
//!
//! Every step happens inside a call of the program on this or another connection; none waits.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use tombolo_domain::{Deadline, Error, Link, Listener, SingleBell, Slot, aside};
use tombolo_layout::{
    Features, SegmentHeader, limits,
    sockets::{Claim, Message, Proof},
};
use tombolo_ring::Fresh;

use crate::{
    Reason,
    claim::{Claimed, Claims, NotClaimed},
    connection::{Connection, Stage},
    pipes::{Brought, Line, Own, Pipes},
    process::{Process, lock, random, random_id},
    proof,
    tuple::{Role, Tuple},
};

/// How long a link to another process may take to be made. Its listener's backlog is long, so this is never waited for.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long the links are left alone once a connection has made its first calls.
const PAUSE: Duration = Duration::from_millis(1);
/// A connection that nobody claimed by its this many'th call is asked about no more.
const CALLS: u64 = 1 << 20;

/// How far the talk about one connection is.
#[derive(Debug, Default)]
pub(crate) enum Talk {
    #[default]
    Silent,
    /// Claimed, and nobody came yet.
    Claimed {
        _claimed: Claimed,
    },
    /// Proposed over the link with this number.
    Proposed {
        claim: Claim,
        link: u64,
        _claimed: Claimed,
    },
    /// Answered.
    Answered(Box<Answered>),
    Done,
}

#[derive(Debug)]
pub(crate) struct Answered {
    proposal: Claim,
    own: Claim,
    proof: Proof,
    fresh: Own,
    _claimed: Claimed,
}

/// A link to another process.
#[derive(Debug)]
pub(crate) struct Neighbour {
    number: u64,
    /// The service, if this process dialled it.
    service: Option<String>,
    link: Box<dyn Link>,
    line: Option<Arc<Line>>,
}

/// All links of a process, and the connections that are talked about.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    claims: Option<Claims>,
    listener: Option<(String, Box<dyn Listener>)>,
    pub(crate) neighbours: Vec<Neighbour>,
    by_tuple: HashMap<Tuple, Weak<Connection>>,
    by_id: HashMap<u64, Weak<Connection>>,
    /// In a child made by fork: its parent's lines that its connections go over.
    pub(crate) inherited: Vec<Weak<Line>>,
}

impl Process {
    /// Gets on with finding the other end of `connection`. To be called with each call of the program on it, while it is
    /// a candidate. Never waits.
    pub fn advance(&self, connection: &Arc<Connection>) {
        let call = connection.call();
        if connection.stage() != Stage::Candidate || !connection.is_due(self.settings.after) {
            return;
        }
        // Less and less often: a peer that is not there costs next to nothing.
        let pace = if call <= 1024 { 8 } else { 64 };
        if call > 64 && call % pace != 0 {
            return;
        }
        let Ok(mut exchange) = self.exchange.try_lock() else { return };
        let Some((tuple, _)) = connection.identity(self.kernel()) else {
            connection.stay_plain(Reason::Usage);
            return;
        };
        connection.show(&self.roster, tuple);
        if !connection.is_alone() {
            wait_to_be_alone(connection, call);
            return;
        }
        if call > CALLS {
            self.stays(connection, Reason::NoPeer);
            return;
        }
        let said = exchange.advance(self, connection);
        // One look at the links is for all connections.
        if call <= 64 || self.has_not_heard_for(PAUSE) {
            exchange.hear(self);
        }
        drop(exchange);
        if let Err(reason) = said {
            self.stays(connection, reason);
            *lock(&connection.talk) = Talk::Done;
        }
    }

    /// The process ends: takes back its claims and its service, so that nothing is left behind.
    pub fn end(&self) {
        self.report();
        // Where it is in use, this thread may be what uses it: a signal's handler that exits.
        let Ok(exchange) = self.exchange.try_lock().map(|mut exchange| std::mem::take(&mut *exchange)) else { return };
        for connection in exchange.by_tuple.values().chain(exchange.by_id.values()).filter_map(Weak::upgrade) {
            if let Ok(mut talk) = connection.talk.try_lock() {
                *talk = Talk::Done;
            }
        }
    }

    fn describe(&self, connection: &Connection) -> Result<Claim, Reason> {
        let (tuple, id) = connection.identity(self.kernel()).ok_or(Reason::Usage)?;
        let fd = connection.fd();
        let sample = self.kernel().counts(fd, connection.dialled).ok_or(Reason::Usage)?;
        Ok(Claim {
            id,
            cookie: self.kernel().cookie(fd),
            addresses: [tuple.own, tuple.peer],
            known: connection.with_history(proof::History::known),
            counts: sample.counts,
            nonce: random(),
        })
    }
}

impl Exchange {
    fn claims(&mut self, process: &Process) -> Result<Claims, Reason> {
        if self.claims.is_none() {
            self.claims = Some(Claims::in_folder(&process.settings.folder).map_err(|_| Reason::Resources)?);
        }
        self.claims.clone().ok_or(Reason::Resources)
    }

    fn service(&mut self, process: &Process) -> Result<String, Reason> {
        if self.listener.is_none() {
            let service = format!("sockets-{:016x}", random_id());
            let listener = process.rendezvous.listen(&service).map_err(|_| Reason::Resources)?;
            self.listener = Some((service, listener));
        }
        self.listener.as_ref().map(|(service, _)| service.clone()).ok_or(Reason::Resources)
    }

    /// Takes back the claim of a connection that nobody came for.
    pub(crate) fn withdraw(&mut self, connection: &Connection, talk: &mut Talk) {
        if let Some(tuple) = connection.tuple() {
            self.by_tuple.remove(&tuple);
        }
        *talk = Talk::Silent;
    }

    fn advance(&mut self, process: &Process, connection: &Arc<Connection>) -> Result<(), Reason> {
        let (tuple, id) = connection.identity(process.kernel()).ok_or(Reason::Usage)?;
        let mut talk = lock(&connection.talk);
        match (&*talk, tuple.role()) {
            (_, None) => Err(Reason::Usage),
            (Talk::Silent, Some(Role::Waiting)) => {
                let claims = self.claims(process)?;
                let service = self.service(process)?;
                let claimed = self.claim(process, &claims, tuple, Role::Waiting, &service)?;
                remember(&mut self.by_tuple, tuple, connection);
                *talk = Talk::Claimed { _claimed: claimed };
                Ok(())
            }
            (Talk::Silent, Some(Role::Seeking)) => self.seek(process, connection, (tuple, id), &mut talk),
            _ => Ok(()),
        }
    }

    fn claim(
        &mut self,
        process: &Process,
        claims: &Claims,
        tuple: Tuple,
        role: Role,
        service: &str,
    ) -> Result<Claimed, Reason> {
        for _ in 0..2 {
            match claims.claim(tuple, role, service) {
                Ok(claimed) => return Ok(claimed),
                Err(NotClaimed::Io(_)) => return Err(Reason::Resources),
                Err(NotClaimed::Taken(by)) => {
                    let dead = !by.is_empty()
                        && matches!(
                            process.rendezvous.connect(&by, Deadline::after(PATIENCE)),
                            Err(Error::NotFound(_))
                        );
                    if !dead {
                        break;
                    }
                    claims.bury(tuple, role, &by);
                }
            }
        }
        claims.contest_it(tuple);
        Err(Reason::Ambiguous)
    }

    fn seek(
        &mut self,
        process: &Process,
        connection: &Arc<Connection>,
        (tuple, id): (Tuple, u64),
        talk: &mut Talk,
    ) -> Result<(), Reason> {
        let claims = self.claims(process)?;
        let Some(service) = claims.find(tuple) else { return Ok(()) };
        if claims.is_contested(tuple) {
            return Err(Reason::Ambiguous);
        }
        let own_service = self.service(process)?;
        let Some(index) = self.dial(process, &service)? else {
            // Its process died: the claim means nothing.
            claims.bury(tuple, Role::Waiting, &service);
            return Ok(());
        };
        let claimed = self.claim(process, &claims, tuple, Role::Seeking, &own_service)?;
        let claim = process.describe(connection)?;
        let neighbour = &mut self.neighbours[index];
        neighbour.link.send(&Message::Propose(claim).encode(), None).map_err(|_| Reason::PeerGone)?;
        remember(&mut self.by_id, id, connection);
        *talk = Talk::Proposed { claim, link: neighbour.number, _claimed: claimed };
        Ok(())
    }

    fn dial(&mut self, process: &Process, service: &str) -> Result<Option<usize>, Reason> {
        let known = |neighbour: &Neighbour| neighbour.service.as_deref() == Some(service) && !neighbour.is_gone();
        if let Some(index) = self.neighbours.iter().position(known) {
            return Ok(Some(index));
        }
        match process.rendezvous.connect(service, Deadline::after(PATIENCE)) {
            Ok(link) => {
                self.neighbours.push(Neighbour::new(Some(service.to_owned()), link));
                Ok(Some(self.neighbours.len() - 1))
            }
            Err(Error::NotFound(_)) => Ok(None),
            Err(Error::Denied(_)) => Err(Reason::NoPeer),
            Err(_) => Err(Reason::Resources),
        }
    }

    /// Takes what came over the links, and lets in who knocked.
    pub(crate) fn hear(&mut self, process: &Process) {
        if let Some((_, listener)) = &mut self.listener {
            while let Ok(Some(link)) = listener.accept() {
                self.neighbours.push(Neighbour::new(None, link));
            }
        }
        let mut neighbours = std::mem::take(&mut self.neighbours);
        neighbours.retain_mut(|neighbour| match self.hear_one(process, neighbour) {
            Ok(()) => true,
            Err(_) => {
                neighbour.lost();
                process.kick();
                false
            }
        });
        neighbours.append(&mut self.neighbours);
        self.neighbours = neighbours;
        self.inherited.retain(|line| {
            let gone = line.upgrade().is_none_or(|line| line.look());
            if gone {
                process.kick();
            }
            !gone
        });
    }

    fn hear_one(&mut self, process: &Process, neighbour: &mut Neighbour) -> Result<(), Error> {
        let max = limits::CONTROL_LEN + limits::CAPACITY_MAX;
        while let Some(received) = neighbour.link.recv(max)? {
            neighbour.meet(process)?;
            let Ok(message) = Message::decode(&received.message) else { return Err(Error::PeerGone) };
            let ringer = neighbour.link.take_ringer();
            let brought = received.segment.zip(ringer).map(|(segment, ringer)| Brought { segment, ringer });
            let answered = match message {
                Message::Propose(claim) => self.proposed(process, neighbour, claim),
                Message::Answer { to, claim, proof } => self.answered(process, neighbour, to, claim, &proof, brought),
                Message::Confirm { to, proof } => self.confirmed(process, neighbour, to, &proof, brought),
                Message::Refuse { to, reason } => {
                    self.refused(process, to, Reason::from_number(reason));
                    Ok(())
                }
            };
            if let Err((to, reason)) = answered {
                neighbour.link.send(&Message::Refuse { to, reason: reason as u16 }.encode(), None)?;
            }
        }
        Ok(())
    }

    /// The connection that a message names, if it is still there and a candidate.
    fn named(&self, id: u64) -> Option<Arc<Connection>> {
        self.by_id.get(&id)?.upgrade().filter(|connection| connection.stage() == Stage::Candidate)
    }

    fn forget(&mut self, connection: &Connection, id: u64) {
        self.by_id.remove(&id);
        if let Some(tuple) = connection.tuple() {
            self.by_tuple.remove(&tuple);
        }
    }

    fn proposed(&mut self, process: &Process, neighbour: &mut Neighbour, proposal: Claim) -> Result<(), (u64, Reason)> {
        let to = proposal.id;
        let tuple = Tuple { own: proposal.addresses[1], peer: proposal.addresses[0] };
        let found = self.by_tuple.get(&tuple).and_then(Weak::upgrade);
        let Some(connection) = found.filter(|connection| connection.stage() == Stage::Candidate) else {
            return Err((to, Reason::NoPeer));
        };
        let mut talk = lock(&connection.talk);
        let claimed = match std::mem::replace(&mut *talk, Talk::Done) {
            Talk::Claimed { _claimed } => _claimed,
            other => {
                *talk = other;
                return Err((to, Reason::Ambiguous));
            }
        };
        let answer = self.answer(process, neighbour, &connection, proposal, claimed);
        match answer {
            Ok(answered) => {
                *talk = Talk::Answered(answered);
                Ok(())
            }
            Err(reason) => {
                drop(talk);
                let id = connection.identity(process.kernel()).map_or(0, |(_, id)| id);
                self.forget(&connection, id);
                process.stays(&connection, reason);
                Err((to, reason))
            }
        }
    }

    fn answer(
        &mut self,
        process: &Process,
        neighbour: &mut Neighbour,
        connection: &Arc<Connection>,
        proposal: Claim,
        claimed: Claimed,
    ) -> Result<Box<Answered>, Reason> {
        let own = process.describe(connection)?;
        proof::compare(&own, &proposal)?;
        proof::counts_fit(&proposal, &own)?;
        if !process.settings.loopback && proof::same_namespace(&own, &proposal) {
            return Err(Reason::Loopback);
        }
        let claims = self.claims(process)?;
        if connection.tuple().is_none_or(|tuple| claims.is_contested(tuple)) {
            return Err(Reason::Ambiguous);
        }
        let proof = connection.with_history(|history| proof::answer(history, &proposal, &own));
        let message = Message::Answer { to: proposal.id, claim: own, proof };
        let fresh = neighbour.offer(process, connection, own.id, &message)?;
        remember(&mut self.by_id, own.id, connection);
        Ok(Box::new(Answered { proposal, own, proof, fresh, _claimed: claimed }))
    }

    fn answered(
        &mut self,
        process: &Process,
        neighbour: &mut Neighbour,
        to: u64,
        peer: Claim,
        proof: &Proof,
        brought: Option<Brought>,
    ) -> Result<(), (u64, Reason)> {
        let Some(connection) = self.named(to) else { return Err((peer.id, Reason::NoPeer)) };
        let mut talk = lock(&connection.talk);
        let (claim, claimed) = match std::mem::replace(&mut *talk, Talk::Done) {
            Talk::Proposed { claim, link, _claimed } if link == neighbour.number => (claim, _claimed),
            other => {
                *talk = other;
                return Err((peer.id, Reason::Ambiguous));
            }
        };
        drop(talk);
        let joined = (|| {
            let now = process.describe(&connection)?;
            proof::compare(&claim, &peer)?;
            proof::counts_fit(&claim, &peer)?;
            proof::counts_fit(&peer, &now)?;
            let own_proof = connection.with_history(|history| proof::confirm(history, &claim, &peer, proof))?;
            let brought = brought.ok_or(Reason::Corrupt)?;
            let fresh =
                neighbour.offer(process, &connection, claim.id, &Message::Confirm { to: peer.id, proof: own_proof })?;
            join(process, neighbour, &connection, fresh, brought)
        })();
        drop(claimed);
        self.forget(&connection, to);
        joined.map_err(|reason| {
            process.stays(&connection, reason);
            (peer.id, reason)
        })
    }

    fn confirmed(
        &mut self,
        process: &Process,
        neighbour: &mut Neighbour,
        to: u64,
        proof: &Proof,
        brought: Option<Brought>,
    ) -> Result<(), (u64, Reason)> {
        let Some(connection) = self.named(to) else { return Ok(()) };
        let mut talk = lock(&connection.talk);
        let answered = match std::mem::replace(&mut *talk, Talk::Done) {
            Talk::Answered(answered) => *answered,
            other => {
                *talk = other;
                return Ok(());
            }
        };
        drop(talk);
        self.forget(&connection, to);
        let Answered { proposal, own, proof: given, fresh, _claimed } = answered;
        let joined = connection
            .with_history(|history| proof::check(history, &proposal, &own, &given, proof))
            .and_then(|()| brought.ok_or(Reason::Corrupt))
            .and_then(|brought| join(process, neighbour, &connection, fresh, brought));
        joined.map_err(|reason| {
            process.stays(&connection, reason);
            (proposal.id, reason)
        })
    }

    fn refused(&mut self, process: &Process, to: u64, reason: Reason) {
        let Some(connection) = self.by_id.remove(&to).and_then(|connection| connection.upgrade()) else { return };
        self.forget(&connection, to);
        *lock(&connection.talk) = Talk::Done;
        process.leaves(&connection, reason);
    }
}

/// Puts a connection where it is found again. Many are closed before they have found each other: those that have gone make room
/// before there is made more.
fn remember<K: Eq + Hash>(all: &mut HashMap<K, Weak<Connection>>, key: K, connection: &Arc<Connection>) {
    if all.len() == all.capacity() {
        all.retain(|_, connection| connection.strong_count() > 0);
        all.reserve(all.len() + 1);
    }
    all.insert(key, Arc::downgrade(connection));
}

/// Another process has the socket too: whoever is left will have it to itself. One that was killed does not say so.
fn wait_to_be_alone(connection: &Connection, call: u64) {
    if call % 64 == 0
        && let Some(family) = connection.family()
    {
        family.bury();
    }
}

fn join(
    process: &Process,
    neighbour: &mut Neighbour,
    connection: &Connection,
    own: Own,
    peer: Brought,
) -> Result<(), Reason> {
    if !connection.is_alone() {
        return Err(Reason::Shared); // Another process would not know of the pipes.
    }
    let line = neighbour.line.clone().ok_or(Reason::PeerGone)?;
    let pipes = Pipes::new(own, peer, line).map_err(|_| Reason::Corrupt)?;
    connection.join(pipes);
    process.counters.joined.fetch_add(1, Ordering::Relaxed);
    process.log(connection, "joined: shared memory beside TCP");
    Ok(())
}

/// The smallest ring that a program can ask for by its buffer.
const LEAST_RING: u64 = 4096;

impl Neighbour {
    fn new(service: Option<String>, link: Box<dyn Link>) -> Self {
        Self { number: random_id(), service, link, line: None }
    }

    pub(crate) fn into_parts(self) -> (Option<Arc<Line>>, Box<dyn Link>) {
        (self.line, self.link)
    }

    fn is_gone(&self) -> bool {
        self.line.as_ref().is_some_and(|line| line.gone.load(Ordering::Relaxed))
    }

    /// The first message came: from now on there is a bell.
    fn meet(&mut self, process: &Process) -> Result<(), Error> {
        if self.line.is_some() {
            return Ok(());
        }
        let bell = self.link.doorbell().ok_or(Error::PeerGone)?;
        process.listen_to(bell.fd(Slot::Data)).map_err(|errno| Error::os("epoll_ctl", errno))?;
        self.line = Some(Arc::new(Line::new(bell)));
        Ok(())
    }

    /// Makes a segment and a bell, and sends both with `message`.
    fn offer(&mut self, process: &Process, connection: &Connection, id: u64, message: &Message) -> Result<Own, Reason> {
        // A program that wants little to be under way gets a small ring.
        let holds = process.kernel().holds(connection.fd());
        let most = process.settings.ring;
        let ring = holds.map_or(most, |bytes| bytes.next_power_of_two().max(LEAST_RING).min(most));
        let header = SegmentHeader::new(ring, 0, 0, Features::NONE, id);
        let lease = process.quota.take(header.segment_len).ok_or(Reason::Resources)?;
        // The segment has a descriptor until the peer has been sent one.
        aside::lifted(|| {
            let (segment, offer) = self.link.allocate(header.segment_len as usize).map_err(|_| Reason::Resources)?;
            let fresh = Fresh::new(segment, &header);
            let bell = SingleBell::new().map_err(|_| Reason::Resources)?;
            let sent = self.link.send_with_bell(&message.encode(), Some(&offer), &bell);
            self.link.retire(None, offer);
            sent.map_err(|_| Reason::PeerGone)?;
            Ok(Own { fresh, lease, bell: Arc::new(bell) })
        })
    }

    fn lost(&self) {
        if let Some(line) = &self.line {
            line.gone.store(true, Ordering::SeqCst);
        }
    }
}
