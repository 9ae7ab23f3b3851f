// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One endpoint of a link as the hypervisor sees it: what came in, and the descriptors that report it.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::event::EventfdFlags;

use super::ids::{EndId, Process, Reference};
use tombolo_domain::{Error, Liveness, Result, Slot};

/// A descriptor that polls readable while it is raised. Only the hypervisor changes it.
#[derive(Clone, Debug)]
pub(super) struct Signal(Arc<OwnedFd>);

impl Signal {
    pub(super) fn new() -> Result<Self> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        fd.map(|fd| Self(Arc::new(fd))).map_err(|error| Error::os("eventfd", error))
    }

    pub(super) fn set(&self, raised: bool) {
        // Both can fail only because the descriptor has that level already.
        let _ = if raised {
            rustix::io::write(&self.0, &1u64.to_ne_bytes())
        } else {
            rustix::io::read(&self.0, &mut [0; 8])
        };
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A control message under way.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) message: Vec<u8>,
    pub(super) reference: Option<Reference>,
}

/// Event that the hypervisor delivers to an endpoint.
#[derive(Debug)]
pub(super) enum Event {
    Message(Sent),
    /// A notification without a slot: there is one doorbell.
    Notify,
    /// Nothing more will come, for this reason.
    Over(Liveness),
}

/// Descriptors of an endpoint.
#[derive(Clone, Debug)]
pub(super) struct Signals {
    pub(super) mail: Signal,
    pub(super) doorbells: [Signal; 2],
}

impl Signals {
    pub(super) fn new() -> Result<Self> {
        Ok(Self { mail: Signal::new()?, doorbells: [Signal::new()?, Signal::new()?] })
    }

    pub(super) fn raise_all(&self) {
        self.mail.set(true);
        self.doorbells.iter().for_each(|doorbell| doorbell.set(true));
    }
}

/// One endpoint of a link.
#[derive(Debug)]
pub(super) struct End {
    pub(super) process: Process,
    pub(super) peer: EndId,
    pub(super) peer_domain: Arc<str>,
    pub(super) signals: Signals,
    /// Reason why nothing more will come, once that is so.
    pub(super) over: Option<Liveness>,
    inbox: VecDeque<Sent>,
    notified: [bool; 2],
    /// Events that are held while one of the two domains is paused.
    transit: VecDeque<Event>,
}

impl End {
    pub(super) fn new(process: Process, peer: EndId, peer_domain: Arc<str>, signals: Signals) -> Self {
        let (inbox, transit) = (VecDeque::new(), VecDeque::new());
        Self { process, peer, peer_domain, signals, over: None, inbox, notified: [false; 2], transit }
    }

    /// Returns the number of messages that take room.
    pub(super) fn outstanding(&self) -> usize {
        self.inbox.len() + self.transit.iter().filter(|event| matches!(event, Event::Message(_))).count()
    }

    pub(super) fn hold(&mut self, event: Event) {
        let again = matches!(event, Event::Notify) && matches!(self.transit.back(), Some(Event::Notify));
        if !again {
            self.transit.push_back(event);
        }
    }

    /// Delivers what was held, in order.
    pub(super) fn release(&mut self) {
        for event in std::mem::take(&mut self.transit) {
            self.deliver(event);
        }
    }

    pub(super) fn deliver(&mut self, event: Event) {
        match event {
            Event::Message(sent) => {
                self.inbox.push_back(sent);
                self.signals.mail.set(true);
            }
            Event::Notify => {
                for slot in Slot::ALL {
                    if !std::mem::replace(&mut self.notified[slot.index()], true) {
                        self.signals.doorbells[slot.index()].set(true);
                    }
                }
            }
            Event::Over(life) => {
                self.over.get_or_insert(life);
                self.signals.raise_all();
            }
        }
    }

    pub(super) fn take_message(&mut self) -> Option<Sent> {
        let sent = self.inbox.pop_front();
        if self.inbox.is_empty() && self.over.is_none() {
            self.signals.mail.set(false);
        }
        sent
    }

    pub(super) fn is_notified(&self, slot: Slot) -> bool {
        self.notified[slot.index()]
    }

    pub(super) fn drain(&mut self, slot: Slot) {
        self.notified[slot.index()] = false;
        if self.over.is_none() {
            self.signals.doorbells[slot.index()].set(false);
        }
    }
}
