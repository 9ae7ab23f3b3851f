// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The writing half of a channel's endpoint: the ring's writer, its waiter, and moves to other rings.

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

/// Longest time that an ending endpoint waits for a peer that has not begun to read, and the interval of its checks
/// (C-9).
const LINGER: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(crate) struct Sending {
    pub ring: SignalledRing<Writer<Mapped>>,
    pub moves: RingMoves,
    /// Whether the peer was found gone after a call that succeeded. The next call reports it.
    gone: bool,
    /// Whether the link is being taken away and the peer was told that this half publishes nothing more (V-9).
    sealed: bool,
}

impl Sending {
    pub(crate) fn new(writer: Writer<Mapped>, waiter: Waiter, moves: RingMoves) -> Self {
        Self { ring: SignalledRing { half: writer, waiter }, moves, gone: false, sealed: false }
    }

    /// Runs `call` if there is room for it; returns `None` if there is not.
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
                    // What arming found may be room in another ring.
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

    /// Runs `call`, which returns whether it did all of its work at once, unless there is other work to do first.
    /// Returns whether the work was done. Most calls take this path, so it is short enough to be inlined; rare work
    /// stays out of it.
    #[inline(always)]
    pub(crate) fn try_at_once(&mut self, call: impl FnOnce(&mut Writer<Mapped>) -> bool) -> bool {
        let done = !self.gone && self.moves.is_quiet() && call(&mut self.ring.half);
        if done {
            self.ring.waiter.end_nap();
            self.after();
        }
        done
    }

    /// Runs `call`, waiting for room until `deadline`. `before_wait` lets a caller that holds both halves do on the
    /// other half what the peer may be waiting for.
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

    /// Returns the number of bytes for which there is room now. If that is less than `need`, a program that polls is
    /// woken once there is room for `need`.
    pub(crate) fn room_for(&mut self, need: u64) -> Result<u64> {
        if need > self.ring.half.capacity() {
            let made = make_room(self);
            self.conclude(made)?;
        }
        // The ring may be replaced by another in the middle of this.
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

    /// Finishes every call: notifies the peer if that is owed, and now and then checks whether the peer lives. The call
    /// succeeds anyway: the peer may have read what was written, answered and ended meanwhile.
    #[inline]
    fn after(&mut self) {
        let owed = self.ring.half.take_notification();
        if owed || self.ring.waiter.is_time_to_look() {
            look_around(self, owed);
        }
        self.ring.waiter.rearm_poll_fd();
    }

    /// Returns whether the link is being taken away. If so, tells the peer that this half publishes nothing more (V-9).
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
        // The other half may have found a protocol violation meanwhile.
        let end = self.ring.waiter.end();
        end.check_honest().and_then(|()| end.check_joined()).err().unwrap_or(Error::PeerGone)
    }

    /// Returns the result of a call, with an error replaced by its cause.
    #[inline]
    fn conclude<T>(&mut self, done: Result<T>) -> Result<T> {
        done.map_err(|error| self.judge(error))
    }

    /// Finds the cause of an error. If the memory was taken away, the peer is gone and not at fault (D-3, R-19). After
    /// a protocol violation of the peer this half writes no more.
    #[cold]
    #[inline(never)]
    fn judge(&mut self, error: Error) -> Error {
        if self.ring.waiter.end().is_revoked(&error) {
            self.gone = true;
            return Error::PeerGone;
        }
        if error.is_protocol_violation() {
            self.ring.waiter.report_violation(&error);
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
        // A caller that wants to know what was read keeps waiting for as long as the peer reads.
        let mut over = false;
        loop {
            self.ring.waiter.end().check_honest()?;
            self.after();
            // This comes first: what the peer read before it closed or ended counts as read.
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

    /// Notes that a write did only `written` of `len` bytes, which means that it filled the ring.
    #[inline]
    pub(crate) fn note_written(&mut self, written: usize, len: usize) {
        if written < len {
            // The write itself succeeded. The next call finds and reports a protocol violation that was found here.
            if self.moves.grow_for_bulk(&mut self.ring).unwrap_or_default() {
                self.after();
            }
        }
    }

    /// Shrinks the ring if the stream is idle, and continues a move. Returns the time after which to call again if
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

    /// Flushes before a read. A peer's end is not an error here, because what it left is still to be read.
    pub(crate) fn push(&mut self) {
        self.ring.half.flush();
        self.after();
        self.gone |= self.seal_if_leaving();
    }

    fn still_there(&mut self) -> Result<()> {
        self.ring.waiter.end().check_honest()?;
        if self.gone { Err(self.peer_gone()) } else { Ok(()) }
    }

    /// Publishes the first `len` reserved bytes.
    pub(crate) fn commit(&mut self, len: usize) -> Result<()> {
        // Nothing would wait for the delivery of what is published now.
        if self.sealed {
            return Err(DomainError::Leaving.into());
        }
        let done = self.ring.half.in_place().commit(len).map_err(Error::from);
        self.conclude(done)?;
        self.after();
        Ok(())
    }

    /// Ends publishing. While the link is taken away this is not an orderly close, which would mean that everything was
    /// written (V-9).
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

/// Moves to a larger ring, if possible, because there is less room than the program counts on. Returns whether it did.
#[cold]
#[inline(never)]
fn make_room(sending: &mut Sending) -> Result<bool> {
    let made = sending.moves.make_room(&mut sending.ring)?;
    if made {
        sending.after();
    }
    Ok(made)
}

/// Continues a write that did only the first `written` bytes of `buffers`: a larger ring takes more, and programs count
/// on that. The next call reports an error in the rest. Returns the number of bytes written in all.
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

/// Writes the bytes after the first `written` of `buffers` as far as there is room now. Returns the number of bytes
/// written in all.
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

/// Notifies the peer if that is `owed`, and checks whether it lives. Not part of [`Sending::after`], where this rare
/// work slowed down the common path.
#[inline(never)]
fn look_around(sending: &mut Sending, owed: bool) {
    let Sending { ring, moves, .. } = sending;
    if owed {
        ring.notify_peer();
    }
    moves.note_look(ring);
    let is_gone = if owed { ring.waiter.gone_since_last_check() } else { ring.check_peer() };
    sending.gone |= is_gone || sending.seal_if_leaving() || (!owed && sending.ring.waiter.end().is_caught());
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.close();
        linger(&mut self.ring);
    }
}

/// Waits until the peer has begun to read, for a limited time. Where memory goes with its owner, a peer that has not
/// mapped it yet would lose what was written. It is about to map it, because it was greeted (C-9).
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
