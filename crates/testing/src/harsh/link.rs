// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An endpoint of a link as its process sees it.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use rustix::io::Errno;
use tombolo_layout::limits::CONTROL_MESSAGE_MAX;
use tombolo_mem::{OwnSegment, PeerSegment, create_forgeable};

use super::{
    MESSAGES_MAX,
    doorbell::HarshDoorbell,
    end::{Event, Sent, Signals},
    ids::{EndId, Process, Reference},
    world::World,
};
use tombolo_domain::{Doorbell, Endpoint, Error, Liveness, Memory, Offer, Peer, Received, Result};

/// One endpoint of a link.
#[derive(Debug)]
pub(super) struct HarshLink {
    world: Arc<World>,
    id: EndId,
    process: Process,
    peer_domain: Arc<str>,
    signals: Signals,
    doorbell: Arc<HarshDoorbell>,
    /// Whether a message came in: only then is there a doorbell.
    heard: bool,
}

impl HarshLink {
    pub(super) fn new(
        world: &Arc<World>,
        id: EndId,
        process: &Process,
        peer_domain: &Arc<str>,
        signals: Signals,
    ) -> Self {
        let doorbell = Arc::new(HarshDoorbell::new(world, id, process, peer_domain, &signals));
        let (world, process, peer_domain) = (Arc::clone(world), process.clone(), Arc::clone(peer_domain));
        Self { world, id, process, peer_domain, signals, doorbell, heard: false }
    }

    fn map(&self, reference: Reference, from: EndId, max: u64) -> Result<PeerSegment> {
        let (memory, len) = self.world.state().grants.claim(reference, from, max)?;
        let mapped = Mapped { world: Arc::clone(&self.world), reference };
        let segment =
            PeerSegment::map_guarded(memory.as_fd(), len, mapped).map_err(|error| Error::os("mmap", error))?;
        segment.forget_in_children().map_err(|error| Error::os("madvise", error))?;
        Ok(segment)
    }
}

/// Tells the hypervisor when a mapping is gone.
#[derive(Debug)]
struct Mapped {
    world: Arc<World>,
    reference: Reference,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.world.state().grants.unmapped(self.reference);
    }
}

/// Content of an [`Offer`]: the right to map, which ends when it is dropped.
#[derive(Debug)]
struct Token {
    world: Arc<World>,
    end: EndId,
    reference: Reference,
}

impl Drop for Token {
    fn drop(&mut self) {
        self.world.state().grants.end(|reference, _| reference == self.reference);
    }
}

impl Memory for HarshLink {
    fn allocate(&mut self, len: usize) -> Result<(OwnSegment, Offer)> {
        if len == 0 || len % 4096 != 0 {
            return Err(Error::os("allocate", Errno::INVAL));
        }
        // The memory is made without the lock, because the kernel takes a while for it.
        let (segment, memory) = create_forgeable("tombolo-harsh", len).map_err(|error| Error::os("memfd", error))?;
        segment.forget_in_children().map_err(|error| Error::os("madvise", error))?;

        let mut state = self.world.state();
        let own = state.grants.iter().filter(|grant| grant.owner.domain == self.process.domain);
        let used: u64 = own.map(|grant| grant.len as u64).sum();
        let max = state.domains.get(&self.process.domain).map_or(0, |domain| domain.memory_max);
        if used + len as u64 > max {
            let remedy = "retire segments, or have the peer unmap those in quarantine";
            return Err(Error::Limit { what: "the memory that this domain may share", remedy });
        }
        let reference = state.grants.grant(self.process.clone(), self.id, len, memory);
        drop(state);
        Ok((segment, Offer::new(Token { world: Arc::clone(&self.world), end: self.id, reference })))
    }

    fn retire(&mut self, segment: Option<OwnSegment>, offer: Offer) {
        drop(segment);
        drop(offer);
    }

    fn quarantined(&self) -> u64 {
        self.world.state().grants.quarantined(|grant| grant.end == self.id)
    }

    fn outlives_owner(&self) -> bool {
        false
    }
}

impl Endpoint for HarshLink {
    fn send(&mut self, message: &[u8], offer: Option<&Offer>) -> Result<()> {
        if message.len() > CONTROL_MESSAGE_MAX {
            return Err(Error::Limit { what: "a control message's room of 256 bytes", remedy: "send less at once" });
        }
        let reference = match offer.map(Offer::token::<Token>) {
            None => None,
            Some(Some(token)) if token.end == self.id => Some(token.reference),
            Some(_) => {
                let source = io::Error::new(io::ErrorKind::InvalidInput, "the offer is of another link");
                return Err(Error::os("send", source));
            }
        };
        let mut state = self.world.state();
        let end = state.end(self.id)?;
        if end.over.is_some() {
            return Err(Error::PeerGone);
        }
        let peer = end.peer;
        if state.end(peer)?.outstanding() == MESSAGES_MAX {
            return Err(Error::Limit {
                what: "room for control messages",
                remedy: "wait until the peer has read some",
            });
        }
        state.post(peer, Event::Message(Sent { message: message.into(), reference }));
        Ok(())
    }

    fn recv(&mut self, max_segment: u64) -> Result<Option<Received>> {
        let mut state = self.world.state();
        let end = state.end(self.id)?;
        if end.over == Some(Liveness::Revoked) {
            return Err(Error::Revoked);
        }
        let Some(Sent { message, reference }) = end.take_message() else {
            return if end.over.is_some() { Err(Error::PeerGone) } else { Ok(None) };
        };
        let peer = end.peer;
        drop(state);
        self.heard = true;
        let segment = reference.map(|reference| self.map(reference, peer, max_segment)).transpose()?;
        Ok(Some(Received { message, segment }))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.signals.mail.as_fd()
    }

    fn doorbell(&self) -> Option<Arc<dyn Doorbell>> {
        self.heard.then(|| Arc::clone(&self.doorbell) as Arc<dyn Doorbell>)
    }

    fn liveness(&self) -> Liveness {
        let state = self.world.state();
        match state.ends.get(&self.id).map(|end| end.over) {
            None => Liveness::ProcessGone,
            Some(Some(life)) => life,
            Some(None) if state.is_paused(&self.peer_domain) => Liveness::Paused,
            Some(None) => Liveness::Running,
        }
    }

    fn peer(&self) -> Peer {
        Peer { domain: (*self.peer_domain).into(), pid: None, uid: None }
    }

    fn same_kernel(&self) -> bool {
        false
    }
}

impl Drop for HarshLink {
    fn drop(&mut self) {
        self.world.state().close(self.id, Liveness::ProcessGone);
    }
}
