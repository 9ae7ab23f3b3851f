// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A reader that the processes of its end use in turns.

use tombolo_layout::{
    private::{Half, Record},
    state::State,
};
use tombolo_mem::{Mem, OwnWord, PeerWord};

use super::Reader;
use crate::{
    Error,
    private::{check_fits, check_half, check_ring, set_counters},
};

impl<M: Mem> Reader<M> {
    /// Ends this process's turn: hands back what was read, looks for a sleeping writer and says what the next process
    /// must know. Ring if [`take_ring`](Self::take_ring) says so, and only then let the lock go. What was peeked at and
    /// not consumed comes again.
    pub fn save(&mut self) -> Record {
        self.peeked = None;
        self.release();
        Record {
            half: Half::Reader,
            state: self.state,
            start: self.start,
            position: self.head,
            peer_position: self.tail_seen,
            bound: self.released,
            rung: self.ringer.rung,
            peer_state: self.writer,
            ring: self.ring_number(),
            told: self.told,
            counters: self.counters().listed(),
        }
    }

    /// Begins this process's turn where the one that made `record` ended its own.
    ///
    /// # Errors
    /// [`Error::ForeignRecord`] where it is of another half or pipe, [`Error::Elsewhere`] where the pipe has moved to a
    /// ring that this process has not mapped. Then nothing has been read here.
    pub fn load(&mut self, record: &Record) -> Result<(), Error> {
        check_half(record, Half::Reader, self.start)?;
        check_ring(record.state.ready, self.state.ready)?;
        if record.ring == self.state.ready
            && let Some(next) = self.next.take()
        {
            self.enter(next);
        }
        check_ring(record.ring, self.ring_number())?;
        check_fits(record.peer_position.wrapping_sub(record.position), self.carrier.capacity)?;
        self.state = record.state;
        self.head = record.position;
        self.tail_seen = if self.broken.is_some() { self.head } else { record.peer_position };
        self.released = record.bound;
        self.ringer.rung = record.rung;
        self.writer = record.peer_state;
        self.told = record.told;
        self.records = set_counters(&record.counters, &mut self.ringer, &mut self.waits);
        self.peeked = None;
        Ok(())
    }

    /// Begins this process's turn where the one before died in the middle of its own, from what it left in the segment.
    /// What it had read and not handed back comes again. Owes the writer a ring, for it may have died before it rang.
    ///
    /// # Errors
    /// [`Error::Elsewhere`] as [`load`](Self::load), [`Error::Corrupt`] where the writer's words are impossible.
    pub fn rebuild(&mut self) -> Result<(), Error> {
        let state = State::decode(self.state_word.load()).expect("an own word, which no peer can write");
        check_ring(state.ready, self.state.ready)?;
        self.state = state;
        self.head = self.head_word.load();
        (self.released, self.tail_seen, self.peeked) = (self.head, self.head, None);
        // One who read beyond all that this ring ever carried had followed to the next. Where the tail is a lie, the
        // lies to come are checked there.
        let tail = self.carrier.tail.load_acquire().hint();
        if (tail.wrapping_sub(self.head) as i64) < 0
            && let Some(next) = self.next.take()
        {
            self.enter(next);
        }
        self.ringer.restart(self.head, self.ordering);
        self.look_at_writer()?;
        self.load_tail()
    }
}
