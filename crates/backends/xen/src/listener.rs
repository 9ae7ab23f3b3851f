// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who listens for a peer: one page to which all answers go, one node in XenStore.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use tombolo_domain::{Endpoint, Error, Listener, Result};
use tombolo_layout::xen as at;

use crate::{
    core::{ConnectRequests, Core},
    end::{End, PeerDomain},
    line::ReconnectPages,
    link::XenEndpoint,
    os::lock,
    page::{OwnPage, PeerPage, mark_of},
    place::{Pair, ServiceAddress},
};

/// Knocks that one call looks at, if they come to nothing: who sends a connect request for nothing, and faster than
/// they are looked at, must not keep `accept` from returning.
const TRIES: usize = 16;

/// A listener page that stands open.
#[derive(Debug)]
pub(crate) struct XenListener {
    core: Arc<Core>,
    domain: Arc<PeerDomain>,
    door: OwnPage,
    knocks: Arc<ConnectRequests>,
    lines: ReconnectPages,
    /// Whom the listener page answers, until they have heard it.
    answers: Vec<Option<Arc<End>>>,
    node: String,
    pair: Pair,
    /// Keeps the name.
    _claim: OwnedFd,
    /// A child made by fork does not take the listener page away from its parent.
    pid: u32,
}

impl XenListener {
    pub(crate) fn new(core: &Arc<Core>, place: &ServiceAddress) -> Result<Self> {
        let claim = core.xen.claim(&place.to_string())?.ok_or_else(|| Error::InUse(place.shown()))?;
        let grants = core.xen.grant(place.peer, 1)?;
        let reference = grants.references()[0];
        grants.when_gone(at::AT_STATE, None)?;
        let segment = grants.map(0, 1)?;
        let door = OwnPage::new(segment, at::DOOR_MAGIC, 0);
        door.set(at::AT_FOR, at::board_head(place.peer, false) | u64::from(reference) << 32);
        door.set(at::AT_PAIR, place.pair.shows);
        let domain = core.peer(place.peer)?;
        let knocks = ConnectRequests::new(place.peer, &place.service)?;
        let lines = ReconnectPages::new(knocks.fd())?;
        core.add_listener(&knocks);
        // Not before knocks are heard: the node that a dead listener left may have led somebody to this very page.
        door.set(at::AT_JOINED, mark_of(&place.service));
        let node = format!("{}/{}", core.own_folder(place.peer)?, place.service);
        lock(&core.store).write(&node, &reference.to_string())?;
        let (answers, pid) = (vec![None; at::ANSWERS], std::process::id());
        Ok(Self {
            core: Arc::clone(core),
            domain,
            door,
            knocks,
            lines,
            answers,
            node,
            pair: place.pair,
            _claim: claim,
            pid,
        })
    }

    /// Forgets those who have heard their answer, or never will.
    fn sweep(&mut self) {
        for (index, answer) in self.answers.iter_mut().enumerate() {
            let heard = |end: &Arc<End>| {
                end.is_over() || end.peer.get().is_some_and(|peer| peer.word(at::AT_JOINED).hint() != 0)
            };
            if answer.as_ref().is_some_and(heard) {
                *answer = None;
                self.door.set(at::AT_ANSWERS + 8 * index, 0);
            }
        }
    }

    /// Whether the listener page answers `reference` already.
    fn answers(&self, reference: u32) -> bool {
        let peers = self.answers.iter().flatten().filter_map(|end| end.peer_reference.get());
        peers.into_iter().any(|known| *known == reference)
    }

    /// Answers whoever knocked with a mailbox at `reference`, if it knocked here and was not answered yet.
    fn answer(&mut self, index: usize, reference: u32) -> Result<Option<XenEndpoint>> {
        let page = self.core.xen.map(self.domain.id, &[reference], None, Box::new(()))?;
        let (page, port) = PeerPage::new(page, at::MAILBOX_MAGIC)?;
        let (wanted, joined) = (page.word(at::AT_WANTED).hint(), page.word(at::AT_JOINED).hint());
        // The client says which pair of domains it means.
        let shown = page.word(at::AT_PAIR).hint();
        if wanted != mark_of(&self.knocks.service) || joined != 0 || shown != self.pair.expects {
            return Ok(None);
        }
        let line = page.word(at::AT_LINE).hint() as u32;
        let port = self.core.xen.bind_port(self.domain.id, port)?;
        let end = End::new(&*self.core.xen, &self.domain, port, &self.knocks.service)?;
        let _ = end.peer.set(page);
        let _ = end.peer_reference.set(reference);
        // Before the answer: who hears that knows whether it can knock by its line the next time.
        self.lines.add(&*self.core.xen, &self.domain, &self.door, line);
        self.lines.worked(line);
        self.door.set(at::AT_ANSWERS + 8 * index, u64::from(reference) << 32 | u64::from(end.reference));
        end.notify();
        self.answers[index] = Some(Arc::clone(&end));
        Ok(Some(XenEndpoint::new(&self.core, end)))
    }
}

impl Listener for XenListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        let accepted = self.accept_first();
        self.knocks.update_readiness();
        accepted
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.lines.fd()
    }
}

impl XenListener {
    /// The first of those who knocked who gets a link.
    fn accept_first(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        self.lines.take_requests(&self.domain, &self.door, |reference| self.knocks.push(reference));
        for _ in 0..TRIES {
            let Some(reference) = self.knocks.first() else { return Ok(None) };
            // A node that goes is told like one that comes: of most who were answered it is known, the others' pages say so.
            // While an answer is held, so is the caller's page, and no other caller can have its reference.
            let answered = self.answers(reference);
            self.sweep();
            if answered {
                self.knocks.pop();
                continue;
            }
            let free = self.answers.iter().position(Option::is_none).ok_or(Error::Limit {
                what: "the clients that may be answered at a time (480)",
                remedy: "they do not hear their answers: wait until they do or go",
            })?;
            match self.answer(free, reference) {
                Ok(Some(link)) => {
                    self.knocks.pop();
                    return Ok(Some(Box::new(link)));
                }
                Ok(None) => self.knocks.pop(),
                Err(error @ Error::Limit { .. }) => return Err(error),
                // It went, or it lies: nobody else has to know.
                Err(_) => self.knocks.pop(),
            }
        }
        // The descriptor says that there are more.
        Ok(None)
    }
}

impl Drop for XenListener {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        self.door.close();
        // What cannot be removed leads to a listener page that is closed.
        let _ = lock(&self.core.store).remove(&self.node);
    }
}
