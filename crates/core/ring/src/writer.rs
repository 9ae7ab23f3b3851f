// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The writing half of a pipe.

mod end;
mod handover;
mod private;

use std::{
    io::IoSlice,
    time::{Duration, Instant},
};

use tombolo_layout::{
    limits, record,
    state::{Phase, State},
    words,
};
use tombolo_mem::{Mem, OwnWord, PeerWord};

use crate::{
    Corrupt, Counters, Error, FenceMode,
    carrier::OwnCarrier,
    notify::Notifier,
    wait::{Side, Waits},
};

/// Writes of more than this are published in steps, so that reader and writer copy at the same time (R-23).
const STEPPED_FROM: u64 = 16 << 10;

/// Lines for the next write are asked for ahead of it where the last was no longer than this.
const PREPARE_UP_TO: u64 = 1 << 10;

/// When a write looks whether the reader sleeps (R-24).
///
/// A reader that is awake sees published bytes at once under either policy.
///
/// # Example
/// ```
/// # extern crate tombolo_ring as tombolo;
/// use std::time::Duration;
/// use tombolo::FlushPolicy;
///
/// // Wakes a sleeping reader for 64 KiB, or at the first write after 100 µs. Call `flush` when you stop writing.
/// let policy = FlushPolicy::Batch { bytes: 64 << 10, time: Duration::from_micros(100) };
/// assert_ne!(policy, FlushPolicy::default());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FlushPolicy {
    /// At every write.
    #[default]
    Immediate,
    /// At the first write after so many bytes or so much time, and always before the writer waits or closes. A writer
    /// that stops in between calls `flush`.
    Batch {
        /// Look after this many bytes.
        bytes: u64,
        /// Or after this much time.
        time: Duration,
    },
}

/// The words and data that a [`Writer`] is made of.
#[derive(Debug)]
pub struct WriterParts<M: Mem> {
    /// The first ring.
    pub carrier: OwnCarrier<M>,
    /// R-10. Own wait word.
    pub want_space: M::OwnWord,
    /// R-15. Own state.
    pub state: M::OwnWord,
    /// R-3. The reader's position.
    pub head: M::PeerWord,
    /// R-10. The reader's wait word.
    pub want_data: M::PeerWord,
    /// R-15. The reader's state.
    pub reader_state: M::PeerWord,
    /// Position of the first byte.
    pub start: u64,
    /// Records instead of a stream.
    pub messages: bool,
    /// Who fences.
    pub ordering: FenceMode,
}

/// The writing half of a pipe: one writer, who alone writes the ring, its tail, its wait word and its state.
///
/// No call blocks; where there is no room the answer is `Ok(None)`, and `wait` waits. After each call the doorbell
/// must be rung if [`take_ring`](Self::take_ring) says so.
#[derive(Debug)]
pub struct Writer<M: Mem> {
    carrier: OwnCarrier<M>,
    /// R-6. Position after the last byte published.
    tail: u64,
    /// The tail may grow to here without another look at the head.
    limit: u64,
    /// R-8. The head as last seen and checked.
    head_seen: u64,
    /// H-3. Where the present ring begins: what lies before it is in the ring before.
    floor: u64,
    ringer: Notifier<M>,
    ordering: FenceMode,
    policy: FlushPolicy,
    unflushed: u64,
    unflushed_since: Option<Instant>,
    /// The reader's state word as last seen and checked.
    reader_word: u64,
    /// Every call takes the slow path: an end closed, or the reader lied.
    alert: bool,
    reader: State,
    state: State,
    messages: bool,
    records: u64,
    start: u64,
    pub(crate) waits: Waits,
    previous: Option<OwnCarrier<M>>,
    head: M::PeerWord,
    want_space: M::OwnWord,
    state_word: M::OwnWord,
    reader_state: M::PeerWord,
    /// What was found wrong for good: a lie, or that the memory is gone.
    broken: Option<Error>,
}

impl<M: Mem> Writer<M> {
    /// A writer at the beginning of its pipe. Publishes that it is open.
    pub fn new(parts: WriterParts<M>) -> Self {
        let WriterParts { carrier, start, .. } = parts;
        carrier.tail.store_relaxed(start);
        // ORDER R-15: Release; pairs with the Acquire in Reader::look_at_writer.
        parts.state.store_release(State::OPEN.encode());
        Self {
            tail: start,
            limit: start.wrapping_add(carrier.capacity),
            carrier,
            head_seen: start,
            floor: start,
            ringer: Notifier::new(parts.want_data, start),
            ordering: parts.ordering,
            policy: FlushPolicy::Immediate,
            unflushed: 0,
            unflushed_since: None,
            reader_word: 0,
            alert: false,
            reader: State { phase: Phase::Fresh, ready: 0, current: 0 },
            state: State::OPEN,
            messages: parts.messages,
            records: 0,
            start,
            waits: Waits::default(),
            previous: None,
            head: parts.head,
            want_space: parts.want_space,
            state_word: parts.state,
            reader_state: parts.reader_state,
            broken: None,
        }
    }

    /// Writes as much of `bytes` as there is room for, at least one byte; `None` while there is no room.
    ///
    /// # Errors
    /// [`Error::Closed`] where the reader wants no more, [`Error::Corrupt`] where the reader's words are impossible.
    #[inline]
    pub fn write(&mut self, bytes: &[u8]) -> Result<Option<usize>, Error> {
        if self.write_at_once(bytes) {
            return Ok(Some(bytes.len()));
        }
        self.write_in_steps(bytes)
    }

    /// Writes all of `bytes` where that is short work: says whether. If not, [`write`](Self::write) knows more.
    #[inline(always)]
    pub fn write_at_once(&mut self, bytes: &[u8]) -> bool {
        let len = bytes.len() as u64;
        if len > self.limit.wrapping_sub(self.tail) || len > STEPPED_FROM || !self.is_open() {
            return false;
        }
        self.carrier.copy_in(self.tail, bytes);
        self.publish(len);
        self.prepare(len);
        self.records += 1;
        true
    }

    /// Writes of `parts` in order as much as there is room for; see [`write`](Self::write).
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        let mut written = 0;
        for part in parts.iter().filter(|part| !part.is_empty()) {
            match self.write(part) {
                Ok(Some(n)) => {
                    written += n;
                    if n < part.len() {
                        break;
                    }
                }
                Ok(None) if written == 0 => return Ok(None),
                Err(error) if written == 0 => return Err(error),
                Ok(None) | Err(_) => break,
            }
        }
        Ok(Some(written))
    }

    /// The next write is likely to be like the last: while the peer works on that, the lines are fetched back.
    #[inline]
    fn prepare(&self, len: u64) {
        if len <= PREPARE_UP_TO {
            self.carrier.prepare(self.tail, len);
        }
    }

    #[inline(never)]
    fn write_in_steps(&mut self, bytes: &[u8]) -> Result<Option<usize>, Error> {
        self.check_open()?;
        if bytes.is_empty() {
            return Ok(Some(0));
        }
        let step = step_for(bytes.len() as u64);
        let mut rest = bytes;
        while !rest.is_empty() {
            let want = step.min(rest.len() as u64);
            let mut room = self.limit.wrapping_sub(self.tail);
            if room < want {
                room = match self.look_at_head() {
                    // What was published before the lie is, and the lie is remembered.
                    Err(_) if rest.len() < bytes.len() => break,
                    looked => looked?,
                };
            }
            let take = want.min(room) as usize;
            if take == 0 {
                break;
            }
            let (now, later) = rest.split_at(take);
            self.carrier.copy_in(self.tail, now);
            self.publish(now.len() as u64);
            rest = later;
        }
        let written = bytes.len() - rest.len();
        if written == 0 {
            self.waits.stalls += 1;
            return Ok(None);
        }
        self.records += 1;
        Ok(Some(written))
    }

    /// Sends one record, whole or not at all; `None` while there is no room for it.
    ///
    /// # Errors
    /// [`Error::TooLarge`] where it can never fit; else as [`write`](Self::write).
    #[inline]
    pub fn send(&mut self, payload: &[u8]) -> Result<Option<()>, Error> {
        let span = record::span(payload.len() as u64);
        if span <= self.limit.wrapping_sub(self.tail) && span <= STEPPED_FROM {
            self.check_open()?;
            self.carrier.put_word(self.tail, payload.len() as u64);
            self.carrier.copy_in(self.tail.wrapping_add(limits::RECORD_ALIGN), payload);
            self.publish(span);
            self.prepare(span);
            self.records += 1;
            return Ok(Some(()));
        }
        self.send_vectored(&[IoSlice::new(payload)])
    }

    /// Sends the concatenation of `parts` as one record; see [`send`](Self::send).
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_vectored(&mut self, parts: &[IoSlice<'_>]) -> Result<Option<()>, Error> {
        let len = parts.iter().map(|part| part.len() as u64).sum::<u64>();
        if !self.make_room(len)? {
            return Ok(None);
        }
        let end = self.tail.wrapping_add(record::span(len));
        self.carrier.put_word(self.tail, len);
        let mut at = self.tail.wrapping_add(limits::RECORD_ALIGN);
        // Steps are multiples of eight, as every published position is in message mode (R-23).
        let step = step_for(len);
        for part in parts {
            for piece in part.chunks(step as usize) {
                self.carrier.copy_in(at, piece);
                at = at.wrapping_add(piece.len() as u64);
                let whole = (at.wrapping_sub(self.tail)) & !(limits::RECORD_ALIGN - 1);
                if whole >= step {
                    self.publish(whole);
                }
            }
        }
        self.publish(end.wrapping_sub(self.tail));
        self.records += 1;
        Ok(Some(()))
    }

    /// Whether a record of `len` bytes fits now.
    fn make_room(&mut self, len: u64) -> Result<bool, Error> {
        self.check_open()?;
        let max = self.message_max();
        if len > max {
            return Err(Error::TooLarge { len, max });
        }
        let fits = record::span(len) <= self.room() || record::span(len) <= self.look_at_head()?;
        self.waits.stalls += u64::from(!fits);
        Ok(fits)
    }

    /// For `reserve` and `commit`: whether so many bytes, with a record's header where there is one, fit now.
    pub(crate) fn has_room(&mut self, len: u64) -> Result<bool, Error> {
        if self.messages {
            return self.make_room(len);
        }
        self.check_open()?;
        let max = self.carrier.capacity;
        if len > max {
            return Err(Error::TooLarge { len, max });
        }
        let fits = len <= self.room() || len <= self.look_at_head()?;
        self.waits.stalls += u64::from(!fits);
        Ok(fits)
    }

    /// Bytes that there is room for, as far as this end knows.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.limit.wrapping_sub(self.tail)
    }

    pub(crate) fn is_messages(&self) -> bool {
        self.messages
    }

    pub(crate) fn carrier_mut(&mut self) -> (&mut OwnCarrier<M>, u64) {
        (&mut self.carrier, self.tail)
    }

    pub(crate) fn publish_call(&mut self, len: u64) {
        self.publish(len);
        self.records += 1;
    }

    /// R-21. Largest record that this ring takes, in bytes.
    #[must_use]
    pub fn message_max(&self) -> u64 {
        limits::message_max(self.carrier.capacity)
    }

    /// Bytes of the ring.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.carrier.capacity
    }

    /// Bytes published and not yet read, as far as this end knows.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.tail.wrapping_sub(self.head_seen)
    }

    /// Position after the last byte published.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// Sets when a sleeping reader is looked for.
    pub fn set_flush_policy(&mut self, policy: FlushPolicy) {
        self.flush();
        self.policy = policy;
    }

    /// Looks whether the reader sleeps and is to be woken for what was published (R-24).
    #[inline]
    pub fn flush(&mut self) {
        if self.unflushed != 0 {
            self.notify();
        }
    }

    /// Whether the doorbell must be rung now; asking answers it.
    #[inline]
    #[must_use]
    pub fn take_ring(&mut self) -> bool {
        self.ringer.take_pending()
    }

    /// B1 to B4 of the wake protocol, the last three as the flush policy says.
    #[inline]
    fn publish(&mut self, len: u64) {
        self.tail = self.tail.wrapping_add(len);
        // ORDER R-5: Release; pairs with the Acquire in Reader::look_at_tail. Publishes the bytes up to `tail`.
        self.carrier.tail.store_release(self.tail);
        match self.policy {
            FlushPolicy::Immediate => self.check_reader(),
            FlushPolicy::Batch { bytes, time } => self.gather(len, bytes, time),
        }
    }

    fn notify(&mut self) {
        self.unflushed = 0;
        self.unflushed_since = None;
        self.check_reader();
    }

    #[inline]
    fn check_reader(&mut self) {
        self.ordering.ringer_fence::<M>();
        self.ringer.check_peer(self.tail);
    }

    fn gather(&mut self, len: u64, bytes: u64, time: Duration) {
        self.unflushed += len;
        let since = *self.unflushed_since.get_or_insert_with(Instant::now);
        if self.unflushed >= bytes || since.elapsed() >= time {
            self.notify();
        }
    }

    /// Refuses to write to a reader who closed. The word stands on the line that `notify` looks at, so this is cheap.
    #[inline]
    fn check_open(&mut self) -> Result<(), Error> {
        if self.is_open() { Ok(()) } else { self.check_open_slow() }
    }

    #[inline]
    fn is_open(&self) -> bool {
        // ORDER R-15: Relaxed; the word stands for itself. A change takes the slow path, which loads it with Acquire.
        !self.alert && self.reader_state.load_relaxed().hint() == self.reader_word
    }

    #[cold]
    fn check_open_slow(&mut self) -> Result<(), Error> {
        self.look_at_reader()?;
        match (self.state.phase, self.reader.phase) {
            (Phase::Open, Phase::Fresh | Phase::Open) => Ok(()),
            _ => Err(Error::Closed),
        }
    }

    fn look_at_reader(&mut self) -> Result<(), Error> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        // ORDER R-15: Acquire; pairs with the Release in Reader::tell.
        let seen = self.reader_state.load_acquire().check(|word| {
            let bound = self.reader_word;
            match State::decode(word).filter(|state| self.reader.phase.may_become(state.phase) && state.current == 0) {
                Some(state) if state.ready == self.reader.ready || state.ready == self.state.ready => Ok((word, state)),
                Some(_) => Err(Corrupt { clause: "H-5", what: "reader's ring out of turn", found: word, bound }),
                None => Err(Corrupt { clause: "R-15", what: "reader state", found: word, bound }),
            }
        });
        let (word, state) = self.latch_error(seen)?;
        self.alert |= matches!(state.phase, Phase::Closed | Phase::Aborted);
        self.reader_word = word;
        self.reader = state;
        Ok(())
    }

    /// Loads the reader's position once, checks it (R-8), and says how much room there is.
    #[inline(never)]
    fn look_at_head(&mut self) -> Result<u64, Error> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        if self.reader.phase == Phase::Fresh {
            self.look_at_reader()?;
            if self.reader.phase == Phase::Fresh {
                return Ok(self.room()); // A reader that has not begun has no head (R-3).
            }
        }
        // ORDER R-5: Acquire; pairs with the Release in Reader::release. The bytes before it may be overwritten.
        let seen = self.head.load_acquire().check(|head| {
            if head.wrapping_sub(self.head_seen) > self.tail.wrapping_sub(self.head_seen) {
                Err(Corrupt { clause: "R-8", what: "head outside what was written", found: head, bound: self.tail })
            } else if self.messages && head % limits::RECORD_ALIGN != 0 {
                Err(Corrupt { clause: "R-20", what: "head inside a word", found: head, bound: limits::RECORD_ALIGN })
            } else {
                Ok(head)
            }
        });
        self.head_seen = self.latch_error(seen)?;
        let behind_floor = self.floor.wrapping_sub(self.head_seen) as i64 > 0;
        if !behind_floor {
            self.floor = self.head_seen;
            self.previous = None;
        }
        self.limit = self.floor.wrapping_add(self.carrier.capacity);
        Ok(self.limit.wrapping_sub(self.tail))
    }

    /// Remembers a lie: whoever lied once is not listened to again. Where the memory is gone it is none, for of what stands
    /// there the reader knows nothing (D-3).
    fn latch_error<T>(&mut self, seen: Result<T, Corrupt>) -> Result<T, Error> {
        seen.map_err(|corrupt| {
            let error = if self.reader_state.is_lost() { Error::Revoked } else { corrupt.into() };
            self.broken = Some(error);
            self.alert = true;
            self.limit = self.tail;
            error
        })
    }

    /// Publishes `state` and rings, asleep or not.
    fn publish_state(&mut self, state: State) {
        self.state = state;
        // ORDER R-15: Release; pairs with the Acquire in Reader::look_at_writer. The final tail is visible with it.
        self.state_word.store_release(state.encode());
        self.alert |= state.phase != Phase::Open;
        self.ringer.owe_after_fence(self.ordering);
    }
}

impl<M: Mem> Side for Writer<M> {
    type Mem = M;

    #[inline]
    fn ready(&mut self, need: u64) -> Result<bool, Error> {
        if self.room() >= need || self.look_at_head()? >= need {
            return Ok(true);
        }
        // A closed reader is something to tell the caller, and so is a ring to go on in.
        self.look_at_reader()?;
        Ok(matches!(self.reader.phase, Phase::Closed | Phase::Aborted) || self.reader_ready()?)
    }

    fn arm(&mut self, need: u64) {
        // Not for one byte: room for an eighth of the ring is worth a wake-up, and a drained ring always has it. Who waits
        // has less room than it needs, so after a switch (H-3) the target lies in the present ring.
        let room = need.max(self.carrier.capacity / 8);
        let target = self.tail.wrapping_add(room).wrapping_sub(self.carrier.capacity);
        // ORDER R-12: Relaxed; the fence (A2) in `wait` pairs with the ringer's (B2).
        self.want_space.store_relaxed(words::armed(target));
    }

    fn before_spin(&mut self) {
        self.flush();
    }

    fn before_sleep(&mut self) {
        self.ringer.check_peer(self.tail);
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

/// How much of a large write is published at once: an eighth, between 8 and 64 KiB.
fn step_for(len: u64) -> u64 {
    if len <= STEPPED_FROM { STEPPED_FROM } else { (len / 8).clamp(8 << 10, 64 << 10) & !(limits::RECORD_ALIGN - 1) }
}
