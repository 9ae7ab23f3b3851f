// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a process has under way: its links, and the connections that are talked about.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Weak},
};

use tombolo_domain::Listener;

use super::{
    dials::Dials,
    machines::Machines,
    peer_process::{InheritedSession, PeerProcess},
};
use crate::{
    claim::{Claimed, Claims},
    connection::Connection,
    stage::Stage,
    tuple::Tuple,
};

/// All links of a process, and the connections that are talked about.
#[derive(Debug, Default)]
pub(crate) struct Negotiations {
    pub(super) claims: Option<Arc<Claims>>,
    pub(super) listener: Option<(String, Box<dyn Listener>)>,
    pub(crate) peer_processes: Vec<PeerProcess>,
    pub(super) dials: Dials,
    pub(super) machines: Machines,
    /// Claims of connections that were joined, to be taken back when nobody waits for that.
    pub(super) finished: Vec<Claimed>,
    pub(super) by_tuple: HashMap<Tuple, Weak<Connection>>,
    pub(super) by_id: HashMap<u64, Weak<Connection>>,
    /// Connections whose ring has grown, and may be idle (S-20).
    pub(super) with_large_rings: Vec<Weak<Connection>>,
    /// In a child made by fork: its parent's lines that its connections go over.
    pub(crate) inherited: Vec<InheritedSession>,
}

impl Negotiations {
    /// The connection that a message names, if it is still there and a candidate.
    pub(super) fn named(&self, id: u64) -> Option<Arc<Connection>> {
        self.by_id.get(&id)?.upgrade().filter(|connection| connection.stage() == Stage::Candidate)
    }

    pub(super) fn forget(&mut self, connection: &Connection, id: u64) {
        self.by_id.remove(&id);
        if let Some(tuple) = connection.identity.meeting() {
            self.by_tuple.remove(&tuple);
        }
    }
}

/// Puts a connection where it is found again. Many are closed before they have found each other: those that have gone make room
/// before there is made more.
pub(super) fn remember<K: Eq + Hash>(all: &mut HashMap<K, Weak<Connection>>, key: K, connection: &Arc<Connection>) {
    if all.len() == all.capacity() {
        all.retain(|_, connection| connection.strong_count() > 0);
        all.reserve(all.len() + 1);
    }
    all.insert(key, Arc::downgrade(connection));
}
