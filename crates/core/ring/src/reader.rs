// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The reading half of a pipe.

mod handover;
mod private;
mod records;

use std::io::IoSliceMut;

use tombolo_layout::{
    limits::{self, RECORD_ALIGN},
    record,
    state::{Phase, State},
    words,
};
use tombolo_mem::{Mem, OwnWord, PeerWord};

use crate::{
    Corrupt, Counters, Error, FenceMode,
    carrier::PeerCarrier,
    notify::Notifier,
    pause::pause,
    slip::Slip,
    wait::{Side, Waits},
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
const SHORT_WORK: u64 = BULK as u64 - 1;
/// That moment, in pauses: what the writer takes to copy a step.
const MOMENT: u32 = 32;

/// The words and data that a [`Reader`] is made of.
#[derive(Debug)]
pub struct ReaderParts<M: Mem> {
    /// The first ring.
    pub carrier: PeerCarrier<M>,
    /// Own position.
    pub head: M::OwnWord,
    /// Own wait word.
    pub want_data: M::OwnWord,
    /// Own state.
    pub state: M::OwnWord,
    /// The writer's wait word.
    pub want_space: M::PeerWord,
    /// The writer's state.
    pub writer_state: M::PeerWord,
    /// Position of the first byte.
    pub start: u64,
    /// Records instead of a stream.
    pub messages: bool,
    /// Who fences.
    pub ordering: FenceMode,
}

/// The reading half of a pipe: one reader, who alone writes the head, its wait word and its state.
///
/// No call blocks; where there is nothing the answer is `Ok(None)`, and `wait` waits. At the end of file, calls answer
/// `Ok(None)` too and [`finished`](Self::finished) tells. After each call the doorbell must be rung if
/// [`take_ring`](Self::take_ring) says so.
#[derive(Debug)]
pub struct Reader<M: Mem> {
    carrier: PeerCarrier<M>,
    /// Position of the next byte to be read.
    head: u64,
    /// The tail as last seen and checked.
    tail_seen: u64,
    /// The head as last published, and when to publish it next.
    released: u64,
    release_step: u64,
    ringer: Notifier<M>,
    slip: Slip,
    ordering: FenceMode,
    state: State,
    writer: State,
    messages: bool,
    records: u64,
    start: u64,
    /// Bytes of what was last found to be shown.
    peeked: Option<u64>,
    pub(crate) waits: Waits,
    next: Option<PeerCarrier<M>>,
    /// H-1. The newest announced ring that the caller knows of.
    told: u16,
    head_word: M::OwnWord,
    want_data: M::OwnWord,
    state_word: M::OwnWord,
    writer_state: M::PeerWord,
    /// What was found wrong for good: a lie, or that the memory is gone.
    broken: Option<Error>,
}

impl<M: Mem> Reader<M> {
    /// A reader at the beginning of its pipe. Publishes that it is open.
    pub fn new(parts: ReaderParts<M>) -> Self {
        let ReaderParts { carrier, start, .. } = parts;
        parts.head.store_relaxed(start);
        // ORDER R-15: Release; pairs with the Acquire in Writer::look_at_reader.
        parts.state.store_release(State::OPEN.encode());
        Self {
            head: start,
            tail_seen: start,
            released: start,
            release_step: release_step(carrier.capacity),
            carrier,
            ringer: Notifier::new(parts.want_space, start),
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
            head_word: parts.head,
            want_data: parts.want_data,
            state_word: parts.state,
            writer_state: parts.writer_state,
            broken: None,
        }
    }

    /// Reads what is there into `to`, at most as much as fits, at least one byte; `None` while there is nothing.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where the writer's words are impossible.
    #[inline]
    pub fn read(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error> {
        let len = to.len() as u64;
        if len <= self.available() && len <= self.release_step {
            self.carrier.copy_out(self.head, to);
            self.advance(len)?;
            self.records += 1;
            return Ok(Some(to.len()));
        }
        self.read_in_steps(to)
    }

    /// Reads what is there into `to`, all of that or nothing if `whole`, where that is short work: how many bytes. Of 0
    /// [`read`](Self::read) knows more: it may find some, or why there are none.
    #[inline]
    pub fn read_at_once(&mut self, to: &mut [u8], whole: bool) -> usize {
        let len = to.len() as u64;
        if len > SHORT_WORK.min(self.release_step) || (len > self.available() && self.look_at_tail().is_err()) {
            return 0;
        }
        let there = len.min(self.available());
        if there == 0 || (whole && there < len) {
            return 0;
        }
        self.carrier.copy_out(self.head, &mut to[..there as usize]);
        if self.advance(there).is_err() {
            return 0;
        }
        self.records += 1;
        there as usize
    }

    /// Reads into `parts` in order; see [`read`](Self::read).
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Error> {
        let mut done = 0;
        for part in parts.iter_mut().filter(|part| !part.is_empty()) {
            match self.read(part) {
                Ok(Some(n)) => {
                    done += n;
                    if n < part.len() {
                        break;
                    }
                }
                Ok(None) if done == 0 => return Ok(None),
                Err(error) if done == 0 => return Err(error),
                Ok(None) | Err(_) => break,
            }
        }
        Ok(Some(done))
    }

    #[inline(never)]
    fn read_in_steps(&mut self, to: &mut [u8]) -> Result<Option<usize>, Error> {
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
    fn read_while_there(&mut self, to: &mut [u8], done: &mut usize) -> Result<(), Error> {
        let (mut paid, mut patience) = (0, records::PATIENCE);
        while *done < to.len() {
            let want = (to.len() - *done) as u64;
            if self.available() < want {
                self.look_at_tail()?;
            }
            let take = want.min(self.available()).min(self.release_step) as usize;
            if take == 0 {
                if *done - paid >= records::PATIENCE_FOR {
                    (paid, patience) = (*done, records::PATIENCE);
                }
                let more = (*done >= BULK && self.await_step(&mut patience)?) || self.follow()?;
                if !more {
                    break;
                }
                continue;
            }
            self.carrier.copy_out(self.head, &mut to[*done..*done + take]);
            self.advance(take as u64)?;
            *done += take;
        }
        Ok(())
    }

    /// Whether the next step of a large write comes in a moment. The space read so far is handed back first: the writer
    /// may need it for that step. A writer that drips uses up the `patience` of the call.
    fn await_step(&mut self, patience: &mut u32) -> Result<bool, Error> {
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
    fn look_for_more(&mut self) -> Result<bool, Error> {
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

    /// D-3. Whether what was shown since the last call, or found wrong, came from memory that is still there.
    ///
    /// # Errors
    /// [`Error::Revoked`] where it was taken away.
    #[inline]
    pub fn check_memory(&mut self) -> Result<(), Error> {
        if self.carrier.is_lost() { self.note_loss() } else { Ok(()) }
    }

    #[cold]
    fn note_loss(&mut self) -> Result<(), Error> {
        self.broken = Some(Error::Revoked);
        self.tail_seen = self.head;
        Err(Error::Revoked)
    }

    /// For `peek`: whether there is something, and so something to show.
    pub(crate) fn find_peeked(&mut self) -> Result<bool, Error> {
        self.peeked = None;
        let len = if self.messages {
            let Some(len) = self.next_record()? else { return Ok(false) };
            if record::span(len) > self.available() {
                self.look_at_tail()?;
            }
            if record::span(len) > self.available() {
                return Ok(false);
            }
            len
        } else {
            if self.available() == 0 && !self.look_for_more()? {
                return Ok(false);
            }
            self.available()
        };
        self.peeked = Some(len);
        Ok(true)
    }

    /// What was last found: how many bytes to skip and to show.
    pub(crate) fn peeked_range(&self) -> Option<(u64, u64)> {
        self.peeked.map(|len| (if self.messages { RECORD_ALIGN } else { 0 }, len))
    }

    pub(crate) fn consume_peeked(&mut self, len: u64) {
        if self.broken.is_some() {
            return; // The writer was caught lying since; what it had there is nobody's any more.
        }
        let peeked = self.peeked.expect("consume after a peek that found something");
        let most = if self.messages { record::span(peeked) } else { peeked };
        assert!(len <= most, "{len} bytes handed back, {most} peeked at");
        let consumed = self.advance(if self.messages { most } else { len });
        self.records += u64::from(consumed.is_ok());
    }

    pub(crate) fn carrier(&self) -> (&PeerCarrier<M>, u64) {
        (&self.carrier, self.head)
    }

    /// Largest record that this ring takes, in bytes.
    #[must_use]
    pub fn message_max(&self) -> u64 {
        limits::message_max(self.carrier.capacity)
    }

    /// Bytes of the ring.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.carrier.capacity
    }

    /// Bytes published and not yet read, as last seen.
    #[inline]
    #[must_use]
    pub fn available(&self) -> u64 {
        self.tail_seen.wrapping_sub(self.head)
    }

    /// Position of the next byte to be read.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.head
    }

    /// Whether the doorbell must be rung now; asking answers it.
    #[inline]
    #[must_use]
    pub fn take_ring(&mut self) -> bool {
        self.ringer.take_pending()
    }

    /// Wants no more: the writer's next call fails.
    pub fn close(&mut self) {
        self.finish(Phase::Closed);
    }

    /// Gives up: like [`close`](Self::close), said differently.
    pub fn abort(&mut self) {
        self.finish(Phase::Aborted);
    }

    fn finish(&mut self, phase: Phase) {
        if self.state.phase == Phase::Open {
            // A writer that finds the end looks once more what was read.
            self.publish_head();
            self.publish_state(State { phase, ..self.state });
        }
    }

    /// What the writer's end looks like to one who has read everything: `None` while more may come, else whether
    /// it closed in order or gave up in the middle (also: in the middle of a record).
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its state word is impossible.
    pub fn finished(&mut self) -> Result<Option<Phase>, Error> {
        self.look_at_writer()?;
        if matches!(self.writer.phase, Phase::Fresh | Phase::Open) {
            return Ok(None);
        }
        // The final tail is visible with the state; only what is left decides.
        self.look_at_tail()?;
        if self.available() == 0 && self.follow()? {
            return Ok(None);
        }
        Ok(match (self.available(), self.partial_record()?) {
            (0, _) => Some(self.writer.phase),
            (_, true) => Some(Phase::Aborted),
            (_, false) => None,
        })
    }

    /// Whether the writer has closed or given up, looked at afresh; what it published before may still be there.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its state word is impossible.
    pub fn writer_closed(&mut self) -> Result<bool, Error> {
        self.look_at_writer()?;
        Ok(matches!(self.writer.phase, Phase::Closed | Phase::Aborted))
    }

    /// What was counted.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters {
            bytes: self.head.wrapping_sub(self.start),
            messages: self.records,
            notifications_sent: self.ringer.sent,
            notifications_suppressed: self.ringer.suppressed,
            ..self.waits.counters()
        }
    }

    /// Loads the tail again, whatever is cached, and says how many bytes there are.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where it is impossible.
    pub fn refresh(&mut self) -> Result<u64, Error> {
        self.look_at_tail()?;
        if self.available() == 0 {
            self.follow()?;
        }
        Ok(self.available())
    }

    /// Loads the writer's position once and checks it.
    #[inline]
    fn look_at_tail(&mut self) -> Result<(), Error> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        self.load_tail()?;
        let found = self.available();
        if found != 0 && found < SLIP_BELOW && self.slip.pause::<M>() {
            self.load_tail()?;
            self.slip.learn(self.available() > found, self.available() < self.carrier.capacity / 4);
        }
        self.prefetch();
        Ok(())
    }

    #[inline]
    fn prefetch(&self) {
        let available = self.available();
        if available != 0 && available <= PREFETCH_UP_TO {
            self.carrier.prefetch(self.head, available);
        }
    }

    #[inline]
    fn load_tail(&mut self) -> Result<(), Error> {
        // ORDER R-5: Acquire; pairs with the Release in Writer::publish. The bytes before it may be read.
        let seen = self.carrier.tail.load_acquire().check(|tail| {
            let ahead = tail.wrapping_sub(self.head);
            let bound = self.carrier.capacity;
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
    fn advance(&mut self, len: u64) -> Result<(), Error> {
        self.check_memory()?;
        self.head = self.head.wrapping_add(len);
        self.peeked = None;
        if self.head.wrapping_sub(self.released) >= self.release_step {
            self.release();
        }
        Ok(())
    }

    /// Hands back all that was read, now: for one who has the other pipe to wait on. Otherwise it is done in steps, and
    /// before this reader waits.
    #[inline]
    pub fn hand_back(&mut self) {
        self.release();
    }

    /// Hands space back: publishes the head and looks whether the writer sleeps for it.
    #[inline]
    fn release(&mut self) {
        if self.head != self.released {
            self.publish_head();
            self.ordering.ringer_fence::<M>();
            self.ringer.check_peer(self.head);
        }
    }

    #[inline]
    fn publish_head(&mut self) {
        self.released = self.head;
        // ORDER R-5: Release; pairs with the Acquire in Writer::look_at_head. These bytes were copied out.
        self.head_word.store_release(self.head);
    }

    fn look_at_writer(&mut self) -> Result<(), Error> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        // ORDER R-15: Acquire; pairs with the Release in Writer::tell. The final tail is visible with it.
        let seen = self.writer_state.load_acquire().check(|word| {
            let bound = self.writer.encode();
            match State::decode(word).filter(|state| self.writer.phase.may_become(state.phase)) {
                Some(state) if self.in_turn(state) => Ok(state),
                Some(_) => Err(Corrupt { clause: "H-5", what: "writer's ring out of turn", found: word, bound }),
                None => Err(Corrupt { clause: "R-15", what: "writer state", found: word, bound }),
            }
        });
        self.writer = self.latch_error(seen)?;
        Ok(())
    }

    /// Remembers a lie, unless the memory is gone, of which the writer knows nothing (D-3).
    fn latch_error<T>(&mut self, seen: Result<T, Corrupt>) -> Result<T, Error> {
        seen.map_err(|corrupt| {
            let lost = self.carrier.is_lost() || self.writer_state.is_lost();
            let error = if lost { Error::Revoked } else { corrupt.into() };
            self.broken = Some(error);
            self.tail_seen = self.head;
            error
        })
    }

    /// Publishes `state` and rings, asleep or not.
    fn publish_state(&mut self, state: State) {
        self.state = state;
        // ORDER R-15: Release; pairs with the Acquire in Writer::look_at_reader.
        self.state_word.store_release(state.encode());
        self.ringer.owe_after_fence(self.ordering);
    }
}

impl<M: Mem> Side for Reader<M> {
    type Mem = M;

    #[inline]
    fn ready(&mut self, need: u64) -> Result<bool, Error> {
        if self.available() >= need {
            return Ok(true);
        }
        if let Some(error) = self.broken {
            return Err(error);
        }
        self.load_tail()?;
        if self.available() >= need {
            self.prefetch();
            return Ok(true);
        }
        // The end, or a ring to follow to, is something to tell the caller.
        self.look_at_writer()?;
        let following = self.next.is_some() && self.writer.current == self.state.ready;
        let offered = self.writer.ready != self.told;
        Ok((following && self.follow()?) || offered || !matches!(self.writer.phase, Phase::Fresh | Phase::Open))
    }

    fn arm(&mut self, need: u64) {
        self.publish_head();
        // ORDER R-12: Relaxed; the fence (A2) in `wait` pairs with the ringer's (B2).
        self.want_data.store_relaxed(words::armed(self.head.wrapping_add(need)));
    }

    fn before_spin(&mut self) {
        self.release();
    }

    fn before_sleep(&mut self) {
        self.ringer.check_peer(self.head);
    }

    fn take_ring(&mut self) -> bool {
        self.ringer.take_pending()
    }

    fn ordering(&self) -> FenceMode {
        self.ordering
    }

    fn waits(&mut self) -> &mut Waits {
        &mut self.waits
    }

    fn counted(&self) -> Counters {
        self.counters()
    }
}

fn release_step(capacity: u64) -> u64 {
    (capacity / 8).min(RELEASE_AT_MOST)
}
