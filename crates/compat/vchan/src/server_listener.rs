// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where a server waits for its next client. Doors that are open are watched together.

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

/// The set of all doors that are open. An event's data is the [number](ServerListener::id) of its door.
pub(crate) fn open_listeners() -> &'static OwnedFd {
    &OPEN
}

/// Where a server waits. It begins shut.
#[derive(Debug)]
pub(crate) struct ServerListener {
    listener: Listener<Stream>,
    id: u64,
    /// What the server asks of a client.
    ring: u64,
}

impl ServerListener {
    pub(crate) fn new(listener: Listener<Stream>, ring: u64) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        // ORDER: none needed; each door only wants a number of its own.
        Self { listener, id: LAST.fetch_add(1, Ordering::Relaxed), ring }
    }

    /// A number that no other door of this process has or had.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Lets the next client in.
    pub(crate) fn open(&self) {
        // What listens is in no set, or in ours.
        let _ = epoll::add(&*OPEN, self.listener.as_fd(), epoll::EventData::new_u64(self.id), epoll::EventFlags::IN);
    }

    /// The client that waits, and the bytes of the ring that the server asks of it. The door is shut then.
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
