// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements one endpoint of a connection: its window, its mailbox and its doorbells.

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
    /// Whether a message has arrived. Only then is there a doorbell.
    heard: bool,
    /// Process that owns the endpoint: dropping the copy in a child made by fork does not end the connection.
    process: u32,
    made: Mapping,
}

impl VmEndpoint {
    /// Begins a connection to `address` that the broker stated. `socket` is the broker's socket for this connection.
    pub(crate) fn new(port: Port, socket: ReservedFd, peer: String, address: String) -> Result<Self> {
        let page = usize::try_from(mailbox::LEN).expect("a page");
        let mailbox = Mailbox::new(port.map_own(0, page)?, PeerPage::default());
        let hub = Hub::new(Arc::new(port), mailbox.own().clone(), mailbox.peer().clone(), socket, address)?;
        let (hub, process) = (Arc::new(hub), std::process::id());
        let (pool, mapped, heard) = (Pool::default(), Mapped::default(), false);
        Ok(Self { hub, mailbox, pool, mapped, peer, heard, process, made: Mapping::now() })
    }

    /// Replaces the error if the memory was taken away. What is read from such memory makes no sense, and that is not
    /// the peer's fault.
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
            // The loop checks for all news in any case, so notifications can be drained first.
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

    /// The pages stay in quarantine until the peer has let go of them (V-6).
    fn retire(&mut self, segment: Option<OwnSegment>, offer: Offer) {
        drop((segment, offer));
    }

    fn quarantined(&self) -> u64 {
        self.pool.quarantined(self.hub.port(), self.mailbox.peer())
    }

    /// One segment may take the largest free range of the window (V-8).
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
        // The peer, if there is one, is processing the message already. It may have answered and ended since; its
        // answer is still to be read, and `recv` reports the end after that.
        match self.hub.liveness() {
            Liveness::Revoked => Err(self.hub.ending()),
            _ => self.hub.prepare(),
        }
    }

    fn recv(&mut self, max_segment: u64) -> Result<Option<Received>> {
        if !self.mailbox.peer().is_there() {
            self.hub.liveness();
        }
        // The end is checked before the mailbox is read, so that messages sent before the end are delivered before it.
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
        // The descriptor then reflects what is there now; a later notification raises it again.
        self.hub.port().drain(CONTROL);
        if self.mailbox.waits().unwrap_or(true) {
            self.hub.watch(CONTROL)?;
            self.hub.port().notify_own(CONTROL);
        }
        Ok(Some(Received { message, segment }))
    }

    /// If no descriptors are left for the epoll instance, returns the doorbell alone. It reports messages, but not all
    /// news.
    fn fd(&self) -> BorrowedFd<'_> {
        self.hub.watch(CONTROL).unwrap_or_else(|_| self.hub.port().doorbell(CONTROL))
    }

    fn doorbell(&self) -> Option<Arc<dyn Doorbell>> {
        let ready = self.heard && self.hub.prepare().is_ok();
        ready.then(|| Arc::new(VmDoorbell(Arc::clone(&self.hub))) as Arc<dyn Doorbell>)
    }

    /// Notifications for TCP connections arrive on the data channel, whose eventfd nobody drains then (S-17).
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
        Some(DriverParts { own, own_at, peer, peer_at, state: mailbox::STATE_AT, over: mailbox::CLOSED, news })
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
        // A child made by fork may still need the memory. The broker reports the end once all processes with the
        // connection have let go of it.
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
