// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The peer's pages belong to the test, which changes them at any time: bit flips, random and replayed words, lying
//! lengths, an own thread. Whatever it does, the victim gets correct data or `Corrupt` with a clause; it never panics,
//! never looks outside its mappings (nothing is mapped beside them; the AddressSanitizer job runs this file too), never
//! hangs, and rings at most once a call.
//!
//! `TOMBOLO_LONG=1` runs the long form.
#![cfg(not(loom))]

mod common;

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use common::{Pages, Rng, fresh, memory, next_ring, victim, within};
use tombolo_layout::{
    Features, SegmentHeader, limits, record,
    state::{Phase, State},
    words,
};
use tombolo_mem::{Mapped, Mem, OwnData, OwnWord, PeerData, PeerWord, Untrusted};
use tombolo_ring::{
    Corrupt, Deadline, Error, FlushPolicy, Mode, Ordering, PeerCarrier, Reader, ReaderParts, Side, Sleeper, Spin,
    Waited, Woken, Writer, halves, wait,
};

const CAPACITY: u64 = 4096;
/// Far more than any of these tests needs, far less than for ever.
const HANG: Duration = Duration::from_secs(1800);
/// Clauses that a victim may name.
const CLAUSES: [&str; 6] = ["R-7", "R-8", "R-15", "R-20", "R-21", "H-5"];

/// How many mutations a test makes.
fn mutations(short: u64, long: u64) -> u64 {
    if std::env::var_os("TOMBOLO_LONG").is_some_and(|long| long == "1") { long } else { short }
}

/// Where positions begin, for life number `life`.
fn start(rng: &mut Rng) -> u64 {
    rng.one_of(&[0u64, 1 << 32, 1 << 62, 1 << 63, 0]).wrapping_sub(rng.below(64) * 8)
}

/// A word that is made to be believed, or not.
fn lie(rng: &mut Rng, now: u64, seen: &[u64]) -> u64 {
    let far = rng.one_of(&[1, 7, 8, CAPACITY - 8, CAPACITY, CAPACITY + 8, 1 << 31, 1 << 32, 1 << 62, 1 << 63]);
    match rng.below(8) {
        0 => rng.word(),
        1 => now ^ (1 << rng.below(64)),
        2 => now.wrapping_sub(far),
        3 => now.wrapping_add(far),
        4 if !seen.is_empty() => rng.one_of(seen),
        5 => rng.one_of(&[0, u64::MAX, 1 << 63]),
        _ => now.wrapping_add(rng.below(CAPACITY + 2)),
    }
}

/// A state word, mostly a possible one.
fn lying_state(rng: &mut Rng) -> u64 {
    let state = |phase, ready, current| State { phase, ready, current }.encode();
    match rng.below(12) {
        0 => rng.word(),
        1 => state(Phase::Closed, 0, 0),
        2 => state(Phase::Aborted, 0, 0),
        3 => state(Phase::Fresh, 0, 0),
        4 => state(Phase::Open, rng.below(3) as u16, rng.below(3) as u16),
        5 => state(Phase::Open, 0, 0) ^ (1 << rng.below(64)),
        _ => state(Phase::Open, 0, 0),
    }
}

/// What a reader that is being lied to can be asked. The real one, and those that must be caught.
trait Reading {
    fn position(&self) -> u64;
    fn available(&self) -> u64;
    fn read(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error>;
    fn recv(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error>;
    /// Everything else that looks at the peer's words.
    fn look(&mut self, what: u64) -> Result<(), Error>;
    fn rings(&mut self) -> u64;
}

impl Reading for Reader<Mapped> {
    fn position(&self) -> u64 {
        Reader::position(self)
    }

    fn available(&self) -> u64 {
        Reader::available(self)
    }

    fn read(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error> {
        Reader::read(self, to)
    }

    fn recv(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error> {
        Reader::recv(self, to)
    }

    fn look(&mut self, what: u64) -> Result<(), Error> {
        match what % 6 {
            0 => self.refresh().map(drop),
            1 => self.finished().map(drop),
            2 => self.announced().map(drop),
            3 => self.need().map(drop),
            4 => {
                self.arm(1 + what % CAPACITY);
                self.before_sleep();
                self.ready(1 + what % CAPACITY).map(drop)
            }
            _ if self.announced()? == Some(1) => self.prepare(1, next_ring(CAPACITY, 1).1),
            _ => Ok(()),
        }
    }

    fn rings(&mut self) -> u64 {
        u64::from(self.take_ring())
    }
}

/// One reader's life among lies.
struct Life<R> {
    reader: R,
    pages: Pages,
    messages: bool,
    tail: u64,
    /// Every tail that was ever published; the reader may act on no other number.
    tails: HashSet<u64>,
    recent: Vec<u64>,
    corrupt: Option<Corrupt>,
}

impl<R: Reading> Life<R> {
    fn new(reader: R, mut pages: Pages, messages: bool, start: u64, rng: &mut Rng) -> Self {
        for offset in (0..CAPACITY as usize).step_by(8) {
            pages.data.put_word(offset, rng.word());
        }
        pages.set_tail(start);
        Self { reader, pages, messages, tail: start, tails: HashSet::from([start]), recent: vec![start], corrupt: None }
    }

    fn publish(&mut self, tail: u64) {
        self.tail = tail;
        self.tails.insert(tail);
        self.recent.push(tail);
        self.pages.set_tail(tail);
    }

    /// One change of the peer's pages. Mostly what an honest writer does, or life would be short.
    fn mutate(&mut self, rng: &mut Rng) {
        let granule = if self.messages { 8 } else { 1 };
        let room = CAPACITY - self.tail.wrapping_sub(self.reader.position()).min(CAPACITY);
        match rng.below(64) {
            0..28 => self.publish(self.tail.wrapping_add(rng.below(room + 1) / granule * granule)),
            28..44 => {
                let len = rng.one_of(&[0, 1, 8, 100, CAPACITY - 8, CAPACITY - 7, CAPACITY, u64::from(u32::MAX)]);
                let len = if rng.below(8) == 0 { len } else { rng.below(200) };
                let at = (self.reader.position() & (CAPACITY - 1) & !7) as usize;
                self.pages.data.put_word(at, len);
            }
            44..54 => self.pages.data.put_word(rng.below(CAPACITY / 8) as usize * 8, rng.word()),
            54 => self.pages.set(words::WRITER_STATE, lying_state(rng)),
            55 => {
                let tail = lie(rng, self.tail, &self.recent);
                self.publish(tail);
            }
            56 => self.pages.set(words::WANT_SPACE, rng.word()),
            // What the victim never looks at again, or never at all.
            57 => self.pages.set(rng.below(words::TAIL as u64 / 8) as usize * 8, rng.word()),
            58 => self.pages.set(words::RESERVED + rng.below(400) as usize * 8, rng.word()),
            _ => {
                let target = self.reader.position().wrapping_add(rng.below(2 * CAPACITY));
                self.pages.set(words::WANT_SPACE, words::armed(target));
            }
        }
    }

    /// What stands in the ring at `position` now.
    fn standing(&self, position: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let at = (position & (CAPACITY - 1)) as usize;
        let first = len.min(CAPACITY as usize - at);
        self.pages.data.copy_back(at, &mut bytes[..first]);
        self.pages.data.copy_back(0, &mut bytes[first..]);
        bytes
    }

    /// One call of the victim, and all that must hold of its answer.
    fn act(&mut self, rng: &mut Rng) {
        let before = self.reader.position();
        let mut buffer = vec![0; rng.one_of(&[0, 1, 8, 64, 511, 512, 4088, 4096, 6000])];
        let result = match rng.below(6) {
            0 => self.reader.look(rng.word()).map(|()| None),
            _ if self.messages => self.reader.recv(&mut buffer),
            _ => self.reader.read(&mut buffer),
        };
        let after = self.reader.position();
        let taken = after.wrapping_sub(before);
        match result {
            Ok(Some(len)) if self.messages => {
                let header = u64::from_le_bytes(self.standing(before, 8).try_into().unwrap());
                assert_eq!(
                    (header, taken),
                    (len as u64, record::span(len as u64)),
                    "R-20: another record than there is"
                );
                assert_eq!(buffer[..len], self.standing(before.wrapping_add(8), len), "R-22: other bytes");
            }
            Ok(Some(len)) => {
                assert_eq!(taken, len as u64);
                assert_eq!(buffer[..len], self.standing(before, len), "R-5: other bytes than there are");
            }
            Ok(None) | Err(Error::BufferTooSmall { .. }) => assert_eq!(taken, 0),
            Err(Error::Corrupt(corrupt)) => {
                assert!(CLAUSES.contains(&corrupt.clause), "{corrupt}");
                assert!(self.corrupt.is_none_or(|first| first == corrupt), "another story");
                assert_eq!(taken, 0);
                self.corrupt = Some(corrupt);
            }
            Err(error) => panic!("{error}"),
        }
        assert!(self.corrupt.is_none() || taken == 0, "a liar is listened to again");
        // Caught lying, a reader knows of nothing; else of what was once published, and never more than a ring.
        let known = after.wrapping_add(self.reader.available());
        assert!(self.reader.available() <= CAPACITY, "R-7: {} bytes in the ring", self.reader.available());
        assert!(self.tails.contains(&known) || known == after, "R-7: a tail that was never published");
        assert!(self.reader.rings() <= 1, "R-25");
    }
}

/// Lives until so many mutations were made; says how many lives it took.
fn readers_among_lies<R: Reading>(
    seed: u64,
    total: u64,
    messages: bool,
    mut make: impl FnMut(u64) -> (R, Pages),
) -> u64 {
    let mut rng = Rng(seed);
    let (mut made, mut lives) = (0, 0);
    while made < total {
        let start = start(&mut rng);
        let (reader, pages) = make(start);
        let mut life = Life::new(reader, pages, messages, start, &mut rng);
        lives += 1;
        let mut last_words = 8;
        while last_words > 0 && made < total {
            for _ in 0..=rng.below(4) {
                life.mutate(&mut rng);
                made += 1;
            }
            life.act(&mut rng);
            last_words -= u32::from(life.corrupt.is_some());
        }
    }
    lives
}

fn real_reader(messages: bool) -> impl FnMut(u64) -> (Reader<Mapped>, Pages) {
    move |start| {
        let (halves, pages) = victim(CAPACITY, messages, start);
        (halves.reader, pages)
    }
}

#[test]
fn r7_r9_r15_hostile_writer_of_a_stream_gets_nowhere() {
    let lives = within(HANG, || readers_among_lies(1, mutations(400_000, 4_000_000), false, real_reader(false)));
    assert!(lives > 100, "{lives} lives: the lies are not told");
}

#[test]
fn r20_r21_r22_hostile_writer_of_messages_gets_nowhere() {
    let lives = within(HANG, || readers_among_lies(2, mutations(400_000, 4_000_000), true, real_reader(true)));
    assert!(lives > 100, "{lives} lives: the lies are not told");
}

/// A reader as it must not be written: which mistake is its own business.
struct Naive {
    tail: tombolo_mem::MappedPeerWord,
    data: tombolo_mem::PeerBytes,
    head: u64,
    seen: u64,
    checks: bool,
    published: Option<tombolo_mem::MappedOwnWord>,
}

impl Reading for Naive {
    fn position(&self) -> u64 {
        self.head
    }

    fn available(&self) -> u64 {
        self.seen.wrapping_sub(self.head)
    }

    fn read(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error> {
        let first = self.tail.load_acquire().hint();
        if self.checks && first.wrapping_sub(self.head) > CAPACITY {
            return Err(Corrupt { clause: "R-7", what: "tail", found: first, bound: CAPACITY }.into());
        }
        self.seen = if self.checks {
            // A scheduler may always come between two looks; here it is asked to.
            std::thread::yield_now();
            self.tail.load_acquire().hint()
        } else {
            first
        };
        let len = (to.len() as u64).min(self.available()).min(CAPACITY) as usize;
        for (at, byte) in to[..len].iter_mut().enumerate() {
            let offset = self.head.wrapping_add(at as u64) & (CAPACITY - 1);
            self.data.copy_out(offset as usize, std::slice::from_mut(byte));
        }
        self.head = self.head.wrapping_add(len as u64);
        if let Some(head) = &self.published {
            head.store_release(self.head);
        }
        Ok((len > 0).then_some(len))
    }

    fn recv(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error> {
        self.read(to)
    }

    fn look(&mut self, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn rings(&mut self) -> u64 {
        0
    }
}

fn naive(start: u64) -> (Naive, Pages) {
    let (_, seen) = fresh(CAPACITY, 0, start);
    let (peer, peer_seen) = memory(CAPACITY);
    let (control, data) = peer.split(limits::CONTROL_LEN as usize);
    let (tail, their_data) = (peer_seen.word(words::TAIL), peer_seen.data(limits::CONTROL_LEN as usize));
    (
        Naive { tail, data: their_data, head: start, seen: start, checks: false, published: None },
        Pages { control, data, victim: seen },
    )
}

#[test]
#[should_panic(expected = "R-7")]
fn r7_canary_reader_that_trusts_the_tail_is_caught() {
    readers_among_lies(1, 100_000, false, naive);
}

/// A thread changes the peer's pages while readers look at them; a reader that was lied to is followed by a new one.
/// With `patterned`, the data stand still, so that every byte read can be told.
fn readers_against_a_thread<R: Reading>(
    mut make: impl FnMut(u64) -> R,
    mut pages: Pages,
    changes: u64,
    messages: bool,
    patterned: bool,
) {
    let pattern = |position: u64| ((position & (CAPACITY - 1)) * 5 / 3) as u8;
    let bytes: Vec<u8> = (0..CAPACITY).map(pattern).collect();
    pages.data.copy_in(0, &bytes);
    let (stop, made) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut reader = make(0);
    let thread = {
        let (stop, made) = (Arc::clone(&stop), Arc::clone(&made));
        std::thread::spawn(move || {
            let (mut rng, mut tail) = (Rng(7), 0u64);
            let (head, tail_word) = (pages.victim.word(words::HEAD), pages.control.word(words::TAIL));
            while !stop.load(Relaxed) {
                // Mostly as an honest writer does, so that there is something to read; often enough not.
                let unread = tail.wrapping_sub(head.load_relaxed().hint());
                tail = match CAPACITY.checked_sub(unread) {
                    Some(room) => tail.wrapping_add(rng.below(room + 1) & !7),
                    None => tail.wrapping_sub(unread),
                };
                tail_word.store_release(if rng.below(16) == 0 { lie(&mut rng, tail, &[]) } else { tail });
                if !patterned {
                    let len = if rng.below(2) == 0 { rng.below(200) } else { rng.word() };
                    pages.data.put_word(rng.below(CAPACITY / 8) as usize * 8, len);
                    if rng.below(512) == 0 {
                        pages.set(words::WRITER_STATE, lying_state(&mut rng));
                    }
                    pages.set(words::WANT_SPACE, rng.word());
                }
                made.fetch_add(1, Relaxed);
                if unread == CAPACITY {
                    std::thread::yield_now();
                }
            }
        })
    };
    let until = Instant::now() + HANG / 2;
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let (mut rng, mut met) = (Rng(8), 0);
        let mut buffer = [0; CAPACITY as usize];
        // Changes that nobody is awake to meet do not count.
        while made.load(Relaxed) < changes || met < changes / 100 {
            assert!(Instant::now() < until, "the thread does not get on");
            let before = reader.position();
            let len = rng.below(600) as usize;
            let result = match rng.below(32) {
                0 => reader.look(rng.below(5)).map(|()| None),
                _ if messages => reader.recv(&mut buffer),
                _ => reader.read(&mut buffer[..len]),
            };
            assert!(reader.available() <= CAPACITY, "R-9: {} bytes after a check", reader.available());
            assert!(reader.rings() <= 1, "R-25");
            match result {
                Ok(Some(n)) => {
                    met += 1;
                    let right = |at: &usize| buffer[*at] == pattern(before.wrapping_add(*at as u64));
                    assert!(!patterned || messages || (0..n).all(|at| right(&at)), "R-5: other bytes than there are");
                }
                Err(Error::Corrupt(_)) => {
                    met += 1;
                    reader = make(before);
                }
                _ => std::thread::yield_now(),
            }
        }
    }));
    stop.store(true, Relaxed);
    thread.join().unwrap();
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// Readers one after the other over the same two segments.
fn readers_over(messages: bool) -> (impl FnMut(u64) -> Reader<Mapped>, Pages) {
    let ((own, own_seen), (peer, peer_seen)) = (memory(CAPACITY), memory(CAPACITY));
    let (own, _) = own.split(limits::CONTROL_LEN as usize);
    let (control, data) = peer.split(limits::CONTROL_LEN as usize);
    let make = move |start| {
        Reader::new(ReaderParts {
            carrier: PeerCarrier::new(peer_seen.word(words::TAIL), peer_seen.data(limits::CONTROL_LEN as usize)),
            head: own.word(words::HEAD),
            want_data: own.word(words::WANT_DATA),
            state: own.word(words::READER_STATE),
            want_space: peer_seen.word(words::WANT_SPACE),
            writer_state: peer_seen.word(words::WRITER_STATE),
            start,
            messages,
            ordering: Ordering::Fences,
        })
    };
    (make, Pages { control, data, victim: own_seen })
}

#[test]
fn r5_r7_r9_stream_that_a_thread_lies_about_is_right_or_corrupt() {
    let changes = mutations(1_000_000, 10_000_000);
    let (make, pages) = readers_over(false);
    within(HANG, move || readers_against_a_thread(make, pages, changes, false, true));
    let (make, pages) = readers_over(false);
    within(HANG, move || readers_against_a_thread(make, pages, changes, false, false));
}

#[test]
fn r9_r20_r21_records_that_a_thread_changes_stay_in_bounds() {
    let changes = mutations(1_000_000, 10_000_000);
    let (make, pages) = readers_over(true);
    within(HANG, move || readers_against_a_thread(make, pages, changes, true, false));
}

#[test]
#[should_panic(expected = "R-9")]
fn r9_canary_reader_that_loads_the_tail_again_is_caught() {
    let (peer, peer_seen) = memory(CAPACITY);
    let ((own, own_seen), (control, data)) = (memory(CAPACITY), peer.split(limits::CONTROL_LEN as usize));
    let (own, _) = own.split(limits::CONTROL_LEN as usize);
    let make = move |head| {
        own.word(words::HEAD).store_release(head);
        let (tail, data) = (peer_seen.word(words::TAIL), peer_seen.data(limits::CONTROL_LEN as usize));
        Naive { tail, data, head, seen: head, checks: true, published: Some(own.word(words::HEAD)) }
    };
    readers_against_a_thread(make, Pages { control, data, victim: own_seen }, u64::MAX, false, true);
}

/// What a writer that is being lied to can be asked.
trait Writing {
    fn position(&self) -> u64;
    fn in_flight(&self) -> u64;
    /// Publishes something; says how much of `bytes`, or in message mode all or nothing.
    fn put(&mut self, bytes: &[u8], how: u64) -> Result<Option<usize>, Error>;
    /// Everything else that looks at the peer's words; says whether the ring is another one now.
    fn look(&mut self, what: u64) -> Result<bool, Error>;
    fn rings(&mut self) -> u64;
}

/// The real one; in message mode or not.
struct RealWriter(Writer<Mapped>, bool);

impl Writing for RealWriter {
    fn position(&self) -> u64 {
        self.0.position()
    }

    fn in_flight(&self) -> u64 {
        self.0.in_flight()
    }

    fn put(&mut self, bytes: &[u8], how: u64) -> Result<Option<usize>, Error> {
        if how % 4 == 0 {
            let Some((first, second)) = self.0.reserve(bytes.len())? else { return Ok(None) };
            first.copy_from_slice(&bytes[..first.len()]);
            second.copy_from_slice(&bytes[first.len()..]);
            return self.0.commit(bytes.len()).map(|()| Some(bytes.len()));
        }
        if self.1 { self.0.send(bytes).map(|sent| sent.map(|()| bytes.len())) } else { self.0.write(bytes) }
    }

    fn look(&mut self, what: u64) -> Result<bool, Error> {
        let writer = &mut self.0;
        match what % 8 {
            0 => writer.reader_closed().map(drop)?,
            1 => writer.flush(),
            2 => writer.set_flush_policy(FlushPolicy::Batch { bytes: what % 999, time: Duration::from_secs(1) }),
            3 => {
                let (mut unread, from) = (Vec::new(), writer.position().wrapping_sub(what % (2 * CAPACITY)));
                let _ = writer.unread_from(from, &mut unread);
                assert!(unread.len() as u64 <= 2 * CAPACITY, "two rings at most");
            }
            4 if writer.can_offer()? => drop(writer.announce()),
            5 if writer.reader_ready()? => {
                // Whatever the peer says between the question and the deed.
                let _ = writer.reader_closed();
                writer.switch_to(next_ring(CAPACITY, 1).0);
                return Ok(true);
            }
            _ => {
                writer.arm(1 + what % CAPACITY);
                writer.before_sleep();
                writer.ready(1 + what % CAPACITY)?;
            }
        }
        Ok(false)
    }

    fn rings(&mut self) -> u64 {
        u64::from(self.0.take_ring())
    }
}

/// One change of the pages of a hostile reader, mostly what an honest one does.
fn mutate_reader(pages: &mut Pages, head: &mut u64, recent: &mut Vec<u64>, rng: &mut Rng) {
    let tail = pages.victim.word(words::TAIL).load_relaxed().hint();
    match rng.below(64) {
        0..40 => *head = head.wrapping_add(rng.below(tail.wrapping_sub(*head).min(CAPACITY) + 1)),
        40 => *head = lie(rng, *head, recent),
        41 | 42 => return pages.set(words::READER_STATE, lying_state(rng)),
        43 => return pages.set(words::WANT_DATA, rng.word()),
        44 => return pages.set(rng.below(words::TAIL as u64 / 8) as usize * 8, rng.word()),
        45 => return pages.set(words::READER_STATE, State { phase: Phase::Open, ready: 1, current: 0 }.encode()),
        _ => return pages.set(words::WANT_DATA, words::armed(tail.wrapping_add(rng.below(2 * CAPACITY)))),
    }
    recent.push(*head);
    pages.set(words::HEAD, *head);
}

/// As [`readers_among_lies`], for the other half.
fn writers_among_lies<W: Writing>(
    seed: u64,
    total: u64,
    messages: bool,
    mut make: impl FnMut(u64) -> (W, Pages),
) -> u64 {
    let mut rng = Rng(seed);
    let (mut made, mut lives) = (0, 0);
    let (mut before, mut after) = ([0; CAPACITY as usize], [0; CAPACITY as usize]);
    while made < total {
        let start = start(&mut rng);
        let (mut writer, mut pages) = make(start);
        let (mut head, mut recent, mut moved, mut last_words) = (start, vec![start], false, 8);
        pages.set(words::HEAD, start);
        pages.set(words::READER_STATE, State::OPEN.encode());
        let ring = pages.victim.data(limits::CONTROL_LEN as usize);
        lives += 1;
        while last_words > 0 && made < total {
            for _ in 0..=rng.below(4) {
                mutate_reader(&mut pages, &mut head, &mut recent, &mut rng);
                made += 1;
            }
            let tail = writer.position();
            ring.copy_out(0, &mut before);
            let len = rng.one_of(&[0, 1, 8, 64, 511, 1000, 4088, 4096, 6000]);
            let bytes: Vec<u8> = (0..len).map(|at| (rng.0 >> (at % 8)) as u8 ^ at as u8).collect();
            let result = match rng.below(6) {
                0 => writer.look(rng.word()).map(|switched| {
                    moved |= switched;
                    None
                }),
                _ => writer.put(&bytes, rng.word()),
            };
            ring.copy_out(0, &mut after);
            let published = writer.position().wrapping_sub(tail);
            assert!(moved || writer.in_flight() <= CAPACITY, "R-8: {} bytes in flight", writer.in_flight());
            let at = |position: u64| (position & (CAPACITY - 1)) as usize;
            // What was not handed back is as it was; what is new is what was written.
            let head_seen = writer.position().wrapping_sub(writer.in_flight());
            let kept = if moved { 0 } else { tail.wrapping_sub(head_seen).min(CAPACITY) };
            for position in (0..kept).map(|back| tail.wrapping_sub(back + 1)) {
                assert_eq!(before[at(position)], after[at(position)], "R-4: unread bytes overwritten");
            }
            match result {
                Ok(Some(n)) => {
                    let (skip, span) = if messages { (8, record::span(n as u64)) } else { (0, n as u64) };
                    assert_eq!(published, span);
                    let there =
                        |(index, byte): (usize, &u8)| after[at(tail.wrapping_add(skip + index as u64))] == *byte;
                    assert!(moved || bytes[..n].iter().enumerate().all(there), "R-5: other bytes than written");
                }
                Ok(None) | Err(Error::TooLarge { .. }) => assert_eq!(published, 0),
                Err(Error::Closed) => last_words -= 1,
                Err(Error::Corrupt(corrupt)) => {
                    assert!(CLAUSES.contains(&corrupt.clause) && published == 0, "{corrupt}");
                    last_words -= 1;
                }
                Err(error) => panic!("{error}"),
            }
            assert!(writer.rings() <= 1, "R-25");
        }
    }
    lives
}

fn real_writer(messages: bool) -> impl FnMut(u64) -> (RealWriter, Pages) {
    move |start| {
        let (halves, pages) = victim(CAPACITY, messages, start);
        (RealWriter(halves.writer, messages), pages)
    }
}

#[test]
fn r4_r8_r15_hostile_reader_of_a_stream_gets_nowhere() {
    let lives = within(HANG, || writers_among_lies(3, mutations(200_000, 2_000_000), false, real_writer(false)));
    assert!(lives > 100, "{lives} lives: the lies are not told");
}

#[test]
fn r4_r8_r15_hostile_reader_of_messages_gets_nowhere() {
    let lives = within(HANG, || writers_among_lies(4, mutations(200_000, 2_000_000), true, real_writer(true)));
    assert!(lives > 100, "{lives} lives: the lies are not told");
}

/// A writer that believes every head.
struct NaiveWriter {
    own: Writer<Mapped>,
    head: tombolo_mem::MappedPeerWord,
    tail: u64,
    seen: u64,
}

impl Writing for NaiveWriter {
    fn position(&self) -> u64 {
        self.tail
    }

    fn in_flight(&self) -> u64 {
        self.tail.wrapping_sub(self.seen)
    }

    fn put(&mut self, bytes: &[u8], _: u64) -> Result<Option<usize>, Error> {
        self.seen = self.head.load_acquire().hint();
        let room = CAPACITY.saturating_sub(self.in_flight());
        let written = self.own.write(&bytes[..(bytes.len() as u64).min(room) as usize]);
        let n = written.ok().flatten().unwrap_or(0);
        self.tail = self.own.position();
        Ok((n > 0).then_some(n))
    }

    fn look(&mut self, _: u64) -> Result<bool, Error> {
        Ok(false)
    }

    fn rings(&mut self) -> u64 {
        0
    }
}

#[test]
#[should_panic(expected = "R-8")]
fn r8_canary_writer_that_trusts_the_head_is_caught() {
    writers_among_lies(3, 100_000, false, |start| {
        let ((own, own_seen), (peer, peer_seen)) = (fresh(CAPACITY, 0, start), memory(CAPACITY));
        let (control, data) = peer.split(limits::CONTROL_LEN as usize);
        control.write_header(&SegmentHeader::new(CAPACITY, 0, start, Features::NONE, 2).encode());
        let mode = Mode { messages: false, ordering: Ordering::Fences };
        let own = halves(own, &peer_seen, mode).unwrap().0.writer;
        let writer = NaiveWriter { own, head: peer_seen.word(words::HEAD), tail: start, seen: start };
        (writer, Pages { control, data, victim: own_seen })
    });
}

#[test]
fn r4_r8_r9_heads_that_a_thread_lies_about_keep_the_ring_in_bounds() {
    let changes = mutations(1_000_000, 10_000_000);
    within(HANG, move || {
        let mut rng = Rng(11);
        let made = Arc::new(AtomicU64::new(0));
        while made.load(Relaxed) < changes {
            let messages = rng.below(2) == 0;
            let (mut writer, mut pages) = real_writer(messages)(0);
            let stop = Arc::new(AtomicBool::new(false));
            let thread = {
                let (stop, made, mut rng) = (Arc::clone(&stop), Arc::clone(&made), rng.clone());
                std::thread::spawn(move || {
                    let (mut head, mut recent) = (0, vec![]);
                    pages.set(words::READER_STATE, State::OPEN.encode());
                    while !stop.load(Relaxed) {
                        mutate_reader(&mut pages, &mut head, &mut recent, &mut rng);
                        recent.truncate(64);
                        made.fetch_add(1, Relaxed);
                    }
                })
            };
            let mut errors = 0;
            while errors < 10 && made.load(Relaxed) < changes {
                let bytes = [7; 600];
                let len = rng.below(600) as usize;
                match writer.put(&bytes[..len], rng.word()) {
                    Ok(_) => assert!(writer.in_flight() <= CAPACITY, "R-8"),
                    Err(Error::Closed | Error::Corrupt(_)) => errors += 1,
                    Err(error) => panic!("{error}"),
                }
                assert!(writer.rings() <= 1, "R-25");
                std::thread::yield_now();
            }
            stop.store(true, Relaxed);
            thread.join().unwrap();
        }
    });
}

/// A sleep in which the peer does something, and then rings for nothing, as often as it can.
struct Storm<'a> {
    meddle: Box<dyn FnMut() + 'a>,
    rung: u64,
    slept: u64,
}

impl Sleeper for Storm<'_> {
    type Error = Error;

    fn ring(&mut self) {
        self.rung += 1;
    }

    fn drain(&mut self) {}

    fn barrier(&mut self) {}

    fn sleep(&mut self, _: Deadline) -> Result<Woken, Error> {
        self.slept += 1;
        (self.meddle)();
        Ok(Woken::Rung)
    }

    fn may_spin(&mut self) -> bool {
        self.slept % 2 == 0
    }
}

#[test]
fn r12_r25_wait_among_lies_and_false_rings_ends_at_its_deadline() {
    within(HANG, || {
        let (mut rng, mut timed_out) = (Rng(5), 0);
        for round in 0..mutations(400, 10_000) {
            let start = start(&mut rng);
            let (mut halves, pages) = victim(CAPACITY, false, start);
            pages.set_tail(start);
            let truthful = round % 2 == 0;
            let mut meddling = rng.clone();
            rng.word();
            let meddle = Box::new(move || match meddling.below(4) {
                0 => pages.set(words::WANT_SPACE, meddling.word()),
                1 => pages.set(words::WANT_DATA, meddling.word()),
                2 if !truthful => pages.set(words::WRITER_STATE, lying_state(&mut meddling)),
                3 if !truthful && meddling.below(64) == 0 => pages.set_tail(meddling.word()),
                _ => {}
            });
            let mut storm = Storm { meddle, rung: 0, slept: 0 };
            let deadline = Deadline::after(Duration::from_millis(1));
            let waited = wait(&mut halves.reader, &mut storm, &mut Spin::default(), 1, deadline);
            assert!(storm.rung <= storm.slept + 2, "R-25: {} rings in {} sleeps", storm.rung, storm.slept);
            match waited {
                Ok(Waited::TimedOut) => timed_out += 1,
                Ok(Waited::Ready) | Err(Error::Corrupt(_)) => assert!(!truthful, "{waited:?}"),
                other => panic!("{other:?}"),
            }
        }
        assert!(timed_out > 0);
    });
}

#[test]
fn m1_m2_m3_m4_h1_header_of_any_bytes_is_refused_or_right() {
    let mut rng = Rng(6);
    for messages in [false, true] {
        let (segment, seen) = memory(CAPACITY);
        let (control, _) = segment.split(limits::CONTROL_LEN as usize);
        let (mut refused, mut taken) = (0, 0);
        for _ in 0..2000 {
            let mut header = SegmentHeader::new(CAPACITY, 0, rng.below(100), Features::NONE, 2).encode();
            for _ in 0..rng.below(3) {
                header[rng.below(0x80) as usize] ^= 1 << rng.below(8);
            }
            control.write_header(&header);
            let own = fresh(CAPACITY, 0, 0).0;
            match halves(own, &seen, Mode { messages, ordering: Ordering::Fences }) {
                Ok((halves, header)) => {
                    assert_eq!((halves.reader.capacity(), halves.reader.position()), (CAPACITY, header.start));
                    assert!(!messages || header.start % 8 == 0, "M-4");
                    taken += 1;
                }
                Err(corrupt) => {
                    assert!(["M-1", "M-2", "M-3", "M-4", "H-1"].contains(&corrupt.clause), "{corrupt}");
                    refused += 1;
                }
            }
        }
        assert!(refused > 100 && taken > 100, "{refused} refused, {taken} taken");
    }
}

#[test]
fn m2_segment_smaller_than_any_ring_is_refused() {
    let (segment, fd) = tombolo_mem::create_sealed("tombolo-test", 4096).unwrap();
    let seen = tombolo_mem::PeerSegment::map(std::os::fd::AsFd::as_fd(&fd), 4096).unwrap();
    let mode = Mode { messages: false, ordering: Ordering::Fences };
    let corrupt = halves(fresh(CAPACITY, 0, 0).0, &seen, mode).unwrap_err();
    assert_eq!((corrupt.clause, corrupt.found), ("M-2", 4096));
    drop(segment);
}

#[test]
fn m8_header_that_changes_later_changes_nothing() {
    let (mut halves, mut pages) = victim(CAPACITY, false, 40);
    for word in 0..words::TAIL / 8 {
        pages.set(word * 8, u64::MAX);
    }
    pages.data.copy_in(40, b"as agreed");
    pages.set_tail(49);
    let mut buffer = [0; 100];
    assert_eq!(halves.reader.read(&mut buffer), Ok(Some(9)));
    assert_eq!(&buffer[..9], b"as agreed");
}

#[test]
fn r2_r3_peer_that_has_said_nothing_yet_is_not_held_to_have_lied() {
    let start = 77 * 8;
    let ((a, a_seen), (b, b_seen)) = (fresh(CAPACITY, 0, start), fresh(CAPACITY, 0, start));
    let mode = Mode { messages: true, ordering: Ordering::Fences };
    let (mut a, _) = halves(a, &b_seen, mode).unwrap();
    // The peer has offered its segment and not yet begun: its tail is there, its head means nothing.
    assert_eq!(a.reader.recv(&mut [0; 8]), Ok(None));
    assert_eq!(a.writer.send(&[1; 4088]), Ok(Some(())));
    assert_eq!(a.writer.send(&[1; 8]), Ok(None), "full, and nobody has read anything");
    let (mut b, _) = halves(b, &a_seen, mode).unwrap();
    assert_eq!(a.writer.send(&[1; 8]), Ok(None));
    assert_eq!(b.reader.recv(&mut [0; 4088]), Ok(Some(4088)));
    assert_eq!(a.writer.send(&[1; 8]), Ok(Some(())));
}

#[test]
fn r15_phase_that_goes_back_is_corrupt() {
    let (mut halves, pages) = victim(CAPACITY, false, 0);
    pages.set_writer_state(Phase::Open);
    pages.set(words::READER_STATE, State::OPEN.encode());
    assert_eq!((halves.reader.finished(), halves.writer.reader_closed()), (Ok(None), Ok(false)));
    pages.set_writer_state(Phase::Fresh);
    pages.set(words::READER_STATE, State { phase: Phase::Fresh, ready: 0, current: 0 }.encode());
    let clause = |error| match error {
        Error::Corrupt(corrupt) => corrupt.clause,
        other => panic!("{other}"),
    };
    assert_eq!(halves.reader.finished().map_err(clause), Err("R-15"));
    assert_eq!(halves.writer.reader_closed().map_err(clause), Err("R-15"));
    assert_eq!(halves.writer.write(b"x").map_err(clause), Err("R-15"), "and stays so");
}

#[test]
fn h3_h5_reader_that_takes_its_readiness_back_is_corrupt() {
    let (mut halves, pages) = victim(CAPACITY, false, 0);
    let say = |ready| pages.set(words::READER_STATE, State { phase: Phase::Open, ready, current: 0 }.encode());
    say(0);
    assert_eq!(halves.writer.announce(), 1);
    assert_eq!(halves.writer.reader_ready(), Ok(false));
    say(1);
    assert_eq!(halves.writer.reader_ready(), Ok(true));
    say(0);
    assert!(matches!(halves.writer.write(b"x"), Err(Error::Corrupt(corrupt)) if corrupt.clause == "H-5"));
    // It was ready when it mattered: going on is safe, and no panic.
    halves.writer.switch_to(next_ring(CAPACITY, 1).0);
}

#[test]
fn h5_writer_that_is_out_of_turn_is_corrupt() {
    for (ready, current) in [(2, 0), (1, 1), (0, 1), (2, 1), (u16::MAX, 0), (0, u16::MAX)] {
        let (mut halves, pages) = victim(CAPACITY, false, 0);
        pages.set(words::WRITER_STATE, State { phase: Phase::Open, ready, current }.encode());
        let announced = halves.reader.announced();
        assert!(
            matches!(announced, Err(Error::Corrupt(corrupt)) if corrupt.clause == "H-5"),
            "{ready} {current}: {announced:?}"
        );
    }
    let (mut halves, pages) = victim(CAPACITY, false, 0);
    pages.set(words::WRITER_STATE, State { phase: Phase::Open, ready: 1, current: 0 }.encode());
    assert_eq!(halves.reader.announced(), Ok(Some(1)));
    let early = halves.reader.prepare(2, next_ring(CAPACITY, 2).1);
    assert!(matches!(early, Err(Error::Corrupt(corrupt)) if corrupt.clause == "H-5"), "{early:?}");
}

/// Memory whose tail grows by a word every so many looks: a writer that keeps its reader company for ever.
#[derive(Debug)]
enum Dripping {}

#[derive(Debug, Default)]
struct Drip(Arc<AtomicU64>);

const LOOKS_A_DROP: u64 = 500;

impl Mem for Dripping {
    type OwnWord = Drip;
    type PeerWord = Drip;
    type OwnData = Zeros;
    type PeerData = Zeros;

    fn fence() {}

    fn light_fence() {}

    fn pause() {}
}

impl OwnWord for Drip {
    fn store_release(&self, _: u64) {}

    fn store_relaxed(&self, _: u64) {}

    fn load(&self) -> u64 {
        0
    }
}

impl PeerWord for Drip {
    fn load_acquire(&self) -> Untrusted<u64> {
        Untrusted::new(8 + self.0.fetch_add(1, Relaxed) / LOOKS_A_DROP * 8)
    }

    fn load_relaxed(&self) -> Untrusted<u64> {
        Untrusted::new(0)
    }
}

/// Data that are a header again and again.
#[derive(Debug)]
struct Zeros;

impl PeerData for Zeros {
    fn len(&self) -> usize {
        1 << 20
    }

    fn copy_out(&self, _: usize, to: &mut [u8]) {
        to.fill(0);
        to[..2].copy_from_slice(&60_000u16.to_le_bytes());
    }

    fn prefetch(&self, _: usize, _: usize) {}
}

impl OwnData for Zeros {
    fn len(&self) -> usize {
        1 << 20
    }

    fn copy_in(&mut self, _: usize, _: &[u8]) {}

    fn copy_back(&self, _: usize, _: &mut [u8]) {}
}

#[test]
fn r23_record_that_drips_in_holds_a_call_up_for_a_bounded_time() {
    let looks = Arc::new(AtomicU64::new(0));
    let mut reader = Reader::<Dripping>::new(ReaderParts {
        carrier: PeerCarrier::new(Drip(Arc::clone(&looks)), Zeros),
        head: Drip::default(),
        want_data: Drip::default(),
        state: Drip::default(),
        want_space: Drip::default(),
        writer_state: Drip::default(),
        start: 0,
        messages: true,
        ordering: Ordering::Fences,
    });
    assert_eq!(reader.recv(&mut vec![0; 60_000]), Ok(None));
    assert!(looks.load(Relaxed) < 2000, "{looks:?} looks in one call");
}

#[test]
fn r9_bytes_peeked_at_are_gone_once_their_writer_was_caught() {
    for messages in [false, true] {
        let (mut halves, mut pages) = victim(CAPACITY, messages, 0);
        pages.put_header(0, 100);
        pages.set_tail(112);
        assert!(halves.reader.peek().unwrap().is_some());
        pages.set_tail(1 << 40);
        assert!(halves.reader.refresh().is_err());
        halves.reader.consume(1);
        assert_eq!((halves.reader.position(), halves.reader.available()), (0, 0));
        assert!(halves.reader.read(&mut [0; 8]).is_err());
    }
}

/// The clause and the value that were found wrong.
fn found<T: std::fmt::Debug>(result: Result<T, Error>) -> (&'static str, u64) {
    match result {
        Err(Error::Corrupt(corrupt)) => (corrupt.clause, corrupt.found),
        other => panic!("{other:?}"),
    }
}

#[test]
fn r7_tail_that_goes_back_or_runs_away_is_corrupt() {
    for start in [0, u64::MAX - 150] {
        for lie in [99, CAPACITY + 41, 39, 1 << 62] {
            let (mut halves, pages) = victim(CAPACITY, false, start);
            pages.set_tail(start.wrapping_add(100));
            assert_eq!(halves.reader.read(&mut [0; 40]), Ok(Some(40)));
            pages.set_tail(start.wrapping_add(lie));
            assert_eq!(found(halves.reader.refresh()), ("R-7", start.wrapping_add(lie)));
            assert_eq!(found(halves.reader.read(&mut [0; 40])), ("R-7", start.wrapping_add(lie)), "and stays so");
        }
    }
}

#[test]
fn r8_head_that_goes_back_or_runs_ahead_is_corrupt() {
    for start in [0, u64::MAX - 5000] {
        for lie in [1999, 4097 + 2000, 1 << 62] {
            let (mut halves, pages) = victim(CAPACITY, false, start);
            pages.set(words::READER_STATE, State::OPEN.encode());
            assert_eq!(halves.writer.write(&[0; 4096]), Ok(Some(4096)));
            pages.set(words::HEAD, start.wrapping_add(2000));
            assert_eq!(halves.writer.write(&[0; 3000]), Ok(Some(2000)));
            pages.set(words::HEAD, start.wrapping_add(lie));
            assert_eq!(found(halves.writer.write(b"x")), ("R-8", start.wrapping_add(lie)));
            pages.set(words::HEAD, start.wrapping_add(4096));
            assert_eq!(found(halves.writer.write(b"x")), ("R-8", start.wrapping_add(lie)), "and stays so");
        }
    }
}

#[test]
fn r20_r21_header_that_cannot_be_is_corrupt_and_the_longest_is_not() {
    let ask = |header: u64, tail: u64| {
        let (mut halves, mut pages) = victim(CAPACITY, true, 0);
        pages.data.put_word(0, header);
        pages.set_tail(tail);
        halves.reader.recv(&mut [0; CAPACITY as usize])
    };
    assert_eq!(ask(4088, 4096), Ok(Some(4088)));
    assert_eq!(ask(4088, 4088), Ok(None), "not whole yet");
    assert_eq!(found(ask(4089, 4096)), ("R-21", 4089));
    assert_eq!(found(ask(u32::MAX.into(), 8)), ("R-21", u32::MAX.into()), "at once, not when it is whole");
    assert_eq!(found(ask(1 << 32 | 8, 16)), ("R-20", 1 << 32 | 8));
    assert_eq!(found(ask(8, 12)), ("R-20", 12));
}
