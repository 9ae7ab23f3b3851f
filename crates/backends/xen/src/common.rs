// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Provides parts of Xen for a wire format that is not this backend's: memory that both endpoints write, event channels
//! and nodes. The facade builds the layout of libxenvchan (W-3) from them.

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

/// This domain's access to another domain, in separate parts.
#[derive(Clone, Debug)]
pub struct XenPieces {
    core: Arc<Core>,
    peer: DomId,
}

impl XenPieces {
    pub(crate) fn new(core: Arc<Core>, peer: DomId) -> Self {
        Self { core, peer }
    }

    /// Returns the number of this domain.
    #[must_use]
    pub fn own(&self) -> u16 {
        self.core.own
    }

    /// Returns the number of the other domain.
    #[must_use]
    pub fn peer(&self) -> u16 {
        self.peer
    }

    /// Returns whether the other domain exists. A domain that crashed and was kept still exists, and so does one that
    /// was destroyed while its pages are mapped.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn peer_is_there(&self) -> Result<bool> {
        self.core.xen.is_there(self.peer)
    }

    /// Grants zeroed pages that the peer may map and write. Returns their references and this domain's mapping. Once
    /// the mapping is gone for whatever reason, the kernel clears the byte at an offset and notifies a port, if these
    /// are given.
    ///
    /// # Errors
    /// [`Error::Limit`], or the kernel's error.
    pub fn share(&self, pages: usize, when_gone: Option<(usize, u32)>) -> Result<(Vec<u32>, CommonSegment)> {
        self.core.xen.share(self.peer, pages, when_gone)
    }

    /// Maps such pages of the peer, with the same notification.
    ///
    /// # Errors
    /// [`Error::Revoked`] if there are no such pages; [`Error::Limit`], or the kernel's error.
    pub fn join(&self, references: &[u32], writable: bool, when_gone: Option<(usize, u32)>) -> Result<CommonSegment> {
        self.core.xen.join(self.peer, references, writable, when_gone)
    }

    /// Makes a port to which the peer may bind.
    ///
    /// # Errors
    /// [`Error::Limit`], or the kernel's error.
    pub fn offer_port(&self) -> Result<XenPort> {
        XenPort::new(self.core.xen.offer_port(self.peer)?)
    }

    /// Makes a port bound to one that the peer offers.
    ///
    /// # Errors
    /// As for [`offer_port`](Self::offer_port), and [`Error::PeerGone`] if the peer offers no such port.
    pub fn bind_port(&self, port: u32) -> Result<XenPort> {
        XenPort::new(self.core.xen.bind_port(self.peer, port)?)
    }

    /// Makes a folder in XenStore that the peer may read, and then nodes in it in the given order.
    ///
    /// # Errors
    /// XenStore's error.
    pub fn publish(&self, path: &str, nodes: &[(&str, String)]) -> Result<()> {
        let mut store = lock(&self.core.store);
        store.make_folder(path, self.core.own, self.peer)?;
        nodes.iter().try_for_each(|(node, value)| store.write(&format!("{path}/{node}"), value))
    }

    /// Removes a folder.
    ///
    /// # Errors
    /// XenStore's error.
    pub fn withdraw(&self, path: &str) -> Result<()> {
        lock(&self.core.store).remove(path)
    }

    /// Returns the value of a node, if this domain may see one there.
    ///
    /// # Errors
    /// XenStore's error.
    pub fn look_up(&self, path: &str, node: &str) -> Result<Option<String>> {
        lock(&self.core.store).read(&format!("{path}/{node}"))
    }
}

/// This domain's side of an event channel.
#[derive(Debug)]
pub struct XenPort {
    port: Arc<dyn Port>,
    /// Polls readable from an event until it is cleared.
    set: ReservedFd,
}

impl XenPort {
    fn new(port: Arc<dyn Port>) -> Result<Self> {
        let set = epoll_set()?;
        // The kernel reports `OUT` again with each event.
        epoll::add(&set, port.fd(), epoll::EventData::new_u64(0), epoll::EventFlags::OUT | epoll::EventFlags::ET)
            .map_err(|error| Error::os("epoll_ctl", error))?;
        let port = Self { port, set };
        // The readiness reported when the port was added is no event.
        port.clear();
        Ok(port)
    }

    /// Returns its number in this domain.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.port.number()
    }

    /// Sends an event. Never blocks, and has no effect without a peer.
    pub fn notify(&self) {
        self.port.notify();
    }

    /// Clears the event, so that the next one is reported.
    pub fn clear(&self) {
        let mut events = [MaybeUninit::uninit(); 1];
        let _ = epoll::wait(&self.set, &mut events, Some(&Timespec::default()));
        self.port.clear();
    }

    /// Waits for an event for at most `limit`, and clears it.
    ///
    /// # Errors
    /// The error of `epoll_wait`.
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

    /// Returns a descriptor that polls readable from an event until it is cleared.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
