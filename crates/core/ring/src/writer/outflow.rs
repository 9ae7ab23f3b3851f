// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a writer knows of its pipe, and the steps of the protocol: to publish, to check what the reader publishes, and to
//! notify it.

use std::time::{Duration, Instant};

use tombolo_layout::{
    limits::{self, RECORD_ALIGN},
    record,
    state::{Phase, State},
};
use tombolo_mem::{Mem, OwnData, OwnWord, PeerWord};

use super::{FlushPolicy, WriterParts};
use crate::{Corrupt, Counters, Error, FenceMode, notify::Notifier, ring::OwnRing, stores::Stores, wait::Waits};

/// Writes of more than this are published in steps, so that reader and writer copy at the same time.
pub(super) const STEPPED_FROM: u64 = 16 << 10;

/// Lines for the next write are asked for ahead of it where the last was no longer than this.
const PREPARE_UP_TO: u64 = 1 << 10;

/// What a writer knows, and the words that it shares with its reader.
#[derive(Debug)]
pub(crate) struct Outflow<M: Mem> {
    pub(crate) ring: OwnRing<M>,
    /// Position after the last byte published.
    pub(crate) tail: u64,
    /// The tail may grow to here without another look at the head.
    pub(crate) limit: u64,
    /// The head as last seen and checked.
    pub(crate) head_seen: u64,
    /// A record is no longer than this, whatever ring the pipe is in.
    pub(crate) longest: u64,
    /// Where the present ring begins: what lies before it is in the ring before (H-3).
    pub(crate) floor: u64,
    pub(crate) notifier: Notifier<M>,
    pub(crate) ordering: FenceMode,
    pub(crate) policy: FlushPolicy,
    pub(crate) unflushed: u64,
    pub(crate) unflushed_since: Option<Instant>,
    /// The reader's state word as last seen and checked.
    pub(crate) reader_word: u64,
    /// Every call takes the slow path: an endpoint closed, or the reader lied.
    pub(crate) alert: bool,
    pub(crate) reader: State,
    pub(crate) state: State,
    pub(crate) messages: bool,
    pub(crate) records: u64,
    pub(crate) start: u64,
    pub(crate) waits: Waits,
    pub(crate) previous: Option<OwnRing<M>>,
    pub(crate) stores: Stores,
    pub(crate) head: M::PeerWord,
    pub(crate) want_space: M::OwnWord,
    pub(crate) state_word: M::OwnWord,
    pub(crate) reader_state: M::PeerWord,
    /// What was found wrong for good: a lie, or that the memory is gone.
    pub(crate) broken: Option<Error>,
}

impl<M: Mem> Outflow<M> {
    /// What a writer at the beginning of its pipe knows. Publishes that it is open.
    pub(super) fn new(parts: WriterParts<M>) -> Self {
        let WriterParts { ring, start, .. } = parts;
        ring.tail.store_relaxed(start);
        // ORDER R-15: Release; pairs with the Acquire in Inflow::look_at_writer.
        parts.state.store_release(State::OPEN.encode());
        Self {
            tail: start,
            limit: start.wrapping_add(ring.capacity),
            stores: Stores::new(ring.data.can_bypass_caches(), start),
            ring,
            head_seen: start,
            longest: u64::MAX,
            floor: start,
            notifier: Notifier::new(parts.want_data, start),
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

    /// The next write is likely to be like the last: while the peer works on that, the lines are fetched back.
    #[inline]
    pub(super) fn prepare(&self, len: u64) {
        if len <= PREPARE_UP_TO {
            self.ring.prepare(self.tail, len);
        }
    }

    #[inline(never)]
    pub(super) fn write_in_steps(&mut self, bytes: &[u8]) -> Result<Option<usize>, Error> {
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
            self.stores.copy_in(&mut self.ring, self.tail, now);
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

    /// Whether a record of `len` bytes fits now.
    pub(super) fn make_room(&mut self, len: u64) -> Result<bool, Error> {
        self.check_open()?;
        let max = limits::message_max(self.ring.capacity).min(self.longest);
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
        let max = self.ring.capacity;
        if len > max {
            return Err(Error::TooLarge { len, max });
        }
        let fits = len <= self.room() || len <= self.look_at_head()?;
        self.waits.stalls += u64::from(!fits);
        Ok(fits)
    }

    /// Bytes that there is room for, as far as this endpoint knows.
    pub(crate) fn room(&self) -> u64 {
        self.limit.wrapping_sub(self.tail)
    }

    /// Bytes published and not yet read, as far as this endpoint knows.
    pub(crate) fn in_flight(&self) -> u64 {
        self.tail.wrapping_sub(self.head_seen)
    }

    /// Looks whether the reader sleeps and is to be woken for what was published.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if self.unflushed != 0 {
            self.notify();
        }
    }

    /// B1 to B4 of the wake protocol, the last three as the flush policy says.
    #[inline(always)]
    pub(crate) fn publish(&mut self, len: u64) {
        self.tail = self.tail.wrapping_add(len);
        // ORDER R-5: Release; pairs with the Acquire in Inflow::load_tail. Publishes the bytes up to `tail`.
        self.ring.tail.store_release(self.tail);
        match self.policy {
            FlushPolicy::Immediate => self.check_reader(),
            FlushPolicy::Batch { bytes, time } => self.gather(len, bytes, time),
        }
    }

    pub(super) fn notify(&mut self) {
        self.unflushed = 0;
        self.unflushed_since = None;
        self.check_reader();
    }

    #[inline]
    pub(super) fn check_reader(&mut self) {
        self.ordering.notifier_fence::<M>();
        self.notifier.check_peer(self.tail);
    }

    /// Apart from [`publish`](Self::publish), which is short and would have to save registers for this.
    #[inline(never)]
    pub(super) fn gather(&mut self, len: u64, bytes: u64, time: Duration) {
        self.unflushed += len;
        let since = *self.unflushed_since.get_or_insert_with(Instant::now);
        if self.unflushed >= bytes || since.elapsed() >= time {
            self.notify();
        }
    }

    /// Refuses to write to a reader who closed. The word stands on the line that `notify` looks at, so this is cheap.
    #[inline]
    pub(super) fn check_open(&mut self) -> Result<(), Error> {
        if self.is_open() { Ok(()) } else { self.check_open_slow() }
    }

    #[inline]
    pub(super) fn is_open(&self) -> bool {
        // ORDER R-15: Relaxed; the word stands for itself. A change takes the slow path, which loads it with Acquire.
        !self.alert && self.reader_state.load_relaxed().hint() == self.reader_word
    }

    #[cold]
    pub(super) fn check_open_slow(&mut self) -> Result<(), Error> {
        self.look_at_reader()?;
        match (self.state.phase, self.reader.phase) {
            (Phase::Open, Phase::Fresh | Phase::Open) => Ok(()),
            _ => Err(Error::Closed),
        }
    }

    pub(super) fn look_at_reader(&mut self) -> Result<(), Error> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        // ORDER R-15: Acquire; pairs with the Release in Inflow::publish_state.
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

    /// Loads the reader's position once, checks it, and says how much room there is.
    #[inline(never)]
    pub(crate) fn look_at_head(&mut self) -> Result<u64, Error> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        if self.reader.phase == Phase::Fresh {
            self.look_at_reader()?;
            if self.reader.phase == Phase::Fresh {
                return Ok(self.room()); // A reader that has not begun has no head.
            }
        }
        // ORDER R-5: Acquire; pairs with the Release in Inflow::publish_head. The bytes before it may be overwritten.
        let seen = self.head.load_acquire().check(|head| {
            if head.wrapping_sub(self.head_seen) > self.tail.wrapping_sub(self.head_seen) {
                Err(Corrupt { clause: "R-8", what: "head outside what was written", found: head, bound: self.tail })
            } else if self.messages && head % RECORD_ALIGN != 0 {
                Err(Corrupt { clause: "R-20", what: "head inside a word", found: head, bound: RECORD_ALIGN })
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
        self.limit = self.floor.wrapping_add(self.ring.capacity);
        Ok(self.limit.wrapping_sub(self.tail))
    }

    /// Remembers a lie: whoever lied once is not listened to again. Where the memory is gone it is none, for of what stands
    /// there the reader knows nothing (D-3).
    pub(super) fn latch_error<T>(&mut self, seen: Result<T, Corrupt>) -> Result<T, Error> {
        seen.map_err(|corrupt| {
            let error = if self.reader_state.is_lost() { Error::Revoked } else { corrupt.into() };
            self.broken = Some(error);
            self.alert = true;
            self.limit = self.tail;
            error
        })
    }

    /// Publishes `state` and rings, asleep or not.
    pub(crate) fn publish_state(&mut self, state: State) {
        self.state = state;
        // ORDER R-15: Release; pairs with the Acquire in Inflow::look_at_writer. The final tail is visible with it.
        self.state_word.store_release(state.encode());
        self.alert |= state.phase != Phase::Open;
        self.notifier.owe_after_fence(self.ordering);
    }

    pub(super) fn finish(&mut self, phase: Phase) {
        if self.state.phase == Phase::Open {
            self.publish_state(State { phase, ..self.state });
        }
    }

    /// Whether the reader has closed or given up, looked at afresh.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its state word is impossible.
    pub(crate) fn reader_closed(&mut self) -> Result<bool, Error> {
        self.look_at_reader()?;
        Ok(matches!(self.reader.phase, Phase::Closed | Phase::Aborted))
    }

    /// Whether the reader has read everything, looked at afresh.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its position is impossible.
    pub(crate) fn is_drained(&mut self) -> Result<bool, Error> {
        self.look_at_head()?;
        Ok(self.in_flight() == 0)
    }

    /// Whether the reader has declared itself ready for the ring that was announced (H-2).
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its state word is impossible.
    pub(crate) fn reader_ready(&mut self) -> Result<bool, Error> {
        self.look_at_reader()?;
        Ok(self.state.ready != self.state.current && self.reader.ready == self.state.ready)
    }

    /// What was counted.
    pub(super) fn counters(&self) -> Counters {
        Counters {
            bytes: self.tail.wrapping_sub(self.start),
            messages: self.records,
            notifications_sent: self.notifier.sent,
            notifications_suppressed: self.notifier.suppressed,
            ..self.waits.counters()
        }
    }

    /// Whether the last record is whole. A record begins where the reader is, and where the ring began; a reader that
    /// lies about it spoils what it gets.
    pub(super) fn ends_with_a_record(&self) -> bool {
        let mut at = self.floor;
        while (self.tail.wrapping_sub(at) as i64) > 0 {
            let mut header = [0; RECORD_ALIGN as usize];
            self.ring.copy_back(at, &mut header);
            let Some(len) = record::decode(header) else { return false };
            at = at.wrapping_add(record::span(len.into()));
        }
        at == self.tail
    }
}

/// How much of a large write is published at once: an eighth, between 8 and 64 KiB.
pub(super) fn step_for(len: u64) -> u64 {
    if len <= STEPPED_FROM { STEPPED_FROM } else { (len / 8).clamp(8 << 10, 64 << 10) & !(RECORD_ALIGN - 1) }
}
