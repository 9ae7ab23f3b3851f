// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writers with a hostile reader.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::{
    common::{Pages, Rng, fresh, memory, next_ring, victim, within},
    forged::{CAPACITY, CLAUSES, HANG, forge_position, forge_state, mutations, start},
};
use tombolo_layout::{
    Features, SegmentHeader, limits, record,
    state::{Phase, State},
    words,
};
use tombolo_mem::{Mapped, PeerData, PeerWord};
use tombolo_ring::{Error, FenceMode, FlushPolicy, Mode, Side, Writer, halves};

/// Operations of a writer with a hostile reader.
trait Writing {
    fn position(&self) -> u64;
    fn in_flight(&self) -> u64;
    /// Publishes bytes. Returns how many of `bytes`; in message mode all or none.
    fn put(&mut self, bytes: &[u8], how: u64) -> Result<Option<usize>, Error>;
    /// Makes every other check of the peer's words. Returns whether the ring is another one now.
    fn check_words(&mut self, what: u64) -> Result<bool, Error>;
    fn notifications(&mut self) -> u64;
}

/// The real writer, in message mode or not.
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
            let Some((first, second)) = self.0.in_place().reserve(bytes.len())? else { return Ok(None) };
            first.copy_from_slice(&bytes[..first.len()]);
            second.copy_from_slice(&bytes[first.len()..]);
            return self.0.in_place().commit(bytes.len()).map(|()| Some(bytes.len()));
        }
        if self.1 { self.0.send(bytes).map(|sent| sent.map(|()| bytes.len())) } else { self.0.write(bytes) }
    }

    fn check_words(&mut self, what: u64) -> Result<bool, Error> {
        let writer = &mut self.0;
        match what % 8 {
            0 => writer.reader().is_closed().map(drop)?,
            1 => writer.flush(),
            2 => writer.set_flush_policy(FlushPolicy::Batch { bytes: what % 999, time: Duration::from_secs(1) }),
            3 => {
                let (mut unread, from) = (Vec::new(), writer.position().wrapping_sub(what % (2 * CAPACITY)));
                let _ = writer.handover().unread_from(from, &mut unread);
                assert!(unread.len() as u64 <= 2 * CAPACITY, "two rings at most");
            }
            4 if writer.handover().can_offer()? => drop(writer.handover().announce()),
            5 if writer.handover().reader_ready()? => {
                // Whatever the peer stores between the check and the move.
                let _ = writer.reader().is_closed();
                writer.handover().switch_to(next_ring(CAPACITY, 1).0);
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

    fn notifications(&mut self) -> u64 {
        u64::from(self.0.take_notification())
    }
}

/// Makes one change of the pages of a hostile reader, mostly that of an honest one.
fn mutate_reader(pages: &mut Pages, head: &mut u64, recent: &mut Vec<u64>, rng: &mut Rng) {
    let tail = pages.victim.word(words::TAIL).load_relaxed().hint();
    match rng.below(64) {
        0..40 => *head = head.wrapping_add(rng.below(tail.wrapping_sub(*head).min(CAPACITY) + 1)),
        40 => *head = forge_position(rng, *head, recent),
        41 | 42 => return pages.set(words::READER_STATE, forge_state(rng)),
        43 => return pages.set(words::WANT_DATA, rng.word()),
        44 => return pages.set(rng.below(words::TAIL as u64 / 8) as usize * 8, rng.word()),
        45 => return pages.set(words::READER_STATE, State { phase: Phase::Open, ready: 1, current: 0 }.encode()),
        _ => return pages.set(words::WANT_DATA, words::armed(tail.wrapping_add(rng.below(2 * CAPACITY)))),
    }
    recent.push(*head);
    pages.set(words::HEAD, *head);
}

/// As [`readers_among_forged_words`], for the writing half.
fn writers_among_forged_words<W: Writing>(
    seed: u64,
    total: u64,
    messages: bool,
    mut make: impl FnMut(u64) -> (W, Pages),
) -> u64 {
    let mut rng = Rng(seed);
    let (mut made, mut runs) = (0, 0);
    let (mut before, mut after) = ([0; CAPACITY as usize], [0; CAPACITY as usize]);
    while made < total {
        let start = start(&mut rng);
        let (mut writer, mut pages) = make(start);
        let (mut head, mut recent, mut moved, mut last_words) = (start, vec![start], false, 8);
        pages.set(words::HEAD, start);
        pages.set(words::READER_STATE, State::OPEN.encode());
        let ring = pages.victim.data(limits::CONTROL_LEN as usize);
        runs += 1;
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
                0 => writer.check_words(rng.word()).map(|switched| {
                    moved |= switched;
                    None
                }),
                _ => writer.put(&bytes, rng.word()),
            };
            ring.copy_out(0, &mut after);
            let published = writer.position().wrapping_sub(tail);
            assert!(moved || writer.in_flight() <= CAPACITY, "R-8: {} bytes in flight", writer.in_flight());
            let at = |position: u64| (position & (CAPACITY - 1)) as usize;
            // Bytes that were not handed back are unchanged, and new bytes are those that were written.
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
            assert!(writer.notifications() <= 1, "R-25");
        }
    }
    runs
}

fn real_writer(messages: bool) -> impl FnMut(u64) -> (RealWriter, Pages) {
    move |start| {
        let (halves, pages) = victim(CAPACITY, messages, start);
        (RealWriter(halves.writer, messages), pages)
    }
}

#[test]
fn r4_r8_r15_hostile_reader_of_a_stream_gets_nowhere() {
    let runs = within(HANG, || writers_among_forged_words(3, mutations(200_000, 2_000_000), false, real_writer(false)));
    assert!(runs > 100, "{runs} runs: the peer forges too few words");
}

#[test]
fn r4_r8_r15_hostile_reader_of_messages_gets_nowhere() {
    let runs = within(HANG, || writers_among_forged_words(4, mutations(200_000, 2_000_000), true, real_writer(true)));
    assert!(runs > 100, "{runs} runs: the peer forges too few words");
}

/// A writer that trusts every head.
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

    fn check_words(&mut self, _: u64) -> Result<bool, Error> {
        Ok(false)
    }

    fn notifications(&mut self) -> u64 {
        0
    }
}

#[test]
#[should_panic(expected = "R-8")]
fn r8_canary_writer_that_trusts_the_head_is_caught() {
    writers_among_forged_words(3, 100_000, false, |start| {
        let ((own, own_seen), (peer, peer_seen)) = (fresh(CAPACITY, 0, start), memory(CAPACITY));
        let (control, data) = peer.split(limits::CONTROL_LEN as usize);
        control.write_header(&SegmentHeader::new(CAPACITY, 0, start, Features::NONE, 2).encode());
        let mode = Mode { messages: false, ordering: FenceMode::Fences };
        let own = halves(own, &peer_seen, mode).unwrap().0.writer;
        let writer = NaiveWriter { own, head: peer_seen.word(words::HEAD), tail: start, seen: start };
        (writer, Pages { control, data, victim: own_seen })
    });
}

#[test]
fn r4_r8_r9_heads_that_a_thread_forges_keep_the_ring_in_bounds() {
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
                assert!(writer.notifications() <= 1, "R-25");
                std::thread::yield_now();
            }
            stop.store(true, Relaxed);
            thread.join().unwrap();
        }
    });
}
