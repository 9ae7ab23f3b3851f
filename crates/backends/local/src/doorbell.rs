// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A doorbell that a hostile peer cannot jam (L-7).
//!
//! Both endpoints hold whatever a doorbell is made of, so a call on it may not depend on anything that the other can
//! change. Not on `O_NONBLOCK` (it belongs to the open file that both share), not on a lock that the other can hold.
//! This rules out
//! * an eventfd that is rung by `write`: the peer saturates the counter, clears `O_NONBLOCK`, and the notifier blocks;
//!   a write to an eventfd knows no per-call `RWF_NOWAIT`;
//! * a pipe: it holds its mutex while it copies to or from user memory, so a peer that reads into memory whose page
//!   faults never end (FUSE, userfaultfd) blocks the other's write for ever, `O_NONBLOCK` or not;
//! * a socket whose receiving end is shared, for the same reason. A socket pair of which the waiter keeps the receiving
//!   end to itself is safe, and costs a buffer allocation a ring: about half as much again as an eventfd on one CPU.
//!
//! So: the waiter makes an *eventfd in semaphore mode*, filled to the brim, and gives it to the notifier. **Ringing
//! reads it**: a read takes one from the counter, reports that there is room (`EPOLLOUT`) to whoever polls, and takes
//! `RWF_NOWAIT`, so it never blocks; it copies to user memory under no lock. The waiter never reads: it keeps an epoll
//! instance of its own, edge-triggered on `EPOLLOUT`. Each ring puts the doorbell on that instance's ready list, which
//! is what makes it sticky; `epoll_wait` takes it off, which is all that draining needs. One system call rings, one
//! sleeps, wakes and drains (where the descriptor is polled as well, one more each for the last two).
//!
//! * The peer empties the counter, or fills it: its own rings have no effect. The other direction has its own doorbell.
//! * The peer sets any flag: no call here looks at the flags.
//! * The peer goes away: the same epoll instance watches the control socket for hang-up.
//! * No ring is lost between two endpoints that follow R-12 even where the notifier issues no fence. The ready list is
//!   locked when a ring is put on and when it is taken off. So what was published before a ring that found the doorbell
//!   already on the list is visible to the waiter that took it off.
//!
//! Needs Linux 5.8 (`RWF_NOWAIT` on an eventfd); [`EventfdDoorbell::new`] checks once that a doorbell really rings.

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

/// What the events of a doorbell's epoll instance are about.
const NOTIFIED: u64 = 0;
const HUNG_UP: u64 = 1;

/// One slot's doorbell, on the side that waits.
#[derive(Debug)]
pub(crate) struct EventfdDoorbell {
    /// What the peer gets.
    event: ReservedFd,
    /// Where rings arrive. Never leaves this process.
    epoll: ReservedFd,
    /// `wait` took a ring off the list, so that whoever drains need not.
    taken: AtomicBool,
    /// Somebody polls the descriptor: rings stay on the list until they are drained.
    polled: AtomicBool,
    /// This endpoint gave the link up.
    over: AtomicBool,
}

impl EventfdDoorbell {
    /// A silent doorbell that also tells when the other side of `control` hangs up.
    pub(crate) fn new(control: BorrowedFd<'_>) -> Result<Self> {
        static WORKS: OnceLock<bool> = OnceLock::new();
        let doorbell = Self::make(control)?;
        let works = WORKS.get_or_init(|| {
            raise_full(&doorbell.event);
            let rung = matches!(doorbell.wait(Deadline::after(Duration::ZERO)), Ok(Woken::Notified));
            doorbell.drain();
            rung
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
        let [event, epoll] = [event, epoll].map(crate::aside);
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

    /// What the peer gets, to ring it.
    pub(crate) fn to_ring(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Ends every wait from now on: this endpoint's link is no more.
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
                    // It stays readable, as a hang-up does.
                    raise_full(&self.event);
                    return Ok(Woken::PeerGone);
                }
                Ok(Some(NOTIFIED)) => {
                    // ORDER SeqCst: with `fd`, which stores and loads the other way round; one of the two puts it back.
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
            // Nothing to be done about an error: the doorbell rings for nothing, or the next wait reports it.
            let _ = self.take_event(Some(Duration::ZERO));
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.polled.store(true, Ordering::SeqCst);
        self.put_back();
        self.epoll.as_fd()
    }

    /// Puts a ring that `wait` took back on the list.
    fn put_back(&self) {
        if self.taken.swap(false, Ordering::SeqCst) {
            raise_full(&self.event);
        }
    }

    /// Takes what is on the ready list, waiting for it for at most `left`: a ring, before a hang-up. `wait` comes back for a
    /// deadline not yet reached.
    fn take_event(&self, left: Option<Duration>) -> io::Result<Option<u64>> {
        lowest_event(self.epoll.as_fd(), left)
    }
}

/// Whether `fd` is an eventfd that can be read, so that [`ring`] rings it and cannot block on it. Asks /proc and the
/// descriptor's flags, which know without asking the file: a `stat` of a file on a hostile file system may take for ever. One
/// opened with `O_PATH` has the name of what it stands for and does nothing.
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

/// Both endpoints' doorbells of one link.
#[derive(Debug)]
pub(crate) struct LocalDoorbells {
    /// This endpoint waits here.
    pub own: Arc<[EventfdDoorbell; 2]>,
    /// This endpoint rings here.
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
