// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets the processes of a fork group use a reader in turns.

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
    /// Ends this process's turn: hands back what was read, checks for a sleeping writer, and returns the record that
    /// the next process needs. The caller must notify if [`take_notification`](Self::take_notification) returns true,
    /// and only then release the lock. Bytes that were peeked at and not consumed are delivered again.
    pub fn save(&mut self) -> Record {
        self.flow.peeked = None;
        self.flow.release();
        Record {
            half: Half::Reader,
            state: self.flow.state,
            start: self.flow.start,
            position: self.flow.head,
            peer_position: self.flow.tail_seen,
            bound: self.flow.released,
            notified: self.flow.notifier.notified,
            peer_state: self.flow.writer,
            ring: self.flow.generation(),
            told: self.flow.told,
            counters: self.flow.counters().listed(),
        }
    }

    /// Begins this process's turn where the process that made `record` ended its own.
    ///
    /// # Errors
    /// [`Error::ForeignRecord`] if it belongs to another half or pipe, [`Error::Elsewhere`] if the pipe has moved to a
    /// ring that this process has not mapped. In both cases nothing has been read.
    pub fn load(&mut self, record: &Record) -> Result<(), Error> {
        check_half(record, Half::Reader, self.flow.start)?;
        check_ring(record.state.ready, self.flow.state.ready)?;
        if record.ring == self.flow.state.ready
            && let Some(next) = self.flow.next.take()
        {
            self.flow.enter(next);
        }
        check_ring(record.ring, self.flow.generation())?;
        check_fits(record.peer_position.wrapping_sub(record.position), self.flow.ring.capacity)?;
        self.flow.state = record.state;
        self.flow.head = record.position;
        self.flow.tail_seen = if self.flow.broken.is_some() { self.flow.head } else { record.peer_position };
        self.flow.released = record.bound;
        self.flow.notifier.notified = record.notified;
        self.flow.writer = record.peer_state;
        self.flow.told = record.told;
        self.flow.records = set_counters(&record.counters, &mut self.flow.notifier, &mut self.flow.waits);
        self.flow.peeked = None;
        Ok(())
    }

    /// Begins this process's turn after the previous process died in the middle of its own, from what that process left
    /// in the segment. Bytes that it had read and not handed back are delivered again. Requests a notification of the
    /// writer, because the process may have died before it notified.
    ///
    /// # Errors
    /// [`Error::Elsewhere`] as [`load`](Self::load), [`Error::Corrupt`] if the writer's words are impossible.
    pub fn rebuild(&mut self) -> Result<(), Error> {
        let state = State::decode(self.flow.state_word.load()).expect("an own word, which no peer can write");
        check_ring(state.ready, self.flow.state.ready)?;
        self.flow.state = state;
        self.flow.head = self.flow.head_word.load();
        (self.flow.released, self.flow.tail_seen, self.flow.peeked) = (self.flow.head, self.flow.head, None);
        // A reader that read beyond everything that this ring ever carried had followed to the next. If this tail is a
        // protocol violation, later ones are detected there.
        let tail = self.flow.ring.tail.load_acquire().hint();
        if (tail.wrapping_sub(self.flow.head) as i64) < 0
            && let Some(next) = self.flow.next.take()
        {
            self.flow.enter(next);
        }
        self.flow.notifier.restart(self.flow.head, self.flow.ordering);
        self.flow.look_at_writer()?;
        self.flow.load_tail()
    }
}
