// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds the state of an endpoint that its connection, its doorbell and the watching thread share.

use std::{
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use tombolo_domain::{Deadline, Doorbell, Error, Liveness, Result, SingleDoorbell, Slot, Woken};
use tombolo_layout::xen as at;

use crate::{
    hypervisor::{DomId, Hypervisor, Port},
    names::Names,
    os::lock,
    page::{OwnPage, PeerPage},
    place::Pair,
    places::{GrantedPages, Places},
    waker::{SharedDoorbell, Waker},
};

/// A domain with which this one has connections.
#[derive(Debug)]
pub(crate) struct PeerDomain {
    pub id: DomId,
    /// Whether its folder was seen in XenStore, so that its absence means something.
    pub seen: AtomicBool,
    /// Whether the domain was destroyed.
    pub gone: AtomicBool,
    names: Arc<Names>,
}

impl PeerDomain {
    pub(crate) fn new(id: DomId, names: &Arc<Names>) -> Self {
        Self { id, seen: AtomicBool::new(false), gone: AtomicBool::new(false), names: Arc::clone(names) }
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}

/// Shared state of one endpoint.
#[derive(Debug)]
pub(crate) struct End {
    pub domain: Arc<PeerDomain>,
    port: Arc<dyn Port>,
    /// This endpoint's mailbox.
    pub own: OwnPage,
    /// Reference of this endpoint's mailbox.
    pub reference: u32,
    /// Reference of the peer's mailbox, once known.
    pub peer_reference: OnceLock<u32>,
    /// The peer's mailbox, once known.
    pub peer: OnceLock<PeerPage>,
    /// Listener page to which this endpoint sent its connect request, until it is answered.
    pub listener_page: Mutex<Option<PeerPage>>,
    /// Places of segments that are offered or in quarantine.
    pub places: Mutex<Places>,
    /// Pages sent before the peer's mailbox was known, so that the grant reaper could not be told of them.
    pub unknown: Mutex<Vec<Weak<GrantedPages>>>,
    /// Process that owns the pages: a child made by fork does not have them.
    pid: u32,
    closed: AtomicBool,
    vanished: AtomicBool,
    /// Whether nobody may wait any more, although neither endpoint is over.
    gave_up: AtomicBool,
    ended: AtomicBool,
    /// Wakers of reader and writer, made when the peer has something to do.
    slots: OnceLock<[Waker; 2]>,
    /// Doorbell that all connections of a session watch.
    shared: OnceLock<SharedDoorbell>,
    /// Numbers of the pair of domains, for an endpoint that leaves once dom0 no longer publishes its peer.
    lasts: OnceLock<Pair>,
    leaving: AtomicBool,
    pub control: Waker,
    service: String,
}

impl End {
    /// Makes the state for a listener's or a caller's endpoint of `service`.
    pub(crate) fn new(
        xen: &dyn Hypervisor,
        domain: &Arc<PeerDomain>,
        port: Arc<dyn Port>,
        service: &str,
    ) -> Result<Arc<Self>> {
        let grants = xen.grant(domain.id, 1)?;
        let reference = grants.references()[0];
        grants.when_gone(at::AT_STATE, Some(port.number()))?;
        let own = OwnPage::new(grants.map(0, 1)?, at::MAILBOX_MAGIC, port.number());
        own.put_made();
        Ok(Arc::new(Self {
            domain: Arc::clone(domain),
            own,
            reference,
            peer_reference: OnceLock::new(),
            peer: OnceLock::new(),
            listener_page: Mutex::new(None),
            places: Mutex::default(),
            unknown: Mutex::default(),
            pid: std::process::id(),
            closed: AtomicBool::new(false),
            vanished: AtomicBool::new(false),
            gave_up: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            slots: OnceLock::new(),
            shared: OnceLock::new(),
            lasts: OnceLock::new(),
            leaving: AtomicBool::new(false),
            control: Waker::new(&port)?,
            service: service.into(),
            port,
        }))
    }

    /// Returns the number of this endpoint's port.
    pub(crate) fn port_number(&self) -> u32 {
        self.port.number()
    }

    /// Sends the peer an event.
    pub(crate) fn notify(&self) {
        self.port.notify();
    }

    /// Returns the reference of the peer's mailbox, if the listener page has it.
    pub(crate) fn answer(&self) -> Option<u32> {
        let listener_page = lock(&self.listener_page);
        let words = (0..at::ANSWERS).map(|index| {
            listener_page.as_ref().map(|listener_page| listener_page.word(at::AT_ANSWERS + 8 * index).hint())
        });
        words.flatten().find(|word| (word >> 32) as u32 == self.reference).map(|word| word as u32)
    }

    /// Returns the peer's liveness.
    pub(crate) fn liveness(&self) -> Liveness {
        // If the peer has not ended, dom0's broker tells the domain's liveness.
        self.end().unwrap_or_else(|| self.domain.names.liveness(self.domain.id))
    }

    /// Returns how the peer ended, if it did.
    fn end(&self) -> Option<Liveness> {
        if self.domain.is_gone() {
            return Some(Liveness::DomainGone);
        }
        let open = match self.peer.get() {
            Some(peer) => peer.state() == at::OPEN,
            None => {
                let state = lock(&self.listener_page).as_ref().map(PeerPage::state);
                state == Some(at::OPEN) || self.answer().is_some()
            }
        };
        (!open).then_some(Liveness::ProcessGone)
    }

    /// Returns whether the peer, or this endpoint itself, has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.closed.load(Ordering::Acquire) || self.end().is_some()
    }

    /// Returns whether the peer maps none of this endpoint's memory any more, regardless of what it reports.
    pub(crate) fn maps_nothing(&self) -> bool {
        if self.domain.is_gone() || self.vanished.load(Ordering::Acquire) {
            return true;
        }
        match self.peer.get() {
            Some(peer) => peer.state() == at::GONE,
            // A peer that has not answered has mapped nothing. One that has answered may have, even if this endpoint
            // has not seen the answer yet.
            None => self.answer().is_none(),
        }
    }

    /// Records that the peer answered and was gone before its page could be mapped.
    pub(crate) fn note_vanished(&self) {
        self.vanished.store(true, Ordering::Release);
    }

    /// Wakes all waiters if the endpoint is over.
    pub(crate) fn wake_if_over(&self) {
        if self.is_over() || self.gave_up.load(Ordering::Acquire) {
            if self.is_ours() && self.liveness().is_gone() {
                self.own.set(at::AT_STATS, at::stats_head(self.domain.id, true));
            }
            self.wake_all();
        }
    }

    /// Makes what is not needed before the first message was sent: the wakers of reader and writer, and what tools read
    ///
    pub(crate) fn complete(&self) -> Result<()> {
        if self.slots.get().is_none() {
            let _ = self.slots.set([Waker::new(&self.port)?, Waker::new(&self.port)?]);
            self.own.put_stats(self.domain.id, &self.service);
            // ORDER SeqCst: with `wake_all`, which stores and loads in the opposite order.
            if self.ended.load(Ordering::SeqCst) {
                self.ended.store(false, Ordering::SeqCst);
                self.wake_all();
            }
        }
        Ok(())
    }

    /// Returns a doorbell for one of the connections that share this endpoint's event channel.
    pub(crate) fn shared_doorbell(&self) -> Result<SingleDoorbell> {
        if self.shared.get().is_none() {
            let _ = self.shared.set(SharedDoorbell::new(&*self.port)?);
        }
        let shared = self.shared.get().expect("made just now");
        let doorbell = shared.of_connection();
        doorbell.map_err(|error| Error::os("fcntl", error))
    }

    /// Makes the endpoint leave once dom0 no longer publishes its peer under this pair of numbers.
    pub(crate) fn leave_once_withdrawn(&self, pair: Pair) {
        let _ = self.lasts.set(pair);
        self.leave_if_withdrawn();
    }

    /// Begins to leave if that is the case. Each waiter is woken once to learn of it.
    pub(crate) fn leave_if_withdrawn(&self) {
        let is_told = |pair: &Pair| self.domain.names.pair_of(self.domain.id) == Some(*pair);
        // ORDER: Relaxed; the flag stands for itself.
        if self.lasts.get().is_some_and(|pair| !is_told(pair)) && !self.leaving.swap(true, Ordering::Relaxed) {
            self.shared.get().into_iter().for_each(SharedDoorbell::raise);
            self.slots.get().into_iter().flatten().chain([&self.control]).for_each(Waker::put_back);
        }
    }

    /// Ends all present and future waits here.
    fn wake_all(&self) {
        if !self.ended.swap(true, Ordering::SeqCst) {
            self.shared.get().into_iter().for_each(SharedDoorbell::raise);
            let all = self.slots.get().into_iter().flatten().chain([&self.control]);
            // All wakers are ended, even if one fails.
            let failed = all.filter(|waker| !waker.end()).count();
            if failed > 0 {
                // The next check tries again.
                self.ended.store(false, Ordering::SeqCst);
            }
        }
    }

    /// Returns the name of the service.
    pub(crate) fn service(&self) -> &str {
        &self.service
    }

    fn slot(&self, slot: Slot) -> &Waker {
        &self.slots.get().expect("made before a doorbell is given out")[slot.index()]
    }

    /// Returns the bytes that were retired and that the peer may still map.
    pub(crate) fn quarantined(&self) -> u64 {
        lock(&self.places).quarantined
    }

    /// Changes the record of the places, and updates the bytes in quarantine on the stats page.
    pub(crate) fn account(&self, change: impl FnOnce(&mut Places)) {
        let mut places = lock(&self.places);
        change(&mut places);
        if self.is_ours() {
            self.own.set(at::AT_QUARANTINE, places.quarantined);
        }
    }

    /// Returns whether this process may access the endpoint's pages.
    pub(crate) fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Closes the endpoint, notifies the peer and wakes all waiters here.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.own.close();
        self.port.notify();
        self.wake_all();
    }
}

impl Doorbell for End {
    fn notify(&self, _slot: Slot) {
        // One event serves both slots (D-14).
        self.port.notify();
    }

    fn wait(&self, slot: Slot, deadline: Deadline) -> Result<Woken> {
        self.slot(slot).wait(deadline, || self.wake_if_over())
    }

    fn drain(&self, slot: Slot) {
        self.slot(slot).drain();
        self.wake_if_over();
    }

    fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    fn end_waits(&self) {
        self.gave_up.store(true, Ordering::Release);
        self.wake_all();
    }

    fn fd(&self, slot: Slot) -> BorrowedFd<'_> {
        self.wake_if_over();
        self.slot(slot).fd()
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;
    use crate::FakeXen;

    #[test]
    fn x12_mailbox_says_for_tools_who_the_peer_is_and_what_it_may_still_map() {
        let xen = FakeXen::new();
        let (here, there) = (xen.domain(5).xen, xen.domain(7).xen);
        let domain = Arc::new(PeerDomain::new(7, &Arc::new(Names::new(&here, 5))));
        let end = End::new(&*here, &domain, here.offer_port(7).unwrap(), "a-web_1234").unwrap();
        let page = there.map(5, &[end.reference], None, Box::new(())).unwrap();
        let (page, _port) = PeerPage::new(page, at::MAILBOX_MAGIC).unwrap();
        let says = |offset| page.word(offset).hint();
        end.complete().unwrap();
        assert_eq!(at::stats_peer(says(at::AT_STATS)), Some((7, false)));
        let name = [0, 8, 16].map(|offset| says(at::AT_NAME + offset).to_le_bytes()).concat();
        assert_eq!(name, *b"a-web_1234\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        assert_ne!(says(at::AT_MADE), 0);
        for (bytes, leave) in [(8192, false), (4096, false), (8192, true), (4096, true)] {
            let before = says(at::AT_QUARANTINE);
            end.account(|places| if leave { places.quarantined -= bytes } else { places.quarantined += bytes });
            let expected = if leave { before - bytes } else { before + bytes };
            assert_eq!((says(at::AT_QUARANTINE), end.quarantined()), (expected, expected));
        }
        domain.gone.store(true, Ordering::Release);
        end.wake_if_over();
        assert_eq!(at::stats_peer(says(at::AT_STATS)), Some((7, true)));
    }
}
