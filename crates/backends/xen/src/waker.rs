// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets three waiters sleep on one event channel without taking each other's events: the reader, the writer, and the
//! waiter for control messages.
//!
//! The kernel always reports `EPOLLOUT` for an event channel's file, and reports it *again* with every event. So each
//! waiter has an epoll instance of its own, edge-triggered on `EPOLLOUT`. An event puts the file on the ready list of
//! each instance, where it stays until `epoll_wait` takes it off that one list. Reading the event and unmasking the
//! port is separate from that, and is done by the waiter that drains. Until then the port is masked, so that a storm
//! costs one interrupt for each drain.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::{event::epoll, io::Errno};
use tombolo_domain::{
    Deadline, Error, Result, SingleDoorbell, Woken,
    aside::{self, ReservedFd},
};
use tombolo_os::{event, poll::lowest_event};

use crate::{
    hypervisor::Port,
    os::{epoll_set, eventfd, raise, reserve},
};

/// Subjects of the events of an epoll instance.
const NOTIFIED: u64 = 0;
const ENDED: u64 = 1;

/// Descriptor that always polls readable. In a waiter's epoll instance it reports the end of the connection. All
/// waiters share it.
static SIGN: OnceLock<ReservedFd> = OnceLock::new();

/// State of one waiter.
#[derive(Debug)]
pub(crate) struct Waker {
    epoll: ReservedFd,
    port: Arc<dyn Port>,
    /// Whether `wait` took a notification off the list, so that `drain` need not.
    taken: AtomicBool,
    /// Whether the descriptor is polled: notifications then stay on the list until they are drained.
    polled: AtomicBool,
}

impl Waker {
    pub(crate) fn new(port: &Arc<dyn Port>) -> Result<Self> {
        if SIGN.get().is_none() {
            // A second thread that comes here drops its own eventfd.
            let sign = event::eventfd(1).map_err(|error| Error::os("eventfd", error))?;
            let _ = SIGN.set(reserve(sign)?);
        }
        let epoll = epoll_set()?;
        let (data, flags) = (epoll::EventData::new_u64(NOTIFIED), epoll::EventFlags::OUT | epoll::EventFlags::ET);
        epoll::add(&epoll, port.fd(), data, flags).map_err(|error| Error::os("epoll_ctl", error))?;
        let port = Arc::clone(port);
        Ok(Self { epoll, port, taken: AtomicBool::new(false), polled: AtomicBool::new(false) })
    }

    /// Sleeps until an event, the end or `deadline`. Calls `look` before each sleep, which makes the end happen if it
    /// is due.
    pub(crate) fn wait(&self, deadline: Deadline, look: impl Fn()) -> Result<Woken> {
        if self.taken.load(Ordering::SeqCst) {
            return Ok(Woken::Notified);
        }
        loop {
            look();
            let left = deadline.remaining();
            match self.take_event(left) {
                Ok(Some(NOTIFIED)) => {
                    // ORDER SeqCst: with `fd`, which stores and loads in the opposite order; one of the two puts the
                    // notification back.
                    self.taken.store(true, Ordering::SeqCst);
                    if self.polled.load(Ordering::SeqCst) {
                        self.put_back();
                    }
                    return Ok(Woken::Notified);
                }
                Ok(Some(_)) => return Ok(Woken::PeerGone),
                Ok(None) if left.is_some_and(|left| left.is_zero()) => return Ok(Woken::TimedOut),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::os("epoll_wait", error)),
            }
        }
    }

    /// Clears earlier events, and lets new ones in. Returns whether there were any.
    pub(crate) fn drain(&self) -> bool {
        let notified = self.taken.swap(false, Ordering::SeqCst)
            | matches!(self.take_event(Some(Duration::ZERO)), Ok(Some(NOTIFIED)));
        self.port.clear();
        notified
    }

    /// Returns a descriptor that polls readable while an event is undrained, or once the end has come.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.polled.store(true, Ordering::SeqCst);
        if self.taken.swap(false, Ordering::SeqCst) {
            self.put_back();
        }
        self.epoll.as_fd()
    }

    /// Reports the end to the waiter from now on. Returns whether that succeeded; if not, the waiter is woken and
    /// checks again.
    pub(crate) fn end(&self) -> bool {
        let sign = SIGN.get().expect("made with the first sleeper's place");
        let done = epoll::add(&self.epoll, sign, epoll::EventData::new_u64(ENDED), epoll::EventFlags::IN);
        let done = matches!(done, Ok(()) | Err(Errno::EXIST));
        if !done {
            self.put_back();
        }
        done
    }

    /// Puts an event on the list, as if one had arrived.
    pub(crate) fn put_back(&self) {
        self.taken.store(false, Ordering::SeqCst);
        let data = epoll::EventData::new_u64(NOTIFIED);
        // Modifying an entry makes the kernel check it again: the port is writable, so it goes on the list.
        let done = epoll::modify(&self.epoll, self.port.fd(), data, epoll::EventFlags::OUT | epoll::EventFlags::ET);
        if done.is_err() {
            self.taken.store(true, Ordering::SeqCst);
        }
    }

    /// Takes an event off the ready list, and waits for one for at most `left`. A notification precedes the end. May
    /// return before `left` is over; `wait` then calls it again.
    fn take_event(&self, left: Option<Duration>) -> io::Result<Option<u64>> {
        lowest_event(self.epoll.as_fd(), left)
    }
}

/// Doorbell that all connections of a session watch for edges, and from which nobody takes anything. It is an epoll
/// instance with the event channel, and an eventfd by which this process wakes its own waiters. A woken waiter
/// reads the control path, which lets the next event in.
#[derive(Debug)]
pub(crate) struct SharedDoorbell {
    set: ReservedFd,
    own: ReservedFd,
}

impl SharedDoorbell {
    pub(crate) fn new(port: &dyn Port) -> Result<Self> {
        let (set, own) = (epoll_set()?, eventfd()?);
        let add = |fd: BorrowedFd<'_>, what: epoll::EventFlags| {
            let data = epoll::EventData::new_u64(NOTIFIED);
            epoll::add(&set, fd, data, what | epoll::EventFlags::ET).map_err(|error| Error::os("epoll_ctl", error))
        };
        add(port.fd(), epoll::EventFlags::OUT)?;
        add(own.as_fd(), epoll::EventFlags::IN)?;
        Ok(Self { set, own })
    }

    /// Returns a doorbell for one connection.
    pub(crate) fn of_connection(&self) -> io::Result<SingleDoorbell> {
        let copy = |fd: &ReservedFd| rustix::io::fcntl_dupfd_cloexec(fd, 0);
        aside::lifted(|| SingleDoorbell::of_watched_session(copy(&self.set)?, copy(&self.own)?))
    }

    /// Wakes all waiters of this process that watch it.
    pub(crate) fn raise(&self) {
        raise(&self.own);
    }
}
