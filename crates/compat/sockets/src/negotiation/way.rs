// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Chooses how the peer of a connection is searched for: in the folder, if it is on this kernel, or by the broker, if
//! it may be in another machine (S-18).

use std::sync::Arc;

use tombolo_domain::Sought;

use super::{
    describe_provable,
    machines::Machines,
    sessions::Dialled,
    stage::NegotiationStage,
    table::{Negotiations, remember},
};
use crate::{
    Reason,
    claim::Claimed,
    connection::Connection,
    process::Process,
    tuple::{Role, Tuple, key_of_sequences},
};

/// Means by which the peer is searched for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// The folder.
    Folder,
    /// The broker, with this key.
    Broker(u32),
}

impl Way {
    /// Returns this endpoint's role. Where brokers find the peer, the endpoint that connected seeks. So the hosts'
    /// rules apply to this as to everything that connects.
    pub(super) fn role(self, connection: &Connection, tuple: Tuple) -> Option<Role> {
        match self {
            Self::Folder => tuple.role(),
            Self::Broker(_) if connection.dialled => Some(Role::Seeking),
            Self::Broker(_) => Some(Role::Waiting),
        }
    }
}

/// Returns the means for a connection; `None` while that is not known.
pub(super) fn find_way(all: &mut Machines, process: &Process, connection: &Connection, tuple: Tuple) -> Option<Way> {
    // An address that each kernel has does not name a peer.
    if process.machines.is_none() || tuple.is_local() {
        return Some(Way::Folder);
    }
    if !all.finder(process.machines.as_deref())?.is_near(tuple.peer.host)? {
        return Some(Way::Folder);
    }
    let numbers = process.kernel().sequences(connection.descriptors.fd(), connection.dialled);
    Some(numbers.and_then(key_of_sequences).map_or(Way::Folder, Way::Broker))
}

/// Seeks an endpoint in another kernel (S-18).
pub(super) fn seek_by_broker(
    all: &mut Negotiations,
    process: &Process,
    connection: &Arc<Connection>,
    (key, address): (u32, [u8; 16]),
    id: u64,
    talk: &mut NegotiationStage,
) -> Result<(), Reason> {
    let Sought::At(service) = all.machines.seek(process.machines.as_deref(), key, address) else { return Ok(()) };
    let claims = all.claims(process)?;
    if process.switch.is_off_for(&claims) {
        return Err(Reason::Off);
    }
    let Some(claim) = describe_provable(process.kernel(), connection)? else { return Ok(()) };
    let machines = process.machines.as_deref().ok_or(Reason::Unreachable)?;
    let index = match all.dial(machines, &claims, &service)? {
        Dialled::Is(index) => index,
        Dialled::Later => return Ok(()),
        Dialled::Dead => {
            all.machines.forget_key(key);
            return Ok(());
        }
    };
    let peer_process = &mut all.peer_processes[index];
    // The next call passes over a session that is full.
    if !peer_process.outbox.has_room() || !peer_process.reserve(process, connection)? {
        return Ok(());
    }
    if !peer_process.propose(connection, claim)? {
        return Ok(());
    }
    remember(&mut all.by_id, id, connection);
    *talk = NegotiationStage::Proposed { claim, link: peer_process.number, _claimed: Claimed::nowhere() };
    Ok(())
}
