// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps connections of the host's programs when the broker ends. The descriptor store has the broker's end of the
//! program's socket and the program's eventfds, under a name that identifies the connection (B-16).

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
};

use tombolo_control::Message;
use tombolo_os::{event::drain, lock::lock};

use super::relay::ConnectionEvents;
use crate::{
    discard,
    endpoint::{connections::Agreement, program},
    host::descriptor_store::DescriptorStore,
};

const PREFIX: &str = "call/";

/// A link and one of its generations.
pub type Key = (u32, u32);

/// A connection that an earlier broker left.
#[derive(Debug)]
pub struct StoredConnection {
    /// What was agreed.
    pub made: Agreement,
    /// The broker's end of the program's socket.
    pub socket: OwnedFd,
    /// The program's eventfds.
    pub wire: ConnectionEvents,
}

/// The connections of one account. Without a descriptor store none is kept.
#[derive(Clone, Debug, Default)]
pub struct StoredConnections {
    store: Option<Arc<DescriptorStore>>,
    left: Arc<Mutex<BTreeMap<Key, Vec<StoredConnection>>>>,
}

impl StoredConnections {
    /// Starts with the connections `left` by an earlier broker. New ones are kept by `store`.
    #[must_use]
    pub fn new(store: Arc<DescriptorStore>, left: BTreeMap<Key, Vec<StoredConnection>>) -> Self {
        Self { store: Some(store), left: Arc::new(Mutex::new(left)) }
    }

    /// Takes out the connections that an earlier broker left on a link.
    #[must_use]
    pub fn take_stored(&self, link: Key) -> Vec<StoredConnection> {
        lock(&self.left).remove(&link).unwrap_or_default()
    }

    /// Sends a message about the peer to the programs of all connections that are not taken up yet, on links for which
    /// `are_meant` is true.
    pub fn tell_programs(&self, message: &Message, are_meant: impl Fn(Key) -> bool) {
        let left = lock(&self.left);
        let connections = left.iter().filter(|(link, _)| are_meant(**link)).flat_map(|(_, connections)| connections);
        connections.for_each(|connection| _ = program::send(connection.socket.as_fd(), 0, message.clone(), &[]));
    }

    /// Ends the connections of a link that are not taken up yet, and never will be.
    pub fn end_connections(&self, link: Key) {
        end_connections(self.store.as_deref(), link, self.take_stored(link));
    }

    /// Ends such connections of all links.
    pub fn end_all(&self) {
        let left = std::mem::take(&mut *lock(&self.left));
        left.into_iter().for_each(|(link, connections)| end_connections(self.store.as_deref(), link, connections));
    }

    /// Keeps a connection. It is safe when this returns.
    ///
    /// # Errors
    /// The descriptor store is gone, or full.
    pub fn store_connection(
        &self,
        link: Key,
        made: &Agreement,
        socket: BorrowedFd<'_>,
        wire: &ConnectionEvents,
    ) -> io::Result<()> {
        let Some(store) = &self.store else { return Ok(()) };
        let to = wire.to.iter().map(|event| event.as_fd());
        let descriptors: Vec<_> = to.chain(wire.from.iter().map(AsFd::as_fd)).collect();
        store.store_descriptors(&name(link, made), &[&[socket][..], &descriptors].concat())
    }

    /// Forgets a connection that is over.
    pub fn forget(&self, link: Key, made: &Agreement) {
        forget(self.store.as_deref(), link, made);
    }
}

fn forget(store: Option<&DescriptorStore>, link: Key, made: &Agreement) {
    if let Some(Err(error)) = store.map(|store| store.forget(&name(link, made))) {
        tracing::warn!("a connection that is over stays with the descriptor store: {error}");
    }
}

/// Ends connections that an earlier broker left and that no account takes up (V-7). Their programs are told that they
/// are over, and the descriptor store forgets them.
pub(crate) fn end_connections(store: Option<&DescriptorStore>, link: Key, connections: Vec<StoredConnection>) {
    for StoredConnection { made, socket, wire } in connections {
        let _ = program::send(socket.as_fd(), 0, Message::Close {}, &[]);
        discard::end(socket.as_fd());
        // The program may have blocked a lane in a write. Without a reader, that write would never return.
        wire.to.iter().for_each(|to| _ = drain(to));
        forget(store, link, &made);
    }
}

/// Returns the name under which a connection is kept.
fn name((link, generation): Key, made: &Agreement) -> String {
    let Agreement { serial, own, theirs, channel } = made;
    format!("{PREFIX}{link}/{generation}/{serial}/{}/{}/{}/{}/{channel}", own.0, own.1, theirs.0, theirs.1)
}

/// Returns the connection that is kept under a name; none if the name belongs to something else.
#[must_use]
pub fn parse(name: &str) -> Option<(Key, Agreement)> {
    let numbers = name.strip_prefix(PREFIX)?.split('/').map(|number| number.parse().ok());
    let numbers: [u64; 8] = numbers.collect::<Option<Vec<_>>>()?.try_into().ok()?;
    let [link, generation, serial, own, own_len, theirs, theirs_len, channel] = numbers;
    let (link, generation) = (link.try_into().ok()?, generation.try_into().ok()?);
    let (serial, channel) = (serial.try_into().ok()?, channel.try_into().ok()?);
    Some(((link, generation), Agreement { serial, own: (own, own_len), theirs: (theirs, theirs_len), channel }))
}

impl StoredConnection {
    /// Restores a connection from what the descriptor store kept; none if something is missing.
    #[must_use]
    pub fn from_descriptors(made: Agreement, descriptors: Vec<OwnedFd>) -> Option<Self> {
        let [socket, a, b, c, d, e, f] = <[OwnedFd; 7]>::try_from(descriptors).ok()?;
        Some(Self { made, socket, wire: ConnectionEvents { to: [a, b, c].map(Arc::new), from: [d, e, f] } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b16_name_of_a_connection_says_all_that_was_agreed() {
        let made = Agreement { serial: 7, own: (4096, 8192), theirs: (1 << 29, 1 << 20), channel: 508 };
        assert_eq!(parse(&name((3, 2), &made)), Some(((3, 2), made)));
        for other in [
            "memory/3/2",
            "call/3/2",
            "call/3/2/7/4096/8192/1/2/70000",
            "call/a/2/7/1/2/3/4/5",
            "call/1/2/3/4/5/6/7/8/9",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
