// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A writer that the processes of its end use in turns.

use tombolo_layout::{
    limits::RECORD_ALIGN,
    private::{Half, Record},
    record,
    state::{Phase, State},
};
use tombolo_mem::{Mem, OwnWord};

use super::Writer;
use crate::{
    Corrupt, Counters, Error,
    private::{check_fits, check_half, check_ring, set_counters},
};

impl<M: Mem> Writer<M> {
    /// Ends this process's turn: looks for a sleeping reader and says what the next process must know. Ring if
    /// [`take_ring`](Self::take_ring) says so, and only then let the lock go. What was reserved and not committed is
    /// forgotten.
    pub fn save(&mut self) -> Record {
        self.flush();
        Record {
            half: Half::Writer,
            state: self.state,
            start: self.start,
            position: self.tail,
            peer_position: self.head_seen,
            bound: self.floor,
            rung: self.ringer.rung,
            peer_state: self.reader,
            ring: self.state.current,
            told: 0,
            counters: self.counters().listed(),
        }
    }

    /// What was counted.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters {
            bytes: self.tail.wrapping_sub(self.start),
            messages: self.records,
            notifications_sent: self.ringer.sent,
            notifications_suppressed: self.ringer.suppressed,
            ..self.waits.counters()
        }
    }

    /// Begins this process's turn where the one that made `record` ended its own.
    ///
    /// # Errors
    /// [`Error::ForeignRecord`] where it is of another half or pipe, [`Error::Elsewhere`] where the pipe has moved to a
    /// ring that this process has not mapped. Then nothing has changed here.
    pub fn load(&mut self, record: &Record) -> Result<(), Error> {
        check_half(record, Half::Writer, self.start)?;
        check_ring(record.ring, self.state.current)?;
        check_fits(record.position.wrapping_sub(record.bound), self.carrier.capacity)?;
        self.state = record.state;
        self.tail = record.position;
        self.head_seen = record.peer_position;
        self.floor = record.bound;
        self.ringer.rung = record.rung;
        self.reader = record.peer_state;
        self.reader_word = record.peer_state.encode();
        self.records = set_counters(&record.counters, &mut self.ringer, &mut self.waits);
        self.unflushed = 0;
        let ended = self.state.phase != Phase::Open || matches!(self.reader.phase, Phase::Closed | Phase::Aborted);
        self.alert = ended || self.broken.is_some();
        if self.floor == self.head_seen {
            self.previous = None;
        }
        self.limit = if self.broken.is_some() { self.tail } else { self.floor.wrapping_add(self.carrier.capacity) };
        Ok(())
    }

    /// Begins this process's turn where the one before died in the middle of its own, from what it left in the segment.
    /// Nothing that it published is lost or comes again. If it died within a record, the record can never be completed
    /// and the pipe is aborted: see [`is_finished`](Self::is_finished). Owes the reader a ring, for it may have died
    /// before it rang.
    ///
    /// # Errors
    /// [`Error::Elsewhere`] as [`load`](Self::load), [`Error::Corrupt`] where the reader's words are impossible.
    pub fn rebuild(&mut self) -> Result<(), Error> {
        let state = State::decode(self.state_word.load()).expect("an own word, which no peer can write");
        check_ring(state.current, self.state.current)?;
        self.state = state;
        self.alert |= state.phase != Phase::Open;
        self.tail = self.carrier.tail.load();
        self.unflushed = 0;
        self.ringer.restart(self.tail, self.ordering);
        self.look_at_reader()?;
        self.look_at_head()?;
        let (unread, bound) = (self.tail.wrapping_sub(self.floor), self.carrier.capacity);
        if unread > bound {
            let what = "head further back than the ring reaches";
            return self.latch_error(Err(Corrupt { clause: "R-8", what, found: self.head_seen, bound }));
        }
        if self.messages && !self.ends_with_a_record() {
            self.abort();
        }
        Ok(())
    }

    /// Whether the last record is whole. Where the reader is, and where the ring began, a record begins; a reader
    /// that lies about it spoils what it gets.
    fn ends_with_a_record(&self) -> bool {
        let mut at = self.floor;
        while (self.tail.wrapping_sub(at) as i64) > 0 {
            let mut header = [0; RECORD_ALIGN as usize];
            self.carrier.copy_back(at, &mut header);
            let Some(len) = record::decode(header) else { return false };
            at = at.wrapping_add(record::span(len.into()));
        }
        at == self.tail
    }
}
