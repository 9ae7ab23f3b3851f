// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A member of the folder who lies: in every field of every message, in their order, in the segments that come with them,
//! and in every word after it was joined. The victim never panics or waits, and is joined by nobody who does not know its
//! bytes; what a liar spoils is its own connection.

use std::{
    fs,
    io::{IoSlice, IoSliceMut},
    os::fd::{OwnedFd, RawFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{OFlags, fcntl_setfl},
    io::Errno,
    process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open},
};
use tombolo_domain::{Deadline, Link, Rendezvous, SingleBell, SingleRinger};
use tombolo_domain_local::LocalDomain;
use tombolo_layout::{
    Features, SegmentHeader,
    sockets::{Address, BOUNDARY, Claim, Counts, FOLLOWED, MOVES, Message, Proof},
    words,
};
use tombolo_mem::{OwnControl, OwnWord};
use tombolo_sockets::{
    Process, Read, Settings,
    connection::{Connection, Direction, Stage},
    kernel::{Kernel, Sample},
    proof::{self, History},
    tuple::Tuple,
};

const RING: u64 = 4096;
/// What a call may take at most, however busy the machine is.
const SOON: Duration = Duration::from_secs(5);
/// What both programs have seen of each other.
const SENT: &[u8] = b"what the victim sent to the other end of its connection";
const RECEIVED: &[u8] = b"what the victim received from there, which a liar has not seen";

/// A kernel for which everything is as it should be.
struct Calm(Tuple);

/// The descriptor of another connection of a victim, whose ports are the next ones.
const SECOND: RawFd = -2;

fn next(tuple: Tuple) -> Tuple {
    let up = |address: Address| Address { port: address.port + 1, ..address };
    Tuple { own: up(tuple.own), peer: up(tuple.peer) }
}

impl Kernel for Calm {
    fn tuple(&self, fd: RawFd) -> Option<Tuple> {
        Some(if fd == SECOND { next(self.0) } else { self.0 })
    }
    fn cookie(&self, _: RawFd) -> u64 {
        7
    }
    fn counts(&self, _: RawFd, _: bool) -> Option<Sample> {
        Some(Sample { counts: counts(SENT, RECEIVED), unread: 0 })
    }
    fn push(&self, _: RawFd) {}
    fn recv(&self, _: RawFd, _: &mut [IoSliceMut<'_>], _: bool) -> Result<usize, Errno> {
        Err(Errno::AGAIN)
    }
    fn send(&self, _: RawFd, _: &[IoSlice<'_>]) -> Result<usize, Errno> {
        Err(Errno::AGAIN)
    }
    fn poll(&self, _: RawFd, _: i16) -> i16 {
        0
    }
    fn reset(&self, _: RawFd) {}
}

fn counts(written: &[u8], received: &[u8]) -> Counts {
    Counts { written: written.len() as u64, acked: written.len() as u64, received: received.len() as u64 }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 16) ^ (self.0 << 48)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 8) as usize % bound
    }

    /// A word as liars like them.
    fn word(&mut self) -> u64 {
        match self.below(4) {
            0 => self.next(),
            1 => u64::MAX - self.below(9) as u64,
            2 => 1 << self.below(64),
            _ => self.below(3 * RING as usize) as u64,
        }
    }
}

/// An honest process with one connection, and the folder in which it can be found.
struct Victim {
    folder: tempfile::TempDir,
    process: Process,
    connection: Arc<Connection>,
    tuple: Tuple,
}

impl Victim {
    /// One that `waits` to be found, or seeks.
    fn new(waits: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings {
            folder: folder.path().into(),
            ring: RING,
            after: 0,
            memory: u64::MAX,
            loopback: true,
            flip: None,
            log: None,
            report: None,
        };
        let domain = LocalDomain::in_folder(folder.path());
        let (low, high) = ("10.0.0.1:80".parse().unwrap(), "10.0.0.2:4000".parse().unwrap());
        let tuple = if waits { Tuple::new(low, high) } else { Tuple::new(high, low) };
        let process = Process::new(settings, Box::new(Calm(tuple)), Box::new(domain));
        let connection = Self::begun(&process, !waits, -1);
        Self { folder, process, connection, tuple }
    }

    /// A connection over which something has passed.
    fn begun(process: &Process, dialled: bool, fd: RawFd) -> Arc<Connection> {
        let connection = Arc::new(process.track(dialled, fd));
        for (direction, bytes) in [(Direction::Out, SENT), (Direction::In, RECEIVED)] {
            connection.plain(direction).unwrap().moved(bytes.len(), [bytes].into_iter());
        }
        connection.set_wired();
        connection
    }

    /// Turns to its second connection.
    fn second(&mut self) {
        self.tuple = next(self.tuple);
        self.connection = Self::begun(&self.process, self.connection.dialled, SECOND);
    }

    /// A call of its program.
    fn call(&self) {
        let since = Instant::now();
        self.process.advance(&self.connection);
        assert!(since.elapsed() < SOON, "a call waited for a liar");
    }

    fn claim_file(&self, ending: &str) -> std::path::PathBuf {
        self.folder.path().join("claims").join(format!("{}.{ending}", self.tuple.key()))
    }
}

/// The other end, which may lie.
struct Liar {
    link: Box<dyn Link>,
    claim: Claim,
    /// What it says to have seen.
    history: History,
    control: Option<OwnControl>,
    /// What it rings, and where it would wait.
    ringer: Option<SingleRinger>,
    bell: Option<SingleBell>,
    _listener: Option<Box<dyn tombolo_domain::Listener>>,
}

impl Liar {
    /// Meets a victim that waits, or that seeks.
    fn meet(victim: &Victim, waits: bool, knows: bool) -> Self {
        let domain = LocalDomain::in_folder(victim.folder.path());
        let (link, listener) = if waits {
            victim.call();
            let service = fs::read_to_string(victim.claim_file("waiting")).unwrap();
            (domain.connect(&service, Deadline::after(SOON)).unwrap(), None)
        } else {
            let mut listener = domain.listen("liar").unwrap();
            fs::create_dir_all(victim.folder.path().join("claims")).unwrap();
            fs::write(victim.claim_file("waiting"), "liar").unwrap();
            victim.call();
            (listener.accept().unwrap().expect("it seeks the claimer"), Some(listener))
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
        Self { link, claim, history, control: None, ringer: None, bell: SingleBell::new().ok(), _listener: listener }
    }

    /// What the victim said, if anything.
    fn hear(&mut self) -> Option<Message> {
        let received = self.link.recv(1 << 20).ok()??;
        self.ringer = self.link.take_ringer().or(self.ringer.take());
        Some(Message::decode(&received.message).expect("the victim speaks well"))
    }

    /// Says `message`, changed by `lie`, with a segment that is a good one or not.
    fn say(&mut self, message: &Message, mut segment: Option<SegmentHeader>, lie: &mut Option<Random>) {
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
                4 => self.bell = None,
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
            self.control = Some(control);
            Some(offer)
        });
        let _ = match self.bell.as_ref().filter(|_| offer.is_some()) {
            Some(bell) => self.link.send_with_bell(&bytes, offer.as_ref(), bell),
            None => self.link.send(&bytes, offer.as_ref()),
        };
    }
}

fn header(epoch: u64) -> SegmentHeader {
    SegmentHeader::new(RING, 0, 0, Features::NONE, epoch.max(1))
}

/// Talks to a victim until it is joined or nothing more is to be said; lies where it is told to. Gives what it needs to go
/// on, and whether the victim believed it.
fn talk(victim: &Victim, waits: bool, knows: bool, lie: Option<Random>) -> (Liar, bool) {
    go_on(victim, Liar::meet(victim, waits, knows), waits, lie)
}

fn go_on(victim: &Victim, mut liar: Liar, waits: bool, mut lie: Option<Random>) -> (Liar, bool) {
    let claim = liar.claim;
    if waits {
        liar.say(&Message::Propose(claim), None, &mut lie);
    }
    for _ in 0..4 {
        victim.call();
        let heard = liar.hear();
        let answer = match heard {
            Some(Message::Propose(proposal)) => {
                let proof = proof::answer(&liar.history, &proposal, &claim);
                Message::Answer { to: proposal.id, claim, proof }
            }
            Some(Message::Answer { claim: theirs, proof, .. }) => {
                let confirmed = proof::confirm(&liar.history, &claim, &theirs, &proof);
                let nothing = Proof { proposer: 0, answerer: 0, hash: [7; 32] };
                Message::Confirm { to: theirs.id, proof: confirmed.unwrap_or(nothing) }
            }
            // Out of turn, and about nothing.
            _ => match lie.as_mut().map(|random| random.below(3)) {
                Some(0) => Message::Refuse { to: claim.id, reason: 99 },
                Some(1) => Message::Propose(claim),
                Some(_) => Message::Confirm { to: 1, proof: Proof { proposer: 9, answerer: 9, hash: [0; 32] } },
                None => break,
            },
        };
        let segment = matches!(answer, Message::Answer { .. } | Message::Confirm { .. }).then(|| header(claim.id));
        liar.say(&answer, segment, &mut lie);
    }
    victim.call();
    let joined = victim.connection.stage() == Stage::Joined;
    (liar, joined)
}

fn runs(short: u64, long: u64) -> u64 {
    if std::env::var_os("TOMBOLO_LONG").is_some() { long } else { short }
}

#[test]
fn s4_s6_end_that_tells_the_truth_is_joined() {
    for waits in [true, false] {
        let victim = Victim::new(waits);
        assert!(talk(&victim, waits, true, None).1, "waits: {waits}");
    }
}

#[test]
fn s13_end_that_brings_no_bell_is_not_joined() {
    for waits in [true, false] {
        let victim = Victim::new(waits);
        let mut liar = Liar::meet(&victim, waits, true);
        liar.bell = None;
        assert!(!go_on(&victim, liar, waits, None).1, "waits: {waits}");
    }
}

#[test]
fn s6_end_that_does_not_know_the_bytes_is_not_joined_whatever_it_says() {
    for seed in 0..runs(2_000, 1_000_000) {
        let waits = seed % 2 == 0;
        let victim = Victim::new(waits);
        let (_, joined) = talk(&victim, waits, false, (seed > 1).then_some(Random(seed)));
        assert!(!joined, "seed {seed}");
    }
}

#[test]
fn s4_messages_that_are_changed_anywhere_neither_panic_nor_block_the_victim() {
    let mut joined = 0;
    for seed in 0..runs(2_000, 1_000_000) {
        let waits = seed % 2 == 0;
        let victim = Victim::new(waits);
        let (_, believed) = talk(&victim, waits, true, Some(Random(seed)));
        joined += u64::from(believed);
        assert_ne!(victim.connection.stage() == Stage::Joined, !believed);
    }
    assert!(joined > 0, "the changes left nothing to believe");
}

#[test]
fn s2_s3_words_that_lie_after_joining_end_the_stream_and_nothing_else() {
    let (mut bytes, mut errors) = (0_u64, 0_u64);
    for seed in 0..runs(500, 200_000) {
        let waits = seed % 2 == 0;
        let victim = Victim::new(waits);
        let (liar, joined) = talk(&victim, waits, true, None);
        assert!(joined);
        let (control, mut random) = (liar.control.as_ref().unwrap(), Random(seed));
        let at = [
            words::TAIL,
            words::HEAD,
            words::WANT_DATA,
            words::READER_STATE,
            words::WANT_SPACE,
            words::WRITER_STATE,
            MOVES,
            BOUNDARY,
            FOLLOWED,
        ];
        for _ in 0..60 {
            let word = control.word(at[random.below(at.len())]);
            word.store_release(if random.below(3) == 0 { random.below(8) as u64 } else { random.word() });
            if random.below(4) == 0
                && let Some(bell) = &liar.ringer
            {
                bell.ring();
            }
            let since = Instant::now();
            let mut room = [0; 9000];
            let connection = &victim.connection;
            let got = match random.below(6) {
                0 => connection.recv(&victim.process, -1, &mut [IoSliceMut::new(&mut room)], Read::Take),
                1 => connection.recv(&victim.process, -1, &mut [IoSliceMut::new(&mut room)], Read::Peek),
                2 => connection.send(&victim.process, -1, &[IoSlice::new(&room)]),
                3 => {
                    connection.arm(true, true);
                    victim.process.before_sleep();
                    Ok(connection.unread() as usize)
                }
                4 => Ok(usize::from(connection.is_readable(&victim.process, -1))),
                _ => Ok(usize::from(connection.owes(&victim.process, -1))),
            };
            assert!(since.elapsed() < SOON, "seed {seed}: a call waited for a liar");
            match got {
                Ok(n) => bytes += n as u64,
                Err(errno) => {
                    assert!([Errno::AGAIN, Errno::CONNRESET].contains(&errno), "seed {seed}: {errno:?}");
                    errors += u64::from(errno == Errno::CONNRESET);
                }
            }
        }
        victim.connection.finish();
    }
    assert!(bytes > 0 && errors > 0, "{bytes} bytes, {errors} streams ended: the lies did not reach anything");
}

/// Copies of the bells in this process that another has as well.
fn shared_bells() -> Vec<OwnedFd> {
    let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let all =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let shared = all.filter(|fd: &RawFd| {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
        info.lines().any(|line| line.starts_with("eventfd-semaphore:") && line.ends_with('1'))
    });
    shared.filter_map(|fd| pidfd_getfd(&own, fd, PidfdGetfdFlags::empty()).ok()).collect()
}

/// Leaves a bell as a liar likes it: full or not, and blocking who calls it without care.
fn spoil(bell: &OwnedFd, random: &mut Random) {
    // What is set here is set for all who have it.
    fcntl_setfl(bell, OFlags::NONBLOCK).unwrap();
    for _ in 0..random.below(4) {
        let value = [u64::MAX - 1, 1, 0, random.next()][random.below(4)];
        let _ = rustix::io::write(bell, &value.to_ne_bytes());
        let _ = rustix::io::read(bell, &mut [0; 8]);
    }
    fcntl_setfl(bell, OFlags::empty()).unwrap();
}

#[test]
fn bells_that_a_liar_fills_and_empties_block_nobody_and_silence_no_other() {
    let mut victim = Victim::new(true);
    let (_liar, joined) = talk(&victim, true, true, None);
    assert!(joined);
    let first = Arc::clone(&victim.connection);
    let spoilt = shared_bells();
    assert!(spoilt.len() >= 4, "{} bells", spoilt.len());
    victim.second();
    let (honest, joined) = talk(&victim, true, true, None);
    assert!(joined);
    let bell = honest.ringer.as_ref().unwrap();
    let limit = |time: Duration| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: 0 };
    let mut random = Random(7);
    for turn in 0..300 {
        spoilt.iter().for_each(|bell| spoil(bell, &mut random));
        let since = Instant::now();
        let waiter = victim.process.waiter([&first, &victim.connection].into_iter()).unwrap();
        for one in [&first, &victim.connection] {
            one.arm(true, true);
            let _ = one.send(&victim.process, -1, &[IoSlice::new(&[0; 100])]);
        }
        let rung = |patience| {
            let mut one = [PollFd::from_borrowed_fd(waiter.fd(), PollFlags::IN)];
            poll(&mut one, Some(&limit(patience))) == Ok(1)
        };
        // What the liar rang is heard, and forgotten.
        while rung(Duration::ZERO) {
            waiter.forget();
            victim.process.before_sleep();
        }
        assert!(since.elapsed() < SOON, "turn {turn}: a call waited");
        bell.ring();
        assert!(rung(SOON), "turn {turn}: an honest ring was not heard");
        waiter.forget();
    }
}
