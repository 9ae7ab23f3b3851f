// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defines what this backend needs of Xen: so little that a test can replace it.

use std::{any::Any, fmt::Debug, os::fd::BorrowedFd, path::PathBuf, sync::Arc};

use tombolo_domain::{Result, aside::ReservedFd};
use tombolo_mem::{CommonSegment, OwnSegment, PeerSegment};

/// The number of a domain.
pub(crate) type DomId = u16;

/// Value that is dropped when a mapping is gone.
pub(crate) type Guard = Box<dyn Any + Send + Sync>;

/// Xen as one domain sees it.
pub(crate) trait Hypervisor: Send + Sync + Debug {
    /// Opens a separate connection to XenStore, which does not block.
    fn store(&self) -> Result<ReservedFd>;

    /// Grants zeroed pages that `peer` may map read-only.
    fn grant(&self, peer: DomId, pages: usize) -> Result<Arc<dyn Grants>>;

    /// Maps pages of `peer` read-only, one after the other. Drops `guard` when they are unmapped or cannot be mapped.
    /// Returns `Revoked` if there is no such page. With a `port` the kernel sends an event there when they are
    /// unmapped, even if this process dies.
    fn map(&self, peer: DomId, references: &[u32], port: Option<u32>, guard: Guard) -> Result<PeerSegment>;

    /// Returns the number of further pages that this process may grant, as far as it can know: other programs grant
    /// pages too.
    fn room(&self) -> usize;

    /// Grants zeroed pages that `peer` may map and write. Returns their references and this domain's mapping. When the
    /// process is gone the kernel clears the byte of the first page and notifies the port, if they are given.
    fn share(&self, peer: DomId, pages: usize, when_gone: Option<(usize, u32)>) -> Result<(Vec<u32>, CommonSegment)>;

    /// Maps such pages of `peer`, with the same notification.
    fn join(
        &self,
        peer: DomId,
        references: &[u32],
        writable: bool,
        when_gone: Option<(usize, u32)>,
    ) -> Result<CommonSegment>;

    /// Makes a port to which `peer` may bind.
    fn offer_port(&self, peer: DomId) -> Result<Arc<dyn Port>>;

    /// Makes a port bound to one that `peer` offers.
    fn bind_port(&self, peer: DomId, port: u32) -> Result<Arc<dyn Port>>;

    /// Returns whether the domain `peer` exists. A destroyed domain exists until nobody maps its memory any more.
    fn is_there(&self, peer: DomId) -> Result<bool>;

    /// Returns the path at which this domain's grant reaper listens, if there may be one.
    fn grant_reaper(&self) -> Option<PathBuf>;

    /// Returns whether a descriptor is one of [`Grants`].
    fn is_grant(&self, file: BorrowedFd<'_>) -> bool;

    /// Claims `name` within this domain until the descriptor is closed. Returns none if the name is claimed already.
    fn claim(&self, name: &str) -> Result<Option<ReservedFd>>;
}

/// Pages of this domain that a peer may map until this is dropped. Those that are mapped then stay unchanged and out of
/// use until they are unmapped.
pub(crate) trait Grants: Send + Sync + Debug {
    /// Returns one reference for each page. They are a private copy: what the peer can see of them is never read back.
    fn references(&self) -> &[u32];

    /// Makes the only mapping of the `count` pages from `first` on. Each page is mapped at most once.
    fn map(self: Arc<Self>, first: usize, count: usize) -> Result<OwnSegment>;

    /// Returns the descriptor that keeps the pages granted as long as it, or a duplicate of it, is open.
    fn file(&self) -> BorrowedFd<'_>;

    /// Makes the kernel clear the byte at `offset` when this is dropped or its process dies, and then notify `port`.
    fn when_gone(&self, offset: usize, port: Option<u32>) -> Result<()>;
}

/// This domain's side of an event channel. An event masks the port until it is [cleared](Port::clear).
pub(crate) trait Port: Send + Sync + Debug {
    /// Returns its number in this domain.
    fn number(&self) -> u32;

    /// Sends an event. Never blocks, and has no effect without a peer.
    fn notify(&self);

    /// Clears the event, so that the next one is reported.
    fn clear(&self);

    /// Returns a descriptor that polls writable (`EPOLLOUT`) *again* with every event: for edge-triggered epoll alone.
    fn fd(&self) -> BorrowedFd<'_>;
}
