// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connects services by the names that the broker of dom0 gave: `NAME/SERVICE`. A name resolves to a
//! domain's number and the numbers of the pair; [`XenDomain`] does the rest.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use rustix::event::epoll;
use tombolo_control::Name;
use tombolo_domain::{Deadline, Endpoint, Error, Listener, Rendezvous, Result, aside::ReservedFd};

use crate::{
    XenDomain,
    core::Core,
    hints::OwnHints,
    hypervisor::DomId,
    link::XenEndpoint,
    listener::XenListener,
    os::epoll_set,
    place::{Pair, ServiceAddress},
};

/// Xen domains by the names that the broker (`tombolod`) of dom0 publishes.
///
/// A service is `NAME/SERVICE`. A listener may omit its own `NAME/`. Every domain that the broker's rules allow can
/// connect to it, including domains that appear later. For the others it has no listener page.
#[derive(Clone, Debug)]
pub struct XenNames(XenDomain);

impl XenDomain {
    /// Returns the same domains by name.
    #[must_use]
    pub fn names(&self) -> XenNames {
        XenNames(self.clone())
    }
}

impl XenNames {
    /// Returns whether a broker published anything to this domain.
    ///
    /// # Errors
    /// This is no Xen domain, or XenStore does not answer.
    pub fn are_published(&self) -> Result<bool> {
        let core = self.0.core()?;
        core.names().are_published(&core.store)
    }

    /// Returns the core if a broker published something to this domain. The error states what to do otherwise.
    pub(crate) fn published_core(&self) -> Result<Arc<Core>> {
        let core = self.0.core()?;
        if core.names().are_published(&core.store)? {
            return Ok(core);
        }
        let why = "dom0's tombolod has told this domain no names: start it there, with this domain in the [xen] section of \
                   its configuration; xen:DOMID/SERVICE needs no names";
        let path = Some(format!("{} in XenStore", core.names().folder()));
        Err(Error::Os { call: "looking up a name", path, source: io::Error::new(io::ErrorKind::NotFound, why) })
    }
}

/// Splits a service into its domain, if there is one, and its name.
fn parse(text: &str) -> Result<(Option<Name>, Name)> {
    let why = "it looks like NAME/SERVICE: the domain's name and one of letters, digits, `_` and `-`";
    let bad = |_| Error::BadService { service: text.into(), why };
    let (domain, service) = text.split_once('/').map_or((None, text), |(domain, service)| (Some(domain), service));
    Ok((domain.map(str::parse).transpose().map_err(bad)?, service.parse().map_err(bad)?))
}

impl Rendezvous for XenNames {
    fn scheme(&self) -> &'static str {
        "vm"
    }

    fn listen(&self, service: &str) -> Result<Box<dyn Listener>> {
        let (own, name) = parse(service)?;
        let core = self.published_core()?;
        if own.is_some_and(|own| core.names().own() != Some(own)) {
            let why = "this domain has another name: leave out what is before the `/`";
            return Err(Error::BadService { service: service.into(), why });
        }
        Ok(Box::new(NamedListener::new(core, name, None)?))
    }

    fn connect(&self, service: &str, _deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        let (Some(domain), name) = parse(service)? else {
            let why = "whom to reach is missing: NAME/SERVICE, with the domain's name in front";
            return Err(Error::BadService { service: service.into(), why });
        };
        Ok(Box::new(call_named(&self.published_core()?, &domain, &name)?.0))
    }
}

/// Sends a connect request to a listener by name.
pub(crate) fn call_named(core: &Arc<Core>, domain: &Name, name: &Name) -> Result<(XenEndpoint, Pair)> {
    let service = format!("{domain}/{name}");
    let Some((peer, record)) = core.names().find(domain) else {
        let what =
            format!("vm:{service} (`xl list` has no `{domain}`, or no [[allow]] of dom0's tombolod for it and here)");
        return Err(Error::NotFound(what));
    };
    if !record.view.theirs.iter().any(|pattern| pattern.matches(name)) {
        return Err(Error::Denied(format!("vm:{service}, which no [[allow]] of dom0's tombolod has")));
    }
    let place = ServiceAddress::parse(&format!("{peer}/{name}"))?.of_pair(record.pair);
    let called = XenDomain::call(core, &place).map(|link| (link, record.pair));
    called.map_err(|error| match error {
        Error::NotFound(_) => Error::NotFound(format!("vm:{service}")),
        error => error,
    })
}

/// A listener with a listener page for each domain that may connect.
#[derive(Debug)]
pub(crate) struct NamedListener {
    core: Arc<Core>,
    service: Name,
    /// Listener of each domain; none if it could not be opened, which was reported.
    listener_pages: BTreeMap<DomId, (Pair, Option<XenListener>)>,
    /// Domain that was accepted last: the next one has a turn before it.
    last: DomId,
    ear: Arc<ReservedFd>,
    /// Hints that accompany each listener page, if there are any.
    hints: Option<Arc<OwnHints>>,
    /// Epoll instance of `ear` and all listener pages.
    set: ReservedFd,
}

impl NamedListener {
    pub(crate) fn new(core: Arc<Core>, service: Name, hints: Option<Arc<OwnHints>>) -> Result<Self> {
        let ear = core.names().ear()?;
        let set = epoll_set()?;
        let mut listener = Self { core, service, listener_pages: BTreeMap::new(), last: 0, ear, hints, set };
        listener.join(listener.ear.as_fd())?;
        listener.reconcile_listeners()?;
        Ok(listener)
    }

    fn join(&self, fd: BorrowedFd<'_>) -> Result<()> {
        epoll::add(&self.set, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
            .map_err(|error| Error::os("epoll_ctl", error))
    }

    /// Opens the listener pages that are missing, and closes those of domains that may no longer connect.
    fn reconcile_listeners(&mut self) -> Result<()> {
        let callers = self.core.names().callers(&self.service);
        for (id, (_, listener_page)) in
            self.listener_pages.extract_if(.., |id, (pair, _)| callers.get(id) != Some(pair))
        {
            self.hints.iter().for_each(|hints| hints.withdraw_page(id));
            if let Some(listener_page) = listener_page {
                let _ = epoll::delete(&self.set, listener_page.fd());
            }
        }
        let mut failed = Ok(());
        for (id, pair) in callers {
            if self.listener_pages.contains_key(&id) {
                continue;
            }
            let place = ServiceAddress::parse(&format!("{id}/{}", self.service))?.of_pair(pair);
            let hints = self.hints.as_ref().map_or(Ok(0), |hints| hints.grant_page(&*self.core.xen, id));
            let opened = hints
                .and_then(|hints| XenListener::with_hints(&self.core, &place, hints))
                .and_then(|listener_page| self.join(listener_page.fd()).map(|()| listener_page));
            let listener_page = opened.map_err(|error| failed = Err(error)).ok();
            self.listener_pages.insert(id, (pair, listener_page));
        }
        failed
    }
}

impl NamedListener {
    /// As [`accept`](Listener::accept).
    pub(crate) fn accept_link(&mut self) -> Result<Option<(XenEndpoint, Pair)>> {
        if rustix::io::read(&*self.ear, &mut [0; 8]).is_ok() {
            self.reconcile_listeners()?;
        }
        let (before, after): (Vec<_>, Vec<_>) = self.listener_pages.iter_mut().partition(|(id, _)| **id <= self.last);
        for (id, (pair, listener_page)) in after.into_iter().chain(before) {
            if let Some(listener_page) = listener_page
                && let Some(link) = listener_page.accept_link()?
            {
                self.last = *id;
                return Ok(Some((link, *pair)));
            }
        }
        Ok(None)
    }
}

impl Listener for NamedListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        Ok(self.accept_link()?.map(|(link, _)| Box::new(link) as Box<dyn Endpoint>))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
