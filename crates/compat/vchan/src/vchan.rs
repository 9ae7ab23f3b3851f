// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One endpoint of a vchan.
//!
//! A server exists before its client; what it writes meanwhile waits in its own memory. It persists after the client
//! leaves, and another client may come. The server first reads what the last client left unread; what was written for
//! that client is dropped with it.

mod arrival;
mod peer;
mod reading;
#[cfg(all(test, feature = "testing"))]
mod tests;
mod writing;

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use tombolo_backends::vchan::Live;
use tombolo_os::lock::lock;

use crate::{
    biased_mutex::{BiasedGuard, BiasedMutex},
    border::{Fault, Outcome},
    place::Role,
    poll_descriptor::PollDescriptor,
    side::{Incoming, Outgoing},
};
use arrival::Arrival;
use peer::PeerState;
use reading::{Reading, Took};
use writing::Writing;

/// Modes that a program chose through the public fields of `struct libxenvchan`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallMode {
    /// Whether calls block instead of returning 0.
    pub blocking: bool,
    /// Whether the server persists: after a client has left, it waits for the next one.
    pub persist: bool,
}

/// Values that `is_open` returns.
pub(crate) const CLOSED: u8 = 0;
pub(crate) const OPEN: u8 = 1;
pub(crate) const WAITING: u8 = 2;

/// Both halves of the connection to a peer that came.
pub(crate) type Halves = (Box<dyn Incoming>, Box<dyn Outgoing>);

/// One endpoint, until it is dropped.
#[derive(Debug)]
pub(crate) struct Vchan(pub(crate) Arc<Inner>);

/// State that an endpoint shares with the threads that look for its peer.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) poll_descriptor: PollDescriptor,
    /// Whether the program has the poll descriptor, or waits for it: both halves must then raise it.
    polled: AtomicBool,
    pub(crate) arrival: Arrival,
    pub(crate) peer: PeerState,
    reading: BiasedMutex<Reading>,
    writing: BiasedMutex<Writing>,
}

impl Vchan {
    /// Returns an endpoint whose peer is still to come, with rings of these sizes.
    pub(crate) fn new(role: Role, read: usize, write: usize) -> Outcome<Self> {
        Ok(Self(Arc::new(Inner {
            poll_descriptor: PollDescriptor::new()?,
            polled: AtomicBool::new(false),
            arrival: Arrival::default(),
            peer: PeerState::new(role),
            reading: BiasedMutex::new(Reading::new(read)),
            writing: BiasedMutex::new(Writing::new(write)),
        })))
    }

    /// Returns the bytes of both rings, the ring to be read first.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.0.reading.lock().size(), self.0.writing.lock().size())
    }
}

impl Drop for Vchan {
    fn drop(&mut self) {
        let inner = &self.0;
        // A thread that still looks for a peer finds no endpoint to deliver it to.
        inner.peer.state.store(CLOSED, Ordering::Release);
        drop(lock(&inner.peer.listener).take());
        drop(inner.arrival.take_who());
        let from = inner.reading.lock().take_half();
        let to = inner.writing.lock().take_half();
        drop((from, to));
        drop(lock(&inner.peer.server).take());
    }
}

impl Inner {
    /// Records that the peer's domain is gone, where nothing else has reported it.
    pub(crate) fn peers_domain_is_gone(&self, fault: Fault) {
        self.peer.lost.store(true, Ordering::Release);
        match self.peer.original.get() {
            // The peer closed before its domain went.
            Some(watch) if watch.live() == Live::Gone => {}
            Some(watch) => {
                *lock(&self.peer.reason) = fault;
                watch.lost();
            }
            None if self.peer.state.load(Ordering::Acquire) == OPEN => return,
            None => self.arrival.deliver(Err(fault), &self.poll_descriptor),
        }
        self.poll_descriptor.notify();
    }

    /// Arms the poll descriptor again after it was raised, also for the cause that raised it.
    fn rearm_poll_descriptor(&self) {
        match self.peer.original.get() {
            Some(watch) => watch.clear_event(),
            None => self.reading.lock().note_readable(),
        }
    }

    /// Waits for anything to happen.
    fn await_change(&self) -> Outcome<()> {
        self.fd()?;
        self.poll_descriptor.wait()?;
        self.rearm_poll_descriptor();
        Ok(())
    }

    /// Returns whether the server was found.
    pub(crate) fn finish(&self) -> Outcome<bool> {
        if self.arrival.is_joining() {
            if !self.arrival.is_there() {
                return Ok(false);
            }
            self.meet()?;
            self.arrival.end_joining();
        }
        Ok(true)
    }

    /// Takes over the peer that came since the last call.
    #[inline]
    pub(crate) fn meet(&self) -> Outcome<()> {
        self.peer.update_from_page();
        self.meet_arrival()
    }

    /// Does the same as [`meet`](Self::meet), for callers that do not need to know whether the peer is there.
    #[inline]
    fn meet_arrival(&self) -> Outcome<()> {
        if self.arrival.is_there() {
            self.meet_now()?;
            if !self.polled.load(Ordering::Acquire) {
                // A program that asks for the descriptor later knows of this arrival.
                self.poll_descriptor.clear();
            }
        }
        Ok(())
    }

    /// Does the same as [`meet`](Self::meet) on a thread of the library, so that the peer can read what was written for
    /// it while the program does something else. The poll descriptor still notifies the program.
    pub(crate) fn meet_meanwhile(&self) {
        if self.arrival.is_there() {
            self.arrival.met_meanwhile.store(true, Ordering::Release);
            // The program's next call finds out what went wrong.
            let _ = self.meet_now();
        }
    }

    #[cold]
    fn meet_now(&self) -> Outcome<()> {
        let (mut reading, mut writing) = (self.reading.lock(), self.writing.lock());
        let arrival = self.arrival.take_who();
        let met = self.begin(arrival, &mut reading, &mut writing);
        // Cleared last: until then, a thread that sees the arrival waits here for the new state.
        self.arrival.clear();
        met
    }

    fn begin(&self, arrival: Option<Outcome<Halves>>, reading: &mut Reading, writing: &mut Writing) -> Outcome<()> {
        match arrival {
            None => Ok(()),
            Some(Err(fault)) => {
                *lock(&self.peer.reason) = fault.clone();
                self.peer.state.store(CLOSED, Ordering::Release);
                Err(fault)
            }
            Some(Ok((from, to))) => {
                if let Some(watch) = from.watch() {
                    let _ = self.peer.original.set(watch);
                }
                reading.begin(from);
                writing.begin(to)?;
                self.peer.state.store(OPEN, Ordering::Release);
                self.peer.update_from_page();
                if self.polled.load(Ordering::Acquire) {
                    reading.arm_poll_descriptor(&self.poll_descriptor)?;
                }
                // Another thread may wait for the peer that this thread took over.
                self.arrival.wake_waiters();
                Ok(())
            }
        }
    }

    /// Reads what is there, or with `whole` all of `to` or nothing. Returns 0 where there is too little and the call
    /// must not block.
    #[inline]
    pub(crate) fn read(&self, to: &mut [u8], whole: bool, ways: CallMode) -> Outcome<usize> {
        match self.read_at_once(to, whole) {
            0 => self.read_at_length(to, whole, ways),
            len => Ok(len),
        }
    }

    /// Fast path of a read: bytes are there, and no other thread uses this half. A program that polls takes it only if
    /// it gets all that it asked for.
    #[inline(always)]
    fn read_at_once(&self, to: &mut [u8], whole: bool) -> usize {
        if self.arrival.is_there() {
            return 0;
        }
        let whole = whole || self.polled.load(Ordering::Acquire);
        self.reading.favourite(|reading| reading.take_at_once(to, whole)).unwrap_or(0)
    }

    #[inline(never)]
    fn read_at_length(&self, to: &mut [u8], whole: bool, ways: CallMode) -> Outcome<usize> {
        if to.is_empty() {
            return Ok(0);
        }
        loop {
            self.meet_arrival()?;
            let mut reading = self.reading.lock();
            let took = reading.read_into(to, whole, self.polled.load(Ordering::Acquire));
            match took {
                Ok(Took::Bytes(len)) => return Ok(len),
                Ok(Took::Wait) if ways.blocking => reading.wait_for(if whole { to.len() } else { 1 })?,
                // In the original's layout the reader has to ask for an event, after which there may be bytes after
                // all.
                Ok(Took::Wait) if self.peer.is_original() && !whole && reading.grew()? => {}
                Ok(Took::Wait) => return Ok(0),
                Ok(Took::Nobody) => {
                    drop(reading);
                    self.peer.goes_on(ways)?;
                    if !ways.blocking {
                        return Ok(0);
                    }
                    self.arrival.wait(|| self.peer.state.load(Ordering::Acquire) == OPEN);
                }
                // A request that cannot fit is not the peer's fault.
                Err(fault) if fault.errno == libc::EMSGSIZE => return Err(fault),
                Ok(Took::End(why)) if self.peer.is_original() => {
                    drop(reading);
                    *lock(&self.peer.reason) = why;
                    self.peer.update_from_page();
                    self.peer.goes_on(ways)?;
                    if !ways.blocking {
                        return Ok(0);
                    }
                    self.await_change()?;
                }
                Err(why) if self.peer.is_original() => return Err(why),
                Ok(Took::End(why)) | Err(why) => {
                    drop(reading.take_half());
                    drop(reading);
                    self.peer.note_end(why);
                    // A thread that is writing finds this out for itself.
                    if let Some(mut writing) = self.writing.try_lock() {
                        drop(writing.take_half());
                    }
                }
            }
        }
    }

    /// Writes what there is room for, or with `whole` all of `bytes` or nothing. A call that may block always writes
    /// all of them.
    #[inline]
    pub(crate) fn write(&self, bytes: &[u8], whole: bool, ways: CallMode) -> Outcome<usize> {
        if self.write_at_once(bytes) { Ok(bytes.len()) } else { self.write_at_length(bytes, whole, ways) }
    }

    /// Fast path of a write: a peer is there, and there is room.
    #[inline(always)]
    fn write_at_once(&self, bytes: &[u8]) -> bool {
        let may = !bytes.is_empty() && !self.arrival.is_there() && self.peer.state.load(Ordering::Acquire) == OPEN;
        may && self.writing.favourite(|writing| writing.put_at_once(bytes)).unwrap_or(false)
    }

    #[inline(never)]
    fn write_at_length(&self, bytes: &[u8], whole: bool, ways: CallMode) -> Outcome<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let mut done = 0;
        loop {
            self.meet()?;
            self.peer.goes_on(ways)?;
            let mut writing = self.writing.lock();
            let rest = &bytes[done..];
            let polled = self.polled.load(Ordering::Acquire).then_some(&self.poll_descriptor);
            match writing.put(rest, whole, polled) {
                Ok(len) if len == rest.len() => return Ok(bytes.len()),
                Ok(len) => {
                    done += len;
                    if !ways.blocking {
                        return Ok(done);
                    }
                    let need = if whole { rest.len() } else { 1 };
                    match writing.wait_for(need) {
                        Ok(true) => {}
                        Ok(false) => {
                            drop(writing);
                            self.arrival.wait(|| self.peer.state.load(Ordering::Acquire) == OPEN);
                        }
                        Err(fault) => self.stop_writing(writing, fault, ways)?,
                    }
                }
                Err(fault) if fault.errno == libc::EMSGSIZE => return Err(fault),
                Err(fault) => self.stop_writing(writing, fault, ways)?,
            }
        }
    }

    /// Returns the fault of a failed write, or waits for the next client where a server persists.
    fn stop_writing(&self, mut writing: BiasedGuard<'_, Writing>, fault: Fault, ways: CallMode) -> Outcome<()> {
        if self.peer.is_original() {
            drop(writing);
            if fault.errno != libc::EPIPE || !ways.persist {
                return Err(fault);
            }
            return self.await_change();
        }
        drop(writing.take_half());
        drop(writing);
        self.peer.note_end(fault);
        Ok(())
    }

    /// Waits until a read or a write has more to do than when it was last tried, or until the peer comes or goes.
    pub(crate) fn wait(&self) -> Outcome<()> {
        self.peer.update_from_page();
        // Cleared first: the checks below see what came before, and what comes later raises it again.
        let state = self.peer.state.load(Ordering::Acquire);
        if self.arrival.is_there() || self.arrival.met_meanwhile.swap(false, Ordering::AcqRel) {
            self.take_poll_descriptor();
            self.meet()?;
            return self.notify_of_data();
        }
        match state {
            OPEN => self.wait_for_peer()?,
            CLOSED if self.peer.role == Role::Client || self.peer.lost.load(Ordering::Acquire) => {
                // The program can still read what is left; after that there is nothing to wait for.
                return if self.data_ready()? > 0 { Ok(()) } else { Err(lock(&self.peer.reason).clone()) };
            }
            _ if self.peer.is_original() => self.wait_for_peer()?,
            _ => {
                self.poll_descriptor.wait()?;
                self.rearm_poll_descriptor();
                self.meet()?;
                self.notify_of_data()?;
            }
        }
        self.meet()?;
        self.check_peer();
        Ok(())
    }

    /// Raises the poll descriptor again for data, because the event of the peer's arrival may have covered its first
    /// bytes too.
    fn notify_of_data(&self) -> Outcome<()> {
        if self.polled.load(Ordering::Acquire)
            && let Some(mut reading) = self.reading.try_lock()
            && reading.grew()?
        {
            self.poll_descriptor.notify();
        }
        Ok(())
    }

    fn wait_for_peer(&self) -> Outcome<()> {
        let wants_room = self.writing.lock().wants_room();
        let original = self.peer.is_original();
        if !self.polled.load(Ordering::Acquire) && !wants_room && !original {
            // Only this call has to be woken, and only for data: to wait on the half itself is best.
            let mut reading = self.reading.lock();
            if reading.can_grow() {
                return reading.wait_for_more();
            }
        }
        self.fd()?;
        // A program that polled the descriptor and found it readable does not wait here, even if it was readable for
        // nothing: the look below makes a half quiet again. The descriptor is cleared after the look as well, so that
        // it is quiet when this returns.
        let (was_raised, data) = (self.take_poll_descriptor(), self.reading.lock().grew()?);
        let grew = data || (wants_room && self.writing.lock().grew(&self.poll_descriptor)?);
        let quiet = was_raised && data; // Bytes that are found leave the descriptor as it is.
        if !(quiet || self.take_poll_descriptor() || grew || was_raised) {
            self.poll_descriptor.wait()?;
            self.rearm_poll_descriptor();
        }
        Ok(())
    }

    /// Clears the poll descriptor. Returns whether it was raised.
    fn take_poll_descriptor(&self) -> bool {
        let was_raised = self.poll_descriptor.clear();
        if was_raised {
            self.rearm_poll_descriptor();
        }
        was_raised
    }

    /// Checks whether the peer is still there.
    fn check_peer(&self) {
        if self.peer.state.load(Ordering::Acquire) == OPEN
            && !self.peer.is_original()
            && let Some(mut reading) = self.reading.try_lock()
        {
            match reading.ended() {
                Ok(None) => {}
                Ok(Some(why)) | Err(why) => self.peer.note_end(why),
            }
        }
    }

    pub(crate) fn is_open(&self, ways: CallMode) -> u8 {
        let _told_by_the_next_call = self.meet();
        if ways.persist && self.peer.role == Role::Server {
            return OPEN;
        }
        self.check_peer();
        let state = self.peer.state.load(Ordering::Acquire);
        if state == OPEN {
            self.arrival.met_meanwhile.store(false, Ordering::Release);
        }
        state
    }

    /// Returns the number of bytes that can be read at once.
    pub(crate) fn data_ready(&self) -> Outcome<usize> {
        self.meet()?;
        let polled = self.polled.load(Ordering::Acquire);
        // While another thread is reading, what it will leave is not known yet.
        self.reading.try_lock().map_or(Ok(0), |mut reading| reading.readable_bytes(polled))
    }

    /// Returns the number of bytes that can be written at once.
    pub(crate) fn buffer_space(&self) -> Outcome<usize> {
        self.meet()?;
        let polled = self.polled.load(Ordering::Acquire).then_some(&self.poll_descriptor);
        let Some(mut writing) = self.writing.try_lock() else { return Ok(0) };
        match writing.writable_bytes(polled) {
            Ok(room) => Ok(room),
            Err(fault) => {
                let size = writing.size();
                self.stop_writing(writing, fault, CallMode { blocking: false, persist: false })?;
                Ok(size)
            }
        }
    }

    /// Returns the descriptor that polls readable when [`wait`](Self::wait) would not block.
    pub(crate) fn fd(&self) -> Outcome<RawFd> {
        if !self.polled.swap(true, Ordering::AcqRel)
            && let Some(mut reading) = self.reading.try_lock()
        {
            reading.arm_poll_descriptor(&self.poll_descriptor)?;
        }
        Ok(self.poll_descriptor.fd().as_raw_fd())
    }
}
