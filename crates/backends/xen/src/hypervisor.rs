// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What this backend asks of Xen: so little that a test can stand in for it.

use std::{any::Any, fmt::Debug, os::fd::BorrowedFd, path::PathBuf, sync::Arc};

use tombolo_domain::{Result, aside::ReservedFd};
use tombolo_mem::{CommonSegment, OwnSegment, PeerSegment};

/// The number of a domain.
pub(crate) type DomId = u16;

/// What is dropped when a mapping is gone.
pub(crate) type Guard = Box<dyn Any + Send + Sync>;

/// Xen as one domain sees it.
pub(crate) trait Hypervisor: Send + Sync + Debug {
    /// A connection to XenStore of its own, which does not block.
    fn store(&self) -> Result<ReservedFd>;

    /// Zeroed pages that `peer` may map read-only.
    fn grant(&self, peer: DomId, pages: usize) -> Result<Arc<dyn Grants>>;

    /// Maps pages of `peer` read-only, one after the other, and drops `guard` when they are unmapped, or cannot be mapped.
    /// `Revoked` where there is no such page. With a `port` the kernel sends an event there when they are unmapped, also
    /// if this process dies.
    fn map(&self, peer: DomId, references: &[u32], port: Option<u32>, guard: Guard) -> Result<PeerSegment>;

    /// How many pages more this process may grant, as far as it can know: other programs grant pages too.
    fn room(&self) -> usize;

    /// Zeroed pages that `peer` may map and write, and this domain's mapping of them. When the process is gone the kernel
    /// clears the byte of the first page and notifies the port, if they are given.
    fn share(&self, peer: DomId, pages: usize, when_gone: Option<(usize, u32)>) -> Result<(Vec<u32>, CommonSegment)>;

    /// Maps such pages of `peer`, likewise.
    fn join(
        &self,
        peer: DomId,
        references: &[u32],
        writable: bool,
        when_gone: Option<(usize, u32)>,
    ) -> Result<CommonSegment>;

    /// A port to which `peer` may bind.
    fn offer_port(&self, peer: DomId) -> Result<Arc<dyn Port>>;

    /// A port bound to one that `peer` offers.
    fn bind_port(&self, peer: DomId, port: u32) -> Result<Arc<dyn Port>>;

    /// Whether there is a domain `peer`: for one that was destroyed, once nobody maps anything of its any more.
    fn is_there(&self, peer: DomId) -> Result<bool>;

    /// Where this domain's grant reaper listens, if there may be one.
    fn grant_reaper(&self) -> Option<PathBuf>;

    /// Whether a descriptor is one of [`Grants`].
    fn is_grant(&self, file: BorrowedFd<'_>) -> bool;

    /// Claims `name` within this domain until the descriptor is closed, or nothing if it is claimed.
    fn claim(&self, name: &str) -> Result<Option<ReservedFd>>;
}

/// Pages of this domain that a peer may map until this is dropped; those that are mapped then stay as they are, and out
/// of use, until they no longer are.
pub(crate) trait Grants: Send + Sync + Debug {
    /// One for each page. They are a private copy: what the peer can see of them is never read back.
    fn references(&self) -> &[u32];

    /// The one mapping of the `count` pages from `first` on; each page is mapped once at most.
    fn map(self: Arc<Self>, first: usize, count: usize) -> Result<OwnSegment>;

    /// What keeps the pages granted as long as it, or a duplicate of it, is open.
    fn file(&self) -> BorrowedFd<'_>;

    /// Has the kernel clear the byte at `offset` when this is dropped or its process dies, and then notify `port`.
    fn when_gone(&self, offset: usize, port: Option<u32>) -> Result<()>;
}

/// This domain's end of an event channel. An event masks the port until it is [cleared](Port::clear).
pub(crate) trait Port: Send + Sync + Debug {
    /// Its number in this domain.
    fn number(&self) -> u32;

    /// Sends an event. Never blocks; to nobody it does nothing.
    fn notify(&self);

    /// Forgets the event, so that the next one is heard.
    fn clear(&self);

    /// A descriptor that polls writable (`EPOLLOUT`) *anew* with every event: for edge-triggered epoll alone.
    fn fd(&self) -> BorrowedFd<'_>;
}
