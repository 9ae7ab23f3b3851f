// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a reader knows of its pipe, and the steps of the protocol: to check what the writer publishes, to hand space back,
//! and to notify it.

use tombolo_layout::{
    limits::{self, RECORD_ALIGN},
    record,
    state::{Phase, State},
};
use tombolo_mem::{Mem, OwnWord, PeerWord};

use super::ReaderParts;
use crate::{
    Corrupt, Counters, Error, FenceMode, notify::Notifier, pause::pause, ring::PeerRing, slip::Slip, wait::Waits,
};

/// Space is handed back at the latest after so many bytes.
const RELEASE_AT_MOST: u64 = 64 << 10;
/// Lines are asked for ahead of the header only where no more than this was published.
const PREFETCH_UP_TO: u64 = 1 << 10;
/// A reader that finds this much does not hold back for more: its lines come many at a time already.
const SLIP_BELOW: u64 = 8 << 10;
/// A read that has this much waits a moment for the next step of a large write, rather than hand out a part of it.
const BULK: usize = 8 << 10;
/// More than this may come in steps.
pub(super) const SHORT_WORK: u64 = BULK as u64 - 1;
/// That moment, in pauses: what the writer takes to copy a step.
const MOMENT: u32 = 32;

/// Pauses after which what is still being written is left for later, unless so many bytes came: a writer that drips
/// them holds a call up no longer than these bytes at a slow pace.
pub(super) const PATIENCE: u32 = 512;
pub(super) const PATIENCE_FOR: usize = 4 << 10;

/// What a reader knows, and the words that it shares with its writer.
#[derive(Debug)]
pub(crate) struct Inflow<M: Mem> {
    pub(crate) ring: PeerRing<M>,
    /// Position of the next byte to be read.
    pub(crate) head: u64,
    /// The tail as last seen and checked.
    pub(crate) tail_seen: u64,
    /// The head as last published, and when to publish it next.
    pub(crate) released: u64,
    pub(crate) release_step: u64,
    pub(crate) notifier: Notifier<M>,
    pub(crate) slip: Slip,
    pub(crate) ordering: FenceMode,
    pub(crate) state: State,
    pub(crate) writer: State,
    pub(crate) messages: bool,
    pub(crate) records: u64,
    pub(crate) start: u64,
    /// Bytes of what was last found to be shown.
    pub(crate) peeked: Option<u64>,
    pub(crate) waits: Waits,
    pub(crate) next: Option<PeerRing<M>>,
    /// The newest announced ring that the caller knows of (H-1).
    pub(crate) told: u16,
    /// The writer may go on in a ring before it was taken here (H-9).
    pub(crate) follows_ahead: bool,
    pub(crate) head_word: M::OwnWord,
    pub(crate) want_data: M::OwnWord,
    pub(crate) state_word: M::OwnWord,
    pub(crate) writer_state: M::PeerWord,
    /// What was found wrong for good: a lie, or that the memory is gone.
    pub(crate) broken: Option<Error>,
}

impl<M: Mem> Inflow<M> {
    /// What a reader at the beginning of its pipe knows. Publishes that it is open.
    pub(super) fn new(parts: ReaderParts<M>) -> Self {
        let ReaderParts { ring, start, .. } = parts;
        parts.head.store_relaxed(start);
        // ORDER R-15: Release; pairs with the Acquire in Outflow::look_at_reader.
        parts.state.store_release(State::OPEN.encode());
        Self {
            head: start,
            tail_seen: start,
            released: start,
            release_step: release_step(ring.capacity),
            ring,
            notifier: Notifier::new(parts.want_space, start),
            slip: Slip::default(),
            ordering: parts.ordering,
            state: State::OPEN,
            writer: State { phase: Phase::Fresh, ready: 0, current: 0 },
            messages: parts.messages,
            records: 0,
            start,
            peeked: None,
            waits: Waits::default(),
            next: None,
            told: 0,
            follows_ahead: false,
            head_word: parts.head,
            want_data: parts.want_data,
            state_word: parts.state,
            writer_state: parts.writer_state,
            broken: None,
        }
    }

    #[inline(never)]
    pub(super) fn read_in_steps(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error> {
        if to.is_empty() {
            return Ok(Some(0));
        }
        let mut done = 0;
        match self.read_while_there(to, &mut done) {
            // What was read before a lie is right, and the lie is remembered.
            Err(error) if done == 0 => Err(error),
            Ok(()) if done == 0 => {
                self.release();
                self.waits.stalls += 1;
                Ok(None)
            }
            _ => {
                self.records += 1;
                Ok(Some(done))
            }
        }
    }

    #[inline]
    pub(super) fn read_while_there(&mut self, to: &mut [u8], done: &mut usize) -> Result<(), Error> {
        let (mut paid, mut patience) = (0, PATIENCE);
        while *done < to.len() {
            let want = (to.len() - *done) as u64;
            if self.available() < want {
                self.look_at_tail()?;
            }
            let take = want.min(self.available()).min(self.release_step) as usize;
            if take == 0 {
                if *done - paid >= PATIENCE_FOR {
                    (paid, patience) = (*done, PATIENCE);
                }
                let more = (*done >= BULK && self.await_step(&mut patience)?) || self.follow()?;
                if !more {
                    break;
                }
                continue;
            }
            self.ring.copy_out(self.head, &mut to[*done..*done + take]);
            self.advance(take as u64)?;
            *done += take;
        }
        Ok(())
    }

    /// Whether the next step of a large write comes in a moment. The space read so far is handed back first: the writer
    /// may need it for that step. A writer that drips uses up the `patience` of the call.
    pub(super) fn await_step(&mut self, patience: &mut u32) -> Result<bool, Error> {
        self.release();
        for _ in 0..MOMENT.min(*patience) {
            *patience -= 1;
            pause::<M>();
            self.load_tail()?;
            if self.available() != 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn look_for_more(&mut self) -> Result<bool, Error> {
        loop {
            self.look_at_tail()?;
            if self.available() != 0 {
                return Ok(true);
            }
            if !self.follow()? {
                self.release();
                self.waits.stalls += 1;
                return Ok(false);
            }
        }
    }

    /// Whether what was shown since the last call, or found wrong, came from memory that is still there (D-3).
    ///
    /// # Errors
    /// [`Error::Revoked`] where it was taken away.
    #[inline]
    pub(crate) fn check_memory(&mut self) -> Result<(), Error> {
        if self.ring.is_lost() { self.note_loss() } else { Ok(()) }
    }

    #[cold]
    pub(crate) fn note_loss(&mut self) -> Result<(), Error> {
        self.broken = Some(Error::Revoked);
        self.tail_seen = self.head;
        Err(Error::Revoked)
    }

    /// Bytes published and not yet read, as last seen.
    #[inline]
    pub(crate) fn available(&self) -> u64 {
        self.tail_seen.wrapping_sub(self.head)
    }

    pub(super) fn finish(&mut self, phase: Phase) {
        if self.state.phase == Phase::Open {
            // A writer that finds the end checks once more what was read.
            self.publish_head();
            self.publish_state(State { phase, ..self.state });
        }
    }

    /// Loads the writer's position once and checks it.
    #[inline]
    pub(crate) fn look_at_tail(&mut self) -> Result<(), Error> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        self.load_tail()?;
        let found = self.available();
        if found != 0 && found < SLIP_BELOW && self.slip.pause::<M>() {
            self.load_tail()?;
            self.slip.learn(self.available() > found, self.available() < self.ring.capacity / 4);
        }
        self.prefetch();
        Ok(())
    }

    #[inline]
    pub(super) fn prefetch(&self) {
        let available = self.available();
        if available != 0 && available <= PREFETCH_UP_TO {
            self.ring.prefetch(self.head, available);
        }
    }

    #[inline]
    pub(super) fn load_tail(&mut self) -> Result<(), Error> {
        // ORDER R-5: Acquire; pairs with the Release in Outflow::publish. The bytes before it may be read.
        let seen = self.ring.tail.load_acquire().check(|tail| {
            let ahead = tail.wrapping_sub(self.head);
            let bound = self.ring.capacity;
            if ahead > bound {
                Err(Corrupt { clause: "R-7", what: "tail more than a ring ahead of the head", found: tail, bound })
            } else if ahead < self.available() {
                Err(Corrupt { clause: "R-7", what: "tail went back", found: tail, bound: self.tail_seen })
            } else if self.messages && tail % RECORD_ALIGN != 0 {
                Err(Corrupt { clause: "R-20", what: "tail inside a word", found: tail, bound: RECORD_ALIGN })
            } else {
                Ok(tail)
            }
        });
        self.tail_seen = self.latch_error(seen)?;
        Ok(())
    }

    /// Goes beyond `len` bytes that were copied out or shown, unless they may be zeros that nobody wrote.
    #[inline]
    pub(crate) fn advance(&mut self, len: u64) -> Result<(), Error> {
        self.check_memory()?;
        self.head = self.head.wrapping_add(len);
        self.peeked = None;
        if self.head.wrapping_sub(self.released) >= self.release_step {
            self.release();
        }
        Ok(())
    }

    /// Hands space back: publishes the head and looks whether the writer sleeps for it.
    #[inline]
    pub(super) fn release(&mut self) {
        if self.head != self.released {
            self.publish_head();
            self.ordering.notifier_fence::<M>();
            self.notifier.check_peer(self.head);
        }
    }

    #[inline]
    pub(super) fn publish_head(&mut self) {
        self.released = self.head;
        // ORDER R-5: Release; pairs with the Acquire in Outflow::look_at_head. These bytes were copied out.
        self.head_word.store_release(self.head);
    }

    pub(super) fn look_at_writer(&mut self) -> Result<(), Error> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        // ORDER R-15: Acquire; pairs with the Release in Outflow::publish_state. The final tail is visible with it.
        let seen = self.writer_state.load_acquire().check(|word| {
            // What was in turn is so until it changes: this reader takes no step that the writer did not ask for.
            if word == self.writer.encode() { Ok(self.writer) } else { check_state(self, word) }
        });
        self.writer = self.latch_error(seen)?;
        Ok(())
    }

    /// Remembers a lie, unless the memory is gone, of which the writer knows nothing (D-3). Each look at a position goes
    /// through here: what is done about a lie stays out of it.
    #[inline(always)]
    pub(crate) fn latch_error<T>(&mut self, seen: Result<T, Corrupt>) -> Result<T, Error> {
        seen.map_err(|corrupt| note_lie(self, corrupt))
    }

    /// Publishes `state` and rings, asleep or not.
    pub(super) fn publish_state(&mut self, state: State) {
        self.state = state;
        // ORDER R-15: Release; pairs with the Acquire in Outflow::look_at_reader.
        self.state_word.store_release(state.encode());
        self.notifier.owe_after_fence(self.ordering);
    }

    /// Goes on in the next ring if the writer has, and everything in this one was read (H-4).
    pub(super) fn follow(&mut self) -> Result<bool, Error> {
        if self.next.is_none() {
            return Ok(false);
        }
        self.look_at_writer()?;
        if self.writer.current == self.generation() {
            return Ok(false);
        }
        self.load_tail()?;
        if self.available() != 0 {
            return Ok(true);
        }
        let Some(next) = self.next.take() else { return Ok(false) };
        self.enter(next);
        self.release();
        // What is there by now: who looks once must not find nothing where its writer has notified it.
        self.load_tail()?;
        Ok(true)
    }

    pub(super) fn enter(&mut self, next: PeerRing<M>) {
        self.release_step = release_step(next.capacity);
        self.ring = next;
    }

    /// Whether the writer's rings fit what this reader did: at most one move is outstanding, and none goes back (H-5).
    pub(super) fn in_turn(&self, state: State) -> bool {
        let own = self.state.ready;
        let further = own.wrapping_add(1);
        let forward = state.ready == self.writer.ready || state.ready == further;
        forward
            && match (state.ready.wrapping_sub(own), own.wrapping_sub(state.current)) {
                (0 | 1, 0) => self.writer.current != further,
                // Gone ahead to the ring that comes next (H-9).
                (1, u16::MAX) => self.follows_ahead,
                // Ready for the next ring, which the writer has not gone on to yet.
                (0, 1) => self.next.is_some() && self.writer.current != own,
                _ => false,
            }
    }

    /// The ring that is being read; the next one may be mapped already.
    pub(crate) fn generation(&self) -> u16 {
        self.state.ready.wrapping_sub(self.next.is_some().into())
    }

    /// Length of the next record once its header is there; its payload may still be on the way.
    #[inline]
    pub(crate) fn next_record(&mut self) -> Result<Option<u64>, Error> {
        if self.available() < RECORD_ALIGN && !self.look_for_more()? {
            return Ok(None);
        }
        let max = limits::message_max(self.ring.capacity);
        let len = self.ring.word(self.head).check(|word| match record::decode(word.to_le_bytes()) {
            Some(len) if u64::from(len) <= max => Ok(u64::from(len)),
            Some(_) => Err(Corrupt { clause: "R-21", what: "record longer than its ring", found: word, bound: max }),
            None => Err(Corrupt { clause: "R-20", what: "record header", found: word, bound: u64::from(u32::MAX) }),
        });
        self.latch_error(len).map(Some)
    }

    /// Whether what is left is the beginning of a record whose end will not come.
    pub(super) fn partial_record(&mut self) -> Result<bool, Error> {
        if !self.messages || self.available() < RECORD_ALIGN {
            return Ok(false);
        }
        Ok(self.next_record()?.is_some_and(|len| record::span(len) > self.available()))
    }

    /// What was counted.
    pub(super) fn counters(&self) -> Counters {
        Counters {
            bytes: self.head.wrapping_sub(self.start),
            messages: self.records,
            notifications_sent: self.notifier.sent,
            notifications_suppressed: self.notifier.suppressed,
            ..self.waits.counters()
        }
    }
}

/// A state word of the writer's that is another than before (H-5, R-15). Like [`note_lie`] it is apart from the looks, which find
/// this seldom and are many.
#[cold]
#[inline(never)]
fn check_state<M: Mem>(flow: &Inflow<M>, word: u64) -> Result<State, Corrupt> {
    let bound = flow.writer.encode();
    match State::decode(word).filter(|state| flow.writer.phase.may_become(state.phase)) {
        Some(state) if flow.in_turn(state) => Ok(state),
        Some(_) => Err(Corrupt { clause: "H-5", what: "writer's ring out of turn", found: word, bound }),
        None => Err(Corrupt { clause: "R-15", what: "writer state", found: word, bound }),
    }
}

#[cold]
#[inline(never)]
fn note_lie<M: Mem>(flow: &mut Inflow<M>, corrupt: Corrupt) -> Error {
    let lost = flow.ring.is_lost() || flow.writer_state.is_lost();
    let error = if lost { Error::Revoked } else { corrupt.into() };
    flow.broken = Some(error);
    flow.tail_seen = flow.head;
    error
}

fn release_step(capacity: u64) -> u64 {
    (capacity / 8).min(RELEASE_AT_MOST)
}
