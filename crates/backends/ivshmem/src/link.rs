// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One end of a call: its window, its mailbox, its doorbells.

use std::{io, os::fd::BorrowedFd, sync::Arc};

use rustix::io::Errno;
use tombolo_domain::{
    Deadline, Doorbell, DriverParts, Endpoint, Error, Liveness, Memory, Offer, Peer, Received, Result, SingleDoorbell,
    SingleNotifier, wait_readable,
};
use tombolo_layout::limits::{CONTROL_MESSAGE_MAX, PAGE};
use tombolo_mem::OwnSegment;
use tombolo_os::reserved::{ReservedFd, lifted};

use crate::{
    forks::Mapping,
    hub::{Hub, VmDoorbell},
    mailbox::{self, Mailbox, Mapped, PeerPage},
    pool::{Pool, Token},
    port::{CONTROL, DATA, Port},
};

#[derive(Debug)]
pub(crate) struct VmEndpoint {
    hub: Arc<Hub>,
    mailbox: Mailbox,
    pool: Pool,
    mapped: Mapped,
    peer: String,
    /// Whether a message came in, which is when there is a doorbell.
    heard: bool,
    /// The process whose it is: a copy in a child made by fork ends nothing.
    process: u32,
    made: Mapping,
}

impl VmEndpoint {
    /// Begins a call of `address` that the broker stated, with its socket for it.
    pub(crate) fn new(port: Port, socket: ReservedFd, peer: String, address: String) -> Result<Self> {
        let page = usize::try_from(mailbox::LEN).expect("a page");
        let mailbox = Mailbox::new(port.map_own(0, page)?, PeerPage::default());
        let hub = Hub::new(Arc::new(port), mailbox.own().clone(), mailbox.peer().clone(), socket, address)?;
        let (hub, process) = (Arc::new(hub), std::process::id());
        let (pool, mapped, heard) = (Pool::default(), Mapped::default(), false);
        Ok(Self { hub, mailbox, pool, mapped, peer, heard, process, made: Mapping::now() })
    }

    /// What is read from memory that was taken away makes no sense, and that is not the peer's fault.
    fn or_revoked(&self, error: Error) -> Error {
        if self.hub.liveness() == Liveness::Revoked { Error::Revoked } else { error }
    }

    /// Waits until the peer has accepted.
    pub(crate) fn wait_accepted(&self, deadline: Deadline) -> Result<()> {
        loop {
            self.hub.liveness();
            if self.hub.is_over() {
                return Err(self.hub.ending());
            }
            if self.mailbox.peer().is_there() {
                return Ok(());
            }
            // Whatever is said is looked for in any case.
            self.hub.port().drain(CONTROL);
            if !wait_readable(self.hub.watch(CONTROL)?, deadline)? {
                return Err(Error::TimedOut);
            }
        }
    }
}

impl Memory for VmEndpoint {
    fn allocate(&mut self, len: usize) -> Result<(OwnSegment, Offer)> {
        if len == 0 || len as u64 % PAGE != 0 {
            return Err(Error::os("allocate", Errno::INVAL));
        }
        let (segment, token) = self.pool.allocate(len, self.hub.port(), self.mailbox.peer())?;
        Ok((segment, Offer::new(token)))
    }

    /// The pages wait until the peer has let go of them (V-6).
    fn retire(&mut self, segment: Option<OwnSegment>, offer: Offer) {
        drop((segment, offer));
    }

    fn quarantined(&self) -> u64 {
        self.pool.quarantined(self.hub.port(), self.mailbox.peer())
    }

    /// One segment may take what the window has left in one piece (V-8).
    fn affordable(&self, wanted: usize) -> usize {
        wanted.min(self.pool.largest_gap(self.hub.port(), self.mailbox.peer()) as usize)
    }

    fn outlives_owner(&self) -> bool {
        true
    }
}

impl Endpoint for VmEndpoint {
    fn send(&mut self, message: &[u8], offer: Option<&Offer>) -> Result<()> {
        if message.len() > CONTROL_MESSAGE_MAX {
            return Err(Error::Limit { what: "length of a control message", remedy: "send at most 256 bytes" });
        }
        let foreign = || Error::os("send", io::Error::new(io::ErrorKind::InvalidInput, "the offer is of another link"));
        let token = offer.map(|offer| offer.token::<Token>().ok_or_else(foreign)).transpose()?;
        let passed = token.map(|token| self.pool.pass(token).ok_or_else(foreign)).transpose()?;
        if self.hub.is_over() {
            return Err(self.hub.ending());
        }
        self.mailbox.send(message, passed).map_err(|error| self.or_revoked(error))?;
        if let Some(token) = token {
            self.pool.passed(token);
        }
        self.hub.port().notify(CONTROL);
        // The peer is at it already, if there is one. It may have answered and ended since, and the answer is still to be
        // read: `recv` tells of an end after that.
        match self.hub.liveness() {
            Liveness::Revoked => Err(self.hub.ending()),
            _ => self.hub.prepare(),
        }
    }

    fn recv(&mut self, max_segment: u64) -> Result<Option<Received>> {
        if !self.mailbox.peer().is_there() {
            self.hub.liveness();
        }
        // Asked before the mailbox is looked into: what was sent before the end comes before it.
        let over = self.hub.is_over();
        let Some((message, passed)) = self.mailbox.recv().map_err(|error| self.or_revoked(error))? else {
            if over || matches!(self.hub.liveness(), Liveness::Revoked) {
                return Err(self.hub.ending());
            }
            self.hub.drain(CONTROL);
            if self.mailbox.waits().map_err(|error| self.or_revoked(error))? || self.hub.is_over() {
                return self.recv(max_segment);
            }
            return Ok(None);
        };
        self.heard = true;
        let segment = match passed {
            None => None,
            Some(passed) => {
                let let_go = self.mapped.admit(passed, self.hub.port().peer_len(), max_segment, self.mailbox.own())?;
                let len = usize::try_from(passed.len).map_err(|_| Error::os("mmap", Errno::NOMEM))?;
                Some(self.hub.port().map_peer(passed.offset, len, let_go)?)
            }
        };
        // The descriptor says what there is now; a ring that comes later rings later.
        self.hub.port().drain(CONTROL);
        if self.mailbox.waits().unwrap_or(true) {
            self.hub.watch(CONTROL)?;
            self.hub.port().notify_own(CONTROL);
        }
        Ok(Some(Received { message, segment }))
    }

    /// Who has no descriptors to spare for more has the doorbell alone, on which messages come, and not all news.
    fn fd(&self) -> BorrowedFd<'_> {
        self.hub.watch(CONTROL).unwrap_or_else(|_| self.hub.port().doorbell(CONTROL))
    }

    fn doorbell(&self) -> Option<Arc<dyn Doorbell>> {
        let ready = self.heard && self.hub.prepare().is_ok();
        ready.then(|| Arc::new(VmDoorbell(Arc::clone(&self.hub))) as Arc<dyn Doorbell>)
    }

    /// Notifications for connections come on the channel of data, whose eventfd nobody reads then (S-17).
    fn shared_doorbells(&self) -> Result<Option<(SingleDoorbell, SingleNotifier)>> {
        let notifier = SingleNotifier::of_session(self.doorbell().ok_or(Error::PeerGone)?);
        let copy = || SingleDoorbell::of_session(rustix::io::fcntl_dupfd_cloexec(self.hub.port().doorbell(DATA), 0)?);
        let doorbell = lifted(copy).map_err(|error| Error::os("fcntl", error))?;
        Ok(Some((doorbell, notifier)))
    }

    fn leave(&mut self) {
        self.hub.leave();
    }

    fn driver_parts(&self, offer: &Offer) -> Option<DriverParts> {
        let own_at = self.pool.pass(offer.token::<Token>()?)?.offset;
        let (own, peer) = self.hub.port().windows()?;
        let (own, peer) = (own.try_clone_to_owned().ok()?, peer.try_clone_to_owned().ok()?);
        let peer_at = self.mapped.only()?.offset;
        let news = self.hub.watch(DATA).ok()?.try_clone_to_owned().ok()?;
        Some(DriverParts { own, own_at, peer, peer_at, life: mailbox::STATE_AT, over: mailbox::CLOSED, news })
    }

    fn liveness(&self) -> Liveness {
        self.hub.liveness()
    }

    fn peer(&self) -> Peer {
        Peer { domain: self.peer.clone(), pid: None, uid: None }
    }

    fn same_kernel(&self) -> bool {
        false
    }
}

impl Drop for VmEndpoint {
    fn drop(&mut self) {
        // A child made by fork may need the memory still. Once all that have the call have let go of it, the broker says so.
        let is_left_to_child = self.hub.is_leaving() && self.made.may_be_shared();
        if self.process != std::process::id() || is_left_to_child {
            self.hub.hang_up();
            return;
        }
        self.mailbox.own().close();
        self.hub.port().notify_all();
        self.hub.give_up();
    }
}
