// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The writing half of a channel's end: the ring's writer, its waiter, and moves to other rings.

use std::{cell::Cell, os::fd::BorrowedFd, thread, time::Duration};

use tombolo_domain::Error as DomainError;
use tombolo_mem::Mapped;
use tombolo_ring::{Deadline, Error as RingError, FlushPolicy, Waited, Writer};

use crate::{
    Error, Result,
    handover::Outgoing,
    stats::PipeStatistics,
    waiter::{Armed, Waiter},
};

/// For so long an end that goes waits for a peer that has not begun, and so often it looks (C-9).
const LINGER: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(crate) struct Sending {
    writer: Writer<Mapped>,
    waiter: Waiter,
    move_: Outgoing,
    /// The peer was found gone after a call that was done: the next one is told.
    gone: bool,
    /// The link is taken away, and the peer was told that this half publishes nothing more (V-9).
    sealed: bool,
}

impl Sending {
    pub(crate) fn new(writer: Writer<Mapped>, waiter: Waiter) -> Self {
        Self { writer, waiter, move_: Outgoing::default(), gone: false, sealed: false }
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
            if self.gone || self.move_.is_under_way() {
                self.go_on()?;
            }
            let done = call(&mut self.writer)?;
            if done.is_some() {
                self.waiter.end_nap();
                self.after();
                return Ok(done);
            }
            self.waiter.end().check_honest()?;
            if self.seal_if_leaving() {
                return Err(DomainError::Leaving.into());
            }
            if !armed && self.waiter.is_polled() {
                let need = need();
                let wanted = self.writer.position().wrapping_add(need);
                match self.waiter.arm_for_poll(&mut self.writer, need, wanted)? {
                    Armed::Quiet => {}
                    // Something to look at after all may be room in another ring.
                    Armed::Ready => {
                        armed = true;
                        continue;
                    }
                    Armed::PeerGone => return Err(self.peer_gone()),
                }
            } else if self.waiter.gone_now() {
                return Err(self.peer_gone());
            }
            self.after();
            return Ok(done);
        }
    }

    /// Writes all of `bytes` if that is known to be possible and nothing else is to be done first: says whether.
    #[inline]
    pub(crate) fn write_at_once(&mut self, bytes: &[u8]) -> bool {
        let done = !self.gone && !self.move_.is_under_way() && self.writer.write_at_once(bytes);
        if done {
            self.waiter.end_nap();
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
            if self.gone || self.move_.is_under_way() {
                self.go_on()?;
            }
            if let Some(done) = call(&mut self.writer)? {
                self.after();
                return Ok(done);
            }
            before_wait()?;
            self.wait(need(), deadline)?;
        }
    }

    /// How many bytes there is room for, looked at afresh. Where that is less than `need`, one who polls is woken once there
    /// is so much.
    pub(crate) fn room_for(&mut self, need: u64) -> Result<u64> {
        // The ring may become another one in the middle of this.
        let most = Cell::new(need);
        self.attempt(
            |writer| {
                if writer.reader_closed()? {
                    return Err(RingError::Closed);
                }
                writer.is_drained()?;
                most.set(need.min(writer.capacity()));
                Ok((writer.room() >= most.get()).then_some(()))
            },
            || most.get(),
        )?;
        Ok(self.writer.room())
    }

    /// What follows every call: the doorbell if it is owed, and now and then a look whether the peer lives. What was
    /// written is written: a peer may have read it, answered and gone in the meantime.
    #[inline]
    fn after(&mut self) {
        if self.writer.take_ring() {
            self.notify_peer();
            self.gone |= self.waiter.gone_since_last_ring() || self.seal_if_leaving();
        } else if self.waiter.is_time_to_look() {
            self.gone |= self.check_peer();
        }
        self.waiter.rearm_poll_fd();
    }

    /// Now and then: says what was counted, and looks whether the peer is gone.
    #[cold]
    #[inline(never)]
    fn check_peer(&mut self) -> bool {
        self.publish();
        self.waiter.gone_now() || self.seal_if_leaving() || self.waiter.end().is_caught()
    }

    #[cold]
    #[inline(never)]
    fn publish(&self) {
        self.waiter.publish(&self.writer.counters());
    }

    #[cold]
    #[inline(never)]
    fn notify_peer(&self) {
        self.waiter.notify_peer();
        self.publish();
    }

    /// Whether the link is taken away (V-9). Then this half has published all that it ever will, and the peer is told.
    #[inline]
    fn seal_if_leaving(&mut self) -> bool {
        self.waiter.bell.is_leaving() && self.seal()
    }

    #[cold]
    #[inline(never)]
    fn seal(&mut self) -> bool {
        if !std::mem::replace(&mut self.sealed, true) {
            self.gone = true;
            self.writer.flush();
            self.notify_if_owed();
            self.publish();
            self.waiter.end().link().link.leave();
        }
        true
    }

    fn peer_gone(&mut self) -> Error {
        if self.seal_if_leaving() {
            return DomainError::Leaving.into();
        }
        self.waiter.end().set_gone();
        // The other half may have caught it meanwhile.
        self.waiter.end().check_honest().err().unwrap_or(Error::PeerGone)
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
        if self.waiter.end().is_revoked(&error) {
            self.gone = true;
            return Error::PeerGone;
        }
        if error.is_peers_lie() {
            self.waiter.report_lie(&error);
            self.abort();
        }
        error
    }

    #[cold]
    #[inline(never)]
    fn wait(&mut self, need: u64, deadline: Deadline) -> Result<()> {
        self.waiter.end().check_honest()?;
        match self.waiter.wait(&mut self.writer, need, deadline)? {
            Waited::Ready => Ok(()),
            Waited::TimedOut => {
                self.waiter.rearm_poll_fd();
                Err(Error::TimedOut)
            }
            Waited::PeerGone => {
                self.waiter.end().check_honest()?;
                if self.sealed && !self.waiter.has_news_only() {
                    return Err(Error::PeerGone);
                }
                Err(self.peer_gone())
            }
        }
    }

    /// Waits until the reader has read everything that was written.
    pub(crate) fn drained(&mut self, deadline: Deadline) -> Result<()> {
        self.writer.flush();
        let done = self.await_drained(deadline);
        self.conclude(done)
    }

    fn await_drained(&mut self, deadline: Deadline) -> Result<()> {
        // Whoever wants to know what was read hears so for as long as the peer reads.
        let mut over = false;
        loop {
            self.waiter.end().check_honest()?;
            self.after();
            // First of all: what was read before the peer closed or went was read.
            if self.writer.check_drained()? {
                return Ok(());
            }
            if over || (self.gone && !self.sealed) {
                self.still_there()?;
            }
            if self.move_.is_under_way() && !self.sealed {
                self.go_on()?;
            }
            let whole = self.writer.capacity();
            match self.wait(whole, deadline) {
                Err(Error::PeerGone) => (self.gone, over) = (true, true),
                Err(Error::Domain(DomainError::Leaving)) => {}
                waited => waited?,
            }
        }
    }

    #[cold]
    fn go_on(&mut self) -> Result<()> {
        self.still_there()?;
        // In another ring there is room at another position.
        self.waiter.forget_armed();
        self.move_.go_on(&mut self.writer, self.waiter.end())?;
        self.after();
        Ok(())
    }

    pub(crate) fn resize(&mut self, capacity: u64) -> Result<()> {
        let begun = self.move_.begin(capacity, &mut self.writer, self.waiter.end());
        self.conclude(begun)?;
        self.after();
        Ok(())
    }

    pub(crate) fn is_moving(&self) -> bool {
        self.move_.is_under_way()
    }

    pub(crate) fn writer(&mut self) -> &mut Writer<Mapped> {
        &mut self.writer
    }

    pub(crate) fn flush(&mut self) -> Result<()> {
        self.push();
        let there = self.still_there();
        self.conclude(there)
    }

    /// Flushes, for one who reads next: what a peer that is gone left is still to be read.
    pub(crate) fn push(&mut self) {
        self.writer.flush();
        self.after();
        self.gone |= self.seal_if_leaving();
    }

    fn still_there(&mut self) -> Result<()> {
        self.waiter.end().check_honest()?;
        if self.gone { Err(self.peer_gone()) } else { Ok(()) }
    }

    /// Publishes what was reserved.
    pub(crate) fn commit(&mut self, len: usize) -> Result<()> {
        // What is published now nobody would wait for.
        if self.sealed {
            return Err(DomainError::Leaving.into());
        }
        let done = self.writer.commit(len).map_err(Error::from);
        self.conclude(done)?;
        self.after();
        Ok(())
    }

    pub(crate) fn set_flush_policy(&mut self, policy: FlushPolicy) {
        self.writer.set_flush_policy(policy);
    }

    pub(crate) fn set_spin(&mut self, most: Duration) {
        self.waiter.set_spin(most);
    }

    pub(crate) fn pollable(&self) -> Result<BorrowedFd<'_>> {
        self.waiter.pollable()
    }

    pub(crate) fn waiter(&self) -> &Waiter {
        &self.waiter
    }

    pub(crate) fn statistics(&self) -> PipeStatistics {
        PipeStatistics {
            counters: self.writer.counters(),
            ring_size: self.writer.capacity(),
            in_flight: self.writer.in_flight(),
        }
    }

    /// Publishes no more; where the peer was caught, says that it gave up.
    pub(crate) fn close(&mut self) {
        if self.waiter.end().is_caught() {
            self.writer.abort();
        } else if self.sealed || (self.waiter.bell.is_leaving() && self.waiter.end().has_left()) {
            // That would say that all was written.
            self.seal();
        } else {
            self.writer.close();
        }
        self.notify_if_owed();
        self.publish();
    }

    pub(crate) fn abort(&mut self) {
        self.writer.abort();
        self.notify_if_owed();
        self.publish();
    }

    /// Where memory goes with its owner, what was written would be lost to a peer that has not mapped it yet; it is
    /// about to, for it was greeted (C-9).
    fn linger(&mut self) {
        let until = Deadline::after(LINGER);
        while self.writer.in_flight() > 0
            && !self.waiter.end().memory_outlives_us()
            && matches!(self.writer.reader_begun(), Ok(false))
            && !self.waiter.gone_now()
            && !until.expired()
        {
            thread::park_timeout(LOOK);
        }
    }

    fn notify_if_owed(&mut self) {
        if self.writer.take_ring() {
            self.notify_peer();
        }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.close();
        self.linger();
    }
}
