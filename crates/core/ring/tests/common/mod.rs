// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two endpoints in one process, each with the other's segment mapped read-only; or one endpoint, and the pages of a
//! hostile peer.
#![allow(dead_code)]

use std::{os::fd::AsFd, sync::mpsc, time::Duration};

use tombolo_layout::{
    Features, SegmentHeader, limits,
    state::{Phase, State},
    words,
};
use tombolo_mem::{Mapped, OwnBytes, OwnControl, OwnData, OwnSegment, OwnWord, PeerSegment, create_sealed};
use tombolo_ring::{FenceMode, Fresh, Halves, Mode, OwnRing, PeerRing, Reader, Writer, follow, halves};

/// The writer of one pipe and its reader; the other direction is dropped.
pub struct Pair {
    pub writer: Writer<Mapped>,
    pub reader: Reader<Mapped>,
}

/// Makes a pipe with a ring of `capacity` bytes, and fences on both sides.
pub fn pair(capacity: u64, messages: bool) -> Pair {
    pair_at(capacity, messages, 0)
}

/// As [`pair`]; the first byte has position `start`.
pub fn pair_at(capacity: u64, messages: bool, start: u64) -> Pair {
    let ((a_own, a_seen), (b_own, b_seen)) = (fresh(capacity, 0, start), fresh(capacity, 0, start));
    let mode = Mode { messages, ordering: FenceMode::Fences };
    let (a, _) = halves(a_own, &b_seen, mode).unwrap();
    let (b, _) = halves(b_own, &a_seen, mode).unwrap();
    Pair { writer: a.writer, reader: b.reader }
}

/// Allocates memory for a ring of `capacity` bytes. Returns the owner's mapping and the peer's.
pub fn memory(capacity: u64) -> (OwnSegment, PeerSegment) {
    let len = (limits::CONTROL_LEN + capacity) as usize;
    let (segment, fd) = create_sealed("tombolo-test", len).unwrap();
    (segment, PeerSegment::map(fd.as_fd(), len).unwrap())
}

/// Makes a segment with its header. Returns it as its owner has it and as the peer sees it.
pub fn fresh(capacity: u64, generation: u16, start: u64) -> (Fresh, PeerSegment) {
    let (segment, seen) = memory(capacity);
    (Fresh::new(segment, &SegmentHeader::new(capacity, generation, start, Features::NONE, 1)), seen)
}

/// Returns both views of the ring that a pipe moves to.
pub fn next_ring(capacity: u64, generation: u16) -> (OwnRing<Mapped>, PeerRing<Mapped>) {
    let (own, seen) = fresh(capacity, generation, 0);
    (own.into_ring(), follow(&seen, generation).unwrap().0)
}

/// The pages of a hostile peer: the test writes them at will, the victim maps them read-only.
pub struct Pages {
    pub control: OwnControl,
    pub data: OwnBytes,
    /// The victim's own pages, as the peer sees them.
    pub victim: PeerSegment,
}

impl Pages {
    pub fn set(&self, word: usize, value: u64) {
        self.control.word(word).store_release(value);
    }

    pub fn set_tail(&self, tail: u64) {
        self.set(words::TAIL, tail);
    }

    pub fn set_writer_state(&self, phase: Phase) {
        self.set(words::WRITER_STATE, State { phase, ready: 0, current: 0 }.encode());
    }

    /// Writes a record's header at `offset`. The caller writes its payload and the tail.
    pub fn put_header(&mut self, offset: usize, len: u64) {
        self.data.put_word(offset, len);
    }
}

/// Makes a victim with both halves, and the pages of its peer; both rings have `capacity` bytes and begin at `start`.
pub fn victim(capacity: u64, messages: bool, start: u64) -> (Halves, Pages) {
    let (own, seen) = fresh(capacity, 0, start);
    let (peer, peer_seen) = memory(capacity);
    let (control, data) = peer.split(limits::CONTROL_LEN as usize);
    control.write_header(&SegmentHeader::new(capacity, 0, start, Features::NONE, 2).encode());
    let (halves, _) = halves(own, &peer_seen, Mode { messages, ordering: FenceMode::Fences }).unwrap();
    (halves, Pages { control, data, victim: seen })
}

/// SplitMix64: small, seeded, the same everywhere.
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }

    pub fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// Runs `body` in a thread of its own, and panics if it does not end in time.
pub fn within<T: Send + 'static>(limit: Duration, body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, over) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let result = body();
        let _ = done.send(());
        result
    });
    match over.recv_timeout(limit) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("still running after {limit:?}: a hang"),
        // A panic of the body closed the channel; the join passes it on.
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        },
    }
}
