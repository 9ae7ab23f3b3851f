// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lines: how a process that was answered at a listener page once knocks there again, without XenStore (X-11).
//!
//! ```text
//! who sends a connect request                               who listens
//! K1 write the connect request                       C1 take the line off the listener page
//! K2 fence                                 C2 fence
//! K3 is the line on the listener page? if not,      C3 look for knocks, the last time
//!    knock through XenStore
//! ```
//!
//! One of the two fences is first: either K3 sees that nobody listens any more, or C3 sees the connect request.

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{Ordering, fence},
    },
};

use rustix::event::{Timespec, epoll};
use tombolo_domain::{Error, Result};
use tombolo_layout::xen as at;

use crate::{
    end::PeerDomain,
    hypervisor::{DomId, Hypervisor, Port},
    os::lock,
    page::{OwnPage, PeerPage},
};

/// Events and knocks that may come to nothing before a line is cut: a few more than all that an honest process may have under
/// way.
const SPENT_MAX: usize = 2 * at::KNOCKS;
/// What an event of a listener's set is about, if not a line: somebody knocked through XenStore.
const STORE: u64 = u64::MAX;

fn word_of(line: usize) -> usize {
    at::AT_LINES + 8 * line
}

fn place_of(knock: usize) -> usize {
    at::AT_KNOCKS + 8 * knock
}

/// The endpoint that sends a connect request.
#[derive(Debug)]
pub(crate) struct ReconnectPage {
    page: OwnPage,
    port: Arc<dyn Port>,
    pub reference: u32,
    places: Mutex<Places>,
}

#[derive(Debug)]
struct Places {
    /// Knocks so far: no two of a place are the same word.
    knocks: u32,
    taken: [bool; at::KNOCKS],
}

/// A connect request that was not answered yet.
#[derive(Debug)]
pub(crate) struct PendingRequest {
    line: Arc<ReconnectPage>,
    place: usize,
}

impl ReconnectPage {
    pub(crate) fn new(xen: &dyn Hypervisor, peer: DomId) -> Result<Arc<Self>> {
        let port = xen.offer_port(peer)?;
        let grants = xen.grant(peer, 1)?;
        let reference = grants.references()[0];
        grants.when_gone(at::AT_STATE, Some(port.number()))?;
        let page = OwnPage::new(grants.map(0, 1)?, at::LINE_MAGIC, port.number());
        let places = Mutex::new(Places { knocks: 0, taken: [false; at::KNOCKS] });
        Ok(Arc::new(Self { page, port, reference, places }))
    }

    /// Knocks with the mailbox `reference`, if whoever has the listener page listens to this line and there is a place.
    pub(crate) fn knock(self: &Arc<Self>, door: &PeerPage, reference: u32) -> Option<PendingRequest> {
        let heard = || (0..at::LINES).any(|line| door.word(word_of(line)).hint() == u64::from(self.reference));
        if !heard() {
            return None;
        }
        let mut places = lock(&self.places);
        let place = places.taken.iter().position(|taken| !taken)?;
        places.taken[place] = true;
        places.knocks = places.knocks.wrapping_add(1);
        self.page.set(place_of(place), u64::from(places.knocks) << 32 | u64::from(reference));
        drop(places);
        let knock = PendingRequest { line: Arc::clone(self), place };
        self.port.notify();
        // ORDER X-11: K2, with C2.
        fence(Ordering::SeqCst);
        if heard() {
            return Some(knock);
        }
        knock.forget();
        None
    }
}

impl PendingRequest {
    /// Takes it back. Not by dropping it: a child made by fork has not the page.
    pub(crate) fn forget(self) {
        self.line.page.set(place_of(self.place), 0);
        lock(&self.line.places).taken[self.place] = false;
    }
}

/// A line at the endpoint that listens.
#[derive(Debug)]
struct ListenedPage {
    page: PeerPage,
    port: Arc<dyn Port>,
    reference: u32,
    /// What stood in each place when it was looked at last.
    seen: Box<[u64; at::KNOCKS]>,
    /// Events and knocks since one led to a link.
    spent: usize,
}

impl ListenedPage {
    /// Hands out the references that were not there before.
    fn take_new(&mut self, mut knocked: impl FnMut(u32)) {
        let mut found = 0;
        for (place, seen) in self.seen.iter_mut().enumerate() {
            let word = self.page.word(place_of(place)).hint();
            if word != std::mem::replace(seen, word) && word as u32 != 0 {
                found += 1;
                knocked(word as u32);
            }
        }
        self.spent += found.max(1);
    }
}

/// The lines that a listener page listens to, and the descriptor that says that there is somebody.
#[derive(Debug)]
pub(crate) struct ReconnectPages {
    set: OwnedFd,
    of: [Option<ListenedPage>; at::LINES],
}

impl ReconnectPages {
    /// None yet; `store` polls readable while somebody knocked through XenStore.
    pub(crate) fn new(store: BorrowedFd<'_>) -> Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| Error::os("epoll_create", error))?;
        epoll::add(&set, store, epoll::EventData::new_u64(STORE), epoll::EventFlags::IN)
            .map_err(|error| Error::os("epoll_ctl", error))?;
        Ok(Self { set, of: [const { None }; at::LINES] })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    /// Listens to the line at `reference` as well, if there is one and a place for it. Who has none knocks through XenStore.
    pub(crate) fn add(&mut self, xen: &dyn Hypervisor, domain: &PeerDomain, door: &OwnPage, reference: u32) {
        let known = |line: &ListenedPage| line.reference == reference;
        if reference == 0 || self.of.iter().flatten().any(known) {
            return;
        }
        let Some(free) = self.of.iter().position(Option::is_none) else { return };
        let heard = || -> Result<ListenedPage> {
            let page = xen.map(domain.id, &[reference], None, Box::new(()))?;
            let (page, port) = PeerPage::new(page, at::LINE_MAGIC)?;
            let port = xen.bind_port(domain.id, port)?;
            // The kernel reports OUT anew with each event (X-8).
            let flags = epoll::EventFlags::OUT | epoll::EventFlags::ET;
            epoll::add(&self.set, port.fd(), epoll::EventData::new_u64(free as u64), flags)
                .map_err(|error| Error::os("epoll_ctl", error))?;
            Ok(ListenedPage { page, port, reference, seen: Box::new([0; at::KNOCKS]), spent: 0 })
        };
        if let Ok(heard) = heard() {
            self.of[free] = Some(heard);
            door.set(word_of(free), reference.into());
        }
    }

    /// Hands out what was knocked since the last time, and cuts lines that are no good any more.
    pub(crate) fn take_requests(&mut self, domain: &PeerDomain, door: &OwnPage, mut knocked: impl FnMut(u32)) {
        let mut events = [MaybeUninit::uninit(); at::LINES + 1];
        let Ok((events, _)) = epoll::wait(&self.set, &mut events, Some(&Timespec::default())) else { return };
        for event in events {
            let line = usize::try_from(event.data.u64()).ok().and_then(|index| self.of.get_mut(index)?.as_mut());
            if let Some(line) = line {
                // Before the look, so that what comes after it is told again.
                line.port.clear();
                line.take_new(&mut knocked);
            }
        }
        for (index, place) in self.of.iter_mut().enumerate() {
            let bad =
                |line: &mut ListenedPage| line.spent > SPENT_MAX || line.page.state() != at::OPEN || domain.is_gone();
            if let Some(mut line) = place.take_if(bad) {
                door.set(word_of(index), 0);
                // ORDER X-11: C2, with K2.
                fence(Ordering::SeqCst);
                line.take_new(&mut knocked);
            }
        }
    }

    /// A connect request of who has the line `reference` led to a link.
    pub(crate) fn worked(&mut self, reference: u32) {
        let line = self.of.iter_mut().flatten().find(|line| line.reference == reference);
        if let Some(line) = line {
            line.spent = 0;
        }
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use std::thread;

    use super::*;
    use crate::FakeXen;

    /// Domain 5's door and lines, with one line of domain 7.
    struct ListenerFixture {
        here: Arc<dyn Hypervisor>,
        domain: PeerDomain,
        door: OwnPage,
        seen: PeerPage,
        lines: ReconnectPages,
        line: Arc<ReconnectPage>,
    }

    impl ListenerFixture {
        fn new() -> Self {
            let xen = FakeXen::new();
            let (here, there) = (xen.domain(5).xen, xen.domain(7).xen);
            let grants = here.grant(7, 1).unwrap();
            let reference = grants.references()[0];
            let door = OwnPage::new(grants.map(0, 1).unwrap(), at::DOOR_MAGIC, 0);
            let (seen, _) =
                PeerPage::new(there.map(5, &[reference], None, Box::new(())).unwrap(), at::DOOR_MAGIC).unwrap();
            let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            let domain = PeerDomain::new(7, &Arc::new(crate::names::Names::new(&here, 5)));
            let (lines, line) = (ReconnectPages::new(event.as_fd()).unwrap(), ReconnectPage::new(&*there, 5).unwrap());
            let mut both = Self { here, domain, door, seen, lines, line };
            both.lines.add(&*both.here, &both.domain, &both.door, both.line.reference);
            both
        }

        fn heard(&mut self) -> Vec<u32> {
            let mut heard = Vec::new();
            self.lines.take_requests(&self.domain, &self.door, |reference| heard.push(reference));
            heard
        }
    }

    #[test]
    fn x11_knock_is_heard_once_and_its_place_is_free_when_it_is_taken_back() {
        let mut both = ListenerFixture::new();
        for _ in 0..3 {
            let knocks: Vec<_> = (1..=480).map(|it| both.line.knock(&both.seen, it).expect("a place")).collect();
            assert!(both.line.knock(&both.seen, 481).is_none(), "a 481st place");
            assert_eq!(both.heard(), (1..=480).collect::<Vec<_>>());
            knocks.into_iter().for_each(PendingRequest::forget);
            assert_eq!(both.heard(), []);
            both.lines.worked(both.line.reference);
        }
    }

    #[test]
    fn x11_line_that_comes_to_nothing_is_cut() {
        let mut both = ListenerFixture::new();
        for _ in 0..=SPENT_MAX {
            both.line.port.notify();
            both.heard();
        }
        assert!(both.line.knock(&both.seen, 1).is_none(), "it is still listened to");
        let mut both = ListenerFixture::new();
        for _ in 0..=SPENT_MAX {
            both.line.port.notify();
            both.heard();
            both.lines.worked(both.line.reference);
        }
        assert!(both.line.knock(&both.seen, 1).is_some(), "it led to links all the time, and was cut");
    }

    #[test]
    fn x11_knock_at_the_moment_of_the_cut_is_heard_or_goes_through_xenstore() {
        for round in 1..2000 {
            let mut both = ListenerFixture::new();
            both.lines.of[0].as_mut().unwrap().spent = SPENT_MAX + 1;
            let (line, seen) = (Arc::clone(&both.line), both.seen.clone());
            let caller = thread::spawn(move || line.knock(&seen, round).is_some());
            let heard = both.heard();
            assert!(!caller.join().unwrap() || heard == [round], "a knock went to nobody");
        }
    }
}
