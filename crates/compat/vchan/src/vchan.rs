// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One end of a vchan.
//!
//! A server is there before its client: what it writes meanwhile waits in its own memory. It stays there after the client,
//! and another may come; what the last one left unread is read first, what was written for it goes with it.

mod reading;
#[cfg(all(test, feature = "testing"))]
mod tests;
mod writing;

use std::{
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
};

use tombolo_backends::vchan::{Live, Server, Watch};
use tombolo_os::{event::eventfd, lock::lock};

use crate::{
    bell::Bell,
    border::{Fault, Outcome},
    door::ServerListener,
    place::Role,
    side::{Incoming, Outgoing},
    turn::{BiasedGuard, BiasedMutex},
};
use reading::{Reading, Took};
use writing::Writing;

/// What a program chose by the fields that it may set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallMode {
    /// Calls wait instead of returning 0.
    pub blocking: bool,
    /// To the server a client that went is like one that has not come.
    pub persist: bool,
}

/// What `is_open` says.
pub(crate) const CLOSED: u8 = 0;
pub(crate) const OPEN: u8 = 1;
pub(crate) const WAITING: u8 = 2;

/// Both halves to a peer that came.
pub(crate) type Halves = (Box<dyn Incoming>, Box<dyn Outgoing>);

/// One end, until it is dropped.
#[derive(Debug)]
pub(crate) struct Vchan(pub(crate) Arc<Inner>);

/// What an end shares with the threads that look for its peer.
#[derive(Debug)]
pub(crate) struct Inner {
    role: Role,
    pub(crate) bell: Bell,
    /// Somebody has the bell's descriptor, or waits for it: the halves ring it.
    polled: AtomicBool,
    state: AtomicU8,
    /// Who came, or why nobody will, until the program's next call.
    arrival: Mutex<Option<Outcome<Halves>>>,
    arrived: Condvar,
    has_arrival: AtomicBool,
    /// Another thread than the program's met whoever came: `wait` is to return for that.
    met_meanwhile: AtomicBool,
    reading: BiasedMutex<Reading>,
    writing: BiasedMutex<Writing>,
    /// The peer's domain is gone: nobody will come any more.
    lost: AtomicBool,
    /// Why it is over.
    reason: Mutex<Fault>,
    /// A server's.
    pub(crate) door: Mutex<Option<ServerListener>>,
    /// With a peer that runs the original: who is there, and what is this server's in XenStore.
    original: OnceLock<Watch>,
    server: Mutex<Option<Server>>,
    /// Of a client that waits for its server: polls readable once that is decided.
    watch: Mutex<Option<OwnedFd>>,
    /// There is one.
    joining: AtomicBool,
}

impl Vchan {
    /// An end whose peer is still to come, with rings of these sizes.
    pub(crate) fn new(role: Role, read: usize, write: usize) -> Outcome<Self> {
        Ok(Self(Arc::new(Inner {
            role,
            bell: Bell::new()?,
            polled: AtomicBool::new(false),
            state: AtomicU8::new(WAITING),
            arrival: Mutex::default(),
            arrived: Condvar::new(),
            has_arrival: AtomicBool::new(false),
            met_meanwhile: AtomicBool::new(false),
            reading: BiasedMutex::new(Reading::new(read)),
            writing: BiasedMutex::new(Writing::new(write)),
            lost: AtomicBool::new(false),
            reason: Mutex::new(Fault::new(libc::EPIPE, "the other end has closed")),
            door: Mutex::default(),
            original: OnceLock::new(),
            server: Mutex::default(),
            watch: Mutex::default(),
            joining: AtomicBool::new(false),
        })))
    }

    /// Bytes of both rings, the one that is read first.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.0.reading.lock().size(), self.0.writing.lock().size())
    }
}

impl Drop for Vchan {
    fn drop(&mut self) {
        let inner = &self.0;
        // Whoever still looks for a peer finds nobody to bring it to.
        inner.state.store(CLOSED, Ordering::Release);
        drop(lock(&inner.door).take());
        drop(lock(&inner.arrival).take());
        let from = inner.reading.lock().take_half();
        let to = inner.writing.lock().take_half();
        drop((from, to));
        drop(lock(&inner.server).take());
    }
}

impl Inner {
    /// What a server has to keep as long as it is there.
    pub(crate) fn store_server(&self, server: Server) {
        *lock(&self.server) = Some(server);
    }

    fn is_original(&self) -> bool {
        self.original.get().is_some()
    }

    /// In the layout of the original the page says who is there, and may say so again after it did not.
    fn look_who_is_there(&self) {
        if let Some(watch) = self.original.get() {
            let state = match watch.live() {
                Live::Gone => CLOSED,
                Live::Here => OPEN,
                Live::NotYet => WAITING,
            };
            self.state.store(state, Ordering::Release);
        }
    }

    /// The peer's domain is gone, and nothing else has told.
    pub(crate) fn peers_domain_is_gone(&self, fault: Fault) {
        self.lost.store(true, Ordering::Release);
        match self.original.get() {
            // It closed before that.
            Some(watch) if watch.live() == Live::Gone => {}
            Some(watch) => {
                *lock(&self.reason) = fault;
                watch.lost();
            }
            None if self.state.load(Ordering::Acquire) == OPEN => return,
            None => self.deliver(Err(fault)),
        }
        self.bell.notify();
    }

    pub(crate) fn role(&self) -> Role {
        self.role
    }

    /// The bell rang: it is to ring again, for the same as well.
    fn heard(&self) {
        match self.original.get() {
            Some(watch) => watch.rung(),
            None => self.reading.lock().heard(),
        }
    }

    /// Waits for anything to happen.
    fn await_change(&self) -> Outcome<()> {
        self.fd()?;
        self.bell.wait()?;
        self.heard();
        Ok(())
    }

    /// Brings a peer, or the reason why there will be none.
    pub(crate) fn deliver(&self, arrival: Outcome<Halves>) {
        *lock(&self.arrival) = Some(arrival);
        self.has_arrival.store(true, Ordering::Release);
        if let Some(watch) = &*lock(&self.watch) {
            let _ = rustix::io::write(watch, &1u64.to_ne_bytes());
        }
        self.arrived.notify_all();
        self.bell.notify();
    }

    /// A descriptor that polls readable once the server was found, or cannot be; it is closed by [`finish`](Self::finish).
    pub(crate) fn watch(&self) -> Outcome<RawFd> {
        let mut watch = lock(&self.watch);
        self.joining.store(true, Ordering::Release);
        let fd = watch.insert(eventfd(self.has_arrival().into())?);
        Ok(fd.as_raw_fd())
    }

    /// Whether the program has not heard yet what became of its search for a server.
    #[inline]
    pub(crate) fn is_joining(&self) -> bool {
        self.joining.load(Ordering::Acquire)
    }

    /// Says whether the server was found.
    pub(crate) fn finish(&self) -> Outcome<bool> {
        if self.is_joining() {
            if !self.has_arrival() {
                return Ok(false);
            }
            self.meet()?;
            drop(lock(&self.watch).take());
            self.joining.store(false, Ordering::Release);
        }
        Ok(true)
    }

    /// Whether somebody came whom the program has not met.
    pub(crate) fn has_arrival(&self) -> bool {
        self.has_arrival.load(Ordering::Acquire)
    }

    /// Meets whoever came since the last call.
    #[inline]
    pub(crate) fn meet(&self) -> Outcome<()> {
        self.look_who_is_there();
        self.meet_arrival()
    }

    /// As [`meet`](Self::meet), where it makes no difference who is there.
    #[inline]
    fn meet_arrival(&self) -> Outcome<()> {
        if self.has_arrival() {
            self.meet_now()?;
            if !self.polled.load(Ordering::Acquire) {
                // Whoever asks for the descriptor later knows of this.
                self.bell.clear();
            }
        }
        Ok(())
    }

    /// As [`meet`](Self::meet), by another thread than the program's: the peer is to read what was written for it, although the
    /// program does something else. The bell still tells the program.
    pub(crate) fn meet_meanwhile(&self) {
        if self.has_arrival() {
            self.met_meanwhile.store(true, Ordering::Release);
            // The program's next call finds out what went wrong.
            let _ = self.meet_now();
        }
    }

    #[cold]
    fn meet_now(&self) -> Outcome<()> {
        let (mut reading, mut writing) = (self.reading.lock(), self.writing.lock());
        let arrival = lock(&self.arrival).take();
        let met = self.begin(arrival, &mut reading, &mut writing);
        // Last: until then whoever sees that somebody came waits here for the new state.
        self.has_arrival.store(false, Ordering::Release);
        met
    }

    fn begin(&self, arrival: Option<Outcome<Halves>>, reading: &mut Reading, writing: &mut Writing) -> Outcome<()> {
        match arrival {
            None => Ok(()),
            Some(Err(fault)) => {
                *lock(&self.reason) = fault.clone();
                self.state.store(CLOSED, Ordering::Release);
                Err(fault)
            }
            Some(Ok((from, to))) => {
                if let Some(watch) = from.watch() {
                    let _ = self.original.set(watch);
                }
                reading.begin(from);
                writing.begin(to)?;
                self.state.store(OPEN, Ordering::Release);
                self.look_who_is_there();
                if self.polled.load(Ordering::Acquire) {
                    reading.arm_bell(&self.bell)?;
                }
                // Another thread may wait for whom this one met.
                drop(lock(&self.arrival));
                self.arrived.notify_all();
                Ok(())
            }
        }
    }

    /// Waits for somebody to come.
    fn await_arrival(&self) {
        let mut arrival = lock(&self.arrival);
        while arrival.is_none() && self.state.load(Ordering::Acquire) != OPEN {
            arrival = self.arrived.wait(arrival).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The peer went. A server waits for another.
    fn note_end(&self, why: Fault) {
        *lock(&self.reason) = why;
        if self.state.compare_exchange(OPEN, CLOSED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            && let Some(door) = &*lock(&self.door)
        {
            door.open();
        }
    }

    /// Whether a call may go on without a peer.
    fn goes_on(&self, ways: CallMode) -> Outcome<()> {
        if self.state.load(Ordering::Acquire) == CLOSED && !(ways.persist && self.role == Role::Server) {
            return Err(lock(&self.reason).clone());
        }
        Ok(())
    }

    /// Reads what there is, or all of `to` or nothing. 0 where there is too little and the call is not to wait.
    #[inline]
    pub(crate) fn read(&self, to: &mut [u8], whole: bool, ways: CallMode) -> Outcome<usize> {
        match self.read_at_once(to, whole) {
            0 => self.read_at_length(to, whole, ways),
            len => Ok(len),
        }
    }

    /// What nearly every call comes to: there are bytes, and nobody else has to do with them. Where somebody polls, less than
    /// was asked for is no short work.
    #[inline(always)]
    fn read_at_once(&self, to: &mut [u8], whole: bool) -> usize {
        if self.has_arrival() {
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
                // In the layout of the original an event has to be asked for, and then there may be something after all.
                Ok(Took::Wait) if self.is_original() && !whole && reading.grew()? => {}
                Ok(Took::Wait) => return Ok(0),
                Ok(Took::Nobody) => {
                    drop(reading);
                    self.goes_on(ways)?;
                    if !ways.blocking {
                        return Ok(0);
                    }
                    self.await_arrival();
                }
                // What does not fit is no fault of the peer's.
                Err(fault) if fault.errno == libc::EMSGSIZE => return Err(fault),
                Ok(Took::End(why)) if self.is_original() => {
                    drop(reading);
                    *lock(&self.reason) = why;
                    self.look_who_is_there();
                    self.goes_on(ways)?;
                    if !ways.blocking {
                        return Ok(0);
                    }
                    self.await_change()?;
                }
                Err(why) if self.is_original() => return Err(why),
                Ok(Took::End(why)) | Err(why) => {
                    drop(reading.take_half());
                    drop(reading);
                    self.note_end(why);
                    // One who is writing finds it out for itself.
                    if let Some(mut writing) = self.writing.try_lock() {
                        drop(writing.take_half());
                    }
                }
            }
        }
    }

    /// Writes what there is room for, or all of `bytes` or nothing; where it may wait always all of them.
    #[inline]
    pub(crate) fn write(&self, bytes: &[u8], whole: bool, ways: CallMode) -> Outcome<usize> {
        if self.write_at_once(bytes) { Ok(bytes.len()) } else { self.write_at_length(bytes, whole, ways) }
    }

    /// What nearly every call comes to: somebody is there, and there is room.
    #[inline(always)]
    fn write_at_once(&self, bytes: &[u8]) -> bool {
        let may = !bytes.is_empty() && !self.has_arrival() && self.state.load(Ordering::Acquire) == OPEN;
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
            self.goes_on(ways)?;
            let mut writing = self.writing.lock();
            let rest = &bytes[done..];
            let polled = self.polled.load(Ordering::Acquire).then_some(&self.bell);
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
                            self.await_arrival();
                        }
                        Err(fault) => self.stop_writing(writing, fault, ways)?,
                    }
                }
                Err(fault) if fault.errno == libc::EMSGSIZE => return Err(fault),
                Err(fault) => self.stop_writing(writing, fault, ways)?,
            }
        }
    }

    /// Writing failed: says so, or waits for the next client where a server persists.
    fn stop_writing(&self, mut writing: BiasedGuard<'_, Writing>, fault: Fault, ways: CallMode) -> Outcome<()> {
        if self.is_original() {
            drop(writing);
            if fault.errno != libc::EPIPE || !ways.persist {
                return Err(fault);
            }
            return self.await_change();
        }
        drop(writing.take_half());
        drop(writing);
        self.note_end(fault);
        Ok(())
    }

    /// Waits until a read or a write has more to do than when it was last tried, or the peer comes or goes.
    pub(crate) fn wait(&self) -> Outcome<()> {
        self.look_who_is_there();
        // Looked at first: who came before that is seen by what follows, who comes later rings.
        let state = self.state.load(Ordering::Acquire);
        if self.has_arrival() || self.met_meanwhile.swap(false, Ordering::AcqRel) {
            self.take_bell();
            self.meet()?;
            return self.notify_of_data();
        }
        match state {
            OPEN => self.wait_for_peer()?,
            CLOSED if self.role == Role::Client || self.lost.load(Ordering::Acquire) => {
                // What is left can still be read; after that there is nothing to wait for.
                return if self.data_ready()? > 0 { Ok(()) } else { Err(lock(&self.reason).clone()) };
            }
            _ if self.is_original() => self.wait_for_peer()?,
            _ => {
                self.bell.wait()?;
                self.heard();
                self.meet()?;
                self.notify_of_data()?;
            }
        }
        self.meet()?;
        self.check_peer();
        Ok(())
    }

    /// With the news that somebody came that of its first bytes may have been taken as well: who goes on to poll is told again.
    fn notify_of_data(&self) -> Outcome<()> {
        if self.polled.load(Ordering::Acquire)
            && let Some(mut reading) = self.reading.try_lock()
            && reading.grew()?
        {
            self.bell.notify();
        }
        Ok(())
    }

    fn wait_for_peer(&self) -> Outcome<()> {
        let wants_room = self.writing.lock().wants_room();
        let original = self.is_original();
        if !self.polled.load(Ordering::Acquire) && !wants_room && !original {
            // Nobody but this call is to be woken, and for one thing only: the half itself waits best.
            let mut reading = self.reading.lock();
            if reading.can_grow() {
                return reading.wait_for_more();
            }
        }
        self.fd()?;
        // Whoever polled the descriptor and found it readable does not wait, though it were for nothing: to look makes a half
        // quiet again. After the look it is taken as well, so that the descriptor is quiet when this returns.
        let (rang, data) = (self.take_bell(), self.data_grew()?);
        let grew = data || (wants_room && self.room_grew()?);
        let quiet = rang && data; // Bytes that are found leave the descriptor as it is.
        if !(quiet || self.take_bell() || grew || rang) {
            self.bell.wait()?;
            self.heard();
        }
        Ok(())
    }

    /// Takes what rang, if anything did.
    fn take_bell(&self) -> bool {
        let rang = self.bell.clear();
        if rang {
            self.heard();
        }
        rang
    }

    fn data_grew(&self) -> Outcome<bool> {
        self.reading.lock().grew()
    }

    fn room_grew(&self) -> Outcome<bool> {
        self.writing.lock().grew(&self.bell)
    }

    /// Looks whether the peer is still there.
    fn check_peer(&self) {
        if self.state.load(Ordering::Acquire) == OPEN
            && !self.is_original()
            && let Some(mut reading) = self.reading.try_lock()
        {
            match reading.ended() {
                Ok(None) => {}
                Ok(Some(why)) | Err(why) => self.note_end(why),
            }
        }
    }

    pub(crate) fn is_open(&self, ways: CallMode) -> u8 {
        let _told_by_the_next_call = self.meet();
        if ways.persist && self.role == Role::Server {
            return OPEN;
        }
        self.check_peer();
        let state = self.state.load(Ordering::Acquire);
        if state == OPEN {
            self.met_meanwhile.store(false, Ordering::Release);
        }
        state
    }

    /// Bytes that can be read at once.
    pub(crate) fn data_ready(&self) -> Outcome<usize> {
        self.meet()?;
        let polled = self.polled.load(Ordering::Acquire);
        // Another thread is reading: what it leaves is not known yet.
        self.reading.try_lock().map_or(Ok(0), |mut reading| reading.readable_bytes(polled))
    }

    /// Bytes that can be written at once.
    pub(crate) fn buffer_space(&self) -> Outcome<usize> {
        self.meet()?;
        let polled = self.polled.load(Ordering::Acquire).then_some(&self.bell);
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

    /// The descriptor that polls readable when [`wait`](Self::wait) would not block.
    pub(crate) fn fd(&self) -> Outcome<RawFd> {
        if !self.polled.swap(true, Ordering::AcqRel)
            && let Some(mut reading) = self.reading.try_lock()
        {
            reading.arm_bell(&self.bell)?;
        }
        Ok(self.bell.fd().as_raw_fd())
    }
}
