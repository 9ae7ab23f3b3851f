// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 2. Uses: os, layout, mem, domain, control.
//!
//! Implements the backend between Xen domains. Memory is granted page by page (gntalloc, gntdev), a doorbell is an
//! event channel, and two endpoints find each other in XenStore. The backend uses the kernel's own drivers; it needs no
//! library of Xen and no kernel module of Tombolo. The normative text is `spec/4-domain-xen.md`.
//!
//! Xen itself is accessed through a small private trait. With the feature `testing` a simulated Xen in one process
//! implements it, so that everything but `sys` runs in tests without a hypervisor.
#![deny(unsafe_code)]

mod common;
mod core;
mod end;
#[cfg(feature = "testing")]
mod fake;
mod finder;
mod grant_reaper;
mod hints;
mod host;
#[cfg(feature = "testing")]
pub mod hostile;
mod hypervisor;
mod link;
mod listener;
mod memory;
mod named;
mod names;
mod os;
mod page;
mod place;
mod places;
mod quarantine;
mod reaper_client;
mod reconnect_page;
mod store;
mod sys;
mod waker;
mod wire;

pub use common::{XenPieces, XenPort};
#[cfg(feature = "testing")]
pub use fake::FakeXen;
pub use finder::XenNeighbours;
pub use grant_reaper::GrantReaper;
pub use host::{Views, XenHost};
pub use named::XenNames;
pub use names::{State, View};
pub use reaper_client::{OrphanedGrants, ReaperListing};

use std::{
    fmt,
    sync::{Arc, Mutex},
};

use tombolo_domain::{Deadline, Endpoint, Error, Listener, Rendezvous, Result};
use tombolo_layout::xen as at;

use crate::{
    core::{Core, ListenerPage, folder},
    end::End,
    hypervisor::Hypervisor,
    link::XenEndpoint,
    listener::XenListener,
    os::lock,
    page::{PeerPage, mark_of},
    place::ServiceAddress,
    reconnect_page::ReconnectPage,
    store::Store,
};

/// Connects Xen domains through XenStore.
///
/// A service is `DOMID/NAME`: the number of the *other* domain, which alone can reach the listener, and a name of
/// letters, digits, `_` and `-`. Needs `/dev/xen/gntalloc`, `gntdev`, `evtchn` and `xenbus`, which root may open; the
/// first call opens them. Clones share all of this.
#[derive(Clone)]
pub struct XenDomain {
    xen: Arc<dyn Hypervisor>,
    core: Arc<Mutex<Option<Arc<Core>>>>,
}

impl XenDomain {
    /// Makes a value for this domain. Each call returns an error if this is no Xen domain.
    #[must_use]
    pub fn new() -> Self {
        Self::on(Arc::new(sys::Xen))
    }

    pub(crate) fn on(xen: Arc<dyn Hypervisor>) -> Self {
        Self { xen, core: Arc::default() }
    }

    /// Makes a hostile process of this domain, aimed at `peer`.
    ///
    /// # Errors
    /// As for [`listen`](Rendezvous::listen).
    #[cfg(feature = "testing")]
    pub fn hostile(&self, peer: u16) -> Result<hostile::Hostile> {
        hostile::Hostile::new(Arc::clone(&self.xen), peer)
    }

    /// Parses `service`, which must be in another domain.
    fn place(&self, service: &str) -> Result<(ServiceAddress, Arc<Core>)> {
        let place = ServiceAddress::parse(service)?;
        let core = self.core()?;
        if place.peer == core.own {
            let why = "that is this domain's own number: give the other's, or use local: within one";
            return Err(Error::BadService { service: service.into(), why });
        }
        Ok((place, core))
    }

    /// Returns parts of Xen for a wire format that is not this backend's, between this domain and the domain `peer`.
    ///
    /// # Errors
    /// This is no Xen domain.
    pub fn pieces(&self, peer: u16) -> Result<XenPieces> {
        Ok(XenPieces::new(self.core()?, peer))
    }

    /// Returns the listeners in this domain's nodes: the domain for which each is, its name, and the reference of its
    /// listener page.
    ///
    /// # Errors
    /// This is no Xen domain, or XenStore's error.
    pub fn listeners(&self) -> Result<Vec<(u16, String, u32)>> {
        let mut store = Store::new(self.xen.store()?);
        let own = store.own_id()?;
        let mut found = Vec::new();
        for peer in
            store.list(&format!("/local/domain/{own}/data/tombolo"))?.iter().filter_map(|node| node.parse().ok())
        {
            let path = folder(own, peer);
            for name in store.list(&path)?.into_iter().filter(|name| !name.contains('@')) {
                let reference = store.read(&format!("{path}/{name}"))?.and_then(|text| text.parse().ok());
                found.extend(reference.map(|reference| (peer, name, reference)));
            }
        }
        Ok(found)
    }

    fn core(&self) -> Result<Arc<Core>> {
        let mut core = lock(&self.core);
        match &*core {
            Some(core) if core.is_ours() => Ok(Arc::clone(core)),
            _ => {
                // The parent's core is leaked: its thread and its mappings do not exist in this process.
                std::mem::forget(core.take());
                Ok(Arc::clone(core.insert(Core::new(Arc::clone(&self.xen))?)))
            }
        }
    }
}

impl Default for XenDomain {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for XenDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "XenDomain({:?})", self.xen)
    }
}

impl Rendezvous for XenDomain {
    fn scheme(&self) -> &'static str {
        "xen"
    }

    fn listen(&self, service: &str) -> Result<Box<dyn Listener>> {
        let (place, core) = self.place(service)?;
        Ok(Box::new(XenListener::new(&core, &place)?))
    }

    fn connect(&self, service: &str, _deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        let (place, core) = self.place(service)?;
        Ok(Box::new(Self::call(&core, &place)?))
    }
}

impl XenDomain {
    /// Sends a connect request to the listener of a place.
    fn call(core: &Arc<Core>, place: &ServiceAddress) -> Result<XenEndpoint> {
        let domain = core.peer(place.peer)?;
        let listener_page = open_listener_page(core, place)?;
        let end = End::new(&*core.xen, &domain, core.xen.offer_port(place.peer)?, &place.service)?;
        end.own.set(at::AT_WANTED, mark_of(&place.service));
        end.own.set(
            at::AT_RECONNECT_PAGE,
            listener_page.reconnect_page.as_ref().map_or(0, |reconnect_page| reconnect_page.reference.into()),
        );
        end.own.set(at::AT_PAIR, place.pair.shows);
        *lock(&end.listener_page) = Some(listener_page.page.clone());
        let mut link = XenEndpoint::new(core, end);
        link.request_connection(&listener_page, place)?;
        Ok(link)
    }
}

/// Returns the listener page of a live listener.
fn open_listener_page(core: &Core, place: &ServiceAddress) -> Result<ListenerPage> {
    let nobody = || Error::NotFound(place.shown());
    let node = format!("{}/{}", folder(place.peer, core.own), place.service);
    // The domain with that number must be the one that was meant.
    let meant = |page: &PeerPage| page.word(at::AT_PAIR).hint() == place.pair.expects;
    if let Some(listener_page) = core.known_listener_page(&node) {
        return if meant(&listener_page.page) { Ok(listener_page) } else { Err(nobody()) };
    }
    let page = map_listener_page(core, place)?;
    // If there is no room for a reconnect page, each connect request goes through XenStore.
    let reconnect_page = ReconnectPage::new(&*core.xen, place.peer).ok();
    let listener_page = ListenerPage { page, domain: place.peer, reconnect_page };
    core.remember_listener_page(&node, &listener_page);
    Ok(listener_page)
}

/// Maps and checks the page of a live listener.
fn map_listener_page(core: &Core, place: &ServiceAddress) -> Result<PeerPage> {
    let nobody = || Error::NotFound(place.shown());
    let node = format!("{}/{}", folder(place.peer, core.own), place.service);
    let meant = |page: &PeerPage| page.word(at::AT_PAIR).hint() == place.pair.expects;
    let reference = lock(&core.store).read(&node)?.and_then(|text| text.parse().ok()).ok_or_else(nobody)?;
    let page = core.xen.map(place.peer, &[reference], None, Box::new(())).map_err(|error| match error {
        // The listener died, and could not clean up.
        Error::Revoked => nobody(),
        error => error,
    })?;
    let (page, _) = PeerPage::new(page, at::LISTENER_PAGE_MAGIC).map_err(|_| nobody())?;
    if page.state() != at::OPEN || page.word(at::AT_JOINED).hint() != mark_of(&place.service) || !meant(&page) {
        return Err(nobody());
    }
    Ok(page)
}
