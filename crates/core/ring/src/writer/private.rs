// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets the processes of a fork group use a writer in turns.

use tombolo_layout::{
    private::{Half, Record},
    state::{Phase, State},
};
use tombolo_mem::{Mem, OwnWord};

use super::Writer;
use crate::{
    Corrupt, Error,
    private::{check_fits, check_half, check_ring, set_counters},
};

impl<M: Mem> Writer<M> {
    /// Ends this process's turn: checks for a sleeping reader, and returns the record that the next process needs. The
    /// caller must notify if [`take_notification`](Self::take_notification) returns true, and only then release the
    /// lock. A reservation that was not committed is forgotten.
    pub fn save(&mut self) -> Record {
        self.flow.flush();
        Record {
            half: Half::Writer,
            state: self.flow.state,
            start: self.flow.start,
            position: self.flow.tail,
            peer_position: self.flow.head_seen,
            bound: self.flow.floor,
            notified: self.flow.notifier.notified,
            peer_state: self.flow.reader,
            ring: self.flow.state.current,
            told: 0,
            counters: self.flow.counters().listed(),
        }
    }

    /// Begins this process's turn where the process that made `record` ended its own.
    ///
    /// # Errors
    /// [`Error::ForeignRecord`] if it belongs to another half or pipe, [`Error::Elsewhere`] if the pipe has moved to a
    /// ring that this process has not mapped. In both cases this writer is unchanged.
    pub fn load(&mut self, record: &Record) -> Result<(), Error> {
        check_half(record, Half::Writer, self.flow.start)?;
        check_ring(record.ring, self.flow.state.current)?;
        check_fits(record.position.wrapping_sub(record.bound), self.flow.ring.capacity)?;
        self.flow.state = record.state;
        self.flow.tail = record.position;
        self.flow.head_seen = record.peer_position;
        self.flow.floor = record.bound;
        self.flow.notifier.notified = record.notified;
        self.flow.reader = record.peer_state;
        self.flow.reader_word = record.peer_state.encode();
        self.flow.records = set_counters(&record.counters, &mut self.flow.notifier, &mut self.flow.waits);
        self.flow.unflushed = 0;
        let ended =
            self.flow.state.phase != Phase::Open || matches!(self.flow.reader.phase, Phase::Closed | Phase::Aborted);
        self.flow.alert = ended || self.flow.broken.is_some();
        if self.flow.floor == self.flow.head_seen {
            self.flow.previous = None;
        }
        self.flow.limit = if self.flow.broken.is_some() {
            self.flow.tail
        } else {
            self.flow.floor.wrapping_add(self.flow.ring.capacity)
        };
        Ok(())
    }

    /// Begins this process's turn after the previous process died in the middle of its own, from what that process left
    /// in the segment. Nothing that it published is lost or delivered twice. If it died within a record, the record can
    /// never be completed and the pipe is aborted: see [`is_finished`](Self::is_finished). Requests a notification of
    /// the reader, because the process may have died before it notified.
    ///
    /// # Errors
    /// [`Error::Elsewhere`] as [`load`](Self::load), [`Error::Corrupt`] if the reader's words are impossible.
    pub fn rebuild(&mut self) -> Result<(), Error> {
        let state = State::decode(self.flow.state_word.load()).expect("an own word, which no peer can write");
        check_ring(state.current, self.flow.state.current)?;
        self.flow.state = state;
        self.flow.alert |= state.phase != Phase::Open;
        self.flow.tail = self.flow.ring.tail.load();
        self.flow.unflushed = 0;
        self.flow.notifier.restart(self.flow.tail, self.flow.ordering);
        self.flow.look_at_reader()?;
        self.flow.look_at_head()?;
        let (unread, bound) = (self.flow.tail.wrapping_sub(self.flow.floor), self.flow.ring.capacity);
        if unread > bound {
            let what = "head further back than the ring reaches";
            return self.flow.latch_error(Err(Corrupt { clause: "R-8", what, found: self.flow.head_seen, bound }));
        }
        if self.flow.messages && !self.flow.ends_with_a_record() {
            self.abort();
        }
        Ok(())
    }
}
