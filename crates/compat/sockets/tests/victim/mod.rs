// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Provides an honest process with a connection, and a peer that may violate the protocol.
#![allow(dead_code, reason = "each test uses its part")]

use std::{
    fs,
    io::{IoSlice, IoSliceMut},
    os::{
        fd::{BorrowedFd, RawFd},
        unix::fs::PermissionsExt,
    },
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::io::Errno;
use tombolo_domain::{
    Allocator, Connecting, Deadline, Doorbell, Endpoint, Error, Held, Listener, Liveness, Memory, Offer, Peer,
    Received, Rendezvous, Result as Outcome, SingleDoorbell, SingleNotifier,
};
use tombolo_domain_local::LocalDomain;
use tombolo_layout::{
    Features, SegmentHeader,
    sockets::{Address, Claim, Counts, Message, Proof},
};
use tombolo_mem::{OwnControl, OwnSegment};
use tombolo_sockets::{
    Process, Settings,
    connection::{Connection, Direction, Stage},
    kernel::{Kernel, Sample},
    proof::{self, History, ProofSide, Secret},
    tuple::Tuple,
};

pub const RING: u64 = 4096;
pub const SERVICE: &str = "sockets-0123456789abcdef";
/// Largest time that a call may take, however busy the machine is.
pub const SOON: Duration = Duration::from_secs(5);
/// Bytes that both programs have seen of each other.
pub const SENT: &[u8] = b"what the victim sent to the other end of its connection";
pub const RECEIVED: &[u8] = b"what the victim received from there, which a liar has not seen";

/// A kernel that reports everything in order, unless a test sets it otherwise.
pub struct Calm {
    tuple: Tuple,
    play: Play,
}

/// Values that a test sets: the kernel's answers, and the identity that the peer reports.
#[derive(Clone, Debug)]
pub struct Play {
    /// Whether the victim waits to be found, rather than seeks its peer.
    pub waits: bool,
    /// Current counts of the kernel.
    pub counts: Arc<Mutex<Counts>>,
    /// Received bytes that are unread, and whether a thread of the program reads them whenever the library looks.
    pub unread: Arc<Mutex<Vec<u8>>>,
    pub read_meanwhile: bool,
    /// Sequence numbers that the kernel reports.
    pub sequences: Secret,
    /// The two addresses, the lower one first.
    pub addresses: [&'static str; 2],
    /// User and process of the peer, if they differ from this process's.
    pub peer: Option<(Option<u32>, Option<u32>)>,
    /// Contents of the folder's configuration.
    pub configuration: &'static str,
    /// Whether the peer is in another kernel.
    pub elsewhere: bool,
    /// How often the victim asked for the doorbell that all connections of a session share, if there is one.
    pub shared: Option<Arc<AtomicU32>>,
    /// Size up to which the victim's rings may grow, if they may.
    pub grows_to: Option<u64>,
    /// Whether the control paths of the victim's sessions have no room for its messages.
    pub full: Arc<AtomicBool>,
    /// Number of messages refused for lack of room.
    pub refused: Arc<AtomicU32>,
    /// Number of attempts for which a session that the victim opens is still not established.
    pub slow: Arc<AtomicU32>,
    /// Whether the victim joins when the library's own rule says so, and not at once.
    pub by_rule: bool,
    /// Whether the victim is stopped for other programs each time that it asks the kernel for its counts.
    pub stopped: Arc<AtomicBool>,
    /// Another connection of the victim, used by another thread whenever the first one is compared with its peer.
    pub crowd: Arc<OnceLock<(Weak<Process>, Arc<Connection>)>>,
    /// Number of segments allocated by a session, and without one.
    pub made: Arc<[AtomicU32; 2]>,
    /// Number of callers, and of messages, that the victim took.
    pub taken: Arc<[AtomicU32; 2]>,
}

impl Play {
    pub fn new(waits: bool) -> Self {
        Self {
            waits,
            counts: Arc::new(Mutex::new(counts(SENT, RECEIVED))),
            unread: Arc::default(),
            read_meanwhile: false,
            sequences: None,
            addresses: ["10.0.0.1:80", "10.0.0.2:4000"],
            peer: None,
            configuration: "",
            elsewhere: false,
            shared: None,
            grows_to: None,
            full: Arc::default(),
            refused: Arc::default(),
            slow: Arc::default(),
            by_rule: false,
            stopped: Arc::default(),
            crowd: Arc::default(),
            made: Arc::default(),
            taken: Arc::default(),
        }
    }
}

/// Returns the addresses of the victim's connection with descriptor `fd`. Its first is -1, and each further one has the
/// next ports.
fn of_descriptor(first: Tuple, fd: RawFd) -> Tuple {
    let up = |address: Address| Address { port: address.port + (-1 - fd) as u16, ..address };
    Tuple { own: up(first.own), peer: up(first.peer) }
}

impl Kernel for Calm {
    fn tuple(&self, fd: RawFd) -> Option<Tuple> {
        Some(of_descriptor(self.tuple, fd))
    }
    fn cookie(&self, _: RawFd) -> u64 {
        7
    }
    fn counts(&self, fd: RawFd, _: bool) -> Option<Sample> {
        if let Some((process, other)) = self.play.crowd.get().filter(|_| fd == -1)
            && let Some(process) = process.upgrade()
        {
            std::thread::scope(|scope| {
                scope.spawn(|| (0..3000).for_each(|_| process.advance(other)));
            });
        }
        let since = Instant::now();
        while self.play.stopped.load(Ordering::SeqCst) && since.elapsed() < Duration::from_millis(6) {
            std::hint::spin_loop();
        }
        let unread = self.play.unread.lock().unwrap().len() as u64;
        Some(Sample { counts: *self.play.counts.lock().unwrap(), unread })
    }
    fn sequences(&self, _: RawFd, _: bool) -> Option<[u32; 2]> {
        self.play.sequences
    }
    fn push(&self, _: RawFd) {}
    fn recv(&self, _: RawFd, to: &mut [IoSliceMut<'_>], peek: bool) -> Result<usize, Errno> {
        let mut unread = self.play.unread.lock().unwrap();
        let n = to[0].len().min(unread.len());
        to[0][..n].copy_from_slice(&unread[..n]);
        if !peek || self.play.read_meanwhile {
            unread.drain(..n);
        }
        if n == 0 { Err(Errno::AGAIN) } else { Ok(n) }
    }
    fn send(&self, _: RawFd, _: &[IoSlice<'_>]) -> Result<usize, Errno> {
        Err(Errno::AGAIN)
    }
    fn poll(&self, _: RawFd, _: i16) -> i16 {
        0
    }
    fn reset(&self, _: RawFd) {}
}

pub fn counts(written: &[u8], received: &[u8]) -> Counts {
    Counts { written: written.len() as u64, acked: written.len() as u64, received: received.len() as u64 }
}

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 16) ^ (self.0 << 48)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 8) as usize % bound
    }

    /// Returns a word of the kind that a hostile peer would choose.
    pub fn word(&mut self) -> u64 {
        match self.below(4) {
            0 => self.next(),
            1 => u64::MAX - self.below(9) as u64,
            2 => 1 << self.below(64),
            _ => self.below(3 * RING as usize) as u64,
        }
    }
}

/// An honest process with one connection, and the folder in which it can be found.
pub struct Victim {
    pub folder: tempfile::TempDir,
    pub process: Arc<Process>,
    pub connection: Arc<Connection>,
    pub tuple: Tuple,
}

impl Victim {
    /// Makes a victim that `waits` to be found, or else seeks.
    pub fn new(waits: bool) -> Self {
        Self::playing(Play::new(waits))
    }

    pub fn playing(play: Play) -> Self {
        let folder = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o700)).tempdir().unwrap();
        let settings = Settings {
            folder: folder.path().into(),
            ring: play.grows_to.unwrap_or(RING),
            tries_larger: false,
            first_ring: play.grows_to.map_or(RING, |_| 16 << 10),
            after: (!play.by_rule).then_some(0),
            memory: u64::MAX,
            loopback: true,
            flip: None,
            log: None,
            report: None,
            ports: tombolo_sockets::ports::Ports::default(),
        };
        if !play.configuration.is_empty() {
            fs::write(folder.path().join("tombolo.conf"), play.configuration).unwrap();
        }
        let domain = Posing(LocalDomain::in_folder(folder.path()).with_unique_names(), play.clone());
        let [low, high] = play.addresses.map(|address| address.parse().unwrap());
        let waits = play.waits;
        let tuple = if waits { Tuple::new(low, high) } else { Tuple::new(high, low) };
        let process = Arc::new(Process::new(settings, Box::new(Calm { tuple, play }), Box::new(domain)));
        let connection = Self::begun(&process, !waits, -1);
        Self { folder, process, connection, tuple }
    }

    /// Makes a connection over which bytes have passed in both directions.
    pub fn begun(process: &Process, dialled: bool, fd: RawFd) -> Arc<Connection> {
        let connection = Arc::new(process.track(dialled, fd));
        for (direction, bytes) in [(Direction::Out, SENT), (Direction::In, RECEIVED)] {
            connection.plain(direction).unwrap().moved(bytes.len(), [bytes].into_iter());
        }
        connection.wiring.set_wired();
        connection.wiring.waits().note_both_asked();
        connection
    }

    /// Switches to a new connection of the same process.
    pub fn next(&mut self) {
        self.tuple = of_descriptor(self.tuple, -2);
        self.connection = Self::begun(&self.process, self.connection.dialled, self.connection.descriptors.fd() - 1);
    }

    /// Makes one call of the victim's program.
    pub fn call(&self) {
        let since = Instant::now();
        self.process.advance(&self.connection);
        assert!(since.elapsed() < SOON, "a call waited for a liar");
    }

    pub fn claim_file(&self, ending: &str) -> std::path::PathBuf {
        self.folder.path().join("claims").join(format!("{}.{ending}", self.tuple.key()))
    }
}

/// The victim's peer, which may violate the protocol.
pub struct Liar {
    pub link: Box<dyn Endpoint>,
    pub claim: Claim,
    /// The victim's number, once the victim has sent it.
    pub to: u64,
    /// History that the peer claims to have seen.
    pub history: History,
    pub control: Option<OwnControl>,
    /// Doorbell that the peer notifies, and the one on which it would wait.
    pub notifier: Option<SingleNotifier>,
    pub doorbell: Option<SingleDoorbell>,
    /// Epoch of its segment, if that is not its number.
    pub epoch: Option<u64>,
    listener: Option<Box<dyn tombolo_domain::Listener>>,
}

impl Liar {
    /// Connects to a victim that waits, or is found by one that seeks.
    pub fn meet(victim: &Victim, waits: bool, knows: bool) -> Self {
        let domain = LocalDomain::in_folder(victim.folder.path());
        let (link, listener) = if waits {
            victim.call();
            let service = fs::read_to_string(victim.claim_file("waiting")).unwrap();
            (domain.connect(&service, Deadline::after(SOON)).unwrap(), None)
        } else {
            let mut listener = domain.listen(SERVICE).unwrap();
            fs::create_dir_all(victim.folder.path().join("claims")).unwrap();
            fs::write(victim.claim_file("waiting"), SERVICE).unwrap();
            let sought = (0..1000).find_map(|_| {
                victim.call();
                listener.accept().unwrap()
            });
            (sought.expect("it seeks the claimer"), Some(listener))
        };
        let mut history = History::default();
        let seen = |bytes: &[u8]| if knows { bytes.to_vec() } else { vec![b'?'; bytes.len()] };
        history.sent(0, &seen(RECEIVED));
        history.received(0, &seen(SENT));
        let tuple = victim.tuple;
        let claim = Claim {
            id: 0x1234,
            cookie: 7,
            addresses: [tuple.peer, tuple.own],
            known: history.known(),
            counts: counts(RECEIVED, SENT),
            nonce: [9; 16],
        };
        Self {
            link,
            claim,
            to: 0,
            history,
            control: None,
            notifier: None,
            doorbell: SingleDoorbell::new().ok(),
            epoch: None,
            listener,
        }
    }

    /// Returns whether no further caller has connected.
    pub fn is_called_once(&mut self) -> bool {
        self.listener.as_mut().is_none_or(|listener| matches!(listener.accept(), Ok(None)))
    }

    /// Returns the victim's message, if there is one.
    pub fn receive_message(&mut self) -> Option<Message> {
        let received = self.link.recv(1 << 20).ok()??;
        self.notifier = self.link.take_notifier().or(self.notifier.take());
        let message = Message::decode(&received.message).expect("the victim speaks well");
        if let Message::Propose(claim) | Message::Answer { claim, .. } = &message {
            self.to = claim.id;
        }
        Some(message)
    }

    /// Returns an honest peer's reply to the message, if there is one.
    pub fn reply(&self, heard: &Message) -> Option<Message> {
        let (claim, history) = (self.claim, &self.history);
        match heard {
            Message::Propose(proposal) => {
                let covered = both(claim.known, proposal.known);
                let proof = proof::prove(ProofSide::Answerer, history, None, [proposal, &claim], covered);
                Some(Message::Answer { to: proposal.id, claim, proof: proof.unwrap_or(NOTHING) })
            }
            Message::Answer { claim: theirs, proof, .. } => {
                let covered = [proof.proposer, proof.answerer];
                let proof = proof::prove(ProofSide::Proposer, history, None, [&claim, theirs], covered);
                Some(Message::Confirm { to: theirs.id, proof: proof.unwrap_or(NOTHING) })
            }
            _ => None,
        }
    }

    /// Returns the header of the segment that accompanies a message.
    pub fn brings(&self, message: &Message) -> Option<SegmentHeader> {
        matches!(message, Message::Answer { .. } | Message::Confirm { .. })
            .then(|| header(self.epoch.unwrap_or(self.claim.id)))
    }

    /// Sends `message`, altered at random where `lie` is given, with a segment that is valid or not.
    pub fn send_message(&mut self, message: &Message, mut segment: Option<SegmentHeader>, lie: &mut Option<Random>) {
        let mut bytes = message.encode();
        if let Some(random) = lie {
            for _ in 0..random.below(4) {
                let at = random.below(bytes.len());
                bytes[at] = random.next() as u8;
            }
            match random.below(8) {
                0 => bytes.truncate(random.below(bytes.len() + 1)),
                1 => bytes.extend([0; 8]),
                2 => segment = None,
                3 => segment = Some(header(random.word())),
                4 => self.doorbell = None,
                _ => {}
            }
        }
        let offer = segment.and_then(|header| {
            let (segment, offer) = self.link.allocate(header.segment_len as usize).ok()?;
            let (control, _data) = segment.split(header.geometry().data_offset);
            let mut encoded = header.encode();
            if let Some(random) = lie.as_mut().filter(|random| random.0 % 3 == 0) {
                encoded[random.below(tombolo_layout::header::LEN)] = random.next() as u8;
            }
            control.write_header(&encoded);
            // The words of a connection stay where they were placed first.
            if header.generation == 0 {
                self.control = Some(control);
            }
            Some(offer)
        });
        let _ = match self.doorbell.as_ref().filter(|_| offer.is_some()) {
            Some(doorbell) => self.link.send_with_doorbell(&bytes, offer.as_ref(), doorbell),
            None => self.link.send(&bytes, offer.as_ref()),
        };
    }
}

pub fn header(epoch: u64) -> SegmentHeader {
    SegmentHeader::new(RING, 0, 0, Features::HANDOVER, epoch.max(1))
}

/// A proof that proves nothing.
pub const NOTHING: Proof = Proof { proposer: 0, answerer: 0, tag: [7; 32] };

/// Returns what an answerer and a proposer can both prove: of the proposer's direction, and of the answerer's.
pub fn both(answerer: [u16; 2], proposer: [u16; 2]) -> [u32; 2] {
    [answerer[1].min(proposer[0]).into(), answerer[0].min(proposer[1]).into()]
}

/// Talks to a victim until it is joined or no message is left to send; violates the protocol where `lie` is given.
/// Returns the state to continue with, and whether the victim trusted the peer.
pub fn talk(victim: &Victim, waits: bool, knows: bool, lie: Option<Random>) -> (Liar, bool) {
    go_on(victim, Liar::meet(victim, waits, knows), waits, lie)
}

/// As [`talk`], after the two have met.
pub fn go_on(victim: &Victim, mut liar: Liar, waits: bool, mut lie: Option<Random>) -> (Liar, bool) {
    let claim = liar.claim;
    if waits {
        liar.send_message(&Message::Propose(claim), None, &mut lie);
    }
    for _ in 0..4 {
        victim.call();
        let heard = liar.receive_message();
        let answer = match heard.and_then(|heard| liar.reply(&heard)) {
            Some(reply) => reply,
            // A message out of turn, or about an unknown connection.
            None => match lie.as_mut().map(|random| random.below(3)) {
                Some(0) => Message::Refuse { to: claim.id, reason: 99 },
                Some(1) => Message::Propose(claim),
                Some(_) => Message::Confirm { to: 1, proof: Proof { proposer: 9, answerer: 9, tag: [0; 32] } },
                None => break,
            },
        };
        liar.send_message(&answer, liar.brings(&answer), &mut lie);
    }
    victim.call();
    let joined = victim.connection.stage() == Stage::Joined;
    (liar, joined)
}

/// Both values of a condition, such as whether an endpoint waits.
pub const BOTH: [bool; 2] = [true, false];

/// Changes nothing in a claim.
pub fn honest(_: &mut Claim) {}

/// Talks to a victim with all that an honest peer knows, and proves the sequence numbers `secret`; once it has received
/// the victim's claim, `lie` changes its own. Returns whether the victim trusted the peer.
pub fn convince(victim: &Victim, secret: Secret, lie: impl Fn(&mut Claim)) -> bool {
    let waits = victim.tuple.own < victim.tuple.peer;
    convince_as(&mut Liar::meet(victim, waits, true), victim, secret, lie)
}

/// As [`convince`], after the two have met.
pub fn convince_as(liar: &mut Liar, victim: &Victim, secret: Secret, lie: impl Fn(&mut Claim)) -> bool {
    if victim.tuple.own < victim.tuple.peer {
        lie(&mut liar.claim);
        liar.send_message(&Message::Propose(liar.claim), None, &mut None);
    }
    for _ in 0..3 {
        victim.call();
        let said = match liar.receive_message() {
            Some(Message::Propose(proposal)) => {
                lie(&mut liar.claim);
                let claim = liar.claim;
                let covered = both(claim.known, proposal.known);
                let proof = proof::prove(ProofSide::Answerer, &liar.history, secret, [&proposal, &claim], covered);
                Message::Answer { to: proposal.id, claim, proof: proof.unwrap_or(NOTHING) }
            }
            Some(Message::Answer { claim: theirs, proof, .. }) => {
                let covered = [proof.proposer, proof.answerer];
                let proof = proof::prove(ProofSide::Proposer, &liar.history, secret, [&liar.claim, &theirs], covered);
                Message::Confirm { to: theirs.id, proof: proof.unwrap_or(NOTHING) }
            }
            _ => break,
        };
        liar.send_message(&said, Some(header(liar.claim.id)), &mut None);
    }
    victim.call();
    victim.connection.stage() == Stage::Joined
}

/// A rendezvous whose sessions behave, and describe their peer, as a test requires.
#[derive(Debug)]
struct Posing(LocalDomain, Play);

#[derive(Debug)]
struct PosingListener(Box<dyn Listener>, Play);

#[derive(Debug)]
struct PosingLink(Box<dyn Endpoint>, Play);

/// A session that is established late.
#[derive(Debug)]
struct PosingCall(Box<dyn Connecting>, Play);

impl Connecting for PosingCall {
    fn finish_connect(&mut self) -> Outcome<Option<Box<dyn Endpoint>>> {
        let is_slow = |left: u32| left.checked_sub(1);
        if self.1.slow.fetch_update(Ordering::SeqCst, Ordering::SeqCst, is_slow).is_ok() {
            return Ok(None);
        }
        let link = self.0.finish_connect()?;
        Ok(link.map(|link| Box::new(PosingLink(link, self.1.clone())) as Box<dyn Endpoint>))
    }
}

impl PosingLink {
    fn has_room(&self) -> Outcome<()> {
        if !self.1.full.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.1.refused.fetch_add(1, Ordering::SeqCst);
        Err(Error::Limit { what: "the room of a test", remedy: "have the test make some" })
    }
}

impl Rendezvous for Posing {
    fn scheme(&self) -> &'static str {
        self.0.scheme()
    }
    fn hold_for_fork(&self) -> Held {
        self.0.hold_for_fork()
    }
    fn listen(&self, service: &str) -> Outcome<Box<dyn Listener>> {
        Ok(Box::new(PosingListener(self.0.listen(service)?, self.1.clone())))
    }
    fn connect(&self, service: &str, deadline: Deadline) -> Outcome<Box<dyn Endpoint>> {
        Ok(Box::new(PosingLink(self.0.connect(service, deadline)?, self.1.clone())))
    }
    fn begin_connect(&self, service: &str) -> Outcome<Box<dyn Connecting>> {
        Ok(Box::new(PosingCall(self.0.begin_connect(service)?, self.1.clone())))
    }
}

impl Listener for PosingListener {
    fn accept(&mut self) -> Outcome<Option<Box<dyn Endpoint>>> {
        let link = self.0.accept()?;
        self.1.taken[0].fetch_add(link.is_some().into(), Ordering::SeqCst);
        Ok(link.map(|link| Box::new(PosingLink(link, self.1.clone())) as Box<dyn Endpoint>))
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
}

impl Memory for PosingLink {
    fn allocate(&mut self, len: usize) -> Outcome<(OwnSegment, Offer)> {
        self.1.made[0].fetch_add(1, Ordering::SeqCst);
        self.0.allocate(len)
    }
    fn allocator(&self) -> Option<Allocator> {
        let (own, made) = (self.0.allocator()?, Arc::clone(&self.1.made));
        Some(Allocator::new(move |len| {
            made[1].fetch_add(1, Ordering::SeqCst);
            own.allocate(len)
        }))
    }
    fn retire(&mut self, segment: Option<OwnSegment>, offer: Offer) {
        self.0.retire(segment, offer);
    }
    fn quarantined(&self) -> u64 {
        self.0.quarantined()
    }
    fn outlives_owner(&self) -> bool {
        self.0.outlives_owner()
    }
}

impl Endpoint for PosingLink {
    fn send(&mut self, message: &[u8], offer: Option<&Offer>) -> Outcome<()> {
        self.has_room()?;
        self.0.send(message, offer)
    }
    fn send_with_doorbell(&mut self, message: &[u8], offer: Option<&Offer>, doorbell: &SingleDoorbell) -> Outcome<()> {
        self.has_room()?;
        self.0.send_with_doorbell(message, offer, doorbell)
    }
    fn take_notifier(&mut self) -> Option<SingleNotifier> {
        self.0.take_notifier()
    }
    fn shared_doorbells(&self) -> Outcome<Option<(SingleDoorbell, SingleNotifier)>> {
        let Some(shared) = &self.1.shared else { return self.0.shared_doorbells() };
        shared.fetch_add(1, Ordering::SeqCst);
        let doorbell = SingleDoorbell::new().map_err(|error| Error::os("eventfd", error))?;
        Ok(Some((doorbell, SingleNotifier::of_session(self.0.doorbell().ok_or(Error::PeerGone)?))))
    }
    fn recv(&mut self, max_segment: u64) -> Outcome<Option<Received>> {
        let received = self.0.recv(max_segment)?;
        self.1.taken[1].fetch_add(received.is_some().into(), Ordering::SeqCst);
        Ok(received)
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
    fn doorbell(&self) -> Option<Arc<dyn Doorbell>> {
        self.0.doorbell()
    }
    fn liveness(&self) -> Liveness {
        self.0.liveness()
    }
    fn peer(&self) -> Peer {
        let own = self.0.peer();
        self.1.peer.map_or(own.clone(), |(uid, pid)| Peer { uid, pid, ..own })
    }
    fn same_kernel(&self) -> bool {
        !self.1.elsewhere && self.0.same_kernel()
    }
}
