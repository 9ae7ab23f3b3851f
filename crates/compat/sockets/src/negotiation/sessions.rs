// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Links to other processes: whom this one calls and lets in, how much of what they say it hears, and what it sends (S-4, S-7).

use std::sync::{Arc, Weak};

use tombolo_domain::{Endpoint, Error, Rendezvous, aside};
use tombolo_layout::{
    Features, SegmentHeader, limits,
    sockets::{Message, RING_MAX},
};
use tombolo_os::lock::lock;
use tombolo_ring::Fresh;

use super::{peer_process::PeerProcess, stage::NegotiationStage, table::Negotiations};
use crate::{
    Reason,
    claim::Claims,
    connection::Connection,
    pipes::{OwnResources, PeerResources},
    process::Process,
    spare::{Resources, Spare},
    stage::Stage,
};

/// Who callers, and messages of one link, that are heard at once: a program's call is not for strangers to make long.
const CALLERS: usize = 64;
const MESSAGES: usize = 64;
/// Links at most, and of these ones that came and over which nothing was joined yet: each takes seven descriptors.
const PEER_PROCESSES: usize = 1024;
const UNPROVEN: usize = 256;
/// Messages that led to nothing, over a link to which nothing else was ever owed: it ends.
const USELESS: u32 = 256;
/// Sessions with one process at most, where each has memory of its own; and how many connections share that of one that is full
/// before there is another: a peer that only says it is full gets few.
const SESSIONS: usize = 64;
const LEAST_SHARERS: usize = 8;
/// Segments that nobody wanted, with none between them that was: after more than these a link ends.
const UNWANTED: u32 = 512;

/// Whether a service could be called.
pub(super) enum Dialled {
    /// The peer process at this index offers the service.
    Is(usize),
    /// Not now.
    Later,
    /// Its process died: a claim that names it means nothing.
    Dead,
}

impl Negotiations {
    pub(super) fn dial(
        &mut self,
        rendezvous: &dyn Rendezvous,
        claims: &Claims,
        service: &str,
    ) -> Result<Dialled, Reason> {
        let known =
            |peer_process: &PeerProcess| peer_process.service.as_deref() == Some(service) && peer_process.is_open();
        if let Some(index) =
            self.peer_processes.iter().position(|peer_process| known(peer_process) && !peer_process.memory.is_full())
        {
            return Ok(Dialled::Is(index));
        }
        let mut full = self.peer_processes.iter().filter(|peer_process| known(peer_process));
        let may_have_another = full.clone().count() < SESSIONS && full.all(|it| it.memory.sharers() >= LEAST_SHARERS);
        if self.peer_processes.len() >= PEER_PROCESSES || !may_have_another {
            return Err(Reason::Resources);
        }
        if rendezvous.scheme() == "local" && !claims.has_socket(service) {
            return Ok(Dialled::Dead);
        }
        match self.dials.try_dial(rendezvous, service) {
            Ok(None) | Err(Error::TimedOut) => Ok(Dialled::Later),
            Ok(Some(link)) if !may_be_peer(claims, &*link) => Err(Reason::User),
            Ok(Some(link)) => {
                self.peer_processes.push(PeerProcess::new(Some(service.to_owned()), link));
                Ok(Dialled::Is(self.peer_processes.len() - 1))
            }
            Err(Error::NotFound(_)) => Ok(Dialled::Dead),
            Err(Error::Denied(_)) => Err(Reason::NoPeer),
            Err(_) => Err(Reason::Resources),
        }
    }

    /// Lets in who knocked, if it is a user's of the folder. One that nothing came of yet makes room for those that come.
    fn let_in(&mut self, process: &Process, link: Box<dyn Endpoint>) {
        if !self.claims(process).is_ok_and(|claims| may_be_peer(&claims, &*link)) {
            return;
        }
        if self.peer_processes.iter().filter(|peer_process| peer_process.is_unproven()).count() >= UNPROVEN
            && let Some(oldest) = self.peer_processes.iter().position(PeerProcess::is_unproven)
        {
            let oldest = self.peer_processes.remove(oldest);
            oldest.end_session();
            self.abandon(process, &oldest);
        }
        if self.peer_processes.len() < PEER_PROCESSES {
            self.peer_processes.push(PeerProcess::new(None, link));
        }
    }

    /// Takes what came over the links, and lets in who knocked.
    pub(crate) fn receive_messages(&mut self, process: &Process) {
        for _ in 0..CALLERS {
            let Some((_, listener)) = &mut self.listener else { break };
            let Ok(Some(link)) = listener.accept() else { break };
            self.let_in(process, link);
        }
        for _ in 0..CALLERS {
            let Some(link) = self.machines.accept_peer() else { break };
            self.let_in(process, link);
        }
        let mut peer_processes = std::mem::take(&mut self.peer_processes);
        peer_processes.retain_mut(|peer_process| {
            if peer_process.over {
                peer_process.lose_memory(process);
            } else if self.receive_from(process, peer_process).is_ok() {
                return true;
            } else {
                peer_process.lose_memory(process);
                peer_process.end_session();
                self.abandon(process, peer_process);
            }
            !peer_process.has_left_memory(process)
        });
        peer_processes.append(&mut self.peer_processes);
        self.peer_processes = peer_processes;
        process.exchange.note_unproven(self.peer_processes.iter().any(PeerProcess::is_unproven));
        self.inherited.retain_mut(|inherited| inherited.hear_news(process));
    }

    /// What was talked about over a link that is lost. What this end showed nothing of is looked for again; the rest stays on TCP (S-6).
    fn abandon(&mut self, process: &Process, lost: &PeerProcess) {
        let met = |connection: &Arc<Connection>| {
            connection.stage() == Stage::Candidate
                && match &*lock(&connection.search.talk) {
                    NegotiationStage::Claimed(waiting) => {
                        waiting.proposal.as_ref().is_some_and(|(_, number)| *number == lost.number)
                    }
                    NegotiationStage::Proposed { link, .. } => *link == lost.number,
                    NegotiationStage::Answered(answered) => answered.link == lost.number,
                    NegotiationStage::Confirming(confirming) => confirming.link == lost.number,
                    NegotiationStage::Silent | NegotiationStage::Done => false,
                }
        };
        let all = self.by_id.values().chain(self.by_tuple.values()).filter_map(Weak::upgrade);
        let all: Vec<_> = all.filter(met).collect();
        for connection in all {
            let id = connection.find_identity(process.kernel()).map_or(0, |(_, id)| id);
            let mut talk = lock(&connection.search.talk);
            match &mut *talk {
                NegotiationStage::Claimed(waiting) => {
                    (waiting.proposal, waiting.tries) = (None, 0);
                    lost.return_spare(&connection);
                }
                NegotiationStage::Proposed { .. } if connection.search.may_propose_again() => {
                    *talk = NegotiationStage::Silent;
                    self.by_id.remove(&id);
                    lost.return_spare(&connection);
                }
                _ => {
                    *talk = NegotiationStage::Done;
                    drop(talk);
                    self.forget(&connection, id);
                    process.stays(&connection, Reason::PeerGone);
                }
            }
        }
    }

    fn receive_from(&mut self, process: &Process, peer_process: &mut PeerProcess) -> Result<(), Error> {
        let max = limits::CONTROL_LEN + process.settings.ring.max(RING_MAX);
        // Of a peer that is gone what it said last is heard first.
        let _ = peer_process.send_waiting();
        let mut mapped = 0;
        for heard in 0.. {
            // To map much takes long.
            if heard == MESSAGES || mapped >= RING_MAX {
                // The rest in a later call, and soon.
                process.exchange.mark_notified();
                break;
            }
            let Some(received) = peer_process.link.recv(max)? else { break };
            peer_process.begin_session()?;
            let Ok(message) = Message::decode(&received.message) else { return Err(Error::PeerGone) };
            let is_proposal = matches!(message, Message::Propose(_));
            let mut notifier = peer_process.link.take_notifier();
            let segment = received.segment;
            mapped += segment.as_ref().map_or(0, |segment| segment.len() as u64);
            let brings = segment.is_some();
            let mut wanted = brings;
            let (may_bring, may_ring) = message.carries();
            if segment.is_some() && !may_bring || notifier.is_some() && !may_ring {
                let what = "a segment or a doorbell with a message that carries none".into();
                return Err(Error::Malformed { clause: "S-4", what });
            }
            if segment.is_some() && may_ring && notifier.is_none() && !peer_process.link.same_kernel() {
                notifier = peer_process.link.shared_doorbells()?.map(|(_, notifier)| notifier);
            }
            let answered = match message {
                Message::Propose(claim) => self.handle_proposal(process, peer_process, claim),
                Message::Answer { to, claim, proof } => {
                    self.handle_answer(process, peer_process, to, claim, &proof, PeerResources::pair(segment, notifier))
                }
                Message::Confirm { to, proof } => {
                    self.handle_confirmation(process, peer_process, to, &proof, PeerResources::pair(segment, notifier))
                }
                Message::Refuse { to, reason } => {
                    self.handle_refusal(process, peer_process, to, Reason::from_number(reason));
                    Ok(())
                }
                Message::Ring { to, generation } => {
                    let delivered = peer_process.session.as_ref().zip(segment).and_then(|(session, segment)| {
                        // A connection may have gone since, and another end has none that it did not look at.
                        session.deliver_ring(to, generation, segment)
                    });
                    if delivered == Some(false) {
                        let what = "a ring was offered beside another".into();
                        return Err(Error::Malformed { clause: "H-5", what });
                    }
                    wanted = delivered.is_some();
                    Ok(())
                }
            };
            wanted &= answered.is_ok();
            peer_process.unwanted = if wanted { 0 } else { peer_process.unwanted + u32::from(brings) };
            if peer_process.unwanted > UNWANTED {
                let what = format!("{UNWANTED} segments that nobody wanted");
                return Err(Error::Malformed { clause: "S-20", what });
            }
            // What was proposed and answered is no more than this process has connections.
            peer_process.useless += u32::from(!is_proposal || answered.is_err());
            if !peer_process.proven && peer_process.useless > USELESS {
                return Err(Error::PeerGone);
            }
            if let Err((to, reason)) = answered {
                peer_process.send_message(&Message::Refuse { to, reason: reason as u16 })?;
            }
        }
        if peer_process.leave_memory(process) { Err(Error::Revoked) } else { Ok(()) }
    }
}

/// Who a peer may be by its backend's word. Of another kernel that word is the domain, and users there mean nothing here: the
/// connection's own numbers say who has it (S-18).
fn may_be_peer(claims: &Claims, link: &dyn Endpoint) -> bool {
    !link.same_kernel() || claims.admits(link.peer().uid)
}

/// How large a ring `connection` may have: a program that wants little to be under way gets a small one.
fn own_limit(process: &Process, connection: &Connection, most: u64) -> u64 {
    let holds = process.kernel().holds(connection.descriptors.fd());
    holds.map_or(most, |bytes| bytes.next_power_of_two().max(LEAST_RING).min(most))
}

/// The smallest ring that a program can ask for by its buffer.
const LEAST_RING: u64 = 4096;

impl PeerProcess {
    /// Takes the memory that `connection` is to bring, before anything is said of it, where all connections of a session share what
    /// there is. Says whether there was room (S-18).
    pub(super) fn reserve(&mut self, process: &Process, connection: &Arc<Connection>) -> Result<bool, Reason> {
        let mut spare = lock(&connection.search.spare);
        if self.link.same_kernel() || matches!(*spare, Spare::Made(_)) {
            return Ok(true);
        }
        if !self.may_be_shared() {
            self.memory.mark_full(connection);
            return Ok(false);
        }
        let settings = &process.settings;
        let wished = own_limit(process, connection, settings.first_ring.min(settings.ring));
        let mut ring = wished.min(self.memory.first_ring()).max(LEAST_RING);
        loop {
            let mut within_quota = false;
            let allocate = |len| {
                within_quota = true;
                self.link.allocate(len)
            };
            match aside::lifted(|| Resources::new(process.rings.quota(), limits::CONTROL_LEN + ring, allocate)) {
                Ok(made) => {
                    *spare = Spare::Made(made);
                    self.memory.add_sharer(connection);
                    return Ok(true);
                }
                Err(reason) if !within_quota => return Err(reason),
                Err(_) if ring > LEAST_RING => ring /= 2,
                Err(_) => {
                    self.memory.mark_full(connection);
                    return Ok(false);
                }
            }
        }
    }

    /// What `connection` was to bring goes, where it is memory of this session.
    pub(super) fn return_spare(&self, connection: &Connection) {
        if !self.link.same_kernel() {
            *lock(&connection.search.spare) = Spare::None;
        }
    }

    /// Makes a segment and a doorbell, and sends both with `message`. None where there is no room for it now.
    pub(super) fn offer(
        &mut self,
        process: &Process,
        connection: &Arc<Connection>,
        id: u64,
        message: &Message,
    ) -> Result<Option<OwnResources>, Reason> {
        self.send_waiting().map_err(|_| Reason::PeerGone)?;
        if !self.outbox.is_empty() || !self.outbox.is_open() {
            return Ok(None);
        }
        // Between two kernels all connections share what there is. What was reserved is gone where the message found no room.
        let (settings, shares) = (&process.settings, !self.link.same_kernel());
        if shares && !self.reserve(process, connection)? {
            return Ok(None);
        }
        let most = own_limit(process, connection, settings.ring);
        let ring = match &*lock(&connection.search.spare) {
            Spare::Made(made) if shares => made.len - limits::CONTROL_LEN,
            _ => most.min(settings.first_ring),
        };
        // Memory that many share is nobody's to try, nor what a program bounded.
        let tries = settings.tries_larger && !shares && most == settings.ring;
        let growth = process.rings.growth(ring, most, tries);
        let header = SegmentHeader::new(ring, 0, 0, Features::HANDOVER, id);
        let spare = std::mem::take(&mut *lock(&connection.search.spare));
        let made = match spare {
            Spare::Made(made) if made.len == header.segment_len => Some(made),
            Spare::Made(_) | Spare::None => None,
            Spare::Failed => return Err(Reason::Resources),
            unfinished => {
                *lock(&connection.search.spare) = unfinished;
                return Ok(None);
            }
        };
        if made.is_none()
            && process.exchange.is_crowded()
            && let Some(allocator) = self.link.allocator()
        {
            *lock(&connection.search.spare) = Spare::Wanted(allocator, header.segment_len);
            connection.search.try_next_at(0);
            return Ok(None);
        }
        // The segment has a descriptor until the peer has been sent one.
        aside::lifted(|| {
            let make = || Resources::new(process.rings.quota(), header.segment_len, |len| self.link.allocate(len));
            let Resources { segment, offer, lease, doorbell, .. } = made.map_or_else(make, Ok)?;
            let fresh = Fresh::new(segment, &header);
            // What rings for all of a session is the peer's already.
            let shared = self.link.shared_doorbells().map_err(|_| Reason::Resources)?;
            let doorbell = shared.map_or(doorbell, |(shared, _)| Arc::new(shared));
            let sent = self.outbox.try_send(|| match doorbell.is_shared() {
                true => self.link.send(&message.encode(), Some(&offer)),
                false => self.link.send_with_doorbell(&message.encode(), Some(&offer), &doorbell),
            });
            self.link.retire(None, offer);
            let sent = sent.map_err(|_| Reason::PeerGone)?;
            Ok(sent.then(|| OwnResources { fresh, lease, doorbell, id, growth }))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{IoSlice, IoSliceMut},
        os::{
            fd::{BorrowedFd, RawFd},
            unix::net::UnixListener,
        },
        sync::atomic::{AtomicUsize, Ordering},
    };

    use rustix::io::Errno;
    use tombolo_domain::{Deadline, Doorbell, Listener, Liveness, Memory, Offer, Peer, Received, Result as Outcome};
    use tombolo_mem::OwnSegment;

    use super::*;
    use crate::{
        Settings,
        folder::Folder,
        kernel::{Kernel, Sample},
        ports::Ports,
        tuple::Tuple,
    };

    const SERVICE: &str = "sockets-0123456789abcdef";

    /// A link over which nothing passes.
    #[derive(Debug)]
    struct Quiet;

    impl Memory for Quiet {
        fn allocate(&mut self, _: usize) -> Outcome<(OwnSegment, Offer)> {
            unreachable!("nothing is joined")
        }
        fn retire(&mut self, _: Option<OwnSegment>, _: Offer) {}
        fn quarantined(&self) -> u64 {
            0
        }
        fn outlives_owner(&self) -> bool {
            true
        }
    }

    impl Endpoint for Quiet {
        fn send(&mut self, _: &[u8], _: Option<&Offer>) -> Outcome<()> {
            unreachable!("nothing is said")
        }
        fn recv(&mut self, _: u64) -> Outcome<Option<Received>> {
            Ok(None)
        }
        fn fd(&self) -> BorrowedFd<'_> {
            unreachable!("no session begins")
        }
        fn doorbell(&self) -> Option<Arc<dyn Doorbell>> {
            None
        }
        fn liveness(&self) -> Liveness {
            Liveness::Running
        }
        fn peer(&self) -> Peer {
            Peer { uid: Some(rustix::process::geteuid().as_raw()), ..Peer::default() }
        }
        fn same_kernel(&self) -> bool {
            true
        }
    }

    /// A backend of this scheme that reaches every service, and how often it did.
    #[derive(Debug)]
    struct Backend(&'static str, AtomicUsize);

    impl Backend {
        fn new(scheme: &'static str) -> Self {
            Self(scheme, AtomicUsize::new(0))
        }
    }

    impl Rendezvous for Backend {
        fn scheme(&self) -> &'static str {
            self.0
        }
        fn listen(&self, _: &str) -> Outcome<Box<dyn Listener>> {
            unreachable!("nobody listens")
        }
        fn connect(&self, _: &str, _: Deadline) -> Outcome<Box<dyn Endpoint>> {
            self.1.fetch_add(1, Ordering::SeqCst);
            Ok(Box::new(Quiet))
        }
    }

    /// A kernel that nobody asks.
    struct Unasked;

    impl Kernel for Unasked {
        fn tuple(&self, _: RawFd) -> Option<Tuple> {
            unreachable!()
        }
        fn cookie(&self, _: RawFd) -> u64 {
            unreachable!()
        }
        fn counts(&self, _: RawFd, _: bool) -> Option<Sample> {
            unreachable!()
        }
        fn push(&self, _: RawFd) {}
        fn recv(&self, _: RawFd, _: &mut [IoSliceMut<'_>], _: bool) -> Result<usize, Errno> {
            unreachable!()
        }
        fn send(&self, _: RawFd, _: &[IoSlice<'_>]) -> Result<usize, Errno> {
            unreachable!()
        }
        fn poll(&self, _: RawFd, _: i16) -> i16 {
            unreachable!()
        }
        fn reset(&self, _: RawFd) {}
    }

    fn meet() -> (tempfile::TempDir, Claims) {
        let folder = tempfile::tempdir().unwrap();
        let own = rustix::process::geteuid().as_raw();
        let claims = Claims::new(Folder::check(folder.path(), own).unwrap(), own).unwrap();
        (folder, claims)
    }

    fn connections(count: usize) -> Vec<Arc<Connection>> {
        (0..count).map(|_| Arc::new(Connection::new(false, -1))).collect()
    }

    /// Returns the index of the session that was opened or found, or none if the service is dead.
    fn dial(all: &mut Negotiations, backend: &Backend, claims: &Claims) -> Result<Option<usize>, Reason> {
        all.dial(backend, claims, SERVICE).map(|dialled| match dialled {
            Dialled::Is(index) => Some(index),
            Dialled::Later => panic!("the backend connects at once"),
            Dialled::Dead => None,
        })
    }

    /// Notes that a session has no room for a further connection.
    fn fill(peer_process: &mut PeerProcess, sharers: &[Arc<Connection>]) {
        sharers.iter().for_each(|connection| peer_process.memory.add_sharer(connection));
        peer_process.memory.mark_full(&connections(1)[0]);
    }

    #[test]
    fn s18_full_sessions_get_another_where_enough_connections_share_each_and_no_more_than_64() {
        let ((_folder, claims), backend) = (meet(), Backend::new("vm"));
        for count in [0, LEAST_SHARERS - 1, LEAST_SHARERS] {
            let mut all = Negotiations::default();
            assert_eq!(dial(&mut all, &backend, &claims), Ok(Some(0)));
            assert_eq!(dial(&mut all, &backend, &claims), Ok(Some(0)), "it has room");
            let sharers = connections(count);
            fill(&mut all.peer_processes[0], &sharers);
            let another = if count < LEAST_SHARERS { Err(Reason::Resources) } else { Ok(Some(1)) };
            assert_eq!(dial(&mut all, &backend, &claims), another, "{count} connections share the session");
        }
        // As many as share a session at most: it stays full, however long the test takes.
        let (mut all, sharers) = (Negotiations::default(), connections(48));
        for index in 0..SESSIONS {
            assert_eq!(dial(&mut all, &backend, &claims), Ok(Some(index)));
            fill(&mut all.peer_processes[index], if index == 7 { &[] } else { &sharers });
            if index == 7 {
                assert_eq!(dial(&mut all, &backend, &claims), Err(Reason::Resources), "few share one of them");
                fill(&mut all.peer_processes[index], &sharers);
            }
        }
        assert_eq!(dial(&mut all, &backend, &claims), Err(Reason::Resources), "the 65th");
    }

    #[test]
    fn s7_process_has_no_more_than_1024_links_whoever_opens_them() {
        let (folder, claims) = meet();
        let claims = Arc::new(claims);
        let settings = Settings {
            folder: folder.path().into(),
            ring: RING_MAX,
            tries_larger: false,
            first_ring: RING_MAX,
            after: Some(0),
            memory: u64::MAX,
            loopback: true,
            flip: None,
            log: None,
            report: None,
            ports: Ports::default(),
        };
        let process = Process::new(settings, Box::new(Unasked), Box::new(Backend::new("local")));
        for knocks in [true, false] {
            let mut all = Negotiations { claims: Some(Arc::clone(&claims)), ..Negotiations::default() };
            let other = || PeerProcess::new(Some("another service".to_owned()), Box::new(Quiet));
            all.peer_processes.extend((1..PEER_PROCESSES).map(|_| other()));
            for attempt in 0..2 {
                if knocks {
                    all.let_in(&process, Box::new(Quiet));
                } else {
                    let found = dial(&mut all, &Backend::new("vm"), &claims);
                    assert_eq!(found.is_ok(), attempt == 0, "{found:?}");
                    all.peer_processes.iter_mut().for_each(|it| it.is_closed = true);
                }
                assert_eq!(all.peer_processes.len(), PEER_PROCESSES, "knocks: {knocks}, attempt {attempt}");
            }
        }
    }

    #[test]
    fn s18_service_without_a_socket_in_the_folder_is_dead_only_where_the_backend_has_sockets_there() {
        for (scheme, has_socket, is_there) in
            [("local", false, false), ("local", true, true), ("vm", false, true), ("xen", false, true)]
        {
            let ((folder, claims), backend) = (meet(), Backend::new(scheme));
            let _socket =
                has_socket.then(|| UnixListener::bind(folder.path().join(format!("{SERVICE}.sock"))).unwrap());
            let found = dial(&mut Negotiations::default(), &backend, &claims);
            assert_eq!(found, Ok(is_there.then_some(0)), "{scheme}, a socket: {has_socket}");
            assert_eq!(backend.1.load(Ordering::SeqCst), usize::from(is_there), "{scheme}, a socket: {has_socket}");
        }
    }
}
