// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Talks to the broker of this process's kernel: claims keys there, and seeks peers (S-18).

use std::sync::{Arc, Mutex};

use tombolo_domain::{Endpoint, PeerFinder, Rendezvous, Sought};
use tombolo_os::lock::lock;

use crate::{
    claim::{Claimed, service_name},
    random::random_id,
};

/// State of this process's conversation with its broker.
#[derive(Debug, Default)]
pub(crate) struct Machines {
    finder: Option<Box<dyn PeerFinder>>,
    /// Keys whose claims were dropped since.
    withdrawn: Arc<Mutex<Vec<u32>>>,
}

impl Machines {
    /// Returns the conversation with the broker, which begins when it is first needed.
    pub(super) fn finder(&mut self, machines: Option<&dyn Rendezvous>) -> Option<&mut Box<dyn PeerFinder>> {
        if self.finder.is_none() {
            self.finder = machines?.peer_finder(&service_name(random_id()));
        }
        self.known_finder()
    }

    /// Returns the conversation, if it has begun, after telling the broker which claims were dropped.
    fn known_finder(&mut self) -> Option<&mut Box<dyn PeerFinder>> {
        let finder = self.finder.as_mut()?;
        lock(&self.withdrawn).drain(..).for_each(|key| finder.withdraw_key(key));
        Some(finder)
    }

    pub(super) fn claim(&mut self, machines: Option<&dyn Rendezvous>, key: u32) -> Option<Claimed> {
        let withdrawn = Arc::clone(&self.withdrawn);
        let finder = self.finder(machines)?;
        finder.claim_key(key);
        Some(Claimed::of_key(key, withdrawn))
    }

    pub(super) fn seek(&mut self, machines: Option<&dyn Rendezvous>, key: u32, address: [u8; 16]) -> Sought {
        self.finder(machines).map_or(Sought::Nobody, |finder| finder.seek_key(key, address))
    }

    pub(super) fn forget_key(&mut self, key: u32) {
        if let Some(finder) = &mut self.finder {
            finder.forget_key(key);
        }
    }

    /// Accepts a peer that has called, if this process has begun a conversation with its broker.
    pub(super) fn accept_peer(&mut self) -> Option<Box<dyn Endpoint>> {
        self.known_finder()?.accept_peer()
    }
}
