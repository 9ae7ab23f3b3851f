// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What two endpoints have of each other once they met.

use std::{
    any::Any,
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use tombolo_mem::{OwnSegment, PeerSegment};

use crate::{Doorbell, Result, SingleDoorbell, SingleNotifier};

/// What an owner keeps of a segment so that it can be offered to the peer and taken back: a descriptor, grant
/// references, a slice's number. Only the backend that made it knows what is inside.
pub struct Offer(Box<dyn Any + Send>);

impl Offer {
    /// Wraps a backend's own token.
    pub fn new(token: impl Any + Send) -> Self {
        Self(Box::new(token))
    }

    /// The backend's own token, if it is of this backend.
    #[must_use]
    pub fn token<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }

    /// Unwraps the backend's own token, if it is of this backend.
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

/// Allocates memory that a link can offer, apart from the link ([`Memory::allocator`]).
#[derive(Clone)]
pub struct Allocator(Arc<AllocateFn>);

type AllocateFn = dyn Fn(usize) -> Result<(OwnSegment, Offer)> + Send + Sync;

impl Allocator {
    /// One that does `allocate`.
    pub fn new(allocate: impl Fn(usize) -> Result<(OwnSegment, Offer)> + Send + Sync + 'static) -> Self {
        Self(Arc::new(allocate))
    }

    /// As [`Memory::allocate`].
    ///
    /// # Errors
    /// As [`Memory::allocate`].
    pub fn allocate(&self, len: usize) -> Result<(OwnSegment, Offer)> {
        (self.0)(len)
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Allocator")
    }
}

/// Where shared memory comes from.
pub trait Memory {
    /// Allocates `len` bytes (a multiple of 4096), zeroed, present, writable by this mapping alone, and the offer by
    /// which the peer gets to map it read-only.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) names what ran out.
    fn allocate(&mut self, len: usize) -> Result<(OwnSegment, Offer)>;

    /// What allocates as this does, for whoever does not hold the link meanwhile; its descriptors are put aside. None where
    /// that takes the link.
    fn allocator(&self) -> Option<Allocator> {
        None
    }

    /// Takes a segment back: the mapping goes now, the memory itself as soon as the peer can no longer reach it. Until
    /// then it waits in quarantine, where nobody reuses it. A peer that has not mapped it yet may never do so.
    fn retire(&mut self, segment: Option<OwnSegment>, offer: Offer);

    /// Bytes of memory that were retired while the peer could still reach them.
    fn quarantined(&self) -> u64;

    /// How long a segment of about `wanted` bytes had better be where nobody asked for just that: shorter where what it
    /// takes is scarce. An allocation of that length may fail nevertheless.
    fn affordable(&self, wanted: usize) -> usize {
        wanted
    }

    /// Whether the peer can map what was sent to it even after its owner let go of it or died.
    fn outlives_owner(&self) -> bool;
}

/// What is known of the peer's life, by an authority other than the peer.
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
    /// The peer exists and does not run: stopped, frozen, suspended. It may go on at any time.
    Paused,
    /// The peer's process is gone, or has closed its side of the path.
    ProcessGone,
    /// The peer's whole domain is gone.
    DomainGone,
    /// The peer may well run, but the memory it shared was taken back: no more comes from it.
    Revoked,
    /// Nobody here can tell.
    Unknown,
}

impl Liveness {
    /// Returns whether the peer will never do anything again.
    #[must_use]
    pub const fn is_gone(self) -> bool {
        matches!(self, Self::ProcessGone | Self::DomainGone)
    }
}

/// Who the peer is, as the backend says, not the peer.
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
    /// The domain's name or number.
    pub domain: String,
    /// The peer's process, where the two endpoints share a kernel and its number means something here.
    pub pid: Option<u32>,
    /// The peer's user, likewise.
    pub uid: Option<u32>,
}

/// A control message that came in.
#[derive(Debug)]
pub struct Received {
    /// The message.
    pub message: Vec<u8>,
    /// The segment it carried: checked, and mapped read-only.
    pub segment: Option<PeerSegment>,
}

/// Where the segments of a channel are, for a driver of this kernel's that is to use them in this end's place, and what the program
/// is to wait for meanwhile.
#[derive(Debug)]
pub struct DriverParts {
    /// What the own segment is in.
    pub own: OwnedFd,
    /// Where in it.
    pub own_at: u64,
    /// What the peer's segment is in.
    pub peer: OwnedFd,
    /// Where in it.
    pub peer_at: u64,
    /// Where in that the peer's state stands, a byte.
    pub life: u32,
    /// From which state on the peer is over.
    pub over: u8,
    /// Polls readable when [`Endpoint::liveness`] may have changed. It may stay so.
    pub news: OwnedFd,
}

/// Two ends that met: their memory, a path for control messages, and each other's life.
///
/// Control messages are few (set-up, hand-over), at most
/// [`CONTROL_MESSAGE_MAX`](tombolo_layout::limits::CONTROL_MESSAGE_MAX) bytes, kept apart, in order.
pub trait Endpoint: Memory + Send + fmt::Debug {
    /// Sends `message` and, with it, the right to map what `offer` stands for: one that this link made, which is sent
    /// once. Never blocks.
    ///
    /// # Errors
    /// [`PeerGone`](crate::Error::PeerGone); [`Limit`](crate::Error::Limit) where the path is full because the peer
    /// does not read it, or where the message is too long for any path.
    fn send(&mut self, message: &[u8], offer: Option<&Offer>) -> Result<()>;

    /// As [`send`](Self::send), with a doorbell for what the message is about. A path that cannot carry it leaves it
    /// out.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    fn send_with_doorbell(&mut self, message: &[u8], offer: Option<&Offer>, _doorbell: &SingleDoorbell) -> Result<()> {
        self.send(message, offer)
    }

    /// The doorbell that came with the message that [`recv`](Self::recv) gave last, if one did.
    fn take_notifier(&mut self) -> Option<SingleNotifier> {
        None
    }

    /// What stands in for a doorbell of each connection where the path carries no descriptors (S-17): one that rings when this end's
    /// [`Slot::Data`](crate::Slot::Data) does, made anew for each caller, and what rings the peer's.
    ///
    /// # Errors
    /// There is no descriptor for it, or the peer has not been heard yet.
    fn shared_doorbells(&self) -> Result<Option<(SingleDoorbell, SingleNotifier)>> {
        Ok(None)
    }

    /// The next control message, or `None` while there is none. Never blocks. A segment that comes with it is checked
    /// (it cannot shrink, this endpoint cannot write it, it is all there, it has at most `max_segment` bytes) and
    /// mapped.
    ///
    /// # Errors
    /// [`Malformed`](crate::Error::Malformed) where the message or what it carries breaks the rules;
    /// [`Revoked`](crate::Error::Revoked) where its memory was taken back or retired before it could be mapped;
    /// [`PeerGone`](crate::Error::PeerGone) when there is nothing left to read and nobody to send more.
    fn recv(&mut self, max_segment: u64) -> Result<Option<Received>>;

    /// A descriptor that polls readable when [`recv`](Self::recv) has something to say, and sometimes for nothing (D-8).
    fn fd(&self) -> BorrowedFd<'_>;

    /// The channel's doorbell; there is one once the first message came in.
    fn doorbell(&self) -> Option<Arc<dyn Doorbell>>;

    /// Tells the peer that this endpoint publishes nothing more because the link is being taken away (V-9). Never
    /// blocks. A backend whose links are not taken away has nothing to tell.
    fn leave(&mut self) {}

    /// Where both segments are, the own one being what `offer` stands for, if a driver of this kernel's can use them.
    fn driver_parts(&self, _offer: &Offer) -> Option<DriverParts> {
        None
    }

    /// What is known of the peer's life now. May cost a system call or a few.
    fn liveness(&self) -> Liveness;

    /// Who the peer is.
    fn peer(&self) -> Peer;

    /// Whether a child made by fork has what is mapped of this link, as its parent has it.
    fn is_inherited(&self) -> bool {
        true
    }

    /// Whether both endpoints run on one kernel, so that a barrier of that kernel reaches both.
    fn same_kernel(&self) -> bool;
}
