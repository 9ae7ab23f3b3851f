// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The interface of an endpoint to its peer, once the two have met.

use std::{
    any::Any,
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use tombolo_mem::{OwnSegment, PeerSegment};

use crate::{Doorbell, Result, SingleDoorbell, SingleNotifier};

/// Token with which the owner of a segment offers it to the peer and takes it back: a descriptor, grant references, the
/// number of a window. Only the backend that made it knows its content.
pub struct Offer(Box<dyn Any + Send>);

impl Offer {
    /// Wraps a backend's own token.
    pub fn new(token: impl Any + Send) -> Self {
        Self(Box::new(token))
    }

    /// Returns the backend's own token, if it belongs to this backend.
    #[must_use]
    pub fn token<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }

    /// Unwraps the backend's own token, if it belongs to this backend.
    #[must_use]
    pub fn into_token<T: Any>(self) -> Option<T> {
        self.0.downcast().ok().map(|token| *token)
    }
}

impl fmt::Debug for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Offer")
    }
}

/// Allocates memory that a link can offer, without access to the link ([`Memory::allocator`]).
#[derive(Clone)]
pub struct Allocator(Arc<AllocateFn>);

type AllocateFn = dyn Fn(usize) -> Result<(OwnSegment, Offer)> + Send + Sync;

impl Allocator {
    /// Makes an allocator that runs `allocate`.
    pub fn new(allocate: impl Fn(usize) -> Result<(OwnSegment, Offer)> + Send + Sync + 'static) -> Self {
        Self(Arc::new(allocate))
    }

    /// Allocates like [`Memory::allocate`].
    ///
    /// # Errors
    /// Those of [`Memory::allocate`].
    pub fn allocate(&self, len: usize) -> Result<(OwnSegment, Offer)> {
        (self.0)(len)
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Allocator")
    }
}

/// Source of shared memory.
pub trait Memory {
    /// Allocates `len` bytes (a multiple of 4096), zeroed, present and writable through this mapping alone. Returns the
    /// segment, and the offer by which the peer can map it read-only.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) names the limit that was reached.
    fn allocate(&mut self, len: usize) -> Result<(OwnSegment, Offer)>;

    /// Returns an allocator that works like [`allocate`](Self::allocate) for a caller that does not hold the link
    /// meanwhile. Its descriptors are reserved. Returns `None` if allocation requires the link.
    fn allocator(&self) -> Option<Allocator> {
        None
    }

    /// Takes a segment back. The mapping ends now; the memory is freed as soon as the peer can no longer reach it.
    /// Until then it waits in quarantine, where it is not reused. A peer that has not mapped the segment yet may never
    /// be able to.
    fn retire(&mut self, segment: Option<OwnSegment>, offer: Offer);

    /// Returns the number of bytes that were retired and that the peer can still reach.
    fn quarantined(&self) -> u64;

    /// Returns the advisable length of a segment for which about `wanted` bytes would do: shorter where its resources
    /// are scarce. An allocation of that length may still fail.
    fn affordable(&self, wanted: usize) -> usize {
        wanted
    }

    /// Returns whether the peer can map memory that was sent to it even after the owner let go of it or died.
    fn outlives_owner(&self) -> bool;
}

/// Liveness of the peer, as known from an authority other than the peer.
///
/// # Example
/// ```
/// # extern crate tombolo_domain as tombolo;
/// use tombolo::Liveness;
///
/// assert!(Liveness::DomainGone.is_gone());
/// assert!(!Liveness::Paused.is_gone()); // it may go on at any time
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Liveness {
    /// The peer runs, as far as can be known.
    Running,
    /// The peer exists and does not run: it is stopped, frozen or suspended. It may continue at any time.
    Paused,
    /// The peer's process is gone, or has closed its side of the path.
    ProcessGone,
    /// The peer's whole domain is gone.
    DomainGone,
    /// The peer may still run, but the memory it shared was taken back: no more data comes from it.
    Revoked,
    /// The backend cannot tell.
    Unknown,
}

impl Liveness {
    /// Returns whether the peer will never do anything again.
    #[must_use]
    pub const fn is_gone(self) -> bool {
        matches!(self, Self::ProcessGone | Self::DomainGone)
    }
}

/// Identity of the peer, as reported by the backend and not by the peer.
///
/// # Example
/// ```
/// # extern crate tombolo_domain as tombolo;
/// use tombolo::Peer;
///
/// fn is_mine(peer: &Peer, uid: u32) -> bool {
///     peer.uid == Some(uid)
/// }
/// assert!(!is_mine(&Peer::default(), 0)); // an unknown user is nobody's
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Peer {
    /// Name or number of the peer's domain.
    pub domain: String,
    /// Process of the peer, if the two endpoints share a kernel and the process number is valid here.
    pub pid: Option<u32>,
    /// User of the peer, under the same conditions.
    pub uid: Option<u32>,
}

/// A received control message.
#[derive(Debug)]
pub struct Received {
    /// The bytes of the message.
    pub message: Vec<u8>,
    /// The segment that came with it, checked and mapped read-only.
    pub segment: Option<PeerSegment>,
}

/// Places of a channel's segments, for a driver of this kernel that uses them in this endpoint's place. Includes the
/// descriptor that the program waits for meanwhile.
#[derive(Debug)]
pub struct DriverParts {
    /// Descriptor of the memory that contains the own segment.
    pub own: OwnedFd,
    /// Offset of the own segment in `own`.
    pub own_at: u64,
    /// Descriptor of the memory that contains the peer's segment.
    pub peer: OwnedFd,
    /// Offset of the peer's segment in `peer`.
    pub peer_at: u64,
    /// Offset of the peer's state byte in `peer`.
    pub state: u32,
    /// First value of that byte that means that the peer has ended.
    pub over: u8,
    /// Polls readable when [`Endpoint::liveness`] may have changed. It may stay readable.
    pub news: OwnedFd,
}

/// One of two endpoints that have met: its memory, its path for control messages, and the liveness of its peer.
///
/// Control messages are few (set-up, hand-over), have at most
/// [`CONTROL_MESSAGE_MAX`](tombolo_layout::limits::CONTROL_MESSAGE_MAX) bytes each, and arrive separately and in order.
pub trait Endpoint: Memory + Send + fmt::Debug {
    /// Sends `message` and, with it, the right to map the memory of `offer`, which this link must have made and which
    /// is sent once. Never blocks.
    ///
    /// # Errors
    /// [`PeerGone`](crate::Error::PeerGone); [`Limit`](crate::Error::Limit) where the path is full because the peer
    /// does not read it, or where the message is too long for any path.
    fn send(&mut self, message: &[u8], offer: Option<&Offer>) -> Result<()>;

    /// Sends like [`send`](Self::send), with a doorbell for the subject of the message. A path that cannot carry the
    /// doorbell leaves it out.
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    fn send_with_doorbell(&mut self, message: &[u8], offer: Option<&Offer>, _doorbell: &SingleDoorbell) -> Result<()> {
        self.send(message, offer)
    }

    /// Returns the doorbell that came with the last message from [`recv`](Self::recv), if there was one.
    fn take_notifier(&mut self) -> Option<SingleNotifier> {
        None
    }

    /// Returns a substitute for one doorbell per connection, where the path carries no descriptors (S-17). The doorbell
    /// is notified when this endpoint's [`Slot::Data`](crate::Slot::Data) is, and is made anew for each caller. The
    /// notifier notifies the peer's.
    ///
    /// # Errors
    /// If there is no descriptor for it, or nothing has come from the peer yet.
    fn shared_doorbells(&self) -> Result<Option<(SingleDoorbell, SingleNotifier)>> {
        Ok(None)
    }

    /// Returns the next control message, or `None` while there is none. Never blocks. A segment that comes with it is
    /// checked and mapped: it cannot shrink, this endpoint cannot write it, it is present as a whole, and it has at
    /// most `max_segment` bytes.
    ///
    /// # Errors
    /// [`Malformed`](crate::Error::Malformed) where the message or its segment violates the rules;
    /// [`Revoked`](crate::Error::Revoked) where its memory was taken back or retired before it could be mapped;
    /// [`PeerGone`](crate::Error::PeerGone) when there is nothing left to read and no peer to send more.
    fn recv(&mut self, max_segment: u64) -> Result<Option<Received>>;

    /// Returns a descriptor that polls readable when [`recv`](Self::recv) has something to return, and sometimes
    /// without cause (D-8).
    fn fd(&self) -> BorrowedFd<'_>;

    /// Returns the channel's doorbell, which exists once the first message has come.
    fn doorbell(&self) -> Option<Arc<dyn Doorbell>>;

    /// Tells the peer that this endpoint publishes nothing more because the link is being taken away (V-9). Never
    /// blocks. Does nothing in a backend whose links are not taken away.
    fn leave(&mut self) {}

    /// Returns the places of both segments, if a driver of this kernel can use them. The own segment is that of
    /// `offer`.
    fn driver_parts(&self, _offer: &Offer) -> Option<DriverParts> {
        None
    }

    /// Returns the peer's liveness now. May cost a few system calls.
    fn liveness(&self) -> Liveness;

    /// Returns the peer's identity.
    fn peer(&self) -> Peer;

    /// Returns whether a child made by fork has the same mappings of this link as its parent.
    fn is_inherited(&self) -> bool {
        true
    }

    /// Returns whether both endpoints run on one kernel, so that a barrier of that kernel reaches both.
    fn same_kernel(&self) -> bool;
}
