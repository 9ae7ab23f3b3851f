// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The doorbell of a link: its slots share the one doorbell that two domains have in each direction.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    end::{Signal, Signals},
    ids::{EndId, Process},
    world::World,
};
use tombolo_domain::{Deadline, Doorbell, Result, Slot, Woken, wait_readable};

#[derive(Debug)]
pub(super) struct HarshDoorbell {
    world: Arc<World>,
    id: EndId,
    domain: Arc<str>,
    peer_domain: Arc<str>,
    slots: [Signal; 2],
    /// Whether all waits must end, and none may begin any more.
    given_up: AtomicBool,
}

impl HarshDoorbell {
    pub(super) fn new(
        world: &Arc<World>,
        id: EndId,
        process: &Process,
        peer_domain: &Arc<str>,
        signals: &Signals,
    ) -> Self {
        let (domain, peer_domain) = (Arc::clone(&process.domain), Arc::clone(peer_domain));
        let (slots, given_up) = (signals.doorbells.clone(), AtomicBool::new(false));
        Self { world: Arc::clone(world), id, domain, peer_domain, slots, given_up }
    }

    /// Returns why a waiter in `slot` need not sleep.
    fn woken(&self, slot: Slot) -> Option<Woken> {
        match self.world.state().ends.get(&self.id) {
            None => Some(Woken::PeerGone),
            Some(end) if end.is_notified(slot) => Some(Woken::Notified),
            Some(_) if self.given_up.load(Ordering::SeqCst) => Some(Woken::PeerGone),
            Some(end) => end.over.map(|_| Woken::PeerGone),
        }
    }
}

impl Doorbell for HarshDoorbell {
    fn notify(&self, _slot: Slot) {
        let mut state = self.world.state();
        if state.ends.contains_key(&self.id) {
            state.notify_ends(&self.peer_domain, Some(&self.domain));
        }
    }

    fn wait(&self, slot: Slot, deadline: Deadline) -> Result<Woken> {
        loop {
            if let Some(woken) = self.woken(slot) {
                return Ok(woken);
            }
            if !wait_readable(self.fd(slot), deadline)? {
                return Ok(Woken::TimedOut);
            }
        }
    }

    fn drain(&self, slot: Slot) {
        if let Some(end) = self.world.state().ends.get_mut(&self.id) {
            end.drain(slot);
        }
        if self.given_up.load(Ordering::SeqCst) {
            self.slots[slot.index()].set(true);
        }
    }

    fn end_waits(&self) {
        self.given_up.store(true, Ordering::SeqCst);
        self.slots.iter().for_each(|slot| slot.set(true));
    }

    fn fd(&self, slot: Slot) -> BorrowedFd<'_> {
        self.slots[slot.index()].as_fd()
    }
}
