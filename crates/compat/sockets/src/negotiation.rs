// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How two ends find out that they are the ends of one connection, and join (S-4 to S-7).
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

mod dials;
mod leaving;
mod machines;
mod outbox;
mod peer_process;
mod returning;
mod rings;
mod session_memory;
mod sessions;
mod stage;
mod table;
mod way;

use std::{
    io,
    sync::{Arc, Weak},
    time::Duration,
};

use rustix::{event::PollFlags, io::Errno};
use tombolo_domain::{Error, Listener};
use tombolo_layout::sockets::{Claim, Message, Proof};
use tombolo_os::{lock::lock, poll::polls_as};

use crate::{
    Reason,
    claim::{self, Claimed, Claims, NotClaimed},
    connection::Connection,
    folder::{Folder, Refused},
    kernel::Kernel,
    pipes::{OwnResources, PeerResources, Pipes},
    ports::Ports,
    process::Process,
    proof,
    random::{random, random_id},
    spare::Spare,
    stage::Stage,
    tuple::{Role, Tuple},
};
use peer_process::PeerProcess;
use sessions::Dialled;
use stage::{Answered, Confirming, Waiting};
use table::remember;
use way::Way;

pub(crate) use peer_process::InheritedSession;
pub(crate) use rings::RingMemory;
pub(crate) use stage::NegotiationStage;
pub(crate) use table::Negotiations;

/// Calls in which an end waits to have read what its kernel received.
const TRIES: u32 = 1 << 12;
/// How long the links are left alone once a connection has looked for its peer in its first calls.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);
/// So often joined connections look whether they have to leave, where their memory may be taken away.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// So often a program all of whose connections are joined looks whether strangers have gone.
const FORGET_EVERY: Duration = Duration::from_millis(250);
/// A connection that nobody claimed in so many calls is asked about no more.
const CALLS: u64 = 1 << 20;

impl Process {
    /// Gets on with finding the other end of `connection`. Where that was found in another kernel, hears now and then
    /// whether the memory between the two is taken away. To be called with each call of the program on it, unless it
    /// stays on TCP. Never waits.
    pub fn advance(&self, connection: &Arc<Connection>) {
        if connection.stage() == Stage::Joined {
            // A program that never sleeps is told by nobody (S-19).
            if connection.pipes.are_revocable()
                && self.exchange.has_not_heard_for(LOOK_EVERY)
                && let Some(mut exchange) = self.exchange.try_lock_all()
            {
                exchange.receive_messages(self);
            }
            return;
        }
        if connection.stage() != Stage::Candidate
            || !self.credits.is_sought(self.kernel(), connection, self.settings.after)
        {
            return;
        }
        // Before the call is counted: one that comes too early for the pace is none in which the search got on.
        if !self.pace.has_time() {
            return;
        }
        let call = connection.search.count_call();
        if connection.search.is_before_next_try(call) || returning::is_paused(connection, call) {
            return;
        }
        self.pace.spend(|| {
            Spare::make_wanted(&connection.search.spare, self.rings.quota());
            // What it wants for the next step is made with nothing held, and then that step may follow.
            if self.advance_once(connection, call) && Spare::make_wanted(&connection.search.spare, self.rings.quota()) {
                self.advance_once(connection, call);
            }
        });
    }

    /// One step. Says whether there was one.
    fn advance_once(&self, connection: &Arc<Connection>, call: u64) -> bool {
        // By calls of its own, which no other waits for.
        let identity = connection.find_identity(self.kernel());
        // Where many begin at once, one may be stopped while it has this. The next call tries again, whichever that is.
        let Some(mut exchange) = self.exchange.try_lock_all() else {
            self.exchange.count_contended();
            return false;
        };
        // Less and less often: a peer that is not there costs next to nothing.
        let pause = match call {
            ..=64 => 1,
            65..=1024 => 8,
            _ => 64,
        };
        connection.search.try_next_at(call + pause);
        let Some((tuple, _)) = identity else {
            self.stays(connection, Reason::Usage);
            return false;
        };
        connection.row.show_once(|| self.connection_table.show(connection, tuple));
        if connection.identity.meeting().is_none() && !self.settings.ports.admit_connection(connection, tuple) {
            self.stays(connection, Reason::Port);
            return false;
        }
        if !connection.members.is_alone() {
            wait_to_be_alone(connection, call);
            return false;
        }
        if call > CALLS && !connection.returns.was_joined() {
            self.stays(connection, Reason::NoPeer);
            return false;
        }
        let said = exchange.advance(self, connection);
        // One look at the links is for all connections.
        if call <= 64 || self.exchange.has_not_heard_for(PAUSE) {
            exchange.receive_messages(self);
        }
        let finished = std::mem::take(&mut exchange.finished);
        self.pace.note_under_way(exchange.by_tuple.len() + exchange.by_id.len());
        drop(exchange);
        drop(finished);
        if let Err(reason) = said {
            self.stays(connection, reason);
            *lock(&connection.search.talk) = NegotiationStage::Done;
        }
        said.is_ok()
    }

    /// To be called before a sleep, when notifications from before are forgotten: looks at what came over the links, if
    /// there is a reason to.
    #[inline]
    pub fn before_sleep(&self) {
        if self.exchange.was_notified() {
            self.pace.spend(|| self.exchange.lock_all().receive_messages(self));
        } else if self.exchange.has_unproven()
            && self.exchange.has_not_heard_for(FORGET_EVERY)
            && let Some(mut exchange) = self.exchange.try_lock_all()
        {
            exchange.receive_messages(self);
        }
        self.rings.shrink_idle_rings(&self.exchange);
    }

    /// To be called where a wait ends. A program that always finds something ready never sleeps, and hears all the same
    /// what it was notified of: between Xen's domains nothing else is, before that was heard (X-24).
    #[inline]
    pub fn after_wait(&self) {
        if self.exchange.was_notified() {
            self.receive_or_leave();
        }
    }

    /// Takes what came over the links. Where somebody has the sessions, that one hears it, or whoever waits next.
    pub(crate) fn receive_or_leave(&self) {
        match self.exchange.try_lock_all() {
            Some(mut exchange) => self.pace.spend(|| exchange.receive_messages(self)),
            None => self.exchange.mark_notified(),
        }
    }

    /// There was nothing to read: where the peer has offered a ring, this end takes it.
    #[inline]
    pub(crate) fn follow_ring(&self, connection: &Connection) {
        if let Some(pipes) = connection.pipes.get().filter(|pipes| pipes.offered.is_expected()) {
            self.take_ring(connection, pipes);
        }
    }

    #[cold]
    fn take_ring(&self, connection: &Connection, pipes: &Pipes) {
        self.receive_or_leave();
        pipes.take_offered_ring(connection);
    }

    /// The process ends: takes back its claims and its service, so that nothing is left behind.
    pub fn end(&self) {
        self.journal.write_report();
        // Where it is in use, this thread may be what uses it: a signal's handler that exits.
        let Some(exchange) = self.exchange.try_lock_all().map(|mut exchange| std::mem::take(&mut *exchange)) else {
            return;
        };
        for connection in exchange.by_tuple.values().chain(exchange.by_id.values()).filter_map(Weak::upgrade) {
            if let Ok(mut talk) = connection.search.talk.try_lock() {
                *talk = NegotiationStage::Done;
            }
        }
    }
}

/// What this end says of `connection` in a claim, as its kernel counts now.
fn describe(kernel: &dyn Kernel, connection: &Connection) -> Result<Claim, Reason> {
    let (tuple, id) = connection.find_identity(kernel).ok_or(Reason::Usage)?;
    let meeting = connection.identity.meeting().unwrap_or(tuple);
    let fd = connection.descriptors.fd();
    let sample = kernel.counts(fd, connection.dialled).ok_or(Reason::Usage)?;
    connection.plain_calls.remember_unread(kernel, fd, connection.dialled, &sample);
    Ok(Claim {
        id,
        cookie: kernel.cookie(fd),
        addresses: [meeting.own, meeting.peer],
        known: connection.plain_calls.with_history(proof::History::known),
        counts: sample.counts,
        nonce: random(),
    })
}

/// The same, if this end can prove all of it (S-6). While a thread is in a call that sends some of the beginning, it
/// cannot: the peer may have what is not kept yet.
fn describe_provable(kernel: &dyn Kernel, connection: &Connection) -> Result<Option<Claim>, Reason> {
    // Before the kernel is asked: who begins a call after this sends what no sample has that was taken before.
    if connection.plain_calls.is_beginning_under_way() {
        return Ok(None);
    }
    let claim = describe(kernel, connection)?;
    Ok(proof::is_ready(&claim).then_some(claim))
}

/// The file system refuses something in the folder, or below `within` it.
fn fail_in_folder(process: &Process, within: &str, error: &io::Error) -> Reason {
    let file = process.settings.folder.join(within);
    process.journal.report_trouble(&format_args!("{}: {error}", file.display()));
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOSPC | Errno::DQUOT | Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Reason::Resources,
        None => Reason::Folder,
        Some(_) => Reason::Unreachable,
    }
}

impl Negotiations {
    /// The folder, checked when it is first needed (S-7).
    fn claims(&mut self, process: &Process) -> Result<Arc<Claims>, Reason> {
        // A program may change its user.
        let own = rustix::process::geteuid().as_raw();
        if let Some(claims) = self.claims.as_ref().filter(|claims| claims.own() == own) {
            return Ok(Arc::clone(claims));
        }
        let folder = Folder::check(&process.settings.folder, own).map_err(|refused| {
            process.journal.report_trouble(&refused);
            match refused {
                Refused::Io { .. } => Reason::Unreachable,
                _ => Reason::Folder,
            }
        })?;
        let claims = Claims::new(folder, own).map_err(|error| fail_in_folder(process, "claims", &error))?;
        Ok(Arc::clone(self.claims.insert(Arc::new(claims))))
    }

    /// For a new connection: the folder as it is now. It may have been replaced, or given to others, since the last
    /// one.
    fn claims_now(&mut self, process: &Process) -> Result<Arc<Claims>, Reason> {
        if self.claims.as_ref().is_some_and(|claims| !claims.are_as_they_were()) {
            self.claims = None;
        }
        let claims = self.claims(process)?;
        if process.switch.is_off_for(&claims) { Err(Reason::Off) } else { Ok(claims) }
    }

    fn service(&mut self, process: &Process, claims: &Claims) -> Result<String, Reason> {
        let is_local = process.rendezvous.scheme() == "local";
        // Somebody may have taken the file away, or the program ended the listening, which knew nothing of it.
        let is_over = |service: &str, listener: &dyn Listener| {
            is_local && (!claims.has_socket(service) || polls_as(listener.fd(), PollFlags::HUP))
        };
        if self.listener.as_ref().is_none_or(|(service, listener)| is_over(service, &**listener)) {
            let service = claim::service_name(random_id());
            // What the backend says may come of many causes: the file system tells more.
            let listener = process.rendezvous.listen(&service).map_err(|error| {
                claims.try_to_write().map_or_else(
                    |error| fail_in_folder(process, "", &error),
                    |()| {
                        process.journal.report_trouble(&error);
                        Reason::Resources
                    },
                )
            })?;
            claims.open_to_users(&service).map_err(|error| fail_in_folder(process, "", &error))?;
            self.listener = Some((service, listener));
        }
        self.listener.as_ref().map(|(service, _)| service.clone()).ok_or(Reason::Resources)
    }

    /// Takes back the claim of a connection that nobody came for.
    pub(crate) fn withdraw(&mut self, connection: &Connection, talk: &mut NegotiationStage) {
        if let Some(tuple) = connection.identity.meeting() {
            self.by_tuple.remove(&tuple);
        }
        if let NegotiationStage::Claimed(waiting) = std::mem::replace(talk, NegotiationStage::Silent)
            && let Some((proposal, link)) = waiting.proposal
            && let Some(peer_process) = self.peer_processes.iter_mut().find(|peer_process| peer_process.number == link)
        {
            let _ = peer_process.send_message(&Message::Refuse { to: proposal.id, reason: Reason::Shared as u16 });
        }
    }

    fn advance(&mut self, process: &Process, connection: &Arc<Connection>) -> Result<(), Reason> {
        let (tuple, id) = connection.find_identity(process.kernel()).ok_or(Reason::Usage)?;
        let peer = tuple.peer.host;
        let Some(way) = way::find_way(&mut self.machines, process, connection, tuple) else { return Ok(()) };
        let tuple = self.meeting(process, connection, tuple)?;
        let mut talk = lock(&connection.search.talk);
        match (&*talk, way.role(connection, tuple)) {
            (_, None) => Err(Reason::Usage),
            (NegotiationStage::Silent, Some(Role::Waiting)) if let Way::Broker(key) = way => {
                self.claims_now(process)?;
                let before = describe(process.kernel(), connection)?;
                let claimed = self.machines.claim(process.machines.as_deref(), key).ok_or(Reason::Unreachable)?;
                remember(&mut self.by_tuple, tuple, connection);
                *talk = NegotiationStage::Claimed(Box::new(Waiting { before, proposal: None, tries: 0, claimed }));
                Ok(())
            }
            (NegotiationStage::Silent, Some(Role::Waiting)) => {
                // What was looked at before is of another moment: this may be a second claim, after a fork.
                let claims = self.claims_now(process)?;
                let service = self.service(process, &claims)?;
                let before = describe(process.kernel(), connection)?;
                let claimed = self.claim(process, &claims, tuple, Role::Waiting, &service)?;
                remember(&mut self.by_tuple, tuple, connection);
                *talk = NegotiationStage::Claimed(Box::new(Waiting { before, proposal: None, tries: 0, claimed }));
                Ok(())
            }
            (NegotiationStage::Claimed(waiting), _) if waiting.proposal.is_some() => {
                self.get_on(process, connection, &mut talk)
            }
            (NegotiationStage::Confirming(_), _) => {
                let taken = std::mem::replace(&mut *talk, NegotiationStage::Done);
                drop(talk);
                let NegotiationStage::Confirming(confirming) = taken else { return Ok(()) };
                self.confirm_again(process, connection, (id, *confirming))
            }
            (NegotiationStage::Silent, Some(Role::Seeking)) => match way {
                Way::Folder => self.seek(process, connection, (tuple, id), &mut talk),
                Way::Broker(key) => way::seek_by_broker(self, process, connection, (key, peer), id, &mut talk),
            },
            // A try has failed, and there is another (S-22).
            (NegotiationStage::Done, _) if connection.returns.was_joined() => {
                self.forget(connection, id);
                *talk = NegotiationStage::Silent;
                Ok(())
            }
            // The broker has heard of its peer's machine since.
            (NegotiationStage::Claimed(waiting), _) if way != Way::Folder && !waiting.claimed.is_at_broker() => {
                self.withdraw(connection, &mut talk);
                // What was made for a peer on this kernel cannot go to another.
                *lock(&connection.search.spare) = Spare::None;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Under which addresses both ends know this connection: its own, or where those may be translated, ones made of
    /// its sequence numbers (S-7).
    fn meeting(&mut self, process: &Process, connection: &Connection, tuple: Tuple) -> Result<Tuple, Reason> {
        if let Some(known) = connection.identity.meeting() {
            return Ok(known);
        }
        let translated = self.claims_now(process)?.folder.translated;
        let numbers =
            || process.kernel().sequences(connection.descriptors.fd(), connection.dialled).filter(|_| translated);
        Ok(connection.identity.decide_meeting(|| numbers().map_or(tuple, Tuple::of_sequences)))
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
                Err(NotClaimed::Io(error)) => {
                    self.claims = None;
                    return Err(fail_in_folder(process, "claims", &error));
                }
                Err(NotClaimed::Taken(by)) => {
                    // Elsewhere to ask takes time, and the claim of one that died stays.
                    let is_dead = |by: &String| {
                        process.rendezvous.scheme() == "local"
                            && matches!(process.rendezvous.begin_connect(by), Err(Error::NotFound(_)))
                    };
                    let Some(by) = by.filter(is_dead) else { break };
                    claims.remove_dead_claim(tuple, role, &by);
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
        talk: &mut NegotiationStage,
    ) -> Result<(), Reason> {
        let claims = self.claims(process)?;
        let Some(service) = claims.find(tuple) else { return Ok(()) };
        if process.switch.is_off_for(&claims) {
            return Err(Reason::Off);
        }
        if claims.is_contested(tuple) {
            return Err(Reason::Ambiguous);
        }
        // Before the link says anything; and who waits there must not be asked for less than all that it has a right
        // to.
        let Some(claim) = describe_provable(process.kernel(), connection)? else { return Ok(()) };
        let own_service = self.service(process, &claims)?;
        let index = match self.dial(&*process.rendezvous, &claims, &service)? {
            Dialled::Is(index) => index,
            Dialled::Later => return Ok(()),
            Dialled::Dead => {
                claims.remove_dead_claim(tuple, Role::Waiting, &service);
                return Ok(());
            }
        };
        if !self.peer_processes[index].outbox.has_room() {
            return Ok(());
        }
        let claimed = self.claim(process, &claims, tuple, Role::Seeking, &own_service)?;
        let peer_process = &mut self.peer_processes[index];
        if !peer_process.propose(connection, claim)? {
            return Ok(());
        }
        remember(&mut self.by_id, id, connection);
        *talk = NegotiationStage::Proposed { claim, link: peer_process.number, _claimed: claimed };
        Ok(())
    }

    fn handle_proposal(
        &mut self,
        process: &Process,
        peer_process: &mut PeerProcess,
        proposal: Claim,
    ) -> Result<(), (u64, Reason)> {
        let to = proposal.id;
        let tuple = Tuple { own: proposal.addresses[1], peer: proposal.addresses[0] };
        let found = self.by_tuple.get(&tuple).and_then(Weak::upgrade);
        let Some(connection) = found.filter(|connection| connection.stage() == Stage::Candidate) else {
            return Err((to, Reason::NoPeer));
        };
        let mut talk = lock(&connection.search.talk);
        match &mut *talk {
            // One that was made before this end came back found an earlier claim of its (S-22).
            NegotiationStage::Claimed(waiting)
                if connection.returns.was_joined() && proof::counts_fit(&waiting.before, &proposal).is_err() =>
            {
                return Err((to, Reason::NoPeer));
            }
            NegotiationStage::Claimed(waiting) if waiting.proposal.is_none() => {
                waiting.proposal = Some((proposal, peer_process.number));
            }
            _ => return Err((to, Reason::Ambiguous)),
        }
        self.answer_when_ready(process, peer_process, &connection, &mut talk).map_err(|reason| {
            drop(talk);
            let id = connection.find_identity(process.kernel()).map_or(0, |(_, id)| id);
            self.forget(&connection, id);
            process.stays(&connection, reason);
            (to, reason)
        })
    }

    /// A call on a connection that was proposed for, and not answered.
    fn get_on(
        &mut self,
        process: &Process,
        connection: &Arc<Connection>,
        talk: &mut NegotiationStage,
    ) -> Result<(), Reason> {
        let NegotiationStage::Claimed(waiting) = &*talk else { return Ok(()) };
        let Some((proposal, link)) = waiting.proposal else { return Ok(()) };
        let found = self.peer_processes.iter().position(|peer_process| peer_process.number == link);
        let mut peer_process = self.peer_processes.swap_remove(found.ok_or(Reason::PeerGone)?);
        let done = self.answer_when_ready(process, &mut peer_process, connection, talk);
        if let Err(reason) = done {
            let _ = peer_process.send_message(&Message::Refuse { to: proposal.id, reason: reason as u16 });
        }
        self.peer_processes.push(peer_process);
        done
    }

    /// Answers what was proposed, once this end has read what its kernel received (S-6).
    fn answer_when_ready(
        &mut self,
        process: &Process,
        peer_process: &mut PeerProcess,
        connection: &Arc<Connection>,
        talk: &mut NegotiationStage,
    ) -> Result<(), Reason> {
        // Where many are proposed at once, each is answered in a later call on it.
        if !peer_process.outbox.is_open() || !process.pace.has_time() {
            return Ok(());
        }
        let NegotiationStage::Claimed(waiting) = &mut *talk else { return Ok(()) };
        let Some(own) = describe_provable(process.kernel(), connection)? else {
            // A send may last for long.
            waiting.tries += u32::from(!connection.plain_calls.is_beginning_under_way());
            return if waiting.tries < TRIES { Ok(()) } else { Err(Reason::TooLittle) };
        };
        // Said before anything else is, it leaves the connection to another session (S-18, S-19).
        let refused = match peer_process.is_leaving() {
            true => Some(Reason::TakenAway),
            false => (!peer_process.reserve(process, connection)?).then_some(Reason::Resources),
        };
        if let Some(reason) = refused {
            if let NegotiationStage::Claimed(waiting) = talk
                && let Some((proposal, _)) = waiting.proposal.take()
            {
                let refusal = Message::Refuse { to: proposal.id, reason: reason as u16 };
                // Where the session has ended nobody needs to be told.
                let _ = peer_process.send_message(&refusal);
                peer_process.return_spare(connection);
            }
            return Ok(());
        }
        let NegotiationStage::Claimed(waiting) = std::mem::replace(talk, NegotiationStage::Done) else { return Ok(()) };
        *talk = self.answer(process, peer_process, connection, own, *waiting)?;
        Ok(())
    }

    /// Answers, unless there is no room for that now.
    fn answer(
        &mut self,
        process: &Process,
        peer_process: &mut PeerProcess,
        connection: &Arc<Connection>,
        own: Claim,
        waiting: Waiting,
    ) -> Result<NegotiationStage, Reason> {
        let Waiting { before, proposal: Some((proposal, link)), .. } = waiting else { return Err(Reason::NoPeer) };
        let claims = self.claims(process)?;
        if process.switch.is_off_for(&claims) {
            return Err(Reason::Off);
        }
        let secret = peer_process.find_secret(process.kernel(), connection, &claims)?;
        proof::compare(&own, &proposal, peer_process.may_be_local(secret))?;
        proof::counts_fit(&before, &proposal)?;
        proof::counts_fit(&proposal, &own)?;
        // A cookie counts within one kernel alone.
        let one_namespace = peer_process.link.same_kernel() && proof::same_namespace(&own, &proposal);
        if !process.settings.loopback && one_namespace {
            return Err(Reason::Loopback);
        }
        if connection.identity.meeting().is_none_or(|tuple| claims.is_contested(tuple)) {
            return Err(Reason::Ambiguous);
        }
        let proof =
            connection.plain_calls.with_history(|history| proof::answer(history, secret, &proposal, &own, &before))?;
        let message = Message::Answer { to: proposal.id, claim: own, proof };
        let fresh = match peer_process.offer(process, connection, own.id, &message) {
            // The session has ended before anything was shown: who lets go of it takes the proposal back.
            Ok(None) | Err(Reason::PeerGone) => return Ok(NegotiationStage::Claimed(Box::new(waiting))),
            Ok(Some(fresh)) => fresh,
            Err(reason) => return Err(reason),
        };
        remember(&mut self.by_id, own.id, connection);
        let _claimed = waiting.claimed;
        Ok(NegotiationStage::Answered(Box::new(Answered { proposal, own, proof, link, fresh, _claimed })))
    }

    fn handle_answer(
        &mut self,
        process: &Process,
        peer_process: &mut PeerProcess,
        to: u64,
        peer: Claim,
        proof: &Proof,
        brought: Option<PeerResources>,
    ) -> Result<(), (u64, Reason)> {
        let Some(connection) = self.named(to) else { return Err((peer.id, Reason::NoPeer)) };
        let mut talk = lock(&connection.search.talk);
        let (claim, claimed) = match std::mem::replace(&mut *talk, NegotiationStage::Done) {
            NegotiationStage::Proposed { claim, link, _claimed } if link == peer_process.number => (claim, _claimed),
            other => {
                *talk = other;
                return Err((peer.id, Reason::Ambiguous));
            }
        };
        drop(talk);
        let confirming = (|| {
            let now = describe(process.kernel(), &connection)?;
            let claims = self.claims(process)?;
            let secret = peer_process.find_secret(process.kernel(), &connection, &claims)?;
            proof::compare(&claim, &peer, peer_process.may_be_local(secret))?;
            proof::counts_fit(&claim, &peer)?;
            proof::counts_fit(&peer, &now)?;
            let proof =
                connection.plain_calls.with_history(|history| proof::confirm(history, secret, &claim, &peer, proof))?;
            let brought = brought.ok_or(Reason::Corrupt)?;
            Ok(Confirming { peer: peer.id, proof, brought, link: peer_process.number, _claimed: claimed })
        })();
        confirming.and_then(|it| self.confirm(process, peer_process, &connection, (to, it))).map_err(|reason| {
            self.forget(&connection, to);
            process.stays(&connection, reason);
            (peer.id, reason)
        })
    }

    /// Confirms and joins, or leaves both to a later call.
    fn confirm(
        &mut self,
        process: &Process,
        peer_process: &mut PeerProcess,
        connection: &Arc<Connection>,
        (own, confirming): (u64, Confirming),
    ) -> Result<(), Reason> {
        let message = Message::Confirm { to: confirming.peer, proof: confirming.proof };
        let Some(fresh) = peer_process.offer(process, connection, own, &message)? else {
            *lock(&connection.search.talk) = NegotiationStage::Confirming(Box::new(confirming));
            return Ok(());
        };
        self.finished.push(confirming._claimed);
        join(process, peer_process, connection, fresh, (confirming.peer, confirming.brought))?;
        self.forget(connection, own);
        Ok(())
    }

    /// A call on a connection whose other end was not told yet that its answer is right.
    fn confirm_again(
        &mut self,
        process: &Process,
        connection: &Arc<Connection>,
        (own, confirming): (u64, Confirming),
    ) -> Result<(), Reason> {
        let (to, link) = (confirming.peer, confirming.link);
        let found = self.peer_processes.iter().position(|peer_process| peer_process.number == link);
        let mut peer_process = self.peer_processes.swap_remove(found.ok_or(Reason::PeerGone)?);
        let done = self.confirm(process, &mut peer_process, connection, (own, confirming));
        if let Err(reason) = done {
            let _ = peer_process.send_message(&Message::Refuse { to, reason: reason as u16 });
            self.forget(connection, own);
        }
        self.peer_processes.push(peer_process);
        done
    }

    fn handle_confirmation(
        &mut self,
        process: &Process,
        peer_process: &mut PeerProcess,
        to: u64,
        proof: &Proof,
        brought: Option<PeerResources>,
    ) -> Result<(), (u64, Reason)> {
        let Some(connection) = self.named(to) else { return Ok(()) };
        let mut talk = lock(&connection.search.talk);
        let answered = match std::mem::replace(&mut *talk, NegotiationStage::Done) {
            NegotiationStage::Answered(answered) if answered.link == peer_process.number => *answered,
            other => {
                *talk = other;
                return Ok(());
            }
        };
        drop(talk);
        self.forget(&connection, to);
        let Answered { proposal, own, proof: given, fresh, _claimed, .. } = answered;
        self.finished.push(_claimed);
        let joined = self
            .claims(process)
            .and_then(|claims| peer_process.find_secret(process.kernel(), &connection, &claims))
            .and_then(|secret| {
                connection
                    .plain_calls
                    .with_history(|history| proof::check(history, secret, [&proposal, &own], &given, proof))
            })
            .and_then(|()| brought.ok_or(Reason::Corrupt))
            .and_then(|brought| join(process, peer_process, &connection, fresh, (proposal.id, brought)));
        joined.map_err(|reason| {
            process.stays(&connection, reason);
            (proposal.id, reason)
        })
    }

    fn handle_refusal(&mut self, process: &Process, peer_process: &mut PeerProcess, to: u64, reason: Reason) {
        let Some(connection) = self.by_id.remove(&to).and_then(|connection| connection.upgrade()) else { return };
        let mut talk = lock(&connection.search.talk);
        // What has no room over this session, or comes too late for it, may be joined over another (S-18, S-19).
        let is_proposed = matches!(&*talk, NegotiationStage::Proposed { link, .. } if *link == peer_process.number);
        let may_be_elsewhere = match reason {
            _ if peer_process.link.same_kernel() || !is_proposed => false,
            Reason::Resources => {
                peer_process.memory.mark_full(&connection);
                true
            }
            Reason::TakenAway => {
                peer_process.is_closed = true;
                connection.search.may_propose_again()
            }
            _ => false,
        };
        if may_be_elsewhere {
            *talk = NegotiationStage::Silent;
            peer_process.return_spare(&connection);
            return;
        }
        *talk = NegotiationStage::Done;
        drop(talk);
        self.forget(&connection, to);
        process.leaves(&connection, reason);
    }
}

impl Ports {
    pub(crate) fn admit_connection(&self, connection: &Connection, tuple: Tuple) -> bool {
        self.admit(tuple.service_port(connection.dialled))
    }
}

/// Another process has the socket too: whoever is left will have it to itself. One that was killed does not say so.
fn wait_to_be_alone(connection: &Connection, call: u64) {
    // After 64 calls it is tried seldom anyway.
    if call >= 64
        && let Some(group) = connection.members.group()
    {
        group.remove_dead();
    }
}

fn join(
    process: &Process,
    peer_process: &mut PeerProcess,
    connection: &Arc<Connection>,
    own: OwnResources,
    (number, peer): (u64, PeerResources),
) -> Result<(), Reason> {
    if !connection.members.is_alone() {
        return Err(Reason::Shared); // Another process would not know of the pipes.
    }
    let session = peer_process.session.clone().ok_or(Reason::PeerGone)?;
    let pipes = Pipes::new(own, peer, number, session).map_err(|_| Reason::Corrupt)?;
    let _ = connection.own.set(Arc::downgrade(connection));
    connection.join(pipes);
    peer_process.add_joined(connection);
    peer_process.proven = true;
    let again = connection.returns.was_joined();
    process.journal.count_joined(again);
    let joined = if again { "joined again" } else { "joined" };
    match peer_process.link.same_kernel() {
        true => process.log(connection, &format!("{joined}: shared memory beside TCP")),
        false => {
            let domain = peer_process.link.peer().domain;
            process.log(connection, &format!("{joined}: shared memory with the machine {domain} beside TCP"));
        }
    }
    Ok(())
}
