// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The writing half of a channel's end: the ring's writer, its waiter, and moves to other rings.

use std::{cell::Cell, io::IoSlice, thread, time::Duration};

use tombolo_domain::Error as DomainError;
use tombolo_mem::Mapped;
use tombolo_ring::{Deadline, Error as RingError, Waited, Writer};

use crate::{
    Error, Result,
    moves::RingMoves,
    signalled::SignalledRing,
    waiter::{Armed, LimitedWaiter, Waiter},
};

/// For so long an endpoint that goes waits for a peer that has not begun, and so often it looks (C-9).
const LINGER: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(crate) struct Sending {
    pub ring: SignalledRing<Writer<Mapped>>,
    pub moves: RingMoves,
    /// The peer was found gone after a call that was done: the next one is told.
    gone: bool,
    /// The link is taken away, and the peer was told that this half publishes nothing more (V-9).
    sealed: bool,
}

impl Sending {
    pub(crate) fn new(writer: Writer<Mapped>, waiter: Waiter, moves: RingMoves) -> Self {
        Self { ring: SignalledRing { half: writer, waiter }, moves, gone: false, sealed: false }
    }

    /// Does `call` if there is room; `None` where there is not.
    #[inline]
    pub(crate) fn attempt<T>(
        &mut self,
        call: impl FnMut(&mut Writer<Mapped>) -> std::result::Result<Option<T>, RingError>,
        need: impl Fn() -> u64,
    ) -> Result<Option<T>> {
        let done = self.try_call(call, need);
        self.conclude(done)
    }

    #[inline]
    fn try_call<T>(
        &mut self,
        mut call: impl FnMut(&mut Writer<Mapped>) -> std::result::Result<Option<T>, RingError>,
        need: impl Fn() -> u64,
    ) -> Result<Option<T>> {
        let mut armed = false;
        loop {
            if self.gone || self.moves.is_due(&mut self.ring)? {
                self.go_on()?;
            }
            let done = match call(&mut self.ring.half) {
                Err(RingError::TooLarge { .. }) if make_room(self)? => continue,
                done => done?,
            };
            if done.is_some() {
                self.ring.waiter.end_nap();
                self.after();
                return Ok(done);
            }
            self.ring.waiter.end().check_honest()?;
            if self.seal_if_leaving() {
                return Err(DomainError::Leaving.into());
            }
            if make_room(self)? {
                continue;
            }
            if self.moves.grow_for_bulk(&mut self.ring)? {
                self.after();
            }
            if !armed && self.ring.waiter.is_polled() {
                let need = need();
                let wanted = self.ring.half.position().wrapping_add(need);
                match self.ring.waiter.arm_for_poll(&mut self.ring.half, need, wanted)? {
                    Armed::Quiet => {}
                    // Something to look at after all may be room in another ring.
                    Armed::Ready => {
                        armed = true;
                        continue;
                    }
                    Armed::PeerGone => return Err(self.peer_gone()),
                }
            } else if self.ring.waiter.gone_now() {
                return Err(self.peer_gone());
            }
            self.after();
            return Ok(done);
        }
    }

    /// Does `call`, which says whether it could do all of its work at once, if nothing else is to be done first: says whether. It
    /// is what most calls come to, and so short that it is part of its caller: what is seldom done stays out of it.
    #[inline(always)]
    pub(crate) fn try_at_once(&mut self, call: impl FnOnce(&mut Writer<Mapped>) -> bool) -> bool {
        let done = !self.gone && self.moves.is_quiet() && call(&mut self.ring.half);
        if done {
            self.ring.waiter.end_nap();
            self.after();
        }
        done
    }

    /// Does `call`, waiting for room until `deadline`; whoever has both halves lets the other do what the peer may be
    /// waiting for before this one waits.
    #[inline]
    pub(crate) fn complete<T>(
        &mut self,
        call: impl FnMut(&mut Writer<Mapped>) -> std::result::Result<Option<T>, RingError>,
        need: impl Fn() -> u64,
        deadline: Deadline,
        before_wait: impl FnMut() -> Result<()>,
    ) -> Result<T> {
        let done = self.call_until(call, need, deadline, before_wait);
        self.conclude(done)
    }

    #[inline]
    fn call_until<T>(
        &mut self,
        mut call: impl FnMut(&mut Writer<Mapped>) -> std::result::Result<Option<T>, RingError>,
        need: impl Fn() -> u64,
        deadline: Deadline,
        mut before_wait: impl FnMut() -> Result<()>,
    ) -> Result<T> {
        loop {
            if self.gone || self.moves.is_due(&mut self.ring)? {
                self.go_on()?;
            }
            let done = match call(&mut self.ring.half) {
                Err(RingError::TooLarge { .. }) if make_room(self)? => continue,
                done => done?,
            };
            if let Some(done) = done {
                self.after();
                return Ok(done);
            }
            before_wait()?;
            if self.moves.grow_for_bulk(&mut self.ring)? {
                self.after();
                continue;
            }
            let longest = self.moves.room_look(&self.ring);
            match self.wait(need(), deadline, longest) {
                Err(Error::TimedOut) if longest.is_some() && !deadline.expired() => _ = make_room(self)?,
                waited => waited?,
            }
        }
    }

    /// How many bytes there is room for, looked at afresh. Where that is less than `need`, one who polls is woken once there
    /// is so much.
    pub(crate) fn room_for(&mut self, need: u64) -> Result<u64> {
        if need > self.ring.half.capacity() {
            let made = make_room(self);
            self.conclude(made)?;
        }
        // The ring may become another one in the middle of this.
        let most = Cell::new(need);
        self.attempt(
            |writer| {
                if writer.reader().is_closed()? {
                    return Err(RingError::Closed);
                }
                writer.reader().is_drained()?;
                most.set(need.min(writer.capacity()));
                Ok((writer.room() >= most.get()).then_some(()))
            },
            || most.get(),
        )?;
        Ok(self.ring.half.room())
    }

    /// What follows every call: the doorbell if it is owed, and now and then a look whether the peer lives. What was
    /// written is written: a peer may have read it, answered and gone in the meantime.
    #[inline]
    fn after(&mut self) {
        let rings = self.ring.half.take_ring();
        if rings || self.ring.waiter.is_time_to_look() {
            look_around(self, rings);
        }
        self.ring.waiter.rearm_poll_fd();
    }

    /// Whether the link is taken away (V-9). Then this half has published all that it ever will, and the peer is told.
    #[inline]
    fn seal_if_leaving(&mut self) -> bool {
        self.ring.waiter.doorbell.is_leaving() && self.seal()
    }

    #[cold]
    #[inline(never)]
    fn seal(&mut self) -> bool {
        if !std::mem::replace(&mut self.sealed, true) {
            self.gone = true;
            self.ring.half.flush();
            self.ring.notify_if_owed();
            self.ring.publish();
            self.ring.waiter.end().link().link.leave();
        }
        true
    }

    fn peer_gone(&mut self) -> Error {
        if self.seal_if_leaving() {
            return DomainError::Leaving.into();
        }
        self.ring.waiter.end().set_gone();
        // The other half may have caught it meanwhile.
        let end = self.ring.waiter.end();
        end.check_honest().and_then(|()| end.check_joined()).err().unwrap_or(Error::PeerGone)
    }

    /// What a call came to.
    #[inline]
    fn conclude<T>(&mut self, done: Result<T>) -> Result<T> {
        done.map_err(|error| self.judge(error))
    }

    /// Where what was found wrong is that the memory was taken away, the peer is gone, and it is not its fault (D-3,
    /// To a peer that lied this half writes no more.
    #[cold]
    #[inline(never)]
    fn judge(&mut self, error: Error) -> Error {
        if self.ring.waiter.end().is_revoked(&error) {
            self.gone = true;
            return Error::PeerGone;
        }
        if error.is_peers_lie() {
            self.ring.waiter.report_lie(&error);
            self.ring.abort();
        }
        error
    }

    #[cold]
    #[inline(never)]
    fn wait(&mut self, need: u64, deadline: Deadline, longest: Option<Duration>) -> Result<()> {
        self.ring.waiter.end().check_honest()?;
        let waited = match longest {
            None => self.ring.waiter.wait(&mut self.ring.half, need, deadline),
            Some(longest) => {
                LimitedWaiter::new(&mut self.ring.waiter, longest).wait(&mut self.ring.half, need, deadline)
            }
        };
        match waited? {
            Waited::Ready => Ok(()),
            Waited::TimedOut => {
                self.ring.waiter.rearm_poll_fd();
                Err(Error::TimedOut)
            }
            Waited::PeerGone => {
                self.ring.waiter.end().check_honest()?;
                if self.sealed && !self.ring.waiter.has_news_only() {
                    return Err(Error::PeerGone);
                }
                Err(self.peer_gone())
            }
        }
    }

    /// Waits until the reader has read everything that was written.
    pub(crate) fn drained(&mut self, deadline: Deadline) -> Result<()> {
        self.ring.half.flush();
        let done = self.await_drained(deadline);
        self.conclude(done)
    }

    fn await_drained(&mut self, deadline: Deadline) -> Result<()> {
        // Whoever wants to know what was read hears so for as long as the peer reads.
        let mut over = false;
        loop {
            self.ring.waiter.end().check_honest()?;
            self.after();
            // First of all: what was read before the peer closed or went was read.
            if self.ring.half.reader().has_read_all()? {
                return Ok(());
            }
            if over || (self.gone && !self.sealed) {
                self.still_there()?;
            }
            if !self.sealed && self.moves.is_due(&mut self.ring)? {
                self.go_on()?;
            }
            let whole = self.ring.half.capacity();
            match self.wait(whole, deadline, None) {
                Err(Error::PeerGone) => (self.gone, over) = (true, true),
                Err(Error::Domain(DomainError::Leaving)) => {}
                waited => waited?,
            }
        }
    }

    #[cold]
    fn go_on(&mut self) -> Result<()> {
        self.still_there()?;
        self.moves.advance(&mut self.ring)?;
        self.after();
        Ok(())
    }

    /// A write of `len` bytes that did only `written` of them has filled the ring.
    #[inline]
    pub(crate) fn note_written(&mut self, written: usize, len: usize) {
        if written < len {
            // What was written is written: a lie that was found stays found, for the next call to tell.
            if self.moves.grow_for_bulk(&mut self.ring).unwrap_or_default() {
                self.after();
            }
        }
    }

    /// Shrinks the ring if the stream is idle, and goes on with a move. Returns after which time to call again, if
    /// nothing is written meanwhile.
    pub(crate) fn follow_load(&mut self) -> Result<Option<Duration>> {
        let done = self.still_there().and_then(|()| {
            self.moves.require_look();
            self.go_on()
        });
        self.conclude(done)?;
        Ok(self.moves.look_again(&self.ring))
    }

    pub(crate) fn resize(&mut self, capacity: u64) -> Result<()> {
        let begun = self.moves.resize(capacity, &mut self.ring);
        self.conclude(begun)?;
        self.moves.end_growth();
        self.after();
        Ok(())
    }

    pub(crate) fn flush(&mut self) -> Result<()> {
        self.push();
        let there = self.still_there();
        self.conclude(there)
    }

    /// Flushes, for one who reads next: what a peer that is gone left is still to be read.
    pub(crate) fn push(&mut self) {
        self.ring.half.flush();
        self.after();
        self.gone |= self.seal_if_leaving();
    }

    fn still_there(&mut self) -> Result<()> {
        self.ring.waiter.end().check_honest()?;
        if self.gone { Err(self.peer_gone()) } else { Ok(()) }
    }

    /// Publishes what was reserved.
    pub(crate) fn commit(&mut self, len: usize) -> Result<()> {
        // What is published now nobody would wait for.
        if self.sealed {
            return Err(DomainError::Leaving.into());
        }
        let done = self.ring.half.in_place().commit(len).map_err(Error::from);
        self.conclude(done)?;
        self.after();
        Ok(())
    }

    /// Publishes no more. Where the link is taken away that is not an end: it would say that all was written (V-9).
    pub(crate) fn close(&mut self) {
        let waiter = &self.ring.waiter;
        let left = self.sealed || (waiter.doorbell.is_leaving() && waiter.end().has_left());
        if left && !waiter.end().is_caught() {
            self.seal();
        } else {
            self.ring.close();
        }
    }
}

/// There is less room than the program counts on: goes on in a larger ring, if that can be. Says whether it did.
#[cold]
#[inline(never)]
fn make_room(sending: &mut Sending) -> Result<bool> {
    let made = sending.moves.make_room(&mut sending.ring)?;
    if made {
        sending.after();
    }
    Ok(made)
}

/// After a write that did only the first `written` bytes of `buffers`: into a larger ring there goes more, and programs count on
/// that. What is wrong with the rest is for the next call to tell. Returns how much was written in all.
#[inline]
pub(crate) fn write_rest(sending: &mut Sending, written: usize, buffers: &[IoSlice<'_>]) -> usize {
    let len = buffers.iter().map(|buffer| buffer.len()).sum();
    if written >= len {
        return written;
    }
    let wants_more = sending.moves.may_make_room(&sending.ring);
    let done = if wants_more { write_ahead(sending, written, buffers) } else { written };
    sending.note_written(done, len);
    done
}

/// Writes what follows the first `written` bytes of `buffers` to as much room as can be had now. Returns how much was written in all.
#[cold]
#[inline(never)]
fn write_ahead(sending: &mut Sending, mut written: usize, buffers: &[IoSlice<'_>]) -> usize {
    let mut before = written;
    for buffer in buffers {
        let mut rest = &buffer[before.min(buffer.len())..];
        before -= buffer.len() - rest.len();
        while !rest.is_empty() {
            let Ok(Some(more)) = sending.attempt(|writer| writer.write(rest), || 1) else { return written };
            written += more;
            rest = &rest[more..];
        }
    }
    written
}

/// Notifies the peer if it asked for that, and looks whether it lives. Apart from [`Sending::after`]: within it, what is seldom
/// done made what is always done slower.
#[inline(never)]
fn look_around(sending: &mut Sending, rings: bool) {
    let Sending { ring, moves, .. } = sending;
    if rings {
        ring.notify_peer();
    }
    moves.note_look(ring);
    let is_gone = if rings { ring.waiter.gone_since_last_ring() } else { ring.check_peer() };
    sending.gone |= is_gone || sending.seal_if_leaving() || (!rings && sending.ring.waiter.end().is_caught());
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.close();
        linger(&mut self.ring);
    }
}

/// Where memory goes with its owner, what was written would be lost to a peer that has not mapped it yet; it is
/// about to, for it was greeted (C-9).
fn linger(SignalledRing { half: writer, waiter }: &mut SignalledRing<Writer<Mapped>>) {
    let until = Deadline::after(LINGER);
    while writer.in_flight() > 0
        && !waiter.end().memory_outlives_us()
        && matches!(writer.reader().has_begun(), Ok(false))
        && !waiter.gone_now()
        && !until.expired()
    {
        thread::park_timeout(LOOK);
    }
}
