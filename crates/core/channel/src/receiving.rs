// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The reading half of a channel's endpoint: the ring's reader, its waiter, the end of file, and following to other
//! rings.

use std::{task::Poll, time::Duration};

use tombolo_domain::Error as DomainError;
use tombolo_mem::Mapped;
use tombolo_ring::{Deadline, Error as RingError, Reader, Waited};

use crate::{
    Ending, Error, Result, handover,
    signalled::SignalledRing,
    waiter::{Armed, LimitedWaiter, Waiter},
};

/// Number of calls between two checks for a ring to follow to, where there is always something to read.
const CALLS_PER_LOOK: u32 = 64;

#[derive(Debug)]
pub(crate) struct Receiving {
    pub ring: SignalledRing<Reader<Mapped>>,
    ending: Option<Ending>,
    /// Whether the last ring offered was withdrawn. No other will come (H-1).
    withdrawn: bool,
    calls: u32,
}

impl Receiving {
    pub(crate) fn new(reader: Reader<Mapped>, waiter: Waiter) -> Self {
        Self { ring: SignalledRing { half: reader, waiter }, ending: None, withdrawn: false, calls: 0 }
    }

    /// Runs `call` if there is something to read; returns `Ready(None)` at the end of file.
    #[inline]
    pub(crate) fn attempt<T>(
        &mut self,
        call: impl FnMut(&mut Reader<Mapped>) -> std::result::Result<Option<T>, RingError>,
    ) -> Result<Poll<Option<T>>> {
        let done = self.try_call(call);
        self.conclude(done, Poll::Ready(None))
    }

    #[inline]
    fn try_call<T>(
        &mut self,
        mut call: impl FnMut(&mut Reader<Mapped>) -> std::result::Result<Option<T>, RingError>,
    ) -> Result<Poll<Option<T>>> {
        let (mut looked, mut followed) = (false, false);
        loop {
            if let Some(done) = call(&mut self.ring.half)? {
                self.after()?;
                return Ok(Poll::Ready(Some(done)));
            }
            self.ring.notify_if_owed();
            if self.ended(looked || self.ring.waiter.look_is_due())? {
                // The notification of the end may have been drained, but a program that polls must still find the end.
                self.ring.waiter.rearm_poll_fd();
                return Ok(Poll::Ready(None));
            }
            if self.follow()? && !std::mem::replace(&mut followed, true) {
                continue;
            }
            if !looked && self.ring.waiter.is_polled() {
                let need = self.ring.half.need()?;
                if self.arm_for_poll(need)? != Armed::Quiet {
                    looked = true;
                    continue;
                }
            }
            // A check of the peer's liveness may have taken the very notification that was promised.
            self.ring.waiter.rearm_poll_fd();
            return Ok(Poll::Pending);
        }
    }

    /// Reads the available bytes, or with `whole` all of `to` or nothing, if that is short work and nothing else is to
    /// be done first. Returns the number of bytes read.
    #[inline]
    pub(crate) fn read_at_once(&mut self, to: &mut [u8], whole: bool) -> usize {
        if self.calls + 1 >= CALLS_PER_LOOK {
            return 0;
        }
        let done = self.ring.half.read_at_once(to, whole);
        if done > 0 {
            self.calls += 1;
            self.ring.notify_if_owed();
            self.ring.waiter.end_nap();
            self.ring.waiter.rearm_poll_fd();
        }
        done
    }

    /// Runs `call`, waiting for something to read until `deadline`; returns `None` at the end of file. `before_wait`
    /// lets a caller that holds both halves do on the other half what the peer may be waiting for. It returns
    /// the longest time to sleep.
    #[inline]
    pub(crate) fn complete<T>(
        &mut self,
        call: impl FnMut(&mut Reader<Mapped>) -> std::result::Result<Option<T>, RingError>,
        deadline: Deadline,
        before_wait: impl FnMut() -> Option<Duration>,
    ) -> Result<Option<T>> {
        let done = self.call_until(call, deadline, before_wait);
        self.conclude(done, None)
    }

    /// Returns the result of a call, or `at_end` if the memory was taken away.
    #[inline]
    fn conclude<T>(&mut self, done: Result<T>, at_end: T) -> Result<T> {
        match done {
            Err(error) => self.judge(error).map(|()| at_end),
            done => done,
        }
    }

    /// Finds the cause of an error. If the memory was taken away, that is the end and not the peer's fault (D-3, R-19).
    /// After a protocol violation of the peer this half reads no more.
    #[cold]
    #[inline(never)]
    fn judge(&mut self, error: Error) -> Result<()> {
        if self.ring.waiter.end().is_revoked(&error) {
            self.ending.get_or_insert(Ending::Revoked);
            self.ring.waiter.rearm_poll_fd();
            return Ok(());
        }
        if error.is_protocol_violation() {
            self.ring.waiter.report_violation(&error);
            self.ring.close();
        }
        Err(error)
    }

    #[inline]
    fn call_until<T>(
        &mut self,
        mut call: impl FnMut(&mut Reader<Mapped>) -> std::result::Result<Option<T>, RingError>,
        deadline: Deadline,
        mut before_wait: impl FnMut() -> Option<Duration>,
    ) -> Result<Option<T>> {
        loop {
            if let Some(done) = call(&mut self.ring.half)? {
                self.after()?;
                return Ok(Some(done));
            }
            let longest = before_wait();
            if self.wait(deadline, longest)? {
                self.ring.waiter.rearm_poll_fd();
                return Ok(None);
            }
        }
    }

    /// Returns the number of bytes that can be read now. If there are fewer than `need`, a program that polls is woken
    /// once there are `need` bytes or once no more will come. This arms the half, unless it is armed for the same
    /// position and its descriptor has been `quiet` since.
    pub(crate) fn look_for(&mut self, need: u64, quiet: bool) -> Result<u64> {
        let there = self.try_look_for(need, quiet);
        self.conclude(there, 0)
    }

    fn try_look_for(&mut self, need: u64, quiet: bool) -> Result<u64> {
        if self.ring.half.available() >= need {
            return Ok(self.ring.half.available());
        }
        self.follow()?;
        let mut there = self.unread()?;
        let wanted = self.ring.half.position().wrapping_add(need);
        // A peer that notifies for the awaited bytes has published them before. They are not here, so the notification
        // is still to come.
        let armed = quiet && self.ring.waiter.is_armed(wanted);
        if there < need && !armed && self.ring.waiter.is_polled() && !self.will_not_grow()? {
            // What arming found may be a ring to follow to.
            if self.arm_for_poll(need)? == Armed::Ready {
                self.follow()?;
            }
            there = self.unread()?;
        }
        if there >= need {
            self.ring.waiter.end_nap();
        }
        self.ring.waiter.rearm_poll_fd();
        Ok(there)
    }

    /// Arms this half before a program that polls is told that there is too little.
    fn arm_for_poll(&mut self, need: u64) -> Result<Armed> {
        let wanted = self.ring.half.position().wrapping_add(need);
        let armed = self.ring.waiter.arm_for_poll(&mut self.ring.half, need, wanted)?;
        if armed == Armed::PeerGone {
            self.ring.waiter.end().set_gone();
        }
        Ok(armed)
    }

    /// Waits until `need` bytes are there or no more will come. Returns the number of bytes there.
    pub(crate) fn wait_for(&mut self, need: u64, deadline: Deadline) -> Result<u64> {
        let there = self.await_bytes(need, deadline);
        self.conclude(there, 0)
    }

    fn await_bytes(&mut self, need: u64, deadline: Deadline) -> Result<u64> {
        loop {
            self.follow()?;
            if self.unread()? >= need || self.will_not_grow()? {
                // What was published before the end is visible with it, and so is a ring to which the writer went
                // ahead.
                self.follow()?;
                let there = self.unread()?;
                self.ring.waiter.rearm_poll_fd();
                return Ok(there);
            }
            match self.ring.waiter.wait(&mut self.ring.half, need, deadline)? {
                Waited::Ready => {}
                Waited::TimedOut => {
                    self.ring.waiter.rearm_poll_fd();
                    return Err(Error::TimedOut);
                }
                Waited::PeerGone if self.ring.waiter.has_news_only() => {}
                Waited::PeerGone => self.ring.waiter.end().set_gone(),
            }
        }
    }

    /// Returns whether no more bytes will come. Checks only now and then whether the peer lives.
    pub(crate) fn is_last(&mut self) -> Result<bool> {
        let last = self.will_not_grow();
        self.conclude(last, true)
    }

    fn will_not_grow(&mut self) -> Result<bool> {
        self.ring.waiter.end().check_honest()?;
        if self.ring.waiter.end().gone() || self.ring.half.writer_closed()? {
            return Ok(true);
        }
        if self.ring.waiter.look_is_due() && self.ring.check_peer() {
            self.ring.waiter.end().set_gone();
            self.ring.waiter.end().check_honest()?;
        }
        Ok(self.ring.waiter.end().gone())
    }

    /// Waits for something to read. Returns whether it found the end instead.
    #[cold]
    #[inline(never)]
    fn wait(&mut self, deadline: Deadline, longest: Option<Duration>) -> Result<bool> {
        self.ring.notify_if_owed();
        if self.ended(false)? {
            return Ok(true);
        }
        self.follow()?;
        let need = self.ring.half.need()?;
        let waited = match longest {
            None => self.ring.waiter.wait(&mut self.ring.half, need, deadline),
            Some(longest) => {
                LimitedWaiter::new(&mut self.ring.waiter, longest).wait(&mut self.ring.half, need, deadline)
            }
        };
        match waited? {
            // If it was a ring to follow to, the next attempt finds nothing to read and waits again.
            Waited::Ready => Ok(false),
            Waited::TimedOut => {
                self.ring.waiter.rearm_poll_fd();
                Err(Error::TimedOut)
            }
            // The other half may have work to do first, because the link is being taken away.
            Waited::PeerGone if self.ring.waiter.has_news_only() => Ok(false),
            Waited::PeerGone => {
                self.ring.waiter.end().set_gone();
                self.ended(true)
            }
        }
    }

    /// Returns whether everything was read and nothing more will come (R-17, C-10). With `surely` it checks whether the
    /// peer lives, otherwise only now and then.
    fn ended(&mut self, surely: bool) -> Result<bool> {
        if self.ending.is_some() {
            return Ok(true);
        }
        self.ring.waiter.end().check_honest()?;
        if let Some(phase) = self.ring.half.finished()? {
            self.ending = Some(Ending::from_phase(phase));
            return Ok(true);
        }
        let due = self.ring.waiter.is_time_to_look() || surely;
        let gone = self.ring.waiter.end().gone() || (due && self.ring.check_peer());
        if !gone {
            return Ok(false);
        }
        self.ring.waiter.end().set_gone();
        // What the peer published before it ended is visible by now, and comes first. An incomplete record does
        // not count.
        let there = self.ring.half.refresh()?;
        if there >= self.ring.half.need()? {
            return Ok(false);
        }
        // The same holds for a ring to which the peer went ahead.
        if self.ring.half.handover().is_behind() && !self.withdrawn {
            return Ok(false);
        }
        // The other half may have found a protocol violation since, and ended this wait.
        self.ring.waiter.end().check_honest()?;
        self.ending = Some(match self.ring.half.finished()? {
            Some(phase) => Ending::from_phase(phase),
            None => {
                self.ring.waiter.end().check_joined()?;
                Ending::from_liveness(self.ring.waiter.end().liveness())
            }
        });
        if self.ending == Some(Ending::Revoked) {
            self.ring.waiter.end().set_left();
        }
        Ok(true)
    }

    /// Finishes every call that did something.
    #[inline]
    fn after(&mut self) -> Result<()> {
        self.ring.notify_if_owed();
        self.calls += 1;
        if self.calls >= CALLS_PER_LOOK {
            self.look_around()?;
        }
        self.ring.waiter.end_nap();
        self.ring.waiter.rearm_poll_fd();
        Ok(())
    }

    /// Not part of [`after`](Self::after), so that `after` is short enough to be inlined into each call.
    #[cold]
    #[inline(never)]
    fn look_around(&mut self) -> Result<()> {
        self.calls = 0;
        self.ring.publish();
        self.ring.waiter.end().check_honest()?;
        self.follow().map(drop)
    }

    /// Returns the number of bytes published and not read now, in whichever ring they are.
    fn unread(&mut self) -> Result<u64> {
        let there = self.ring.half.handover().find_unread()?;
        self.ring.notify_if_owed();
        Ok(there)
    }

    /// Takes the ring that the writer offers, if there is one. Returns whether the writer uses it already (H-9).
    #[inline(never)]
    fn follow(&mut self) -> Result<bool> {
        let Some(generation) = self.ring.half.handover().announced()? else { return Ok(false) };
        if self.withdrawn {
            return Ok(false);
        }
        let is_behind = self.ring.half.handover().is_behind();
        self.withdrawn = !handover::follow(&mut self.ring.half, self.ring.waiter.end(), generation)?;
        self.ring.notify_if_owed();
        Ok(is_behind && !self.withdrawn)
    }

    /// Returns the room of what was read to the peer, so that a peer that waits for space can continue.
    #[inline]
    pub(crate) fn release(&mut self) -> Result<()> {
        self.ring.half.hand_back();
        self.ring.notify_if_owed();
        Ok(())
    }

    pub(crate) fn consumed(&mut self, len: usize) -> Result<()> {
        if let Err(error) = self.ring.half.check_memory() {
            self.judge(error.into())?;
            // The bytes shown were zeros. This is not an end of file, which would make the bytes before them look
            // complete.
            return Err(DomainError::Revoked.into());
        }
        self.ring.half.in_place().consume(len);
        let done = self.after();
        self.conclude(done, ())
    }

    pub(crate) fn ending(&self) -> Option<Ending> {
        self.ending
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        self.ring.close();
    }
}
