// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Readers with a hostile writer.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use crate::{
    common::{Pages, Rng, fresh, memory, next_ring, victim, within},
    forged::{CAPACITY, CLAUSES, HANG, forge_position, forge_state, mutations, start},
};
use tombolo_layout::{limits, record, words};
use tombolo_mem::{Mapped, OwnData, OwnWord, PeerData, PeerWord};
use tombolo_ring::{Corrupt, Error, FenceMode, PeerRing, Reader, ReaderParts, Side};

/// Operations of a reader with a hostile writer: the real reader, and those that must be caught.
trait Reading {
    fn position(&self) -> u64;
    fn available(&self) -> u64;
    fn read(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error>;
    fn recv(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error>;
    /// Makes every other check of the peer's words.
    fn check_words(&mut self, what: u64) -> Result<(), Error>;
    fn notifications(&mut self) -> u64;
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

    fn check_words(&mut self, what: u64) -> Result<(), Error> {
        match what % 6 {
            0 => self.refresh().map(drop),
            1 => self.finished().map(drop),
            2 => self.handover().announced().map(drop),
            3 => self.need().map(drop),
            4 => {
                self.arm(1 + what % CAPACITY);
                self.before_sleep();
                self.ready(1 + what % CAPACITY).map(drop)
            }
            _ if self.handover().announced()? == Some(1) => self.handover().prepare(1, next_ring(CAPACITY, 1).1),
            _ => Ok(()),
        }
    }

    fn notifications(&mut self) -> u64 {
        u64::from(self.take_notification())
    }
}

/// One reader with a hostile writer, until it ends.
struct Run<R> {
    reader: R,
    pages: Pages,
    messages: bool,
    tail: u64,
    /// Every tail that was ever published; the reader may act on no other number.
    tails: HashSet<u64>,
    recent: Vec<u64>,
    corrupt: Option<Corrupt>,
}

impl<R: Reading> Run<R> {
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

    /// Makes one change of the peer's pages, mostly that of an honest writer, because the run would be short otherwise.
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
            54 => self.pages.set(words::WRITER_STATE, forge_state(rng)),
            55 => {
                let tail = forge_position(rng, self.tail, &self.recent);
                self.publish(tail);
            }
            56 => self.pages.set(words::WANT_SPACE, rng.word()),
            // Words that the victim never reads again, or never at all.
            57 => self.pages.set(rng.below(words::TAIL as u64 / 8) as usize * 8, rng.word()),
            58 => self.pages.set(words::RESERVED + rng.below(400) as usize * 8, rng.word()),
            _ => {
                let target = self.reader.position().wrapping_add(rng.below(2 * CAPACITY));
                self.pages.set(words::WANT_SPACE, words::armed(target));
            }
        }
    }

    /// Returns the bytes that are in the ring at `position` now.
    fn standing(&self, position: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let at = (position & (CAPACITY - 1)) as usize;
        let first = len.min(CAPACITY as usize - at);
        self.pages.data.copy_back(at, &mut bytes[..first]);
        self.pages.data.copy_back(0, &mut bytes[first..]);
        bytes
    }

    /// Makes one call of the victim, and checks everything that must hold of its answer.
    fn act(&mut self, rng: &mut Rng) {
        let before = self.reader.position();
        let mut buffer = vec![0; rng.one_of(&[0, 1, 8, 64, 511, 512, 4088, 4096, 6000])];
        let result = match rng.below(6) {
            0 => self.reader.check_words(rng.word()).map(|()| None),
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
        // After a violation the reader reports nothing. Otherwise it reports what was published once, and never more
        // than a ring.
        let known = after.wrapping_add(self.reader.available());
        assert!(self.reader.available() <= CAPACITY, "R-7: {} bytes in the ring", self.reader.available());
        assert!(self.tails.contains(&known) || known == after, "R-7: a tail that was never published");
        assert!(self.reader.notifications() <= 1, "R-25");
    }
}

/// Runs readers until so many mutations were made. Returns how many readers it took.
fn readers_among_forged_words<R: Reading>(
    seed: u64,
    total: u64,
    messages: bool,
    mut make: impl FnMut(u64) -> (R, Pages),
) -> u64 {
    let mut rng = Rng(seed);
    let (mut made, mut runs) = (0, 0);
    while made < total {
        let start = start(&mut rng);
        let (reader, pages) = make(start);
        let mut run = Run::new(reader, pages, messages, start, &mut rng);
        runs += 1;
        let mut last_words = 8;
        while last_words > 0 && made < total {
            for _ in 0..=rng.below(4) {
                run.mutate(&mut rng);
                made += 1;
            }
            run.act(&mut rng);
            last_words -= u32::from(run.corrupt.is_some());
        }
    }
    runs
}

fn real_reader(messages: bool) -> impl FnMut(u64) -> (Reader<Mapped>, Pages) {
    move |start| {
        let (halves, pages) = victim(CAPACITY, messages, start);
        (halves.reader, pages)
    }
}

#[test]
fn r7_r9_r15_hostile_writer_of_a_stream_gets_nowhere() {
    let runs = within(HANG, || readers_among_forged_words(1, mutations(400_000, 4_000_000), false, real_reader(false)));
    assert!(runs > 100, "{runs} runs: the peer forges too few words");
}

#[test]
fn r20_r21_r22_hostile_writer_of_messages_gets_nowhere() {
    let runs = within(HANG, || readers_among_forged_words(2, mutations(400_000, 4_000_000), true, real_reader(true)));
    assert!(runs > 100, "{runs} runs: the peer forges too few words");
}

/// A flawed reader; its fields decide on the flaw.
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
            // The scheduler may switch between two looks at any time; here it is asked to.
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

    fn check_words(&mut self, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn notifications(&mut self) -> u64 {
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
    readers_among_forged_words(1, 100_000, false, naive);
}

/// A thread changes the peer's pages while readers look at them; a reader that found a violation is followed by a new
/// one. With `patterned` the data do not change, so that every byte read can be checked.
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
                // Mostly as an honest writer does, so that there is something to read, and often enough not.
                let unread = tail.wrapping_sub(head.load_relaxed().hint());
                tail = match CAPACITY.checked_sub(unread) {
                    Some(room) => tail.wrapping_add(rng.below(room + 1) & !7),
                    None => tail.wrapping_sub(unread),
                };
                tail_word.store_release(if rng.below(16) == 0 { forge_position(&mut rng, tail, &[]) } else { tail });
                if !patterned {
                    let len = if rng.below(2) == 0 { rng.below(200) } else { rng.word() };
                    pages.data.put_word(rng.below(CAPACITY / 8) as usize * 8, len);
                    if rng.below(512) == 0 {
                        pages.set(words::WRITER_STATE, forge_state(&mut rng));
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
        // Changes made while no reader runs do not count.
        while made.load(Relaxed) < changes || met < changes / 100 {
            assert!(Instant::now() < until, "the thread does not get on");
            let before = reader.position();
            let len = rng.below(600) as usize;
            let result = match rng.below(32) {
                0 => reader.check_words(rng.below(5)).map(|()| None),
                _ if messages => reader.recv(&mut buffer),
                _ => reader.read(&mut buffer[..len]),
            };
            assert!(reader.available() <= CAPACITY, "R-9: {} bytes after a check", reader.available());
            assert!(reader.notifications() <= 1, "R-25");
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

/// Returns readers that follow one another over the same two segments.
fn readers_over(messages: bool) -> (impl FnMut(u64) -> Reader<Mapped>, Pages) {
    let ((own, own_seen), (peer, peer_seen)) = (memory(CAPACITY), memory(CAPACITY));
    let (own, _) = own.split(limits::CONTROL_LEN as usize);
    let (control, data) = peer.split(limits::CONTROL_LEN as usize);
    let make = move |start| {
        Reader::new(ReaderParts {
            ring: PeerRing::new(peer_seen.word(words::TAIL), peer_seen.data(limits::CONTROL_LEN as usize)),
            head: own.word(words::HEAD),
            want_data: own.word(words::WANT_DATA),
            state: own.word(words::READER_STATE),
            want_space: peer_seen.word(words::WANT_SPACE),
            writer_state: peer_seen.word(words::WRITER_STATE),
            start,
            messages,
            ordering: FenceMode::Fences,
        })
    };
    (make, Pages { control, data, victim: own_seen })
}

#[test]
fn r5_r7_r9_stream_whose_words_a_thread_forges_is_right_or_corrupt() {
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
