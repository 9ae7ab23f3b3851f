// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements the page by which a process that was answered once at a listener page connects there again without
//! XenStore (X-11).
//!
//! ```text
//! who asks                                      who listens
//! K1 write the connect request                  C1 take the page off the listener page
//! K2 fence                                      C2 fence
//! K3 is the page on the listener page?          C3 look for connect requests, the last time
//!    if not, ask through XenStore
//! ```
//!
//! One of the two fences comes first: either K3 sees that nobody listens any more, or C3 sees the connect request.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex,
        atomic::{Ordering, fence},
    },
};

use rustix::event::{Timespec, epoll};
use tombolo_domain::{Error, Result, aside::ReservedFd};
use tombolo_layout::xen as at;

use crate::{
    end::PeerDomain,
    hypervisor::{DomId, Hypervisor, Port},
    os::{epoll_set, lock},
    page::{OwnPage, PeerPage},
};

/// Number of events and connect requests without a resulting connection after which a page is no longer listened to. It
/// is somewhat more than a well-behaved process may have under way.
const SPENT_MAX: usize = 2 * at::REQUESTS;
/// Subject of an event of a listener's set that concerns no reconnect page: a request came through XenStore.
const STORE: u64 = u64::MAX;

fn word_of(index: usize) -> usize {
    at::AT_RECONNECT_PAGES + 8 * index
}

fn place_of(request: usize) -> usize {
    at::AT_REQUESTS + 8 * request
}

/// The page on the side that sends connect requests.
#[derive(Debug)]
pub(crate) struct ReconnectPage {
    page: OwnPage,
    port: Arc<dyn Port>,
    pub reference: u32,
    places: Mutex<Places>,
}

#[derive(Debug)]
struct Places {
    /// Number of requests so far, which makes the words of requests in one place differ.
    requests: u32,
    taken: [bool; at::REQUESTS],
}

/// A connect request that is not answered yet.
#[derive(Debug)]
pub(crate) struct PendingRequest {
    page: Arc<ReconnectPage>,
    place: usize,
}

impl ReconnectPage {
    pub(crate) fn new(xen: &dyn Hypervisor, peer: DomId) -> Result<Arc<Self>> {
        let port = xen.offer_port(peer)?;
        let grants = xen.grant(peer, 1)?;
        let reference = grants.references()[0];
        grants.when_gone(at::AT_STATE, Some(port.number()))?;
        let page = OwnPage::new(grants.map(0, 1)?, at::RECONNECT_MAGIC, port.number());
        let places = Mutex::new(Places { requests: 0, taken: [false; at::REQUESTS] });
        Ok(Arc::new(Self { page, port, reference, places }))
    }

    /// Requests a connection for the mailbox `reference`, if the listener listens to this page and a place is free.
    pub(crate) fn request_connection(
        self: &Arc<Self>,
        listener_page: &PeerPage,
        reference: u32,
    ) -> Option<PendingRequest> {
        let heard = || {
            (0..at::RECONNECT_PAGES).any(|index| listener_page.word(word_of(index)).hint() == u64::from(self.reference))
        };
        if !heard() {
            return None;
        }
        let mut places = lock(&self.places);
        let place = places.taken.iter().position(|taken| !taken)?;
        places.taken[place] = true;
        places.requests = places.requests.wrapping_add(1);
        self.page.set(place_of(place), u64::from(places.requests) << 32 | u64::from(reference));
        drop(places);
        let request = PendingRequest { page: Arc::clone(self), place };
        self.port.notify();
        // ORDER X-11: K2, with C2.
        fence(Ordering::SeqCst);
        if heard() {
            return Some(request);
        }
        request.forget();
        None
    }
}

impl PendingRequest {
    /// Takes the request back. Dropping does not do this, because a child made by fork does not have the page.
    pub(crate) fn forget(self) {
        self.page.page.set(place_of(self.place), 0);
        lock(&self.page.places).taken[self.place] = false;
    }
}

/// The page on the side that listens.
#[derive(Debug)]
struct ListenedPage {
    page: PeerPage,
    port: Arc<dyn Port>,
    reference: u32,
    /// Content of each place when it was last read.
    seen: Box<[u64; at::REQUESTS]>,
    /// Number of events and connect requests since the last one that led to a connection.
    spent: usize,
}

impl ListenedPage {
    /// Reports the references that were not there before.
    fn take_new(&mut self, mut report: impl FnMut(u32)) {
        let mut found = 0;
        for (place, seen) in self.seen.iter_mut().enumerate() {
            let word = self.page.word(place_of(place)).hint();
            if word != std::mem::replace(seen, word) && word as u32 != 0 {
                found += 1;
                report(word as u32);
            }
        }
        self.spent += found.max(1);
    }
}

/// Reconnect pages that a listener listens to, and the descriptor that polls readable when a request arrives.
#[derive(Debug)]
pub(crate) struct ReconnectPages {
    set: ReservedFd,
    of: [Option<ListenedPage>; at::RECONNECT_PAGES],
}

impl ReconnectPages {
    /// Starts without pages. `store` polls readable while a request through XenStore waits.
    pub(crate) fn new(store: BorrowedFd<'_>) -> Result<Self> {
        let set = epoll_set()?;
        epoll::add(&set, store, epoll::EventData::new_u64(STORE), epoll::EventFlags::IN)
            .map_err(|error| Error::os("epoll_ctl", error))?;
        Ok(Self { set, of: [const { None }; at::RECONNECT_PAGES] })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    /// Starts to listen to the page at `reference`, if it exists and there is a free word for it. A process without a
    /// page connects through XenStore.
    pub(crate) fn add(&mut self, xen: &dyn Hypervisor, domain: &PeerDomain, listener_page: &OwnPage, reference: u32) {
        let known = |listened: &ListenedPage| listened.reference == reference;
        if reference == 0 || self.of.iter().flatten().any(known) {
            return;
        }
        let Some(free) = self.of.iter().position(Option::is_none) else { return };
        let heard = || -> Result<ListenedPage> {
            let page = xen.map(domain.id, &[reference], None, Box::new(()))?;
            let (page, port) = PeerPage::new(page, at::RECONNECT_MAGIC)?;
            let port = xen.bind_port(domain.id, port)?;
            // The kernel reports `OUT` again with each event (X-8).
            let flags = epoll::EventFlags::OUT | epoll::EventFlags::ET;
            epoll::add(&self.set, port.fd(), epoll::EventData::new_u64(free as u64), flags)
                .map_err(|error| Error::os("epoll_ctl", error))?;
            Ok(ListenedPage { page, port, reference, seen: Box::new([0; at::REQUESTS]), spent: 0 })
        };
        if let Ok(heard) = heard() {
            self.of[free] = Some(heard);
            listener_page.set(word_of(free), reference.into());
        }
    }

    /// Reports the requests that arrived since the last call, and drops pages that are of no use any more.
    pub(crate) fn take_requests(&mut self, domain: &PeerDomain, listener_page: &OwnPage, mut report: impl FnMut(u32)) {
        let mut events = [MaybeUninit::uninit(); at::RECONNECT_PAGES + 1];
        let Ok((events, _)) = epoll::wait(&self.set, &mut events, Some(&Timespec::default())) else { return };
        for event in events {
            let listened = usize::try_from(event.data.u64()).ok().and_then(|index| self.of.get_mut(index)?.as_mut());
            if let Some(listened) = listened {
                // The port is cleared before the places are read, so that later requests are reported again.
                listened.port.clear();
                listened.take_new(&mut report);
            }
        }
        for (index, place) in self.of.iter_mut().enumerate() {
            let bad = |listened: &mut ListenedPage| {
                listened.spent > SPENT_MAX || listened.page.state() != at::OPEN || domain.is_gone()
            };
            if let Some(mut listened) = place.take_if(bad) {
                listener_page.set(word_of(index), 0);
                // ORDER X-11: C2, with K2.
                fence(Ordering::SeqCst);
                listened.take_new(&mut report);
            }
        }
    }

    /// Records that a request through the page at `reference` led to a connection.
    pub(crate) fn worked(&mut self, reference: u32) {
        let listened = self.of.iter_mut().flatten().find(|listened| listened.reference == reference);
        if let Some(listened) = listened {
            listened.spent = 0;
        }
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use std::thread;

    use super::*;
    use crate::FakeXen;

    /// Domain 5's listener page, which listens to a reconnect page of domain 7.
    struct ListenerFixture {
        here: Arc<dyn Hypervisor>,
        domain: PeerDomain,
        listener_page: OwnPage,
        seen: PeerPage,
        pages: ReconnectPages,
        page: Arc<ReconnectPage>,
    }

    impl ListenerFixture {
        fn new() -> Self {
            let xen = FakeXen::new();
            let (here, there) = (xen.domain(5).xen, xen.domain(7).xen);
            let grants = here.grant(7, 1).unwrap();
            let reference = grants.references()[0];
            let listener_page = OwnPage::new(grants.map(0, 1).unwrap(), at::LISTENER_PAGE_MAGIC, 0);
            let (seen, _) =
                PeerPage::new(there.map(5, &[reference], None, Box::new(())).unwrap(), at::LISTENER_PAGE_MAGIC)
                    .unwrap();
            let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            let domain = PeerDomain::new(7, &Arc::new(crate::names::Names::new(&here, 5)));
            let (pages, page) = (ReconnectPages::new(event.as_fd()).unwrap(), ReconnectPage::new(&*there, 5).unwrap());
            let mut both = Self { here, domain, listener_page, seen, pages, page };
            both.pages.add(&*both.here, &both.domain, &both.listener_page, both.page.reference);
            both
        }

        fn heard(&mut self) -> Vec<u32> {
            let mut heard = Vec::new();
            self.pages.take_requests(&self.domain, &self.listener_page, |reference| heard.push(reference));
            heard
        }
    }

    #[test]
    fn x11_knock_is_heard_once_and_its_place_is_free_when_it_is_taken_back() {
        let mut both = ListenerFixture::new();
        for _ in 0..3 {
            let requests: Vec<_> =
                (1..=480).map(|it| both.page.request_connection(&both.seen, it).expect("a place")).collect();
            assert!(both.page.request_connection(&both.seen, 481).is_none(), "a 481st place");
            assert_eq!(both.heard(), (1..=480).collect::<Vec<_>>());
            requests.into_iter().for_each(PendingRequest::forget);
            assert_eq!(both.heard(), []);
            both.pages.worked(both.page.reference);
        }
    }

    #[test]
    fn x11_line_that_comes_to_nothing_is_cut() {
        let mut both = ListenerFixture::new();
        for _ in 0..=SPENT_MAX {
            both.page.port.notify();
            both.heard();
        }
        assert!(both.page.request_connection(&both.seen, 1).is_none(), "it is still listened to");
        let mut both = ListenerFixture::new();
        for _ in 0..=SPENT_MAX {
            both.page.port.notify();
            both.heard();
            both.pages.worked(both.page.reference);
        }
        assert!(both.page.request_connection(&both.seen, 1).is_some(), "it led to links all the time, and was cut");
    }

    #[test]
    fn x11_knock_at_the_moment_of_the_cut_is_heard_or_goes_through_xenstore() {
        for round in 1..2000 {
            let mut both = ListenerFixture::new();
            both.pages.of[0].as_mut().unwrap().spent = SPENT_MAX + 1;
            let (page, seen) = (Arc::clone(&both.page), both.seen.clone());
            let caller = thread::spawn(move || page.request_connection(&seen, round).is_some());
            let heard = both.heard();
            assert!(!caller.join().unwrap() || heard == [round], "a request went to nobody");
        }
    }
}
