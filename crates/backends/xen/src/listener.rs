// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements a listener for a peer, with one page for all answers and one node in XenStore.

use std::{os::fd::BorrowedFd, sync::Arc};

use tombolo_domain::{Endpoint, Error, Listener, Result, aside::ReservedFd};
use tombolo_layout::xen as at;

use crate::{
    core::{ConnectRequests, Core},
    end::{End, PeerDomain},
    link::XenEndpoint,
    os::lock,
    page::{OwnPage, PeerPage, mark_of},
    place::{Pair, ServiceAddress},
    reconnect_page::ReconnectPages,
};

/// Largest number of fruitless connect requests that one call looks at. A peer that sends such requests faster than
/// they are looked at must not keep `accept` from returning.
const TRIES: usize = 16;

/// A listener with an open listener page.
#[derive(Debug)]
pub(crate) struct XenListener {
    core: Arc<Core>,
    domain: Arc<PeerDomain>,
    listener_page: OwnPage,
    requests: Arc<ConnectRequests>,
    reconnect_pages: ReconnectPages,
    /// Callers that the listener page answers, until they have seen the answer.
    answers: Vec<Option<Arc<End>>>,
    node: String,
    pair: Pair,
    /// Claim on the name.
    _claim: ReservedFd,
    /// Process that listens: a child made by fork does not close its parent's listener page.
    pid: u32,
}

impl XenListener {
    pub(crate) fn new(core: &Arc<Core>, place: &ServiceAddress) -> Result<Self> {
        Self::with_hints(core, place, 0)
    }

    /// Makes a listener with the reference of its hints page.
    pub(crate) fn with_hints(core: &Arc<Core>, place: &ServiceAddress, hints: u32) -> Result<Self> {
        let claim = core.xen.claim(&place.to_string())?.ok_or_else(|| Error::InUse(place.shown()))?;
        let grants = core.xen.grant(place.peer, 1)?;
        let reference = grants.references()[0];
        grants.when_gone(at::AT_STATE, None)?;
        let segment = grants.map(0, 1)?;
        let listener_page = OwnPage::new(segment, at::LISTENER_PAGE_MAGIC, 0);
        listener_page.set(at::AT_FOR, at::stats_head(place.peer, false) | u64::from(reference) << 32);
        listener_page.set(at::AT_PAIR, place.pair.shows);
        listener_page.set(at::AT_HINTS, hints.into());
        let domain = core.peer(place.peer)?;
        let requests = ConnectRequests::new(place.peer, &place.service)?;
        let reconnect_pages = ReconnectPages::new(requests.fd())?;
        core.add_listener(&requests);
        // This comes after connect requests are received, because the node of a dead listener may have led a caller to
        // this very page.
        listener_page.set(at::AT_JOINED, mark_of(&place.service));
        let node = format!("{}/{}", core.own_folder(place.peer)?, place.service);
        lock(&core.store).write(&node, &reference.to_string())?;
        let (answers, pid) = (vec![None; at::ANSWERS], std::process::id());
        Ok(Self {
            core: Arc::clone(core),
            domain,
            listener_page,
            requests,
            reconnect_pages,
            answers,
            node,
            pair: place.pair,
            _claim: claim,
            pid,
        })
    }

    /// Forgets callers that have seen their answer, or never will.
    fn sweep(&mut self) {
        for (index, answer) in self.answers.iter_mut().enumerate() {
            let heard = |end: &Arc<End>| {
                end.is_over() || end.peer.get().is_some_and(|peer| peer.word(at::AT_JOINED).hint() != 0)
            };
            if answer.as_ref().is_some_and(heard) {
                *answer = None;
                self.listener_page.set(at::AT_ANSWERS + 8 * index, 0);
            }
        }
    }

    /// Returns whether the listener page answers `reference` already.
    fn answers(&self, reference: u32) -> bool {
        let peers = self.answers.iter().flatten().filter_map(|end| end.peer_reference.get());
        peers.into_iter().any(|known| *known == reference)
    }

    /// Answers the caller with a mailbox at `reference`, if it requested a connection here and was not answered yet.
    fn answer(&mut self, index: usize, reference: u32) -> Result<Option<XenEndpoint>> {
        let page = self.core.xen.map(self.domain.id, &[reference], None, Box::new(()))?;
        let (page, port) = PeerPage::new(page, at::MAILBOX_MAGIC)?;
        let (wanted, joined) = (page.word(at::AT_WANTED).hint(), page.word(at::AT_JOINED).hint());
        // The caller tells which pair of domains it means.
        let shown = page.word(at::AT_PAIR).hint();
        if wanted != mark_of(&self.requests.service) || joined != 0 || shown != self.pair.expects {
            return Ok(None);
        }
        let reconnect_page = page.word(at::AT_RECONNECT_PAGE).hint() as u32;
        let port = self.core.xen.bind_port(self.domain.id, port)?;
        let end = End::new(&*self.core.xen, &self.domain, port, &self.requests.service)?;
        let _ = end.peer.set(page);
        let _ = end.peer_reference.set(reference);
        // This comes before the answer: a caller that sees the answer knows whether it can use its reconnect page the
        // next time.
        self.reconnect_pages.add(&*self.core.xen, &self.domain, &self.listener_page, reconnect_page);
        self.reconnect_pages.worked(reconnect_page);
        self.listener_page.set(at::AT_ANSWERS + 8 * index, u64::from(reference) << 32 | u64::from(end.reference));
        end.notify();
        self.answers[index] = Some(Arc::clone(&end));
        Ok(Some(XenEndpoint::new(&self.core, end)))
    }
}

impl Listener for XenListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        Ok(self.accept_link()?.map(|link| Box::new(link) as Box<dyn Endpoint>))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.reconnect_pages.fd()
    }
}

impl XenListener {
    /// As [`accept`](Listener::accept).
    pub(crate) fn accept_link(&mut self) -> Result<Option<XenEndpoint>> {
        let accepted = self.accept_first();
        self.requests.update_readiness();
        accepted
    }

    /// Accepts the first request that leads to a connection.
    fn accept_first(&mut self) -> Result<Option<XenEndpoint>> {
        self.reconnect_pages
            .take_requests(&self.domain, &self.listener_page, |reference| self.requests.push(reference));
        for _ in 0..TRIES {
            let Some(reference) = self.requests.first() else { return Ok(None) };
            // XenStore reports a removed node like a new one. Most callers that were answered are known here; the pages
            // of the others say so. While an answer is held, so is the caller's page, and no other caller can have its
            // reference.
            let answered = self.answers(reference);
            self.sweep();
            if answered {
                self.requests.pop();
                continue;
            }
            let free = self.answers.iter().position(Option::is_none).ok_or(Error::Limit {
                what: "the clients that may be answered at a time (480)",
                remedy: "they do not hear their answers: wait until they do or go",
            })?;
            match self.answer(free, reference) {
                Ok(Some(link)) => {
                    self.requests.pop();
                    return Ok(Some(link));
                }
                Ok(None) => self.requests.pop(),
                Err(error @ Error::Limit { .. }) => return Err(error),
                // The caller is gone or violates the protocol, which concerns nobody else.
                Err(_) => self.requests.pop(),
            }
        }
        // The descriptor reports that there are more.
        Ok(None)
    }
}

impl Drop for XenListener {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        self.listener_page.close();
        // A node that cannot be removed leads to a closed listener page.
        let _ = lock(&self.core.store).remove(&self.node);
    }
}
