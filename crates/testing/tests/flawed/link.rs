// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Flaws of links and their memory.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use tombolo_domain::{
    Deadline, Doorbell, Endpoint, Error, Liveness, Memory, Offer, Peer, Received, Result, wait_readable,
};
use tombolo_layout::limits::CONTROL_MESSAGE_MAX;
use tombolo_mem::{OwnSegment, PeerData, PeerSegment, create_forgeable};

use super::{Flaw, Shared, block, doorbell::FlawedDoorbell};

#[derive(Debug)]
pub struct FlawedLink {
    inner: Box<dyn Endpoint>,
    shared: Shared,
    retired: bool,
    stash: Vec<Received>,
    first_segment: Option<PeerSegment>,
}

impl FlawedLink {
    pub fn new(inner: Box<dyn Endpoint>, shared: &Shared) -> Self {
        Self { inner, shared: shared.clone(), retired: false, stash: Vec::new(), first_segment: None }
    }

    /// Returns a mapping of other memory with equal contents at first: writable, and not the peer's.
    fn copy(&self, contents: &[u8]) -> PeerSegment {
        let (_, memory) = create_forgeable("flawed", contents.len()).unwrap();
        rustix::io::pwrite(&memory, contents, 0).unwrap();
        let segment = PeerSegment::map(memory.as_fd(), contents.len()).unwrap();
        *self.shared.copy.lock().unwrap() = Some(memory);
        segment
    }

    fn bend(&mut self, segment: PeerSegment) -> PeerSegment {
        let mut contents = vec![0; segment.len()];
        segment.data(0).copy_out(0, &mut contents);
        match self.shared.flaw {
            Flaw::DirtyAtPeer => {
                contents[100] = 1;
                self.copy(&contents)
            }
            Flaw::LongMapping => {
                contents.resize(contents.len() + 4096, 0);
                self.copy(&contents)
            }
            Flaw::CopyAtPeer | Flaw::RetiredIsReused => self.copy(&contents),
            Flaw::FirstSegmentAgain => self.first_segment.get_or_insert(segment).clone(),
            _ => segment,
        }
    }

    fn stash_all(&mut self, max: u64) -> Result<()> {
        while let Some(received) = self.inner.recv(max)? {
            self.stash.push(received);
        }
        Ok(())
    }
}

impl Memory for FlawedLink {
    fn allocate(&mut self, len: usize) -> Result<(OwnSegment, Offer)> {
        let (segment, offer) = self.inner.allocate(len)?;
        if self.shared.flaw != Flaw::DirtyAtOwner {
            return Ok((segment, offer));
        }
        let (dirty, memory) = create_forgeable("flawed", len).unwrap();
        rustix::io::pwrite(&memory, b"dirt", 100).unwrap();
        Ok((dirty, offer))
    }

    fn retire(&mut self, segment: Option<OwnSegment>, offer: Offer) {
        self.retired = true;
        if let (Flaw::RetiredIsReused, Some(memory)) = (self.shared.flaw, &*self.shared.copy.lock().unwrap()) {
            rustix::io::pwrite(memory, &[0; 1 << 17], 0).unwrap();
        }
        self.inner.retire(segment, offer);
    }

    fn quarantined(&self) -> u64 {
        if self.shared.flaw == Flaw::QuarantineForEver && self.retired { 4096 } else { self.inner.quarantined() }
    }

    fn outlives_owner(&self) -> bool {
        self.shared.flaw == Flaw::OutlivesInWords || self.inner.outlives_owner()
    }
}

impl Endpoint for FlawedLink {
    fn send(&mut self, message: &[u8], offer: Option<&Offer>) -> Result<()> {
        let len = if self.shared.flaw == Flaw::CutsMessages { CONTROL_MESSAGE_MAX } else { usize::MAX };
        let sent = self.inner.send(&message[..len.min(message.len())], offer);
        match (self.shared.flaw, &sent) {
            (Flaw::SendBlocks, Err(Error::Limit { .. })) => block(),
            (Flaw::LosesMessages, Err(Error::Limit { .. })) => Ok(()),
            _ => sent,
        }
    }

    fn recv(&mut self, max: u64) -> Result<Option<Received>> {
        let mut received = match self.shared.flaw {
            Flaw::IgnoresMax => self.inner.recv(u64::MAX)?,
            Flaw::RecvBlocks => {
                wait_readable(self.inner.fd(), Deadline::NEVER)?;
                self.inner.recv(max)?
            }
            Flaw::EndBeforeMessages if self.inner.liveness().is_gone() => return Err(Error::PeerGone),
            Flaw::JoinsMessages => {
                self.stash_all(max)?;
                self.stash.drain(..).reduce(|mut joined, next| {
                    joined.message.extend(next.message);
                    joined
                })
            }
            Flaw::ReversesMessages => {
                self.stash_all(max)?;
                self.stash.pop()
            }
            _ => self.inner.recv(max)?,
        };
        if let Some(received) = &mut received {
            received.segment = received.segment.take().map(|segment| self.bend(segment));
            if self.shared.flaw == Flaw::AlwaysMemory {
                received.segment.get_or_insert_with(|| self.copy(&[0; 4096]));
            }
        }
        Ok(received)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.shared.fd(self.inner.fd())
    }

    fn doorbell(&self) -> Option<Arc<dyn Doorbell>> {
        self.inner.doorbell().map(|inner| Arc::new(FlawedDoorbell::new(inner, &self.shared)) as Arc<dyn Doorbell>)
    }

    fn liveness(&self) -> Liveness {
        match (self.shared.flaw, self.inner.liveness()) {
            (Flaw::LifeIsEternal, _) => Liveness::Running,
            (Flaw::DeadWhileAlive, Liveness::Running) | (Flaw::PausedIsGone, Liveness::Paused) => Liveness::ProcessGone,
            (_, life) => life,
        }
    }

    fn peer(&self) -> Peer {
        self.inner.peer()
    }

    fn same_kernel(&self) -> bool {
        self.inner.same_kernel()
    }
}
