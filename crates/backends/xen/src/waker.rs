// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One event channel, and three who sleep on it without taking each other's events: the reader, the writer, and whoever
//! waits for a control message.
//!
//! The kernel says `EPOLLOUT` of an event channel's file always, and says it *anew* with every event. So each waiter has
//! an epoll instance of its own, edge-triggered on `EPOLLOUT`: an event puts the file on the ready list of each, where it
//! stays (sticky) until `epoll_wait` takes it off that one list. Reading the event and unmasking the port is apart from
//! that, and whoever drains does it; until then the port is masked, so that a storm costs one interrupt for each drain.

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

/// What the events of an epoll instance are about.
const NOTIFIED: u64 = 0;
const ENDED: u64 = 1;

/// What polls readable always: put into a waiter's set, it says that the end came. One does for all.
static SIGN: OnceLock<ReservedFd> = OnceLock::new();

/// One waiter's place.
#[derive(Debug)]
pub(crate) struct Waker {
    epoll: ReservedFd,
    port: Arc<dyn Port>,
    /// `wait` took a ring off the list, so that whoever drains need not.
    taken: AtomicBool,
    /// Somebody polls the descriptor: rings stay on the list until they are drained.
    polled: AtomicBool,
}

impl Waker {
    pub(crate) fn new(port: &Arc<dyn Port>) -> Result<Self> {
        if SIGN.get().is_none() {
            // Who comes second drops its own.
            let sign = event::eventfd(1).map_err(|error| Error::os("eventfd", error))?;
            let _ = SIGN.set(reserve(sign)?);
        }
        let epoll = epoll_set()?;
        let (data, flags) = (epoll::EventData::new_u64(NOTIFIED), epoll::EventFlags::OUT | epoll::EventFlags::ET);
        epoll::add(&epoll, port.fd(), data, flags).map_err(|error| Error::os("epoll_ctl", error))?;
        let port = Arc::clone(port);
        Ok(Self { epoll, port, taken: AtomicBool::new(false), polled: AtomicBool::new(false) })
    }

    /// Sleeps until there is an event, an end or neither by `deadline`. `look` is called before each sleep, and makes the
    /// end happen if it is time.
    pub(crate) fn wait(&self, deadline: Deadline, look: impl Fn()) -> Result<Woken> {
        if self.taken.load(Ordering::SeqCst) {
            return Ok(Woken::Notified);
        }
        loop {
            look();
            let left = deadline.remaining();
            match self.take_event(left) {
                Ok(Some(NOTIFIED)) => {
                    // ORDER SeqCst: with `fd`, which stores and loads the other way round; one of the two puts it back.
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

    /// Forgets events that came before, and lets new ones in. Says whether there were any.
    pub(crate) fn drain(&self) -> bool {
        let rung = self.taken.swap(false, Ordering::SeqCst)
            | matches!(self.take_event(Some(Duration::ZERO)), Ok(Some(NOTIFIED)));
        self.port.clear();
        rung
    }

    /// A descriptor that polls readable while an event is undrained, or the end came.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.polled.store(true, Ordering::SeqCst);
        if self.taken.swap(false, Ordering::SeqCst) {
            self.put_back();
        }
        self.epoll.as_fd()
    }

    /// Tells that the end came, from now on. Says whether that could be done; if not, its waiter is woken and looks again.
    pub(crate) fn end(&self) -> bool {
        let sign = SIGN.get().expect("made with the first sleeper's place");
        let done = epoll::add(&self.epoll, sign, epoll::EventData::new_u64(ENDED), epoll::EventFlags::IN);
        let done = matches!(done, Ok(()) | Err(Errno::EXIST));
        if !done {
            self.put_back();
        }
        done
    }

    /// Puts an event on the list, as if one had come.
    pub(crate) fn put_back(&self) {
        self.taken.store(false, Ordering::SeqCst);
        let data = epoll::EventData::new_u64(NOTIFIED);
        // To modify an entry is to look at it again: the port is writable, so it goes on the list.
        let done = epoll::modify(&self.epoll, self.port.fd(), data, epoll::EventFlags::OUT | epoll::EventFlags::ET);
        if done.is_err() {
            self.taken.store(true, Ordering::SeqCst);
        }
    }

    /// Takes what is on the ready list, waiting for it for at most `left`: an event, before the end. `wait` comes back for a
    /// deadline not yet reached.
    fn take_event(&self, left: Option<Duration>) -> io::Result<Option<u64>> {
        lowest_event(self.epoll.as_fd(), left)
    }
}

/// What all connections of a session watch for edges, and nobody takes anything from: an epoll instance with the event channel,
/// and an eventfd by which this process wakes its own. Whoever is woken hears the control path, which lets the next event in.
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

    /// A doorbell for one connection.
    pub(crate) fn of_connection(&self) -> io::Result<SingleDoorbell> {
        let copy = |fd: &ReservedFd| rustix::io::fcntl_dupfd_cloexec(fd, 0);
        aside::lifted(|| SingleDoorbell::of_watched_session(copy(&self.set)?, copy(&self.own)?))
    }

    /// Wakes all who watch it here.
    pub(crate) fn raise(&self) {
        raise(&self.own);
    }
}
