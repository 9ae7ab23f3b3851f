// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listener at which a server waits for its next client. All open listeners are watched together.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::event::epoll;
use tombolo::{Listener, Stream};

static OPEN: LazyLock<OwnedFd> =
    LazyLock::new(|| epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor for the doors of vchans"));

/// Returns the set of all open listeners. An event's data is the [number](ServerListener::id) of its listener.
pub(crate) fn open_listeners() -> &'static OwnedFd {
    &OPEN
}

/// Listener of a server. It begins shut.
#[derive(Debug)]
pub(crate) struct ServerListener {
    listener: Listener<Stream>,
    id: u64,
    /// Bytes of the ring that the server asks of a client.
    ring: u64,
}

impl ServerListener {
    pub(crate) fn new(listener: Listener<Stream>, ring: u64) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        // ORDER: none needed; each listener only needs a number of its own.
        Self { listener, id: LAST.fetch_add(1, Ordering::Relaxed), ring }
    }

    /// Returns a number that no other listener of this process has or had.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Admits the next client.
    pub(crate) fn open(&self) {
        // The descriptor is in no set, or in this one.
        let _ = epoll::add(&*OPEN, self.listener.as_fd(), epoll::EventData::new_u64(self.id), epoll::EventFlags::IN);
    }

    /// Returns the client that waits, and the bytes of the ring that the server asks of it. The listener is shut then.
    pub(crate) fn accept(&mut self) -> Option<(Stream, u64)> {
        let stream = self.listener.try_accept().ok()??;
        self.shut();
        Some((stream, self.ring))
    }

    fn shut(&self) {
        let _ = epoll::delete(&*OPEN, self.listener.as_fd());
    }
}

impl Drop for ServerListener {
    fn drop(&mut self) {
        self.shut();
    }
}
