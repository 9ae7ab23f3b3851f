// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements one endpoint of a connection.

use std::{
    os::fd::BorrowedFd,
    sync::{Arc, atomic::Ordering},
};

use tombolo_domain::{
    Doorbell, Endpoint, Error, Liveness, Memory, Offer, Peer, Received, Result, SingleDoorbell, SingleNotifier,
};
use tombolo_layout::{
    limits::CONTROL_MESSAGE_MAX,
    xen::{AT_JOINED, AT_RECEIVED, AT_SENT, MAILBOX_MAGIC, MESSAGES, MessageHead, PAGE},
};
use tombolo_mem::OwnSegment;

use crate::{
    core::{Core, ListenerPage},
    end::End,
    memory::{self, Seen, Token},
    os::lock,
    page::{PeerMessage, PeerPage, malformed},
    place::{Pair, ServiceAddress},
    reconnect_page,
};

/// Divisor of the number of pages that may still be granted: the share of a segment that nobody sized.
const SHARE: usize = 8;

/// Path by which this endpoint requested its connection.
#[derive(Debug)]
pub(crate) enum RequestPath {
    /// A node in XenStore.
    Node(String),
    /// A reconnect page.
    ReconnectPage(reconnect_page::PendingRequest),
}

/// One endpoint of a connection.
#[derive(Debug)]
pub(crate) struct XenEndpoint {
    core: Arc<Core>,
    end: Arc<End>,
    /// Connect request, until it is answered.
    request: Option<RequestPath>,
    sent: u64,
    received: u64,
    seen: Seen,
    /// Whether there may be a message although no event reported it.
    again: bool,
}

impl XenEndpoint {
    pub(crate) fn new(core: &Arc<Core>, end: Arc<End>) -> Self {
        core.add_end(&end);
        end.domain.seen.store(true, Ordering::Release);
        Self { core: Arc::clone(core), end, request: None, sent: 0, received: 0, seen: Seen::default(), again: true }
    }

    /// Requests a connection at `listener_page`, where this endpoint is not known yet.
    pub(crate) fn request_connection(&mut self, listener_page: &ListenerPage, place: &ServiceAddress) -> Result<()> {
        let end = &self.end;
        let by_line = listener_page
            .reconnect_page
            .as_ref()
            .and_then(|reconnect_page| reconnect_page.request_connection(&listener_page.page, end.reference));
        let node = match by_line {
            Some(request) => {
                self.request = Some(RequestPath::ReconnectPage(request));
                return Ok(());
            }
            None => format!("{}/{}@{}", self.core.own_folder(place.peer)?, place.service, end.reference),
        };
        self.request = Some(RequestPath::Node(node.clone()));
        lock(&self.core.store).write(&node, &self.core.token)
    }

    /// Maps the peer's mailbox once the listener page has its reference.
    fn join(&mut self) -> Result<()> {
        if self.end.peer.get().is_some() {
            return Ok(());
        }
        let Some(reference) = self.end.answer() else { return Ok(()) };
        let page =
            self.core.xen.map(self.end.domain.id, &[reference], None, Box::new(())).map_err(|error| match error {
                Error::Revoked => {
                    self.end.note_vanished();
                    Error::PeerGone
                }
                error => error,
            })?;
        let (page, _port) = PeerPage::new(page, MAILBOX_MAGIC)?;
        let _ = self.end.peer.set(page);
        let _ = self.end.peer_reference.set(reference);
        memory::entrust_sent(&self.core, &self.end);
        // A listener that sees that this endpoint joined no longer sees its connect request, and so does not check it
        // twice.
        self.forget_request();
        self.end.own.set(AT_JOINED, 1);
        *lock(&self.end.listener_page) = None;
        Ok(())
    }

    /// Makes the endpoint leave once dom0 no longer publishes the peer.
    pub(crate) fn leave_once_withdrawn(&self, pair: Pair) {
        self.end.leave_once_withdrawn(pair);
    }

    /// Continues to connect, for a caller that may not wait for XenStore later. Returns whether the endpoint is
    /// connected.
    ///
    /// # Errors
    /// The peer is gone.
    pub(crate) fn settle_request(&mut self) -> Result<bool> {
        self.end.control.drain();
        self.again = true;
        self.end.wake_if_over();
        self.join()?;
        match self.end.peer.get() {
            Some(_) => Ok(true),
            None if self.end.is_over() => Err(Error::PeerGone),
            None => Ok(false),
        }
    }

    fn forget_request(&mut self) {
        match self.request.take() {
            Some(RequestPath::ReconnectPage(request)) => request.forget(),
            Some(RequestPath::Node(path)) => {
                // A node that cannot be removed disappears with the domain.
                let _ = lock(&self.core.store).remove(&path);
            }
            None => {}
        }
    }

    /// Returns the number of messages that wait.
    fn waiting(&self, peer: &PeerPage) -> Result<u64> {
        peer.word(AT_SENT).check(|sent| match sent.wrapping_sub(self.received) {
            waiting if waiting <= MESSAGES => Ok(waiting),
            _ => Err(malformed("X-6", format!("{sent} messages sent, where {} were received", self.received))),
        })
    }

    /// Takes the next message, if there is one.
    fn take_message(&mut self) -> Result<Option<PeerMessage>> {
        let Some(peer) = self.end.peer.get().cloned() else { return Ok(None) };
        if self.waiting(&peer)? == 0 {
            return Ok(None);
        }
        let message = peer.message(self.received);
        self.received = self.received.wrapping_add(1);
        self.end.own.set(AT_RECEIVED, self.received);
        // Several messages may share one event, and the event of this message may still be to come. So earlier events
        // are cleared, and then the page tells whether there are more messages.
        self.end.control.drain();
        self.end.wake_if_over();
        if self.waiting(&peer)? > 0 {
            self.again = true;
            self.end.control.put_back();
        }
        message.map(Some)
    }
}

impl Memory for XenEndpoint {
    fn allocate(&mut self, len: usize) -> Result<(OwnSegment, Offer)> {
        let (segment, token) = memory::allocate(&self.core, &self.end, len)?;
        Ok((segment, Offer::new(token)))
    }

    fn retire(&mut self, segment: Option<OwnSegment>, offer: Offer) {
        drop((segment, offer));
        self.core.sweep();
    }

    fn quarantined(&self) -> u64 {
        self.core.sweep();
        self.end.quarantined()
    }

    fn affordable(&self, wanted: usize) -> usize {
        // This is at most one part in `SHARE` of the pages that may still be granted.
        wanted.min(self.core.xen.room() / SHARE * PAGE)
    }

    fn outlives_owner(&self) -> bool {
        false
    }
}

impl Endpoint for XenEndpoint {
    fn send(&mut self, message: &[u8], offer: Option<&Offer>) -> Result<()> {
        let len = match u16::try_from(message.len()) {
            Ok(len) if message.len() <= CONTROL_MESSAGE_MAX => len,
            _ => return Err(Error::Limit { what: "length of a control message", remedy: "send at most 256 bytes" }),
        };
        let token: Option<&Token> = offer.map(|offer| offer.token().expect("an offer made by this backend"));
        assert!(token.is_none_or(|token| token.may_go(&self.end)), "an offer of another link, or one sent before");
        if self.end.is_over() {
            return Err(Error::PeerGone);
        }
        let received = self.end.peer.get().map_or(Ok(0), |peer| {
            peer.word(AT_RECEIVED).check(|received| match self.sent.wrapping_sub(received) {
                under_way if under_way <= MESSAGES => Ok(received),
                _ => Err(malformed("X-6", format!("{received} messages received, where {} were sent", self.sent))),
            })
        })?;
        if self.sent.wrapping_sub(received) == MESSAGES {
            return Err(Error::Limit {
                what: "the queue of control messages",
                remedy: "the peer does not read them: close the link or wait for it",
            });
        }
        let head = MessageHead { len, segment: token.map(|token| token.name) };
        self.end.own.put_message(self.sent, head, token.map_or(&[], Token::references), message);
        self.sent = self.sent.wrapping_add(1);
        if let Some(token) = token {
            token.mark_sent();
        }
        self.end.notify();
        self.end.complete()
    }

    fn recv(&mut self, max_segment: u64) -> Result<Option<Received>> {
        let notified = self.end.control.drain();
        // The end is checked before the messages, so that messages sent before the end are delivered before it.
        let over = self.end.is_over();
        if !(notified || self.again || over) {
            return Ok(None);
        }
        self.again = false;
        self.end.wake_if_over();
        self.join()?;
        let Some(PeerMessage { segment, references, message }) = self.take_message()? else {
            return if over { Err(Error::PeerGone) } else { Ok(None) };
        };
        let segment = match segment {
            Some(name) => Some(self.seen.open(&self.core, &self.end, name, references, max_segment)?),
            None => None,
        };
        Ok(Some(Received { message, segment }))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.end.control.fd()
    }

    fn doorbell(&self) -> Option<Arc<dyn Doorbell>> {
        // An endpoint that has never sent anything may have no wakers, if there are no descriptors for them.
        let there = self.received > 0 && self.end.complete().is_ok();
        there.then(|| Arc::clone(&self.end) as Arc<dyn Doorbell>)
    }

    /// Events are for all connections of the session.
    fn shared_doorbells(&self) -> Result<Option<(SingleDoorbell, SingleNotifier)>> {
        let notifier = SingleNotifier::of_session(self.doorbell().ok_or(Error::PeerGone)?);
        Ok(Some((self.end.shared_doorbell()?, notifier)))
    }

    fn liveness(&self) -> Liveness {
        self.end.liveness()
    }

    fn peer(&self) -> Peer {
        Peer { domain: self.end.domain.id.to_string(), ..Peer::default() }
    }

    fn same_kernel(&self) -> bool {
        false
    }

    /// A PV domain's kernel removes foreign mappings from a child.
    fn is_inherited(&self) -> bool {
        false
    }
}

impl Drop for XenEndpoint {
    fn drop(&mut self) {
        if self.end.is_ours() {
            // Only the peer's page tells what the peer maps of this endpoint's memory.
            let _ = self.join();
            self.forget_request();
            self.end.close();
        }
    }
}
