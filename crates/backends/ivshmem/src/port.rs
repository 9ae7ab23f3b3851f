// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds what the broker gave for one connection: this endpoint's window, the peer's, and the means by which each
//! notifies the other (V-2).
//!
//! In a guest these are descriptors of the kernel module; on a host, and in tests, memfds and eventfds. Higher layers
//! do not distinguish them.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::OnceLock,
};

use tombolo_domain::{Error, Result};
use tombolo_mem::{OwnSegment, PeerSegment};
use tombolo_os::reserved::{ReservedFd, lifted};

use crate::{
    mailbox::malformed,
    sys::{self, OwnMemory},
};

/// Number of event channels of a connection: the reader's, the writer's, the control path's (V-3).
pub const DOORBELLS: usize = 3;
/// Index of the control path's doorbell; the first two are those of [`Slot`](tombolo_domain::Slot).
pub(crate) const CONTROL: usize = 2;
/// Index of the reader's doorbell.
pub(crate) const DATA: usize = 0;

/// A window as offset and length within its memfd.
pub(crate) type Range = (u64, u64);

/// Makes an eventfd with an initial count of `count`.
pub(crate) fn event(count: u32) -> Result<ReservedFd> {
    lifted(|| ReservedFd::new(tombolo_os::event::eventfd(count)?)).map_err(|error| Error::os("eventfd", error))
}

/// Moves a descriptor out of the way of the program, where the program is unaware of Tombolo.
pub(crate) fn reserve(fd: OwnedFd) -> Result<ReservedFd> {
    ReservedFd::new(fd).map_err(|error| Error::os("fcntl", error))
}

#[derive(Debug)]
pub(crate) struct Port {
    own: OwnMemory,
    /// The peer's window, once the peer accepted.
    peer: OnceLock<(ReservedFd, Range)>,
    /// How this endpoint notifies the peer.
    outgoing: Outgoing,
    /// Eventfds on which this endpoint is notified. Until one is made, the module keeps the notifications for it.
    incoming: [OnceLock<ReservedFd>; DOORBELLS],
}

/// How this endpoint notifies the peer.
#[derive(Debug)]
enum Outgoing {
    /// Notifications are bits written to the own window.
    Module,
    /// An eventfd for each doorbell.
    Events([ReservedFd; DOORBELLS]),
}

impl Port {
    /// Takes the descriptors of the broker's statement of a connection, and the range `own` from it. The module's
    /// windows are descriptors of that range alone, so they begin at 0.
    pub(crate) fn new(descriptors: Vec<OwnedFd>, own: Range) -> Result<Self> {
        let count = descriptors.len();
        let mut all = descriptors.into_iter().map(reserve).collect::<Result<Vec<_>>>()?.into_iter();
        let wrong = || malformed("V-2", format!("a connection with {count} descriptors beside its socket"));
        let own_fd = all.next().ok_or_else(wrong)?;
        let rest: Vec<_> = all.collect();
        if rest.is_empty() {
            return Ok(Self::of_module(own_fd, own.1));
        }
        let events = <[ReservedFd; 2 * DOORBELLS]>::try_from(rest);
        let [a, b, c, d, e, f] = events.map_err(|_| wrong())?;
        let own = OwnMemory::new(own_fd, own.0, own.1);
        let incoming = [d, e, f].map(OnceLock::from);
        Ok(Self { own, peer: OnceLock::new(), outgoing: Outgoing::Events([a, b, c]), incoming })
    }

    fn of_module(own: ReservedFd, own_len: u64) -> Self {
        let own = OwnMemory::new(own, 0, own_len);
        Self { own, peer: OnceLock::new(), outgoing: Outgoing::Module, incoming: Default::default() }
    }

    /// Makes the eventfd of a doorbell of this endpoint, unless it exists. Earlier notifications reach it as well.
    pub(crate) fn listen(&self, doorbell: usize) -> Result<()> {
        if self.incoming[doorbell].get().is_none() {
            let event = event(0)?;
            sys::eventfd(self.own.fd(), doorbell as u32, event.as_fd())
                .map_err(|error| Error::os("TOMBOLO_IOC_EVENTFD", error))?;
            let _ = self.incoming[doorbell].set(event);
        }
        Ok(())
    }

    /// Takes the peer's window, which came with the peer's acceptance (V-2).
    pub(crate) fn accepted(&self, mut descriptors: Vec<OwnedFd>, (offset, len): Range) -> Result<()> {
        let count = descriptors.len();
        let peer = descriptors.pop().filter(|_| count == 1);
        let peer = peer.ok_or_else(|| malformed("V-2", format!("{count} descriptors for the peer's window")))?;
        let offset = if matches!(self.outgoing, Outgoing::Module) { 0 } else { offset };
        self.peer.set((reserve(peer)?, (offset, len))).map_err(|_| malformed("V-2", "a connection was accepted twice"))
    }

    pub(crate) fn own(&self) -> &OwnMemory {
        &self.own
    }

    /// Returns the length of the peer's window, or 0 before the peer accepted.
    pub(crate) fn peer_len(&self) -> u64 {
        self.peer.get().map_or(0, |(_, (_, len))| *len)
    }

    pub(crate) fn map_own(&self, offset: u64, len: usize) -> Result<OwnSegment> {
        self.own.map(offset, len).map_err(|error| Error::os("mmap of a window", error))
    }

    pub(crate) fn map_peer(&self, offset: u64, len: usize, guard: impl Send + Sync + 'static) -> Result<PeerSegment> {
        let (peer, (from, _)) = self.peer.get().ok_or(Error::PeerGone)?;
        PeerSegment::map_revocable(peer.as_fd(), from.saturating_add(offset), len, guard)
            .map_err(|error| Error::os("mmap of the peer's window", error))
    }

    /// Notifies the peer. Has no effect if the peer is gone.
    pub(crate) fn notify(&self, doorbell: usize) {
        self.notify_each(doorbell..doorbell + 1);
    }

    /// Notifies all of the peer's doorbells.
    pub(crate) fn notify_all(&self) {
        self.notify_each(0..DOORBELLS);
    }

    fn notify_each(&self, doorbells: impl Iterator<Item = usize>) {
        match &self.outgoing {
            // All bits go in one write, because each write interrupts the other machine.
            Outgoing::Module => {
                let bits = doorbells.fold(0u64, |bits, doorbell| bits | 1 << doorbell);
                let _ = rustix::io::write(self.own.fd(), &bits.to_ne_bytes());
            }
            // A write to a full eventfd fails, but that one is raised already.
            Outgoing::Events(events) => doorbells.for_each(|doorbell| {
                let _ = rustix::io::write(&events[doorbell], &1u64.to_ne_bytes());
            }),
        }
    }

    /// Raises a doorbell of this endpoint, if its eventfd was made.
    pub(crate) fn notify_own(&self, doorbell: usize) {
        if let Some(event) = self.incoming[doorbell].get() {
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }

    /// Clears the notifications of a doorbell. Returns false if there were none or if it has no eventfd.
    pub(crate) fn drain(&self, doorbell: usize) -> bool {
        self.incoming[doorbell].get().is_some_and(|event| rustix::io::read(event, &mut [0; 8]).is_ok())
    }

    /// Returns a descriptor that polls readable once a doorbell of this endpoint is notified: its eventfd, or else the
    /// window, which polls readable for all doorbells that have no eventfd.
    pub(crate) fn doorbell(&self, doorbell: usize) -> BorrowedFd<'_> {
        self.incoming[doorbell].get().map_or(self.own.fd(), AsFd::as_fd)
    }

    /// Returns both windows, if they are the module's.
    pub(crate) fn windows(&self) -> Option<(BorrowedFd<'_>, BorrowedFd<'_>)> {
        let (peer, _) = self.peer.get().filter(|_| matches!(self.outgoing, Outgoing::Module))?;
        Some((self.own.fd(), peer.as_fd()))
    }

    /// Returns whether the broker of this kernel carries the notifications (V-7). If so, the connection depends on the
    /// broker, or on the descriptor store while the broker restarts.
    pub(crate) fn is_carried(&self) -> bool {
        matches!(self.outgoing, Outgoing::Events(_))
    }

    /// Returns the descriptor that polls as hung up once the device was unplugged or the link taken away, if there is a
    /// device.
    pub(crate) fn hang_up(&self) -> Option<BorrowedFd<'_>> {
        matches!(self.outgoing, Outgoing::Module).then(|| self.own.fd())
    }
}
