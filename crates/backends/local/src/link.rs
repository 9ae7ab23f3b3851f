// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements the two endpoints of a connected socket (L-5, L-6, L-11).

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use tombolo_domain::{
    Allocator, Doorbell, Endpoint, Error, Liveness, Memory, Offer, Peer, Received, Result, SingleDoorbell,
    SingleNotifier, Slot,
    aside::{self, ReservedFd},
};
use tombolo_layout::{
    limits::CONTROL_MESSAGE_MAX,
    local::{DESCRIPTORS_MAX, DOORBELLS, Head, MEMFD_NAME_MAX, MEMORY},
};
use tombolo_mem::{OwnSegment, PeerSegment, SealError};

use crate::{
    discard::{self, Kind},
    doorbell::{self, EventfdDoorbell, LocalDoorbells},
    frame::{self, Datagram, Taken, malformed},
    life::Identity,
};

/// One endpoint of a connection.
#[derive(Debug)]
pub(crate) struct LocalEndpoint {
    /// Present until the endpoint is dropped.
    socket: Option<ReservedFd>,
    identity: Identity,
    /// Whether the endpoint was accepted: its peer is then a stranger.
    accepted: bool,
    /// Reason why a datagram that stays in the queue was refused: nothing behind it is taken (L-5).
    spoilt: Option<(&'static str, String)>,
    /// Name of this endpoint's memory (L-13).
    name: String,
    /// This endpoint's doorbells, made when first needed.
    own: Option<Arc<[EventfdDoorbell; 2]>>,
    /// Whether they were sent to the peer.
    introduced: bool,
    /// Doorbells of both endpoints, once the peer has sent its own.
    doorbells: Option<Arc<LocalDoorbells>>,
    /// Doorbell that came with the last datagram.
    notifier: Option<SingleNotifier>,
}

impl LocalEndpoint {
    /// Makes the endpoint of the side that connected.
    pub(crate) fn new(socket: OwnedFd) -> Result<Self> {
        Self::named(socket, MEMORY.into(), false)
    }

    /// Makes the endpoint of the side that listened at `place`, after which its memory is named.
    pub(crate) fn of_listener(socket: OwnedFd, place: &str) -> Result<Self> {
        let name = format!("{MEMORY}:{place}");
        Self::named(socket, name[..name.floor_char_boundary(MEMFD_NAME_MAX)].into(), true)
    }

    fn named(socket: OwnedFd, name: String, accepted: bool) -> Result<Self> {
        let identity = Identity::of_peer(socket.as_fd()).map_err(|error| Error::os("getsockopt", error))?;
        let socket = Some(crate::reserve(socket)?);
        let (own, doorbells, notifier, spoilt) = (None, None, None, None);
        Ok(Self { socket, identity, accepted, spoilt, name, own, introduced: false, doorbells, notifier })
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().expect("there until the end is dropped").as_fd()
    }

    fn own_doorbells(&mut self) -> Result<Arc<[EventfdDoorbell; 2]>> {
        if let Some(own) = &self.own {
            return Ok(Arc::clone(own));
        }
        let socket = self.socket();
        let own = aside::lifted(|| Ok(Arc::new([EventfdDoorbell::new(socket)?, EventfdDoorbell::new(socket)?])))?;
        self.own = Some(Arc::clone(&own));
        Ok(own)
    }

    fn send_all(&mut self, message: &[u8], offer: Option<&Offer>, doorbell: Option<&SingleDoorbell>) -> Result<()> {
        let len = match u16::try_from(message.len()) {
            Ok(len) if message.len() <= CONTROL_MESSAGE_MAX => len,
            _ => return Err(Error::Limit { what: "length of a control message", remedy: "send at most 256 bytes" }),
        };
        let segment = offer.map(|offer| descriptor(offer).expect("an offer made by this backend"));
        let own = self.own_doorbells()?;
        let mut descriptors = Vec::with_capacity(DESCRIPTORS_MAX);
        if !self.introduced {
            descriptors.extend(Slot::ALL.map(|slot| own[slot.index()].to_ring()));
        }
        descriptors.extend(doorbell.map(AsFd::as_fd));
        descriptors.extend(segment);
        let head = Head { doorbells: !self.introduced, single: doorbell.is_some(), segment: segment.is_some(), len };
        frame::send(self.socket(), head, message, &descriptors)?;
        self.introduced = true;
        Ok(())
    }

    fn receive_datagram(&mut self, max_segment: u64) -> Result<Option<Received>> {
        if let Some((clause, what)) = &self.spoilt {
            return Err(malformed(clause, what.clone()));
        }
        let source = self.identity.source(Kind::Files);
        let is_first = self.doorbells.is_none();
        let expects = |head: Head| match (head.doorbells, is_first) {
            (false, true) => Err(malformed("L-5", "first datagram without doorbells")),
            (true, false) => Err(malformed("L-5", "doorbells in a later datagram")),
            _ => Ok(()),
        };
        let mut datagram = match frame::receive(self.socket(), expects, || discard::has_room(source))? {
            Taken::Nothing => return Ok(None),
            Taken::Datagram(datagram) => datagram,
            Taken::Refused { why, files, stays } => {
                self.discard(files);
                if let (Error::Malformed { clause, what }, true) = (&why, stays) {
                    self.spoilt = Some((clause, what.clone()));
                }
                return Err(why);
            }
        };
        let received = self.open(&mut datagram, max_segment);
        self.discard(datagram.descriptors);
        received.map(Some)
    }

    /// Closes those of the peer's descriptors that are not needed (L-5).
    fn discard(&self, mut files: Vec<OwnedFd>) {
        files.retain(|file| !is_harmless(file.as_fd()));
        if !files.is_empty() {
            discard::discard(self.identity.source(Kind::Files), files);
        }
    }

    /// Checks a datagram, and takes its doorbells and its segment. The descriptors that remain in it are not needed any
    /// more.
    fn open(&mut self, datagram: &mut Datagram, max_segment: u64) -> Result<Received> {
        let (head, message) = datagram.parts()?;
        let message = message.to_vec();
        if head.doorbells {
            self.take_doorbells(&mut datagram.descriptors)?;
        }
        self.notifier = if head.single { Some(take_notifier(&mut datagram.descriptors)?) } else { None };
        Ok(Received { message, segment: map(&datagram.descriptors, max_segment)? })
    }

    /// Takes the peer's doorbells from the front of the descriptors of its first datagram (L-5).
    fn take_doorbells(&mut self, descriptors: &mut Vec<OwnedFd>) -> Result<()> {
        let own = self.own_doorbells()?;
        for fd in &descriptors[..DOORBELLS] {
            if !doorbell::is_eventfd(fd.as_fd())? {
                return Err(malformed("L-7", "a doorbell that is no eventfd"));
            }
        }
        let mut doorbells = descriptors.drain(..DOORBELLS);
        let (Some(data), Some(space)) = (doorbells.next(), doorbells.next()) else { unreachable!("counted above") };
        let (data, space) = (crate::reserve(data)?, crate::reserve(space)?);
        self.doorbells = Some(Arc::new(LocalDoorbells { own, peer: [data, space] }));
        Ok(())
    }
}

/// Takes the doorbell that belongs to the message from the front of the remaining descriptors (L-5).
fn take_notifier(descriptors: &mut Vec<OwnedFd>) -> Result<SingleNotifier> {
    if !doorbell::is_eventfd(descriptors[0].as_fd())? {
        return Err(malformed("L-7", "a doorbell that is no eventfd"));
    }
    SingleNotifier::new(descriptors.remove(0)).map_err(|error| Error::Os { call: "fcntl", path: None, source: error })
}

/// Returns whether closing `file` asks no file system that a peer can control, and no network.
pub(crate) fn is_harmless(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok() || matches!(doorbell::is_eventfd(file), Ok(true))
}

/// Returns the descriptor of memory that was made through an endpoint, or apart from one.
fn descriptor(offer: &Offer) -> Option<BorrowedFd<'_>> {
    let own = offer.token::<OwnedFd>().map(AsFd::as_fd);
    own.or_else(|| offer.token::<ReservedFd>().map(AsFd::as_fd))
}

/// Maps the segment that the peer offers, if it is valid (L-6).
fn map(descriptors: &[OwnedFd], max: u64) -> Result<Option<PeerSegment>> {
    let [fd] = descriptors else { return Ok(None) };
    let refuse = |error| {
        malformed(
            "L-6",
            match error {
                SealError::NotMemory => "segment is no memfd on tmpfs".into(),
                SealError::Unsealed(missing) => format!("segment lacks the seals {missing:#x}"),
                SealError::Size(size) => format!("segment of {size} bytes, where at most {max} in whole pages may be"),
                SealError::Sparse(there, size) => format!("segment of {size} bytes has {there} allocated"),
                SealError::Uncountable => {
                    "segment whose pages may not be counted: its file is not open for writing".into()
                }
                SealError::Unreadable => "segment that was not opened for reading".into(),
            },
        )
    };
    // This check comes first because it never asks the file system: nothing more is done with a file that is no memfd.
    rustix::fs::fcntl_get_seals(fd).map_err(|_| refuse(SealError::NotMemory))?;
    let len = tombolo_mem::check_sealed(fd.as_fd(), max).map_err(refuse)?;
    PeerSegment::map(fd.as_fd(), len).map(Some).map_err(|error| Error::os("mmap", error))
}

impl Memory for LocalEndpoint {
    fn allocate(&mut self, len: usize) -> Result<(OwnSegment, Offer)> {
        let (segment, fd) =
            tombolo_mem::create_sealed(&self.name, len).map_err(|error| Error::os("memfd_create", error))?;
        Ok((segment, Offer::new(fd)))
    }

    fn allocator(&self) -> Option<Allocator> {
        let name = self.name.clone();
        Some(Allocator::new(move |len| {
            // Only one thread at a time may lift the limit, and zeroing takes long: the limit is lifted for the
            // descriptor alone.
            let made = tombolo_mem::create_sealed_kept(&name, len, |make| aside::lifted(|| ReservedFd::new(make()?)));
            let (segment, fd) = made.map_err(|error| Error::os("memfd_create", error))?;
            Ok((segment, Offer::new(fd)))
        }))
    }

    /// Drops the memory at once. The kernel counts the mappings and descriptors of a memfd and frees its pages after
    /// the last (L-11). Until then nobody else gets them, and this backend makes new memory each time.
    fn retire(&mut self, segment: Option<OwnSegment>, offer: Offer) {
        drop((segment, offer));
    }

    fn quarantined(&self) -> u64 {
        0
    }

    fn outlives_owner(&self) -> bool {
        true
    }
}

impl Endpoint for LocalEndpoint {
    fn send(&mut self, message: &[u8], offer: Option<&Offer>) -> Result<()> {
        self.send_all(message, offer, None)
    }

    fn send_with_doorbell(&mut self, message: &[u8], offer: Option<&Offer>, doorbell: &SingleDoorbell) -> Result<()> {
        self.send_all(message, offer, Some(doorbell))
    }

    fn take_notifier(&mut self) -> Option<SingleNotifier> {
        self.notifier.take()
    }

    fn recv(&mut self, max_segment: u64) -> Result<Option<Received>> {
        if aside::keeps() && frame::is_empty(self.socket()) {
            return Ok(None); // The limit is lifted only if something waits.
        }
        aside::lifted(|| self.receive_datagram(max_segment))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket()
    }

    fn doorbell(&self) -> Option<Arc<dyn Doorbell>> {
        self.doorbells.as_ref().map(|doorbells| Arc::clone(doorbells) as Arc<dyn Doorbell>)
    }

    fn liveness(&self) -> Liveness {
        self.identity.liveness(self.socket())
    }

    fn peer(&self) -> Peer {
        self.identity.peer()
    }

    fn same_kernel(&self) -> bool {
        true
    }
}

impl Drop for LocalEndpoint {
    /// Ends the waits on the doorbells, which may outlive the connection. Closing the socket also closes what is in its
    /// queue (L-5).
    fn drop(&mut self) {
        self.own.iter().flat_map(|own| own.iter()).for_each(EventfdDoorbell::give_up);
        let stranger = self.accepted && (self.doorbells.is_none() || self.spoilt.is_some());
        let Some(socket) = self.socket.take() else { return };
        let room = || discard::has_room(self.identity.source(Kind::Files));
        if let Err(files) = frame::empty_queue(socket.as_fd(), stranger, room, is_harmless) {
            discard::discard(self.identity.source(Kind::Socket), socket);
            self.discard(files);
        }
    }
}
