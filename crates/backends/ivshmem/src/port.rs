// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the broker gave for one call: this endpoint's window, the peer's, and how the two ring each other (V-2).
//!
//! In a guest these are descriptors of the kernel module; on a host, and in tests, memfds and eventfds. Nothing above
//! knows which.

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

/// Event channels of a call: the reader's, the writer's, the control path's (V-3).
pub const DOORBELLS: usize = 3;
/// The doorbell of the control path; the first two are those of [`Slot`](tombolo_domain::Slot).
pub(crate) const CONTROL: usize = 2;
/// The doorbell of who reads.
pub(crate) const DATA: usize = 0;

/// A window as offset and length within its memfd.
pub(crate) type Range = (u64, u64);

/// An eventfd that was rung so often.
pub(crate) fn event(rung: u32) -> Result<ReservedFd> {
    lifted(|| ReservedFd::new(tombolo_os::event::eventfd(rung)?)).map_err(|error| Error::os("eventfd", error))
}

/// Out of the way of the program, where that knows nothing of this.
pub(crate) fn reserve(fd: OwnedFd) -> Result<ReservedFd> {
    ReservedFd::new(fd).map_err(|error| Error::os("fcntl", error))
}

#[derive(Debug)]
pub(crate) struct Port {
    own: OwnMemory,
    /// The peer's window, once it accepted.
    peer: OnceLock<(ReservedFd, Range)>,
    ring: Ring,
    /// Eventfds on which this end is rung. The module keeps rings for those that are not made yet.
    heard: [OnceLock<ReservedFd>; DOORBELLS],
}

#[derive(Debug)]
enum Ring {
    /// Written to the own window, as bits.
    Module,
    /// An eventfd for each doorbell.
    Events([ReservedFd; DOORBELLS]),
}

impl Port {
    /// What came with the broker's statement of a call, of `own` as it said. Of the module's windows there is nothing but
    /// what they are, so they begin at 0.
    pub(crate) fn new(descriptors: Vec<OwnedFd>, own: Range) -> Result<Self> {
        let count = descriptors.len();
        let mut all = descriptors.into_iter().map(reserve).collect::<Result<Vec<_>>>()?.into_iter();
        let wrong = || malformed("V-2", format!("a call with {count} descriptors beside its socket"));
        let own_fd = all.next().ok_or_else(wrong)?;
        let rest: Vec<_> = all.collect();
        if rest.is_empty() {
            return Ok(Self::of_module(own_fd, own.1));
        }
        let events = <[ReservedFd; 2 * DOORBELLS]>::try_from(rest);
        let [a, b, c, d, e, f] = events.map_err(|_| wrong())?;
        let own = OwnMemory::new(own_fd, own.0, own.1);
        let heard = [d, e, f].map(OnceLock::from);
        Ok(Self { own, peer: OnceLock::new(), ring: Ring::Events([a, b, c]), heard })
    }

    fn of_module(own: ReservedFd, own_len: u64) -> Self {
        let own = OwnMemory::new(own, 0, own_len);
        Self { own, peer: OnceLock::new(), ring: Ring::Module, heard: Default::default() }
    }

    /// Makes what a doorbell of this endpoint rings, unless that was made. Rings of before come to it.
    pub(crate) fn listen(&self, doorbell: usize) -> Result<()> {
        if self.heard[doorbell].get().is_none() {
            let event = event(0)?;
            sys::eventfd(self.own.fd(), doorbell as u32, event.as_fd())
                .map_err(|error| Error::os("TOMBOLO_IOC_EVENTFD", error))?;
            let _ = self.heard[doorbell].set(event);
        }
        Ok(())
    }

    /// The peer accepted: what came with that (V-2).
    pub(crate) fn accepted(&self, mut descriptors: Vec<OwnedFd>, (offset, len): Range) -> Result<()> {
        let count = descriptors.len();
        let peer = descriptors.pop().filter(|_| count == 1);
        let peer = peer.ok_or_else(|| malformed("V-2", format!("{count} descriptors for the peer's window")))?;
        let offset = if matches!(self.ring, Ring::Module) { 0 } else { offset };
        self.peer.set((reserve(peer)?, (offset, len))).map_err(|_| malformed("V-2", "a call was accepted twice"))
    }

    pub(crate) fn own(&self) -> &OwnMemory {
        &self.own
    }

    /// 0 before it accepted.
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

    /// Rings the peer; at a peer that is gone nothing happens.
    pub(crate) fn notify(&self, doorbell: usize) {
        self.notify_each(doorbell..doorbell + 1);
    }

    /// Rings all of the peer's doorbells.
    pub(crate) fn notify_all(&self) {
        self.notify_each(0..DOORBELLS);
    }

    fn notify_each(&self, doorbells: impl Iterator<Item = usize>) {
        match &self.ring {
            // At once: each time interrupts the other machine.
            Ring::Module => {
                let bits = doorbells.fold(0u64, |bits, doorbell| bits | 1 << doorbell);
                let _ = rustix::io::write(self.own.fd(), &bits.to_ne_bytes());
            }
            // Full is rung.
            Ring::Events(events) => doorbells.for_each(|doorbell| {
                let _ = rustix::io::write(&events[doorbell], &1u64.to_ne_bytes());
            }),
        }
    }

    /// Rings a doorbell of this endpoint, if anybody can hear it.
    pub(crate) fn notify_own(&self, doorbell: usize) {
        if let Some(event) = self.heard[doorbell].get() {
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }

    /// Forgets the rings of a doorbell; false if there were none that anybody could hear.
    pub(crate) fn drain(&self, doorbell: usize) -> bool {
        self.heard[doorbell].get().is_some_and(|event| rustix::io::read(event, &mut [0; 8]).is_ok())
    }

    /// Polls readable once a doorbell of this endpoint is rung: its eventfd, or the window, which is readable for all
    /// that have none.
    pub(crate) fn doorbell(&self, doorbell: usize) -> BorrowedFd<'_> {
        self.heard[doorbell].get().map_or(self.own.fd(), AsFd::as_fd)
    }

    /// Both windows, where they are the module's.
    pub(crate) fn windows(&self) -> Option<(BorrowedFd<'_>, BorrowedFd<'_>)> {
        let (peer, _) = self.peer.get().filter(|_| matches!(self.ring, Ring::Module))?;
        Some((self.own.fd(), peer.as_fd()))
    }

    /// Whether the broker of this kernel carries the notifications (V-7). Then the connection needs it, or whoever
    /// keeps its descriptors meanwhile.
    pub(crate) fn is_carried(&self) -> bool {
        matches!(self.ring, Ring::Events(_))
    }

    /// Polls as hung up once the device was unplugged or the link taken away, if there is a device.
    pub(crate) fn hang_up(&self) -> Option<BorrowedFd<'_>> {
        matches!(self.ring, Ring::Module).then(|| self.own.fd())
    }
}
