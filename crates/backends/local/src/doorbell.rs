// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements a doorbell that a hostile peer cannot jam (L-7).
//!
//! Both endpoints hold the descriptors of a doorbell, so no call on it may depend on anything that the peer can change.
//! That excludes `O_NONBLOCK` (it belongs to the open file that both share) and any lock that the peer can hold. It
//! rules out
//! * an eventfd that is notified by `write`: the peer saturates the counter, clears `O_NONBLOCK`, and the notifier
//!   blocks; a write to an eventfd has no per-call `RWF_NOWAIT`;
//! * a pipe: it holds its mutex while it copies to or from user memory, so a peer that reads into memory whose page
//!   faults never end (FUSE, userfaultfd) blocks the other's write for ever, with or without `O_NONBLOCK`;
//! * a socket whose receiving end is shared, for the same reason. A socket pair whose receiving end only the waiter has
//!   is safe, but costs a buffer allocation for each notification: about half as much again as an eventfd on one CPU.
//!
//! Instead the waiter makes an *eventfd in semaphore mode*, fills it to its maximum, and gives it to the notifier. **A
//! notifier reads it**: the read takes one from the counter and reports room (`EPOLLOUT`) to whoever polls. It supports
//! `RWF_NOWAIT`, so it never blocks, and it copies to user memory under no lock. The waiter never reads: it has an
//! epoll instance of its own, edge-triggered on `EPOLLOUT`. Each notification puts the doorbell on that instance's
//! ready list, which keeps the notification; `epoll_wait` takes it off, which is all that draining needs. One system
//! call notifies; one sleeps, wakes and drains. If the descriptor is polled as well, waking and draining take one more
//! each.
//!
//! * The peer empties or fills the counter: only its own notifications lose their effect. The other direction has its
//!   own doorbell.
//! * The peer sets any flag: no call here depends on the flags.
//! * The peer goes away: the same epoll instance watches the control socket for hang-up.
//! * No notification is lost between two endpoints that follow R-12, even where the notifier issues no fence.
//!   The ready list is locked when a notification is put on it and when it is taken off. So if a notification finds the
//!   doorbell already on the list, what was published before it is visible to the waiter that takes the doorbell off.
//!
//! Needs Linux 5.8 (`RWF_NOWAIT` on an eventfd); [`EventfdDoorbell::new`] checks once that a notification really
//! arrives.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::{event::epoll, fs::OFlags, io::Errno};
use tombolo_domain::{Deadline, Doorbell, Error, Result, Slot, Woken};
use tombolo_os::{
    event::{full_eventfd, raise_full},
    poll::lowest_event,
    reserved::ReservedFd,
};

/// Subjects of the events of a doorbell's epoll instance.
const NOTIFIED: u64 = 0;
const HUNG_UP: u64 = 1;

/// Doorbell of one slot, on the waiter's side.
#[derive(Debug)]
pub(crate) struct EventfdDoorbell {
    /// Eventfd that the peer gets.
    event: ReservedFd,
    /// Instance on which notifications arrive. Never leaves this process.
    epoll: ReservedFd,
    /// Whether `wait` took a notification off the list, so that `drain` need not.
    taken: AtomicBool,
    /// Whether the descriptor is polled: notifications then stay on the list until they are drained.
    polled: AtomicBool,
    /// Whether this endpoint gave the connection up.
    over: AtomicBool,
}

impl EventfdDoorbell {
    /// Makes a doorbell without notifications that also reports when the other side of `control` hangs up.
    pub(crate) fn new(control: BorrowedFd<'_>) -> Result<Self> {
        static WORKS: OnceLock<bool> = OnceLock::new();
        let doorbell = Self::make(control)?;
        let works = WORKS.get_or_init(|| {
            raise_full(&doorbell.event);
            let notified = matches!(doorbell.wait(Deadline::after(Duration::ZERO)), Ok(Woken::Notified));
            doorbell.drain();
            notified
        });
        if *works {
            Ok(doorbell)
        } else {
            Err(Error::os("preadv2(RWF_NOWAIT) on an eventfd (Linux 5.8)", Errno::OPNOTSUPP))
        }
    }

    fn make(control: BorrowedFd<'_>) -> Result<Self> {
        let event = full_eventfd().map_err(|error| Error::os("eventfd", error))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| Error::os("epoll_create", error))?;
        let [event, epoll] = [event, epoll].map(crate::reserve);
        let (event, epoll) = (event?, epoll?);
        let watch = |fd: BorrowedFd<'_>, about, flags| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(about), flags)
                .map_err(|error| Error::os("epoll_ctl", error))
        };
        watch(event.as_fd(), NOTIFIED, epoll::EventFlags::OUT | epoll::EventFlags::ET)?;
        watch(control, HUNG_UP, epoll::EventFlags::RDHUP)?;
        Ok(Self {
            event,
            epoll,
            taken: AtomicBool::new(false),
            polled: AtomicBool::new(false),
            over: AtomicBool::new(false),
        })
    }

    /// Returns the eventfd by which the peer notifies.
    pub(crate) fn to_ring(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Ends every wait from now on, because this endpoint's connection is over.
    pub(crate) fn give_up(&self) {
        self.over.store(true, Ordering::Relaxed);
        raise_full(&self.event);
    }

    fn wait(&self, deadline: Deadline) -> Result<Woken> {
        if self.taken.load(Ordering::SeqCst) {
            return Ok(Woken::Notified);
        }
        loop {
            let left = deadline.remaining();
            match self.take_event(left) {
                Ok(Some(NOTIFIED)) if self.over.load(Ordering::Relaxed) => {
                    // The doorbell stays readable, as after a hang-up.
                    raise_full(&self.event);
                    return Ok(Woken::PeerGone);
                }
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
                Ok(None) if self.over.load(Ordering::Relaxed) => return Ok(Woken::PeerGone),
                Ok(None) if left.is_some_and(|left| left.is_zero()) => return Ok(Woken::TimedOut),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::os("epoll_wait", error)),
            }
        }
    }

    fn drain(&self) {
        if !self.taken.swap(false, Ordering::SeqCst) {
            // An error needs no handling: the doorbell wakes needlessly, or the next wait reports the error.
            let _ = self.take_event(Some(Duration::ZERO));
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.polled.store(true, Ordering::SeqCst);
        self.put_back();
        self.epoll.as_fd()
    }

    /// Puts a notification that `wait` took back on the list.
    fn put_back(&self) {
        if self.taken.swap(false, Ordering::SeqCst) {
            raise_full(&self.event);
        }
    }

    /// Takes an event off the ready list, and waits for one for at most `left`. A notification precedes a hang-up. May
    /// return before `left` is over; `wait` then calls it again.
    fn take_event(&self, left: Option<Duration>) -> io::Result<Option<u64>> {
        lowest_event(self.epoll.as_fd(), left)
    }
}

/// Returns whether `fd` is an eventfd that can be read, so that [`raise_full`] notifies through it and cannot block on
/// it. Asks /proc and the descriptor's flags, neither of which asks the file: a `stat` of a file on a hostile file
/// system may take for ever. A descriptor opened with `O_PATH` has the name of its target, but cannot be read.
pub(crate) fn is_eventfd(fd: BorrowedFd<'_>) -> Result<bool> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = match rustix::fs::readlink(path.as_str(), Vec::new()) {
        Ok(target) => target,
        Err(error) => return Err(Error::Os { call: "readlink", path: Some(path), source: error.into() }),
    };
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|error| Error::os("fcntl(F_GETFL)", error))?;
    let can_be_read = !flags.contains(OFlags::PATH) && flags & OFlags::RWMODE != OFlags::WRONLY;
    Ok(target.as_bytes() == b"anon_inode:[eventfd]" && can_be_read)
}

/// Doorbells of both endpoints of a connection.
#[derive(Debug)]
pub(crate) struct LocalDoorbells {
    /// Doorbells on which this endpoint waits.
    pub own: Arc<[EventfdDoorbell; 2]>,
    /// Eventfds by which this endpoint notifies its peer.
    pub peer: [ReservedFd; 2],
}

impl Doorbell for LocalDoorbells {
    fn notify(&self, slot: Slot) {
        raise_full(&self.peer[slot.index()]);
    }

    fn wait(&self, slot: Slot, deadline: Deadline) -> Result<Woken> {
        self.own[slot.index()].wait(deadline)
    }

    fn drain(&self, slot: Slot) {
        self.own[slot.index()].drain();
    }

    fn end_waits(&self) {
        self.own.iter().for_each(EventfdDoorbell::give_up);
    }

    fn fd(&self, slot: Slot) -> BorrowedFd<'_> {
        self.own[slot.index()].fd()
    }
}
