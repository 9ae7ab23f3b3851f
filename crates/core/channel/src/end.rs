// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State of an endpoint of a channel that its two halves share.

use std::sync::{
    Mutex, MutexGuard, OnceLock,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

use tombolo_domain::{Endpoint, Error as DomainError, Liveness, Offer, Peer, Received, Slot};
use tombolo_layout::{Features, state::Phase, words};
use tombolo_mem::{MappedOwnWord, MappedPeerWord, OwnWord, PeerWord};
use tombolo_os::lock::lock;

use crate::{
    Error, Result,
    control::{refusal_in, without_doorbell},
    os,
};

/// How the peer's side of a channel ended, known once everything that the peer sent was read.
///
/// # Example
/// ```
/// use tombolo::Ending;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let address = format!("local:{}/report", folder.path().display());
/// # let mut listener = tombolo::listen(&address)?;
/// # let client = std::thread::spawn(move || tombolo::connect(&address));
/// # let mut peer = listener.accept()?;
/// let (mut reader, _) = client.join().unwrap()?.into_split();
/// # peer.split().1.abort();
/// // the peer gives up in the middle
/// assert_eq!(reader.try_read(&mut [0; 64])?, Some(0));
/// assert_eq!(reader.ending(), Some(Ending::Aborted));
/// # Ok::<(), tombolo::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Ending {
    /// The peer closed in order: it wrote everything.
    Closed,
    /// The peer aborted in the middle.
    Aborted,
    /// The peer's process died, or ended without closing.
    ProcessGone,
    /// The peer's whole domain died.
    DomainGone,
    /// The memory that carried the data was taken back.
    Revoked,
}

impl Ending {
    pub(crate) fn from_phase(phase: Phase) -> Self {
        if phase == Phase::Closed { Self::Closed } else { Self::Aborted }
    }

    pub(crate) fn from_liveness(life: Liveness) -> Self {
        match life {
            Liveness::DomainGone => Self::DomainGone,
            Liveness::Revoked => Self::Revoked,
            _ => Self::ProcessGone,
        }
    }
}

/// One endpoint of a channel, shared by its two halves.
#[derive(Debug)]
pub(crate) struct End {
    link: Mutex<Shared>,
    /// Word in which this endpoint publishes the CPU that it runs on (R-14).
    own_cpu: MappedOwnWord,
    /// Word in which the peer publishes its CPU (R-14).
    peer_cpu: MappedPeerWord,
    /// Whether the two endpoints number the same CPUs: CPU 0 of one machine is not CPU 0 of another (R-14).
    same_cpus: bool,
    pub(crate) features: Features,
    pub(crate) own_epoch: u64,
    pub(crate) peer_epoch: u64,
    pub(crate) own_map_limit: u64,
    pub(crate) peer_map_limit: u64,
    /// Whether the peer was found gone. Once true, it stays true.
    gone: AtomicBool,
    /// Protocol violation that one half found. It ends the other half as well (R-19).
    violation: OnceLock<Error>,
    /// Refusal that the peer sent instead of joining (C-5).
    refused: OnceLock<Error>,
    /// Whether memory of the peer was found to be taken away.
    revoked: AtomicBool,
    /// Whether this endpoint found that the link is being taken away, so that the data it no longer writes was cut off
    /// (V-9).
    left: AtomicBool,
    /// For each half, the number of notifications for which it found something (R-25).
    served: [AtomicU32; 2],
}

/// The link, and those parts of this endpoint's memory that must be taken back in the end.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) link: Box<dyn Endpoint>,
    pub(crate) offers: Vec<Offer>,
    /// Whether no message has come since the greetings, so that the next may be a refusal of this endpoint's Welcome
    /// (C-5).
    may_be_refused: bool,
    /// Message received when looking for a refusal that was not one.
    waiting: Option<std::result::Result<Received, DomainError>>,
}

impl Shared {
    /// Returns the next control message, whose segment may have at most `max_segment` bytes.
    pub(crate) fn receive(&mut self, max_segment: u64) -> std::result::Result<Option<Received>, DomainError> {
        self.may_be_refused = false;
        let received = self.waiting.take().or_else(|| self.link.recv(max_segment).transpose());
        received.map(|received| without_doorbell(&mut *self.link, received)).transpose()
    }
}

/// The terms that two endpoints agreed on in their handshake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreement {
    pub(crate) features: Features,
    pub(crate) own_epoch: u64,
    pub(crate) peer_epoch: u64,
    pub(crate) own_map_limit: u64,
    pub(crate) peer_map_limit: u64,
    /// Whether this endpoint listened.
    pub(crate) listened: bool,
}

impl End {
    pub(crate) fn new(
        link: Box<dyn Endpoint>,
        first: Offer,
        cpus: (MappedOwnWord, MappedPeerWord),
        agreed: Agreement,
    ) -> Self {
        let Agreement { features, own_epoch, peer_epoch, own_map_limit, peer_map_limit, listened } = agreed;
        let same_cpus = link.same_kernel();
        let link = Mutex::new(Shared { link, offers: vec![first], may_be_refused: listened, waiting: None });
        let (own_cpu, peer_cpu) = cpus;
        let (gone, revoked, left) = Default::default();
        Self {
            link,
            own_cpu,
            peer_cpu,
            same_cpus,
            features,
            own_epoch,
            peer_epoch,
            own_map_limit,
            peer_map_limit,
            gone,
            violation: OnceLock::new(),
            refused: OnceLock::new(),
            revoked,
            left,
            served: Default::default(),
        }
    }

    /// Records the peer's protocol violation for both halves. Returns whether it is the first.
    pub(crate) fn report_violation(&self, error: &Error) -> bool {
        error.repeat_violation().is_some_and(|violation| self.violation.set(violation).is_ok())
    }

    /// Returns whether either half found a protocol violation of the peer.
    pub(crate) fn is_caught(&self) -> bool {
        self.violation.get().is_some()
    }

    /// Fails with the peer's protocol violation, if one was found.
    pub(crate) fn check_honest(&self) -> Result<()> {
        self.violation.get().and_then(Error::repeat_violation).map_or(Ok(()), Err)
    }

    pub(crate) fn link(&self) -> MutexGuard<'_, Shared> {
        // A panic elsewhere leaves the link in a usable state.
        lock(&self.link)
    }

    pub(crate) fn liveness(&self) -> Liveness {
        if self.revoked.load(Ordering::Relaxed) {
            return Liveness::Revoked;
        }
        self.link().link.liveness()
    }

    /// Returns whether `error`, found in the peer's memory, is due to this memory being taken away (D-3). Then the
    /// memory may hold zeros that no peer wrote and that violate the specification.
    #[cold]
    pub(crate) fn is_revoked(&self, error: &Error) -> bool {
        let revoked = match error {
            Error::Domain(DomainError::Revoked) => true,
            Error::Corrupt(_) | Error::Malformed { .. } => self.liveness() == Liveness::Revoked,
            _ => false,
        };
        if revoked {
            // ORDER: Relaxed; the flag stands for itself.
            self.revoked.store(true, Ordering::Relaxed);
            self.set_gone();
        }
        revoked
    }

    /// Returns whether both endpoints run on one CPU, as far as the peer has published its CPU. Publishes the CPU of
    /// this endpoint (R-14).
    pub(crate) fn shares_cpu(&self) -> bool {
        if !self.same_cpus {
            return false;
        }
        let cpu = words::encode_cpu(os::current_cpu());
        if self.own_cpu.load() != cpu {
            // ORDER R-14: Relaxed; a hint.
            self.own_cpu.store_relaxed(cpu);
        }
        self.peer_cpu.load_relaxed().hint() == cpu
    }

    /// Returns whether the peer can map the memory that this endpoint sent it even after this endpoint is gone.
    pub(crate) fn memory_outlives_us(&self) -> bool {
        self.link().link.outlives_owner()
    }

    pub(crate) fn peer(&self) -> Peer {
        self.link().link.peer()
    }

    /// Records that the data this endpoint no longer writes was cut off (V-9).
    pub(crate) fn set_left(&self) {
        self.left.store(true, Ordering::Relaxed);
    }

    /// Returns whether [`set_left`](Self::set_left) was called.
    pub(crate) fn has_left(&self) -> bool {
        self.left.load(Ordering::Relaxed)
    }

    /// Records that the peer is gone.
    pub(crate) fn set_gone(&self) {
        // ORDER: Relaxed; the flag stands for itself, what the peer published was visible before it died.
        if !self.gone.swap(true, Ordering::Relaxed) {
            self.record_refusal();
        }
    }

    /// Records whether the peer ended because it did not agree to this endpoint's Welcome (C-5).
    #[cold]
    fn record_refusal(&self) {
        let mut shared = self.link();
        if !shared.may_be_refused {
            return;
        }
        let came = shared.receive(self.own_map_limit).transpose();
        let refusal = match &came {
            Some(Ok(Received { message, segment: None })) => refusal_in(message),
            _ => None,
        };
        match refusal {
            Some(refusal) => _ = self.refused.set(refusal),
            None => shared.waiting = came,
        }
    }

    /// Fails with the refusal that the peer sent instead of joining, if there was one.
    pub(crate) fn check_joined(&self) -> Result<()> {
        self.refused.get().and_then(Error::repeat_refusal).map_or(Ok(()), Err)
    }

    /// Counts a notification for which the half that sleeps in `slot` found something (R-25).
    pub(crate) fn note_served(&self, slot: Slot) {
        // ORDER: Relaxed; it is only counted.
        self.served[slot.index()].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of notifications for which the half other than `slot` found something (R-25).
    pub(crate) fn served_beside(&self, slot: Slot) -> u32 {
        self.served[1 - slot.index()].load(Ordering::Relaxed)
    }

    pub(crate) fn gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for offer in self.offers.drain(..) {
            self.link.retire(None, offer);
        }
    }
}
