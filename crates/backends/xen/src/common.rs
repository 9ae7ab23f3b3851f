// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Pieces of Xen for a wire format that is not this backend's: memory that both endpoints write, event channels, nodes.
//! The layout of libxenvchan (W-3) is made of them, by the facade.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use rustix::{
    event::{Timespec, epoll},
    io::Errno,
};
use tombolo_domain::{Error, Result, aside::ReservedFd};
use tombolo_mem::CommonSegment;

use crate::{
    core::Core,
    hypervisor::{DomId, Port},
    os::{epoll_set, lock},
};

/// This domain's way to another, piece by piece.
#[derive(Clone, Debug)]
pub struct XenPieces {
    core: Arc<Core>,
    peer: DomId,
}

impl XenPieces {
    pub(crate) fn new(core: Arc<Core>, peer: DomId) -> Self {
        Self { core, peer }
    }

    /// The number of this domain.
    #[must_use]
    pub fn own(&self) -> u16 {
        self.core.own
    }

    /// The number of the other.
    #[must_use]
    pub fn peer(&self) -> u16 {
        self.peer
    }

    /// Whether there is a domain of the other's number; one that crashed and was kept still counts, and so does one that was
    /// destroyed while pages of its are mapped.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn peer_is_there(&self) -> Result<bool> {
        self.core.xen.is_there(self.peer)
    }

    /// Zeroed pages that the peer may map and write, and this domain's mapping of them. Once that is gone, by whatever
    /// death, the kernel clears the byte at an offset and notifies a port, if they are given.
    ///
    /// # Errors
    /// [`Error::Limit`], and what the kernel says.
    pub fn share(&self, pages: usize, when_gone: Option<(usize, u32)>) -> Result<(Vec<u32>, CommonSegment)> {
        self.core.xen.share(self.peer, pages, when_gone)
    }

    /// Maps such pages of the peer, likewise.
    ///
    /// # Errors
    /// [`Error::Revoked`] where there are none; [`Error::Limit`], and what the kernel says.
    pub fn join(&self, references: &[u32], writable: bool, when_gone: Option<(usize, u32)>) -> Result<CommonSegment> {
        self.core.xen.join(self.peer, references, writable, when_gone)
    }

    /// A port to which the peer may bind.
    ///
    /// # Errors
    /// [`Error::Limit`], and what the kernel says.
    pub fn offer_port(&self) -> Result<XenPort> {
        XenPort::new(self.core.xen.offer_port(self.peer)?)
    }

    /// A port bound to one that the peer offers.
    ///
    /// # Errors
    /// As [`offer_port`](Self::offer_port), and [`Error::PeerGone`] where there is none.
    pub fn bind_port(&self, port: u32) -> Result<XenPort> {
        XenPort::new(self.core.xen.bind_port(self.peer, port)?)
    }

    /// Makes a folder in XenStore that the peer may read, and nodes in it, in this order.
    ///
    /// # Errors
    /// What XenStore says.
    pub fn publish(&self, path: &str, nodes: &[(&str, String)]) -> Result<()> {
        let mut store = lock(&self.core.store);
        store.make_folder(path, self.core.own, self.peer)?;
        nodes.iter().try_for_each(|(node, value)| store.write(&format!("{path}/{node}"), value))
    }

    /// Removes a folder.
    ///
    /// # Errors
    /// What XenStore says.
    pub fn withdraw(&self, path: &str) -> Result<()> {
        lock(&self.core.store).remove(path)
    }

    /// What a node says, if this domain may see one there.
    ///
    /// # Errors
    /// What XenStore says.
    pub fn look_up(&self, path: &str, node: &str) -> Result<Option<String>> {
        lock(&self.core.store).read(&format!("{path}/{node}"))
    }
}

/// One end of an event channel.
#[derive(Debug)]
pub struct XenPort {
    port: Arc<dyn Port>,
    /// Readable from an event until it is cleared.
    set: ReservedFd,
}

impl XenPort {
    fn new(port: Arc<dyn Port>) -> Result<Self> {
        let set = epoll_set()?;
        // The kernel reports OUT anew with each event.
        epoll::add(&set, port.fd(), epoll::EventData::new_u64(0), epoll::EventFlags::OUT | epoll::EventFlags::ET)
            .map_err(|error| Error::os("epoll_ctl", error))?;
        let port = Self { port, set };
        // What it said when it was added is no event.
        port.clear();
        Ok(port)
    }

    /// Its number in this domain.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.port.number()
    }

    /// Sends an event. Never blocks; to nobody it does nothing.
    pub fn notify(&self) {
        self.port.notify();
    }

    /// Forgets the event, so that the next one is heard.
    pub fn clear(&self) {
        let mut events = [MaybeUninit::uninit(); 1];
        let _ = epoll::wait(&self.set, &mut events, Some(&Timespec::default()));
        self.port.clear();
    }

    /// Waits for an event, `limit` at most, and forgets it.
    ///
    /// # Errors
    /// What `epoll_wait` says.
    pub fn wait(&self, limit: Duration) -> std::io::Result<()> {
        let mut events = [MaybeUninit::uninit(); 1];
        let limit = Timespec::try_from(limit).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
        match epoll::wait(&self.set, &mut events, Some(&limit)) {
            Ok(([], _)) => Ok(()),
            Ok(_) => {
                self.port.clear();
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Polls readable from an event until it is cleared.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
